"""Attacks on what keeps a sandbox apart: the host's files, links, networks, the kernel, what is inherited. Cases 19 to 22, 29."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.sandbox.system.linux import machine, patience
from composer_nb.harness.sandbox.system.seccomp import ABSENT, KERNEL, PROCESS
from composer_nb.labs.attacks.case import (
    HELPERS,
    REFUSED,
    SECRET,
    SECRET_NAME,
    SPEC,
    AttackVerdict,
    Cell,
    Site,
    nothing,
    python,
    register,
    register_both,
)  # fmt: skip


@register_both(19, "read files and environments of the host and of other sandboxes, also through links")
def read_the_host(cell: Cell) -> AttackVerdict:
    source = """
def f(paths, folders, secret):
    found = []
    def look(path):
        with open(path, "rb") as file:
            found.extend([path] * (secret.encode() in file.read(1 << 20)))
    for number, path in enumerate(paths + folders):
        attempt(found, path, lambda: open(path, "rb").read(40))
        attempt([], path, lambda: os.symlink(path, f"link{number}"))
        attempt(found, "link to " + path, lambda: open(f"link{number}", "rb").read(10))
        attempt(found, "hard link to " + path, lambda: os.link(path, f"hard{number}"))
    for number, folder in enumerate(folders, len(paths)):
        attempt(found, folder, lambda: os.listdir(folder))
        attempt(found, f"link to {folder}/", lambda: os.listdir(f"link{number}"))
    for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self"]:
        for name in ("environ", "cmdline", "root/etc/shadow", "cwd/secret"):
            attempt([], name, lambda: look(f"/proc/{pid}/{name}"))
    for top in () if found else ("/", "/tmp", "/workspace", "/dev/shm", "/var", "/home", "/root", "/run"):
        for folder, below, files in os.walk(top):
            below[:] = [name for name in below if os.path.join(folder, name) not in ("/proc", "/sys", "/usr", "/dev")]
            for name in files:
                attempt([], name, lambda: look(os.path.join(folder, name)))
    return found
"""
    canary, home = cell.site.canary, Path.home()
    names = ["/etc/shadow", str(home / ".bashrc"), "/run/docker.sock", "/var/run/docker.sock", str(canary), __file__]
    names += [f"{root}{canary}" for root in ("/proc/1/root", "/proc/self/root", "/workspace/../..", "../" * 9)]
    folders = [str(canary.parent), *([str(home)] if home != Path("/") else [])]
    if cell.box is None:
        names, folders = [*names, "/etc/hostname"], [*folders, "/home", "/var", "/sys", "/run"]
    with cell.site.backend.create(SPEC) as neighbour:
        neighbour.write("secret", SECRET.encode())
        neighbour.exec(["sh", "-c", "cp secret /tmp; cp secret /dev/shm"])
        return nothing(cell.run(source, names, folders, SECRET))


@register_both(19, "write to folders of the host")
def write_to_the_host(cell: Cell) -> AttackVerdict:
    source = """
def f(folders):
    found = []
    for folder in folders + [os.path.dirname(os.__file__), os.path.realpath("/lib64")]:
        attempt(found, folder, lambda: open(folder + "/canary-written", "w").close())
        attempt(found, folder, lambda: os.chmod(folder, 0o777))
    return found
