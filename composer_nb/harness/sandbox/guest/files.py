"""Inside a sandbox: files of the workspace, always below it and never through a link that leads out of it.

Part of the resident program (`guest/program.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import stat
import tarfile
import typing

from composer_nb.harness.sandbox.system.linux import check, libc, write_all

MAX_DEPTH = 64  # folders below one another that are walked
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, OPENAT2 = 0x08, 0x02, 0x04, 437

Header = typing.Dict[str, typing.Any]  # noqa: UP006  (runs on Python 3.9 too)


# Bytes of an archive, besides the contents, for names and permissions. Less than what the other side spares for it.
HEADERS = 32 << 20


class OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_beneath(root: int, path: str, flags: int, resolve: int = 0) -> int:
    """Return a descriptor of `path` below the folder `root`. Raises OSError; EXDEV for a path that leads out."""
    how = OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | resolve)
    name = ctypes.c_char_p(os.fsencode(path))
    return int(check(libc.syscall(OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how)), path))


@contextlib.contextmanager
def held(fd: int) -> typing.Iterator[int]:
    """Yield a descriptor, and close it at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


class WorkspaceFiles:
    """The workspace."""

    def __init__(self, root: str, limit: int) -> None:
        self.root, self.limit = root, limit
        self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def inner(self, path: str) -> str:
        """`path` without the workspace before it. Raises OSError for one that names no place in it."""
        if "\0" in path:
            raise OSError(errno.EINVAL, "a path with a NUL in it")
        if path == self.root or path.startswith(self.root + "/"):
            path = path[len(self.root) :].lstrip("/")
        elif path.startswith("/"):
            raise OSError(errno.EXDEV, path + ": not in the workspace " + self.root)
        return path or "."

    def read(self, path: str, offset: int, most: int) -> tuple[int, bytes]:
        """Return when a file was last read before, in seconds since 1970, and its content."""
        with held(open_beneath(self.fd, self.inner(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)) as fd:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL, path + ": no plain file")
            parts, left = [], min(most, self.limit)
            while left > 0 and (part := os.pread(fd, left, offset)):
                parts.append(part)
                offset, left = offset + len(part), left - len(part)
            return clock(status.st_atime_ns), b"".join(parts)

    def folder(self, path: str) -> int:
        """Return a descriptor of a folder, made with those above it where it is missing."""
        parts, parent = [p for p in path.split("/") if p not in ("", ".")], ""
        if ".." in parts:
            raise OSError(errno.EXDEV, path + ": leads upwards")
        with contextlib.suppress(FileNotFoundError):
            return open_beneath(self.fd, "/".join(parts) or ".", os.O_RDONLY | os.O_DIRECTORY)
        fd = os.dup(self.fd)
        for part in parts:
            parent += part + "/"
            with held(fd):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=fd)
                fd = open_beneath(self.fd, parent, os.O_RDONLY | os.O_DIRECTORY)
        return fd

    def entries(self, path: str) -> list[Header]:
        """Return what is in a folder, by name."""
        entries = []
        with held(open_beneath(self.fd, self.inner(path), os.O_RDONLY | os.O_DIRECTORY)) as folder:
            for name in sorted(os.listdir(folder)):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    kind = KINDS.get(stat.S_IFMT(status.st_mode), "other")
                    mode = stat.S_IMODE(status.st_mode)
                    entries.append({"name": name, "kind": kind, "size": status.st_size, "mode": mode})
        return entries

    def split(self, path: str) -> tuple[str, str]:
        """Return the folder and the name of a file. Raises OSError for a path that names none."""
        head, _, name = self.inner(path).rpartition("/")
        if name in ("", ".", ".."):
            raise OSError(errno.EISDIR, path + ": names no file")
        return head, name

    def remove(self, path: str) -> None:
        head, name = self.split(path)
        with held(open_beneath(self.fd, head or ".", os.O_RDONLY | os.O_DIRECTORY)) as folder:
            try:
                os.unlink(name, dir_fd=folder)
            except OSError as error:
                raise OSError(error.errno, path + ": " + (error.strerror or "")) from None

    def write(self, path: str, data: bytes | memoryview, mode: int | None, mtime: int = 0) -> None:
        head, name = self.split(path)
        with held(self.folder(head)) as folder:
            before = kind_of(name, folder)
            if stat.S_ISDIR(before):
                raise OSError(errno.EISDIR, path + ": a folder")
            if mode is None:
                mode = stat.S_IMODE(before) if stat.S_ISREG(before) else 0o644
            part = ".composer_nb-" + os.urandom(6).hex()
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                with held(file) as fd:
                    write_all(fd, data)
                    os.fchmod(fd, mode & 0o777)
                    if mtime:
                        os.utime(fd, (mtime, mtime))
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(part, dir_fd=folder)
                raise

    def walk(self) -> typing.Iterator[tuple[str, os.stat_result, int, str]]:
        """Yield (path, status, folder, name) of everything below. Raises OSError below MAX_DEPTH folders.

        Others may change it meanwhile: what is gone, or closed to us, is passed over.
        """
        stack = [""]
        while stack:
            above = stack.pop()
            try:
                opened = open_beneath(self.fd, above or ".", os.O_RDONLY | os.O_DIRECTORY, RESOLVE_NO_SYMLINKS)
            except OSError:
                continue
            with held(opened) as folder:
                for name in sorted(os.listdir(folder)):
                    try:
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    except OSError:
                        continue
                    yield above + name, status, folder, name
                    if stat.S_ISDIR(status.st_mode):
                        if above.count("/") >= MAX_DEPTH:
                            raise OSError(errno.ELOOP, f"more than {MAX_DEPTH} folders below one another")
                        stack.append(above + name + "/")

    def pack(self, most: int, links: bool) -> tuple[str, bytes]:
        """Return a digest and a tar archive of the workspace: regular files, and with `links` folders and symbolic links too."""
        out, total, facts = io.BytesIO(), 0, []
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, status, folder, name in self.walk():
                info = tarfile.TarInfo(path)
                info.mode, info.mtime = stat.S_IMODE(status.st_mode) & 0o777, clock(status.st_mtime_ns)
                if stat.S_ISREG(status.st_mode):
                    if (data := self._content(name, folder, most - total)) is None:
                        continue
                    total, info.size = total + len(data), len(data)
                    archive.addfile(info, io.BytesIO(data))
                    facts.append([path, "file", info.mode, hashlib.sha256(data).hexdigest()])
                elif links and stat.S_ISLNK(status.st_mode):
                    info.type, info.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=folder)
                    archive.addfile(info)
                    facts.append([path, "link", 0, info.linkname])
                elif links and stat.S_ISDIR(status.st_mode):
                    info.type = tarfile.DIRTYPE
                    archive.addfile(info)
                    facts.append([path, "folder", info.mode, ""])
                if out.tell() > most + HEADERS:
                    raise OSError(errno.EFBIG, f"the files and their names are more than {most + HEADERS} bytes")
        digest = hashlib.sha256(json.dumps(sorted(facts)).encode("utf-8", "surrogateescape")).hexdigest()
        return digest, out.getvalue()

    def _content(self, name: str, folder: int, most: int) -> bytes | None:
        """Return the content of a file; None for one that cannot be opened. Raises OSError for too much."""
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return None
        with open(fd, "rb") as file:
            data = file.read(min(most, self.limit) + 1)
        if len(data) > min(most, self.limit):
            raise OSError(errno.EFBIG, f"the files are more than {most} bytes")
        return data

    def unpack(self, payload: memoryview) -> None:
        """Write the files of an archive, as `pack` makes them; replace files that are there already."""
        modes = []
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
            for info in archive:
                path = self.inner(info.name)
                if info.isdir():
                    os.close(self.folder(path))
                    modes.append((path, info.mode))
                elif info.issym():
                    head, _, name = path.rpartition("/")
                    with held(self.folder(head)) as folder:
                        os.symlink(info.linkname, name, dir_fd=folder)
                elif info.isreg():
                    content = archive.extractfile(info)
                    assert content is not None
                    self.write(path, content.read(), info.mode, clock(int(info.mtime) * 1_000_000_000))
        for path, mode in reversed(modes):
            with held(open_beneath(self.fd, path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
                os.fchmod(fd, mode)

    def count(self) -> tuple[int, int]:
        """Return the bytes and inodes in use."""
        usage = os.statvfs(self.root)
        return (usage.f_blocks - usage.f_bfree) * usage.f_frsize, usage.f_files - usage.f_ffree


def clock(ns: int) -> int:
    """Return a time of change in seconds, within what archives and file systems can hold."""
    return min(max(ns // 1_000_000_000, 0), 1 << 33)


def kind_of(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0
