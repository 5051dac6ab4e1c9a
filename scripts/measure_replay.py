#!/usr/bin/env python3
"""What router replay does to RL: `scripts/measure_replay.py runs/tour --seeds 0 1 2 3 4 [--engine int4-experts] [--steps 60]`.

Forks a run at the start of RL, twice a seed: an engine of other numerics samples, and the trainer learns without replay and with
it. Both arms of a seed see the same prompts and draw the same random numbers; the final weights are scored as they are
published, by the run's own evaluation. Prints a Markdown table (docs/benchmarks.md keeps it) and the paired differences with
half their 95 % interval (Student's t). Interrupted, it can be started again: complete runs are kept.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from composer_nb.config import Settings, from_dict, override
from composer_nb.trainer.launch import fork, start_or_resume
from composer_nb.trainer.report import build_report
from composer_nb.trainer.rundir import RunDir

SCORES = ("pass_at_1", "pass_greedy", "best_of_k")
LAST = 15
"""Steps whose metrics are averaged."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % points of Student's t with 1, 2, … degrees of freedom."""


def run(source: RunDir, runs: Path, name: str, settings: Settings) -> dict[str, Any]:
    """Scores and metrics of a fork: begun, or taken up again."""
    path = runs / name
    if not (path / "run.db").is_file():
        fork(source, settings, runs=runs, name=name)
    print(f"== {name}", flush=True)
    done = start_or_resume(path, say=lambda line: print(line, flush=True))
    final, steps = build_report(done)["eval"]["final"], done.steps("rl")
    found = {score: final[score] for score in SCORES}
    for metric in ("solved", "k3", "masked", "replay_overlap"):
        values = [step[metric] for step in steps[-LAST:] if metric in step]
        found[metric] = float(np.mean(values)) if values else float("nan")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--engine", default="int4-experts")
    parser.add_argument("--level", default="ids+order")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/replay"))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    source = RunDir(arguments.run.resolve())
    base = {
        "engine.numerics": arguments.engine,
        "rl.steps": arguments.steps,
        "rl.max_seconds": 0.0,
        "rl.evaluate_every": 0,
    }
    base |= {"services.on": False} | dict(pair.split("=", 1) for pair in arguments.set)
    arms: dict[str, list[dict[str, Any]]] = {"none": [], arguments.level: []}
    for seed in arguments.seeds:
        for level, found in arms.items():
            settings = override(from_dict(source.settings()), base | {"rl_seed": seed, "replay.level": level})
            name = f"{arguments.engine}-{level.replace('+', '-')}-{seed}"
            found.append(run(source, arguments.runs, name, settings))
    print(f"\nengine {arguments.engine}, {arguments.steps} batches; pass@1 / greedy / best of 4\n")
    print("| seed | replay | scores | solved | k3 | clipped | overlap |")
    print("|---|---|---|---|---|---|---|")
    for place, seed in enumerate(arguments.seeds):
        for level, found in arms.items():
            f = found[place]
            scores = " / ".join(f"{f[score]:.3f}" for score in SCORES)
            print(
                f"| {seed} | {level} | {scores} | {f['solved']:.3f} | {f['k3']:.1e} | {f['masked']:.2%} | "
                f"{f['replay_overlap']:.4f} |"
            )
    print()
    off, on = arms.values()
    for score in (*SCORES, "solved"):
        gains = [100 * (b[score] - a[score]) for a, b in zip(off, on, strict=True)]
        half = STUDENT[len(gains) - 2] * statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("inf")
        print(
            f"{score}: with replay − without, mean {np.mean(gains):+.1f} ± {half:.1f} points, "
            f"median {statistics.median(gains):+.1f}"
        )


if __name__ == "__main__":
    main()
