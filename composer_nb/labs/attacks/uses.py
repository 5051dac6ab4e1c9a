"""Hostile uses of a sandbox, kinds 19 to 30: the host's files, networks, the kernel, what is inherited or left for a later
sandbox, what may be used up, and those who run sandboxes: a harness that is killed, methods that are abused."""

import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.sandbox.contract import Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.sandbox.reap import FOLDER, below, mark_of, reap, started
from composer_nb.harness.sandbox.system.linux import machine, patience
from composer_nb.harness.sandbox.system.seccomp import ABSENT, KERNEL, PROCESS, RULED
from composer_nb.labs.attacks import hostile
from composer_nb.labs.attacks.case import (
    LIMITS,
    REFUSED,
    SECRET,
    SECRET_NAME,
    SPEC,
    AttackVerdict,
    Cell,
    alive,
    case,
    command,
    nothing,
    python,
)  # fmt: skip
from composer_nb.labs.attacks.texts import ATTACKS

BITS = 64
BASIC = replace(SPEC, basic=True)
# Uses up the memory of a sandbox, at which the kernel takes the pages of files that count for it.
PRESS = "x = []\nwhile True: x.append(bytearray(b'x') * (4 << 20))"
DEAD = "the sandbox is dead"

# The host and other sandboxes.


@case(19, "read files and environments of the host and of other sandboxes, also through links", called=True)
def read_the_host(cell: Cell) -> list[str]:
    canary, home = cell.site.canary, Path.home()
    names = ["/etc/shadow", str(home / ".bashrc"), "/run/docker.sock", "/var/run/docker.sock", str(canary), __file__]
    names += [f"{root}{canary}" for root in ("/proc/1/root", "/proc/self/root", "/workspace/../..", "../" * 9)]
    folders = [str(canary.parent), *([str(home)] if home != Path("/") else [])]
    if cell.called:
        names, folders = [*names, "/etc/hostname"], [*folders, "/home", "/var", "/sys", "/run"]
    neighbour = cell.sandbox()
    neighbour.write("secret", SECRET.encode())
    neighbour.exec(["sh", "-c", "cp secret /tmp; cp secret /dev/shm"])
    return cell.run(hostile.read_the_host, names, folders, SECRET)


@case(19, "write to folders of the host", called=True)
def write_to_the_host(cell: Cell) -> list[str]:
    folders = ["/", "/usr", "/usr/lib", "/dev", "/proc", "/etc", str(cell.site.canary.parent)]
    successes = cell.run(hostile.write_to_the_host, folders + ["/dev/shm"] * cell.called)
    return successes + ["canary-written"] * (cell.site.canary.parent / "canary-written").exists()


@case(20, "lead file tools and the reading of results out of the workspace by links")
def links(cell: Cell) -> AttackVerdict:
    leaks: list[str] = []
    box = cell.sandbox()

    def look(path: str) -> bool:
        with contextlib.suppress(*REFUSED):
            leaks.extend([path] * (SECRET.encode() in box.read(path)))
            return True
        return False

    box.exec(["bash", "-c", f"mkdir /tmp/out; echo {SECRET} > /tmp/out/file; mkdir real; echo inside > real/file"])
    links = "ln -s /tmp/out/file a; ln -s ../../../tmp/out b; ln /etc/passwd c; ln -s /proc/1/root d"
    box.exec(["bash", "-c", f"{links}; ln -s /proc/self/fd e; mkfifo f; ln -s g g"])
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


@case(21, "reach a network, the host's sockets or a package index", called=True)
def network(cell: Cell) -> list[str]:
    site = cell.site
    abstract = site.abstract.getsockname().decode().lstrip("\0")
    kinds = [(16, 3), (17, 3), (38, 5), (40, 1)]  # netlink, packet, crypto, the hypervisor's
    if cell.called:
        kinds += [(1, 1), (2, 1), (2, 2), (10, 1)]  # a function call makes no sockets at all
    successes = cell.run(hostile.network, site.tcp.getsockname()[1], site.local.getsockname(), abstract, kinds)
    return successes + site.reached()


