#!/usr/bin/env python3
"""Which remedy keeps what a policy could do before RL: `scripts/studies/remedies.py [--only NAME …] [--arm NAME KEY=VALUE …]`.

One start per seed (mid-training and fine-tuning), and from it one RL run per arm, for the same time at most. Each run is scored
as RL left it, and as the mean of its weights with a share of the start's (`--start-weights`) with its logits times a factor
(`--sharpness`; 0: the factor that makes it as unsure as the start), which needs no other RL. A share of 1 is the start, with that
factor. Held-out tasks get 16 samples, from which best of 4 and of 16 are estimated without bias (arXiv 2107.03374). Prints, after
each arm, what every arm gains over the start and over the default, with 95 % intervals over tasks, each with its mean over the
seeds; writes these and each seed's gains into `remedies.json`, and a figure into `remedies.png`, beside the runs. Interrupted, it
can be started again: complete runs are kept; those with other settings need another folder, `--runs`. `--table-only` prints what
there is.

    --only pass@4 uncalibrated                                two arms, beside the default
    --arm both loss.baseline=pass_at_k rl.uncalibrated=true   an arm of your own; it may be repeated
    --runs runs/quick --seeds 0 --minutes 1 --set data.heldout_tasks=60    a quick look
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.bench import bootstrap, pass_at_k
from composer_nb.harness.files import write_json
from composer_nb.harness.rollout import Segment
from composer_nb.trainer.recipe.reader import solved_by_task
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, from_dict, override
from composer_nb.views import style
from composer_nb.views.style import Picture
from scripts.studies.measure_tour import CALLS, is_complete, rescored, run, sampled

DEFAULT = "default"
SHARPNESS = Settings().sft.sharpness
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    DEFAULT: {},
    "mixed groups": {"loss.gate": "mixed"},
    "outcome first": {"loss.gate": "ties"},
    "pass@2": {"loss.baseline": "pass_at_k", "loss.pass_k": 2},
    "pass@4": {"loss.baseline": "pass_at_k", "loss.pass_k": 4},
    "successes × 0.1": {"loss.positive_weight": 0.1},
    "failures alone": {"loss.positive_weight": 0.0},
    # Balances the gradient of a policy that is nearly sure, which is mostly negative (docs/benchmarks.md#a-pretrained-model).
    "successes × 5": {"loss.positive_weight": 5.0},
    "clip-cov": {"loss.clip_cov": 0.02},
    "no rehearsal": {"rl.rehearsal": 0.0},
    "KL to the start": {"loss.beta": 0.05},
    "FlashREINFORCE": {
        **{"rl.group": 1, "rl.prompts": 64, "loss.baseline": "batch", "loss.ratio": "flash", "loss.length_norm": True}
    },
    "uncalibrated": {"rl.uncalibrated": True, "rl.sharpness": SHARPNESS},
    "rare tasks": {"curriculum.harder": 0.5, "curriculum.by": "failures", "curriculum.start": 0.1},
}
SCORES = (f"in {CALLS} calls", "pass@1", "best of 4", "best of 16")
KINDS = ("heldout", "structures")


def scores_by_task(path: RunDir, policy: str, kind: str) -> dict[str, list[float]]:
    """Return the SCORES of a policy on each task of a kind; a best of more than the run's samples is that of all."""
    name, samples = policy + ("" if kind == "heldout" else f"_{kind}"), from_dict(path.settings()).eval.samples
    quick, shares = solved_by_task(path, name, CALLS), solved_by_task(path, name)
    best = {k: min(k, samples) for k in (4, 16)}
    return {
        task: [quick[task], share, *(pass_at_k(samples, round(share * samples), k) for k in best.values())]
        for task, share in shares.items()
    }


def gains(first: Sequence[Mapping[str, Sequence[float]]], second: Sequence[Mapping[str, Sequence[float]]]) -> Any:
    """Return `second` − `first` in points, [tasks, SCORES], each task's mean over the seeds, which share their tasks; and each
    seed's mean [seeds, SCORES]."""
    by_seed = [
        {task: 100 * np.subtract(second_scores[task], first_scores[task]) for task in first_scores}
        for first_scores, second_scores in zip(first, second, strict=True)
    ]
    tasks = dict.fromkeys(task for by_task in by_seed for task in by_task)
    means = [np.mean([by_task[task] for by_task in by_seed if task in by_task], axis=0) for task in tasks]
    return np.array(means), np.array([np.mean([*by_task.values()], axis=0) for by_task in by_seed])


