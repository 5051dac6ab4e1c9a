"""Recomputation in the supervised stages: less memory, the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from composer_nb.harness.environment import Sandboxes
from composer_nb.trainer.learning.data import TokenRow
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.supervised import train_step
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override

SMALL = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, head_dim=8, moe_intermediate_size=16)


def test_a_stage_recomputes_layers_if_it_is_set_to(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = [TokenRow(rng.integers(0, 64, 40).astype(np.int32), np.ones(40, np.float32)) for _ in range(3)]
    found = []
    for recompute in (False, True):
        settings = override(Settings(), {"ranks": 1, "midtrain.recompute": recompute})
        s = Stages(RunDir(tmp_path / str(recompute)), settings, Ranks(), Sandboxes(), lambda line: None)
        torch.manual_seed(0)
        model = Model(SMALL)
        calls = count_calls(model)
        optimizer = s.optimizer(model, 0.1)
        points = [train_step(model, rows, optimizer, s.ranks, lr=1e-3, balance=0.1, clip=1.0) for _ in range(2)]
        found.append((points, [weight.detach().clone() for weight in model.parameters()]))
        assert len(calls) == 2 * SMALL.num_hidden_layers * (2 if recompute else 1)
    (points, weights), (again, same) = found
    assert points == again and all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))


def count_calls(model: Model) -> list[int]:
    """The layers that are computed from now on, by their numbers."""
    calls: list[int] = []
    model.watch = lambda layer, part, x: calls.append(layer) if part == "attention" else None
    return calls
