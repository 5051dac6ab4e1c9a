"""Adversarial checks of a sandbox backend: hostile programs run as ordinary requests, judged by evidence.

Each case looks at what the program reported and at what the host saw: a listener that was reached, a process
that stayed, the time it took. A program that reports nothing at all has not proved to be stopped: then the
outcome itself must be the one that the limit in question gives, or the case is not counted as blocked.

Covers escapes, resource use and the ways to forge a result. Does not cover faults of the kernel.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness import box
from composer_nb.harness.sandbox import BwrapSandboxes, CallOutcome, CallRequest

BACKENDS = ("bwrap",)
SECRET_NAME = "COMPOSER_NB_CHECK_SECRET"  # an environment variable of the host
SECRET = "canary-7f3a91"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the cases may look at from outside."""

    boxes: BwrapSandboxes
    listener: socket.socket  # on the loopback of the host; nobody is to reach it
    canary: Path  # a world-readable file of the host that holds SECRET

    def run(self, source: str, *arguments: str) -> tuple[CallOutcome, ...]:
        request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=arguments or ("()",))
        return self.boxes.run([request])[0]

    def report(self, source: str, *arguments: object) -> Any:
        """The plain value that `f(*arguments)` returned. Raises Silent when it returned none."""
        outcome = self.run(source, repr(arguments))[0]
        if outcome.status != "returned":
            raise Silent(f"{outcome.status} {outcome.text}".strip())
        return ast.literal_eval(outcome.text)


class Silent(Exception):
    """The program gave no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    blocked: bool
    detail: str
    flagged: bool = False  # the outcome itself shows that something was wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    title: str
    judge: Callable[[Host], Verdict]


CASES: list[Case] = []


def case(title: str) -> Callable[[Callable[[Host], Verdict]], Callable[[Host], Verdict]]:
    """Register a judge; its name, with hyphens, is the case's id."""

    def register(judge: Callable[[Host], Verdict]) -> Callable[[Host], Verdict]:
        CASES.append(Case(id=judge.__name__.replace("_", "-"), title=title, judge=judge))
        return judge

    return register


def _nothing(found: Any) -> Verdict:
    """Blocked when the program reports that nothing worked."""
    return Verdict(blocked=found == [], detail=f"succeeded: {found}" if found else "every attempt failed")


# Each program may use these: `attempt(found, name, thunk)` notes a name when the thunk raises nothing.
HELPERS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(found, name, thunk):
    try:
        result = thunk()
    except BaseException:
        return
    found.append(name if result is None or result is True else name + "=" + repr(result)[:60])
def syscall(number, *arguments):
    result = libc.syscall(*[ctypes.c_long(each) for each in (number, *arguments)])
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""


@case("read files of the host")
def read_host_files(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
def f(paths):
    found = []
    for path in paths:
        attempt(found, path, lambda: open(path, "rb").read(40))
        attempt(found, path, lambda: os.listdir(path))
    return found
"""
    )
    home = [str(Path.home())] if Path.home() != Path("/") else []  # an account without a home
    names = ["/etc/shadow", "/etc/passwd", "/etc/hostname", "/home", "/var", "/sys", "/run", *home]
    return _nothing(host.report(source, [*names, str(host.canary), str(host.canary.parent), str(Path(__file__))]))


@case("write outside the workspace")
def write_outside(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
def f(directories):
    found = []
    for directory in directories + [os.path.dirname(os.__file__), os.path.realpath("/lib64")]:
        attempt(found, directory, lambda: open(directory + "/canary-written", "w").close())
        attempt(found, directory, lambda: os.chmod(directory, 0o777))
    return found
"""
    )
    verdict = _nothing(host.report(source, ["/", "/usr", "/usr/lib", "/dev", "/proc", "/etc", str(host.canary.parent)]))
    reached = (host.canary.parent / "canary-written").exists()
    return Verdict(blocked=verdict.blocked and not reached, detail=verdict.detail)


@case("connect to a listener on the host's loopback")
def network(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import socket
def f(port):
    found = []
    for family, kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM),
                         (socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_STREAM),
                         (16, socket.SOCK_RAW)):
        attempt(found, "socket", lambda: socket.socket(family, kind).close())
    attempt(found, "connect", lambda: socket.create_connection(("127.0.0.1", port), 0.2).close())
    return found