"""
    folders = ["/", "/usr", "/usr/lib", "/dev", "/proc", "/etc", str(cell.site.canary.parent)]
    successes = cell.run(source, folders + ["/dev/shm"] * (cell.box is None))
    return nothing(successes + ["canary-written"] * (cell.site.canary.parent / "canary-written").exists())


@register(20, "lead file tools and the reading of results out of the workspace by links")
def links(site: Site) -> AttackVerdict:
    leaks: list[str] = []
    with site.backend.create(SPEC) as box:

        def look(path: str) -> bool:
            with contextlib.suppress(*REFUSED):
                leaks.extend([path] * (SECRET.encode() in box.read(path)))
                return True
            return False

        box.exec(["bash", "-c", f"mkdir /tmp/out; echo {SECRET} > /tmp/out/file; mkdir real; echo inside > real/file"])
        lay = "ln -s /tmp/out/file a; ln -s ../../../tmp/out b; ln /etc/passwd c; ln -s /proc/1/root d; ln -s /proc/self/fd e"
        box.exec(["bash", "-c", lay + "; mkfifo f; ln -s g g"])
        for path in "a b/file d/tmp/out/file e/0 f g /tmp/out/file ../tmp/out/file real/../../tmp/out/file".split():
            look(path)
        swap = "while :; do ln -sfn real x; ln -sfn /tmp/out x; rm x; mkdir x; echo inside > x/file; rm -r x; done"
        box.exec_background(["bash", "-c", swap], log="log")
        reads = sum(look("x/file") for _ in range(200))
        box.end_all()
        for path, data in box.download().items():
            if SECRET.encode() in data or path.startswith("/") or ".." in path.split("/"):
                leaks.append(f"download {path}")
    return AttackVerdict(not leaks, f"{nothing(leaks).detail}; {reads} reads of a path that was swapped meanwhile")


@register_both(21, "reach a network, the host's sockets or a package index")
def network(cell: Cell) -> AttackVerdict:
    source = """
import socket, subprocess
def tcp(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
def udp(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.sendto(b"x", address)
        s.recv(1)
def f(port, path, abstract, kinds):
    found = []
    for host in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1"):
        attempt(found, host, lambda: tcp(socket.AF_INET, (host, 80)))
    attempt(found, "loopback of the host", lambda: tcp(socket.AF_INET, ("127.0.0.1", port)))
    attempt(found, "ipv6", lambda: tcp(socket.AF_INET6, ("2606:4700:4700::1111", 80)))
    attempt(found, "udp", lambda: udp(("1.1.1.1", 53)))
    attempt(found, "name", lambda: socket.getaddrinfo("example.com", 80))
    for name in (path, "\\0" + abstract, "/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket"):
        attempt(found, name, lambda: tcp(socket.AF_UNIX, name))
    for family, kind in kinds:
        attempt(found, "family " + str(family), lambda: socket.socket(family, kind).close())
    for command in ("python3 -m pip download six", "curl -m2 http://1.1.1.1", "wget -T2 -t1 http://1.1.1.1"):
        attempt(found, command, lambda: subprocess.run(command.split(), check=True, capture_output=True, timeout=20) and None)
    return found
"""
    site = cell.site
    name = site.abstract.getsockname().decode().lstrip("\0")
    kinds = [(16, 3), (17, 3), (38, 5), (40, 1)]  # netlink, packet, crypto, the hypervisor's
    if cell.box is None:
        kinds += [(1, 1), (2, 1), (2, 2), (10, 1)]  # a function call makes no sockets at all
    successes = cell.run(source, site.tcp.getsockname()[1], site.local.getsockname(), name, kinds)
    return nothing(successes + site.reached())


@register_both(22, "namespaces, mounts, tracing, io_uring, keys, a terminal's input, other privileged calls")
def kernel(cell: Cell) -> AttackVerdict:
    source = """
import fcntl, subprocess
def type_on_a_terminal():
    master, slave = os.openpty()
    fcntl.ioctl(slave, 0x5412, b"x")  # TIOCSTI
def take_contexts(io_setup):
    context = ctypes.c_ulong(0)
    syscall(io_setup, 50, ctypes.addressof(context))
def f(clone, numbers, io_setup):
    found = []
    for name, number in numbers:
        for first in (0, 1, 16, 0x10000000):
            attempt(found, name, lambda: syscall(number, first, int(first > 0), 0, 0, 0))
    attempt(found, "io_setup", lambda: take_contexts(io_setup))
    for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000):
        attempt(found, "unshare", lambda: libc.unshare(flag) == 0 or 1 / 0)
        attempt(found, "clone", lambda: syscall(clone, flag | 17, 0, 0, 0, 0) or os._exit(0))
    attempt(found, "mount", lambda: libc.mount(b"x", b"/tmp", b"tmpfs", 0, None) == 0 or 1 / 0)
    attempt(found, "remount", lambda: libc.mount(None, b"/", None, 32, None) == 0 or 1 / 0)
    attempt(found, "umount", lambda: libc.umount2(b"/proc", 2) == 0 or 1 / 0)
    attempt(found, "ptrace", lambda: libc.ptrace(0, 0, 0, 0) == 0 or 1 / 0)
    attempt(found, "chroot", lambda: os.chroot("."))
    attempt(found, "mknod", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
    attempt(found, "setuid", lambda: os.setuid(0))
    attempt(found, "TIOCSTI", type_on_a_terminal)
    for command in ("unshare -Ur true", "mount -t tmpfs x /tmp", "mount -o remount,rw /", "umount /proc", "chroot / true",
                    "nsenter -t 1 -m true", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sys/kernel/panic_on_oops",
                    "echo x > /proc/sysrq-trigger", "date -s 2001-01-01", "hostname other", "sysctl -w kernel.panic=1",
                    "swapon /tmp/x"):
        attempt(found, command, lambda: subprocess.run(["bash", "-c", command], check=True, capture_output=True) and None)
    return found
"""
    column, calls = machine()["column"], KERNEL | ABSENT | (PROCESS if cell.box is None else {})
    numbers = [(name, call[column]) for name, call in calls.items() if name not in ("fork", "vfork")]
    numbers = [(name, number) for name, number in numbers if number is not None]
    return nothing(cell.run(source, machine()["clone"], numbers, ABSENT["io_setup"][column]))


@register_both(29, "inherited descriptors, environment, privileges, files of root left behind")
def inherited(cell: Cell) -> AttackVerdict:
    source = """
import stat, struct
def f(capget):
    open("mine", "w").close()
    held, environment, index = [], [], 0
    for fd in range(3, 4096):
        attempt(held, str(fd), lambda: stat.filemode(os.fstat(fd).st_mode)[0])
    first = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    while first and first[index]:
        environment.append(first[index].decode())
        index += 1
    of_root = [name for top in (".", "/tmp") for folder, _, names in os.walk(top) for name in names
               if os.lstat(os.path.join(folder, name)).st_uid == 0]
    data = ctypes.create_string_buffer(24)
    libc.syscall(ctypes.c_long(capget), ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0)), data)
    limits = [libc.prctl(39, 0, 0, 0, 0), libc.prctl(21, 0, 0, 0, 0), sum(data.raw)]
    return [held, environment, of_root, 0 in (os.getuid(), os.getgid(), *os.getgroups()), limits]