def surprise(segments: Sequence[Segment]) -> tuple[list[float], list[float]]:
    """Return −log p of the sampled tokens, whose mean is the entropy: of those that open a turn, and of the others."""
    opening, later = list[float](), list[float]()
    for segment in segments:
        opens = segment.acted & ~np.concatenate([[False], segment.acted[:-1]])
        opening += (-segment.logprob[opens]).tolist()
        later += (-segment.logprob[segment.acted & ~opens]).tolist()
    return opening, later


def behaviour(path: RunDir, policy: str) -> dict[str, float]:
    """Return recovery, calls a turn, and the entropies of `surprise`, on the held-out tasks."""
    scores = path.finished(f"eval_{policy}") or {}
    attempts = [attempt for group in sampled(path, policy, "heldout").values() for attempt in group]
    columns = zip(*(surprise(attempt.rollout.segments) for attempt in attempts), strict=True)
    opening, later = (float(np.mean([value for values in column for value in values])) for column in columns)
    return {
        "recovery": float(scores["recovery"] or 0.0),
        "calls a turn": scores["calls_per_turn"],
        "entropy, first token of a turn": opening,
        "entropy, other tokens": later,
    }


def measure(paths: Sequence[RunDir], policy: str, default: Sequence[RunDir]) -> dict[str, Any]:
    """Return scores, gains with intervals, and behaviour of a policy over its seeds."""
    result: dict[str, Any] = {"behaviour": [behaviour(path, policy) for path in paths]}
    if policy == "final":
        result["steps"] = [len(path.steps("rl")) for path in paths]
        result["seconds"] = [(path.finished("rl") or {}).get("seconds", 0.0) for path in paths]
    for kind in KINDS:
        scores = [scores_by_task(path, policy, kind) for path in paths]
        result[kind] = {"scores": np.mean([np.mean([*s.values()], axis=0) for s in scores], axis=0).tolist()}
        for label, baseline in (("over the start", "start"), ("over the default", "final")):
            by_task, seeds = gains([scores_by_task(path, baseline, kind) for path in default], scores)
            intervals = [bootstrap(by_task[:, column], 0) for column in range(len(SCORES))]
            result[kind][label] = {"gain": by_task.mean(0).tolist(), "ci95": intervals, "seeds": seeds.tolist()}
    return result


def print_table(results: Mapping[str, Any]) -> None:
    names = [*results["start"]["behaviour"][0]]
    print("\nPoints over the start, and best of 4 also over the default (95 %, paired by task).\n")
    print(f"| arm | {' | '.join(SCORES)} | best of 4, over the default | new structures, {SCORES[0]} ", end="")
    print(f"| {' | '.join(names)} | steps | s |\n|" + "---|" * (5 + len(SCORES) + len(names)))
    best = SCORES.index("best of 4")
    for arm, result in results.items():
        columns = [("heldout", "over the start", number) for number in range(len(SCORES))]
        columns += [("heldout", "over the default", best), ("structures", "over the start", 0)]
        cells = [arm]
        for kind, label, column in columns:
            low, high = result[kind][label]["ci95"][column]
            cells.append(f"{result[kind][label]['gain'][column]:+.1f} ({low:+.1f} to {high:+.1f})")
        if arm == "start":
            cells[1 : 1 + len(SCORES)] = [f"{score:.3f}" for score in result["heldout"]["scores"]]
        cells += [f"{np.mean([seed[name] for seed in result['behaviour']]):.3f}" for name in names]
        cells += [" ".join(f"{value:.0f}" for value in result.get(name, ())) for name in ("steps", "seconds")]
        print(f"| {' | '.join(cells)} |")


