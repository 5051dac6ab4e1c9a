"""The engine: what it samples, what it records of it, and what it refuses."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import NEVER, Played, ask, prompt, same

from composer_nb.harness.policy import Completion, SampledToken, route_checks
from composer_nb.trainer.engine import Engine, _logprobs
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows


def full_forward(model: Model, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probability of each token but the first; experts [T, L, K] and gates of every token but the last."""
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        logits, routes = model(tokens[None, :-1])
        packed = PackedRows.of_lengths([len(ids) - 1], model.config)
        _, routings = model.trunk(tokens[:-1], packed.position_N, packed.attend)
        gates = torch.stack([routing.gates_NK for routing in routings], 1)
    logprob = logits[0].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprob.numpy(), routes[0].numpy(), gates.numpy()


# Sampling is the model's own distribution


def test_turns_agree_with_a_full_forward_pass_over_the_whole_rollout(make_model, converse):
    model = make_model(3)
    attempts = converse(Engine(model, stop=frozenset({7}), slots=12, max_length=96), 12)
    assert len({len(attempt.rollout.segments[0].token_ids) for attempt in attempts}) > 1, "rollouts of several lengths"
    for attempt in attempts:
        [segment] = attempt.rollout.segments
        logprob, routes, gates = full_forward(model, segment.token_ids)
        acted = segment.acted[1:]
        assert acted.sum() > 3
        np.testing.assert_allclose(segment.logprob[1:][acted], logprob[acted], atol=3e-5)
        trace = segment.trace
        assert trace.routes.shape == (len(segment.token_ids), 2, 2) and trace.routes.dtype == np.uint8
        np.testing.assert_array_equal(trace.routes[:-1], routes)
        np.testing.assert_allclose(trace.gates[:-1], gates, atol=3e-5)
        assert (trace.margins[:-1] > 0).all()
        checks = route_checks(np.arange(len(segment.token_ids)), segment.token_ids, trace.routes)
        np.testing.assert_array_equal(trace.checks[:-1], checks[:-1])


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.5, 1.0), (None, 0.6), (2.0, 0.9), (1.0, 1e-9)])
def test_a_turn_is_drawn_at_its_own_temperature_and_top_p(make_model, temperature: float | None, top_p: float):
    """Turns beside it that are sampled by the engine's own settings come out as if they were alone."""
    model = make_model(6, vocab_size=7)
    engine = Engine(model, stop=NEVER, slots=65, max_length=8, temperature=1.5, seed=3)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 4]]))[0][0, -1]
    probability = logits.div({None: 1.5, 0.0: 1.0}.get(temperature, temperature)).softmax(-1).tolist()
    ranked = sorted(range(7), key=lambda token: -probability[token])
    nucleus = [token for n, token in enumerate(ranked) if sum(probability[likelier] for likelier in ranked[:n]) < top_p]
    total = sum(probability[token] for token in nucleus)
    plain = [ask(i, [1, 4], 1) for i in range(40)]
    alone = engine.generate(plain)
    for i in range(40):
        engine.release(i)
    special = [replace(ask(40 + i, [1, 4], 1), temperature=temperature, top_p=top_p) for i in range(24)]
    turns = engine.generate([request for pair in zip(plain, special, strict=False) for request in pair] + plain[24:])
    assert sorted(turns[:48:2] + turns[48:], key=lambda turn: turn.rollout) == alone
    draws = {(turn.token_ids[0], turn.logprobs[0]) for turn in turns[1:48:2]}
    for token, logprob in draws:
        assert token in nucleus and logprob == pytest.approx(math.log(probability[token] / total), abs=3e-5)
    if temperature == 0:
        assert {token for token, _ in draws} == {ranked[0]}
    elif len(nucleus) > 1:
        assert len(draws) > 1
    beyond = [("top_p", 1.5), ("min_p", math.nan)] + [("temperature", t) for t in (math.nan, math.inf, 1e-40)]
    for name, value in beyond:
        with pytest.raises(ValueError, match=f"{name}={value}"):
            engine.submit(replace(ask(99, [1]), **{name: value}))


# Rollouts alike are forwarded once; what a rollout draws is its own affair


def play(engine: Engine, numbers: Sequence[int], turns: int = 3) -> Played:
    """Play rollouts that get the same prompt and observations, and differ by their sampled tokens."""
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    logprobs: dict[int, list[float]] = {number: [] for number in numbers}
    for turn in range(turns):
        news = [11 + turn, 5, 30 + turn, 2]
        for completion in engine.generate([ask(number, news, 5) for number in numbers]):
            ids[completion.rollout] += [*news, *completion.token_ids]
            logprobs[completion.rollout] += completion.logprobs
    return {number: (ids[number], logprobs[number], engine.release(number)) for number in numbers}