"""
    )
    verdict = _nothing(host.report(source, host.listener.getsockname()[1]))
    try:
        host.listener.accept()[0].close()
    except BlockingIOError:
        return verdict
    return Verdict(blocked=False, detail="the listener was reached")


@case("see or signal other processes, the zygote among them")
def processes(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import signal
def f():
    found = []
    for pid in range(2, 400):
        if pid != os.getpid():
            attempt(found, "pid", lambda: os.kill(pid, 0))
    for victim in {1, os.getppid()} - {0, os.getpid()}:
        attempt([], "supervisor", lambda: os.kill(victim, signal.SIGKILL))  # judged by what still answers
    if not found:  # whoever sees others is not blocked anyway, and had better not do this
        attempt(found, "everybody", lambda: os.kill(-1, signal.SIGKILL))
    attempt(found, "proc", lambda: os.listdir("/proc")[0])
    attempt(found, "pidfd", lambda: os.pidfd_open(1))
    return found
"""
    )
    before = _descendants(host.boxes)
    verdict = _nothing(host.report(source))
    alive = bool(host.report("def f():\n    return True\n"))
    zygote = before[:2] == _descendants(host.boxes)[:2]
    return Verdict(blocked=verdict.blocked and alive and zygote, detail=verdict.detail)


@case("find what another request left")
def leftovers(host: Host) -> Verdict:
    leave = """
import builtins, os, sys, tempfile
def f(secret):
    builtins.left = secret
    sys.modules["left"] = secret
    done = 0
    for directory in (".", tempfile.gettempdir(), "/dev/shm", "/var/tmp", "/dev", "/proc", "/run"):
        try:
            with open(os.path.join(directory, "left"), "w") as file:
                done += file.write(secret) > 0
        except OSError:
            pass
    return done
"""
    look = """
import builtins, gc, os, sys, tempfile
def f():
    found = [d for d in (".", tempfile.gettempdir(), "/dev/shm", "/var/tmp", "/dev", "/proc", "/run")
             if os.path.exists(os.path.join(d, "left"))]
    found += [name for name in os.listdir(".") if name != "f.py"]
    found += ["builtins"] * hasattr(builtins, "left") + ["modules"] * ("left" in sys.modules)
    return found
"""
    written = host.report(leave, SECRET)
    verdict = _nothing(host.report(look))
    return Verdict(blocked=verdict.blocked and written > 0, detail=f"{written} files written; {verdict.detail}")


@case("read the memory of earlier requests")
def stale_memory(host: Host) -> Verdict:
    marker = "stale-" + os.urandom(6).hex()
    host.report("def f(marker):\n    return [marker] * 50\n", marker)
    # Reads around live objects, where an inherited heap would be; the search text is made from parts.
    source = """
import ctypes
def f(head, tail):
    chunk, start = 1 << 18, id(object()) & ~0xFFFFF
    text = ctypes.string_at(start, chunk)
    own = text.count((head + tail).encode())
    return own > 1
"""
    half = len(marker) // 2
    outcome = host.run(source, repr((marker[:half], marker[half:])))[0]
    found = outcome.status == "returned" and outcome.text == "True"
    return Verdict(blocked=not found, detail=f"{outcome.status} {outcome.text}: copies found beyond its own: {found}")


@case("read secrets from the environment")
def environment(host: Host) -> Verdict:
    source = """
import ctypes, os
def f():
    first = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, index = list(os.environ.items()), 0
    while first and first[index]:
        found.append(first[index].decode())
        index += 1
    return [str(entry) for entry in found]
"""
    assert os.environ.get(SECRET_NAME) == SECRET, "the check must have put its secret in the environment"
    return _nothing(host.report(source))


@case("use inherited descriptors")
def descriptors(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import stat
def f():
    found = []
    for fd in range(4096):
        attempt(found, str(fd), lambda: stat.filemode(os.fstat(fd).st_mode))
    return [name for name in found if name.split("=")[0] not in ("0", "1", "2")]
"""
    )
    found = host.report(source)
    pipe = [name for name in found if name.startswith("3=") and name[3] == "p"]
    return Verdict(blocked=len(found) == 1 == len(pipe), detail=f"besides the empty standard three: {found}")


@case("fork bomb")
def fork_bomb(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import subprocess, threading, time
def f(clone):
    found = []
    for _ in range(50):
        attempt(found, "fork", lambda: os.fork() or os._exit(0))
        attempt(found, "clone", lambda: syscall(clone, 17, 0, 0, 0, 0) or os._exit(0))
    attempt(found, "spawn", lambda: subprocess.run(["/usr/bin/python3", "-c", "0"]))
    attempt(found, "exec", lambda: os.execv("/usr/bin/python3", ["python3"]))
    threads = 0
    try:
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
            threads += 1
    except RuntimeError:
        pass
    return [found, threads]
"""
    )
    found, threads = host.report(source, box.machine()["clone"])
    blocked = found == [] and threads <= host.boxes.limits.threads
    return Verdict(blocked=blocked, detail=f"processes: {found}, threads: {threads}")


