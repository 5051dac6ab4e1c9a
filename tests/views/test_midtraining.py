"""Figures of mid-training, and the check that rows of a batch do not see each other."""

import numpy as np
import pytest
import torch

from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.models.transformer import Model, ModelConfig, PackedRows
from composer_nb.views import midtraining


def rows() -> list[TokenRow]:
    random = np.random.default_rng(0)
    return [TokenRow(random.integers(0, 31, n).astype(np.int32), np.ones(n, np.float32)) for n in (6, 3, 5)]


def test_influence_stays_within_a_row_and_goes_forward(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "head_dim": 8, "moe_intermediate_size": 8}
    model = Model(ModelConfig(vocab_size=31, max_position_embeddings=64, **sizes))
    moved = midtraining.influence(model, rows())
    row = np.repeat([0, 1, 2], [5, 2, 4])
    position = np.arange(len(row))
    allowed = (row[:, None] == row[None, :]) & (position[:, None] >= position[None, :])
    assert moved.shape == allowed.shape and moved[~allowed].max() < midtraining.MOVED
    assert (moved.diagonal() > midtraining.MOVED).all() and (moved[allowed] > midtraining.MOVED).mean() > 0.9
    assert len(midtraining.who_sees_whom(moved, [5, 2, 4]).axes) == 2

    def glued(lengths, config, device="cpu"):  # type: ignore[no-untyped-def]
        return of_lengths([sum(lengths)], config, device)

    of_lengths = PackedRows.of_lengths
    monkeypatch.setattr(PackedRows, "of_lengths", staticmethod(glued))
    assert midtraining.influence(model, rows())[~allowed].max() > midtraining.MOVED, "a fault in the packing shows"
