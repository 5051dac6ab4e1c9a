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
from composer_nb.harness.sandbox.system.linux import ended_children, processes, status_of

DRAIN_S = 0.1  # how long output is awaited from processes that a command left behind
KILL_S = 2.0  # how long a tree may take to end
BEGIN_S = 0.5  # how long a program may take to begin before it is looked at
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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


class Foreground:
    """A command whose end the host awaits.

    `outputs`: what came from its streams, by descriptor. `open`: those that have not ended, and that of its input. `cut`: why it
    has to end, if so.
    """

    def __init__(
        self, request: Header, since: int, streams: tuple[int, int], feed: int | None, stdin: memoryview
    ) -> None:
        self.number, self.since, self.began = request["number"], since, time.monotonic()
        self.deadline = self.began + request["timeout_s"]
        self.outputs = {fd: StreamEnds(request["output_bytes"]) for fd in streams}
        self.open = {*streams} if feed is None else {*streams, feed}
        self.stdin, self.cut = stdin, ""
        self.pid, self.code = 0, -signal.SIGKILL  # until it is known to have ended otherwise

    def move(self, fd: int, event: int) -> bool:
        """Move some data of a stream, and return whether it has ended. Raises BlockingIOError if it was not ready."""
        if fd in self.outputs:
            chunk = os.read(fd, 1 << 16)
            self.outputs[fd].add(chunk)
            return not chunk
        try:
            self.stdin = self.stdin[os.write(fd, self.stdin[: 1 << 16]) :]
        except BrokenPipeError:
            return True
        return not self.stdin or bool(event & (select.POLLERR | select.POLLHUP))

    def close(self, *fds: int) -> None:
        self.open -= {*fds}
        for fd in fds:
            os.close(fd)

    def report(self) -> tuple[Header, bytes]:
        texts = [stream.text() for stream in self.outputs.values()]
        facts = {
            "exit_code": self.code if self.code >= 0 else 128 - self.code,
            "stdout_bytes": len(texts[0]),
            "truncated": any(stream.truncated for stream in self.outputs.values()),
            "timed_out": self.cut == "timed_out",
            "stopped": self.cut == "stopped",
            "duration_s": time.monotonic() - self.began,
        }
        return facts, b"".join(texts)


class Commands:
    """Everything that runs in the sandbox besides this program."""

    def __init__(self, files: WorkspaceFiles, wake: int, settings: Header) -> None:
        """`settings`, of which `environment`: what an image sets, which holds but for the home."""
        self.files, self.wake, self.nice, self.copies = files, wake, settings["nice"], settings["copies"]
        usual = {"PATH": PATH, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        self.environment = {**usual, **settings["environment"], "HOME": files.root}
        self.running: dict[int, Foreground | None] = {}  # by pid
        self.foreground: dict[int, Foreground] = {}  # by the number of the request
        self.poller = select.poll()
        self.ticks = os.sysconf("SC_CLK_TCK")

    def reap(self) -> None:
        """Take note of everything that has ended."""
        for pid, status in ended_children(self.wake):
            if (command := self.running.pop(pid, None)) is not None:
                command.code = os.waitstatus_to_exitcode(status)

    def start(self, request: Header, streams: typing.Sequence[int], foreground: Foreground | None = None) -> int:
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
        self.running[pid] = foreground
        return pid

    def spawn(self, command: Words, environment: typing.Mapping[str, str], streams: typing.Sequence[int]) -> int:
        """Start a program by vfork, which does not copy this large process as a fork does, and return its pid.

        Beside others it starts by a fork: they may stop it before it begins, as with a signal to all. Until the end of a vfork
        some interpreters run no other thread, and so could not end what is stopped.

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

        vars(subprocess)["_USE_VFORK"] = not self.all()
        thread = threading.Thread(target=begin)
        try:
            thread.start()
        except RuntimeError:
            raise BlockingIOError(errno.EAGAIN, "no thread is left") from None
        thread.join(BEGIN_S)
        while thread.is_alive():
            self.kill_stopped()
            thread.join(BEGIN_S)
        [started] = outcomes
        if isinstance(started, BaseException):
            raise started
        started.returncode = 0  # it is not for `subprocess` to wait for it: `reap` does
        return started.pid

    def kill_stopped(self) -> None:
        """Kill children that are stopped and are no commands: a program that has not begun, or an orphan."""
        for pid, parent, _ in processes():
            if parent == os.getpid() and pid not in self.running and status_of(str(pid))[:1] == [b"T"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def begin(self, request: Header, stdin: memoryview) -> Foreground:
        """Begin a command. It is answered once it is `over`."""
        since, out, err = self.now(), os.pipe(), os.pipe()
        feed = os.pipe() if len(stdin) else (os.open("/dev/null", os.O_RDONLY), None)
        command = Foreground(request, since, (out[0], err[0]), feed[1], stdin)
        try:
            command.pid = self.start(request, (feed[0], out[1], err[1]), command)
        except BaseException as error:
            command.close(*command.open)
            if not isinstance(error, Unstartable):
                raise
            command.code = 127 if error.errno == errno.ENOENT else 126
            command.outputs[err[0]].add(((error.strerror or "") + "\n").encode("utf-8", "replace"))
        finally:
            for fd in (feed[0], out[1], err[1]):
                os.close(fd)
        self.foreground[request["number"]] = command
        for fd in command.open:
            os.set_blocking(fd, False)
            self.poller.register(fd, select.POLLOUT if fd == feed[1] else select.POLLIN)
        return command

    def rest_ms(self) -> float | None:
        """Return the time until the next command reaches its limit."""
        deadlines = [command.deadline for command in self.foreground.values()]
        return 1 + 1000 * max(min(deadlines) - time.monotonic(), 0) if deadlines else None

    def move(self, fd: int, event: int) -> None:
        """Move data of a command's stream that is ready."""
        [command] = [command for command in self.foreground.values() if fd in command.open]
        with contextlib.suppress(BlockingIOError):  # who writes to a pipe may read from it, and be faster
            if command.move(fd, event):
                self.poller.unregister(fd)
                command.close(fd)

    def over(self) -> list[Foreground]:
        """Return the commands that have ended or reached their limits, or that the host wants to end."""
        return [command for command in self.foreground.values() if self.ended(command)]

    def ended(self, command: Foreground) -> bool:
        if command.cut:
            return True
        if command.pid in self.running:
            if command.deadline > time.monotonic():
                return False
            self.reap()  # the end of another one may have taken long
            command.cut = "timed_out" if command.pid in self.running else ""
        elif command.outputs.keys() & command.open:
            command.deadline = min(command.deadline, time.monotonic() + DRAIN_S)
            return command.deadline <= time.monotonic()
        return True

    def finish(self, command: Foreground) -> tuple[Header, bytes]:
        """Return the answer to a command that is over. What was cut short ends with all that it started."""
        del self.foreground[command.number]
        for fd in command.open:
            self.poller.unregister(fd)
        command.close(*command.open)
        if command.cut:
            self.end(command.pid, command.since)
        return command.report()

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
                with contextlib.suppress(ProcessLookupError):  # the last one may have ended by now
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
