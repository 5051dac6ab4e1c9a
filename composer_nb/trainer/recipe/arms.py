"""Arms of an experiment: runs that differ in more than their seeds, and what each arm adds to the scores of the first."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_nb.harness.bench import half_width
from composer_nb.trainer.recipe.report import current, differing
from composer_nb.trainer.records.rundir import RunDir

# Settings that tell repetitions of one experiment apart.
SEEDS = ("seed", "rl_seed")
# Scores of a final policy on held-out tasks, by the name of each figure.
SCORES = {"in 12 calls": "12", "pass@1": "pass_at_1", "greedy": "pass_greedy", "best of k": "best_of_k"}


def label(values: Mapping[str, Any]) -> str:
    """Return the name of a run by what differs: `lr 3e-05, seed 1`. Two settings of one name have their groups too."""
    names = Counter(name.rpartition(".")[2] for name in values)
    short = {name: last if names[last := name.rpartition(".")[2]] == 1 else name for name in values}
    return ", ".join(f"{short[name]} {value}" for name, value in values.items())


def compare_arms(runs: Sequence[RunDir]) -> dict[str, Any]:
    """Return each arm's mean scores over its seeds, and what it adds to the first run's arm: the mean over the seeds of both, and
    half its 95 % interval (`gain`, `half`, in shares).

    An arm is named by its settings that differ. Raises ValueError for a run without final scores, and for an arm that has a seed
    twice.
    """
    settings = [current(run.settings()) for run in runs]
    apart = {name: values for name, values in differing(*settings).items() if name not in SEEDS}
    arms: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    for number, run in enumerate(runs):
        if (final := run.finished("eval_final")) is None:
            raise ValueError(f"{run.path}: has no final scores yet; resume it, or leave it out")
        name = label({setting: values[number] for setting, values in apart.items()}) or "all runs"
        seeds = settings[number]["seed"], settings[number]["rl_seed"]
        if seeds in arms.setdefault(name, {}):
            raise ValueError(f"{run.path}: another run of the arm {name!r} has the seeds {seeds} too")
        values = {**final, **final["pass_within"]}
        arms[name][seeds] = {score: values[key] for score, key in SCORES.items() if values.get(key) is not None}
    first = next(iter(arms.values()))
    return {"arms": {name: _row(first, arm) for name, arm in arms.items()}}


def _row(first: Mapping[Any, Mapping[str, float]], arm: Mapping[Any, Mapping[str, float]]) -> dict[str, Any]:
    shared = [seeds for seeds in arm if seeds in first]
    scores: dict[str, dict[str, float | None]] = {}
    for score in SCORES:
        values = [scored[score] for scored in arm.values() if score in scored]
        gains = [
            arm[seeds][score] - first[seeds][score] for seeds in shared if score in {*arm[seeds]} & {*first[seeds]}
        ]
        if values:
            gain, half = (float(np.mean(gains)) if gains else None), half_width(gains)
            scores[score] = {"mean": float(np.mean(values)), "gain": gain, "half": half}
    return {"seeds": [*arm], "paired": len(shared), "scores": scores}
