#!/usr/bin/env python3
"""compare_behaviour.py compaction|habits|effort|losses [--seeds N]: comparisons over seeds, as tables for docs/log.md.

compaction: a policy without a model that knows its context alone (`labs/horizons/seeker.py`), with summaries of its own,
summaries by a long instruction, and a cut, at two triggers. habits: a tiny policy is taught an easy repair with two bad habits, a
useless read first and a message for each call; then RL with textual feedback, with a penalty of failed calls, with the effort
penalty, or with none of these. effort: a tiny policy is taught easy and hard repairs in few and in many words; then RL without
the effort penalty, with it, and with one that is low where few of a group succeed. losses: the same policy, in RL of which
limits end a part of the rollouts: with these masked; and with a hundredth of the reward for length, which advantages divided by
the deviation of their group magnify, and those divided by the length of their rollout. One thread; medians with the least and
the most of the seeds.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.hints import hints_of
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.agent.summary import SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import run_eval
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Completion, Request
from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.functions import render_tests
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.registry import term
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.labs.horizons.seeker import Seeker, figures
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.config import ModelConfig
from composer_nb.trainer.models.induction import plant_induction
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.rl import LIMITS, score_groups, streams_of

TOKENIZER = load_tokenizer(example_run().path / "data")
Figures = Mapping[str, float]


def table(figures_by_arm: Mapping[str, Sequence[Figures]], names: Iterable[str]) -> str:
    """Return rows of a Markdown table: for each arm the median of each figure over seeds, with its range."""
    names = list(names)
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for arm, runs in figures_by_arm.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            form = ".0f" if max(map(abs, values)) >= 20 else ".2f"
            cells.append(f"{np.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Compaction


def compaction(seeds: int, count: int = 16, triggers: Sequence[int] = (400, 200)) -> str:
    figures_by_arm: dict[str, list[dict[str, float]]] = {}
    with Sandboxes() as sandboxes:
        for seed in range(seeds):
            miniatures = make_miniatures(f"compaction {seed}", count, heldout=False, executor=sandboxes.functions)
            tasks = list(miniatures)

            def attempts(tasks: list[Task] = tasks, **summary: Any) -> dict[str, float]:
                settings = EnvSettings(summary=SummarySettings(**summary))
                agent = make_agent(settings, TOKENIZER, Limits(turns=24, tokens=8000), sandboxes)
                return figures(list(run_eval(Seeker(agent.renderer), agent, tasks, sandboxes, samples=1)), TOKENIZER)

            one_segment = attempts()
            scores_by_arm = {"one segment": one_segment}
            for trigger in triggers:
                for kind in ("self", "prompted", "truncate"):
                    scores_by_arm[f"{kind}, trigger {trigger}"] = attempts(kind=kind, trigger=trigger)
            for arm, scores in scores_by_arm.items():
                figures_by_arm.setdefault(arm, []).append({**scores, "error": one_segment["solved"] - scores["solved"]})
    return table(figures_by_arm, ("solved", "error", "summary tokens", "reused", "forgotten", "tried twice"))


# Habits


MISSING = "g.py"
PROMPTS, GROUP = 4, 6
LOOKS = (3, 6, 12)
"""Steps of RL after which figures are taken."""


@term
def failed_calls(rollout: Rollout, grade: Grade) -> float:
    """Return the share of calls that failed."""
    return sum(turn.error is not None for turn in rollout.turns) / max(1, rollout.calls)


def task(number: int) -> Task:
    """An easy repair: the request names the number, and one sign is wrong."""
    n, name = number % 10, "f"
    correct, wrong = (f"def f(x):\n    return x {sign} {n}\n" for sign in "+-")
    return Task(
        id=f"add-{number}",
        instruction=f"fix f.py: x plus {n}",
        files={"f.py": wrong, "test_f.py": render_tests("f", name, [((1,), 1 + n), ((5,), 5 + n)])},
        tests={"test_hidden.py": render_tests("f", name, [((7,), 7 + n), ((20,), 20 + n)])},
        solution={"f.py": correct},
        source_scope=("f.py",),
    )


class Played(Seeker):
    """Rollout k of `talks` says its k-th list of messages."""

    talks: Sequence[Sequence[Said]] = ()

    def _answer(self, request: Request) -> Completion:
        context = self._contexts.setdefault(request.rollout, [])
        context.append(0)
        ids = self.renderer.turn(self.talks[request.rollout][len(context) - 1])
        none = [0.0] * len(ids)
        return Completion(rollout=request.rollout, token_ids=ids, logprobs=none, policy_versions=[-1] * len(ids))


def messages(habit: bool, parallel: bool) -> list[Said]:
    calls = [
        ToolCall(name="substitute", arguments={"path": "f.py", "old": "x -", "new": "x +"}),
        ToolCall(name="run_tests", arguments={}),
        ToolCall(name="finish", arguments={}),
    ]
    first = [[ToolCall(name="read_file", arguments={"path": MISSING})]] if habit else []
    return [turn(step) for step in (*first, *([calls] if parallel else [[call] for call in calls]))]


def played(
    agent: Agent, sandboxes: Sandboxes, talks: Sequence[Sequence[Said]], task: Callable[[int], Task]
) -> list[Attempt]:
    """Return attempts at tasks 0, 1, …, in which the agent says what `talks` has for them."""
    policy = Played(agent.renderer)
    policy.talks = talks
    attempts = dict(drive([agent.attempt(task(n), n) for n in range(len(talks))], policy, sandboxes.functions))
    return [attempts[n] for n in range(len(talks))]


def row_of(attempt: Attempt) -> TokenRow:
    """Return a demonstration of one segment as an example; what the agent reads weighs a tenth."""
    [segment] = attempt.rollout.segments
    return TokenRow(segment.token_ids, np.where(segment.acted, 1.0, 0.1).astype(np.float32))


def demonstrations(agent: Agent, sandboxes: Sandboxes, rng: Random, count: int = 120) -> list[TokenRow]:
    """Return examples: six in ten with the bad habit, one in seven in one message; a quarter heeds the hint about the read."""
    kinds = [(rng.random() < 0.6, rng.random() < 0.15) for _ in range(count)]
    attempts = played(agent, sandboxes, [messages(*kind) for kind in kinds], task)
    bad = next(attempts[n].rollout for n, (habit, _) in enumerate(kinds) if habit)
    [hint] = hints_of(bad, agent.renderer, agent.tools)[0]
    rows = []
    for n, (habit, _) in enumerate(kinds):
        row = row_of(attempts[n])
        ids, weight = row.token_ids, row.weight
        if not habit and n % 5 < 3:
            ids = np.concatenate([ids[: hint.at], np.array(hint.token_ids, np.int32), ids[hint.at :]])
            weight = np.concatenate(
                [weight[: hint.at], np.full(len(hint.token_ids), 0.1, np.float32), weight[hint.at :]]
            )
        rows.append(TokenRow(ids, weight))
    return rows


def taught(seed: int, steps: int, draw_rows: Callable[[Random], list[TokenRow]]) -> Model:
    """Return a model that has learnt the demonstrations that `draw_rows` draws."""
    torch.manual_seed(seed)
    shape = ModelConfig(vocab_size=TOKENIZER.get_vocab_size(), num_hidden_layers=2, max_position_embeddings=512)
    model = Model(shape)
    plant_induction(model, seed)
    model.requires_grad_()
    rng = Random(seed)
    rows, optimizer = draw_rows(rng), FlatOptimizer(model, published=torch.bfloat16)
    for step in range(steps):
        lr = 3e-3 * min(1.0, (step + 1) / 10, (steps - step) / (steps / 2))
        train_step(model, rng.sample(rows, 10), optimizer, Ranks(), lr=lr, balance=1e-3, clip=1.0)
    return model


def figures_of(attempts: Sequence[Attempt]) -> dict[str, float]:
    rollouts = [attempt.rollout for attempt in attempts]
    habits = [MISSING in rollout.turns[0].call for rollout in rollouts if rollout.turns]
    return {
        "solved": float(np.mean([attempt.grade.passed for attempt in attempts])),
        "useless read first": float(np.mean(habits)),
        "calls": float(np.mean([rollout.calls for rollout in rollouts])),
        "messages": float(np.mean([rollout.messages for rollout in rollouts])),
        "written tokens": float(np.mean([rollout.sampled for rollout in rollouts])),
    }


Arm = tuple[RewardSettings, LossSettings]
SOLVED = {"solved": 1.0}
PLAIN = RewardSettings(weights=SOLVED), LossSettings()
ARMS: dict[str, Arm] = {
    "solved alone": PLAIN,
    "and feedback 0.1": (PLAIN[0], LossSettings(feedback=0.1)),
    "and feedback 0.3": (PLAIN[0], LossSettings(feedback=0.3)),
    "and failed calls −0.3": (RewardSettings(weights=SOLVED | {"failed_calls": -0.3}), LossSettings()),
    "and effort 0.3": (
        RewardSettings(weights=SOLVED, effort=Effort(weight=0.3, turns=0.5, tool_call_tokens=0.01)),
        LossSettings(),
    ),
}


def engine_at(model: Model, agent: Agent, seed: int, step: int) -> Engine:
    """Return what samples the rollouts of a step."""
    size = {"slots": GROUP * PROMPTS, "max_length": agent.limits.tokens}
    return Engine(model, stop=agent.renderer.stop, seed=seed, version=step, **size)


def groups_of(attempts: Sequence[Attempt]) -> list[Sequence[Attempt]]:
    """Return the groups of a step, whose attempts follow one another."""
    return [attempts[at : at + GROUP] for at in range(0, len(attempts), GROUP)]


def trained(
    start: Model,
    agent: Agent,
    sandboxes: Sandboxes,
    seed: int,
    arm: Arm,
    steps: int,
    task: Callable[[int], Task] = task,
) -> tuple[Model, list[list[Attempt]]]:
    """Return the policy after RL, and the attempts of each step and of the end: `PROMPTS` groups of 6 rollouts."""
    (rewards, loss), model = arm, copy.deepcopy(start)
    reference = copy.deepcopy(start).requires_grad_(False) if loss.feedback else None
    learner = Learner(model, FlatOptimizer(model, published=torch.bfloat16), loss, reference)
    hinter = partial(hints_of, renderer=agent.renderer, tools=agent.tools) if loss.feedback else None
    attempts_by_step = []
    for step in range(steps + 1):
        engine = engine_at(model, agent, seed, step)
        numbers = range(step * GROUP * PROMPTS, (step + 1) * GROUP * PROMPTS)
        attempts = dict(
            drive([agent.attempt(task(1000 + n // GROUP), n) for n in numbers], engine, sandboxes.functions)
        )
        attempts_by_step.append([attempts[n] for n in range(len(numbers))])
        scored = score_groups(groups_of(attempts_by_step[-1]), rewards, loss)
        if step < steps and (streams := streams_of(scored, loss, hinter)):
            learning = {
                "minibatches": 1,
                "denominator": GROUP * PROMPTS * (1.0 if loss.length_norm else 24.0),
                "lr": 3e-4 * min(1.0, (step + 1) / 3),
                "clip": 1.0,
            }
            learner.learn(streams, Ranks(), Random(step), microbatch_tokens=4096, **learning)
    return model, attempts_by_step


def habits(seeds: int, taught_steps: int = 120) -> str:
    figures_by_arm: dict[str, list[dict[str, float]]] = {}
    with Sandboxes() as sandboxes:
        agent = make_agent(EnvSettings(), TOKENIZER, Limits(turns=6, turn_tokens=64, tokens=400), sandboxes)
        for seed in range(seeds):
            start = taught(seed, taught_steps, partial(demonstrations, agent, sandboxes))
            for arm in ARMS:
                _, attempts_by_step = trained(start, agent, sandboxes, seed, ARMS[arm], LOOKS[-1])
                by_step = [figures_of(attempts) for attempts in attempts_by_step]
                if arm == "solved alone":
                    figures_by_arm.setdefault("start", []).append(by_step[0])
                for steps in LOOKS:
                    figures_by_arm.setdefault(f"{arm}, {steps} steps", []).append(by_step[steps])
                print(f"seed {seed}, {arm}: {by_step[-1]}", flush=True)
    return table(figures_by_arm, ("solved", "useless read first", "calls", "messages", "written tokens"))


# Effort, and losses


def priced(weight: float, by_solved: float = 0.0) -> RewardSettings:
    """Return a reward with an effort penalty, or with a bonus if the weight is negative."""
    effort = Effort(weight=weight, by_solved=by_solved, turns=0.3, tool_call_tokens=0.03)
    return RewardSettings(weights=SOLVED, effort=effort)


PENALTIES: dict[str, Arm] = {
    "solved alone": PLAIN,
    "and effort 0.2": (priced(0.2), LossSettings()),
    "and effort 0.4": (priced(0.4), LossSettings()),
    "and effort 0.4 × solved⁴": (priced(0.4, 4.0), LossSettings()),
    "and effort 0.4 × solved¹⁶": (priced(0.4, 16.0), LossSettings()),
}
LOSSES: dict[str, Arm] = {
    "solved alone": PLAIN,
    "overlong masked": (PLAIN[0], LossSettings(mask_overlong=True)),
    "and a hundredth for length": (priced(-0.01), LossSettings()),
    "divided by the deviation": (priced(-0.01), LossSettings(std_norm=True)),
    "divided by the length": (priced(-0.01), LossSettings(length_norm=True)),
}
"""The last two have the reward of the third."""
SIGNS = (("x -", "x +"), ("- abs", "+ abs"), ("- x *", "+ x *"))
"""The repairs of hard tasks, of which one is right; the first repairs an easy one."""


def right_sign(number: int) -> int:
    """Return which repair of a task is right."""
    return Random(number).randrange(len(SIGNS)) if number % 2 else 0


def either(number: int) -> Task:
    """Return the easy repair if `number` is even, else a hard one: one of three signs is wrong, and only a test says which."""
    if number % 2 == 0:
        return task(number)
    n, name, right = number % 10, "f", right_sign(number)
    line = f"def f(x):\n    return x - {n} - abs(x) - x * x\n"

    def cases(*values: int) -> list[tuple[tuple[int, ...], int]]:
        summands = {x: (n, abs(x), x * x) for x in values}
        return [((x,), x + 2 * parts[right] - sum(parts)) for x, parts in summands.items()]

    return Task(
        id=f"either-{number}",
        instruction="fix f.py: one sign",
        files={"f.py": line, "test_f.py": render_tests("f", name, cases(2, 5))},
        tests={"test_hidden.py": render_tests("f", name, cases(7, 11))},
        solution={"f.py": line.replace(*SIGNS[right])},
        source_scope=("f.py",),
    )


def words(number: int, rng: Random) -> list[Said]:
    """Return the messages of a demonstration: often a useless read first, edits of all lines, and one call a message."""
    wordy, habit, apart = (rng.random() < share for share in (0.6, 0.6, 0.8))
    files = either(number).files

    def sub(old: str, new: str) -> ToolCall:
        texts = (files["f.py"], files["f.py"].replace(old, new)) if wordy else (old, new)
        return ToolCall(name="substitute", arguments={"path": "f.py", "old": texts[0], "new": texts[1]})

    test, undo, finish = (ToolCall(name=name, arguments={}) for name in ("run_tests", "undo", "finish"))
    tries = rng.sample(range(len(SIGNS)), len(SIGNS)) if number % 2 else [0]
    steps: list[list[ToolCall]] = []
    for sign in tries[: tries.index(right_sign(number)) + 1]:
        steps.append([*([undo] if steps else []), sub(*SIGNS[sign]), test])
    read = [[ToolCall(name="read_file", arguments={"path": "test_f.py"})]] if habit else []
    steps = [*read, *steps, [finish]]
    return [turn(calls) for calls in ([[call] for step in steps for call in step] if apart else steps)]


def effort_demonstrations(agent: Agent, sandboxes: Sandboxes, rng: Random, count: int = 240) -> list[TokenRow]:
    """Return demonstrations of easy and hard repairs. All of them succeed."""
    attempts = played(agent, sandboxes, [words(n, rng) for n in range(count)], either)
    assert all(attempt.grade.passed for attempt in attempts)
    return [row_of(attempt) for attempt in attempts]


def spent(model: Model, agent: Agent, sandboxes: Sandboxes, seed: int, count: int = 96) -> dict[str, float]:
    """Return what half as many easy and as many hard tasks took that nothing trained on, one rollout each."""
    engine = Engine(model, stop=agent.renderer.stop, slots=48, max_length=agent.limits.tokens, seed=999 + seed)
    attempts = dict(drive([agent.attempt(either(50_000 + n), n) for n in range(count)], engine, sandboxes.functions))
    measures: dict[str, float] = {}
    for kind, odd in (("easy", 0), ("hard", 1)):
        kind_attempts = [attempts[n] for n in range(odd, count, 2)]
        rollouts = [attempt.rollout for attempt in kind_attempts]
        measures[f"{kind} solved"] = float(np.mean([attempt.grade.passed for attempt in kind_attempts]))
        measures[f"{kind} cut off"] = float(np.mean([rollout.stop in LIMITS for rollout in rollouts]))
        measures[f"{kind} tokens"] = float(np.mean([rollout.sampled for rollout in rollouts]))
        measures[f"{kind} calls a message"] = sum(e.calls for e in rollouts) / sum(e.messages for e in rollouts)
    return measures


def push_of_equals(attempts: Sequence[Attempt], arm: Arm) -> float:
    """Return the share of the sizes of a step's advantages that lies in groups whose outcomes are all the same."""
    sizes = {True: 0.0, False: 0.0}
    for group in score_groups(groups_of(attempts), *arm):
        sizes[len({scored.attempt.grade.passed for scored in group}) == 1] += sum(abs(s.advantage) for s in group)
    return sizes[True] / max(1e-9, sum(sizes.values()))


