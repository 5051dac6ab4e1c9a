"""What of a user's repository an agent sees, and how its changes come back."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.carry import EXECUTABLE, Blob, carry_back
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.production import checkout
from composer_nb.production.accept import Changes, Conflict
from composer_nb.production.accept import accept as accept_changes
from composer_nb.production.checkout import Checkout, changed, read_checkout
from composer_nb.production.diff import patch
from tests.folders import write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = write(tmp_path / "repository", {
        "a.py": "x = 1\n", "sub/b.py": "y = 1\n", ".gitignore": ".env\nbuilt/\n", ".env": "KEY=1", "built/o": "o",
        ".git/config": "[core]", "sub/__pycache__/b.pyc": "b", "run.sh": "#!/bin/sh\n",
    })  # fmt: skip
    (folder / "run.sh").chmod(0o755)
    (folder / "out").symlink_to("/etc/passwd")
    (folder / "folder").symlink_to("/etc")
    return folder


def test_what_an_agent_sees(root: Path, backend: Backend) -> None:
    snapshot = read_checkout(root)
    assert set(snapshot.files) == {"a.py", "sub/b.py", ".gitignore", "run.sh"} and snapshot.executable == {"run.sh"}
    assert snapshot.left_out[".env"] == "ignored" and snapshot.left_out["out"] == "a link or device"
    assert snapshot.left_out[".git"] == "history"
    with snapshot.start(backend) as box:
        files = {path: data for path, data in box.download().items() if not path.startswith(".git/")}
        assert files == dict(snapshot.files)
        assert {entry.name: entry.mode & 0o777 for entry in box.entries()}["run.sh"] == 0o755


def seen_blobs(snapshot: Checkout) -> dict[str, Blob]:
    return {path: blob for path in snapshot.files if (blob := snapshot.blob(path))}


def accept(snapshot: Checkout, changes: Changes) -> None:
    accept_changes(snapshot.root, seen_blobs(snapshot), changes)


def contents(root: Path) -> dict[str, tuple[str, bytes, bool]]:
    """Return everything in a folder: kind, contents, whether it can be executed."""
    entries: dict[str, tuple[str, bytes, bool]] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            entries[name] = "link", os.fsencode(os.readlink(path)), False
        elif path.is_file():
            entries[name] = "file", path.read_bytes(), os.access(path, os.X_OK)
        else:
            entries[name] = "folder", b"", False
    return entries


def test_changes_come_back_and_nothing_else_does(root: Path) -> None:
    snapshot = read_checkout(root)
    after = seen_blobs(snapshot) | {
        "a.py": Blob(data=b"x = 2\n"),
        "new/c.py": Blob(data=b"z\n"),
        "run.sh": Blob(data=b"#!/bin/bash\n", mode=EXECUTABLE),
        ".composer_nb/log": Blob(data=b""),
        "p.pyc": Blob(data=b""),
    }
    del after["sub/b.py"]
    changes, others = changed(snapshot, after)
    assert list(changes) == ["a.py", "new/c.py", "run.sh", "sub/b.py"] and changes["sub/b.py"] is None and not others
    (root / "a.py").chmod(0o600)
    owner = os.geteuid() or 12345  # only root gives files away
    os.chown(root / "a.py", owner, -1)
    accept(snapshot, changes)
    assert (root / "a.py").stat().st_uid == owner
    assert (root / "a.py").read_text() == "x = 2\n" and (root / "new/c.py").read_text() == "z\n"
    assert not (root / "sub/b.py").exists() and (root / "a.py").stat().st_mode & 0o777 == 0o600
    assert os.access(root / "run.sh", os.X_OK) and (root / ".env").read_text() == "KEY=1"
    assert not list(root.glob(".composer_nb*"))


CONFLICTS: dict[str, Callable[[Path], object]] = {
    "edited": lambda root: (root / "sub/b.py").write_text("mine\n"),
    "deleted": lambda root: (root / "sub/b.py").unlink(),
    "permissions": lambda root: (root / "sub/b.py").chmod(0o755),
    "linked": lambda root: (root / "new").symlink_to("/tmp"),
    "a file in place of a folder": lambda root: (root / "new").write_text("a file"),
    ".env": lambda root: None,
    "../c.py": lambda root: None,
}


@pytest.mark.parametrize("conflict", CONFLICTS)
def test_a_conflict_changes_nothing(root: Path, conflict: str) -> None:
    snapshot = read_checkout(root)
    texts = {"a.py": b"x = 2\n", "sub/b.py": b"y = 2\n", "new/c.py": b"z\n"}
    texts |= {conflict: b"k"} if "." in conflict else {}
    CONFLICTS[conflict](root)
    with pytest.raises(Conflict, match=r"b\.py|c\.py|\.env"):
        accept(snapshot, {path: Blob(data=data) for path, data in texts.items()})
    assert (root / "a.py").read_text() == "x = 1\n" and (root / ".env").read_text() == "KEY=1"


COMMANDS = {
    "binary": r"printf '\0\1\377' > logo.png; head -c 70000 /dev/urandom > new.bin; printf '\0' >> a.py",
    "sqlite": "python3 -c \"import sqlite3; c = sqlite3.connect('d.db'); c.execute('create table t (x)'); c.commit()\"",
    "a file becomes a folder": "rm a.py; mkdir a.py; echo 1 > a.py/one; echo 2 > a.py/two",
    "a folder becomes a file": "rm -r sub; echo 1 > sub",
    "modes": "chmod +x a.py; chmod -x run.sh; echo '#!/bin/sh' > new.sh; chmod 750 new.sh",
    "names": r"""mkdir 'a b'; echo 1 > 'a b/c d'; echo 2 > $'tab\there'; echo 3 > $'\377'; echo 4 > 'q"q'; : > empty""",
    "gone": "rm -r sub run.sh",
}


@pytest.mark.parametrize("case", COMMANDS)
def test_what_is_shown_kept_and_accepted_is_one(root: Path, tmp_path: Path, backend: Backend, case: str) -> None:
    shutil.rmtree(root / "sub/__pycache__")
    snapshot = read_checkout(root)
    with snapshot.start(backend) as box:
        result = box.exec(["bash", "-ec", COMMANDS[case]])
        assert result.exit_code == 0, result.stderr
        changes, others = changed(snapshot, *carry_back(box))
    assert changes and not others
    before = contents(root)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, symlinks=True)
    whole_diff, short_diff = (patch(seen_blobs(snapshot), changes, full) for full in (True, False))
    diffs = (whole_diff, short_diff)
    heads = [[line for line in text.split(b"\n") if line.startswith(b"diff --git ")] for text in diffs]
    assert heads[0] == heads[1] and len(set(heads[0])) == len(changes)
    git_env = {"PATH": os.environ["PATH"]}
    subprocess.run(["git", "apply", "-"], cwd=copy, input=whole_diff, check=True, env=git_env)
    accept(snapshot, changes)
    assert contents(root) == contents(copy) != before
    subprocess.run(["git", "apply", "-R", "-"], cwd=copy, input=whole_diff, check=True, env=git_env)
    assert contents(copy) == before


@pytest.mark.parametrize("call", range(1, 30))
def test_what_fails_in_the_middle_is_undone(root: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation on the file system fails once."""
    shutil.rmtree(root / "sub/__pycache__")
    snapshot, before = read_checkout(root), contents(root)
    changes = {
        "a.py": None, "a.py/x": Blob(data=b"x"), "deep/er/c.py": Blob(data=b"z\n"), "run.sh": Blob(data=b"r\n"),
        "sub": Blob(data=b"s"), "sub/b.py": None,
    }  # fmt: skip
    calls = 0

    def failing(name: str) -> None:
        real = getattr(os, name)

        def failing_call(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(28, "no space left on device")
            return real(*args, **more)

        monkeypatch.setattr(os, name, failing_call)

    for name in ("rename", "mkdir", "rmdir", "fchmod"):
        failing(name)
    try:
        accept(snapshot, changes)
    except OSError:
        monkeypatch.undo()
        assert contents(root) == before
    else:
        monkeypatch.undo()
        assert (root / "a.py/x").read_text() == "x" and (root / "sub").read_text() == "s"


@pytest.mark.parametrize("hidden_path", ["sub/__pycache__/b.pyc", "sub/.env", "sub/mine.py"])
def test_a_folder_with_what_the_agent_did_not_see_becomes_no_file(root: Path, hidden_path: str) -> None:
    shutil.rmtree(root / "sub/__pycache__")
    snapshot = read_checkout(root)
    (root / hidden_path).parent.mkdir(exist_ok=True)
    (root / hidden_path).write_text("mine")
    before = contents(root)
    with pytest.raises(Conflict, match=f"sub: is a folder with {Path(hidden_path).name}"):
        accept(snapshot, {"sub": Blob(data=b"s"), "sub/b.py": None})
    assert contents(root) == before


def after_commands(root: Path, backend: Backend, command: str) -> tuple[dict[str, Blob | None], frozenset[str]]:
    snapshot = read_checkout(root)
    with snapshot.start(backend) as box:
        box.exec(["bash", "-c", command])
        return changed(snapshot, *carry_back(box))


def test_what_stayed_behind_does_not_come_back(root: Path, backend: Backend) -> None:
    shutil.rmtree(root / ".git")
    (root / ".git").write_text("gitdir: /elsewhere\n")  # of a worktree
    assert ".git" not in read_checkout(root).files
    command = (
        "mkdir built; echo o > built/new; echo KEY > .env; echo x > out; rm -rf .git; git init -q .; echo z > c.py"
    )
    assert after_commands(root, backend, command)[0] == {"c.py": Blob(data=b"z\n")}
    assert (root / ".git").read_text() == "gitdir: /elsewhere\n"


@pytest.mark.parametrize(
    ("command", "odd"),
    [
        ("chmod 000 sub", set()),
        ("rm a.py && ln -s /etc/passwd a.py", {"a.py"}),
        ("rm a.py; mkfifo a.py", {"a.py"}),
        ("ln -s sub/b.py new; mkdir deep; ln -s ../sub/b.py deep/er", {"new", "deep/er"}),
    ],
)
def test_links_and_the_like_neither_come_back_nor_delete(
    root: Path, backend: Backend, command: str, odd: set[str]
) -> None:
    assert after_commands(root, backend, command) == ({}, odd)


def test_git_works_in_the_copy_and_nothing_of_it_comes_back(root: Path, backend: Backend, tmp_path: Path) -> None:
    for name in ("pre-commit", "post-commit", "post-index-change"):
        hook = root / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        hook.chmod(0o755)
    run = f"touch {tmp_path}/ran; cat"
    (root / ".git" / "config").write_text(f'[core]\nfsmonitor = "{run}"\n[filter "f"]\nclean = "{run}"\n')
    (root / ".gitattributes").write_text("*.py filter=f\n")
    snapshot = read_checkout(root)
    with snapshot.start(backend) as box:

        def git(line: str) -> str:
            result = box.exec(["sh", "-c", f"git {line}"])
            assert result.exit_code == 0, result.stderr
            return result.stdout.decode()

        assert git("rev-list --count HEAD") == "1\n" and git("status --porcelain") == ""
        assert set(git("ls-files").splitlines()) == set(snapshot.files)
        box.write("a.py", b"x = 2\n")
        box.write("new/.git/config", b"[core]\n")
        assert "-x = 1\n+x = 2\n" in git("diff")
        git("commit -qam 'the fix' && git checkout -qb other && rm .git/HEAD && mkfifo .git/HEAD")
        changes, others = changed(snapshot, *carry_back(box))
    assert changes == {"a.py": Blob(data=b"x = 2\n")} and not others
    assert not (tmp_path / "ran").exists()


def test_bad_repositories_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="holds no file"):
        read_checkout(tmp_path)
    (tmp_path / "f").write_text("text")
    monkeypatch.setattr(checkout, "MAX_BYTES", 3)
    with pytest.raises(ValueError, match="more than .* files or .*cursorignore"):
        read_checkout(tmp_path)


