"""The test with a learning rate of 0 holds where it should, and fails where something moves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer_nb.harness.rewards import Reward
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY
from composer_nb.trainer.models.variants import Numerics, variant
from composer_nb.trainer.rl import Scored, to_streams
from tests.trainer.stillness import stand_still

NEVER = frozenset[int]()


@pytest.fixture
def model(make_model):
    """As published: every weight is a number of bfloat16."""
    return variant(make_model(3).bfloat16().float(), Numerics()).requires_grad_()


@pytest.fixture
def streams(model, converse):
    attempts = converse(Engine(model, stop=NEVER, slots=6, max_length=96), 6)
    return [
        stream
        for number, done in enumerate(attempts)
        for stream in to_streams(Scored(attempt=done, reward=Reward(total=0.0), advantage=(-1.0) ** number))
    ]


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_without_a_learning_rate_nothing_moves(model, streams, replay):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = stand_still(model, streams, replay=replay, weight_decay=0.1, steps=3, budget=100)
    assert found.holds and found.grad_norm > 0 and found.weights_rounded == 0
    assert (found.weights_moved, found.logprob_moved, found.ratio_apart) == (0, 0, 0)
    assert 0 < found.ratio_record < 1e-4, "the engine's compiled kernel rounds otherwise"
    assert found.ratio_learner < 1e-9
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_what_is_off_is_reported(model, streams):
    off = [
        replace(stream, logprob=np.where(stream.acted, stream.logprob - 0.5, 0).astype(np.float32))
        for stream in streams
    ]
    found = stand_still(model, off)
    assert found.holds and found.ratio_record == pytest.approx(np.expm1(0.5), rel=1e-3)


def test_an_optimiser_that_moves_is_found_out(model, streams, monkeypatch):
    step = FlatOptimizer.step
    monkeypatch.setattr(FlatOptimizer, "step", lambda self, lr, clip: step(self, lr + 1e-2, clip))
    found = stand_still(model, streams)
    assert not found.holds and found.weights_moved > 0 and found.logprob_moved > 0