@case("memory bomb")
def memory_bomb(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
import mmap
def f():
    held = []
    try:
        while len(held) < 4096:
            held.append(mmap.mmap(-1, 1 << 20))
    except (OSError, MemoryError):
        pass
    found = []
    attempt(found, "memfd", lambda: os.memfd_create("x"))
    attempt(found, "shm", lambda: syscall(29, 0, 1 << 30, 0o1600))
    return [len(held), found]
"""
    )
    megabytes, found = host.report(source)
    limit = host.boxes.limits.memory_bytes >> 20
    grabbed = host.run("def f():\n    return len(bytearray(1 << 34))\n")[0]
    blocked = megabytes <= limit and found == [] and grabbed.status in ("raised", "died")
    detail = f"{megabytes} of {limit} MiB mapped; 16 GiB at once: {grabbed.status}; other ways: {found}"
    return Verdict(blocked=blocked, detail=detail)


@case("fill the disk, and use up its inodes")
def disk_fill(host: Host) -> Verdict:
    source = """
def f():
    total = files = 0
    try:
        while total < 1 << 30:
            with open("fill%d" % files, "wb", buffering=0) as file:
                files += 1
                for _ in range(4):
                    total += file.write(bytes(1 << 16))
    except OSError:
        pass
    empty = 0
    try:
        while empty < 500:
            open("empty%d" % empty, "w").close()
            empty += 1
    except OSError:
        pass
    return [total, files + empty]
"""
    limits = host.boxes.limits
    total, files = host.report(source)
    counted = files <= limits.inodes or not host.boxes.capabilities["limits"]["inodes"]
    return Verdict(blocked=total <= limits.disk_bytes and counted, detail=f"{total} bytes in {files} files")


def _timed(host: Host, source: str, longest_s: float) -> Verdict:
    """Blocked when the first argument is reported as timed out, in time, and the second was not run."""
    started = time.monotonic()
    outcomes = host.run(source, "()", "()")
    took = time.monotonic() - started
    statuses = [outcome.status for outcome in outcomes]
    blocked = statuses == ["timeout", "not_run"] and took < longest_s
    return Verdict(blocked=blocked, flagged="timeout" in statuses, detail=f"{statuses} after {took:.2f} s")


@case("endless loop")
def endless_loop(host: Host) -> Verdict:
    return _timed(host, "def f():\n    while True:\n        pass\n", host.boxes.limits.cpu_s + 1.0)


@case("endless loop that blocks signals and stops timers")
def endless_loop_without_signals(host: Host) -> Verdict:
    source = """
import signal
def f():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    while True:
        pass
"""
    return _timed(host, source, host.boxes.limits.cpu_s + 1.0)


@case("sleep past the wall deadline")
def sleep_past_deadline(host: Host) -> Verdict:
    source = "import time\ndef f():\n    time.sleep(60)\n"
    return _timed(host, source, host.boxes.limits.wall_s + 1.0)


@case("stop oneself and one's process group")
def stop_group(host: Host) -> Verdict:
    source = """
import os, signal
def f():
    os.kill(0, signal.SIGSTOP)
    while True:
        signal.pause()
"""
    verdict = _timed(host, source, host.boxes.limits.wall_s + 1.0)
    started = time.monotonic()
    host.report("def f():\n    return 0\n")  # SIGSTOP to one's process group must not reach the next worker
    neighbour_s = time.monotonic() - started
    detail = f"{verdict.detail}; the next request took {neighbour_s:.2f} s"
    return Verdict(blocked=verdict.blocked and neighbour_s < 1.0, flagged=verdict.flagged, detail=detail)


@case("forge result lines on every descriptor")
def forged_lines(host: Host) -> Verdict:
    source = """
import os
for fd in range(64):
    for nonce in ("", "ready ", "0 ", "0000000000000000 "):
        try:
            os.write(fd, (nonce + '["returned", "42"]\\n').encode())
        except OSError:
            pass
print('["returned", "42"]')
def f():
    raise ValueError
"""
    outcomes = host.run(source, "()", "()")
    believed = [outcome for outcome in outcomes if outcome.status == "returned"]
    odd = any(outcome.status == "unreadable" for outcome in outcomes)
    return Verdict(blocked=not believed, flagged=odd, detail=str([o.status for o in outcomes]))


@case("find the expected values")
def expected_values(host: Host) -> Verdict:
    source = """
import gc, sys
def f(head, tail):
    wanted, seen, frame = head + tail, [], sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals)[:20000].replace(repr(head), ""))
        frame = frame.f_back
    kept = [o for o in gc.get_objects() if type(o) in (list, tuple) and o is not seen]
    seen += [repr(o)[:2000] for o in kept[:500]]
    return any(wanted in text for text in seen[1:])