def test_an_undoing_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = write(tmp_path / "repository", {"a": "precious\n", "b": "2\n"})
    rename = os.rename

    def failing(source: Any, target: Any) -> None:
        if str(target) == str(root / "b") and "new-" in str(source):
            (root / "a" / "user.txt").write_text("by an editor")
            raise OSError(28, "No space left on device")
        rename(source, target)

    snapshot = read_checkout(root)
    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="No space left on device.*not all could be put back, it lies in"):
        accept(snapshot, {"a": None, "a/x": Blob(data=b"9\n"), "b": Blob(data=b"3\n")})
    assert "precious\n" in [file.read_text() for file in root.rglob("*") if file.is_file()]


def test_ignore_files_above_a_named_folder_hold(tmp_path: Path):
    files = {"pkg/a": "x", "pkg/secrets": "key", "pkg/sub/b": "y", "pkg/sub/c": "z"}
    root = write(tmp_path / "outer" / "repository", files)
    (root / ".git").mkdir()
    (root / ".gitignore").write_text("secrets\n/pkg/sub/c\npkg/\n")
    (root.parent / ".gitignore").write_text("a\n")  # of another repository, or of none
    snapshot = read_checkout(root / "pkg")
    assert set(snapshot.files) == {"a", "sub/b"}, "the folder itself was named, so that it is ignored says nothing"
    after = {"a": Blob(data=b"x"), "sub/b": Blob(data=b"y"), "secrets": Blob(data=b"other")}
    assert not changed(snapshot, after)[0]