def test_rollouts_alike_are_forwarded_once_and_come_out_as_if_each_were_alone(make_model):
    model = make_model(3)
    with torch.no_grad():
        model.final_norm.mul_(2.5)  # sharp enough that some rollouts stay alike
    together = Engine(model, stop=NEVER, slots=12, max_length=60, seed=5)
    rollouts = play(together, range(12))
    forwarded = 0
    for number, rollout in rollouts.items():
        alone = Engine(model, stop=NEVER, slots=1, max_length=60, seed=5)
        same({number: rollout}, play(alone, [number]))
        forwarded += alone.forwarded
    distinct = {tuple(ids[:end]) for ids, _, _ in rollouts.values() for end in range(1, len(ids))}
    assert 1 < len({tuple(ids) for ids, _, _ in rollouts.values()}), "they differ in the end"
    assert together.forwarded == len(distinct) < forwarded / 2, "each distinct beginning was forwarded once"


@pytest.mark.parametrize("slots", [1, 3])
def test_a_beginning_that_was_forwarded_before_is_taken_over_bit_for_bit(make_model, slots: int) -> None:
    """The prefix may be of a rollout that lives or has ended. It is not reused after the weights change, and the last token of a
    prompt is always forwarded."""
    model, system = make_model(3), [*range(20, 50)]
    prompts = [[*system, 5, 6], [*system, 5, 7, 8], [*system[:20], 9], [*range(20)], system]
    engine = Engine(model, stop=NEVER, slots=slots, max_length=60, seed=5)
    forwarded = []
    for number, tokens in enumerate(prompts):
        before, alone = engine.forwarded, Engine(model, stop=NEVER, slots=1, max_length=60, seed=5)
        turns = [policy.generate([ask(number, tokens, 4)])[0] for policy in (engine, alone)]
        assert turns[0] == turns[1]
        forwarded.append(engine.forwarded - before - 3)
        traces = [policy.release(number) for policy in (engine, alone)]
        same({number: ([], [], traces[0])}, {number: ([], [], traces[1])})
    assert forwarded == [32, 2, 1, 20, 30 if slots == 1 else 1], "in one place there is only the rollout before"
    engine.swap(make_model(4), 1)
    before = engine.forwarded
    engine.generate([ask(9, prompts[0], 4)])
    assert engine.forwarded - before == 32 + 3, "other weights begin anew"


@pytest.mark.parametrize("reset", ["all", "none", "new_session"])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_cache_after_a_swap_is_kept_or_computed_again(make_model, reset: str, slots: int):
    """Full passes of both models are the reference. With one slot, the rollout yields it to another in between. Records stay
    those of the version with which a token was first forwarded."""
    old, new, system = make_model(3), make_model(4), [*range(20, 50)]
    engine = Engine(old, stop=NEVER, slots=slots, max_length=60, seed=5, reset_cache=reset, step_tokens=8)
    [before] = engine.generate([ask(0, system, 4)])
    if slots == 1:
        engine.generate([replace(ask(1, [1, 2, 3], 2), priority=-1)])
        engine.release(1)
    engine.swap(new, 1)
    forwarded = engine.forwarded
    [after] = engine.generate([ask(0, [7], 5)])
    recomputed = 33 if reset == "all" else 0
    assert engine.forwarded - forwarded == recomputed + 1 + 5
    tokens = np.array([*system, *before.token_ids, 7, *after.token_ids])
    (first, old_routes, _), (second, new_routes, _) = full_forward(old, tokens), full_forward(new, tokens)
    np.testing.assert_allclose(before.logprobs, first[29:33], atol=3e-5)
    assert np.allclose(after.logprobs, second[34:], atol=3e-5) == (reset == "all")
    forwarded = engine.forwarded
    engine.generate([ask(2, system, 1)] if slots > 1 else [])
    assert engine.forwarded - forwarded == (0 if slots == 1 else 1 if reset == "none" else 30)
    trace = engine.release(0)
    np.testing.assert_array_equal(trace.routes[:33], old_routes[:33])
    assert trace.route_valid[:-1].all()
    if reset == "all":
        np.testing.assert_array_equal(trace.routes[33:-1], new_routes[33:])
    checks = route_checks(np.arange(len(tokens)), tokens, trace.routes)
    np.testing.assert_array_equal(trace.checks[:-1], checks[:-1])


