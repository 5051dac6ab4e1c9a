"""Inside a sandbox: commands, what they write, and the end of all that they have started.

Part of the resident program (`guest/program.py`), which is the first process here: orphans become its children.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import threading
import time
import typing

from composer_nb.harness.sandbox.guest.files import Header, WorkspaceFiles, open_beneath
from composer_nb.harness.sandbox.guest.warm import Become, Words, suits
from composer_nb.harness.sandbox.system.linux import ended_children, processes, read_exactly

DRAIN_S = 0.1  # how long output is awaited from processes that a command left behind
KILL_S = 2.0  # how long a tree may take to end
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOST = 0  # the descriptor on which the host asks


class Unstartable(OSError):
    """A command that cannot be executed."""


class StreamEnds:
    """A stream's head and tail, at most `limit` bytes together."""

    def __init__(self, limit: int) -> None:
        self.first, self.last = limit - limit // 2, limit // 2
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self.first - len(self.head)
        self.head += data[:room]
        self.tail += data[max(room, 0) :]
        if len(self.tail) > 2 * self.last:
            del self.tail[: -self.last]

    def text(self) -> bytes:
        tail = bytes(self.tail[-self.last :])
        lost = self.total - len(self.head) - len(tail)
        note = b"\n[... %d bytes left out ...]\n" % lost if lost else b""
        return bytes(self.head) + note + tail

    @property
    def truncated(self) -> bool:
        return self.total > self.first + self.last


