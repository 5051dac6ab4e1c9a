"""Function calls inside a sandbox: a warm interpreter that forks once for each request.

Part of the resident program (`program.py`). A sandbox that serves calls serves nothing else. Two kinds of process run in it:

* The *resident* waits for a request, hands it to a worker, relays what the worker wrote, enforces its time limits, and
  forgets it. It runs no agent code and never reads a request, which would leave traces in the memory that later workers inherit.
* A *worker*, the first process of new user, pid and mount namespaces, mounts an empty workspace, gives up every privilege,
  and only then reads its request and imports agent code. It serves one request; when it ends, the kernel kills everything
  left in its namespace. One worker is prepared ahead of need.

A request is a frame {"do": "call", "size": n} followed by n bytes of JSON that only the worker reads. The answer is a frame
{"answer": why it ended} with the bytes the worker wrote, which nobody trusts: "ready NONCE", then a line
"NONCE [status, text]" for each argument, or "failed WHY" if no agent code ran.

Covers Linux on x86_64 and aarch64. Does not cover a worker's lies about its results: it runs in one process with the agent's
code, which is why expected values never enter a sandbox.
"""

from __future__ import annotations

import base64
import gc
import importlib
import json
import math
import os
import select
import signal
import sys
import time
import types
import typing

from composer_nb.harness.sandbox.guest.values import NotPlain, value_text
from composer_nb.harness.sandbox.system.linux import (
    NAMESPACES,
    Maps,
    clone,
    drop_capabilities,
    hide_memory,
    install_filter,
    machine,
    map_ids,
    mount,
    patience,
    read_exactly,
    send_frame,
    set_limits,
    status_of,
    write_all,
    write_ids,
)

SETUP_S = 10.0  # seconds for a worker to get ready, more on a busy machine
RESULT_FD, GO_FD = 3, 4
MAX_FDS = 4096
TICK_S = 0.005
SLEEP_CHECK_S = 0.05  # time between two checks whether a worker sleeps
PATIENCE = 5  # a request that does not sleep may take this many times wall_s; longer means an overloaded machine
SETUP_FAILED = 12  # a worker's exit code
PRELOADED = "bisect collections copy functools heapq itertools math re string".split()

# The network, ipc, uts and cgroup namespaces are the sandbox's: its network has no interface, and no worker can make a socket,
# a queue or shared memory (`seccomp.py`). New ones for each request would cost as much as all the rest.
OWN_NAMESPACES = NAMESPACES["user"] | NAMESPACES["pid"] | NAMESPACES["mount"]
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8

Settings = typing.Dict[str, typing.Any]  # noqa: UP006  (runs on Python 3.9 too)


# The worker.


