#!/usr/bin/env python3
"""The speedrun: how fast does a tour reach the target? `scripts/speedrun.py [--runs DIR] [--set KEY=VALUE …]`, `make speedrun`.

Three seeds, from no checkpoint. What counts is the share of held-out tasks that the last policy solves in at most 12 calls, over
the time of all stages but those that only evaluate. Any setting, and any change of the code, may be made that leaves the rules of
docs/speedrun.md: the tasks, their grading and the limits of an attempt. Prints a row for the table there, or what breaks a rule.
Interrupted, it can be started again: complete runs are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.miniatures import make_miniatures
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.settings import Settings, override
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.recipe.prepare import CHUNK
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir

SEEDS = (0, 1, 2)
TARGET = 0.50
"""Mean over seeds of the share of held-out tasks solved in at most 12 calls."""
TASKS, FEWEST = 460, 435
"""Tasks that are made, and that must be left after those are dropped that training shows."""
TOLD = 0.25
LIMITS = {"turns": 16, "turn_tokens": 64, "tokens": 512}
SAMPLES = 4


def official_tasks() -> dict[str, Task]:
    """The held-out tasks, by id: the same for every entry."""
    with SandboxExecutor() as sandboxes:
        executor, made = CachedExecutor(sandboxes), []
        for number, at in enumerate(range(0, TASKS, CHUNK)):
            count = min(CHUNK, TASKS - at)
            made += make_miniatures(f"heldout-{number:03d}", count, heldout=False, executor=executor, told=TOLD)
    return {task.id: task for task in made}


def broken_rules(run: RunDir, tasks: dict[str, Task]) -> list[str]:
    """What in a complete run breaks the rules."""
    settings, scored = run.settings(), load_tasks(run.path / "data" / "heldout.jsonl")
    found = []
    if any(tasks.get(task.id) != task for task in scored) or len(scored) < FEWEST:
        found.append(f"its held-out tasks are not at least {FEWEST} of the {TASKS}")
    if any(settings["limits"][name] > most for name, most in LIMITS.items()):
        found.append(f"limits above {LIMITS}")
    if settings["eval"]["samples"] < SAMPLES:
        found.append(f"eval.samples below {SAMPLES}")
    if settings["model"]["start"]:
        found.append("it begins with a checkpoint")
    return found


def seconds(run: RunDir) -> float:
    """Seconds of all stages but those that only evaluate."""
    stages: dict[str, float] = build_report(run)["stages"]
    return sum(spent for name, spent in stages.items() if not name.startswith("eval_") and name != "numerics")


def row(runs: list[RunDir]) -> str:
    within = [build_report(run)["eval"]["final"]["pass_within"]["12"] for run in runs]
    times = [seconds(run) for run in runs]
    shown = " ".join(f"{value:.3f}" for value in within), " ".join(f"{spent:.0f}" for spent in times)
    verdict = "reached" if statistics.mean(within) >= TARGET else "missed"
    return f"| {statistics.mean(times):.0f} | {shown[1]} | {statistics.mean(within):.3f} | {shown[0]} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--verify", nargs=len(SEEDS), type=Path, metavar="RUN", help="runs that are there already")
    arguments = parser.parse_args()
    changes: dict[str, Any] = dict(pair.split("=", 1) for pair in arguments.set)
    runs = [RunDir(path.resolve()) for path in arguments.verify or ()]
    for seed in () if runs else SEEDS:
        settings = override(Settings(), {"data.heldout_tasks": TASKS, **changes, "seed": seed})
        print(f"== seed {seed}", flush=True)
        name = f"seed{seed}"
        there = arguments.runs / name
        if (there / "run.db").is_file():
            runs.append(start_or_resume(there, say=lambda line: print(line, flush=True)))
        else:
            runs.append(start_or_resume(None, settings, runs=arguments.runs, name=name))
    tasks = official_tasks()
    if (seeds := [run.settings()["seed"] for run in runs]) != list(SEEDS):
        raise SystemExit(f"the runs have the seeds {seeds}, not {list(SEEDS)}")
    for run in runs:
        if broken := broken_rules(run, tasks):
            raise SystemExit(f"{run.path.name}: {'; '.join(broken)}")
    print("| seconds, mean | by seed | in 12 calls, mean | by seed | target |\n|---|---|---|---|---|")
    print(row(runs))
    print(json.dumps({"changed": changes}))


if __name__ == "__main__":
    main()
