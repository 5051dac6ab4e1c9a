"""The program inside the box: a zygote that runs each request in a fresh sandbox of its own.

`composer_nb.harness.sandbox` passes this file's text (`bundle.py`) to `python3 -s -S -c` inside bubblewrap; besides `linux.py`
it uses the standard library alone. Two kinds of process:

* the *zygote* waits for a request, hands it to a worker, relays what that wrote, keeps its time limits, and
  forgets it. It never runs agent code.
* a *worker*, pid 1 in new user, pid and mount namespaces, mounts an empty workspace,
  gives up every privilege, and only then reads its request and imports agent code. It serves one request;
  when it ends the kernel kills whatever is left in its namespace. One worker is made ahead of need.

Frames on stdin and stdout: 4 bytes of length (big-endian) and a body. A request's body is JSON; an answer's
is a JSON header, a newline, and the bytes the worker wrote, which nobody here trusts: "ready NONCE", then a
line "NONCE [status, text]" an argument (or "failed WHY" before any agent code ran).

Covers Linux on x86_64 and aarch64. Does not cover: a worker's own lies about its results (it runs in one
process with the agent's code), which is why expected values never enter a box.
"""

from __future__ import annotations

import base64
import bisect  # noqa: F401  (unused ones are preloaded: agent code often imports them)
import collections  # noqa: F401
import copy  # noqa: F401
import functools  # noqa: F401
import gc
import heapq  # noqa: F401
import importlib
import itertools  # noqa: F401
import json
import math
import os
import re  # noqa: F401
import resource
import select
import signal
import string  # noqa: F401
import sys
import time
import types
import typing

from composer_nb.harness.linux import (
    NAMESPACES,
    Maps,
    clone,
    drop_capabilities,
    hide_memory,
    install_filter,
    machine,
    map_ids,
    mount,
    read_exactly,
    write_all,
    write_ids,
)

WORKSPACE = "/box"
SETUP_S = 10.0  # wall seconds for a worker to get ready; more means that the machine is in trouble
RESULT_FD, GO_FD = 3, 4
MAX_FDS = 4096
MAX_DEPTH = 50
TICK_S = 0.005
LOOK_S = 0.05  # how often a worker is looked at, whether it sleeps
PATIENCE = 5  # a request may take so many times wall_s, if it does not sleep; more means that the machine is in trouble
SETUP_FAILED = 12  # a worker's exit code

# Network, ipc, uts and cgroup namespaces are bwrap's: its network has no interface but a dead loopback, and no worker can
# make a socket, a queue or shared memory (`seccomp.py`). Anew for each request they would cost as much as all the rest.
OWN_NAMESPACES = NAMESPACES["user"] | NAMESPACES["pid"] | NAMESPACES["mount"]
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8

Limits = typing.Dict[str, typing.Any]  # noqa: UP006  (the fields of sandbox.Limits; runs on Python 3.9 too)
Function = typing.Callable[..., typing.Any]


class Unreadable(Exception):
    """A value that is not built from exact builtin types, or is too deep or too long."""


def value_text(value: typing.Any, limit: int, depth: int = 0) -> str:
    """`repr(value)` of exact builtin types with set elements in order of their texts.

    Raises Unreadable for anything else, for nesting deeper than MAX_DEPTH and for longer texts.
    """
    kind = type(value)
    text: str | None
    if kind is str or kind is bytes:
        text = repr(value) if len(value) <= limit else None
    elif value is None or kind is bool or kind is float or (kind is int and value.bit_length() <= 13_000):
        text = repr(value)
    elif depth >= MAX_DEPTH:
        raise Unreadable
    elif kind is dict:
        pairs, left = [], limit
        for key, item in value.items():
            pairs.append(value_text(key, left, depth + 1) + ": " + value_text(item, left, depth + 1))
            left -= len(pairs[-1]) + 2
        text = "{" + ", ".join(pairs) + "}"
    elif kind is list or kind is tuple or kind is set:
        parts, left = [], limit
        for item in value:
            parts.append(value_text(item, left, depth + 1))
            left -= len(parts[-1]) + 2
        if kind is set:
            text = "{" + ", ".join(sorted(parts)) + "}" if parts else "set()"
        elif kind is list:
            text = "[" + ", ".join(parts) + "]"
        else:
            text = "(" + ", ".join(parts) + (",)" if len(parts) == 1 else ")")
    else:
        raise Unreadable
    if text is None or len(text) > limit:
        raise Unreadable
    return text


