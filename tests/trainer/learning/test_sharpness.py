"""The scale of all logits as one number more to learn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from composer_nb.trainer.learning.optimizer import FlatOptimizer, Scaled
from composer_nb.trainer.models.transformer import Model


class Choice(nn.Module):
    """Logits of four actions: features times a gain, each feature an action. The first feature is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.gain = nn.Parameter(torch.tensor([1.0, 0.9, 1.1, 1.0]))

    def loss(self, scale: Tensor | float = 1.0) -> Tensor:
        """Minus the chance of the best action, whatever `other` adds to all."""
        logits = torch.tensor([1.0, 0.4, 0.2, -0.5]) * self.gain * scale + self.other.sum()
        return -logits.softmax(-1)[0] + (self.other**2).sum()


def step(model: Choice, optimizer: FlatOptimizer, lr: float = 1e-3) -> None:
    optimizer.zero_()
    model.loss().backward()
    optimizer.step(lr, 1e9)


def test_it_is_adam_on_a_factor_of_the_gain() -> None:
    ours, theirs = Choice(), Choice()
    optimizer = FlatOptimizer(ours, scaled=(ours.gain, 20.0))
    weights = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    log = nn.Parameter(torch.zeros(()))
    factor = torch.optim.Adam([log], lr=20e-3, betas=(0.9, 0.95))
    for _ in range(30):
        step(ours, optimizer)
        weights.zero_grad()
        factor.zero_grad()
        theirs.loss(log.exp()).backward()
        factor.step()
        with torch.no_grad():
            theirs.gain *= log.exp()
            log.zero_()
        weights.step()
    torch.testing.assert_close(ours.gain, theirs.gain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.other, theirs.other, atol=1e-6, rtol=1e-6)
    assert optimizer.logit_scale == pytest.approx(float(ours.gain.detach().mean()), rel=0.1)
    assert float(ours.gain.detach().mean()) > 1.5  # thirty steps of a thousandth would have made 3 %


def test_nothing_else_moves_otherwise_than_without_it(make_model) -> None:
    flats: list[dict[str, Tensor]] = []
    for rate in (0.0, 8.0):
        model: Model = make_model(1)
        optimizer = FlatOptimizer(model, scaled=(model.final_norm, rate))
        before = model.final_norm.detach().clone()
        model(torch.tensor([[1, 2, 3, 4]]))[0].logsumexp(-1).sum().backward()
        optimizer.step(1e-2, 1e9)
        flats.append({name: p.detach().clone() for name, p in model.named_parameters()})
    plain, scaled = flats
    assert all(torch.equal(plain[name], scaled[name]) for name in plain if name != "final_norm")
    # The first step of Adam is the learning rate, against the gradient: smaller logits have a smaller logsumexp.
    moved = scaled["final_norm"] - plain["final_norm"]
    torch.testing.assert_close(moved, before * (math.exp(-8e-2) - 1), atol=1e-6, rtol=1e-5)


def test_it_resumes_from_disk_bit_for_bit(tmp_path: Path) -> None:
    model, other = Choice(), Choice()
    optimizer = FlatOptimizer(model, scaled=(model.gain, 20.0), published=torch.bfloat16)
    for number in range(9):
        if number == 4:
            save_file(optimizer.state(), tmp_path / "state.safetensors")
        step(model, optimizer)
    resumed = FlatOptimizer(other, scaled=(other.gain, 20.0), published=torch.bfloat16)
    step(other, resumed, 0.1)  # what it did before must not matter
    resumed.load(load_file(tmp_path / "state.safetensors"))
    for _ in range(5):
        step(other, resumed)
    kept, again = optimizer.state(), resumed.state()
    assert kept.keys() == again.keys() >= {"master", "scale"}
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("learnt", [True, False])
def test_a_state_with_a_scale_is_for_an_optimiser_with_one(learnt: bool) -> None:
    model, other = Choice(), Choice()
    scaled: Scaled = (model.gain, 20.0 * learnt)
    state = FlatOptimizer(model, scaled=scaled).state()
    optimizer = FlatOptimizer(other, scaled=(other.gain, 20.0 * (not learnt)))
    with pytest.raises(ValueError, match=r"rl\.scale_rate"):
        optimizer.load(state)
