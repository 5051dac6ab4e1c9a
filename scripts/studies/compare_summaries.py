#!/usr/bin/env python3
"""compare_summaries.py FOLDER [--arm ARM] [--seed N]: what the summaries of a trained policy lose, before and after RL.

The example's policy is fine-tuned on demonstrations of `labs/horizons/seeker.py`: in one segment, with short summaries, with
summaries of twelve sections, and with cuts. RL then trains it with short summaries, where the final reward reaches their
tokens, or with long ones. The policy before RL, and what an arm of RL makes of it, are scored on the same tasks with every way
to end a segment; cuts before RL alone. An arm of a seed writes FOLDER/ARM SEED.json; then the files so far are printed as
tables, medians with the least and the most of the seeds. The fine-tuned policy, FOLDER/start, is made once for all seeds. One
thread.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from compare_behaviour import TOKENIZER, table

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.summary import PROMPTED, Compaction, SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import run_eval
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.files import write_json
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.horizons.seeker import Seeker, figures, tried
from composer_nb.tour.miniatures import ENUMERABLE, make_miniatures
from composer_nb.tour.repairs import neighbours, split_at
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow, deal, demonstration_rows
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import score_groups, streams_of

TRIGGERS = (250, 180)
LONG = "\n".join(re.findall(r"^\d+\. [\w ]+", PROMPTED, re.M))
"""The long instruction of the study: the titles of its sections, 104 tokens. The whole text has 678, too many for this policy."""
LIMITS = Limits(turns=12, turn_tokens=64, tokens=1024)
DEMONSTRATION_LIMITS = replace(LIMITS, turns=16)
"""Limits of demonstrations."""
ONE_SEGMENT = SummarySettings()
SUMMARIES: dict[str, SummarySettings] = {"one segment": ONE_SEGMENT}
KINDS: Sequence[Compaction] = ("self", "prompted", "truncate")
SUMMARIES |= {f"{kind}, {t}": SummarySettings(kind=kind, trigger=t, tokens=320) for t in TRIGGERS for kind in KINDS}

TASK_OPTIONS: dict[str, Any] = {"heldout": False, "described": 0.0, "families": frozenset({"comp", "loop", "slice"})}
DEMONSTRATION_SEED = "x"
"""Seed of the tasks of demonstrations."""
MOST_CHANGES = 9
"""Changes that a function has, at most."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much a seed computes."""

    demonstrations: int = 600
    """Tasks, each shown in three ways."""
    sft: int = 1200
    rl: int = 16
    prompts: int = 6
    group: int = 8
    scored: int = 64
    samples: int = 2


def agent_of(summary: SummarySettings, sandboxes: Sandboxes, limits: Limits = LIMITS) -> Agent:
    agent = make_agent(EnvSettings(summary=summary), TOKENIZER, limits, sandboxes)
    agent.renderer.queries = {**agent.renderer.queries, "prompted": LONG}
    return agent


def tasks_of(name: str, count: int, sandboxes: Sandboxes) -> list[Task]:
    """Return tasks whose bug is one of few changes, and whose request does not describe it."""
    tasks: dict[str, Task] = {}
    for number in range(count + 8):
        for task in make_miniatures(
            f"{name} {number}", min(64, 4 * count), executor=sandboxes.functions, **TASK_OPTIONS
        ):
            [path] = task.solution
            _, function, _ = split_at(task.files[path].rstrip("\n"), task.metadata["function"])
            if len(neighbours(function, ENUMERABLE)) <= MOST_CHANGES:
                tasks[task.id] = task
        if len(tasks) >= count:
            return list(tasks.values())[:count]
    raise ValueError(f"{name}: too few tasks")


def change_order(seed: str, change: tuple[str, str]) -> float:
    """Return the key that sorts a change into a random order."""
    return Random(f"{seed} {change[1]}").random()


