"""Attacks on a sandbox with a workspace: cases 19 to 30 of the thirty that every backend is checked with.

Each is a hostile command or a hostile use of the sandbox's own methods, judged by what it reported and by what the host saw. The
others (1 to 18) are patches that are graded: `patches.py`.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.attacks.case import HELPERS, SECRET, SECRET_NAME, Verdict
from composer_nb.harness.journal import FOLDER, OWN, mounts, started
from composer_nb.harness.linux import machine
from composer_nb.harness.reap import reap
from composer_nb.harness.sandboxes.contract import Backend, Sandbox, SandboxDied, SandboxSpec

SPEC = SandboxSpec(memory_bytes=192 << 20, disk_bytes=16 << 20, inodes=2000, processes=48, open_files=256)
REFUSED = (OSError, ValueError, KeyError)
"""What a call that can not be carried out raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A host with secrets around its sandboxes."""

    backend: Backend
    canary: Path
    """A file of the host that anybody may read, with SECRET in it."""
    tcp: socket.socket
    """A listener on the host's loopback."""
    local: socket.socket
    """A listener on a Unix socket beside the canary."""
    abstract: socket.socket
    """A listener on an abstract Unix socket, which lives in the network namespace."""

    def reached(self) -> list[str]:
        """Which listeners somebody has connected to."""
        found = []
        for name in ("tcp", "local", "abstract"):
            try:
                getattr(self, name).accept()[0].close()
                found.append(name)
            except BlockingIOError:
                pass
        return found


