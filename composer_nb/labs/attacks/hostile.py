"""Hostile programs for inside a sandbox. The text of this module is what runs there: `case.program` adds the call of a function.

A function returns what it could do: the names of successes, or figures that a judge compares with a limit. Uses the standard
library alone and runs on Python 3.9 and newer.
"""

import builtins
import ctypes
import fcntl
import gc
import importlib.util
import itertools
import json
import mmap
import os
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
successes: list[str] = []


def attempt(name: str, act: Callable[..., Any], *arguments: Any) -> None:
    """Note a name as a success, with the result, unless an act raises or returns False."""
    with suppress(BaseException):
        result = act(*arguments)
        if result is not False:
            successes.append(name if result is None or result is True else f"{name}={result!r}"[:200])


def repeat(act: Callable[[], Any], most: int) -> int:
    """Return how often an act works."""
    for count in range(most):
        try:
            act()
        except BaseException:
            return count
    return most


def syscall(number: int, *arguments: int) -> int:
    result: int = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def read(path: str, size: int = 40) -> bytes:
    with open(path, "rb", buffering=0) as file:
        os.set_blocking(file.fileno(), False)
        return file.read(size) or b""


def write(path: str, text: str = "") -> None:
    with open(path, "w") as file:
        file.write(text)


def shell(command: str) -> None:
    subprocess.run(["bash", "-c", command], check=True, capture_output=True, timeout=20)


