"""What of a user's repository an agent sees, and how its changes come back."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.product import checkout
from composer_nb.harness.product.checkout import Conflict, accept, carry_back, changed, read_checkout, show
from composer_nb.harness.sandboxes.contract import Backend


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    for path, text in {
        "a.py": "x = 1\n", "sub/b.py": "y = 1\n", ".gitignore": ".env\nbuilt/\n", ".env": "KEY=1", "built/o": "o",
        ".git/config": "[core]", "sub/__pycache__/b.pyc": "b", "run.sh": "#!/bin/sh\n",
    }.items():  # fmt: skip
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).write_text(text)
    (made / "run.sh").chmod(0o755)
    (made / "out").symlink_to("/etc/passwd")
    (made / "folder").symlink_to("/etc")
    return made


def test_what_an_agent_sees(root: Path, backend: Backend) -> None:
    seen = read_checkout(root)
    assert set(seen.files) == {"a.py", "sub/b.py", ".gitignore", "run.sh"} and seen.executable == {"run.sh"}
    assert (
        seen.left_out[".env"] == "ignored"
        and seen.left_out["out"] == "a link or device"
        and seen.left_out[".git"] == "history"
    )
    with seen.start(backend) as box:
        assert box.download() == dict(seen.files)
        assert {entry.name: entry.mode & 0o777 for entry in box.entries()}["run.sh"] == 0o755


def test_changes_come_back_and_nothing_else_does(root: Path) -> None:
    seen = read_checkout(root)
    after = {
        **seen.files,
        "a.py": b"x = 2\n",
        "new/c.py": b"z\n",
        "run.sh": b"#!/bin/bash\n",
        ".composer_nb/log": b"",
        "p.pyc": b"",
    }
    del after["sub/b.py"]
    changes = changed(seen, after)
    assert list(changes) == ["a.py", "new/c.py", "run.sh", "sub/b.py"] and changes["sub/b.py"] is None
    accept(seen, changes)
    assert (
        (root / "a.py").read_text() == "x = 2\n"
        and (root / "new/c.py").read_text() == "z\n"
        and not (root / "sub/b.py").exists()
    )
    assert os.access(root / "run.sh", os.X_OK) and (root / ".env").read_text() == "KEY=1"
    assert {path.name for path in root.iterdir()} >= {"a.py", "new", "run.sh"} and not list(root.glob(".a.py.*"))


@pytest.mark.parametrize("what", ["edited", "deleted", "linked", "there", "folder", "leads out"])
def test_a_conflict_changes_nothing(root: Path, what: str) -> None:
    seen = read_checkout(root)
    changes: dict[str, bytes | None] = {"a.py": b"x = 2\n", "sub/b.py": b"y = 2\n", "new/c.py": b"z\n"}
    if what == "edited":
        (root / "sub/b.py").write_text("mine\n")
    elif what == "deleted":
        (root / "sub/b.py").unlink()
    elif what == "linked":
        (root / "new").symlink_to("/tmp")
    elif what == "there":
        changes[".env"] = b"KEY=2"
    elif what == "folder":
        (root / "new").write_text("a file")
    else:
        changes["../c.py"] = b""
    with pytest.raises(Conflict, match=r"b\.py|c\.py|\.env"):
        accept(seen, changes)
    assert (root / "a.py").read_text() == "x = 1\n" and (root / ".env").read_text() == "KEY=1"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["a.py", "sub/b.py", "n", "m/k"]), st.none() | st.text(max_size=30), max_size=4))
def test_the_diff_is_one_that_git_applies(
    tmp_path_factory: pytest.TempPathFactory, edits: dict[str, str | None]
) -> None:
    root = tmp_path_factory.mktemp("repository")
    (root / "sub").mkdir()
    (root / "a.py").write_bytes(b"x = 1\ny = 2")
    (root / "sub/b.py").write_bytes(b"y = 1\nz = 3\n")
    seen = read_checkout(root)
    after = {path: data for path, data in seen.files.items() if edits.get(path, "") is not None}
    after |= {path: text.encode() for path, text in edits.items() if text}
    changes = changed(seen, after)
    diff = show(seen, changes).encode()
    if diff:
        subprocess.run(
            ["git", "apply", "--unsafe-paths", "-"], cwd=root, input=diff, check=True, env={"PATH": os.environ["PATH"]}
        )
    assert {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()} == after


def after_commands(root: Path, backend: Backend, command: str) -> tuple[dict[str, bytes | None], set[str]]:
    seen = read_checkout(root)
    with seen.start(backend) as box:
        box.exec(["bash", "-c", command])
        left, others = carry_back(box)
    return changed(seen, left, others), others


@pytest.mark.parametrize(
    "command", ["chmod 000 sub", "chmod 000 a.py", "rm a.py && ln -s run.sh a.py", "rm a.py; mkfifo a.py"]
)
def test_what_is_there_in_another_way_is_not_deleted(root: Path, backend: Backend, command: str) -> None:
    changes, others = after_commands(root, backend, command)
    assert changes == {} and others == ({"a.py"} if "rm" in command else set())


def test_a_folder_that_became_a_link_is_not_deleted(root: Path, backend: Backend) -> None:
    assert after_commands(root, backend, "mv sub other && ln -s other sub") == ({"other/b.py": b"y = 1\n"}, {"sub"})


def test_what_stayed_behind_does_not_come_back(root: Path, backend: Backend) -> None:
    command = (
        "mkdir built; echo o > built/new; echo KEY > .env; echo x > out; rm -rf .git; git init -q .; echo z > c.py"
    )
    assert after_commands(root, backend, command)[0] == {"c.py": b"z\n"}


def test_a_worktrees_history_stays_where_it_is(root: Path, backend: Backend) -> None:
    shutil.rmtree(root / ".git")
    (root / ".git").write_text("gitdir: /elsewhere\n")
    assert ".git" not in read_checkout(root).files
    assert after_commands(root, backend, "git init -q . && echo 1 > .git/x")[0] == {}
    assert (root / ".git").read_text() == "gitdir: /elsewhere\n"


def test_bad_repositories_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no folder here"):
        read_checkout(tmp_path / "none")
    with pytest.raises(ValueError, match="holds no file"):
        read_checkout(tmp_path)
    (tmp_path / "f").write_text("text")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        read_checkout(tmp_path / "f")
    monkeypatch.setattr(checkout, "MAX_BYTES", 3)
    with pytest.raises(ValueError, match="more than .* files or .*cursorignore"):
        read_checkout(tmp_path)