Judge = Callable[[Site], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCase:
    id: str
    number: int
    title: str
    judge: Judge


CASES: list[SandboxCase] = []


def case(number: int, title: str) -> Callable[[Judge], Judge]:
    def register(judge: Judge) -> Judge:
        CASES.append(SandboxCase(id=judge.__name__.replace("_", "-"), number=number, title=title, judge=judge))
        return judge

    return register


def python(box: Sandbox, source: str, *arguments: object, timeout_s: float = 30.0) -> Any:
    """What `source`, a program that has `arguments` as `A` and prints JSON as its last line, reports.

    Raises ValueError when it reports nothing.
    """
    text = f"import json, sys\nA = json.load(sys.stdin)\n{HELPERS}\n{source}"
    done = box.exec(["python3", "-c", text], timeout_s=timeout_s, stdin=json.dumps(arguments).encode())
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if not lines:
        raise ValueError(f"no evidence: exit code {done.exit_code}, {done.stderr[-200:]!r}")
    return json.loads(lines[-1])


def nothing(found: list[str]) -> Verdict:
    return Verdict(blocked=not found, detail=f"succeeded: {found}" if found else "every attempt failed")


def alive(box: Sandbox) -> bool:
    return box.exec(["echo", "on"], timeout_s=20).stdout == b"on\n"


@case(19, "read files and environments of the host and of other sandboxes")
def read_the_host(site: Site) -> Verdict:
    source = """
found = []
for path in A[0]:
    attempt(found, path, lambda: open(path, "rb").read(40))
for pid in [p for p in os.listdir("/proc") if p.isdigit()] + ["self"]:
    for name in ("environ", "cmdline", "root/etc/shadow", "cwd/secret"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                text = file.read()
        except OSError:
            continue
        if A[1].encode() in text:
            found.append(f"/proc/{pid}/{name}")
if found:
    print(json.dumps(found))
    raise SystemExit
for top in ("/", "/tmp", "/workspace", "/dev/shm", "/var", "/home", "/root", "/run"):
    for folder, below, files in os.walk(top):
        below[:] = [name for name in below if os.path.join(folder, name) not in ("/proc", "/sys", "/usr", "/dev")]
        for name in files:
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    if A[1].encode() in file.read(1 << 20):
                        found.append(os.path.join(folder, name))
            except OSError:
                pass
print(json.dumps(found))
"""
    names = [
        "/etc/shadow",
        str(Path.home() / ".bashrc"),
        "/run/docker.sock",
        "/var/run/docker.sock",
        str(site.canary),
        str(Path(__file__)),
    ]
    names += [f"/proc/1/root{site.canary}", f"/proc/self/root{site.canary}", f"/workspace/../..{site.canary}"]
    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box:
        neighbour.write("secret", SECRET.encode())
        return nothing(python(box, source, names, SECRET))


@case(20, "lead file tools and the reading of results out of the workspace by links")
def links(site: Site) -> Verdict:
    with site.backend.create(SPEC) as box:
        box.exec(["bash", "-c", f"mkdir /tmp/out; echo {SECRET} > /tmp/out/file; mkdir real; echo inside > real/file"])
        made = "ln -s /tmp/out/file a; ln -s ../../../tmp/out b; ln /etc/passwd c; ln -s /proc/1/root d; ln -s /proc/self/fd e"
        box.exec(["bash", "-c", made + "; mkfifo f; ln -s g g"])
        found = []
        for path in (
            "a",
            "b/file",
            "d/tmp/out/file",
            "e/0",
            "f",
            "g",
            "/tmp/out/file",
            "../tmp/out/file",
            "real/../../tmp/out/file",
        ):
            try:
                if SECRET.encode() in box.read(path):
                    found.append(path)
            except REFUSED:
                pass
        swap = "while :; do ln -sfn real x; ln -sfn /tmp/out x; rm x; mkdir x; echo inside > x/file; rm -r x; done"
        pid = box.exec_background(["bash", "-c", swap], log="log")
        reads = 0
        for _ in range(300):
            try:
                if SECRET.encode() in box.read("x/file"):
                    found.append("swapped")
                reads += 1
            except REFUSED:
                pass
        box.end(pid)
        for path, data in box.download().items():
            if SECRET.encode() in data or path.startswith("/") or ".." in path.split("/"):
                found.append(f"download {path}")
        verdict = nothing(found)
        return Verdict(
            blocked=verdict.blocked, detail=f"{verdict.detail}; {reads} reads of a path that was swapped meanwhile"
        )


@case(21, "reach a network, the host's sockets or a package index")
def network(site: Site) -> Verdict:
    source = """
import socket
found = []
port, path, abstract = A
def tcp(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
def udp(address):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(1)
        s.sendto(b"x", address)
        s.recv(1)
for host in ("1.1.1.1", "169.254.169.254", "10.0.0.1", "172.17.0.1", "192.168.0.1"):
    attempt(found, host, lambda: tcp(socket.AF_INET, (host, 80)))
attempt(found, "loopback of the host", lambda: tcp(socket.AF_INET, ("127.0.0.1", port)))
attempt(found, "ipv6", lambda: tcp(socket.AF_INET6, ("2606:4700:4700::1111", 80)))
attempt(found, "udp", lambda: udp(("1.1.1.1", 53)))
attempt(found, "name", lambda: socket.getaddrinfo("example.com", 80))
for name in (path, "\\0" + abstract, "/var/run/docker.sock", "/run/docker.sock", "/run/dbus/system_bus_socket"):
    attempt(found, name, lambda: tcp(socket.AF_UNIX, name))
for family, kind in ((16, 3), (17, 3), (38, 5), (40, 1)):  # netlink, packet, crypto, the hypervisor's
    attempt(found, "family " + str(family), lambda: socket.socket(family, kind).close())
import subprocess
for command in ("python3 -m pip download six", "curl -m2 http://1.1.1.1", "wget -T2 -t1 http://1.1.1.1"):
    attempt(found, command, lambda: subprocess.run(command.split(), check=True, capture_output=True, timeout=20) and None)
print(json.dumps(found))
"""
    with site.backend.create(SPEC) as box:
        name = site.abstract.getsockname().decode().lstrip("\0")
        found = python(box, source, site.tcp.getsockname()[1], site.local.getsockname(), name, timeout_s=90)
    return nothing(found + site.reached())


@case(22, "namespaces, mounts, tracing, io_uring, keys, a terminal's input")
def kernel(site: Site) -> Verdict:
    source = """
import fcntl, subprocess
found = []
clone, io_uring, keyctl, ptrace, bpf, userfaultfd, unshare, setns = A[0]
for name, number, first in (("clone", clone, 0x10000011), ("io_uring", io_uring, 1), ("keyctl", keyctl, 0),
                            ("ptrace", ptrace, 16), ("bpf", bpf, 0), ("userfaultfd", userfaultfd, 0),
                            ("unshare", unshare, 0x10000000)):
    def call():
        pid = syscall(number, first, 1, 0, 0, 0)
        if name == "clone" and pid == 0:
            os._exit(0)
    attempt(found, name, call)
for command in ("unshare -Ur true", "mount -t tmpfs x /tmp", "mount -o remount,rw /", "umount /proc", "chroot / true",
                "nsenter -t 1 -m true", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sys/kernel/panic_on_oops",
                "echo x > /proc/sysrq-trigger", "date -s 2001-01-01", "hostname other", "sysctl -w kernel.panic=1",
                "swapon /tmp/x"):
    attempt(found, command, lambda: subprocess.run(["bash", "-c", command], check=True, capture_output=True) and None)
master, slave = os.openpty()
def type_on_it():
    fcntl.ioctl(slave, 0x5412, b"x")
attempt(found, "TIOCSTI", type_on_it)
attempt(found, "setuid", lambda: os.setuid(0))
print(json.dumps(found))
"""
    x86 = machine()["column"] == 0
    numbers = (56, 425, 250, 101, 321, 323, 272, 308) if x86 else (220, 425, 219, 117, 280, 282, 97, 268)
    with site.backend.create(SPEC) as box:
        return nothing(python(box, source, numbers))


def _neighbour(site: Site, attack: list[str], timeout_s: float = 3.0) -> tuple[Any, float, float]:
    """Runs an attack in one sandbox while another runs `true`: (result, its median time before, meanwhile)."""

    def median(box: Sandbox, count: int) -> float:
        taken = sorted(box.exec(["true"], timeout_s=60).duration_s for _ in range(count))
        return taken[count // 2]

    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box:
        results: list[Any] = []
        before = median(neighbour, 15)

        def run() -> None:
            try:
                results.append(box.exec(attack, timeout_s=timeout_s))
            except SandboxDied as error:
                results.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.3)
        meanwhile = median(neighbour, 15)
        thread.join()
        left = 0 if isinstance(results[0], SandboxDied) or not alive(box) else box.stats().processes
        return (results[0], left), before, meanwhile


@case(23, "fork bomb and thread bomb")
def bombs(site: Site) -> Verdict:
    threads = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: pass"
    )
    details, blocked = [], True
    for attack in (["bash", "-c", "b() { b | b & }; b; sleep 60"], ["python3", "-c", threads]):
        (result, left), before, meanwhile = _neighbour(site, attack)
        ended = isinstance(result, SandboxDied) or result.timed_out or result.exit_code != 0
        blocked &= ended and left == 0
        details.append(f"neighbour {meanwhile * 1e3:.1f} ms, before {before * 1e3:.1f} ms, {left} processes left")
    return Verdict(blocked=blocked, detail="; ".join(details))