def test_in_a_synchronous_transition_turns_have_one_version_each(make_model):
    old, new = make_model(3), make_model(4)
    engine = Engine(old, stop=NEVER, slots=3, max_length=40, temperature=0.0, transition="sync")
    engine.submit(ask(0, [1, 2, 3], 4))
    engine.step()
    engine.swap(new, 1)
    for rollout in (1, 2):
        engine.submit(ask(rollout, [1, 2, 3], 3))
    engine.release(2)
    turns: dict[int, Completion] = {}
    while engine.busy:
        turns |= {completion.rollout: completion for completion in engine.step()}
    assert {rollout: turn.policy_versions for rollout, turn in turns.items()} == {0: [0] * 4, 1: [1] * 3}
    for model, turn in ((old, turns[0]), (new, turns[1])):
        alone = Engine(model, stop=NEVER, slots=1, max_length=40, temperature=0.0)
        assert alone.generate([ask(0, [1, 2, 3], len(turn.token_ids))])[0].token_ids == turn.token_ids
    engine.swap(old, 2)
    assert engine.version == 2, "at once where nothing is under way"
    engine.submit(ask(3, [1, 2], 4))
    engine.step()
    engine.swap(new, 3)
    assert engine.version == 2 and engine.release(3).route_valid.tolist() == [True, True, False]
    assert engine.version == 3, "with the last turn under way, also if it is given up"


# What is refused, and that a refusal changes nothing


def test_a_turn_that_can_not_fit_is_refused_and_leaves_no_trace(make_model):
    model = make_model(4)
    engine = Engine(model, stop=NEVER, slots=2, max_length=20, temperature=0.0)
    with pytest.raises(ValueError, match="may reach 21 tokens, past .*20"):
        engine.submit(ask(0, [1] * 13, 8))
    for outside in (-1, 61):
        with pytest.raises(ValueError, match="tokens from 0 to 60 alone"):
            engine.submit(ask(0, [1, outside], 8))
    assert engine.step() == [] and not engine._live and len(engine._free) == 2
    assert len(engine.release(0).routes) == 0, "an agent that was refused can be closed"
    [turn] = engine.generate([ask(0, [1] * 12, 8)])
    assert len(turn.token_ids) == 8, "exactly as long as it may be"
    with pytest.raises(ValueError, match="may reach 22 tokens"):
        engine.submit(ask(0, [1], 1))
    assert engine.step() == []
    assert len(engine.release(0).route_valid) == 20


def test_a_rollout_has_one_turn_at_a_time(make_model):
    engine = Engine(make_model(4), stop=NEVER, slots=2, max_length=40)
    engine.submit(ask(0, [1, 2]))
    for _ in range(2):
        with pytest.raises(ValueError, match="rollout 0 .*turn"):
            engine.submit(ask(0, [3]))
        engine.step()
    with pytest.raises(ValueError, match=r"rollouts \[0\] are under way"):
        engine.generate([ask(1, [1])])
    while not engine.step():
        pass
    with pytest.raises(ValueError, match="rollout 1 .*turn"):
        engine.generate([ask(1, [1]), ask(1, [1])])
    with pytest.raises(RuntimeError, match="engine.slots=2"):
        engine.submit(ask(2, [1], 2))
    engine.release(0)
    engine.submit(ask(2, [1], 2))


# What is recorded


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=12))
def test_any_order_of_turns_keeps_the_books(plan: list[tuple[int, int, int]]):
    engine, alive, forwarded = ENGINE, {}, 0
    before = engine.forwarded
    for rollout, news, room in plan:
        length = alive.get(rollout, 0)
        if length + news + room > engine.max_length:
            assert len(engine.release(rollout).route_valid) == alive.pop(rollout)
            length = 0
        [turn] = engine.generate([ask(rollout, [1] * news, room)])
        assert 1 <= len(turn.token_ids) <= room
        forwarded += news + len(turn.token_ids) - 1 + (length > 0)
        alive[rollout] = length + news + len(turn.token_ids)
    assert engine.forwarded - before == forwarded
    for rollout, length in alive.items():
        trace = engine.release(rollout)
        assert trace.route_valid.tolist() == [True] * (length - 1) + [False]
    assert len(engine._free) == 4


def _small_model() -> Model:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "moe_intermediate_size": 8, "head_dim": 4}
    return Model(ModelConfig(**sizes))


MODEL = _small_model()
ENGINE = Engine(MODEL, stop=frozenset({0}), slots=4, max_length=24)


# Priorities