"""
    assert os.environ.get(SECRET_NAME) == SECRET, "the check must have put its secret in the environment"
    descriptors, environment, of_root, root, limits = cell.run(source, machine()["capset"] - 1)
    if cell.box is None:
        descriptors.remove("3='p'")  # the pipe of results
    else:
        environment = [text for text in environment if SECRET in text or SECRET_NAME in text]
    successes = [f"fd {fd}" for fd in descriptors] + environment + of_root + ["root"] * root
    if limits != [1, 2, 0]:
        successes.append(f"no_new_privs, seccomp, capability bits {limits}")
    return nothing(successes)


@register(19, "find copies of the library that a task is made of")
def answers(site: Site) -> AttackVerdict:
    source = """
import importlib.util
def f(names):
    found = []
    for top, below, files in os.walk("/"):
        if top == "/":
            below[:] = [name for name in below if name not in ("proc", "sys", "dev")]
        held = [name for name in below + files if name.endswith((".whl", ".dist-info", ".egg-info"))]
        found += [os.path.join(top, name) for name in held]
        if os.path.basename(top) in ("site-packages", "dist-packages", "_vendor", "_bundled") and below + files:
            found.append(top)
    for name in names:
        attempt(found, "import " + name, lambda: importlib.util.find_spec(name).origin)
    return found[:20]
"""
    with site.backend.create(SPEC) as box:
        names = "pip setuptools pkg_resources packaging requests urllib3 six pygments yaml pytest".split()
        return nothing(python(box, source, names))


@register(19, "hear of another sandbox by what /proc and /sys count for the whole machine")
def counters(site: Site) -> AttackVerdict:
    source = """
