#!/usr/bin/env python3
"""The production loop, with simulated users: `scripts/production_loop.py --cycles 3`.

In each cycle users bring new requests to the weights that are served. A user accepts what solves the request and rejects the
rest; a share `--noise` of verdicts is turned round. `composer-nb improve` learns from the verdicts and scores the update. What
passes is served next. At the end an update is planted at a rate that destroys the policy, which the gate has to stop, and a
version is taken back.

Prints a Markdown table: acceptance with its 95 % interval, and the gate's pass@1, by cycle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from composer_nb.harness.bench import bootstrap
from composer_nb.harness.product.record import keep_judged
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.miniatures import make_miniatures
from composer_nb.harness.tasks.repairs import make_tasks
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.improve import attempts_of, improve, publish, revert
from composer_nb.policies import open_engine, trained_with
from composer_nb.settings import Settings, override
from composer_nb.trainer.model import load_pretrained


def requests(seed: str, count: int, level: str) -> list[Task]:
    make = make_tasks if level == "functions" else make_miniatures
    with SandboxExecutor() as calls:
        return list(make(seed, count, heldout=False, executor=CachedExecutor(calls)))


def serve(model: Path, tasks: Sequence[Task], run: Path, noise: float, settings: Settings) -> list[float]:
    """Let users bring their requests, and keep the conversations with their verdicts. Return what was accepted."""
    rng = Random(f"users {run}")
    done = attempts_of(load_pretrained(model), trained_with(model), model, tasks, 1, settings)
    done = [each for each in done if each.grade.known]
    accepted = [float(each.grade.passed != (rng.random() < noise)) for each in done]
    keep_judged(run, done, accepted)
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/example/weights/start"))
    parser.add_argument("--out", type=Path, help="new folder (a temporary one)")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--level", choices=("repositories", "functions"), default="repositories", help="as data.level")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--gate", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="production-"))
    weights = {"solved": 0.0, "given": 1.0, "invalid_calls": -0.2}
    changes: dict[str, Any] = {"rl.lr": given.rate, "rl.minibatches": given.minibatches, "reward.weights": weights}
    settings = override(Settings(), changes | {"seed": given.seed})
    out.mkdir(parents=True, exist_ok=True)
    gate, store, model = out / "gate.jsonl", str(out / "store"), given.model
    save_tasks(requests(f"gate {given.seed}", given.gate, given.level), gate)
    version = publish(store, load_pretrained(model))
    print("| cycle | accepted | pass@1 of the gate: before, after, gain | |\n|---|---|---|---|")
    for cycle in range(given.cycles + 1):
        tasks = requests(f"users {given.seed} {cycle}", given.requests, given.level)
        accepted = np.array(serve(model, tasks, out / f"cycle{cycle}", given.noise, settings))
        low, high = bootstrap(accepted, 0)
        row = f"| {cycle} | {accepted.mean():.3f} ({low:.3f} to {high:.3f}) |"
        if cycle == given.cycles:
            print(f"{row} | |", flush=True)
            break
        found = improve([out / f"cycle{cycle}"], model, out / f"update{cycle}", gate, settings, store=store)
        shown = found["gate"]
        gain = f"{shown['before']['pass_at_1']:.3f}, {shown['after']['pass_at_1']:.3f}, {shown['gain']:+.3f}"
        print(f"{row} {gain} | {shown['stopped'] or 'passed'} |", flush=True)
        model = model if shown["stopped"] else out / f"update{cycle}" / "weights"
    planted = override(settings, {"rl.lr": 0.1})
    found = improve([out / f"cycle{given.cycles}"], model, out / "planted", gate, planted, store=store)
    print(f"\nplanted update: {found['gate']['stopped'] or 'PASSED'}; published: {found['version']}")
    with open_engine(model, slots=1, tokens=64, follow=store) as engine:
        before, again = engine.shared.version, revert(store, version)
        while engine.shared.version < again:  # a follower looks once a second
            time.sleep(0.05)
        print(
            f"taken back: version {before} is followed by {engine.shared.version}, which has the weights of {version}"
        )


if __name__ == "__main__":
    main()