@case(24, "use up the memory, by processes and by files in memory")
def memory(site: Site) -> Verdict:
    fill = "import os\nx = []\nwhile True: x.append(bytearray(16 << 20))"
    files = "for p in /dev/shm /tmp .; do head -c 1G /dev/zero > $p/big; done; exit 1"
    details, blocked = [], True
    for attack in (["python3", "-c", fill], ["bash", "-c", files]):
        free = _available()
        (result, _), before, meanwhile = _neighbour(site, attack, timeout_s=15)
        ended = isinstance(result, SandboxDied) or result.exit_code != 0
        deadline = time.monotonic() + 20  # others may use memory too, and let go of it
        while (given_back := _available() > free - (256 << 20)) is False and time.monotonic() < deadline:
            time.sleep(0.1)
        blocked &= ended and given_back
        details.append(f"neighbour {meanwhile * 1e3:.1f} ms, before {before * 1e3:.1f} ms")
    return Verdict(blocked=blocked, detail="; ".join(details))


def _available() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


@case(25, "fill the disk, use up inodes, a giant sparse file, folders without end")
def disk(site: Site) -> Verdict:
    source = """
found = []
def fill(place):
    size = 0
    try:
        with open(place + "/fill", "wb") as file:
            while size < 1 << 30:
                size += file.write(bytes(1 << 20))
    except OSError:
        pass
    if size > A[0]:
        found.append(f"{place}: {size} bytes")
    os.unlink(place + "/fill")
for place in (".", "/tmp", "/dev/shm"):
    fill(place)
count = 0
try:
    while count < 100000:
        open(f"n{count}", "w").close()
        count += 1
except OSError:
    pass
if count > A[1]:
    found.append(f"{count} files")
def sparse():
    with open("giant", "wb") as file:
        file.truncate(1 << 40)
for number in range(count):
    os.unlink(f"n{number}")
attempt(found, "sparse", sparse)
depth = 0
try:
    while depth < 100000:
        os.mkdir("d")
        os.chdir("d")
        depth += 1
except OSError:
    pass
if depth > A[1]:
    found.append(f"{depth} folders deep")
print(json.dumps(found))
"""
    before = os.statvfs(tempfile.gettempdir())
    with site.backend.create(SPEC) as box:
        counted = site.backend.capabilities().enforced["inodes"]
        inodes = SPEC.inodes if counted else 1 << 20  # where they are not limited, that is said in the capabilities
        found = python(box, source, SPEC.disk_bytes + (1 << 20), inodes, timeout_s=60)
        if not alive(box):
            found.append("the sandbox is dead")
        try:
            box.download()
            found.append("folders without end were read")
        except OSError:
            pass
    after = os.statvfs(tempfile.gettempdir())
    if (before.f_bavail - after.f_bavail) * after.f_frsize > 64 << 20:
        found.append("the host's disk")
    return nothing(found)