def draw(results: Mapping[str, Any]) -> Picture:
    """Draw each arm's gain in best of 4 over that in pass@1, both over the start, with intervals; small dots are seeds."""
    picture, ax = style.one_panel(7.6, 5.6)
    first, second = SCORES.index("pass@1"), SCORES.index("best of 4")
    for number, (arm, result) in enumerate((arm, r) for arm, r in results.items() if arm != "start"):
        gain, ci95, seeds = (np.array(result["heldout"]["over the start"][name]) for name in ("gain", "ci95", "seeds"))
        color = style.DARK if arm == DEFAULT else f"C{number % 10}"
        reach: list[NDArray[np.float64]] = [np.abs(ci95[n] - gain[n])[:, None] for n in (first, second)]
        ax.errorbar(gain[first], gain[second], reach[1], reach[0], "o", color=color, elinewidth=0.8)
        ax.plot(seeds[:, first], seeds[:, second], ".", color=color, alpha=0.4, markersize=4)
        ax.annotate(arm, (gain[first], gain[second]), (4, 4), textcoords="offset points", fontsize=8, color=color)
    ax.axhline(0, color=style.GREY, linewidth=0.8)
    ax.axvline(0, color=style.GREY, linewidth=0.8)
    style.title(ax, "what RL adds to its start, in points", "pass@1", "best of 4")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=5.5, help="of RL, at most")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=[*REMEDIES], choices=[*REMEDIES], metavar="NAME")
    parser.add_argument("--arm", nargs="+", action="append", default=[], metavar="NAME KEY=VALUE")
    parser.add_argument("--start-weights", type=float, nargs="*", default=[Settings().rl.start_weight], metavar="SHARE")
    parser.add_argument("--sharpness", type=float, nargs="+", default=[0.0], metavar="FACTOR")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every arm")
    parser.add_argument("--runs", type=Path, default=Path("runs/remedies"))
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    changes: dict[str, Mapping[str, Any]] = {DEFAULT: {}, **{name: REMEDIES[name] for name in arguments.only}}
    changes |= {name: dict(pair.split("=", 1) for pair in pairs) for name, *pairs in arguments.arm}
    # FlashREINFORCE takes a task for each rollout.
    base = {
        "rl.max_seconds": 60 * arguments.minutes,
        "rl.start_weight": 0.0,
        "rl.sharpness": [1.0],
        "eval.samples": arguments.samples,
        "data.rl_tasks": 10400,
    }
    base |= dict(pair.split("=", 1) for pair in arguments.set)
    settings = {seed: override(Settings(), base | {"seed": seed}) for seed in arguments.seeds}
    for changed in changes.values():  # faults are reported before hours of work
        override(settings[arguments.seeds[0]], changed)
    results: dict[str, Any] = {}
    default: list[RunDir] = []
    trained: list[RunDir] = []
    scored = [(0.0, 1.0), *product(arguments.start_weights, arguments.sharpness)]
    for name, (share, factor) in product(changes, scored):
        arm = (
            name
            + (f", {share:g} of the start" if share else "")
            + (f", logits × {factor:g}" if factor not in (0.0, 1.0) else "" if factor else ", as unsure as the start")
        )
        paths = [arguments.runs / f"seed{seed}-{re.sub(r'[^a-z0-9.]+', '-', arm.lower())}" for seed in settings]
        if arguments.table_only and not all(is_complete(path) for path in paths):
            continue
        variants = [override(s, changes[name]) for s in settings.values()]
        if arm != name:
            factors = [factor * candidate for candidate in variants[0].rl.sharpness] if factor else []
            variants = [override(s, {"rl.start_weight": share, "rl.sharpness": factors}) for s in variants]
        if arguments.table_only:
            finals = [RunDir(path) for path in paths]
        elif arm != name:
            finals = [
                rescored(arguments.runs, path.name, variant, source, rl)
                for path, variant, source, rl in zip(paths, variants, default, trained, strict=True)
            ]
        else:
            sources: list[RunDir | None] = [*default] or [None] * len(paths)
            finals = [
                run(arguments.runs, path.name, variant, source)
                for path, variant, source in zip(paths, variants, sources, strict=True)
            ]
        trained = finals if arm == name else trained
        default = default or trained
        results.setdefault("start", measure(default, "start", default))
        results[arm] = measure(finals, "final", default)
        write_json(arguments.runs / "remedies.json", results)
        draw(results).savefig(arguments.runs / "remedies.png")
        print_table(results)


if __name__ == "__main__":
    main()
