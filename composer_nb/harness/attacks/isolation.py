"""Attacks on the walls: files, network, processes, memory, privileges of the host and of other requests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from composer_nb.harness.attacks.case import (
    HELPERS,
    SECRET,
    SECRET_NAME,
    Case,
    Host,
    Verdict,
    case,
    descendants,
    nothing,
)
from composer_nb.harness.calls import CallRequest
from composer_nb.harness.linux import machine
from composer_nb.harness.seccomp import KERNEL, PROCESS

CASES: list[Case] = []


@case(CASES, "read files of the host")
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
    return nothing(host.report(source, [*names, str(host.canary), str(host.canary.parent), str(Path(__file__))]))


@case(CASES, "write outside the workspace")
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
    verdict = nothing(host.report(source, ["/", "/usr", "/usr/lib", "/dev", "/proc", "/etc", str(host.canary.parent)]))
    reached = (host.canary.parent / "canary-written").exists()
    return Verdict(blocked=verdict.blocked and not reached, detail=verdict.detail)


@case(CASES, "connect to a listener on the host's loopback")
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
    verdict = nothing(host.report(source, host.listener.getsockname()[1]))
    try:
        host.listener.accept()[0].close()
    except BlockingIOError:
        return verdict
    return Verdict(blocked=False, detail="the listener was reached")


@case(CASES, "see or signal other processes, the zygote among them")
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
    before = descendants(host.boxes)
    verdict = nothing(host.report(source))
    alive = bool(host.report("def f():\n    return True\n"))
    zygote = before[:2] == descendants(host.boxes)[:2]
    return Verdict(blocked=verdict.blocked and alive and zygote, detail=verdict.detail)


@case(CASES, "find what another request left")
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
    verdict = nothing(host.report(look))
    return Verdict(blocked=verdict.blocked and written > 0, detail=f"{written} files written; {verdict.detail}")


@case(CASES, "read the memory of earlier requests")
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


@case(CASES, "read secrets from the environment")
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
    return nothing(host.report(source))


@case(CASES, "use inherited descriptors")
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


@case(CASES, "new namespaces, mounts and other privileged system calls")
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
    column = machine()["column"]
    calls = [(name, (numbers[column],)) for name, numbers in (KERNEL | PROCESS).items() if numbers[column] is not None]
    zeros = [(name, (*number, 0, 0, 0, 0, 0)) for name, number in calls if name not in ("fork", "vfork")]
    return nothing(host.report(source, machine()["clone"], zeros))


@case(CASES, "hold a privilege")
def privileges(host: Host) -> Verdict:
    source = """
import ctypes, os, struct
def f(capget):
    libc = ctypes.CDLL(None)
    data = ctypes.create_string_buffer(24)
    libc.syscall(ctypes.c_long(capget), ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), data)
    return [os.getuid(), libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), sum(data.raw)]
"""
    uid, no_new_privileges, seccomp, capabilities = host.report(source, machine()["capset"] - 1)
    blocked = uid != 0 and no_new_privileges == 1 and seccomp == 2 and capabilities == 0
    detail = f"uid {uid}, no_new_privs {no_new_privileges}, seccomp {seccomp}, capability bits {capabilities}"
    return Verdict(blocked=blocked, detail=detail)


@case(CASES, "links and path tricks")
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
    verdict = nothing(host.report(source, [*targets, "/box/../etc/passwd", "../" * 9 + str(host.canary)[1:]]))
    accepted = []
    for name in ("../f.py", "/f.py", "a/../../f.py", ".."):
        with contextlib.suppress(ValueError):
            CallRequest(files={name: ""}, module="f", function="f", arguments=())
            accepted.append(name)
    return Verdict(blocked=verdict.blocked and not accepted, detail=f"{verdict.detail}; paths accepted: {accepted}")
