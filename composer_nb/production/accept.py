"""Write accepted changes into the repository: all of them, or none."""

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from composer_nb.harness.carry import EXECUTABLE, PLAIN, Blob
from composer_nb.harness.tools.session import FOLDER
from composer_nb.harness.untrusted import UnsafeName, beneath, protected
from composer_nb.production.diff import Changes

# Inverse steps, in the order in which the steps were taken.
Undo = list[Callable[[], object]]


class Conflict(ValueError):
    """A file that an agent changed has changed since the agent saw it."""


def accept(root: Path, before: Mapping[str, Blob], changes: Changes) -> None:
    """Write an agent's changes into the user's repository. `before`: the changed files as the agent saw them.

    New files are first written to a folder beside them, and the files that they replace are moved there. If any step fails, all
    steps are undone. A kill leaves that folder, `.composer_nb-accept-…` in the repository, with the moved files; so does an undo
    that fails, and the error says so. Folders that a deletion empties are removed, as by git. Raises Conflict, before anything is
    written, when a touched file has changed since the agent got it, or lies behind a link; OSError for a failed write.
    """
    at = {path: _check(root, before.get(path), changes, path) for path in changes}
    beside = Path(tempfile.mkdtemp(dir=root, prefix=f"{FOLDER}-accept-"))
    undo: Undo = []
    try:
        for number, (path, blob) in enumerate(changes.items()):
            if blob is not None:
                _write(beside / f"new-{number}", blob, _file(at[path]))
        for number, path in enumerate(changes):
            if os.path.lexists(at[path]) and path in before:
                _move(at[path], beside / f"old-{number}", undo)
        for number, (path, blob) in enumerate(changes.items()):
            if blob is not None:
                _make_folders(root, at[path].parent, undo)
                if at[path].is_dir():  # without a file that would be lost
                    _move(at[path], beside / f"old-{number}", undo)
                _move(beside / f"new-{number}", at[path], undo)
        for path in [path for path, blob in changes.items() if blob is None]:
            _prune(root, at[path].parent, undo)
    except BaseException as error:
        failures = 0
        for step in reversed(undo):
            try:
                step()
            except OSError:
                failures += 1
        if failures:
            raise OSError(f"{error}; not all could be put back, it lies in {beside}") from error
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(beside, ignore_errors=True)


def _check(root: Path, before: Blob | None, changes: Changes, path: str) -> Path:
    """Return where a change goes. Raises Conflict."""
    pure = PurePosixPath(path)
    try:
        target = beneath(root, path)
    except UnsafeName as error:
        raise Conflict(f"{error}; nothing was written") from None
    history = any(protected(part) and part != ".env" for part in pure.parts)
    if history or (before is None and protected(path)):
        raise Conflict(f"{path}: a protected name, which only the user writes; nothing was written")
    for parent, at in zip(map(str, pure.parents[:-1]), target.parents, strict=False):
        if changes[path] is not None and changes.get(parent) is not None:
            raise Conflict(f"{path}: is to lie in {parent}, which is to be a file; nothing was written")
        if at.is_symlink() or (at.exists() and not at.is_dir() and parent not in changes):
            raise Conflict(f"{path}: {at} is a link or a file, so nothing was written")
    if before is None and target.is_dir() and not target.is_symlink():
        for inner in (item for item in target.rglob("*") if item.is_symlink() or not item.is_dir()):
            name = inner.relative_to(root).as_posix()
            if name not in changes or changes[name] is not None:
                raise Conflict(f"{path}: is a folder with {inner.name}, which the agent kept; nothing was written")
    elif before is None and os.path.lexists(target):
        raise Conflict(f"{path}: was not among what the agent saw, and is there; nothing was written")
    if before is not None and _now(target) != before:
        raise Conflict(f"{path}: has changed since the agent got it; nothing was written")
    return target


def _now(target: Path) -> Blob | None:
    """Return the file at a path, if it is one."""
    try:
        with open(os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                return Blob(data=file.read(), mode=EXECUTABLE if status.st_mode & 0o100 else PLAIN)
    except OSError:
        pass
    return None


def _file(target: Path) -> os.stat_result | None:
    """Return the status of a file at a path, if it is one."""
    with suppress(OSError):
        status = target.lstat()
        return status if stat.S_ISREG(status.st_mode) else None
    return None


def _write(at: Path, blob: Blob, before: os.stat_result | None) -> None:
    """Write a file, with the owner and the permissions of the file before, if there is one; the blob says whether it can be
    executed."""
    runs, flags = blob.mode == EXECUTABLE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(at, flags, 0o777 if runs else 0o666), "wb") as file:
        file.write(blob.data)
        if before is not None:
            with suppress(PermissionError):  # only root gives files away
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            permissions = before.st_mode & 0o777
            os.fchmod(file.fileno(), permissions | (permissions & 0o444) >> 2 if runs else permissions & ~0o111)


def _move(source: Path, target: Path, undo: Undo) -> None:
    os.rename(source, target)
    undo.append(partial(os.rename, target, source))


def _prune(root: Path, folder: Path, undo: Undo) -> None:
    """Remove a folder and those above it while they are empty; never one behind a link."""
    for at in [folder, *folder.parents][: len(folder.relative_to(root).parts)]:
        if any(part.is_symlink() for part in (at, *at.parents) if part != root and part.is_relative_to(root)):
            return
        if not at.is_dir():  # gone already, or a file now
            continue
        permissions = stat.S_IMODE(at.lstat().st_mode)
        try:
            at.rmdir()
        except OSError:
            return
        undo.append(partial(os.chmod, at, permissions))
        undo.append(partial(os.mkdir, at))


def _make_folders(root: Path, folder: Path, undo: Undo) -> None:
    if folder != root and not folder.is_dir():
        _make_folders(root, folder.parent, undo)
        folder.mkdir()
        undo.append(partial(os.rmdir, folder))
