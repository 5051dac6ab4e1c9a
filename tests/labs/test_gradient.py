"""The gradient of streams as one vector: what a learner would have stepped along."""

from random import Random

import numpy as np
import pytest
import torch

from composer_nb.labs.gradient import cosine, inner_products
from composer_nb.labs.losses import OURS, bench
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.learning.optimizer import FlatOptimizer
from composer_nb.trainer.learning.packing import FULL, NO_REPLAY, ReplaySettings
from composer_nb.trainer.learning.ranks import Ranks
from tests.tiny_models import streams_of


@pytest.fixture
def attempts(make_model, converse):
    return converse(Engine(make_model(3), stop=frozenset[int](), slots=4, max_length=96), 4)


OURS_ALONE = {OURS: LossSettings()}
SIGNS = (1.0, -0.5, 0.25, -0.75)


@pytest.mark.parametrize("replay", [NO_REPLAY, FULL])
def test_it_is_the_learners(make_model, attempts, replay: ReplaySettings):
    model = make_model(3)
    batch = streams_of(attempts, *SIGNS)
    tokens = float(sum(stream.acted[1:].sum() for stream in batch))
    learner = Learner(model, FlatOptimizer(model), LossSettings(), replay=replay)
    learner.learn(batch, Ranks(), Random(0), minibatches=1, denominator=tokens, lr=0.0, clip=1e9, microbatch_tokens=64)
    gradient = bench(make_model(3), [batch[:2], batch[2:]], OURS_ALONE, replay=replay).gradient(OURS)
    assert torch.allclose(gradient, learner.optimizer.gradients, atol=1e-6) and gradient.abs().max() > 1e-4
    assert cosine(gradient, -gradient) == pytest.approx(-1.0) and np.isnan(cosine(gradient, 0 * gradient))


def test_inner_products_are_those_of_float64_however_columns_are_cut():
    rows = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    expected = (rows.double() @ rows.double().T).numpy()
    for width in (7, 1000, 4096):
        np.testing.assert_allclose(inner_products(rows, width), expected, rtol=1e-12)