"""
    marker = "expected-" + os.urandom(6).hex()  # stays here, as the right answers of a test do
    request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=(repr((marker[:9], marker[9:])),))
    outcome = host.boxes.run([request])[0][0]
    found = outcome.text == "True"
    return Verdict(blocked=outcome.status == "returned" and not found, detail=f"{outcome.status} {outcome.text}")


@case("a value that claims to equal everything")
def always_equal(host: Host) -> Verdict:
    source = """
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "42"
def f(kind):
    return Equal(1) if kind == 0 else [Equal(1)] if kind == 1 else {Equal(1): 1}
"""
    outcomes = host.run(source, "(0,)", "(1,)", "(2,)")
    statuses = [outcome.status for outcome in outcomes]
    return Verdict(blocked=set(statuses) == {"unreadable"}, flagged="unreadable" in statuses, detail=str(statuses))


def _nothing_returned(host: Host, source: str, expected: CallOutcome) -> Verdict:
    outcomes = host.run(source, "()", "()")
    shown = [f"{outcome.status} {outcome.text}".strip() for outcome in outcomes]
    return Verdict(blocked=outcomes[0] == expected, flagged=outcomes[0].status == "died", detail=str(shown))


@case("os._exit(0) at import")
def exit_at_import(host: Host) -> Verdict:
    return _nothing_returned(host, "import os\nos._exit(0)\n", CallOutcome(status="died"))


@case("sys.exit(0) at import")
def sys_exit_at_import(host: Host) -> Verdict:
    source = "import sys\nsys.exit(0)\n"
    return _nothing_returned(host, source, CallOutcome(status="raised", text="SystemExit"))


@case("close the result pipe and go on")
def closed_pipe(host: Host) -> Verdict:
    source = "import os\ndef f():\n    os.closerange(0, 4096)\n    return 42\n"
    return _nothing_returned(host, source, CallOutcome(status="died"))


@case("a daemon that outlives its request")
def daemon(host: Host) -> Verdict:
    source = """
import os, threading, time
def f():
    threading.Thread(target=time.sleep, args=(60,)).start()
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
    except OSError:
        return "refused"
    return "forked"
"""
    host.report("def f():\n    return 0\n")
    before = len(_descendants(host.boxes))
    outcome = host.run(source)[0]
    after = len(_descendants(host.boxes))
    detail = f"fork {outcome.text}; processes in the box before {before}, after {after}"
    return Verdict(blocked=after <= before, detail=detail)


@case("new namespaces, mounts and other privileged system calls")
def privileged_calls(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
def f(clone, calls):
    found = []
    for name, arguments in calls:
        attempt(found, name, lambda: syscall(*arguments))
    for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000):
        attempt(found, "unshare", lambda: libc.unshare(flag) == 0 or 1 / 0)
        attempt(found, "clone", lambda: syscall(clone, flag | 17, 0, 0, 0, 0) or os._exit(0))
    attempt(found, "mount", lambda: libc.mount(b"x", b"/box", b"tmpfs", 0, None) == 0 or 1 / 0)
    attempt(found, "remount", lambda: libc.mount(None, b"/", None, 32, None) == 0 or 1 / 0)
    attempt(found, "umount", lambda: libc.umount2(b"/proc", 2) == 0 or 1 / 0)
    attempt(found, "ptrace", lambda: libc.ptrace(0, 0, 0, 0) == 0 or 1 / 0)
    attempt(found, "chroot", lambda: os.chroot("."))
    attempt(found, "mknod", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
    attempt(found, "setuid", lambda: os.setuid(0))
    return found
"""
    )
    column = box.machine()["column"]
    calls = [(name, (numbers[column],)) for name, numbers in box.DENIED.items() if numbers[column] is not None]
    zeros = [(name, (*number, 0, 0, 0, 0, 0)) for name, number in calls if name not in ("fork", "vfork")]
    return _nothing(host.report(source, box.machine()["clone"], zeros))


