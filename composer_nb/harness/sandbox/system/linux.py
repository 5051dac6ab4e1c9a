"""System calls that Python has no function for, by way of ctypes: namespaces, capabilities, system call filters.

Part of the programs inside the sandboxes (`backend.resident_program` puts it there), so it uses the standard library alone.

Covers Linux on x86_64 and aarch64, Python 3.9 and newer.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import signal
import struct
import typing

# Flags of clone(2).
NAMESPACES = {
    "user": 0x10000000, "pid": 0x20000000, "mount": 0x00020000, "network": 0x40000000, "ipc": 0x08000000,
    "uts": 0x04000000, "cgroup": 0x02000000,
}  # fmt: skip
MACHINES = {
    "x86_64": {"arch": 0xC000003E, "column": 0, "clone": 56, "clone3": 435, "capset": 126},
    "aarch64": {"arch": 0xC00000B7, "column": 1, "clone": 220, "clone3": 435, "capset": 91},
}  # fmt: skip
PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_SET_DUMPABLE = 24, 22, 38, 47, 4

LOAD = "/proc/loadavg"
BUFFERS = "4096 16384 65536"  # Bytes of a connection's buffer: minimum, initial, maximum

# PyDLL: calls keep the interpreter's lock, which a raw clone needs.
libc = ctypes.PyDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

Maps = typing.Tuple[typing.Tuple[str, str], ...]  # noqa: UP006


def check(result: int, what: str) -> int:
    """`result`, or OSError with errno when it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, what + ": " + os.strerror(code))
    return result


def machine() -> dict[str, int]:
    """Call numbers of this machine; RuntimeError where there is no table."""
    name = os.uname().machine
    if name not in MACHINES:
        raise RuntimeError("no system call table for " + name)
    return MACHINES[name]


class SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def install_filter(program: bytes) -> None:
    """No new privileges, then the filter, for this thread (the only one) and all that it starts."""
    zero = ctypes.c_ulong(0)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero), "no_new_privs")
    packed = SockFprog(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(packed), zero, zero), "seccomp")


def drop_capabilities(table: dict[str, int]) -> None:
    """Empty every capability set of this process, the bounding set first."""
    zero = ctypes.c_ulong(0)
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), zero, zero, zero) < 0:
            break  # EINVAL: past the last one this kernel knows; EPERM: holds none
    libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(4), zero, zero, zero)  # PR_CAP_AMBIENT_CLEAR_ALL
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    check(libc.syscall(ctypes.c_long(table["capset"]), header, ctypes.create_string_buffer(24)), "capset")


