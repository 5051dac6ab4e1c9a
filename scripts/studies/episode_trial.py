#!/usr/bin/env python
"""Many episodes, some of whose harness processes are killed, and a look at what is left.

    python scripts/studies/episode_trial.py --episodes 2000 --killed 0.05 --backend bwrap

An episode: a sandbox, the files of a task, an edit that mends it, a visible test, the grade of the hidden tests elsewhere.
Harness processes take EACH episodes each. In a share of the episodes the process gets SIGKILL in the middle, in as many others
the program that holds its sandboxes does. After one `reap` nothing may be left, and no fault of the infrastructure may have been
scored as the agent's: the edit is right, so every reward there is must be 1. Exit status 1 when something was left or scored
wrongly. Nothing else may make sandboxes or containers on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from composer_nb.harness.grading.front import grade
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.reap import FOLDER, OWN, mounts, reap, started
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.tour.repairs import make_tasks

EACH = 20
SPEC = SandboxSpec(memory_bytes=128 << 20, disk_bytes=16 << 20)
LOOK = "import f\nprint('imported')"


def episode(task: Task, number: int, backend: Backend, graders: SandboxExecutor, fault: str) -> float | None:
    """The reward of an episode; None after a fault of the infrastructure. Meanwhile this process, or the one that holds the
    sandbox, is killed if that is the `fault`."""
    try:
        with backend.create(SPEC) as box:
            box.upload({path: text.encode() for path, text in task.files.items()})
            if fault:
                victim = os.getpid() if fault == "harness" else _holder(backend, box)
                threading.Timer(Random(number).uniform(0, 0.1), os.kill, (victim, signal.SIGKILL)).start()
            for path, text in task.solution.items():
                box.write(path, text.encode())
            if box.exec(["python3", "-c", LOOK]).stdout != b"imported\n":
                return 0.0
            files = {path: data.decode() for path, data in box.download().items()}
            if fault:
                time.sleep(0.15)
                box.read("f.py")
            return float(grade(task, files, graders).passed)
    except SandboxDied:
        return 0.0
    except SandboxFailure:
        return None


def _holder(backend: Any, box: Sandbox) -> int:
    """The first process of a sandbox, or the one that all of a backend's sandboxes end with."""
    if backend.name == "docker":
        return int(backend._client.api.inspect_container(box.id)["State"]["Pid"])
    return int(backend._zygotes[box.spec.warm].pid)


def work(arguments: argparse.Namespace, folder: Path) -> None:
    """One harness process: EACH episodes, a line a result."""
    tasks, journal = load_tasks(folder / "tasks.jsonl"), folder / FOLDER
    with (
        open_backend(arguments.backend, "episodes", journal) as backend,
        SandboxExecutor(run_id="grades", journal=journal) as graders,
    ):
        for number in range(arguments.work, arguments.until):
            draw = Random(f"fault {number}").random()
            fault = "harness" if draw < arguments.killed else "holder" if draw < 2 * arguments.killed else ""
            print(json.dumps({"episode": number, "fault": fault}), flush=True)
            reward = episode(tasks[number % len(tasks)], number, backend, graders, fault)
            print(json.dumps({"episode": number, "reward": reward, "fault": fault}), flush=True)


def launch(first: int, arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Runs a harness process, and after its death another one for the episodes that it did not reach."""
    done: list[dict[str, object]] = []
    end = first + EACH
    while first < end:
        command = [sys.executable, __file__, "--work", str(first), "--until", str(end), "--folder", str(folder)]
        command += ["--killed", str(arguments.killed), "--backend", arguments.backend]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        lines = [json.loads(line) for line in told.stdout.splitlines()]
        if not lines:
            raise RuntimeError(f"a harness process ended with {told.returncode} and said nothing")
        done += [line for line in lines if "reward" in line]
        last = lines[-1]
        if told.returncode == -signal.SIGKILL and "reward" not in last:
            done.append(last | {"reward": None})
        elif told.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a harness process ended with {told.returncode}")
        first = int(last["episode"]) + 1
    return done


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
    return MachineState(frozenset(holders), mounts(), frozenset(groups), frozenset(folders))


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--killed", type=float, default=0.05)
    parser.add_argument("--backend", default="bwrap")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments, arguments.folder)
        return 0
    before = machine_state()
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        with SandboxExecutor() as boxes:
            save_tasks(
                make_tasks("episodes", 48, heldout=False, executor=CachedExecutor(boxes)), folder / "tasks.jsonl"
            )
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda first: launch(first, arguments, folder), range(0, arguments.episodes, EACH))
            results = [line for lines in found for line in lines]
        spent = time.monotonic() - begin
        time.sleep(1)
        ended = reap(folder)
        left = left_behind(before) + list(ended.failed)
    faults = Counter(str(line["fault"]) or "none" for line in results)
    scored = Counter(str(line["reward"]) for line in results)
    wrong = [line for line in results if line["reward"] not in (None, 1.0)]
    unexplained = [line for line in results if line["reward"] is None and not line["fault"]]
    print(
        f"| episodes | {len(results)} in {spent:.0f} s, two harness processes at a time, backend {arguments.backend} |\n|---|---|"
    )
    print(f"| faults | {dict(faults)} |\n| rewards | {dict(scored)} |")
    print(
        f"| reaped | {len(ended.processes)} processes, {len(ended.cgroups)} cgroups, {len(ended.containers)} containers |"
    )
    print(f"| left afterwards | {left or 'nothing'} |\n| faults scored as failures | {wrong or 0} |")
    print(f"| episodes without a fault and without a reward | {unexplained or 0} |")
    return 1 if left or wrong or unexplained or len(results) != arguments.episodes else 0


if __name__ == "__main__":
    sys.exit(main())