def files_below(top: str, *but: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, but for those below some of its folders."""
    for folder, below, files in os.walk(top):
        below[:] = [name for name in below if os.path.join(folder, name) not in but]
        yield from (os.path.join(folder, name) for name in files)


# The host and other sandboxes.


def read_the_host(paths: list[str], folders: list[str], secret: str) -> list[str]:
    def look(path: str) -> bool:
        with open(path, "rb") as file:
            return secret.encode() in file.read(1 << 20)

    for number, path in enumerate(paths + folders):
        attempt(path, read, path)
        with suppress(OSError):
            os.symlink(path, f"link{number}")
        attempt("link to " + path, read, f"link{number}")
        attempt("hard link to " + path, os.link, path, f"hard{number}")
    for number, folder in enumerate(folders, len(paths)):
        attempt(folder, os.listdir, folder)
        attempt(f"link to {folder}/", os.listdir, f"link{number}")
    for pid in ["self", *(name for name in os.listdir("/proc") if name.isdigit())]:
        for name in ("environ", "cmdline", "root/etc/shadow", "cwd/secret"):
            attempt(f"/proc/{pid}/{name}", look, f"/proc/{pid}/{name}")
    for top in () if successes else ("/", "/tmp", "/workspace", "/dev/shm", "/var", "/home", "/root", "/run"):
        for path in files_below(top, "/proc", "/sys", "/usr", "/dev"):
            attempt(path, look, path)
    return successes


def write_to_the_host(folders: list[str]) -> list[str]:
    for folder in [*folders, os.path.dirname(os.__file__), os.path.realpath("/lib64")]:
        attempt(folder, write, folder + "/canary-written")
        attempt(folder, os.chmod, folder, 0o777)
    return successes


def network(port: int, path: str, abstract: str, kinds: list[tuple[int, int]]) -> list[str]:
    def connect(family: int, address: Any) -> None:
        with socket.socket(family, socket.SOCK_STREAM) as stream:
            stream.settimeout(2)
            stream.connect(address)

    def udp(address: tuple[str, int]) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            datagrams.settimeout(1)
            datagrams.sendto(b"x", address)
            datagrams.recv(1)

    for host in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1"):
        attempt(host, connect, socket.AF_INET, (host, 80))
    attempt("loopback of the host", connect, socket.AF_INET, ("127.0.0.1", port))
    attempt("ipv6", connect, socket.AF_INET6, ("2606:4700:4700::1111", 80))
    attempt("udp", udp, ("1.1.1.1", 53))
    attempt("name", socket.getaddrinfo, "example.com", 80)
    for name in (path, "\0" + abstract, "/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket"):
        attempt(name, connect, socket.AF_UNIX, name)
    for family, kind in kinds:
        attempt(f"family {family}", lambda *numbers: socket.socket(*numbers).close(), family, kind)
    for command in ("python3 -m pip download six", "curl -m2 http://1.1.1.1", "wget -T2 -t1 http://1.1.1.1"):
        attempt(command, shell, command)
    return successes


def kernel(clone: int, numbers: list[tuple[str, int]], io_setup: int) -> list[str]:
    def take_contexts() -> None:
        context = ctypes.c_ulong(0)
        syscall(io_setup, 50, ctypes.addressof(context))

    def type_on_a_terminal() -> None:
        _, slave = os.openpty()
        fcntl.ioctl(slave, 0x5412, b"x")  # TIOCSTI

    def works(call: Callable[..., int], *arguments: Any) -> bool:
        return call(*arguments) == 0

    for name, number in numbers:
        for first in (0, 1, 16, 0x10000000):
            attempt(name, syscall, number, first, int(first > 0), 0, 0, 0)
    attempt("io_setup", take_contexts)
    for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000):
        attempt("unshare", works, libc.unshare, flag)
        attempt("clone", lambda flags: syscall(clone, flags, 0, 0, 0, 0) or os._exit(0), flag | 17)
    attempt("mount", works, libc.mount, b"x", b"/tmp", b"tmpfs", 0, None)
    attempt("remount", works, libc.mount, None, b"/", None, 32, None)
    attempt("umount", works, libc.umount2, b"/proc", 2)
    attempt("ptrace", works, libc.ptrace, 0, 0, 0, 0)
    attempt("chroot", os.chroot, ".")
    attempt("mknod", os.mknod, "disk", 0o60600, os.makedev(8, 0))
    attempt("setuid", os.setuid, 0)
    attempt("TIOCSTI", type_on_a_terminal)
    for command in (
        "unshare -Ur true", "mount -t tmpfs x /tmp", "mount -o remount,rw /", "umount /proc", "chroot / true",
        "nsenter -t 1 -m true", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sys/kernel/panic_on_oops",
        "echo x > /proc/sysrq-trigger", "date -s 2001-01-01", "hostname other", "sysctl -w kernel.panic=1", "swapon /tmp/x",
    ):  # fmt: skip
        attempt(command, shell, command)
    return successes


def inherited(capget: int) -> tuple[list[str], list[str], list[str], bool, list[int]]:
    """Return open descriptors, the environment, files of root, whether this is root, and bits of privileges."""
    write("mine")
    for fd in range(3, 4096):
        attempt(str(fd), lambda number: stat.filemode(os.fstat(number).st_mode)[0], fd)
    first = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    texts = itertools.takewhile(bool, (first[index] for index in itertools.count())) if first else ()
    environment = [text.decode() for text in texts]
    of_root = [path for top in (".", "/tmp") for path in files_below(top) if os.lstat(path).st_uid == 0]
    data = ctypes.create_string_buffer(24)
    libc.syscall(ctypes.c_long(capget), ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), data)
    limits = [libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), sum(data.raw)]
    return successes, environment, of_root, 0 in (os.getuid(), os.getgid(), *os.getgroups()), limits


def copies_of_libraries(names: list[str]) -> list[str]:
    for top, below, files in os.walk("/"):
        if top == "/":
            below[:] = [name for name in below if name not in ("proc", "sys", "dev")]
        wheels = [name for name in below + files if name.endswith((".whl", ".dist-info", ".egg-info"))]
        successes.extend(os.path.join(top, name) for name in wheels)
        if os.path.basename(top) in ("site-packages", "dist-packages", "_vendor", "_bundled") and below + files:
            successes.append(top)
    for name in names:
        attempt("import " + name, lambda module: importlib.util.find_spec(module).origin, name)  # type: ignore[union-attr]
    return successes[:20]


def machine_counters() -> dict[str, int]:
    """Return a checksum of each file by which the kernel says something of the whole machine."""
    checksums = {}
    numberless = ("self", "thread-self", "net")
    skipped = [f"/proc/{name}" for name in os.listdir("/proc") if name.isdigit() or name in numberless]
    for path in itertools.chain(files_below("/proc", *skipped), files_below("/sys")):
        with suppress(BaseException):
            checksums[path] = zlib.crc32(read(path, 1 << 16))
    return checksums


# Locks, leases and watches on files that two sandboxes may have in common.

WAYS: dict[str, Callable[[int], Any]] = {
    "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "fcntl": lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "lease": lambda fd: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "dnotify": lambda fd: fcntl.fcntl(fd, fcntl.F_NOTIFY, 1),
}


def common_files() -> Iterator[tuple[str, int]]:
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which dnotify speaks
    paths = set("/ /usr /usr/bin /usr/lib /etc /usr/local/bin /mnt /proc /dev /dev/null /dev/zero".split())
    for top in ("/etc", "/usr/bin", "/usr/local/bin", os.path.dirname(os.__file__)):
        paths |= {os.path.join(top, name) for name in sorted(os.listdir(top))[:60]}
    opened = set()
    for path in sorted(paths):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) not in opened:  # one file under two names would keep itself waiting
                opened.add((status.st_dev, status.st_ino))
                yield path, fd


def hold_files() -> None:
    """Lock and watch all common files. Say in a file which ways work, and once there is a file `go`, what was heard."""

    def say(name: str, value: Any) -> None:
        write("new", json.dumps(value))
        os.rename("new", name)

    watch = libc.inotify_init1(os.O_NONBLOCK)
    counts = dict.fromkeys(WAYS, 0)
    for path, fd in common_files():
        libc.inotify_add_watch(watch, path.encode(), 0x20)  # IN_OPEN
        for name, way in WAYS.items():
            with suppress(BaseException):
                way(fd)
                counts[name] += 1
    with suppress(OSError):
        os.read(watch, 1 << 20)  # of what was opened here
    say("held", counts)
    while not os.path.exists("go"):
        time.sleep(0.01)
    attempt("inotify", lambda: os.read(watch, 1 << 20) and None)
    say("heard", successes)


def locked_files() -> list[str]:
    for path, fd in common_files():
        try:
            WAYS["flock"](fd)
        except OSError as error:
            successes.extend([path] * (error.errno == 11))
    return successes


def lock_the_library() -> list[str]:
    for path in (os.__file__, os.path.dirname(os.__file__), "/dev/null", "/"):
        fd = os.open(path, os.O_RDONLY)
        attempt("flock " + path, fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_OFD_SETLK, fcntl.F_SETLEASE, fcntl.F_NOTIFY):
            attempt(f"fcntl {command} {path}", fcntl.fcntl, fd, command, bytes(32) if command < 99 else 0)
    attempt("inotify", lambda: libc.inotify_init1(0) >= 0)
    return successes


# What the kernel keeps: pages of files, counters, memory.


def library() -> list[str]:
    top = os.path.dirname(os.__file__)
    paths = [os.path.join(top, name) for name in sorted(os.listdir(top)) if name.endswith(".py")]
    return [path for path in paths if os.path.isfile(path) and os.path.getsize(path)]


def faults(path: str, every: bool = False) -> int:
    """Return how often the disk was read for the first page of a file, or for every page."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        before = resource.getrusage(resource.RUSAGE_SELF)
        for at in range(0, len(pages), 4096) if every else [0]:
            pages[at]
        after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_majflt - before.ru_majflt + after.ru_inblock - before.ru_inblock


def evict_pages(bits: list[int]) -> int:
    for path, bit in zip(library(), bits):  # noqa: B905  (not in Python 3.9)
        fd = os.open(path, os.O_RDONLY)
        faults(path, every=True)
        if bit:
            attempt(path, os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as pages, suppress(OSError, ValueError):
                pages.madvise(21)  # MADV_PAGEOUT
    return len(successes)


def page_faults(count: int) -> list[int]:
    return [faults(path) for path in library()[:count]]


def cold_files() -> tuple[int, int, list[str]]:
    """Return how many files there are, how many came from the disk, and some of these."""
    count = 0
    for path in files_below("/", "/proc", "/sys", "/dev"):
        if os.path.isfile(path) and os.path.getsize(path):
            with suppress(BaseException):
                successes.extend([path] * (faults(path, every=True) > 0))
                count += 1
    return count, len(successes), successes[:3]


def pages_in_use(bits: list[int]) -> list[bool]:
    """Read some files of the library often; without bits, return which of them the kernel takes to be in use."""
    active = []
    for path, bit in zip(library(), bits):  # noqa: B905  (not in Python 3.9)
        for _ in range(3 * bit):
            read(path, 1 << 30)
    for path in [] if bits else library():
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
            pages[0]
            with open("/proc/self/numa_maps") as lines:
                active += [" active=0 " not in line for line in lines if line.split()[2:3] == ["file=" + path]]
    return active


def kernel_counters() -> tuple[list[str], list[str], int]:
    """Return counters that can be read, devices whose times can be set, and the port that a connection got."""
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        attempt("time of /dev/" + name, os.utime, "/dev/" + name)
    times, counters = successes[:], len(successes)
    with socket.create_server(("127.0.0.1", 5000)) as server:
        with socket.create_connection(server.getsockname()) as connection:
            attempt("SO_COOKIE", connection.getsockopt, 1, 57, 8)
            attempt("pidfd", lambda: os.fstat(os.pidfd_open(os.getpid())).st_ino > 0)
            attempt("SO_PASSPIDFD", connection.setsockopt, 1, 76, 1)
            return successes[counters:], times, connection.getsockname()[1]


def network_counters(counts: list[str]) -> list[str]:
    for name in counts:
        attempt(name, lambda path: read(path) != b"", "/proc/self/net/" + name)
    label = struct.pack("16sIBBHHHI", socket.inet_pton(10, "::1"), 0, 0, 255, 1, 6, 100, 0)
    instructions = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(instructions))
    with socket.socket() as stream, socket.socket(10, 2) as datagrams:
        attempt("IP_LOCAL_PORT_RANGE", stream.setsockopt, 0, 51, struct.pack("I", 25000 | 49000 << 16))
        attempt("IPV6_FLOWLABEL_MGR", datagrams.setsockopt, 41, 32, label)
        attempt("SO_ATTACH_FILTER", datagrams.setsockopt, 1, 26, program)
        attempt("SO_NETNS_COOKIE", stream.getsockopt, 1, 71, 8)
    attempt("MPTCP", lambda: socket.socket(2, 1, 262).close())
    return successes


def uncounted_pages(memfd_create: int) -> list[str]:
    name = ctypes.create_string_buffer(b"x")
    attempt("PR_SET_MEMORY_MERGE", lambda: libc.prctl(67, 1, 0, 0, 0) == 0)
    allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(allow)))
    attempt("PR_SET_SECCOMP", lambda: libc.prctl(22, 2, program, 0, 0) == 0)
    attempt("MFD_HUGETLB", syscall, memfd_create, ctypes.addressof(name), 4)
    attempt("mlock", lambda: libc.mlock(name, 1) == 0)
    try:
        mmap.mmap(-1, 1 << 21, flags=0x40000 | mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        return successes + ["MAP_HUGETLB"] * (error.errno != 1)  # not for want of such pages
    return [*successes, "MAP_HUGETLB"]


def core_dumps(prlimit: int) -> list[str]:
    with suppress(BaseException):  # a function call cannot ask
        limits = resource.getrlimit(resource.RLIMIT_CORE)
        successes.extend([f"RLIMIT_CORE={limits}"] * (limits != (1, 1)))
    zero = ctypes.create_string_buffer(16)
    zero[8] = 1  # type: ignore[call-overload]  # the hard limit stays
    attempt("setrlimit", resource.setrlimit, resource.RLIMIT_CORE, (0, 1))
    attempt("prlimit64", syscall, prlimit, 0, 4, ctypes.addressof(zero), 0)
    attempt("prlimit64 of itself", syscall, prlimit, os.getpid(), 4, ctypes.addressof(zero), 0)
    return successes


def fill_kernel_buffers(kind: str, children: int) -> int:
    """Return how many bytes child processes put into buffers that nobody reads."""

    def tcp() -> tuple[Any, ...]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ends = socket.create_connection(server.getsockname()), server.accept()[0]
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        return ends

    def pipe() -> tuple[Any, ...]:
        reader, writer = os.pipe()
        return os.fdopen(writer, "wb", 0), os.fdopen(reader, "rb", 0)

    def fill(ends: Sequence[Any]) -> int:
        size = 0
        for end in ends if hasattr(ends[0], "send") else ends[:1]:
            os.set_blocking(end.fileno(), False)
            for _ in range(3):
                with suppress(OSError):
                    while True:
                        size += os.write(end.fileno(), bytes(1 << 16))
                time.sleep(0.002)  # in which the other end takes more
        return size

    def child() -> None:
        opened = []
        try:
            while True:
                opened.append({"tcp": tcp, "unix": socket.socketpair, "pipe": pipe}[kind]())
                os.write(target, struct.pack("q", fill(opened[-1])))
        except OSError:
            os.write(target, struct.pack("q", -1))
            time.sleep(60)

    source, target = os.pipe()
    running = total = 0
    for _ in range(children):
        with suppress(OSError):
            if os.fork() == 0:
                child()
                os._exit(0)
            running += 1
    while running and select.select([source], [], [], 10)[0]:
        (size,) = struct.unpack("q", os.read(source, 8))
        running, total = (running - 1, total) if size < 0 else (running, total + size)
    return total


def open_terminals() -> int:
    return repeat(os.openpty, 200)


def listed(folder: str) -> list[str]:
    return os.listdir(folder)


def fill_the_disk(folders: list[str], max_bytes: int, inodes: int, tries: int) -> list[str]:
    """Write bytes, files and nested folders without end; return what went beyond `max_bytes` and `inodes`, or lies on a disk."""

    def fill(folder: str) -> int:
        with open(folder + "/fill", "wb", buffering=0) as file:
            byte_count = repeat(lambda: file.write(bytes(1 << 20)), 1 << 10) << 20
        os.unlink(folder + "/fill")
        return byte_count

    def sparse() -> None:
        with open("giant", "wb") as file:
            file.truncate(1 << 40)

    def deeper() -> None:
        os.mkdir("d")
        os.chdir("d")

    written_bytes = {folder: fill(folder) for folder in folders}
    successes.extend(f"{folder}: {size} bytes" for folder, size in written_bytes.items() if size > max_bytes)
    if os.path.exists("/proc/self/mounts"):
        with open("/proc/self/mounts") as lines:
            file_systems = {line.split()[1]: line.split()[2] for line in lines}
        on_disk = (path for path in (os.getcwd(), *folders[:-1]) if file_systems.get(path) != "tmpfs")
        successes.extend(f"{path} is on a disk" for path in on_disk)
    for folder in folders:
        names = (f"{folder}/n{number}" for number in itertools.count())
        file_count = repeat(lambda: write(next(names)), tries)  # noqa: B023  (called at once)
        successes.extend([f"{file_count} files in {folder}"] * (file_count > inodes))
        for number in range(file_count):
            os.unlink(f"{folder}/n{number}")
    attempt("sparse", sparse)
    depth = repeat(deeper, tries)
    return successes + [f"{depth} folders deep"] * (depth > inodes)


# Function calls.


def attack_processes() -> list[str]:
    for pid in range(2, 400):
        if pid != os.getpid():
            attempt("pid", os.kill, pid, 0)
    for victim in {1, os.getppid()} - {0, os.getpid()}:
        with suppress(OSError):
            os.kill(victim, signal.SIGKILL)  # judged by what still answers
    if not successes:  # whoever sees others is not blocked anyway, and had better not do this
        attempt("everybody", os.kill, -1, signal.SIGKILL)
    for name in ("1/environ", "1/mem", "1/root/etc/passwd", "1/fd/0"):
        attempt(name, read, "/proc/" + name)
    attempt("pidfd", os.pidfd_open, 1)
    return successes


def shared_folders() -> list[str]:
    return [".", tempfile.gettempdir(), *"/dev/shm /var/tmp /dev /proc /run".split()]


def leave_traces(secret: str) -> int:
    setattr(builtins, "left", secret)  # noqa: B010
    sys.modules["left"] = secret  # type: ignore[assignment]
    for folder in shared_folders():
        attempt(folder, write, os.path.join(folder, "left"), secret)
    return len(successes)


def find_traces() -> list[str]:
    traces = [folder for folder in shared_folders() if os.path.exists(os.path.join(folder, "left"))]
    traces += [name for name in os.listdir(".") if name != "f.py"]
    return traces + ["builtins"] * hasattr(builtins, "left") + ["modules"] * ("left" in sys.modules)


def copies_in_memory(head: str, tail: str) -> bool:
    """Return whether a text lies around live objects, where an inherited heap would be, more often than once."""
    text = ctypes.string_at(id(object()) & ~0xFFFFF, 1 << 18)
    return text.count((head + tail).encode()) > 1


def multiply(clone: int) -> tuple[list[str], int]:
    """Return what makes processes, and how many threads there can be."""
    for _ in range(50):
        attempt("fork", lambda: os.fork() or os._exit(0))
        attempt("clone", lambda: syscall(clone, 17, 0, 0, 0, 0) or os._exit(0))
    attempt("spawn", subprocess.run, ["/usr/bin/python3", "-c", "0"])
    attempt("exec", os.execv, "/usr/bin/python3", ["python3"])
    return successes, repeat(lambda: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(), 200)


def take_memory() -> tuple[int, list[str]]:
    """Return how many MiB could be mapped, and other ways to memory."""
    mapped: list[mmap.mmap] = []
    count = repeat(lambda: mapped.append(mmap.mmap(-1, 1 << 20)), 4096)
    attempt("memfd", os.memfd_create, "x")
    attempt("shm", syscall, 29, 0, 1 << 30, 0o1600)
    return count, successes


def outlive_the_call() -> str:
    threading.Thread(target=time.sleep, args=(60,)).start()
    try:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
    except OSError:
        return "refused"
    return "forked"


def find_expected(head: str, tail: str) -> bool:
    """Return whether a text lies in the frames below, or in what the collector knows."""
    expected, texts, frame = head + tail, list[str](), sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals)[:20000].replace(repr(head), ""))
        frame = frame.f_back  # type: ignore[assignment]
    containers = [value for value in gc.get_objects() if type(value) in (list, tuple) and value is not texts]
    texts += [repr(value)[:2000] for value in containers[:500]]
    return any(expected in text for text in texts[1:])


class Equal(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "42"


def always_equal(kind: int) -> Any:
    return (Equal(1), [Equal(1)], {Equal(1): 1})[kind]
