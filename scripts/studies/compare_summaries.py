#!/usr/bin/env python3
"""compare_summaries.py FOLDER [--arm ARM] [--seed N]: what the summaries of a trained policy lose, before and after RL.

The example's policy is fine-tuned on demonstrations of `labs/horizons/seeker.py`: in one segment, with short summaries, with
summaries of twelve sections, and with cuts. RL then trains it with short summaries, where the final reward reaches their tokens,
or with long ones. The policy before RL, and what an arm of RL makes of it, are scored on the same tasks in every way to end a
segment; cuts before RL alone. An arm of a seed writes FOLDER/ARM SEED.json; then the files so far are printed as tables, medians
with the least and the most of the seeds. The fine-tuned policy, FOLDER/start, is made once for all seeds. One thread.
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
SHOWN = replace(LIMITS, turns=16)
"""Limits of demonstrations."""
ONE = SummarySettings()
WAYS: dict[str, SummarySettings] = {"one segment": ONE}
KINDS: Sequence[Compaction] = ("self", "prompted", "truncate")
WAYS |= {f"{kind}, {t}": SummarySettings(kind=kind, trigger=t, tokens=320) for t in TRIGGERS for kind in KINDS}

DRAWN: dict[str, Any] = {"heldout": False, "told": 0.0, "families": frozenset({"comp", "loop", "slice"})}
TAUGHT = "x"
"""Seed of the tasks of demonstrations."""
MOST = 9
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


def agent_of(way: SummarySettings, sandboxes: Sandboxes, limits: Limits = LIMITS) -> Agent:
    agent = make_agent(EnvSettings(summary=way), TOKENIZER, limits, sandboxes)
    agent.renderer.queries = {**agent.renderer.queries, "prompted": LONG}
    return agent


def tasks_of(name: str, count: int, sandboxes: Sandboxes) -> list[Task]:
    """Return tasks whose bug is one of few changes, and whose request does not describe it."""
    found: dict[str, Task] = {}
    for number in range(count + 8):
        for task in make_miniatures(f"{name} {number}", min(64, 4 * count), executor=sandboxes.functions, **DRAWN):
            [path] = task.solution
            _, function, _ = split_at(task.files[path].rstrip("\n"), task.metadata["function"])
            if len(neighbours(function, ENUMERABLE)) <= MOST:
                found[task.id] = task
        if len(found) >= count:
            return list(found.values())[:count]
    raise ValueError(f"{name}: too few tasks")


def drawn(seed: str, change: tuple[str, str]) -> float:
    """Return the place of a change in a random order."""
    return Random(f"{seed} {change[1]}").random()


def demonstrations(seed: int, count: int, sandboxes: Sandboxes) -> list[TokenRow]:
    """Return examples of the seeker. Of 13 ways to show a task, 3 are in one segment, 2 for each summary and trigger, 1 for each
    cut and trigger."""
    tasks, rows = tasks_of(TAUGHT, count, sandboxes), list[TokenRow]()
    ways = [ONE] * 3 + [w for w in WAYS.values() if w.trigger for _ in range(1 if w.kind == "truncate" else 2)]
    for place, way in enumerate(ways):
        agent = agent_of(way, sandboxes, SHOWN)
        mine = [task for n, task in enumerate(tasks) if (n + place) % len(ways) < 3]
        policy = Seeker(agent.renderer, partial(drawn, f"{seed} {place}"))
        for _, done in drive([agent.attempt(task, n) for n, task in enumerate(mine)], policy, sandboxes.functions):
            rows += demonstration_rows(done.rollout, 0.1)
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
        found = train_step(model, [rows[n] for n in next(batches)], optimizer, Ranks(), lr=lr, balance=1e-3, clip=1.0)
        if step % 50 == 49:
            print(f"sft {step + 1}: {found['agent_loss']:.3f}", flush=True)
    with torch.no_grad():
        model.final_norm.mul_(SHARPNESS)
    return model


SHARPNESS = 1.4
"""Factor of the logits: a policy that imitates an expert who tries at random is as unsure."""


def reinforced(start: Model, kind: Compaction, seed: int, size: Size, sandboxes: Sandboxes) -> Model:
    """Return the policy after RL with one kind of summaries, at both triggers in turn."""
    agents = [agent_of(WAYS[f"{kind}, {trigger}"], sandboxes) for trigger in TRIGGERS]
    model, loss = copy.deepcopy(start), LossSettings()
    learner = Learner(model, FlatOptimizer(model, published=torch.bfloat16), loss)
    each = size.prompts * size.group
    tasks = tasks_of(f"summaries rl {seed}", size.rl * size.prompts, sandboxes)
    for step in range(size.rl):
        agent = agents[step % len(agents)]
        engine = engine_of(model, agent, seed, step)
        jobs = [agent.attempt(tasks[n // size.group], n) for n in range(step * each, (step + 1) * each)]
        done = dict(drive(jobs, engine, sandboxes.functions))
        groups = [[done[at + n] for n in range(size.group)] for at in range(0, each, size.group)]
        if step % 5 == 4:
            print(f"rl {step + 1}: solved {np.mean([d.grade.passed for d in done.values()]):.2f}", flush=True)
        if streams := streams_of(score_groups(groups, RewardSettings(), loss), loss):
            lr = 2e-4 * min(1.0, (step + 1) / 4)
            how: dict[str, Any] = {
                "minibatches": 1,
                "denominator": each * 128.0,
                "lr": lr,
                "clip": 1.0,
                "microbatch_tokens": 4096,
            }
            learner.learn(streams, Ranks(), Random(step), **how)
    return model


def engine_of(model: Model, agent: Agent, seed: int, version: int = 0) -> Engine:
    return Engine(model, stop=agent.renderer.stop, slots=64, max_length=LIMITS.tokens, seed=seed, version=version)


def known(rollout: Rollout) -> tuple[list[int], list[int]]:
    """Return, for each segment after the first, how many tries were made before it and how many its beginning tells of; and how
    many it tells of at all, and how many of these were never made."""
    made, kept, told = set[str](), [0, 0], [0, 0]
    for before, after in pairwise(rollout.segments):
        text = TOKENIZER.decode(before.token_ids.tolist(), skip_special_tokens=False)
        made |= {*tried(re.sub(r"(?m)^tried .*$", "", text))}
        begun = after.token_ids[: int(after.acted.argmax())].tolist()
        here = {*tried(TOKENIZER.decode(begun, skip_special_tokens=False))}
        kept = [kept[0] + len(made & here), kept[1] + len(made)]
        told = [told[0] + len(here - made), told[1] + len(here)]
    return kept, told


def scored(model: Model, size: Size, sandboxes: Sandboxes, seed: int, cuts: bool) -> dict[str, dict[str, float]]:
    """Return the figures of a policy in each way, on the same tasks; `cuts`: without summaries, too."""
    found: dict[str, dict[str, float]] = {}
    tasks = tasks_of(f"summaries scored {seed}", size.scored, sandboxes)
    for name, way in WAYS.items():
        if way.kind == "truncate" and not cuts:
            continue
        agent = agent_of(way, sandboxes)
        done = list(run_eval(engine_of(model, agent, 999 + seed), agent, tasks, sandboxes, size.samples))
        kept, told = (np.sum(counts, axis=0) for counts in zip(*(known(d.rollout) for d in done), strict=True))
        found[name] = {
            **figures(done, TOKENIZER),
            "kept": float(kept[0] / max(1, kept[1])),
            "invented": float(told[0] / max(1, told[1])),
            "calls": float(np.mean([d.rollout.messages for d in done])),
        }
        found[name]["error"] = found["one segment"]["solved"] - found[name]["solved"]
        print(name, {key: round(value, 2) for key, value in found[name].items()}, flush=True)
    return found


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
    parts = []
    for arm in ARMS:
        if runs := [json.loads(path.read_text()) for path in sorted(folder.glob(f"{arm} *.json"))]:
            if any(run["size"] != runs[0]["size"] for run in runs):
                raise SystemExit(f"{folder}: its runs of {arm!r} are of different sizes; give each size a folder")
            spent = sum(run["seconds"] for run in runs)
            ways = {way: [run["ways"][way] for run in runs] for way in runs[0]["ways"]}
            parts += [f"{arm}, {len(runs)} seeds, {spent:.0f} CPU-seconds", table(ways, COLUMNS)]
    return "\n\n".join(parts)


COLUMNS = ("solved", "error", "summary tokens", "reused", "kept", "invented", "calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", choices=tuple(ARMS))
    parser.add_argument("--steps", type=int, default=Size().rl, help="of RL")
    given = parser.parse_args()
    if given.steps < 1 or given.seed < 0:
        parser.error(f"--steps {given.steps}, --seed {given.seed}: at least 1, at least 0")
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.arm:
        study(given.seed, given.arm, given.folder, Size(rl=given.steps))
    print(report(given.folder) or f"{given.folder}: no results; --arm makes them, one of: {' | '.join(ARMS)}")


if __name__ == "__main__":
    main()