class Commands:
    """Everything that runs in the sandbox besides this program."""

    def __init__(self, files: WorkspaceFiles, wake: int, settings: Header) -> None:
        """`settings`, of which `environment`: what an image sets, which holds but for the home."""
        self.files, self.wake, self.nice, self.copies = files, wake, settings["nice"], settings["copies"]
        usual = {"PATH": PATH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment = {**usual, **settings["environment"], "HOME": files.root}
        self.running: set[int] = set()
        self.awaited, self.code = 0, 0  # the command in the foreground, and its exit code once it has ended
        self.ticks = os.sysconf("SC_CLK_TCK")

    def reap(self) -> None:
        """Take note of everything that has ended."""
        for pid, status in ended_children(self.wake):
            self.running.discard(pid)
            if pid == self.awaited:
                self.code = os.waitstatus_to_exitcode(status)

    def start(self, request: Header, streams: typing.Sequence[int]) -> int:
        """Start a command with these three streams. Raises Unstartable, and OSError for a folder that is none."""
        command, environment = request["command"], {**self.environment, **request["env"]}
        copied = self.copies and request.get("warm") and request["cwd"] == "."
        copied = copied and suits(command, request["env"], self.environment)
        folder = open_beneath(self.files.fd, self.files.inner(request["cwd"]), os.O_RDONLY | os.O_DIRECTORY)

        try:
            for left in (1, 0):
                try:
                    if copied and (pid := os.fork()) == 0:
                        os.nice(self.nice)
                        raise Become(command, environment, [os.dup(fd) for fd in streams])
                    if not copied:
                        os.fchdir(folder)
                        pid = self.spawn(command, environment, streams)
                    break
                except BlockingIOError:  # no process is left: orphans of earlier commands have to go
                    if not left or not self.end(0, 0):
                        text = "no process can be started: the limit of processes is reached"
                        raise OSError(errno.EAGAIN, text) from None
                except (OSError, ValueError) as error:
                    code = getattr(error, "errno", None) or errno.EINVAL
                    raise Unstartable(code, command[0][:200] + ": " + os.strerror(code)) from error
        finally:
            os.fchdir(self.files.fd)
            os.close(folder)
        self.running.add(pid)
        return pid

    def spawn(self, command: Words, environment: typing.Mapping[str, str], streams: typing.Sequence[int]) -> int:
        """Start a program by vfork, which does not copy this large process as a fork does, and return its pid.

        It inherits the niceness of the thread that starts it, and gets the usual SIGINT because here that has a handler. Raises
        BlockingIOError where no process is left."""
        outcomes: list[typing.Union[subprocess.Popen[bytes], BaseException]] = []  # noqa: UP007

        def begin() -> None:
            try:
                os.nice(self.nice)  # the resident program must get its turn among many that spin
                stdin, stdout, stderr = streams
                process = subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
                )
                outcomes.append(process)
            except BaseException as error:
                outcomes.append(error)

        thread = threading.Thread(target=begin)
        try:
            thread.start()
        except RuntimeError:
            raise BlockingIOError(errno.EAGAIN, "no thread is left") from None
        thread.join()
        [started] = outcomes
        if isinstance(started, BaseException):
            raise started
        started.returncode = 0  # it is not for `subprocess` to wait for it: `reap` does
        return started.pid

    def run(self, request: Header, stdin: memoryview) -> tuple[Header, bytes]:
        """Run a command to its end or its limit."""
        begin, since = time.monotonic(), self.now()
        out, err = os.pipe(), os.pipe()
        feed = os.pipe() if len(stdin) else (os.open("/dev/null", os.O_RDONLY), None)
        outputs = {fd: StreamEnds(request["output_bytes"]) for fd in (out[0], err[0])}
        cut, pid = "", 0
        try:
            pid = self.awaited = self.start(request, (feed[0], out[1], err[1]))
        except BaseException as error:
            for fd in (out[0], err[0], feed[1]):
                if fd is not None:
                    os.close(fd)
            if not isinstance(error, Unstartable):
                raise
            self.code = 127 if error.errno == errno.ENOENT else 126
            outputs[err[0]].add(((error.strerror or "") + "\n").encode("utf-8", "replace"))
        finally:
            for fd in (feed[0], out[1], err[1]):
                os.close(fd)
        if pid:
            self.code = -signal.SIGKILL  # until it is known to have ended otherwise
            cut = self._follow(pid, outputs, feed[1], stdin, begin + request["timeout_s"])
            if cut:
                self.end(pid, since)
        texts = [stream.text() for stream in outputs.values()]
        facts = {
            "exit_code": self.code if self.code >= 0 else 128 - self.code,
            "stdout_bytes": len(texts[0]),
            "truncated": any(stream.truncated for stream in outputs.values()),
            "timed_out": cut == "timed_out",
            "stopped": cut == "stopped",
            "duration_s": time.monotonic() - begin,
        }
        return facts, b"".join(texts)

    def _follow(
        self, pid: int, outputs: dict[int, StreamEnds], feed: int | None, data: memoryview, deadline: float
    ) -> str:
        """Move a command's streams until it ends: "", or before that when its time was up ("timed_out") or when the host
        request for it ("stopped")."""
        poller = select.poll()
        left = set(outputs)
        for fd in (*left, self.wake, HOST):
            os.set_blocking(fd, fd == HOST)
            poller.register(fd, select.POLLIN)
        if feed is not None:
            os.set_blocking(feed, False)
            poller.register(feed, select.POLLOUT)
        cut = ""
        while (pid in self.running or left) and not cut:
            if (rest := deadline - time.monotonic()) <= 0:
                cut = "timed_out" if pid in self.running else ""
                break
            for fd, what in poller.poll(1 + 1000 * rest):
                with contextlib.suppress(BlockingIOError):  # who writes to a pipe may read from it, and be faster
                    if fd == self.wake:
                        self.reap()
                    elif fd == HOST:
                        cut = self._told_to_stop()
                    elif fd == feed:
                        try:
                            data = data[os.write(fd, data[: 1 << 16]) :]
                        except BrokenPipeError:
                            data = data[:0]
                        if not data or what & (select.POLLERR | select.POLLHUP):
                            poller.unregister(fd)
                            os.close(fd)
                            feed = None
                    elif fd in left:
                        chunk = os.read(fd, 1 << 16)
                        outputs[fd].add(chunk)
                        if not chunk:
                            poller.unregister(fd)
                            left.discard(fd)
            if pid not in self.running and left:
                deadline = min(deadline, time.monotonic() + DRAIN_S)
        for fd in (*outputs, *(() if feed is None else (feed,))):
            os.close(fd)
        return cut

    def _told_to_stop(self) -> str:
        """Take a frame that came while a command runs: the host sends no other then. Without a host all ends."""
        try:
            read_exactly(HOST, int.from_bytes(read_exactly(HOST, 4), "big"))
        except EOFError:
            try:
                self.end_all()
            finally:
                os._exit(0)
        return "stopped"

    def now(self) -> int:
        """Return the clock tick since boot; processes note in which they began."""
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * self.ticks)

    def end(self, root: int, since: int) -> bool:
        """Kill a command, its descendants and all orphans that began since then. Return False when there was nothing to kill.

        Raises OSError when something is left after KILL_S.
        """
        deadline = time.monotonic() + KILL_S
        # (pid, tick of start): what was below another may be an orphan before it is dead
        killed: set[tuple[int, int]] = set()
        while doomed := self.members(root, since, killed):
            signal_all(doomed, signal.SIGSTOP)  # what is stopped forks no more
            doomed |= self.members(root, since, killed)
            signal_all(doomed, signal.SIGKILL)
            killed |= doomed
            self.reap()
            if time.monotonic() > deadline:
                if os.getpid() != 1:
                    raise OSError(errno.EBUSY, "processes that were killed are still there")
                os.kill(-1, signal.SIGKILL)  # everything else in this namespace, at once
                deadline += KILL_S
            time.sleep(0.001)
        return bool(killed)

    def members(self, root: int, since: int, killed: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return (pid, tick of start) of living processes that belong to a command: below it, below an orphan that began since,
        or below what was killed already."""
        me, family = os.getpid(), []
        children: dict[int, list[tuple[int, int]]] = {}
        for pid, parent, start in processes():
            children.setdefault(parent, []).append((pid, start))
            orphan = parent == me and pid not in self.running and start >= since
            if pid == root or orphan or (pid, start) in killed:
                family.append((pid, start))
        for pid, _ in family:
            family += [child for child in children.get(pid, []) if child not in family]
        return set(family)

    def end_all(self) -> None:
        """Kill everything. Raises OSError when something is left after KILL_S."""
        self.running.clear()  # now all children count as orphans
        self.end(0, 0)

    def all(self) -> set[tuple[int, int]]:
        """Return (pid, tick of start) of living processes below this one."""
        me = os.getpid()
        return {(pid, start) for pid, start in self.members(me, 1 << 62, set()) if pid != me}


def signal_all(doomed: set[tuple[int, int]], what: int) -> None:
    for pid, _ in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, what)
