"""Attacks on those who run sandboxes: a harness that is killed, methods that are abused. Cases 28 and 30."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.attacks.case import Verdict
from composer_nb.harness.attacks.site import REFUSED, SPEC, SandboxCase, Site, alive, register
from composer_nb.harness.journal import FOLDER, OWN, Kind, mark_of, mounts, started
from composer_nb.harness.reap import reap
from composer_nb.harness.sandboxes.contract import Sandbox

CASES: list[SandboxCase] = []


HARNESS = """
import sys, threading, time
from pathlib import Path
from composer_nb.harness.sandboxes import open_backend
from composer_nb.harness.attacks.site import SPEC
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


@register(CASES, 28, "kill the harness in the middle of everything, then reap")
def killed_harness(site: Site) -> Verdict:
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
        noted = _noted(Path(folder) / FOLDER)
        done = reap(Path(folder))
        left = [pid for pid, tick in below if started(pid) == tick]
        again = reap(Path(folder))
        (Path(folder) / FOLDER).rmdir()  # empty: nothing is held any more
        found = [f"{kind} {name}" for kind, name, mark in noted if mark_of(kind, name) == mark]
    problems = [*(f"process {pid}" for pid in left), *found, *done.failed, *again.failed]
    ended = ", ".join(f"{len(getattr(done, kind))} {kind}" for kind in ("processes", "cgroups", "containers"))
    detail = f"{len(below)} processes were running; reap ended {ended}"
    return Verdict(blocked=not problems, detail=f"left: {problems}" if problems else detail)


def _noted(folder: Path) -> set[tuple[Kind, str, str]]:
    """All that was ever held by what wrote journals there, and has not been struck with its journal: (kind, name, mark)."""
    entries = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().split("\n")[:-1]]
    return {(entry["kind"], entry["name"], entry["mark"]) for entry in entries}


def _below(root: int) -> list[tuple[int, int]]:
    """(pid, start) of every process below one."""
    facts = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                fields = (entry / "stat").read_bytes().rpartition(b") ")[2].split()
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
                and (entry / "comm").read_bytes().strip() == b"bwrap"
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


@register(CASES, 30, "abuse of the sandbox's own methods: random, huge and broken requests")
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