import itertools, zlib
def f():
    texts = {}
    def look(path):
        with open(path, "rb", buffering=0) as file:
            os.set_blocking(file.fileno(), False)
            texts[path] = zlib.crc32(file.read(1 << 16) or b"")
    for top, below, files in itertools.chain(os.walk("/proc"), os.walk("/sys")):
        if top == "/proc":
            below[:] = [name for name in below if not name.isdigit() and name not in ("self", "thread-self", "net")]
        for name in files:
            attempt([], name, lambda: look(os.path.join(top, name)))
    return texts
"""
    busy = "import os\nfor _ in range(200):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\n    os.open('/dev/null', 0)"
    exempt = {"/proc/uptime", "/proc/cpuinfo", *(["/proc/stat", "/proc/meminfo"] * (site.backend.name == "docker"))}
    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box:
        before = python(box, source)
        if neighbour.exec(["python3", "-c", busy], timeout_s=60).exit_code:
            return AttackVerdict(False, "no evidence: the neighbour did nothing")
        after = python(box, source)
    return nothing(sorted(path for path, text in after.items() if path not in exempt and before.get(path) != text))


# Ways to hold a file, and files that two sandboxes may have in common.
COMMON = """
import fcntl, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which dnotify speaks
ways = {
    "flock": lambda fd: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "fcntl": lambda fd: fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB),
    "lease": lambda fd: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "dnotify": lambda fd: fcntl.fcntl(fd, fcntl.F_NOTIFY, 1),
}
def files():
    seen = {"/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/usr/local/bin", "/mnt", "/proc", "/dev", "/dev/null", "/dev/zero"}
    for top in ("/etc", "/usr/bin", "/usr/local/bin", os.path.dirname(os.__file__)):
        seen |= {os.path.join(top, name) for name in sorted(os.listdir(top))[:60]}
    opened = set()
    for path in sorted(seen):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) not in opened:  # one file under two names would keep itself waiting
            opened.add((status.st_dev, status.st_ino))
            yield path, fd
"""
HOLDER = f"""{HELPERS}{COMMON}
watch = libc.inotify_init1(os.O_NONBLOCK)
held, heard = [], []
for path, fd in files():
    libc.inotify_add_watch(watch, path.encode(), 0x20)  # IN_OPEN
    for name, way in ways.items():
        attempt(held, name, lambda: way(fd) and None)
attempt([], "", lambda: os.read(watch, 1 << 20))  # of what was opened here
def say(name, value):
    with open("new", "w") as file:
        json.dump(value, file)
    os.rename("new", name)
say("held", {{name: held.count(name) for name in ways}})
while not os.path.exists("go"):
    time.sleep(0.01)
attempt(heard, "inotify", lambda: os.read(watch, 1 << 20) and None)
say("heard", heard)
"""
OTHER = f"""{COMMON}
def f():
    found = []
    for path, fd in files():
        try:
            ways["flock"](fd)
        except OSError as error:
            found += [path] if error.errno == 11 else []
    return found
"""


@register(22, "make another sandbox wait, or hear of it, by locks, leases and watches on files that both see")
def locks(site: Site) -> AttackVerdict:
    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box:
        neighbour.write("holder.py", HOLDER.encode())
        neighbour.exec_background(["python3", "holder.py"], log="log")
        counts = _written(neighbour, "held")
        successes = python(box, OTHER) if counts else []
        neighbour.write("go", b"")
        signals = _written(neighbour, "heard")
    if counts is None or signals is None:
        return AttackVerdict(False, "no evidence: the program that holds locks did not run")
    successes = successes + signals if site.backend.capabilities().enforced["locks"] else []  # else they say so
    successes += [name for name in ("lease", "dnotify") if counts[name]]
    return AttackVerdict(not successes, nothing(successes).detail if successes else f"held without effect: {counts}")


def _written(box: Sandbox, path: str) -> Any:
    """Return the JSON that a program writes to a file; None if it does not. Its watches would see any other request."""
    deadline = time.monotonic() + patience(20)
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            return json.loads(box.read(path))
        time.sleep(0.02)
    return None