@case(26, "endless output, on both streams, of bytes that are no text")
def output(site: Site) -> Verdict:
    found, details = [], []
    floods = {
        "stdout": "yes",
        "stderr": "yes >&2",
        "no text": "cat /dev/urandom",
        "one line": "tr '\\0' x < /dev/zero",
        "terminal": "while :; do printf '\\033[2J\\007\\000'; done",
    }
    with site.backend.create(SPEC) as box:
        for name, flood in floods.items():
            done = box.exec(["bash", "-c", flood], timeout_s=1, output_bytes=10_000)
            size = len(done.stdout) + len(done.stderr)
            if not done.timed_out or (not done.truncated and name != "terminal") or size > 21_000:
                found.append(f"{name}: {size} bytes, truncated {done.truncated}")
            details.append(f"{name} {size}")
        if not alive(box):
            found.append("the sandbox is dead")
    return Verdict(blocked=not found, detail=str(found or details))


@case(27, "outlive a time limit")
def time_limit(site: Site) -> Verdict:
    evasions = (
        "trap '' TERM INT HUP QUIT; while :; do sleep 60; done",
        "(setsid bash -c 'sleep 61 & sleep 62' >/dev/null 2>&1 &); sleep 60",
        "nohup setsid sleep 64 > /dev/null 2>&1 & disown; sleep 60",
        "kill -STOP $$",
        "for i in $(seq 30); do (sleep 60 &) ; done; while :; do :; done",
        "python3 -c 'import os, time\nfor _ in range(30):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(60)'",
    )
    found, worst = [], 0.0
    with site.backend.create(SPEC) as box:
        for evasion in evasions:
            begin = time.monotonic()
            done = box.exec(["bash", "-c", evasion], timeout_s=0.5)
            worst = max(worst, time.monotonic() - begin - 0.5)
            if not done.timed_out or box.stats().processes:
                found.append(evasion)
        if not alive(box):
            found.append("the sandbox is dead")
    return Verdict(blocked=not found, detail=f"survived: {found}" if found else f"at most {worst:.2f} s late")


HARNESS = """
import sys, threading, time
from pathlib import Path
from composer_nb.harness.sandboxes import open_backend
from composer_nb.harness.attacks.sandboxes import SPEC
from composer_nb.harness.journal import FOLDER
backend = open_backend(sys.argv[1], "killed", Path(sys.argv[2]) / FOLDER)
box = backend.create(SPEC)
box.write("a", b"x")
threading.Thread(target=lambda: box.exec(["bash", "-c", "(setsid sleep 300 &); sleep 300"], timeout_s=300), daemon=True).start()
def churn():
    while True:
        backend.create(SPEC).destroy()
threading.Thread(target=churn, daemon=True).start()
time.sleep(0.5)
print("ready", flush=True)
time.sleep(300)
"""


@case(28, "kill the harness in the middle of everything, then reap")
def killed_harness(site: Site) -> Verdict:
    before = machine_state()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", HARNESS, site.backend.name, folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/")
        assert process.stdout is not None
        with process.stdout as told:
            ready = told.readline()
        below = _below(process.pid)
        process.kill()
        process.wait()
        if ready != b"ready\n":
            return Verdict(blocked=False, detail="no evidence: the harness did not start")
        time.sleep(0.5)
        done = reap(Path(folder))
        left = [pid for pid, tick in below if started(pid) == tick]
        again = reap(Path(folder))
        (Path(folder) / FOLDER).rmdir()  # empty: nothing is held any more
        found = left_behind(before)
    problems = [*(f"process {pid}" for pid in left), *found, *done.failed, *again.failed]
    ended = ", ".join(f"{len(getattr(done, kind))} {kind}" for kind in ("processes", "cgroups", "containers"))
    detail = f"{len(below)} processes were running; reap ended {ended}"
    return Verdict(blocked=not problems, detail=f"left: {problems}" if problems else detail)


