"""Prompts that are read in parts: the same results as at once, and nobody who decodes waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import NEVER, Played, ask, prompt, same

from composer_nb.harness.policy import SampledToken
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.transformer import Model, ModelConfig


def play(engine: Engine, prompts: Sequence[list[int]], turns: int = 2) -> Played:
    """Rollouts that read a prompt, then an observation of the same size, and write after each."""
    ids: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    logprobs: dict[int, list[float]] = {number: [] for number in ids}
    for turn in range(turns):
        news = {number: prompt(len(read), turn) if turn else read for number, read in enumerate(prompts)}
        for done in engine.generate([ask(number, read) for number, read in news.items()]):
            ids[done.rollout] += [*news[done.rollout], *done.token_ids]
            logprobs[done.rollout] += done.logprobs
    return {number: (ids[number], logprobs[number], engine.release(number)) for number in ids}


@pytest.mark.parametrize("step_tokens", [5, 6, 13, 40])
def test_in_parts_or_at_once_all_that_is_recorded_is_the_same(make_model, step_tokens: int):
    model = make_model(3)
    prompts = [prompt(20), prompt(3), prompt(20), prompt(31, 4), prompt(20)]  # three of a group
    whole = Engine(model, stop=NEVER, slots=5, max_length=90, seed=2)
    parts = Engine(model, stop=NEVER, slots=5, max_length=90, seed=2, step_tokens=step_tokens)
    assert whole._packed is not None
    same(play(parts, prompts), play(whole, prompts))
    assert parts.forwarded == whole.forwarded, "a group's prompt is read once, also in parts"


def _model() -> Model:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 8, "head_dim": 4}
    return Model(ModelConfig(**sizes))


MODEL = _model()
READS = st.tuples(st.integers(1, 25), st.integers(0, 1), st.integers(0, 2), st.integers(0, 4))
"""Size of a prompt, its seed, whose it is (0: a user's), and the step at which it comes."""


@settings(max_examples=25, deadline=None)
@given(st.lists(READS, min_size=1, max_size=6), st.integers(3, 30))
def test_any_prompts_at_any_steps_within_any_budget(reads: list[tuple[int, int, int, int]], step_tokens: int):
    """More rollouts than places: some make room in the middle of a prompt, and come back."""
    slots, done = 3, dict[int, tuple[list[int], list[float]]]()
    engine = Engine(MODEL, stop=NEVER, slots=slots, max_length=40, seed=1, step_tokens=step_tokens)
    waiting = sorted(enumerate(reads), key=lambda read: read[1][3])
    step = 0
    while len(done) < len(reads):
        here = Counter(slot.request.priority for slot in engine._live.values())
        while waiting and waiting[0][1][3] <= step and here[priority := min(waiting[0][1][2], 1)] < slots:
            number, (size, seed, _, _) = waiting.pop(0)
            engine.submit(ask(number, prompt(size, seed), 5, priority=priority))
            here[priority] += 1
        before = engine.forwarded
        for turn in engine.step():
            done[turn.rollout] = turn.token_ids, turn.logprobs
            trace = engine.release(turn.rollout)
            assert trace.route_valid.tolist() == [True] * (len(trace.route_valid) - 1) + [False]
        assert engine.forwarded - before <= step_tokens
        step += 1
    for number, (size, seed, _, _) in enumerate(reads):
        alone = Engine(MODEL, stop=NEVER, slots=1, max_length=40, seed=1)
        [turn] = alone.generate([ask(number, prompt(size, seed), 5)])
        assert done[number] == (turn.token_ids, turn.logprobs)


# Nobody waits


def test_while_a_long_prompt_is_read_others_draw_a_token_with_every_step(make_model):
    engine = Engine(make_model(4), stop=NEVER, slots=4, max_length=96, temperature=0.0, step_tokens=8)
    drawn, sizes = Counter[int](), list[int]()
    for number in range(3):
        engine.submit(
            replace(ask(number, prompt(3, number), 40), heard=lambda _, number=number: drawn.update([number]))
        )
    for _ in range(3):
        engine.step()
    engine.submit(replace(ask(3, prompt(60), 5), heard=lambda _: drawn.update([3])))
    before = drawn.copy()
    while not drawn[3]:
        forwarded = engine.forwarded
        engine.step()
        sizes.append(engine.forwarded - forwarded)
        assert all(drawn[number] - before[number] == len(sizes) for number in range(3))
    assert sizes == [8] * 12, "3 tokens of those who decode, 5 of the prompt"


@pytest.mark.parametrize("slots", [3, 4])
def test_a_user_waits_for_no_prompt_of_a_rollout(make_model, slots: int):
    """All places are taken, or one is left; a rollout's long prompt is being read, and more of them wait."""
    engine = Engine(make_model(4), stop=NEVER, slots=slots, max_length=96, step_tokens=12)
    told, steps = list[int](), Counter[str]()
    done = dict[int, list[int]]()

    def step() -> None:
        steps["made"] += 1
        done.update((turn.rollout, turn.token_ids) for turn in engine.step())

    for number, size in enumerate((4, 80, 90)):
        engine.submit(ask(number, prompt(size, number), 6))
    step()
    step()
    asked = steps["made"]

    def heard(_: SampledToken) -> None:
        told.append(steps["made"])

    engine.submit(replace(ask(100, prompt(9, 9), 3, priority=0), heard=heard))
    while len(done) < 4:
        step()
    assert told[:3] == [asked + 1, asked + 2, asked + 3]
    alone = Engine(engine.model, stop=NEVER, slots=1, max_length=96)
    for number, size in enumerate((4, 80, 90)):
        [turn] = alone.generate([ask(number, prompt(size, number), 6)])
        alone.release(number)
        assert done[number] == turn.token_ids, "and the rollouts go on as if it had not been there"


# Weights that change in the middle of a prompt
