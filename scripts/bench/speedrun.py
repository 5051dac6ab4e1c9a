#!/usr/bin/env python3
"""How fast a tour reaches the target: `scripts/bench/speedrun.py [--runs DIR] [--again] [--set KEY=VALUE …]`, `make speedrun`.

Three seeds, from no checkpoint; `--again` trains the three that check an entry. What counts is the share of held-out tasks that
the last policy solves in at most 12 calls, over the time of all stages but those that only evaluate. Any setting, and any change
of the code, may be made that leaves the rules of docs/speedrun.md: the tasks, their grading and the limits of an attempt. Prints
a row for the table there, with intervals over seeds, or what breaks a rule. Interrupted, it can be started again: complete runs
are kept. Another entry needs another folder, `--runs`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from composer_nb.harness.bench import behaviour
from composer_nb.harness.files import file_digest
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.store import load_attempts
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.recipe.prepare import CHUNK
from composer_nb.trainer.recipe.report import build_report, differing
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override, to_dict

ENTRY, AGAIN = (0, 1, 2), (3, 4, 5)
"""Seeds of whoever enters, and of whoever checks the entry."""
STUDENT = {3: 4.303, 6: 2.571}
"""The 97.5 % quantile of Student's t for the mean of so many seeds."""
TARGET = 0.50
"""Share of held-out tasks solved in at most 12 calls, above which the interval over seeds must lie."""
TASKS, FEWEST = 460, 435
"""Tasks that are made, and that must be left after those are dropped that training shows."""
TOLD = 0.25
LIMITS = {"turns": 16, "turn_tokens": 64, "tokens": 512}
SAMPLES = 4
AGENT, OFFICIAL = ("tasks", "tools", "renderer", "summary"), to_dict(Settings())["env"]
"""Settings of the environment that an entry must leave as they are."""


def official_tasks() -> dict[str, Task]:
    """Return the held-out tasks, by id: the same for every entry."""
    with SandboxExecutor() as sandboxes:
        executor, tasks = CachedExecutor(sandboxes), []
        for number, at in enumerate(range(0, TASKS, CHUNK)):
            count = min(CHUNK, TASKS - at)
            tasks += make_miniatures(f"heldout-{number:03d}", count, heldout=False, executor=executor, described=TOLD)
    return {task.id: task for task in tasks}


def broken_rules(run: RunDir, tasks: dict[str, Task]) -> list[str]:
    """Return what in a complete run breaks the rules."""
    settings, scored = run.settings(), load_tasks(run.path / "data" / "heldout.jsonl")
    violations = []
    if any(tasks.get(task.id) != task for task in scored) or len(scored) < FEWEST:
        violations.append(f"its held-out tasks are not at least {FEWEST} of the {TASKS}")
    if any(settings["limits"][name] > most for name, most in LIMITS.items()):
        violations.append(f"limits above {LIMITS}")
    if settings["eval"]["samples"] < SAMPLES:
        violations.append(f"eval.samples below {SAMPLES}")
    if settings["model"]["start"]:
        violations.append("it begins with a checkpoint")
    if (changed := {name: settings["env"][name] for name in AGENT if settings["env"][name] != OFFICIAL[name]}) != {}:
        violations.append(f"another environment: {changed}")
    return violations


def within(run: RunDir) -> float:
    """Return the share of sampled attempts of the last policy that solved their task in at most 12 calls, from the rollouts that
    the run has stored. Raises ValueError if its report says anything else."""
    tasks = {task.id: task for task in load_tasks(run.path / "data" / "heldout.jsonl")}
    attempts = load_attempts(run.path / "rollouts" / "eval_final.parquet", tasks)
    sampled = attempts[: -len(tasks)]  # the greedy ones come last
    tried = Counter(attempt.task.id for attempt in sampled)
    greedy = Counter(attempt.task.id for attempt in attempts[-len(tasks) :])
    if tried.keys() != tasks.keys() or min(tried.values()) < SAMPLES or greedy != Counter(tasks.keys()):
        raise ValueError(f"{run.path.name}: its rollouts are not {SAMPLES} of each held-out task and a greedy one")
    share: float = behaviour([attempt for attempt in sampled if attempt.grade.known])["pass_within"]["12"]
    if abs(share - build_report(run)["eval"]["final"]["pass_within"]["12"]) > 1e-9:
        raise ValueError(f"{run.path.name}: its rollouts solve {share:.3f} in 12 calls, and its report says otherwise")
    return share


