#!/usr/bin/env python3
"""What a setting does to RL, in pairs: `scripts/studies/measure_arms.py RUN --arm NAME [KEY=VALUE …] --arm NAME [KEY=VALUE …]`.

Forks a finished run at the start of RL, once an arm and seed. The arms of a seed see the same prompts and draw the same random
numbers; the final weights are scored as they are published, by the run's own evaluation. Prints a Markdown table
(docs/benchmarks.md keeps some) and what each further arm gains over the first, with half the 95 % interval (Student's t).
Interrupted, it can be started again: complete runs are kept. Runs with other settings need another folder, `--runs`.

    --arm without replay.level=none --arm with replay.level=ids+order --set engine.numerics=int4-experts    replay of routes
    --arm one ranks=2 --arm two ranks=2 mesh.shard=2 mesh.ep=2 --set services.on=true services.lockstep=true    trainer ranks
    --arm synchronous --arm asynchronous services.on=true    equal samples; wait, staleness and seconds beside the scores
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from composer_nb.harness.bench import half_width
from composer_nb.trainer.recipe.arms import SCORES
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, from_dict, override
from composer_nb.views.page import shown

LAST = 15
"""Steps whose metrics are averaged."""


def run(source: RunDir, runs: Path, name: str, settings: Settings) -> dict[str, Any]:
    """Return the scores and metrics of a fork, which is started or resumed."""
    path = runs / name
    if not (path / "run.db").is_file():
        fork(source, settings, runs=runs, name=name)
    print(f"== {name}", flush=True)
    run_dir = start_or_resume(path, settings, say=lambda line: print(line, flush=True))
    report, steps = build_report(run_dir), run_dir.steps("rl")
    final = {**report["eval"]["final"], **report["eval"]["final"]["pass_within"]}
    result = {score: final[key] for score, key in SCORES.items()} | {"seconds": report["wall_s"]["rl"]}
    result |= {name: report["train"][name] for name in ("samples", "trainer_idle", "staleness_mean", "staleness_max")}
    for metric in ("solved", "k3", "masked", "replay_overlap"):
        values = [step[metric] for step in steps[-LAST:] if step.get(metric) is not None]
        result[metric] = float(np.mean(values)) if values else float("nan")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--arm", nargs="+", action="append", required=True, metavar="NAME KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/arms"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every arm")
    arguments = parser.parse_args()
    if len({name for name, *_ in arguments.arm}) < len(arguments.arm):
        parser.error("--arm: two arms have one name")
    source = RunDir(arguments.run.resolve())
    base = {"rl.steps": arguments.steps, "rl.max_seconds": 0.0, "rl.evaluate_every": 0, "services.on": False}
    base |= dict(pair.split("=", 1) for pair in arguments.set)
    arms: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in arguments.arm}
    for seed in arguments.seeds:
        for name, *pairs in arguments.arm:
            arm_changes = dict(pair.split("=", 1) for pair in pairs)
            settings = override(from_dict(source.settings()), base | arm_changes | {"rl_seed": seed})
            arms[name].append(run(source, arguments.runs, f"{name}-{seed}", settings))
    print(f"\n{arguments.steps} batches; in 12 calls / pass@1 / greedy / best of k; metrics of the last {LAST} steps\n")
    print("| seed | arm | scores | solved | k3 | clipped | overlap | trainer waits | staleness | samples | RL s |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for index, seed in enumerate(arguments.seeds):
        for name, results in arms.items():
            result = results[index]
            scores = " / ".join(f"{result[score]:.3f}" for score in SCORES)
            print(
                f"| {seed} | {name} | {scores} | {result['solved']:.3f} | {result['k3']:.1e} | {result['masked']:.2%} | "
                f"{result['replay_overlap']:.4f} | {result['trainer_idle']:.0%} | {result['staleness_mean']:.2f}, at most "
                f"{result['staleness_max']:.0f} | {result['samples']} | {result['seconds']:.0f} |"
            )
    print()
    (first, without), *other_arms = arms.items()
    for name, results in other_arms:
        for score in (*SCORES, "solved"):
            gains = [100 * (b[score] - a[score]) for a, b in zip(without, results, strict=True)]
            half, median = shown(half_width(gains), ".1f"), statistics.median(gains)
            print(f"{score}: {name} − {first}, mean {np.mean(gains):+.1f} ± {half} points, median {median:+.1f}")


if __name__ == "__main__":
    main()