def set_limits(limits: Limits) -> None:
    """Resource limits of the worker. Its times are the zygote's to watch; RLIMIT_CPU is a second lock."""
    for name, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, limits["threads"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_CPU, int(limits["cpu_s"]) + 2),
    ):
        resource.setrlimit(name, (value, value))


def write_files(files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(WORKSPACE, name)
        if "/" in name:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        write_all(fd, text.encode("utf-8", "surrogatepass"))
        os.close(fd)


def report_failure(fd: int, error: BaseException) -> None:
    """Say why the sandbox could not be made; only before agent code ran."""
    text = (type(error).__name__ + ": " + str(error)).replace("\n", " ")
    write_all(fd, ("failed " + text + "\n").encode())


def send_line(nonce: str, fields: list[str]) -> None:
    write_all(RESULT_FD, (nonce + " " + json.dumps(fields) + "\n").encode())


def call(function: Function, argument: str, limit: int) -> list[str]:
    """One call: ["returned", text], ["raised", name of the exception's type] or ["unreadable", ""]."""
    try:
        # The host has checked that this is a literal; compiling is faster than ast.literal_eval.
        value = function(*eval(argument.strip(), {"__builtins__": {"set": set}}))
        return ["returned", value_text(value, limit)]
    except Unreadable:
        return ["unreadable", ""]
    except BaseException as error:
        return ["raised", type_name(error)]


def type_name(error: BaseException) -> str:
    name: str = type.__dict__["__name__"].__get__(type(error))  # a metaclass may have its own __name__
    return name if len(name) <= 200 and name.isidentifier() else "Exception"


def load(name: str, files: dict[str, str]) -> types.ModuleType:
    """Import a module of the workspace, past everything of that name that is preloaded."""
    sys.path.insert(0, WORKSPACE)
    source = files.get(name + ".py")
    if source is None:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    module = types.ModuleType(name)  # the common case, without a path search
    module.__file__ = os.path.join(WORKSPACE, name + ".py")
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def run_calls(nonce: str, request: dict[str, typing.Any], limit: int) -> None:
    """Write and import the module, answer each argument with one line; agent code runs from here on."""
    try:
        write_files(request["files"])
        function = getattr(load(request["module"], request["files"]), request["function"])
    except BaseException as error:
        for _ in request["arguments"]:
            send_line(nonce, ["raised", type_name(error)])
        return
    for argument in request["arguments"]:
        send_line(nonce, call(function, argument, limit))


def keep_descriptors(result: int, go: int) -> None:
    """Close all but stdin, `result` and `go`, which get fixed numbers; stdout and stderr lead nowhere."""
    os.dup2(result, 10)
    os.dup2(go, 11)
    devnull = os.open("/dev/null", os.O_RDWR)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.dup2(10, RESULT_FD)
    os.dup2(11, GO_FD)
    os.closerange(GO_FD + 1, MAX_FDS)


def worker(limits: Limits, result: int, go: int, table: dict[str, int], program: bytes, maps: Maps) -> typing.NoReturn:
    """Give up everything, wait for a request, say "ready", run agent code. Never returns."""
    try:
        os.setsid()  # kill(0) reaches a whole process group, across namespaces: be alone in one
        if maps:
            enter_sandbox(limits, maps)
        hide_memory()
        keep_descriptors(result, go)
        result = RESULT_FD
        os.chdir(WORKSPACE)
        os.environ.clear()
        sys.dont_write_bytecode = True
        drop_capabilities(table)
        set_limits(limits)
        install_filter(program)
        nonce = os.urandom(8).hex()
        gc.enable()
        size = int.from_bytes(read_exactly(GO_FD, 4), "big")
        request = json.loads(read_exactly(0, size))
        os.dup2(1, 0)
        os.close(GO_FD)
    except BaseException as error:  # process boundary: the zygote gets the reason
        report_failure(result, error)
        os._exit(SETUP_FAILED)
    write_all(RESULT_FD, ("ready " + nonce + "\n").encode())
    try:
        run_calls(nonce, request, limits["output_bytes"])
    finally:
        os._exit(0)


def enter_sandbox(limits: Limits, maps: Maps) -> None:
    """The first steps in new namespaces: ids, an empty workspace, nothing at /proc."""
    write_ids(maps)
    size = f"size={limits['disk_bytes']},nr_inodes={limits['inodes']},mode=0700"
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    hidden = flags | MS_RDONLY
    mount("box", WORKSPACE, "tmpfs", flags, size)
    mount("box", "/proc", "tmpfs", hidden, "size=4k,nr_inodes=2")


class Proc:
    """What the zygote sees of its workers in a /proc: that of its own namespace, or (`fd`) the host's."""

    def __init__(self, fd: int | None) -> None:
        self.own = fd is None
        self.fd = os.open("/proc", os.O_RDONLY) if fd is None else fd

    def name_of(self, pid: int) -> str:
        """Under what number a worker stands there. RuntimeError where it does not."""
        if self.own:
            return str(pid)
        me = os.readlink("self", dir_fd=self.fd)
        for name in os.listdir(self.fd):
            fields = self.stat(name) if name.isdigit() else []
            if fields and fields[1].decode() == me:  # the parent; there is but one worker
                return name
        raise RuntimeError("the host's /proc does not show the sandbox (is it mounted with hidepid?)")

    def stat(self, path: str) -> list[bytes]:
        """Fields of `stat` from the state on, past the name, which a process chooses; none for one that is gone."""
        try:
            fd = os.open(path + "/stat", os.O_RDONLY, dir_fd=self.fd)
            try:
                return os.read(fd, 4096).rpartition(b") ")[2].split()
            finally:
                os.close(fd)
        except (FileNotFoundError, ProcessLookupError):
            return []

    def asleep(self, name: str) -> bool:
        """Whether no thread of a process runs, waits for a CPU, or waits for the kernel (as for a disk)."""
        try:
            fd = os.open(name + "/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.fd)
        except (FileNotFoundError, ProcessLookupError):
            return True
        try:
            threads = os.listdir(fd)
        finally:
            os.close(fd)
        return not any(self.stat(name + "/task/" + thread)[:1] in ([b"R"], [b"D"]) for thread in threads)


def watch(pid: int, source: int, limits: Limits, buffer: bytearray, proc: Proc) -> tuple[str, int]:
    """Collect what the worker writes until it has ended, or kill it and its namespace at a limit.

    CPU time is read from the worker's clock, which it cannot stop, unlike a timer of its own: when one thread
    could have used up what is left, and then every TICK_S. Sleep is added up from looks at its threads; a look counts for
    two LOOK_S at most, so that a machine that was frozen itself puts no sleep on anybody's account.
    Returns (why, bytes used): why is "exit", "cpu", "asleep", "flood", or the machine's fault: "starved", "slow start".
    """
    view, used, ready, why = memoryview(buffer), 0, False, "exit"
    clock = (~pid << 3) | 2  # see clock_getcpuclockid(3)
    deadline, cpu_end, slept, looked, name = time.monotonic() + SETUP_S, math.inf, 0.0, math.inf, ""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(source, select.POLLIN)
    while why == "exit":
        now = time.monotonic()
        wall_left, cpu_left = deadline - now, cpu_end - time.clock_gettime(clock)
        if now - looked >= LOOK_S:
            name = name or proc.name_of(pid)
            slept += min(now - looked, 2 * LOOK_S) if proc.asleep(name) else 0.0
            looked = now
        why = reason(ready, wall_left, cpu_left, slept >= limits["wall_s"])
        if why != "exit":
            break
        events = dict(poll.poll(1 + 1000 * min(wall_left, max(cpu_left, TICK_S), LOOK_S)))
        if source in events:
            count = os.readv(source, [view[used:]])
            if count == 0:
                poll.unregister(source)
            used += count
            if used == len(buffer):
                why = "flood"
            elif not ready and count:
                ready, looked = True, time.monotonic()
                deadline, cpu_end = looked + PATIENCE * limits["wall_s"], time.clock_gettime(clock) + limits["cpu_s"]
        elif pidfd in events:
            break
    if why != "exit":
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return why, used


def reason(ready: bool, wall_left: float, cpu_left: float, overslept: bool) -> str:
    """Why a worker must end now, or "exit". Its own faults come first: they are the same on every machine."""
    if cpu_left <= 0:
        return "cpu"
    if overslept:
        return "asleep"
    if wall_left > 0:
        return "exit"
    return "starved" if ready else "slow start"


def prepare(limits: Limits, table: dict[str, int], program: bytes, nested: bool, maps: Maps) -> tuple[int, int, int]:
    """A worker in its sandbox that waits for a request: (pid, where to say go, where its results come)."""
    source, result = os.pipe()
    wait, go = os.pipe()
    pid = clone(OWN_NAMESPACES, table) if nested else os.fork()
    if pid == 0:
        worker(limits, result, wait, table, program, maps if nested else ())
    os.close(result)
    os.close(wait)
    return pid, go, source


def hand_over(go: int, size: int) -> None:
    """Let a worker read its request of `size` bytes from stdin."""
    try:
        os.write(go, size.to_bytes(4, "big"))
    except BrokenPipeError:
        pass  # it failed to start, and its results say why
    os.close(go)


def finish(pid: int, source: int, limits: Limits, buffer: bytearray, proc: Proc) -> bool:
    """See a worker to its end and write its answer. False if its request may still lie on stdin.

    The zygote itself never reads a request: it would leave traces in memory that later workers inherit.
    Results pass through one buffer that is cleared.
    """
    why, used = watch(pid, source, limits, buffer, proc)
    os.close(source)
    _, status, usage = os.wait4(pid, 0)
    ended = "finished" if status == 0 else "died"
    end = ended if why == "exit" else why
    header = json.dumps({"end": end, "cpu_s": round(usage.ru_utime + usage.ru_stime, 6)}).encode() + b"\n"
    write_all(1, (len(header) + used).to_bytes(4, "big") + header)
    write_all(1, memoryview(buffer)[:used])
    in_step = buffer.startswith(b"ready ")
    buffer[:used] = bytes(used)
    return in_step


def main() -> None:
    """argv: "nested" (serve until stdin ends) or "single" (one request, in bubblewrap's own), limits, the system call
    filter, and for "single" the descriptor of a /proc."""
    nested, limits, program = sys.argv[1] == "nested", json.loads(sys.argv[2]), base64.b64decode(sys.argv[3])
    proc = Proc(None if nested else int(sys.argv[4]))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 can only be reached by signals that have a handler
    table, maps, buffer = machine(), map_ids(), bytearray(limits["answer_bytes"])
    gc.collect()
    gc.disable()
    gc.freeze()
    going, kit = True, (limits, table, program, nested, maps)
    spare: tuple[int, int, int] | None = prepare(*kit)
    assert spare is not None
    proc.name_of(spare[0])  # complains at once where nothing is to be seen
    while going and spare is not None:
        try:
            size = int.from_bytes(read_exactly(0, 4), "big")
        except EOFError:
            break
        pid, go, source = spare
        hand_over(go, size)
        spare = prepare(*kit) if nested else None  # while the agent's code runs
        going = finish(pid, source, limits, buffer, proc)