@case("hold a privilege")
def privileges(host: Host) -> Verdict:
    source = """
import ctypes, os, struct
def f(capget):
    libc = ctypes.CDLL(None)
    data = ctypes.create_string_buffer(24)
    libc.syscall(ctypes.c_long(capget), ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), data)
    return [os.getuid(), libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), sum(data.raw)]
"""
    uid, no_new_privileges, seccomp, capabilities = host.report(source, box.machine()["capset"] - 1)
    blocked = uid != 0 and no_new_privileges == 1 and seccomp == 2 and capabilities == 0
    detail = f"uid {uid}, no_new_privs {no_new_privileges}, seccomp {seccomp}, capability bits {capabilities}"
    return Verdict(blocked=blocked, detail=detail)


@case("links and path tricks")
def links(host: Host) -> Verdict:
    source = (
        HELPERS
        + """
def f(paths):
    found = []
    for number, path in enumerate(paths):
        name = "link%d" % number
        attempt([], name, lambda: os.symlink(path, name))
        attempt(found, path, lambda: open(name, "rb").read(10))
        attempt(found, path + "/", lambda: os.listdir(name))
        attempt(found, "hard " + path, lambda: os.link(path, "hard%d" % number))
    return found
"""
    )
    targets = [
        "/etc/shadow",
        "/proc/1/root/etc/passwd",
        "/proc/self/cwd",
        "/proc/self/environ",
        str(host.canary),
    ]
    verdict = _nothing(host.report(source, [*targets, "/box/../etc/passwd", "../" * 9 + str(host.canary)[1:]]))
    accepted = []
    for name in ("../f.py", "/f.py", "a/../../f.py", ".."):
        with contextlib.suppress(ValueError):
            CallRequest(files={name: ""}, module="f", function="f", arguments=())
            accepted.append(name)
    return Verdict(blocked=verdict.blocked and not accepted, detail=f"{verdict.detail}; paths accepted: {accepted}")


@case("huge output")
def huge_output(host: Host) -> Verdict:
    printed = host.run("def f():\n    print('x' * 10_000_000, flush=True)\n    return 1\n")[0]
    value = host.run("def f():\n    return 'x' * 10_000_000\n")[0]
    flood = host.run("import os\ndef f():\n    while True:\n        os.write(3, b'x' * 60000)\n")[0]
    deep = host.run("def f():\n    v = []\n    for _ in range(9999):\n        v = [v, v]\n    return v\n")[0]
    statuses = [outcome.status for outcome in (printed, value, flood, deep)]
    blocked = printed.text in ("1", "") and "returned" not in statuses[1:] and statuses[1] == "unreadable"
    return Verdict(blocked=blocked, flagged="unreadable" in statuses, detail=str(statuses))


def _descendants(boxes: BwrapSandboxes) -> list[int]:
    """Processes below this sandbox's bubblewrap, itself first, as the host sees them, oldest first."""
    root = boxes.pid
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = re.sub(r"^.*\) ", "", (entry / "stat").read_text(), flags=re.S).split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [] if root is None else [root]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found


@contextlib.contextmanager
def _host(make: Callable[[], BwrapSandboxes]) -> Iterator[Host]:
    """A host with secrets around its sandbox: a file, an environment variable, a descriptor, a listener."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o777)
        canary = directory / "canary"
        canary.write_text(SECRET)
        canary.chmod(0o644)
        leak = os.open(canary, os.O_RDONLY)
        stack.callback(os.close, leak)
        os.set_inheritable(leak, True)
        before = os.environ.get(SECRET_NAME)
        os.environ[SECRET_NAME] = SECRET
        stack.callback(_restore, before)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        boxes = stack.enter_context(make())
        yield Host(boxes=boxes, listener=listener, canary=canary)


def _restore(value: str | None) -> None:
    if value is None:
        del os.environ[SECRET_NAME]
    else:
        os.environ[SECRET_NAME] = value


def run_checks(backend: str = "bwrap") -> dict[str, Any]:
    """{"backend", "capabilities", "cases": [{"id", "title", "blocked", "flagged", "detail"}]}.

    Raises ValueError for an unknown backend and SandboxUnavailable where it cannot work.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return _run_cases(backend, BwrapSandboxes)


def _run_cases(backend: str, make: Callable[[], BwrapSandboxes]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with _host(make) as host:
        for entry in CASES:
            try:
                verdict = entry.judge(host)
            except Silent as silence:
                verdict = Verdict(blocked=False, detail=f"no evidence: the program ended with {silence}")
            shown = {"blocked": verdict.blocked, "flagged": verdict.flagged, "detail": verdict.detail}
            rows.append({"id": entry.id, "title": entry.title, **shown})
        return {"backend": backend, "capabilities": host.boxes.capabilities, "cases": rows}