@case(22, "namespaces, mounts, tracing, io_uring, keys, a terminal's input, other privileged calls", called=True)
def kernel(cell: Cell) -> list[str]:
    column, calls = machine()["column"], KERNEL | ABSENT | (PROCESS if cell.called else {})
    numbers = [(name, call[column]) for name, call in calls.items() if name not in ("fork", "vfork")]
    numbers = [(name, number) for name, number in numbers if number is not None]
    return cell.run(hostile.kernel, machine()["clone"], numbers, ABSENT["io_setup"][column])


@case(29, "inherited descriptors, environment, privileges, files of root left behind", called=True)
def inherited(cell: Cell) -> list[str]:
    assert os.environ.get(SECRET_NAME) == SECRET, "the check must have put its secret in the environment"
    descriptors, environment, of_root, root, limits = cell.run(hostile.inherited, machine()["capset"] - 1)
    if cell.called:
        descriptors.remove("3='p'")  # the pipe of results
    else:
        environment = [text for text in environment if SECRET in text or SECRET_NAME in text]
    successes = [f"fd {fd}" for fd in descriptors] + environment + of_root + ["root"] * root
    return successes + [f"no_new_privs, seccomp, capability bits {limits}"] * (limits != [1, 2, 0])


@case(19, "find copies of the library that a task is made of")
def answers(cell: Cell) -> list[str]:
    names = "pip setuptools pkg_resources packaging requests urllib3 six pygments yaml pytest".split()
    return cell.run(hostile.copies_of_libraries, names)


@case(19, "hear of another sandbox by what /proc and /sys count for the whole machine")
def counters(cell: Cell) -> AttackVerdict | list[str]:
    busy = "import os\nfor _ in range(200):\n    if os.fork() == 0: os._exit(0)\n    os.wait()\n    os.open('/dev/null', 0)"
    exempt = {
        "/proc/uptime",
        "/proc/cpuinfo",
        *(["/proc/stat", "/proc/meminfo"] * (cell.site.backend.name == "docker")),
    }
    neighbour, box = cell.sandbox(), cell.sandbox()
    before = python(box, hostile.machine_counters)
    if neighbour.exec(["python3", "-c", busy], timeout_s=60).exit_code:
        return AttackVerdict(False, "no evidence: the neighbour did nothing")
    after = python(box, hostile.machine_counters)
    return sorted(path for path, text in after.items() if path not in exempt and before.get(path) != text)


@case(22, "make another sandbox wait, or hear of it, by locks, leases and watches on files that both see")
def locks(cell: Cell) -> AttackVerdict | list[str]:
    neighbour, box = cell.sandbox(), cell.sandbox()

    def written(path: str) -> Any:
        """Return the JSON that the neighbour writes to a file; None if it does not. Its watches would see any other request."""
        deadline = time.monotonic() + patience(20)
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                return json.loads(neighbour.read(path))
            time.sleep(0.02)
        return None

    neighbour.exec_background(command(hostile.hold_files), log="log")
    counts = written("held")
    successes = python(box, hostile.locked_files) if counts else []
    neighbour.write("go", b"")
    signals = written("heard")
    if counts is None or signals is None:
        return AttackVerdict(False, "no evidence: the program that holds locks did not run")
    successes = successes + signals if cell.site.backend.capabilities().enforced["locks"] else []  # else they say so
    successes += [name for name in ("lease", "dnotify") if counts[name]]
    note = f"took {counts['flock']} locks with flock and {counts['fcntl']} with fcntl, without effect"
    return successes or AttackVerdict(True, note)


# What a sandbox leaves for a later one, and memory that no limit may count.


@case(22, "leave a message for a later sandbox in which pages of common files are in memory")
def page_cache(cell: Cell) -> list[str]:
    leaks = []
    for spec in (SPEC, BASIC):
        bits = [random.randrange(2) for _ in range(BITS)]
        with cell.site.backend.create(spec) as box, contextlib.suppress(SandboxDied):
            evicted = python(box, hostile.evict_pages, bits)
            box.exec(["python3", "-c", PRESS], timeout_s=20)
        received = [int(count > 0) for count in python(cell.sandbox(spec), hostile.page_faults, BITS)]
        leaks += [f"{_agreeing(bits, received)} of {BITS} bits, {evicted} files evicted"] if any(received) else []
    return leaks


