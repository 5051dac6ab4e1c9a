"""A change set as a patch: git applies it in both directions."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.carry import EXECUTABLE, PLAIN, Blob
from composer_nb.production.diff import patch
from tests.folders import write

Tree = dict[str, Blob]
NAMES = ["a", "a/b", "a/c d", "e", "e\tf", 'g"h', "ä", "i\\j/k", " l", "m\n"]
CONTENTS = [b"", b"x", b"x\n", b"x\ny\n", b"\r\n\x0c\x85", b"\xff\n", b"\0\1", b"- x\n+ y\n@@ z\n"]
CONTENTS.append(bytes(range(256)) * 40)
BLOBS = st.builds(
    Blob, data=st.sampled_from(CONTENTS) | st.lists(st.sampled_from([b"p\n", b"q\n", b"\n", b"r"])).map(b"".join),
    mode=st.sampled_from([PLAIN, EXECUTABLE]),
)  # fmt: skip


def possible(tree: Tree) -> bool:
    return not any(inner.startswith(path + "/") for path in tree for inner in tree)


TREES = st.dictionaries(st.sampled_from(NAMES), BLOBS, max_size=6).filter(possible)


def lay(root: Path, tree: Tree) -> None:
    write(root, {path: blob.data for path, blob in tree.items()})
    for path, blob in tree.items():
        (root / path).chmod(0o755 if blob.mode == EXECUTABLE else 0o644)


def contents(root: Path) -> Tree:
    tree: Tree = {}
    for path in root.rglob("*"):
        name = path.relative_to(root).as_posix()
        if path.is_file():
            tree[name] = Blob(data=path.read_bytes(), mode=EXECUTABLE if os.access(path, os.X_OK) else PLAIN)
    return tree


def apply(root: Path, text: bytes, *more: str) -> None:
    command, env = ["git", "apply", *more, "-"], {"PATH": os.environ["PATH"]}
    process = subprocess.run(command, cwd=root, input=text, capture_output=True, env=env, check=False)
    assert process.returncode == 0, (process.stderr.decode(), text.decode("utf-8", "replace"))


@settings(max_examples=25, deadline=None)
@given(TREES, TREES)
def test_patch_applies_and_reverses(tmp_path_factory: pytest.TempPathFactory, before: Tree, after: Tree) -> None:
    root = tmp_path_factory.mktemp("tree")
    lay(root, before)
    paths = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    changes = {path: after.get(path) for path in paths}
    text = patch(before, changes)
    assert bool(text) == bool(changes)
    if text:
        apply(root, text)
        assert contents(root) == after
        apply(root, text, "-R")
    assert contents(root) == before


def test_for_eyes_binary_files_are_told_by_size() -> None:
    old, new = Blob(data=b"\0" * 9), Blob(data=b"\0" * 900)
    text = patch({"logo.png": old}, {"logo.png": new}, whole=False)
    assert b"-Binary file: 9 bytes" in text and b"+Binary file: 900 bytes" in text and b"GIT binary" not in text


def test_nothing_of_the_machine_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global setting, an attribute and a variable would change or execute something."""
    (tmp_path / ".gitconfig").write_text(f"[diff]\n\texternal = touch {tmp_path}/ran\n\tnoprefix = true\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", f"touch {tmp_path}/ran")
    attributes = Blob(data=b"* -diff\n")
    text = patch({".gitattributes": attributes, "a": Blob(data=b"1\n")}, {"a": Blob(data=b"2\n")})
    assert b"--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n" in text and not (tmp_path / "ran").exists()