def seconds(run: RunDir) -> float:
    """Seconds of all stages but those that only evaluate."""
    stages: dict[str, float] = build_report(run)["stages"]
    return sum(spent for name, spent in stages.items() if not name.startswith("eval_") and name != "numerics")


def interval(values: list[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a mean over seeds, by Student's t."""
    mean = statistics.mean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def row(runs: list[RunDir]) -> str:
    """Return the scores of all seeds, and the times of the last three: those of one machine, the checker's if there are six."""
    solved, times = [within(run) for run in runs], [seconds(run) for run in runs[-len(ENTRY) :]]
    cells = []
    for values, digits in ((times, 0), (solved, 3)):
        low, high = interval(values)
        cells.append(f"{statistics.mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})")
        cells.append(" ".join(f"{value:.{digits}f}" for value in values))
    low, high = interval(solved)
    return f"| {' | '.join(cells)} | {'reached' if low >= TARGET else 'missed' if high < TARGET else 'open'} |"


def judge(runs: list[RunDir]) -> str:
    """Return the row of three or six runs. Raises ValueError for what breaks a rule, FileNotFoundError for what is missing."""
    seeds = tuple(run.settings()["seed"] for run in runs)
    if seeds not in (ENTRY, AGAIN, ENTRY + AGAIN):
        raise ValueError(f"the runs have the seeds {seeds}, not {ENTRY}, {AGAIN} or all six in order")
    if any(run.settings() | {"seed": 0} != runs[0].settings() | {"seed": 0} for run in runs):
        raise ValueError("the runs differ in more settings than the seed")
    if len({json.loads((run.path / "provenance.json").read_text())["package_digest"] for run in runs}) > 1:
        raise ValueError("the runs are of different versions of the package")
    starts = {file_digest(run.path / "weights" / "base" / "model.safetensors") for run in runs}
    if len(starts) < len(runs):
        raise ValueError("two of the runs begin with the same weights, so one is a copy")
    tasks = official_tasks()
    for run in runs:
        if broken := broken_rules(run, tasks):
            raise ValueError(f"{run.path.name}: {'; '.join(broken)}")
    return row(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--again", action="store_true", help="train the seeds that check an entry")
    parser.add_argument(
        "--verify", nargs="+", type=Path, metavar="RUN", help="runs that are there already: three, or all six"
    )
    arguments = parser.parse_args()
    changes: dict[str, Any] = dict(pair.split("=", 1) for pair in arguments.set)
    runs = [RunDir(path.resolve()) for path in arguments.verify or ()]
    for seed in () if runs else AGAIN if arguments.again else ENTRY:
        settings = override(Settings(), {"data.heldout_tasks": TASKS, **changes, "seed": seed})
        print(f"== seed {seed}", flush=True)
        name = f"seed{seed}"
        path = arguments.runs / name
        if (path / "run.db").is_file():
            runs.append(start_or_resume(path, settings, say=lambda line: print(line, flush=True)))
        else:
            runs.append(start_or_resume(None, settings, runs=arguments.runs, name=name))
    try:
        entry_row = judge(runs)
    except (OSError, ValueError, KeyError) as error:  # KeyError: a setting that an old run does not have
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    print("| seconds (95 %) | by seed | in 12 calls (95 %) | by seed | target |\n|---|---|---|---|---|")
    print(entry_row)
    print(json.dumps({"changed": differing(to_dict(Settings()), runs[0].settings())}))


if __name__ == "__main__":
    main()
