"""Attacks on what a sandbox may use (processes, memory, disk, output, time), and on those who run sandboxes: a harness that is
killed, methods that are abused. Cases 23 to 28, 30."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.sandbox.reap import FOLDER, below, mark_of, reap, started
from composer_nb.labs.attacks.case import (
    LIMITS,
    REFUSED,
    SPEC,
    AttackVerdict,
    Cell,
    Site,
    alive,
    nothing,
    register,
    register_both,
)  # fmt: skip


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
            result = running.result()
        except SandboxDied:
            return True, 0, times
        return result.timed_out or result.exit_code != 0, box.stats().processes if alive(box) else 0, times


@register(23, "fork bomb and thread bomb")
def bombs(site: Site) -> AttackVerdict:
    threads = (
        "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "    except RuntimeError: pass"
    )
    attacks = ["bash", "-c", "b() { b | b & }; b; sleep 60"], ["python3", "-c", threads]
    outcomes = [_neighbour(site, attack) for attack in attacks]
    detail = "; ".join(f"{times}, {left} processes left" for _, left, times in outcomes)
    return AttackVerdict(all(ended and left == 0 for ended, left, _ in outcomes), detail)


@register(24, "use up the memory, by processes and by files in memory")
def memory(site: Site) -> AttackVerdict:
    fill = "import os\nx = []\nwhile True: x.append(bytearray(16 << 20))"
    files = "for p in /dev/shm /tmp .; do head -c 1G /dev/zero > $p/big; done; exit 1"
    details, blocked = [], True
    for attack in (["python3", "-c", fill], ["bash", "-c", files]):
        free = psutil.virtual_memory().available
        ended, _, times = _neighbour(site, attack, timeout_s=15)
        deadline = time.monotonic() + 20  # others may use memory too, and let go of it
        while (leak := psutil.virtual_memory().available <= free - (256 << 20)) and time.monotonic() < deadline:
            time.sleep(0.1)
        blocked &= ended and not leak
        details.append(times)
    return AttackVerdict(blocked, "; ".join(details))


@register_both(25, "fill the disk, use up inodes, a giant sparse file, folders without end")
def disk(cell: Cell) -> AttackVerdict:
    source = """
import itertools
def fill(place):
    with open(place + "/fill", "wb", buffering=0) as file:
        size = repeat(lambda: file.write(bytes(1 << 20)) and None, 1 << 10) << 20
    os.unlink(place + "/fill")
    return size
def deeper():
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
        names = itertools.count()
        count = repeat(lambda: open(f"{place}/n{next(names)}", "w").close(), tries)
        found += [f"{count} files in {place}"] * (count > inodes)
        for number in range(count):
            os.unlink(f"{place}/n{number}")
    attempt(found, "sparse", sparse)
    depth = repeat(deeper, tries)
    return found + [f"{depth} folders deep"] * (depth > inodes)
"""
    limits = LIMITS if cell.box is None else SPEC
    counted = cell.site.backend.capabilities().enforced["inodes"]
    inodes = limits.inodes if counted else 1 << 20  # where they are not limited, the capabilities say so
    places = ["."] if cell.box is None else ["/tmp", "/dev/shm", "."]
    successes = cell.run(source, places, limits.disk_bytes, inodes, 3 * limits.inodes)
    if cell.box is not None:
        successes += [] if alive(cell.box) else ["the sandbox is dead"]
        try:
            cell.box.download()
            successes.append("folders without end were read")
        except OSError:
            pass
    return nothing(successes)


@register(26, "endless output, on both streams, of bytes that are no text")
def output(site: Site) -> AttackVerdict:
    floods = {
        "stdout": "yes", "stderr": "yes >&2", "no text": "cat /dev/urandom", "one line": "tr '\\0' x < /dev/zero",
        "terminal": "while :; do printf '\\033[2J\\007\\000'; done",
    }  # fmt: skip
    problems, details = [], []
    with site.backend.create(SPEC) as box:
        for name, flood in floods.items():
            result = box.exec(["bash", "-c", flood], timeout_s=1, output_bytes=10_000)
            size = len(result.stdout) + len(result.stderr)
            if not result.timed_out or (not result.truncated and name != "terminal") or size > 21_000:
                problems.append(f"{name}: {size} bytes, truncated {result.truncated}")
            details.append(f"{name} {size}")
        problems += [] if alive(box) else ["the sandbox is dead"]
    return AttackVerdict(not problems, str(problems or details))


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
    survivors, worst = [], 0.0
    with site.backend.create(SPEC) as box:
        for evasion in evasions:
            begin = time.monotonic()
            result = box.exec(["bash", "-c", evasion], timeout_s=0.5)
            worst = max(worst, time.monotonic() - begin - 0.5)
            if not result.timed_out or box.stats().processes:
                survivors.append(evasion)
        survivors += [] if alive(box) else ["the sandbox is dead"]
    return AttackVerdict(not survivors, f"survived: {survivors}" if survivors else f"at most {worst:.2f} s late")


HARNESS = """
import sys, threading, time
from pathlib import Path
from composer_nb.harness.sandbox import open_backend
from composer_nb.labs.attacks.case import SPEC
from composer_nb.harness.sandbox.reap import FOLDER
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


@register(28, "kill the harness in the middle of everything, then reap")
def killed_harness(site: Site) -> AttackVerdict:
    with tempfile.TemporaryDirectory() as folder:
        journal, command = Path(folder) / FOLDER, [sys.executable, "-c", HARNESS, site.backend.name, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd="/") as process:
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


@register(30, "abuse of the sandbox's own methods: random, huge and broken requests")
def abuse(site: Site) -> AttackVerdict:
    rng = random.Random(30)
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

    with site.backend.create(SPEC) as box:
        for _ in range(300):
            try:
                anything(box)
            except REFUSED:
                pass
            except Exception as error:
                return AttackVerdict(False, f"{type(error).__name__}: {error}"[:100])
        return AttackVerdict(alive(box), "300 requests: results or clear errors, and it still works")
