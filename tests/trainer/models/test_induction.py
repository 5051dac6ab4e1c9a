"""Planted induction heads: what they do before any training, and where they cannot be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from composer_nb.trainer.models.config import ModelConfig
from composer_nb.trainer.models.induction import can_plant, plant_induction
from composer_nb.trainer.models.transformer import Model


def repeated_loss(model: Model, seed: int, period: int) -> float:
    """Mean cross-entropy of the second half of rows in which random tokens come twice, in nats."""
    rows = torch.randint(model.config.vocab_size, (4, period), generator=torch.Generator().manual_seed(seed))
    ids = torch.cat([rows, rows], dim=1)
    with torch.no_grad():
        logits, _ = model(ids)
    kept = slice(period, 2 * period - 1)
    return float(torch.nn.functional.cross_entropy(logits[:, kept].flatten(0, 1), ids[:, period + 1 :].flatten()))


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"hidden_size": 192, "num_key_value_heads": 4}])
@pytest.mark.parametrize("period", [12, 100])
def test_a_planted_head_predicts_what_comes_again(changes: dict[str, int], period: int) -> None:
    config = replace(ModelConfig(), **changes)
    torch.manual_seed(1)
    plain, planted = Model(config), Model(config)
    plant_induction(planted, seed=3)
    guess = math.log(config.vocab_size)
    assert repeated_loss(planted, 5, period) < 0.8 * guess < guess < repeated_loss(plain, 5, period)


@pytest.mark.parametrize(
    "changes", [{"num_hidden_layers": 1}, {"hidden_size": 96}, {"tie_word_embeddings": False}, {"rope_theta": 2.0}]
)
def test_models_without_the_parts_are_refused(changes: dict[str, object]) -> None:
    config = replace(ModelConfig(), **changes)  # type: ignore[arg-type]
    assert not can_plant(config) and can_plant(ModelConfig())
    with pytest.raises(ValueError, match="two layers"):
        plant_induction(Model(config), seed=0)
