"""Attacks on what a sandbox may use: processes, memory, disk, output, time. Cases 23 to 27."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.labs.attacks.case import (
    LIMITS,
    SPEC,
    AttackVerdict,
    Cell,
    Site,
    alive,
    nothing,
    register,
    register_both,
)


def _neighbour(site: Site, attack: list[str], timeout_s: float = 3.0) -> tuple[bool, int, str]:
    """Run an attack in one sandbox while another runs `true`: (it was ended, processes it left, the neighbour's median times)."""

    def median_ms() -> float:
        return 1e3 * statistics.median(neighbour.exec(["true"], timeout_s=60).duration_s for _ in range(15))

    with site.backend.create(SPEC) as neighbour, site.backend.create(SPEC) as box, ThreadPoolExecutor(1) as thread:
        before = median_ms()
        running = thread.submit(box.exec, attack, timeout_s=timeout_s)
        time.sleep(0.3)
        times = f"neighbour {median_ms():.1f} ms, before {before:.1f} ms"
        try:
            done = running.result()
        except SandboxDied:
            return True, 0, times
        return done.timed_out or done.exit_code != 0, box.stats().processes if alive(box) else 0, times


@register(23, "fork bomb and thread bomb")
def bombs(site: Site) -> AttackVerdict:
    threads = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: pass"
    )
    details, blocked = [], True
    for attack in (["bash", "-c", "b() { b | b & }; b; sleep 60"], ["python3", "-c", threads]):
        ended, left, times = _neighbour(site, attack)
        blocked &= ended and left == 0
        details.append(f"{times}, {left} processes left")
    return AttackVerdict(blocked=blocked, detail="; ".join(details))


@register(24, "use up the memory, by processes and by files in memory")
def memory(site: Site) -> AttackVerdict:
    fill = "import os\nx = []\nwhile True: x.append(bytearray(16 << 20))"
    files = "for p in /dev/shm /tmp .; do head -c 1G /dev/zero > $p/big; done; exit 1"
    details, blocked = [], True
    for attack in (["python3", "-c", fill], ["bash", "-c", files]):
        free = psutil.virtual_memory().available
        ended, _, times = _neighbour(site, attack, timeout_s=15)
        deadline = time.monotonic() + 20  # others may use memory too, and let go of it
        while not (given_back := psutil.virtual_memory().available > free - (256 << 20)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        blocked &= ended and given_back
        details.append(times)
    return AttackVerdict(blocked=blocked, detail="; ".join(details))


@register_both(25, "fill the disk, use up inodes, a giant sparse file, folders without end")
def disk(cell: Cell) -> AttackVerdict:
    source = """
def fill(place):
    size = 0
    try:
        with open(place + "/fill", "wb", buffering=0) as file:
            while size < 1 << 30:
                size += file.write(bytes(1 << 20))
    except OSError:
        pass
    os.unlink(place + "/fill")
    return size
def crowd(place, make, tries):
    count = 0
    try:
        while count < tries:
            make(f"{place}/n{count}")
            count += 1
    except OSError:
        pass
    return count
def deeper(name):
    os.mkdir("d")
    os.chdir("d")
def sparse():
    with open("giant", "wb") as file:
        file.truncate(1 << 40)
def f(places, most, inodes, tries):
    found = [f"{place}: {size} bytes" for place in places if (size := fill(place)) > most]
    if os.path.exists("/proc/self/mounts"):
        with open("/proc/self/mounts") as file:
            kinds = {line.split()[1]: line.split()[2] for line in file}
        found += [f"{place} is on a disk" for place in (os.getcwd(), *places[:-1]) if kinds.get(place) != "tmpfs"]
    for place in places:
        count = crowd(place, lambda path: open(path, "w").close(), tries)
        found += [f"{count} files in {place}"] * (count > inodes)
        for number in range(count):
            os.unlink(f"{place}/n{number}")
    attempt(found, "sparse", sparse)
    depth = crowd("", deeper, tries)
    return found + [f"{depth} folders deep"] * (depth > inodes)
"""
    limits = LIMITS if cell.box is None else SPEC
    counted = cell.site.backend.capabilities().enforced["inodes"]
    inodes = limits.inodes if counted else 1 << 20  # where they are not limited, the capabilities say so
    places = ["."] if cell.box is None else ["/tmp", "/dev/shm", "."]
    found = cell.run(source, places, limits.disk_bytes, inodes, 3 * limits.inodes)
    if cell.box is not None:
        if not alive(cell.box):
            found.append("the sandbox is dead")
        try:
            cell.box.download()
            found.append("folders without end were read")
        except OSError:
            pass
    return nothing(found)


@register(26, "endless output, on both streams, of bytes that are no text")
def output(site: Site) -> AttackVerdict:
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
    return AttackVerdict(blocked=not found, detail=str(found or details))


@register(27, "outlive a time limit")
def time_limit(site: Site) -> AttackVerdict:
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
    return AttackVerdict(blocked=not found, detail=f"survived: {found}" if found else f"at most {worst:.2f} s late")