def set_limits(limits: typing.Dict[str, int]) -> None:  # noqa: UP006
    """Set resource limits of this process, by name, as far as its hard limits allow."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


def hide_memory(hidden: bool = True) -> None:
    """Keep other processes of the same user from tracing this one and from reading its memory or its descriptors."""
    zero = ctypes.c_ulong(0)
    check(libc.prctl(PR_SET_DUMPABLE, ctypes.c_ulong(not hidden), zero, zero, zero), "dumpable")


def map_ids() -> Maps:
    """Own uid and gid stay what they are in a new user namespace; there are no others in it."""
    uid, gid = os.getuid(), os.getgid()
    return (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))


def write_ids(maps: Maps) -> None:
    """In the new user namespace: who this process is."""
    for name, text in maps:
        fd = os.open("/proc/self/" + name, os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    packed = ctypes.c_ulong(flags)
    check(libc.mount(source.encode(), target.encode(), kind.encode(), packed, options.encode()), "mount " + target)


def patience(seconds: float) -> float:
    """Return how long to wait for what takes at most `seconds` on an idle machine: longer as programs share each core.

    For what is started and ended, never for what a task may use.
    """
    try:
        with open(LOAD) as file:
            average, _, _, running = file.read().split()[:4]
    except OSError:
        return seconds
    programs = max(float(average), float(running.partition("/")[0]))  # the average follows a minute later
    return seconds * max(1.0, programs / len(os.sched_getaffinity(0)))


def network_settings() -> dict[str, str]:
    """Return the settings (`net.ipv4`) of a sandbox's own network: small buffers, and ports of its own.

    The kernel chooses the port of a connection by going on where the last one of any network was, so with equal bounds a sandbox
    could tell from its ports how many connections another one had made.
    """
    ports = f"{16_384 + random.randrange(8192)} {49_152 + random.randrange(8192)}"
    return {"ip_local_port_range": ports, "tcp_rmem": BUFFERS, "tcp_wmem": BUFFERS}


def unstoppable_dumps() -> str:
    """Return why a crash in a sandbox may start a program of this machine; "" where it starts none."""
    with open("/proc/sys/kernel/core_pattern") as file:
        pattern = file.read().strip()
    if pattern.startswith("@"):
        return f"core_pattern is a socket ({pattern}), to which each crash is told: set another one"
    if pattern.startswith("|") and resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        return f"core_pattern starts a program ({pattern}), which only a limit of 1 stops: `ulimit -Hc unlimited` first"
    return ""


def umount(target: str) -> None:
    """Take the topmost mount away from a place; whoever still uses it keeps it."""
    detach = 2
    check(libc.umount2(target.encode(), detach), "umount " + target)


def clone(flags: int, table: dict[str, int]) -> int:
    """`os.fork` with new namespaces: 0 in the child, its pid in the parent."""
    ctypes.pythonapi.PyOS_BeforeFork()
    zeros = [ctypes.c_long(0)] * 4
    pid = libc.syscall(ctypes.c_long(table["clone"]), ctypes.c_long(flags | signal.SIGCHLD), *zeros)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return check(pid, "clone with new namespaces")


def read_exactly(fd: int, size: int) -> bytes:
    """`size` bytes of a pipe and not one more; EOFError when it ends before."""
    parts = []
    while size:
        parts.append(os.read(fd, min(size, 1 << 20)))
        if not parts[-1]:
            raise EOFError("the pipe ended inside a frame")
        size -= len(parts[-1])
    return b"".join(parts)


def write_all(fd: int, data: bytes | memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def send_frame(fd: int, header: typing.Dict[str, typing.Any], payload: bytes | memoryview = b"") -> None:  # noqa: UP006
    """Write 4 bytes of length (big-endian), a JSON header in one line, and a payload."""
    head = json.dumps(header).encode() + b"\n"
    head = (len(head) + len(payload)).to_bytes(4, "big") + head
    sent = os.writev(fd, [head, payload])  # without a copy of the payload, and without waking the reader twice
    write_all(fd, head[sent:])
    write_all(fd, memoryview(payload)[max(sent - len(head), 0) :])


def status_of(path: str) -> list[bytes]:
    """Return the fields of /proc/PATH/stat after the name, which a process chooses; none for one that is gone."""
    try:
        with open("/proc/" + path + "/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()
    except OSError:
        return []


def lives(fields: list[bytes]) -> bool:
    """Return whether these fields are of a living process; a zombie's is one while another of its threads lives."""
    return bool(fields) and (fields[0] not in (b"Z", b"X") or int(fields[17]) > 1)


def processes() -> typing.Iterator[tuple[int, int, int]]:
    """Yield (pid, parent, clock tick of its start) of every living process in sight."""
    for name in os.listdir("/proc"):
        if name.isdigit() and lives(fields := status_of(name)):
            yield int(name), int(fields[1]), int(fields[19])


def child_alarm() -> int:
    """Return a descriptor that can be read once a child has ended."""
    wake, note = os.pipe()
    for fd in (wake, note):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    return wake


def ended_children(wake: int) -> typing.Iterator[tuple[int, int]]:
    """Yield (pid, status) of every child that has ended since the last call. `wake`: from `child_alarm`."""
    try:
        os.read(wake, 4096)
    except BlockingIOError:
        pass
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status
