#!/usr/bin/env python3
"""Makes the repair tasks: `data/make_repairs.py OUT [--count 1000] [--heldout 480] [--seed 0]`.

Writes OUT/train.jsonl and OUT/heldout.jsonl, one task a line, held-out structures apart from the others, and drops held-out
tasks that leak. `--harbor` writes Harbor task directories instead. The recipe makes its own tasks in the same way at the
start of a run; this script is for looking at them, for `composer-nb eval --tasks`, and for other programs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.tour.repairs import buggy_prints, fingerprints, make_tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--heldout", type=int, default=480)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--harbor", action="store_true")
    arguments = parser.parse_args()
    with SandboxExecutor() as sandboxes:
        executor = CachedExecutor(sandboxes)
        train = list(make_tasks(arguments.seed, arguments.count, heldout=False, executor=executor))
        prints = fingerprints(train) | buggy_prints(train)
        drawn = make_tasks(arguments.seed, arguments.heldout, heldout=True, executor=executor)
        heldout = [task for task in drawn if not fingerprints([task]) & prints]
    for name, tasks in (("train", train), ("heldout", heldout)):
        write(tasks, arguments.out / name, arguments.harbor)
        print(f"{name}: {len(tasks)} tasks, {len({task.metadata['structure'] for task in tasks})} structures")


def write(tasks: list[Task], path: Path, harbor: bool) -> None:
    if harbor:
        for task in tasks:
            task.to_harbor(path / task.id)
    else:
        save_tasks(tasks, path.with_suffix(".jsonl"))


if __name__ == "__main__":
    main()
