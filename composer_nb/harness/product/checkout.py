"""A user's own repository: what of it goes into the sandbox, and what comes back out of it.

The agent works on a copy. Nothing of the repository is executed or shown to git outside of the sandbox; links are not followed,
neither in reading nor in writing. What ignore files name, history and caches stay behind, so that keys in an ignored `.env`
do not get into a conversation; and what would have stayed behind does not come back. Changes come back only when
the user accepts them, and only if the files that they touch are still what the agent saw.
"""

from __future__ import annotations

import difflib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.cursor.session import FOLDER
from composer_nb.harness.grading.diff import CACHE_ENDINGS, CACHE_FOLDERS
from composer_nb.harness.making.repository import HISTORY
from composer_nb.harness.patch import split_lines
from composer_nb.harness.sandboxes.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.search.ignore import NAMES, Ignore, read_ignore

MAX_FILE_BYTES = 4 << 20
MAX_BYTES = 128 << 20
MAX_FILES = 20_000


class Conflict(ValueError):
    """A file that an agent changed is not any more what the agent saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """What an agent gets to see of a folder."""

    root: Path
    files: Mapping[str, bytes]
    """By relative POSIX path; bytes of names that are not UTF-8 are lone surrogates."""
    executable: frozenset[str]
    left_out: Mapping[str, str]
    """Path of a file or folder -> why it stays behind."""
    ignore: Ignore

    @property
    def spec(self) -> SandboxSpec:
        """A sandbox with room for it three times over."""
        usual, size = SandboxSpec(), sum(map(len, self.files.values()))
        disk = max(usual.disk_bytes, 3 * size)
        return SandboxSpec(
            disk_bytes=disk,
            memory_bytes=max(usual.memory_bytes, 2 * disk + (384 << 20)),
            inodes=max(usual.inodes, 3 * len(self.files)),
        )

    def start(self, backend: Backend, image: str = "") -> Sandbox:
        """A new sandbox that holds it. Raises SandboxFailure."""
        box = backend.create(replace(self.spec, image=image))
        try:
            box.upload({path: data for path, data in self.files.items() if path not in self.executable})
            for path in sorted(self.executable):
                box.write(path, self.files[path], mode=0o755)
        except OSError as error:
            box.destroy()
            raise SandboxFailure(f"{self.root}: does not fit into a sandbox: {error}") from error
        except BaseException:
            box.destroy()
            raise
        return box


def read_checkout(root: Path) -> Checkout:
    """Raises FileNotFoundError or NotADirectoryError, and ValueError for what is empty or larger than the limits."""
    if not root.exists():
        raise FileNotFoundError(f"{root}: no folder here; give the repository that the agent shall work on")
    if not root.is_dir():
        raise NotADirectoryError(f"{root}: not a folder; give the repository that the agent shall work on")
    left_out: dict[str, str] = {}
    found = dict(_walk(root, left_out))
    rules = {path: (root / path).read_bytes() for path in found if PurePosixPath(path).name in NAMES}
    ignore = read_ignore(rules, default=b"node_modules/\n.venv/\n")
    files: dict[str, bytes] = {}
    total = 0
    for path, status in sorted(found.items()):
        if ignore.ignored(path):
            left_out[path] = "ignored"
            continue
        if status.st_size > MAX_FILE_BYTES:
            left_out[path] = f"larger than {MAX_FILE_BYTES >> 20} MiB"
            continue
        files[path] = _read(root, path)
        total += len(files[path])
        if total > MAX_BYTES or len(files) > MAX_FILES:
            raise ValueError(
                f"{root}: more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB; name the folder in it that matters, or let "
                ".gitignore or .cursorignore leave some out"
            )
    if not files:
        raise ValueError(f"{root}: holds no file that an agent could see ({len(left_out)} left out)")
    executable = frozenset(path for path in files if found[path].st_mode & 0o100)
    return Checkout(root=root.resolve(), files=files, executable=executable, left_out=left_out, ignore=ignore)


def _walk(root: Path, left_out: dict[str, str]) -> Iterator[tuple[str, os.stat_result]]:
    for at, folders, names in os.walk(root):
        here = Path(at).relative_to(root)
        for folder in list(folders):
            why = "a link" if (Path(at) / folder).is_symlink() else ""
            why = why or ("history" if folder in HISTORY else "a cache" if folder in {*CACHE_FOLDERS, FOLDER} else "")
            if not why and (Path(at) / folder / "pyvenv.cfg").is_file():
                why = "a virtual environment"
            if why:
                folders.remove(folder)
                left_out[(here / folder).as_posix()] = why
        for name in names:
            path, status = (here / name).as_posix(), (Path(at) / name).lstat()
            if name in HISTORY:  # of a worktree or a submodule
                left_out[path] = "history"
            elif not stat.S_ISREG(status.st_mode):
                left_out[path] = "a link or device"
            elif name.endswith(CACHE_ENDINGS):
                left_out[path] = "a cache"
            else:
                yield path, status


def _read(root: Path, path: str) -> bytes:
    with open(os.open(root / path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)


def carry_back(box: Sandbox, max_bytes: int = 64 << 20) -> tuple[dict[str, bytes], set[str]]:
    """What an agent left: the contents of all files, and the paths of what is neither file nor folder. Ends all that runs.

    Files that it made unreadable are read all the same: they are there. Raises OSError for more than can be carried.
    """
    box.end_all()
    box.exec(["chmod", "-R", "u+rwX", "--", "."], output_bytes=1024)
    found = box.exec(["find", ".", "-not", "-type", "f", "-not", "-type", "d", "-print0"], output_bytes=4 << 20)
    if found.exit_code or found.truncated:
        raise OSError(errno.EFBIG, "its folders can not be listed")
    others = found.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]
    return box.download(max_bytes=max_bytes), {path.removeprefix("./") for path in others}


def changed(checkout: Checkout, after: Mapping[str, bytes], others: Set[str] = frozenset()) -> dict[str, bytes | None]:
    """What an agent changed: path -> content, None for what it deleted.

    Caches, our own files and what stayed behind on the way in are no part of it, nor is a file that is among `others` now: that
    can not be carried back, and is no deletion.
    """
    gone = dict.fromkeys(path for path in checkout.files if path not in after and not _inside(path, others))
    new = {path: data for path, data in after.items() if checkout.files.get(path) != data}
    both = {path: data for path, data in (gone | new).items() if path in checkout.files or not _stays(checkout, path)}
    return dict(sorted(both.items()))


def _inside(path: str, others: Set[str]) -> bool:
    return not others.isdisjoint({path, *map(str, PurePosixPath(path).parents)})


def _stays(checkout: Checkout, path: str) -> bool:
    """Whether a new file would not have been taken in, had it been there."""
    parts = set(PurePosixPath(path).parts)
    ours = bool(parts & (CACHE_FOLDERS | HISTORY | {FOLDER})) or path.endswith(CACHE_ENDINGS)
    return ours or checkout.ignore.ignored(path) or _inside(path, checkout.left_out.keys())


def show(checkout: Checkout, changes: Mapping[str, bytes | None]) -> str:
    """A unified diff. Files that are no UTF-8 text are named with their sizes, not shown."""
    parts: list[str] = []
    for path, data in changes.items():
        before = checkout.files.get(path)
        try:
            old, new = ((each or b"").decode() for each in (before, data))
        except UnicodeDecodeError:
            parts.append(f"Binary file {path}: {len(before or b'')} bytes before, {len(data or b'')} after\n")
            continue
        names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if data is None else f"b/{path}")
        mode = "100755" if path in checkout.executable else "100644"
        head = f"new file mode {mode}\n" if before is None else f"deleted file mode {mode}\n" if data is None else ""
        lines = difflib.unified_diff(split_lines(old), split_lines(new), *names)
        ended = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
        parts.append(f"diff --git a/{path} b/{path}\n{head}{ended}")
    return "".join(parts)


def accept(checkout: Checkout, changes: Mapping[str, bytes | None]) -> None:
    """Writes an agent's changes into the user's repository, each file in a moment.

    Raises Conflict, before anything is written, when a file that they touch has changed since the agent got it, or lies behind a
    link; OSError for what can not be written.
    """
    for path in changes:
        _check(checkout, path)
    for path, data in changes.items():
        target = checkout.root / path
        if data is None:
            target.unlink()
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = (
            0o755 if path in checkout.executable else stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644
        )
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:100]}.", delete=False) as part:
            try:
                part.write(data)
                part.close()
                os.chmod(part.name, mode)
                os.replace(part.name, target)
            except BaseException:
                os.unlink(part.name)
                raise


def _check(checkout: Checkout, path: str) -> None:
    target, before = checkout.root / path, checkout.files.get(path)
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or str(pure) != path:
        raise Conflict(f"{path}: leads out of the repository")
    for parent in list(target.parents)[: len(pure.parts) - 1]:
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            raise Conflict(f"{path}: {parent} is a link or a file, so nothing was written")
    if before is None and os.path.lexists(target):
        raise Conflict(f"{path}: was not among what the agent saw, and is there; nothing was written")
    if before is not None and (target.is_symlink() or not target.is_file() or target.read_bytes() != before):
        raise Conflict(f"{path}: has changed since the agent got it; nothing was written")
