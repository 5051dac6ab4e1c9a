#!/usr/bin/env python3
"""The production loop, with simulated users: `scripts/studies/production_loop.py --cycles 3`.

In each cycle users bring new requests to the weights that are served. A user accepts what solves the request and rejects the
rest; a share `--noise` of verdicts is inverted. `composer-nb improve` learns from the verdicts and scores the update. What passes
is served next. At the end an update is planted at a rate that destroys the policy, which the gate has to stop, and the first
version is published again while requests are answered.

`--shuffled` is the control: the verdicts of a cycle are dealt out again at random, so they say nothing about the conversations.

Prints a Markdown table: acceptance with its 95 % interval, and the gate's pass@1 with the interval of its change, by cycle.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from composer_nb.harness.agent.loop import LIMITS
from composer_nb.harness.agent.turns import TokenTurnPolicy
from composer_nb.harness.attempt import attempt
from composer_nb.harness.bench import bootstrap
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.production.improve import attempts_of, improve, publish, revert
from composer_nb.production.policies import open_engine, trained_with
from composer_nb.production.record import keep_judged
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.tour.repairs import make_tasks
from composer_nb.trainer.model import load_pretrained
from composer_nb.trainer.settings import Settings, override


def requests(seed: str, count: int, level: str) -> list[Task]:
    make = make_tasks if level == "functions" else make_miniatures
    with SandboxExecutor() as calls:
        return list(make(seed, count, heldout=False, executor=CachedExecutor(calls)))


def serve(
    model: Path, tasks: Sequence[Task], run: Path, noise: float, settings: Settings, shuffled: bool
) -> list[float]:
    """Let users bring their requests, and keep the conversations with their verdicts. Return what was accepted."""
    rng = Random(f"users {settings.seed} {run.name}")
    attempts = attempts_of(load_pretrained(model), trained_with(model), model, tasks, 1, settings)
    attempts = [attempt for attempt in attempts if attempt.grade.known]
    accepted = [float(attempt.grade.passed != (rng.random() < noise)) for attempt in attempts]
    keep_judged(run, attempts, rng.sample(accepted, len(accepted)) if shuffled else accepted)
    return accepted


def take_back(model: Path, store: str, version: int, tasks: Sequence[Task]) -> str:
    """Publish `version` again while a server of `store` answers one request after another. Return which versions wrote what."""
    carried, written = trained_with(model), list[list[int]]()
    env = EnvSettings(tools=carried.tools, renderer=carried.renderer, summary=carried.summary)
    with (
        open_engine(model, slots=1, tokens=(carried.limits or LIMITS).tokens, follow=store) as engine,
        Sandboxes() as boxes,
    ):
        agent, again, began = make_agent(env, engine.tokenizer, carried.limits or LIMITS, boxes), 0, 0.0
        for number, task in enumerate(cycle(tasks)):
            if number == 2:
                again, began = revert(store, version), time.monotonic()
            limits, renderer = agent.begin(task)
            policy = TokenTurnPolicy(renderer, number, limits, engine.shared.ask, engine.shared.release)
            outcome = attempt(task, agent.environment(boxes.functions), policy)
            written.append(sorted({*map(int, outcome.rollout.versions)}))
            if again and written[-1] == [again]:
                break
    lines = "; ".join(f"{n + 1}: {', '.join(map(str, versions))}" for n, versions in enumerate(written))
    seconds = time.monotonic() - began
    return (
        f"taken back before request 3, as version {again} with the weights of {version}; versions that wrote each request: "
        f"{lines}; {seconds:.1f} s from the withdrawal to the end of the last request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/example/weights/start"))
    parser.add_argument("--out", type=Path, help="new folder (a temporary one)")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--level", choices=("repositories", "functions"), default="repositories", help="as data.level")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--gate", type=int, default=100)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--shuffled", action="store_true", help="the control: verdicts at random")
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="production-"))
    weights = {"solved": 0.0, "given": 1.0, "invalid_calls": -0.2}
    changes: dict[str, Any] = {"rl.lr": args.rate, "rl.minibatches": args.minibatches, "reward.weights": weights}
    settings = override(Settings(), changes | {"seed": args.seed})
    out.mkdir(parents=True, exist_ok=True)
    gate, store, model = out / "gate.jsonl", str(out / "store"), args.model
    save_tasks(requests(f"gate {args.seed}", args.gate, args.level), gate)
    version = publish(store, load_pretrained(model))
    print("| cycle | accepted | pass@1 of the gate: before, after, gain | |\n|---|---|---|---|")
    for number in range(args.cycles + 1):
        tasks = requests(f"users {args.seed} {number}", args.requests, args.level)
        accepted = np.array(serve(model, tasks, out / f"cycle{number}", args.noise, settings, args.shuffled))
        low, high = bootstrap(accepted, 0)
        row = f"| {number} | {accepted.mean():.3f} ({low:.3f} to {high:.3f}) |"
        if number == args.cycles:
            print(f"{row} | |", flush=True)
            break
        figures = improve([out / f"cycle{number}"], model, out / f"update{number}", gate, settings, store=store)["gate"]
        gain = "no grades"
        if figures["before"]:
            low, high = figures["ci95"]
            pass_rates = ", ".join(f"{figures[when]['pass_at_1']:.3f}" for when in ("before", "after"))
            gain = f"{pass_rates}, {figures['gain']:+.3f} ({low:+.3f} to {high:+.3f})"
        print(f"{row} {gain} | {figures['stopped'] or 'passed'} |", flush=True)
        model = model if figures["stopped"] else out / f"update{number}" / "weights"
    planted = override(settings, {"rl.lr": 0.1})
    planted_result = improve([out / f"cycle{args.cycles}"], model, out / "planted", gate, planted, store=store)
    print(f"\nplanted update: {planted_result['gate']['stopped'] or 'PASSED'}; published: {planted_result['version']}")
    print(take_back(model, store, version, tasks))


if __name__ == "__main__":
    main()
