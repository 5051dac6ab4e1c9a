"""Ignore files, held against git itself."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.search.ignore import read_ignore

NAMES = ["a", "b", "ab", "a.c", "b.c", ".x", "[a]"]
segment = st.sampled_from("a b * a* *.c ? ** [ab] [!a] *b* \\a .x [^b].c a**b a*b*c *a?* *[!.]*c".split())
pattern = st.builds(
    lambda no, root, parts, folder: no + root + "/".join(parts) + folder,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(segment, min_size=1, max_size=3),
    st.sampled_from(["", "/"]),
)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)
path = st.builds(str.__add__, st.sampled_from(["", "sub/"]), names)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def git_ignores(root: Path, rules: dict[str, str], paths: list[str]) -> set[str]:
    for folder in ("", "sub"):
        path = root / folder / ".gitignore"
        path.parent.mkdir(exist_ok=True)
        path.write_text(rules.get(folder, ""), encoding="utf-8")
    command = ["git", "-C", str(root), "-c", "core.excludesFile=/dev/null"]
    command += ["check-ignore", "--no-index", "-z", "--stdin"]
    process = subprocess.run(command, input="\0".join(paths).encode(), capture_output=True, check=False)
    assert process.returncode in (0, 1), process.stderr
    return set(process.stdout.decode().split("\0")) - {""}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(pattern, max_size=5), st.lists(pattern, max_size=2), st.lists(path, min_size=1, max_size=12, unique=True)
)
def test_as_git_does(repository: Path, top: list[str], nested: list[str], paths: list[str]) -> None:
    rules = {"": "\n".join(top), "sub": "\n".join(nested)}
    files = {".gitignore": rules[""].encode(), "sub/.gitignore": rules["sub"].encode()}
    ignore = read_ignore(files)
    assert {path for path in paths if ignore.ignored(path)} == git_ignores(repository, rules, paths)


def test_defaults_and_their_exception() -> None:
    assert read_ignore({}).ignored("web/node_modules/x/index.js")
    assert not read_ignore({".gitignore": b"!*.lock\n"}).ignored("deps/poetry.lock")
    assert read_ignore({}).ignored("poetry.lock") and not read_ignore({}).ignored("src/lock.py")


@pytest.mark.parametrize("unit", ["*a", "*[(?]", "*?", "*\\(", "*[!b]", "**a", "****"])
def test_no_pattern_takes_long(unit: str) -> None:
    """One that tries all ways in which stars may match never ends here."""
    hostile = f"{12 * unit}*b\n" + "**/" * 60 + "x\n" + "a\n" * 3000 + "c\n"
    ignore = read_ignore({".gitignore": hostile.encode()})
    assert not ignore.ignored("/".join(["a(" * 60] * 40))
    assert ignore.ignored("a") and not ignore.ignored("c"), "rules beyond the bound do not apply"