def test_a_user_goes_before_rollouts_which_go_on_as_if_nothing_had_happened() -> None:
    slots = 3

    def rollouts(engine: Engine) -> dict[int, Completion]:
        return {turn.rollout: turn for _ in range(60) for turn in engine.step() if turn.rollout < slots}

    def played(engine: Engine, turns: dict[int, Completion]) -> Played:
        return {n: (turn.token_ids, turn.logprobs, engine.release(n)) for n, turn in turns.items()}

    def loaded_engine() -> Engine:
        engine = Engine(MODEL, stop=frozenset(), slots=slots, max_length=24, seed=4)
        for rollout in range(slots):
            engine.submit(ask(rollout, [5, 6, 7], 12))
        return engine

    alone, engine = loaded_engine(), loaded_engine()
    expected = rollouts(alone)
    engine.step()
    first_tokens: list[SampledToken] = []
    for user in range(100, 100 + slots):
        engine.submit(ask(user, [9], 4, priority=0, on_token=first_tokens.append))
    with pytest.raises(RuntimeError, match="more than"):
        engine.submit(ask(103, [9], 4, priority=0))
    engine.step()
    assert len(first_tokens) == slots, "the first token of each user comes with the next step"
    for _ in range(3):
        engine.step()
    engine.release(100)
    actual = rollouts(engine)
    returned_tokens: list[SampledToken] = []
    engine.submit(ask(101, [8], 2, priority=0, on_token=returned_tokens.append))
    engine.step()
    assert len(returned_tokens) == 1, "a user whose place a rollout took comes back"
    same(played(engine, actual), played(alone, expected))


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 5), ({"top_k": 2}, 2), ({"top_k": 9}, 5), ({"min_p": 0.3}, 3), ({"min_p": 1.0}, 1), ({"top_p": 0.4}, 1),
     ({"top_k": 3, "top_p": 0.8}, 2), ({"min_p": 0.3, "top_k": 1}, 1), ({"temperature": 0.5, "min_p": 0.3}, 1)],
)  # fmt: skip
def test_what_can_be_drawn(options: dict[str, Any], count: int) -> None:
    share = torch.tensor([[0.06, 0.5, 0.2, 0.16, 0.08]])
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | options
    probabilities = _logprobs(share.log(), *sampling.values())[0].exp()
    order = share[0].argsort(descending=True)[:count]
    scaled = share[0, order] ** (1 / sampling["temperature"])
    torch.testing.assert_close(probabilities[order], scaled / scaled.sum())
    assert int((probabilities > 0).sum()) == count


# Prompts that are read in parts


READS = st.tuples(st.integers(1, 25), st.integers(0, 1), st.integers(0, 2), st.integers(0, 4))
"""Size of a prompt, its seed, whose it is (0: a user's), and the step at which it comes."""


@settings(max_examples=25, deadline=None)
@given(st.lists(READS, min_size=1, max_size=6), st.integers(3, 30))
def test_any_prompts_at_any_steps_within_any_budget(reads: list[tuple[int, int, int, int]], step_tokens: int):
    """There are more rollouts than slots: some yield theirs in the middle of a prompt, and come back."""
    slots, finished, expected = 3, Played(), Played()
    engine = Engine(MODEL, stop=NEVER, slots=slots, max_length=40, seed=1, step_tokens=step_tokens)
    waiting = sorted(enumerate(reads), key=lambda read: read[1][3])
    step = 0
    while len(finished) < len(reads):
        occupied = Counter(slot.request.priority for slot in engine._live.values())
        while waiting and waiting[0][1][3] <= step and occupied[priority := min(waiting[0][1][2], 1)] < slots:
            number, (size, seed, _, _) = waiting.pop(0)
            engine.submit(ask(number, prompt(size, seed), 5, priority=priority))
            occupied[priority] += 1
        before = engine.forwarded
        for turn in engine.step():
            finished[turn.rollout] = turn.token_ids, turn.logprobs, engine.release(turn.rollout)
        assert engine.forwarded - before <= step_tokens
        step += 1
    for number, (size, seed, _, _) in enumerate(reads):
        alone = Engine(MODEL, stop=NEVER, slots=1, max_length=40, seed=1)
        [turn] = alone.generate([ask(number, prompt(size, seed), 5)])
        expected[number] = turn.token_ids, turn.logprobs, alone.release(number)
    assert engine._packed is not None
    same(finished, expected)


# Nobody waits


def test_while_a_long_prompt_is_read_others_draw_a_token_with_every_step(make_model):
    engine = Engine(make_model(4), stop=NEVER, slots=4, max_length=96, temperature=0.0, step_tokens=8)
    counts, sizes = Counter[int](), list[int]()
    for number in range(3):
        engine.submit(
            replace(ask(number, prompt(3, number), 40), on_token=lambda _, number=number: counts.update([number]))
        )
    for _ in range(3):
        engine.step()
    engine.submit(replace(ask(3, prompt(60), 5), on_token=lambda _: counts.update([3])))
    before = counts.copy()
    while not counts[3]:
        forwarded = engine.forwarded
        engine.step()
        sizes.append(engine.forwarded - forwarded)
        assert all(counts[number] - before[number] == len(sizes) for number in range(3))
    assert sizes == [8] * 12, "3 tokens of those who decode, 5 of the prompt"