def _agreeing(bits: list[int], received: list[int]) -> int:
    return sum(sent_bit == bit for sent_bit, bit in zip(bits, received, strict=False))


@case(22, "be the first to read a file, which a later sandbox notices")
def unread_files(cell: Cell) -> AttackVerdict:
    count, cold, paths = python(cell.sandbox(BASIC), hostile.cold_files)
    rest = ", ".join(paths) or "all were in memory before"
    return AttackVerdict(count > 500 and not cold, f"{cold} of {count:,} files came from a disk: {rest}")


@case(22, "leave a message in times of devices, ports, or counters of the whole machine")
def counters_of_the_kernel(cell: Cell) -> list[str]:
    reports = []
    for _ in range(6):  # one after another
        with cell.site.backend.create(SPEC) as box:
            reports.append(python(box, hostile.kernel_counters))
    own_devices = cell.site.backend.name == "docker"
    leaks = {name for counters, times, _ in reports for name in counters + ([] if own_devices else times)}
    steps = [later[2] - earlier[2] for earlier, later in itertools.pairwise(reports)]
    if sum(0 < step <= 64 for step in steps) >= 3:
        leaks.add(f"ports, which advanced by {steps}")
    return sorted(leaks)


@case(22, "leave a message in what networks count for the whole machine, or in options of sockets")
def counts_of_networks(cell: Cell) -> list[str]:
    counts = ["softnet_stat", "sockstat", "protocols", "stat/arp_cache"] if os.geteuid() == 0 else []  # else shown
    return cell.run(hostile.network_counters, counts)


@case(22, "leave a message in which pages of common files the kernel takes to be in use")
def pages_in_use(cell: Cell) -> list[str]:
    bits = [random.randrange(2) for _ in range(BITS)]
    with cell.site.backend.create(BASIC) as box:
        python(box, hostile.pages_in_use, bits)
    box = cell.sandbox(BASIC)
    received = python(box, hostile.pages_in_use, []) if os.path.exists("/proc/self/numa_maps") else []
    return [] if all(received) else [f"{_agreeing(bits, received)} of {BITS} bits"]


@case(24, "have memory merged with that of others, or take pages that no limit counts", called=True)
def uncounted_pages(cell: Cell) -> list[str]:
    return cell.run(hostile.uncounted_pages, RULED["memfd_create"][machine()["column"]])


@case(22, "have a crash start a program of the host through a piped core_pattern", called=True)
def crash(cell: Cell) -> list[str]:
    return cell.run(hostile.core_dumps, RULED["prlimit64"][machine()["column"]])


@case(24, "use up memory of the kernel: buffers of sockets and pipes")
def kernel_memory(cell: Cell) -> AttackVerdict:
    details, blocked = [], True
    for kind in ("tcp", "unix", "pipe"):
        with cell.site.backend.create(SPEC) as box:
            try:
                size = python(box, hostile.fill_kernel_buffers, kind, 20)
            except (SandboxDied, ValueError):
                details.append(f"{kind}: ended")
                continue
        blocked &= size <= SPEC.memory_bytes
        details.append(f"{kind}: {size >> 20} MiB")
    blocked |= not cell.site.backend.capabilities().enforced["memory_bytes"]  # then the capabilities say so
    return AttackVerdict(blocked, f"{', '.join(details)}; the limit is {SPEC.memory_bytes >> 20} MiB")


@case(23, "use up the pseudo-terminals of the machine")
def terminals(cell: Cell) -> AttackVerdict:
    with cell.site.backend.create(SandboxSpec(open_files=1024)) as box:
        count = python(box, hostile.open_terminals)
    others = [name for name in cell.run(hostile.listed, "/dev/pts") if name != "ptmx"]
    return AttackVerdict(count <= 64 and not others, f"{count} opened; another sandbox sees {others}")


# What a sandbox may use: processes, memory, disk, output, time.


