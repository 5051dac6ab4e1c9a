"""The gradient of streams as one vector: what a learner would have stepped along."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from composer_nb.harness.rewards import Reward
from composer_nb.labs.gradient import cosine, inner_products, most_pulled, policy_gradient
from composer_nb.labs.retrace import retrace
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.replay_settings import FULL, NO_REPLAY, ReplaySettings
from composer_nb.trainer.rl import Scored, to_stream


def streams(attempts, advantages):
    return [
        to_stream(Scored(attempt=done, reward=Reward(total=0.0), advantage=advantage))
        for done, advantage in zip(attempts, advantages, strict=True)
    ]


@pytest.fixture
def attempts(make_model, converse):
    return converse(Engine(make_model(3), stop=frozenset[int](), slots=4, max_length=96), 4)


SIGNS = (1.0, -0.5, 0.25, -0.75)


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_it_is_the_learners(make_model, attempts, replay: ReplaySettings):
    model = make_model(3)
    batch = streams(attempts, SIGNS)
    tokens = float(sum(stream.acted[1:].sum() for stream in batch))
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=replay)
    learner.learn(batch, Ranks(), Random(0), minibatches=1, denominator=tokens, lr=0.0, clip=1e9, budget=64)
    found, metrics = policy_gradient(make_model(3), batch, LossSettings(), replay=replay, budget=50)
    assert torch.allclose(found, learner.optimizer.gradients, atol=1e-6) and found.abs().max() > 1e-4
    assert metrics["tokens"] == tokens and metrics["masked"] == 0


def test_the_model_stays_as_it_is(make_model, attempts):
    model = make_model(3).requires_grad_(False)
    before = [weight.clone() for weight in model.parameters()]
    policy_gradient(model, streams(attempts, SIGNS), LossSettings(), replay=NO_REPLAY)
    assert all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.parameters())


def test_other_signs_turn_it_round_and_nothing_gives_nothing(make_model, attempts):
    model = make_model(3)
    exact = retrace(model, attempts)  # ratios of 1: nothing is clipped on either side
    one, other = (
        policy_gradient(model, streams(exact, [sign * a for a in SIGNS]), LossSettings(), replay=NO_REPLAY)[0]
        for sign in (1, -1)
    )
    assert cosine(one, one) == pytest.approx(1.0) and cosine(one, other) == pytest.approx(-1.0)
    none, _ = policy_gradient(model, streams(exact, [0.0] * 4), LossSettings(), replay=NO_REPLAY)
    assert not none.any() and np.isnan(cosine(one, none))


def test_routes_that_are_not_the_streams_own_are_refused(make_model, attempts):
    batch = streams(attempts, SIGNS)
    batch[2] = replace(batch[2], routes=np.roll(batch[2].routes, 1, 0))
    with pytest.raises(ValueError, match="stream 2 of 4 cannot be replayed"):
        policy_gradient(make_model(3), batch, LossSettings(), replay=FULL)
    policy_gradient(make_model(3), batch, LossSettings(), replay=NO_REPLAY)


def test_a_penalty_without_its_reference_is_refused_not_left_out(make_model, attempts):
    with pytest.raises(ValueError, match="loss.beta"):
        policy_gradient(make_model(3), streams(attempts, SIGNS), LossSettings(beta=0.1), replay=NO_REPLAY)


def off_by(stream, token: int, gap: float):
    """The stream as of an engine that found one token so many nats less likely than the trainer does."""
    logprob = stream.logprob.copy()
    logprob[token] -= gap
    return replace(stream, logprob=logprob)


def test_a_token_that_nothing_bounds_turns_the_gradient_and_is_named(make_model, attempts):
    model, loss = make_model(3), LossSettings()
    own = streams(retrace(model, attempts), SIGNS)
    first = [int(np.flatnonzero(stream.acted)[0]) for stream in own]
    off = [
        off_by(own[0], first[0], 4.0),
        off_by(own[1], first[1], 7.0),
        off_by(own[2], first[2], -0.1),
        off_by(own[3], first[3], -1.0),
    ]
    found, calmed = most_pulled(off, own, loss, 3)
    assert [(one.stream, one.token) for one in found] == [(n, first[n]) for n in (1, 0, 3)]
    assert found[0].ratio == pytest.approx(np.exp(7), rel=1e-4) and found[0].excess == pytest.approx(
        np.exp(7) - 1, rel=1e-4
    )
    assert [one.excess for one in found[1:]] == [-1.0, -1.0], "clipped, above and below"
    assert (
        calmed[1].logprob[first[1]] == own[1].logprob[first[1]] and off[1].logprob[first[1]] != own[1].logprob[first[1]]
    )
    exact, turned, mended = (policy_gradient(model, each, loss, replay=NO_REPLAY)[0] for each in (own, off, calmed))
    assert cosine(exact, turned) < 0.9 and (turned - mended).norm() > 0.9 * turned.norm()
    assert cosine(exact, mended) > 0.999


def test_a_loss_with_a_bound_is_pulled_by_no_more_than_it(make_model, attempts):
    own = streams(retrace(make_model(3), attempts), SIGNS)
    token = int(np.flatnonzero(own[1].acted)[0])
    off = [own[0], off_by(own[1], token, 7.0), *own[2:]]
    for settings, excess in ((LossSettings(ratio="tis", tis_cap=2.0), 1.0), (LossSettings(ratio="icepop"), -1.0)):
        [found], _ = most_pulled(off, own, settings, 1)
        assert (found.stream, found.token) == (1, token) and found.excess == pytest.approx(excess, rel=1e-5)
    with pytest.raises(ValueError, match="same streams"):
        most_pulled(off[:2], own, LossSettings(), 1)


def test_inner_products_are_those_of_float64_however_columns_are_cut():
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    wanted = (rows.double() @ rows.double().T).numpy()
    for width in (7, 1000, 4096):
        np.testing.assert_allclose(inner_products(rows, width), wanted, rtol=1e-12)