def _below(root: int) -> list[tuple[int, int]]:
    """(pid, start) of every process below one."""
    facts = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(") ")[2].split()
                facts[int(entry.name)] = (int(fields[1]), int(fields[19]))
        except OSError:
            continue
    found = [root]
    for pid in found:
        found += [child for child, (parent, _) in facts.items() if parent == pid]
    return [(pid, facts[pid][1]) for pid in found[1:] if pid in facts]


@dataclass(frozen=True, slots=True)
class MachineState:
    """What sandboxes could leave on a machine: (pid, start) of processes that hold them, mounts, cgroups, folders."""

    processes: frozenset[tuple[int, int]]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    folders: frozenset[str]


def machine_state() -> MachineState:
    """What there is now. A cgroup counts when nothing runs in it: one that is in use is somebody's."""
    holders = set()
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and (entry / "comm").read_text().strip() == "bwrap"
                and (tick := started(int(entry.name)))
            ):
                holders.add((int(entry.name), tick))
        except OSError:
            continue
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{OWN}*") if _of_nobody(path)}
    folders = {str(path) for path in Path(tempfile.gettempdir()).glob(f"{OWN}*")}
    return MachineState(frozenset(holders), frozenset(mounts()), frozenset(groups), frozenset(folders))


def left_behind(before: MachineState) -> list[str]:
    """What there is now and was not before, a line each."""
    now = machine_state()
    return [
        f"{name}: {entry}" for name in MachineState.__slots__ for entry in getattr(now, name) - getattr(before, name)
    ]


def _of_nobody(group: Path) -> bool:
    """Whether nothing runs in a group. (A sandbox that lives has at least its resident program in it.)"""
    try:
        return not (group / "cgroup.procs").read_text().strip()
    except OSError:
        return False


@case(29, "inherited descriptors, environment, files of root left behind")
def inherited(site: Site) -> Verdict:
    source = """
found = []
for fd in range(3, 300):
    attempt(found, "fd " + str(fd), lambda: os.fstat(fd) and None)
found += [name for name, value in os.environ.items() if A[0] in value or name == A[1]]
if os.getuid() == 0 or os.getgid() == 0 or 0 in os.getgroups():
    found.append("root")
print(json.dumps(found))
"""
    with site.backend.create(SPEC) as box:
        found = python(box, source, SECRET, SECRET_NAME)
        owners = box.exec(["bash", "-c", "touch mine; find . /tmp -uid 0 -type f"]).stdout
        if owners.strip():
            found.append(f"files of root: {owners!r}")
    return nothing(found)


@case(30, "abuse of the sandbox's own methods: random, huge and broken requests")
def abuse(site: Site) -> Verdict:
    rng, odd = random.Random(30), []
    texts = [
        "",
        ".",
        "..",
        "/",
        "a\0b",
        "\n",
        "x" * 5000,
        "../../etc/passwd",
        "</parameter>",
        "\udcff",
        "-rf",
        "~",
        "$(id)",
        "\x1b[2J",
    ]

    def anything(box: Sandbox) -> Any:
        text, number = rng.choice(texts), rng.choice([-1, 0, 1, 1 << 40])
        return rng.choice(
            [
                lambda: box.read(text, offset=max(number, 0), max_bytes=number),
                lambda: box.read(text, offset=number),
                lambda: box.write(text, b"x" * rng.choice([0, 10, 1 << 20])),
                lambda: box.upload({text: b"x", rng.choice(texts): b"y"}),
                lambda: box.exec([text, text], timeout_s=5, output_bytes=rng.choice([1, 100])),
                lambda: box.exec(["true"], cwd=text, env={text: text}, timeout_s=5),
                lambda: box.exec_background(["true"], log=text),
                lambda: box.poll(number),
                lambda: box.end(number),
                lambda: box.exec(["true"] * 3000, timeout_s=5),
                lambda: box.download(max_bytes=number),
            ]
        )()

    with site.backend.create(SPEC) as box:
        for _ in range(300):
            try:
                anything(box)
            except REFUSED:
                pass
            except Exception as error:
                odd.append(f"{type(error).__name__}: {error}"[:100])
                break
        answers = alive(box) if not odd else False
    return Verdict(
        blocked=answers, detail=str(odd) if odd else "300 requests: results or clear errors, and it still works"
    )