def compare(seeds: int, arms: Mapping[str, Arm], turns: int, taught_steps: int = 240, steps: int = 60) -> str:
    """Return a table of what the arms of RL make of one start a seed, with these most turns of a rollout in RL."""
    figures_by_arm: dict[str, list[dict[str, float]]] = {}
    with Sandboxes() as sandboxes:
        teacher, agent = (
            make_agent(EnvSettings(), TOKENIZER, Limits(turns=most, turn_tokens=96, tokens=512), sandboxes)
            for most in (12, turns)
        )
        for seed in range(seeds):
            start = taught(seed, taught_steps, partial(effort_demonstrations, teacher, sandboxes))
            for name, arm in {"start": PLAIN, **arms}.items():
                model, by_step = trained(start, agent, sandboxes, seed, arm, 0 if name == "start" else steps, either)
                push = float(np.mean([push_of_equals(attempts, arm) for attempts in by_step]))
                measures = spent(model, agent, sandboxes, seed) | {"push of equal groups": push}
                figures_by_arm.setdefault(name, []).append(measures)
                print(f"seed {seed}, {name}: {measures}", flush=True)
    return table(figures_by_arm, figures_by_arm["start"][0])


def effort(seeds: int) -> str:
    return compare(seeds, PENALTIES, turns=12)


def losses(seeds: int) -> str:
    return compare(seeds, LOSSES, turns=7)


STUDIES = {"compaction": compaction, "habits": habits, "effort": effort, "losses": losses}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=tuple(STUDIES))
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.process_time()
    print(STUDIES[args.what](args.seeds))
    print(f"{time.process_time() - begun:.0f} CPU-seconds")


if __name__ == "__main__":
    main()