def _neighbour(cell: Cell, attack: list[str], timeout_s: float = 3.0) -> tuple[bool, int, str]:
    """Run an attack in one sandbox while another runs `true`: (it was ended, processes it left, the neighbour's median times)."""

    def median_ms() -> float:
        return 1e3 * statistics.median(neighbour.exec(["true"], timeout_s=60).duration_s for _ in range(15))

    create = cell.site.backend.create
    with create(SPEC) as neighbour, create(SPEC) as box, ThreadPoolExecutor(1) as thread:
        before = median_ms()
        running = thread.submit(box.exec, attack, timeout_s=timeout_s)
        time.sleep(0.3)
        times = f"neighbour {median_ms():.1f} ms, before {before:.1f} ms"
        try:
            result = running.result()
        except SandboxDied:
            return True, 0, times
        return result.timed_out or result.exit_code != 0, box.stats().processes if alive(box) else 0, times


@case(23, "fork bomb and thread bomb")
def bombs(cell: Cell) -> AttackVerdict:
    threads = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: pass"
    )
    attacks = ["bash", "-c", "b() { b | b & }; b; sleep 60"], ["python3", "-c", threads]
    outcomes = [_neighbour(cell, attack) for attack in attacks]
    detail = "; ".join(f"{times}, {left} processes left" for _, left, times in outcomes)
    return AttackVerdict(all(ended and left == 0 for ended, left, _ in outcomes), detail)


@case(24, "use up the memory, by processes and by files in memory")
def memory(cell: Cell) -> AttackVerdict:
    fill = "import os\nx = []\nwhile True: x.append(bytearray(16 << 20))"
    files = "for p in /dev/shm /tmp .; do head -c 1G /dev/zero > $p/big; done; exit 1"
    details, blocked = [], True
    for attack in (["python3", "-c", fill], ["bash", "-c", files]):
        # Memory of processes ends with them. What others use is not counted: the rest of the machine may be busy.
        file_memory = psutil.virtual_memory().shared
        ended, left, times = _neighbour(cell, attack, timeout_s=15)
        deadline = time.monotonic() + 20
        while (leak := psutil.virtual_memory().shared >= file_memory + (256 << 20)) and time.monotonic() < deadline:
            time.sleep(0.1)
        blocked &= ended and left == 0 and not leak
        details.append(f"{times}, {left} processes left{', files in memory left' if leak else ''}")
    return AttackVerdict(blocked, "; ".join(details))


@case(25, "fill the disk, use up inodes, a giant sparse file, folders without end", called=True)
def disk(cell: Cell) -> list[str]:
    limits = LIMITS if cell.called else SPEC
    counted = cell.site.backend.capabilities().enforced["inodes"]
    inodes = limits.inodes if counted else 1 << 20  # where they are not limited, the capabilities say so
    arguments = limits.disk_bytes, inodes, 3 * limits.inodes
    if cell.called:
        return cell.run(hostile.fill_the_disk, ["."], *arguments)
    box = cell.sandbox()
    successes: list[str] = python(box, hostile.fill_the_disk, ["/tmp", "/dev/shm", "."], *arguments)
    successes += [] if alive(box) else [DEAD]
    with contextlib.suppress(OSError):
        box.download()
        successes.append("folders without end were read")
    return successes


@case(26, "endless output, on both streams, of bytes that are no text")
def output(cell: Cell) -> AttackVerdict:
    floods = {
        "stdout": "yes", "stderr": "yes >&2", "no text": "cat /dev/urandom", "one line": "tr '\\0' x < /dev/zero",
        "terminal": "while :; do printf '\\033[2J\\007\\000'; done",
    }  # fmt: skip
    problems, details, box = [], [], cell.sandbox()
    for name, flood in floods.items():
        result = box.exec(["bash", "-c", flood], timeout_s=1, output_bytes=10_000)
        size = len(result.stdout) + len(result.stderr)
        if not result.timed_out or (not result.truncated and name != "terminal") or size > 21_000:
            problems.append(f"{name}: {size} bytes, truncated {result.truncated}")
        details.append(f"{name} {size}")
    problems += [] if alive(box) else [DEAD]
    return AttackVerdict(not problems, str(problems or details))


