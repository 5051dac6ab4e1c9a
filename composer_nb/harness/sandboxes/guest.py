"""The resident program of a sandbox: carries out what is asked over a pipe, as the first process of the sandbox.

`bundle.py` hands this file's text, and that of `harness/linux.py`, to a bare interpreter inside the sandbox; it uses the
standard library alone and never imports the rest of the project. Two ways to run it:

* *resident*: serves one sandbox until its input ends. Everything in the sandbox is its descendant, and as the first process of
  its pid namespace it reaps orphans and can be neither killed nor traced from inside.
* *zygote*: waits for (settings, two descriptors), makes new namespaces with an empty workspace, and runs a resident there. It
  never runs what an agent wrote. A sandbox costs a fork then, where a new interpreter would cost twenty times as much.

Frames in both directions: 4 bytes of length (big-endian), a JSON header in one line, a newline, a payload. One request is
answered at a time, in order. Headers of answers have "error": [errno, text] where a request failed.

Commands run as the same user, without capabilities or new privileges, under a system call filter. They are ended as a tree:
the descendants of a command and all orphans that began after it.

Covers Linux on x86_64 and aarch64, Python 3.9 and newer.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import gc
import hashlib
import io
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import tarfile
import time
import typing

from composer_nb.harness.linux import (
    NAMESPACES,
    check,
    clone,
    drop_capabilities,
    hide_memory,
    install_filter,
    libc,
    machine,
    map_ids,
    mount,
    read_exactly,
    write_all,
    write_ids,
)

MAX_FRAME = 256 << 20
MAX_DEPTH = 64  # folders below one another that are walked
DRAIN_S = 0.1  # how long output is awaited from processes that a command left behind
KILL_S = 2.0  # how long a tree may take to end
RESOLVE_BENEATH, RESOLVE_NO_MAGICLINKS, OPENAT2 = 0x08, 0x02, 437
PR_SET_CHILD_SUBREAPER = 36
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
KEPT_DEAD = 1000  # exit codes of background commands that are remembered

Header = typing.Dict[str, typing.Any]  # noqa: UP006  (runs on Python 3.9 too)


class Unstartable(OSError):
    """A command that cannot be executed."""


def refuse(code: int, text: str) -> OSError:
    return OSError(code, text)


# Files, always below the workspace and never through a link that leads out of it.


class OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_beneath(root: int, path: str, flags: int) -> int:
    """A descriptor of `path` below the folder `root`. Raises OSError; EXDEV for a path that leads out."""
    how = OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    name = ctypes.c_char_p(os.fsencode(path))
    return int(check(libc.syscall(OPENAT2, root, name, ctypes.byref(how), ctypes.sizeof(how)), path))


class Files:
    """The workspace."""

    def __init__(self, root: str, limit: int) -> None:
        self.root, self.limit = root, limit
        self.fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def inner(self, path: str) -> str:
        """`path` without the workspace before it. Raises OSError for one that names no place in it."""
        if "\0" in path:
            raise refuse(errno.EINVAL, "a path with a NUL in it")
        if path == self.root or path.startswith(self.root + "/"):
            path = path[len(self.root) :].lstrip("/")
        elif path.startswith("/"):
            raise refuse(errno.EXDEV, path + ": not in the workspace " + self.root)
        return path or "."

    def read(self, path: str, offset: int, most: int) -> bytes:
        fd = open_beneath(self.fd, self.inner(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            kind = os.fstat(fd).st_mode
            if stat.S_ISDIR(kind):
                raise refuse(errno.EISDIR, path + ": a folder")
            if not stat.S_ISREG(kind):
                raise refuse(errno.EINVAL, path + ": not a regular file")
            parts, left = [], min(most, self.limit)
            while left > 0 and (part := os.pread(fd, left, offset)):
                parts.append(part)
                offset, left = offset + len(part), left - len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def folder(self, path: str) -> int:
        """A descriptor of a folder, made with those above it where it is missing."""
        fd = os.dup(self.fd)
        for part in [p for p in path.split("/") if p not in ("", ".")]:
            try:
                if part == "..":
                    raise refuse(errno.EXDEV, path + ": leads upwards")
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
                below = open_beneath(fd, part, os.O_RDONLY | os.O_DIRECTORY)
            finally:
                os.close(fd)
            fd = below
        return fd

    def write(self, path: str, data: bytes | memoryview, mode: int, mtime: int = 0) -> None:
        head, _, name = self.inner(path).rpartition("/")
        if name in ("", ".", ".."):
            raise refuse(errno.EISDIR, path + ": names no file")
        folder = self.folder(head)
        try:
            if stat.S_ISDIR(kind_of(name, folder)):
                raise refuse(errno.EISDIR, path + ": a folder")
            part = ".composer_nb-" + os.urandom(6).hex()
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
            try:
                write_all(fd, data)
                os.fchmod(fd, mode & 0o777)
                if mtime:
                    os.utime(fd, (mtime, mtime))
                os.close(fd)
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(part, dir_fd=folder)
                raise
        finally:
            os.close(folder)

    def walk(self) -> typing.Iterator[tuple[str, os.stat_result, int, str]]:
        """(path, status, folder, name) of everything below, in order of names. Raises OSError below MAX_DEPTH folders."""
        stack = [("", os.dup(self.fd))]
        try:
            while stack:
                above, folder = stack.pop()
                try:
                    for name in sorted(os.listdir(folder)):
                        path = above + name
                        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                        yield path, status, folder, name
                        if stat.S_ISDIR(status.st_mode):
                            if path.count("/") >= MAX_DEPTH:
                                raise refuse(errno.ELOOP, f"more than {MAX_DEPTH} folders below one another")
                            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                            stack.append((path + "/", os.open(name, flags, dir_fd=folder)))
                finally:
                    os.close(folder)
        finally:
            for _, folder in stack:
                os.close(folder)

    def pack(self, most: int, links: bool) -> tuple[bytes, Header]:
        """A tar archive of the workspace: regular files, and with `links` folders and symbolic links too."""
        out, left, total, facts = io.BytesIO(), 0, 0, []
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, status, folder, name in self.walk():
                info = tarfile.TarInfo(path)
                info.mode, info.mtime = stat.S_IMODE(status.st_mode) & 0o777, int(status.st_mtime)
                if stat.S_ISREG(status.st_mode):
                    data = self._content(name, folder, most - total)
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
                elif not stat.S_ISDIR(status.st_mode):
                    left += 1
        digest = hashlib.sha256(json.dumps(sorted(facts)).encode("utf-8", "surrogateescape")).hexdigest()
        return out.getvalue(), {"left_out": left, "digest": digest}

    def _content(self, name: str, folder: int, most: int) -> bytes:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
        with open(fd, "rb") as file:
            data = file.read(min(most, self.limit) + 1)
        if len(data) > min(most, self.limit):
            raise refuse(errno.EFBIG, f"the files are more than {most} bytes")
        return data

    def unpack(self, payload: memoryview) -> None:
        """The inverse of `pack`; files that are there already are replaced."""
        modes = []
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as archive:
            for info in archive:
                path = self.inner(info.name)
                if info.isdir():
                    os.close(self.folder(path))
                    modes.append((path, info.mode))
                elif info.issym():
                    head, _, name = path.rpartition("/")
                    folder = self.folder(head)
                    try:
                        os.symlink(info.linkname, name, dir_fd=folder)
                    finally:
                        os.close(folder)
                elif info.isreg():
                    content = archive.extractfile(info)
                    assert content is not None
                    self.write(path, content.read(), info.mode, int(info.mtime))
        for path, mode in reversed(modes):
            fd = open_beneath(self.fd, path, os.O_RDONLY | os.O_DIRECTORY)
            os.fchmod(fd, mode)
            os.close(fd)

    def count(self) -> tuple[int, int]:
        """(bytes, inodes) in use."""
        if os.stat(self.root).st_dev != os.stat(os.path.dirname(self.root)).st_dev:
            usage = os.statvfs(self.root)
            return (usage.f_blocks - usage.f_bfree) * usage.f_frsize, usage.f_files - usage.f_ffree
        found = [status for _, status, _, _ in self.walk()]
        return sum(status.st_blocks * 512 for status in found), len(found) + 1


def kind_of(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


# Commands.


class Kept:
    """A stream's head and tail, at most `limit` bytes together."""

    def __init__(self, limit: int) -> None:
        self.half = max(limit // 2, 1)
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[max(room, 0) :]
        if len(self.tail) > 2 * self.half:
            del self.tail[: -self.half]

    def text(self) -> bytes:
        tail = bytes(self.tail[-self.half :])
        lost = self.total - len(self.head) - len(tail)
        note = b"\n[... %d bytes left out ...]\n" % lost if lost else b""
        return bytes(self.head) + note + tail

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self.half


class Commands:
    """Everything that runs in the sandbox besides this program."""

    def __init__(self, files: Files, wake: int) -> None:
        self.files, self.wake = files, wake
        self.ended: dict[int, int] = {}  # pid -> exit code, of what was started here
        self.running: set[int] = set()
        self.ticks = os.sysconf("SC_CLK_TCK")

    def reap(self) -> None:
        """Take note of everything that has ended."""
        try:
            os.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.running:
                self.running.discard(pid)
                self.ended[pid] = os.waitstatus_to_exitcode(status)
                while len(self.ended) > KEPT_DEAD:
                    del self.ended[next(iter(self.ended))]

    def start(self, command: typing.Sequence[str], cwd: str, env: Header, streams: typing.Sequence[int]) -> int:
        """Start a command with these three streams. Raises Unstartable, and OSError for a folder that is none."""
        folder = open_beneath(self.files.fd, self.files.inner(cwd), os.O_RDONLY | os.O_DIRECTORY)
        told, tell = os.pipe()
        try:
            for left in (1, 0):
                try:
                    pid = os.fork()
                    break
                except BlockingIOError:  # no process is left: orphans of earlier commands have to go
                    if not left or not self.end(0, 0):
                        text = "no process can be started: the limit of processes is reached"
                        raise refuse(errno.EAGAIN, text) from None
            if pid == 0:
                self._become(command, folder, env, streams, tell)
        finally:
            os.close(folder)
            os.close(tell)
        failure = b""
        try:
            failure = os.read(told, 4096)
        finally:
            os.close(told)
        if failure:
            os.waitpid(pid, 0)
            code, _, text = failure.decode("utf-8", "replace").partition(" ")
            raise Unstartable(int(code), text)
        self.running.add(pid)
        return pid

    def _become(
        self, command: typing.Sequence[str], folder: int, env: Header, streams: typing.Sequence[int], tell: int
    ) -> typing.NoReturn:
        try:
            os.setsid()
            for name in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGINT, signal.SIGXFSZ):
                signal.signal(name, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.fchdir(folder)
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (*streams, tell)]
            for number, fd in enumerate(high[:3]):
                os.dup2(fd, number)
            os.dup2(high[3], 3, inheritable=False)
            os.closerange(4, 4096)
            tell = 3
            environment = {"PATH": PATH, "HOME": self.files.root, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
            environment.update(env)
            os.execvpe(command[0], list(command), environment)
        except BaseException as error:  # the other side of a fork: the parent gets the reason
            code = getattr(error, "errno", None) or errno.EINVAL
            os.write(tell, (str(code) + " " + command[0][:200] + ": " + os.strerror(code)).encode("utf-8", "replace"))
        os._exit(127)

    def run(self, header: Header, stdin: memoryview) -> tuple[Header, bytes]:
        """Run a command to its end or its limit."""
        begin, since = time.monotonic(), self.now()
        out, err = Kept(header["output_bytes"]), Kept(header["output_bytes"])
        pipes = [os.pipe() for _ in range(2)]
        source = os.pipe() if len(stdin) else None
        nothing = os.open("/dev/null", os.O_RDWR)
        try:
            streams = (source[0] if source else nothing, pipes[0][1], pipes[1][1])
            pid = self.start(header["command"], header["cwd"], header["env"], streams)
        except Unstartable as error:
            code = 127 if error.errno == errno.ENOENT else 126
            text = (error.strerror or str(error)).encode() + b"\n"
            return {"exit_code": code, "sizes": [0, len(text)], "truncated": False, "timed_out": False}, text
        finally:
            for fd in (nothing, pipes[0][1], pipes[1][1], *(source[:1] if source else ())):
                os.close(fd)
            if sys.exc_info()[0] is not None:
                for fd in (pipes[0][0], pipes[1][0], *(source[1:] if source else ())):
                    os.close(fd)
        deadline = begin + header["timeout_s"]
        kept = {pipes[0][0]: out, pipes[1][0]: err}
        timed_out = self._follow(pid, kept, source[1] if source else None, stdin, deadline)
        if timed_out:
            self.end(pid, since)
        code = self.ended.pop(pid, -9)
        sizes = [len(out.text()), len(err.text())]
        facts = {
            "exit_code": code if code >= 0 else 128 - code,
            "sizes": sizes,
            "truncated": out.truncated or err.truncated,
            "timed_out": timed_out,
            "duration_s": time.monotonic() - begin,
        }
        return facts, out.text() + err.text()

    def _follow(
        self,
        pid: int,
        kept: dict[int, Kept],
        feed: int | None,
        data: memoryview,
        deadline: float,
    ) -> bool:
        """Move a command's streams until it ends. True when its time was up."""
        poller = select.poll()
        left = set(kept)
        for fd in (*left, self.wake):
            poller.register(fd, select.POLLIN)
        if feed is not None:
            os.set_blocking(feed, False)
            poller.register(feed, select.POLLOUT)
        timed_out = False
        while pid in self.running or left:
            now = time.monotonic()
            if now >= deadline:
                timed_out = pid in self.running
                break
            for fd, what in poller.poll(1 + 1000 * (deadline - now)):
                if fd == self.wake:
                    self.reap()
                elif fd == feed:
                    written = 0
                    try:
                        written = os.write(fd, data[: 1 << 16])
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        data = data[:0]
                    data = data[written:]
                    if not data or what & (select.POLLERR | select.POLLHUP):
                        poller.unregister(fd)
                        os.close(fd)
                        feed = None
                elif fd in left:
                    chunk = os.read(fd, 1 << 16)
                    kept[fd].add(chunk)
                    if not chunk:
                        poller.unregister(fd)
                        left.discard(fd)
            if pid not in self.running and left:
                deadline = min(deadline, time.monotonic() + DRAIN_S) if not timed_out else deadline
        for fd in (*kept, *(() if feed is None else (feed,))):
            os.close(fd)
        return timed_out

    def now(self) -> int:
        """The clock tick since boot; processes note in which they began."""
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * self.ticks)

    def end(self, root: int, since: int) -> bool:
        """Kill a command, its descendants and all orphans that began since then. False when there was nothing to kill.

        Raises OSError when something is left after KILL_S.
        """
        deadline, found = time.monotonic() + KILL_S, False
        while doomed := self.members(root, since):
            found = True
            for pid in doomed:
                try:
                    os.kill(pid, signal.SIGSTOP)  # what is stopped forks no more
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            self.reap()
            if time.monotonic() > deadline:
                if os.getpid() != 1:
                    raise refuse(errno.EBUSY, "processes that were killed are still there")
                os.kill(-1, signal.SIGKILL)  # everything else in this namespace, at once
                deadline += KILL_S
            time.sleep(0.001)
        return found

    def members(self, root: int, since: int) -> list[int]:
        """Living processes that belong to a command: below it, or below an orphan that began since."""
        me, found = os.getpid(), []
        children: dict[int, list[int]] = {}
        for pid, parent, start, state in processes():
            children.setdefault(parent, []).append(pid)
            orphan = parent == me and pid not in self.running and start >= since
            if (pid == root or orphan) and state not in "ZX":
                found.append(pid)
        for pid in found:
            found += [child for child in children.get(pid, []) if child not in found]
        return found

    def end_all(self) -> None:
        """Kill everything; where this is the first process of a namespace the kernel would do it, elsewhere nobody."""
        deadline = time.monotonic() + KILL_S
        while (doomed := self.all()) and time.monotonic() < deadline:
            for pid in doomed:
                try:
                    os.kill(pid, signal.SIGSTOP)
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            self.reap()
            time.sleep(0.001)

    def all(self) -> list[int]:
        """Living processes below this one."""
        children: dict[int, list[int]] = {}
        for pid, parent, _, state in processes():
            if state not in "ZX":
                children.setdefault(parent, []).append(pid)
        found = list(children.get(os.getpid(), []))
        for pid in found:
            found += children.get(pid, [])
        return found