def write_files(workspace: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = os.path.join(workspace, name)
        if "/" in name:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        write_all(fd, text.encode("utf-8", "surrogatepass"))
        os.close(fd)


def send_line(nonce: str, fields: list[str]) -> None:
    write_all(RESULT_FD, (nonce + " " + json.dumps(fields) + "\n").encode())


def call(function: typing.Callable[..., typing.Any], argument: str, limit: int) -> list[str]:
    """Call once and return ["returned", text], ["raised", name of the exception's type] or ["unreadable", ""]."""
    try:
        # The host has checked that this is a literal; compiling is faster than ast.literal_eval.
        value = function(*eval(argument.strip(), {"__builtins__": {"set": set}}))
        return ["returned", value_text(value, limit)]
    except NotPlain:
        return ["unreadable", ""]
    except BaseException as error:
        return ["raised", type_name(error)]


def type_name(error: BaseException) -> str:
    name: str = type.__dict__["__name__"].__get__(type(error))  # a metaclass may have its own __name__
    return name if len(name) <= 200 and name.isidentifier() else "Exception"


def load(name: str, files: dict[str, str], workspace: str) -> types.ModuleType:
    """Import a module of the workspace, even if a preloaded one has its name."""
    sys.path.insert(0, workspace)
    source = files.get(name + ".py")
    if source is None:
        sys.modules.pop(name, None)
        return importlib.import_module(name)
    module = types.ModuleType(name)  # the common case, without a path search
    module.__file__ = os.path.join(workspace, name + ".py")
    sys.modules[name] = module
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    return module


def run_calls(nonce: str, request: Settings, workspace: str, limit: int) -> None:
    """Write and import the module and answer each argument with one line. Agent code runs from here on."""
    try:
        write_files(workspace, request["files"])
        function = getattr(load(request["module"], request["files"], workspace), request["function"])
    except BaseException as error:
        for _ in request["arguments"]:
            send_line(nonce, ["raised", type_name(error)])
        return
    for argument in request["arguments"]:
        send_line(nonce, call(function, argument, limit))


def keep_descriptors(result: int, go: int) -> None:
    """Close all descriptors but stdin, `result` and `go`, which get fixed numbers; stdout and stderr become /dev/null."""
    os.dup2(result, 10)
    os.dup2(go, 11)
    devnull = os.open("/dev/null", os.O_RDWR)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.dup2(10, RESULT_FD)
    os.dup2(11, GO_FD)
    os.closerange(GO_FD + 1, MAX_FDS)


def enter_namespaces(limits: Settings, workspace: str, maps: Maps) -> None:
    """Take on an id in the new user namespace, mount an empty workspace and cover /proc."""
    hide_memory(False)  # its files in /proc are root's while it is hidden
    write_ids(maps)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    size = f"size={limits['disk_bytes']},nr_inodes={limits['inodes']},mode=0700"
    mount("workspace", workspace, "tmpfs", flags, size)
    mount("nothing", "/proc", "tmpfs", flags | MS_RDONLY, "size=4k,nr_inodes=2")


def worker(settings: Settings, result: int, go: int, program: bytes, maps: Maps) -> typing.NoReturn:
    """Give up every privilege, wait for a request, say "ready", run agent code. Never returns."""
    limits, workspace = settings["calls"], settings["workspace"]
    try:
        os.setsid()  # kill(0) reaches a whole process group, across namespaces: be alone in one
        enter_namespaces(limits, workspace, maps)
        hide_memory()
        keep_descriptors(result, go)
        result = RESULT_FD
        os.chdir(workspace)
        os.environ.clear()
        sys.dont_write_bytecode = True
        drop_capabilities(machine())
        set_limits(settings["call_rlimits"])  # the resident enforces times; RLIMIT_CPU is a second lock
        install_filter(program)
        nonce = os.urandom(8).hex()
        gc.enable()
        size = int.from_bytes(read_exactly(GO_FD, 4), "big")
        request = json.loads(read_exactly(0, size))
        os.dup2(1, 0)
        os.close(GO_FD)
    except BaseException as error:  # process boundary: the resident gets the reason
        text = (type(error).__name__ + ": " + str(error)).replace("\n", " ")
        write_all(result, ("failed " + text + "\n").encode())
        os._exit(SETUP_FAILED)
    write_all(RESULT_FD, ("ready " + nonce + "\n").encode())
    try:
        run_calls(nonce, request, workspace, limits["output_bytes"])
    finally:
        os._exit(0)


# The resident.


def asleep(pid: int) -> bool:
    """Return whether no thread of a process runs, waits for a CPU, or waits in the kernel (as for a disk)."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return not any(status_of(f"{pid}/task/{thread}")[:1] in ([b"R"], [b"D"]) for thread in threads)


def watch(pid: int, source: int, limits: Settings, buffer: bytearray) -> tuple[str, int]:
    """Collect what a worker writes until it ends; kill it and its namespace at a limit.

    CPU time is read from the worker's clock, which it cannot stop, unlike a timer of its own: when one thread could have used up
    what is left, then every TICK_S. Sleep is summed over checks of its threads; one check adds two SLEEP_CHECK_S at most, so
    that a machine that was frozen itself counts as nobody's sleep.

    Returns (why, bytes used). why is "exit", "cpu", "asleep", "flood", or the machine's fault: "starved", "slow start".
    """
    view, used, ready, why = memoryview(buffer), 0, False, "exit"
    clock = (~pid << 3) | 2  # see clock_getcpuclockid(3)
    deadline, cpu_end, slept, checked = time.monotonic() + patience(SETUP_S), math.inf, 0.0, math.inf
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(source, select.POLLIN)
    while why == "exit":
        now = time.monotonic()
        wall_left, cpu_left = deadline - now, cpu_end - time.clock_gettime(clock)
        if now - checked >= SLEEP_CHECK_S:
            slept += min(now - checked, 2 * SLEEP_CHECK_S) if asleep(pid) else 0.0
            checked = now
        why = reason(ready, wall_left, cpu_left, slept >= limits["wall_s"])
        if why != "exit":
            break
        events = dict(poll.poll(1 + 1000 * min(wall_left, max(cpu_left, TICK_S), SLEEP_CHECK_S)))
        if source in events:
            count = os.readv(source, [view[used:]])
            if count == 0:
                poll.unregister(source)
            used += count
            if used == len(buffer):
                why = "flood"
            elif not ready and count:
                ready, checked = True, time.monotonic()
                deadline, cpu_end = checked + PATIENCE * limits["wall_s"], time.clock_gettime(clock) + limits["cpu_s"]
        elif pidfd in events:
            break
    if why != "exit":
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return why, used


def reason(ready: bool, wall_left: float, cpu_left: float, overslept: bool) -> str:
    """Return the reason why a worker must end now, or "exit". Its own faults come first: they are the same on every machine."""
    if cpu_left <= 0:
        return "cpu"
    if overslept:
        return "asleep"
    if wall_left > 0:
        return "exit"
    return "starved" if ready else "slow start"


class Caller:
    """Serves calls, each in a worker of its own."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.limits = settings, settings["calls"]
        self.program, self.table, self.maps = base64.b64decode(settings["filter"]), machine(), map_ids()
        self.buffer = bytearray(self.limits["answer_bytes"])

    def serve(self) -> None:
        for name in PRELOADED:  # agent code often imports them
            importlib.import_module(name)
        gc.collect()
        gc.disable()
        gc.freeze()
        spare = self.prepare()
        send_frame(1, {"ready": True})
        going = True
        while going:
            try:
                frame = json.loads(read_exactly(0, int.from_bytes(read_exactly(0, 4), "big")))
            except EOFError:
                return
            pid, go, source = spare
            try:
                os.write(go, int(frame["size"]).to_bytes(4, "big"))
            except BrokenPipeError:
                pass  # it failed to start, and its results say why
            os.close(go)
            spare = self.prepare()  # while the agent's code runs
            going = self.finish(pid, source)

    def prepare(self) -> tuple[int, int, int]:
        """Start a worker, which waits for a request: (pid, where to say go, where its results come)."""
        source, result = os.pipe()
        wait, go = os.pipe()
        pid = clone(OWN_NAMESPACES, self.table)
        if pid == 0:
            worker(self.settings, result, wait, self.program, self.maps)
        os.close(result)
        os.close(wait)
        return pid, go, source

    def finish(self, pid: int, source: int) -> bool:
        """Wait for a worker's end and send its answer. False if its request may still be unread.

        Results pass through one buffer, which is cleared.
        """
        why, used = watch(pid, source, self.limits, self.buffer)
        os.close(source)
        _, status = os.waitpid(pid, 0)
        end = why if why != "exit" else "finished" if status == 0 else "died"
        send_frame(1, {"answer": end}, memoryview(self.buffer)[:used])
        in_step = self.buffer.startswith(b"ready ")
        self.buffer[:used] = bytes(used)
        return in_step