def demonstrations(seed: int, count: int, sandboxes: Sandboxes) -> list[TokenRow]:
    """Return examples of the seeker. Of 13 ways to show a task, 3 are in one segment, 2 for each summary and trigger, 1 for each
    cut and trigger."""
    tasks, rows = tasks_of(DEMONSTRATION_SEED, count, sandboxes), list[TokenRow]()
    summaries = [ONE_SEGMENT] * 3 + [
        w for w in SUMMARIES.values() if w.trigger for _ in range(1 if w.kind == "truncate" else 2)
    ]
    for position, summary in enumerate(summaries):
        agent = agent_of(summary, sandboxes, DEMONSTRATION_LIMITS)
        subset = [task for n, task in enumerate(tasks) if (n + position) % len(summaries) < 3]
        policy = Seeker(agent.renderer, partial(change_order, f"{seed} {position}"))
        for _, attempt in drive([agent.attempt(task, n) for n, task in enumerate(subset)], policy, sandboxes.functions):
            rows += demonstration_rows(attempt.rollout, 0.1)
    return rows


def fine_tuned(size: Size, sandboxes: Sandboxes, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    model = load_pretrained(example_run().path / "weights" / "final")
    model = model.on_positions(replace(model.config, max_position_embeddings=LIMITS.tokens)).requires_grad_()
    rows = demonstrations(seed, size.demonstrations, sandboxes)
    optimizer = FlatOptimizer(model, published=torch.bfloat16)
    batches = deal(rows, 2048, Random(seed))
    for step in range(size.sft):
        lr = 2.5e-3 * min(1.0, (step + 1) / 20, (size.sft - step) / (size.sft / 2))
        metrics = train_step(model, [rows[n] for n in next(batches)], optimizer, Ranks(), lr=lr, balance=1e-3, clip=1.0)
        if step % 50 == 49:
            print(f"sft {step + 1}: {metrics['agent_loss']:.3f}", flush=True)
    with torch.no_grad():
        model.final_norm.mul_(SHARPNESS)
    return model


SHARPNESS = 1.4
"""Factor of the logits: a policy that imitates an expert who tries at random is as unsure."""


def reinforced(start: Model, kind: Compaction, seed: int, size: Size, sandboxes: Sandboxes) -> Model:
    """Return the policy after RL with one kind of summaries, at both triggers in turn."""
    agents = [agent_of(SUMMARIES[f"{kind}, {trigger}"], sandboxes) for trigger in TRIGGERS]
    model, loss = copy.deepcopy(start), LossSettings()
    learner = Learner(model, FlatOptimizer(model, published=torch.bfloat16), loss)
    rollouts = size.prompts * size.group
    tasks = tasks_of(f"summaries rl {seed}", size.rl * size.prompts, sandboxes)
    for step in range(size.rl):
        agent = agents[step % len(agents)]
        engine = engine_of(model, agent, seed, step)
        jobs = [agent.attempt(tasks[n // size.group], n) for n in range(step * rollouts, (step + 1) * rollouts)]
        attempts = dict(drive(jobs, engine, sandboxes.functions))
        groups = [[attempts[at + n] for n in range(size.group)] for at in range(0, rollouts, size.group)]
        if step % 5 == 4:
            print(f"rl {step + 1}: solved {np.mean([d.grade.passed for d in attempts.values()]):.2f}", flush=True)
        if streams := streams_of(score_groups(groups, RewardSettings(), loss), loss):
            lr = 2e-4 * min(1.0, (step + 1) / 4)
            learning: dict[str, Any] = {
                "minibatches": 1,
                "denominator": rollouts * 128.0,
                "lr": lr,
                "clip": 1.0,
                "microbatch_tokens": 4096,
            }
            learner.learn(streams, Ranks(), Random(step), **learning)
    return model


def engine_of(model: Model, agent: Agent, seed: int, version: int = 0) -> Engine:
    return Engine(model, stop=agent.renderer.stop, slots=64, max_length=LIMITS.tokens, seed=seed, version=version)


def told_tries(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return, for each segment after the first, how many tries were made before it and how many its beginning tells of; and how
    many it tells of at all, and how many of these were never made."""
    tries, told_counts, invented_counts = set[str](), [0, 0], [0, 0]
    for previous, current in pairwise(rollout.segments):
        text = TOKENIZER.decode(previous.token_ids.tolist(), skip_special_tokens=False)
        tries |= {*tried(re.sub(r"(?m)^tried .*$", "", text))}
        beginning = current.token_ids[: int(current.acted.argmax())].tolist()
        tries_told = {*tried(TOKENIZER.decode(beginning, skip_special_tokens=False))}
        told_counts = [told_counts[0] + len(tries & tries_told), told_counts[1] + len(tries)]
        invented_counts = [invented_counts[0] + len(tries_told - tries), invented_counts[1] + len(tries_told)]
    return told_counts, invented_counts


def scored(model: Model, size: Size, sandboxes: Sandboxes, seed: int, cuts: bool) -> dict[str, dict[str, float]]:
    """Return the figures of a policy for each way to end a segment, on the same tasks; `cuts`: without summaries, too."""
    figures_by_summary: dict[str, dict[str, float]] = {}
    tasks = tasks_of(f"summaries scored {seed}", size.scored, sandboxes)
    for name, summary in SUMMARIES.items():
        if summary.kind == "truncate" and not cuts:
            continue
        agent = agent_of(summary, sandboxes)
        attempts = list(run_eval(engine_of(model, agent, 999 + seed), agent, tasks, sandboxes, size.samples))
        told_counts, invented_counts = (
            np.sum(counts, axis=0) for counts in zip(*(told_tries(d.rollout) for d in attempts), strict=True)
        )
        figures_by_summary[name] = {
            **figures(attempts, TOKENIZER),
            "kept": float(told_counts[0] / max(1, told_counts[1])),
            "invented": float(invented_counts[0] / max(1, invented_counts[1])),
            "calls": float(np.mean([d.rollout.messages for d in attempts])),
        }
        figures_by_summary[name]["error"] = (
            figures_by_summary["one segment"]["solved"] - figures_by_summary[name]["solved"]
        )
        print(name, {key: round(value, 2) for key, value in figures_by_summary[name].items()}, flush=True)
    return figures_by_summary


ARMS: dict[str, Compaction | None] = {"before RL": None, "RL, self": "self", "RL, prompted": "prompted"}


def study(seed: int, arm: str, folder: Path, size: Size) -> None:
    """Score what an arm makes of the fine-tuned policy, which is made first if the folder lacks it."""
    begun, file = time.process_time(), folder / "start"
    with Sandboxes() as sandboxes:
        if not file.exists():
            save_pretrained(fine_tuned(size, sandboxes), file)
        model = load_pretrained(file)
        if kind := ARMS[arm]:
            model = reinforced(model, kind, seed, size, sandboxes)
        scores = scored(model, size, sandboxes, seed, cuts=kind is None)
    write_json(
        folder / f"{arm} {seed}.json", {"ways": scores, "seconds": time.process_time() - begun, "size": asdict(size)}
    )


def report(folder: Path) -> str:
    """Return a table for each arm, over the files of a folder."""
    sections = []
    for arm in ARMS:
        if runs := [json.loads(path.read_text()) for path in sorted(folder.glob(f"{arm} *.json"))]:
            if any(run["size"] != runs[0]["size"] for run in runs):
                raise SystemExit(f"{folder}: its runs of {arm!r} are of different sizes; give each size a folder")
            spent = sum(run["seconds"] for run in runs)
            figures_by_summary = {summary: [run["ways"][summary] for run in runs] for summary in runs[0]["ways"]}
            sections += [f"{arm}, {len(runs)} seeds, {spent:.0f} CPU-seconds", table(figures_by_summary, COLUMNS)]
    return "\n\n".join(sections)


COLUMNS = ("solved", "error", "summary tokens", "reused", "kept", "invented", "calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", choices=tuple(ARMS))
    parser.add_argument("--steps", type=int, default=Size().rl, help="of RL")
    args = parser.parse_args()
    if args.steps < 1 or args.seed < 0:
        parser.error(f"--steps {args.steps}, --seed {args.seed}: at least 1, at least 0")
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.arm:
        study(args.seed, args.arm, args.folder, Size(rl=args.steps))
    print(report(args.folder) or f"{args.folder}: no results; --arm makes them, one of: {' | '.join(ARMS)}")


if __name__ == "__main__":
    main()