def processes() -> typing.Iterator[tuple[int, int, int, str]]:
    """(pid, parent, tick of start, state) of every process in sight."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    fields = file.read().rpartition(b") ")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(name), int(fields[1]), int(fields[19]), fields[0].decode()


# Requests.


class Resident:
    """Answers requests until its input ends."""

    def __init__(self, settings: Header) -> None:
        self.wake, note = os.pipe()
        for fd in (self.wake, note):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(note, warn_on_full_buffer=False)
        self.files = Files(settings["workspace"], settings["disk_bytes"])
        self.commands = Commands(self.files, self.wake)

    def serve(self) -> None:
        send({"ready": True, "pid": os.getpid(), "uid": os.getuid(), "python": sys.version.split()[0]})
        poller = select.poll()
        poller.register(0, select.POLLIN)
        poller.register(self.wake, select.POLLIN)
        while True:
            events = dict(poller.poll())
            if self.wake in events:
                self.commands.reap()
            if 0 in events:
                try:
                    size = int.from_bytes(read_exactly(0, 4), "big")
                    body = memoryview(read_exactly(0, size))
                except EOFError:
                    self.commands.end_all()
                    return
                cut = bytes(body[: 1 << 20]).index(b"\n")
                self.answer(json.loads(bytes(body[:cut])), body[cut + 1 :])

    def answer(self, header: Header, payload: memoryview) -> None:
        try:
            facts, data = getattr(self, "do_" + header["do"])(header, payload)
        except OSError as error:
            facts, data = {"error": [error.errno or errno.EIO, error.strerror or str(error)]}, b""
        except KeyError as error:
            facts, data = {"missing": str(error)}, b""
        except (MemoryError, tarfile.TarError, ValueError) as error:
            facts, data = {"error": [errno.EIO, type(error).__name__ + ": " + str(error)[:300]]}, b""
        send(facts, data)

    def do_exec(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        return self.commands.run(header, payload)

    def do_background(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.write(header["log"], b"", 0o644)
        nothing = os.open("/dev/null", os.O_RDWR)
        log = open_beneath(self.files.fd, self.files.inner(header["log"]), os.O_WRONLY | os.O_APPEND)
        try:
            pid = self.commands.start(header["command"], header["cwd"], header["env"], (nothing, log, log))
        finally:
            os.close(nothing)
            os.close(log)
        return {"pid": pid}, b""

    def do_poll(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.commands.reap()
        pid = header["pid"]
        if pid in self.commands.running:
            return {"exit_code": None}, b""
        code = self.commands.ended[pid]
        return {"exit_code": code if code >= 0 else 128 - code}, b""

    def do_end(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        pid = header["pid"]
        if pid not in self.commands.running:
            self.commands.ended[pid]  # KeyError: never started here
        else:
            # What a background command left as orphans is told from other orphans by nothing: they stay.
            self.commands.end(pid, self.commands.now() + (1 << 40))
        return {}, b""

    def do_read(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        return {}, self.files.read(header["path"], header["offset"], header["max_bytes"])

    def do_write(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.write(header["path"], payload, header["mode"])
        return {}, b""

    def do_pack(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        data, facts = self.files.pack(header["max_bytes"], header["links"])
        return facts, data

    def do_unpack(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        self.files.unpack(payload)
        return {}, b""

    def do_stats(self, header: Header, payload: memoryview) -> tuple[Header, bytes]:
        size, inodes = self.files.count()
        return {"processes": len(self.commands.all()), "disk_bytes": size, "inodes": inodes}, b""


def send(header: Header, payload: bytes = b"") -> None:
    head = json.dumps(header).encode() + b"\n"
    write_all(1, (len(head) + len(payload)).to_bytes(4, "big") + head)
    write_all(1, payload)


# The sandbox itself.


def confine(settings: Header) -> None:
    """Give up everything that what runs here must not have."""
    table = machine()
    one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
    hide_memory()
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, one, zero, zero, zero), "subreaper")
    if settings["drop"]:
        drop_capabilities(table)
    for name, value in settings["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    if settings["filter"]:
        install_filter(base64.b64decode(settings["filter"]))


def furnish(settings: Header) -> None:
    """Own processes, an empty workspace and a loopback, in namespaces that were just made."""
    nosuid, nodev, noexec = 2, 4, 8
    mount("proc", "/proc", "proc", nosuid | nodev | noexec)
    for place, size in ((settings["workspace"], 1.0), ("/tmp", 1.0), ("/dev/shm", 0.25)):
        options = f"size={int(settings['disk_bytes'] * size)},nr_inodes={int(settings['inodes'])},mode=0755"
        mount("sandbox", place, "tmpfs", nosuid | nodev, options)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        up, flags, interface = 1, 0x8914, b"lo"  # SIOCSIFFLAGS, IFF_UP
        fcntl.ioctl(loopback, flags, struct.pack("16sh22x", interface, up))


def resident(settings: Header, forked: bool = False) -> None:
    if forked:
        furnish(settings)
    confine(settings)
    os.chdir(settings["workspace"])
    os.environ.clear()
    gc.enable()
    Resident(settings).serve()


def zygote() -> None:
    """Serve a socket of packets: each has a sandbox's settings, and two descriptors, its channel and its lifeline.

    The lifeline is closed here when everything in the sandbox has ended, and closed there to make it end.
    """
    control = socket.socket(fileno=0)
    wake, note = os.pipe()
    for fd in (wake, note):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake, select.POLLIN)
    lifelines: dict[int, int] = {}  # descriptor -> pid
    table, maps = machine(), map_ids()
    control.send(b"ready")
    gc.collect()
    gc.disable()
    gc.freeze()
    while True:
        events = dict(poller.poll())
        for fd in events:
            if fd in lifelines:
                poller.unregister(fd)
                os.kill(lifelines[fd], signal.SIGKILL)
        if wake in events:
            _bury(wake, poller, lifelines)
        if control.fileno() in events:
            message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
            if not message:
                return
            channel, lifeline = fds
            pid = clone(sum(NAMESPACES.values()), table)
            if pid == 0:
                _hatch(json.loads(message), channel, maps)
            os.close(channel)
            lifelines[lifeline] = pid
            poller.register(lifeline, select.POLLIN)


def _bury(wake: int, poller: select.poll, lifelines: dict[int, int]) -> None:
    os.read(wake, 4096)
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        for fd in [fd for fd, owner in lifelines.items() if owner == pid]:
            try:
                poller.unregister(fd)
            except KeyError:
                pass  # it was ended from outside
            del lifelines[fd]
            os.close(fd)


def _hatch(settings: Header, channel: int, maps: typing.Any) -> typing.NoReturn:
    """The first process of a new sandbox."""
    try:
        signal.set_wakeup_fd(-1)
        os.dup2(channel, 0)
        os.dup2(channel, 1)
        os.closerange(3, 4096)
        write_ids(maps)
        resident(settings, forked=True)
    except BaseException as error:  # process boundary: the host gets the reason
        send({"failed": type(error).__name__ + ": " + str(error)})
        os._exit(1)
    os._exit(0)


def main(told: str) -> None:
    """`told`: settings as JSON (`resident.resident_settings`, or {"role": "zygote"})."""
    settings = json.loads(told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if settings["role"] == "zygote":
        zygote()
    else:
        resident(settings)