@case(27, "outlive a time limit")
def time_limit(cell: Cell) -> AttackVerdict:
    evasions = (
        "trap '' TERM INT HUP QUIT; while :; do sleep 60; done",
        "(setsid bash -c 'sleep 61 & sleep 62' >/dev/null 2>&1 &); sleep 60",
        "nohup setsid sleep 64 > /dev/null 2>&1 & disown; sleep 60",
        "kill -STOP $$",
        "for i in $(seq 30); do (sleep 60 &) ; done; while :; do :; done",
        "python3 -c 'import os, time\nfor _ in range(30):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(60)'",
    )
    survivors, worst, box = [], 0.0, cell.sandbox()
    for evasion in evasions:
        begin = time.monotonic()
        result = box.exec(["bash", "-c", evasion], timeout_s=0.5)
        worst = max(worst, time.monotonic() - begin - 0.5)
        if not result.timed_out or box.stats().processes:
            survivors.append(evasion)
    survivors += [] if alive(box) else [DEAD]
    return AttackVerdict(not survivors, f"survived: {survivors}" if survivors else f"at most {worst:.2f} s late")


# Those who run sandboxes.


@case(28, "kill the harness in the middle of everything, then reap")
def killed_harness(cell: Cell) -> AttackVerdict:
    harness = ATTACKS["a harness to be killed"][1]["program"]["harness"]
    with tempfile.TemporaryDirectory() as folder:
        journal, words = Path(folder) / FOLDER, [sys.executable, "-c", harness, cell.site.backend.name, folder]
        with subprocess.Popen(words, stdout=subprocess.PIPE, cwd="/") as process:
            assert process.stdout is not None
            ready = process.stdout.readline()
            running = below(process.pid)
            process.kill()
        if ready != b"ready\n":
            return AttackVerdict(False, "no evidence: the harness did not start")
        time.sleep(0.5)
        lines = [line for file in journal.glob("*.jsonl") for line in file.read_text().split("\n")[:-1]]
        notes = {(entry["kind"], entry["name"], entry["mark"]) for entry in map(json.loads, lines)}
        first, again = reap(Path(folder)), reap(Path(folder))
        journal.rmdir()  # empty: nothing is held any more
        problems = [f"process {pid}" for pid, tick in running if started(pid) == tick]
        problems += [f"{kind} {name}" for kind, name, mark in notes if mark_of(kind, name) == mark]
        problems += [*first.failed, *again.failed]
    ended = ", ".join(f"{len(getattr(first, kind))} {kind}" for kind in ("processes", "cgroups", "containers"))
    detail = f"{len(running)} processes were running; reap ended {ended}"
    return AttackVerdict(not problems, f"left: {problems}" if problems else detail)


@case(30, "abuse of the sandbox's own methods: random, huge and broken requests")
def abuse(cell: Cell) -> AttackVerdict:
    rng, box = random.Random(30), cell.sandbox()
    texts = ["", ".", "..", "/", "a\0b", "\n", "x" * 5000, "../../etc/passwd", "</parameter>", "\udcff", "-rf", "~"]
    texts += ["$(id)", "\x1b[2J"]

    def anything(box: Sandbox) -> Any:
        text, number = rng.choice(texts), rng.choice([-1, 0, 1, 1 << 40])
        requests: list[Callable[[], Any]] = [
            lambda: box.read(text, offset=max(number, 0), max_bytes=number),
            lambda: box.read(text, offset=number),
            lambda: box.write(text, b"x" * rng.choice([0, 10, 1 << 20])),
            lambda: box.upload({text: b"x", rng.choice(texts): b"y"}),
            lambda: box.exec([text, text], timeout_s=5, output_bytes=rng.choice([1, 100])),
            lambda: box.exec(["true"], cwd=text, env={text: text}, timeout_s=5),
            lambda: box.exec_background(["true"], log=text),
            lambda: box.entries(text),
            lambda: box.remove(text),
            lambda: box.exec(["true"] * 3000, timeout_s=5),
            lambda: box.download(max_bytes=number),
        ]
        return rng.choice(requests)()

    for _ in range(300):
        try:
            anything(box)
        except REFUSED:
            pass
        except Exception as error:
            return AttackVerdict(False, f"{type(error).__name__}: {error}"[:100])
    return AttackVerdict(alive(box), "300 requests: results or clear errors, and it still works")
