#!/usr/bin/env python3
"""What search by meaning is worth to an agent: `scripts/studies/measure_search.py [--seeds N …]`.

Two policies of the tour's size are trained alike by imitation, one with `codebase_search` and one without, on demonstrations of
an expert that has the same tools. A task asks for a number to be changed in one of 16, 32 or 64 modules. Most requests paraphrase
the function's name, and the others quote it. Both policies, and the expert in their limits, are scored on new tasks in sandboxes:
paraphrases that no demonstration has, paraphrases of training, and quoted names. An attempt has located the function when it
has read its file. Gains are paired by task and pooled over the seeds. Interrupted, the same command goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from composer_nb.harness.bench import bootstrap
from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.store import load_attempts, save_attempts
from composer_nb.harness.terms.registry import called
from composer_nb.harness.tools.toolset import SEARCH
from composer_nb.operations import console, overrides
from composer_nb.tour.environment import Tour
from composer_nb.tour.miniatures import MANY, make_miniatures
from composer_nb.trainer.learning.ranks import Ranks, set_up_process
from composer_nb.trainer.recipe.evaluate import evaluate_model
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, from_dict, override
from composer_nb.views.page import text_table
from scripts.studies.measure_tour import run

WITHOUT = "grep,list_dir,read_file,search_replace,run_terminal_cmd"
ARMS = {"without": WITHOUT, "with": f"{SEARCH},{WITHOUT}"}
SETTINGS: dict[str, Any] = {
    "until": "sft",
    "data.kinds": ["paraphrase"],
    "data.told": 0.3,
    "data.demonstrations": 1,
    "data.mistaken_demonstrations": 1024,
    "data.heldout_tasks": 8,
    "data.structure_tasks": 0,
    "data.tune_tasks": 16,
    "data.rl_tasks": 4,
    "rl.steps": 1,
    "rl.prompts": 2,
    "midtrain.steps": 1400,
    "sft.steps": 200,
    "sft.sharpness": [],
    "model.max_position_embeddings": 1024,
    "limits.tokens": 1024,
    "limits.turns": 24,
    "limits.turn_tokens": 96,
    "env.sandboxes": 32,
}
"""Where they differ from the defaults."""
SETS: dict[str, dict[str, Any]] = {
    "new paraphrases": {"count": 96, "heldout": True, "described": 0.0},
    "paraphrases of training": {"count": 32, "heldout": False, "described": 0.0},
    "the code's own words": {"count": 32, "heldout": True, "described": 1.0},
}
CALLS = (3, 6, 12, 24)


def attempts_at(source: RunDir, name: str, policy: str) -> list[Attempt]:
    """Return the attempts of a run's policy, or of the expert with its tools and limits, at a set of tasks, stored in the run."""
    settings = from_dict(source.settings())
    path = source.path / "rollouts" / f"search_{policy}_{name.replace(' ', '_')}.parquet"
    with Sandboxes(settings.env) as sandboxes:
        make = partial(make_miniatures, executor=sandboxes.functions, kinds=("paraphrase",))
        tasks = list(make(f"search {name}", **SETS[name]))
        if not path.is_file():
            stages = Stages(source, settings, Ranks(), sandboxes, print)
            set_up_process(settings.seed, settings.matmul)
            if policy == "expert":
                attempts = list(Tour().demonstrations(tasks, stages.agent(), sandboxes, settings.seed, 0.0))
            else:
                attempts = evaluate_model(stages, stages.load("start"), tasks, 1, 0.0)
            save_attempts(path, attempts)
    return load_attempts(path, {task.id: task for task in tasks})


def leading_tool(attempt: Attempt) -> str:
    """Return the name of the tool whose answer was the first to name the file to change; empty if none did."""
    [path] = attempt.task.solution
    return next((called(turn)[0] for turn in attempt.rollout.turns if path in turn.observation), "")


def by_task(attempts: Sequence[Attempt], figure: Callable[[Attempt], float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for attempt in attempts:
        values.setdefault(attempt.task.id, []).append(figure(attempt))
    return {task: float(np.mean(figures)) for task, figures in values.items()}


def located(within: int) -> Callable[[Attempt], float]:
    """Return whether an attempt has read the file to change, as a figure, within this number of calls."""

    def figure(attempt: Attempt) -> float:
        reads = [called(turn)[1].get("target_file") for turn in attempt.rollout.turns[:within] if turn.error is None]
        return float(not attempt.task.solution.keys().isdisjoint(reads))

    return figure


def gain(
    attempts: dict[str, dict[int, list[Attempt]]], figure: Callable[[Attempt], float], sizes: Sequence[int] = MANY
) -> str:
    """Return how much more a figure is with search than without in repositories of these sizes, with its 95 % interval, by a
    bootstrap over the tasks, each with its mean over the seeds."""
    differences: dict[str, list[float]] = {}
    for seed in attempts["with"]:
        values = {arm: by_task(attempts[arm][seed], figure) for arm in ARMS}
        size = {attempt.task.id: len(attempt.task.files) for attempt in attempts["with"][seed]}
        for task, value in values["with"].items():
            if size[task] in sizes:
                differences.setdefault(task, []).append(value - values["without"][task])
    means = np.array([np.mean(task_differences) for task_differences in differences.values()])
    low, high = bootstrap(means, 0)
    return f"{means.mean():+.3f} ({low:+.3f} to {high:+.3f})"


def rows(attempts: dict[str, dict[int, list[Attempt]]]) -> list[tuple[str, ...]]:
    """Return the rows of one set of tasks: a policy each, and the gain."""

    def texts(figure: Callable[[Attempt], float], form: str) -> list[str]:
        pooled = {
            arm: [attempt for seed_attempts in by_seed.values() for attempt in seed_attempts]
            for arm, by_seed in attempts.items()
        }
        means = [f"{np.mean([figure(attempt) for attempt in pooled[arm]]):{form}}" for arm in ARMS]
        return [*means, gain(attempts, figure)]

    columns = [[*ARMS, "gain"]]
    columns += [texts(located(within), ".3f") for within in CALLS]
    columns += [texts(lambda attempt: float(attempt.grade.passed), ".3f")]
    columns += [texts(lambda attempt: float(attempt.rollout.calls), ".1f")]
    columns += [texts(lambda attempt: float(attempt.rollout.tokens), ".0f")]
    columns += [texts(lambda attempt: located(CALLS[-1])(attempt) * (leading_tool(attempt) == SEARCH), ".3f")]
    columns += [["", "", gain(attempts, located(CALLS[-1]), [size])] for size in MANY]
    return list(zip(*columns, strict=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/search"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting of all runs")
    args = parser.parse_args(arguments)
    head = ["policy", *(f"located in {within}" for within in CALLS), "solved", "calls", "tokens", "located by search"]
    head += [f"located more in {size} modules" for size in MANY]
    runs: dict[str, dict[int, RunDir]] = {arm: {} for arm in ARMS}
    for seed in args.seeds:
        for arm, tools in ARMS.items():
            values = SETTINGS | {"env.tools": tools, "seed": seed} | overrides(args.set)
            runs[arm][seed] = run(args.runs, f"{arm}-{seed}", override(Settings(), values))
            for name in SETS:
                attempts_at(runs[arm][seed], name, "start")
    for policy, seeds in (("start", args.seeds), ("expert", args.seeds[:1])):
        for name in SETS:
            attempts = {arm: {seed: attempts_at(runs[arm][seed], name, policy) for seed in seeds} for arm in ARMS}
            console().print(text_table(rows(attempts), head, f"{policy}, {len(seeds)} seeds: {name}"))


if __name__ == "__main__":
    main()
