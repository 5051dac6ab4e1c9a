"""The predicted size of a delta against exact counts: weights whose distribution is known, and a network that is trained."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from composer_nb.labs.weights.prediction import (
    Profile,
    adamw_direction,
    exact,
    exponents,
    predict,
    profile,
    warm_up,
)

RATES = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize("sigma", [0.006, 0.02, 0.05])
@pytest.mark.parametrize("size", [0.02, 0.16, 0.39])
def test_within_two_per_cent_where_master_weights_are_spread(lr: float, sigma: float, size: float):
    """Counted in float64: casts of w and of w − lr · u, for normal w and u."""
    random = torch.Generator().manual_seed(0)
    w, u = (torch.randn(400_000, generator=random, dtype=torch.float64) for _ in range(2))
    w, u = w * sigma, u * size / math.sqrt(2 / math.pi)
    counted = float((w.bfloat16() != (w - lr * u).bfloat16()).double().mean())
    predicted = predict(profile(w, u), lr).changed_fraction
    assert predicted == pytest.approx(counted, rel=0.02, abs=4 * math.sqrt(counted / 400_000))


@pytest.fixture(scope="module")
def trained() -> dict[float, tuple[list[Profile], list[float]]]:
    """By learning rate: profiles measured before each of some steps of AdamW, and exact counts of what each step changed."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 200, (64, 17))
    embed, layer, head = nn.Embedding(200, 48), nn.Linear(48, 96), nn.Linear(96, 200)
    parameters = [p for part in (embed, layer, head) for p in part.parameters()]
    found = {}
    for lr in RATES:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
        profiles, counts = [], []
        for step in range(120):
            if step == 80:
                optimizer.param_groups[0]["lr"] = lr
            if step >= 100:
                state = [optimizer.state[p] for p in parameters]
                profiles.append(sum((_measured(p, s) for p, s in zip(parameters, state, strict=True)), _nothing()))
            before = {str(i): p.detach().clone() for i, p in enumerate(parameters)}
            rows = tokens[torch.randint(0, 64, (16,))]
            logits = head(torch.relu(layer(embed(rows[:, :-1]))))
            optimizer.zero_grad()
            nn.functional.cross_entropy(logits.reshape(-1, 200), rows[:, 1:].reshape(-1)).backward()
            optimizer.step()
            if step >= 100:
                counts.append(exact(before, {str(i): p for i, p in enumerate(parameters)}))
        found[lr] = profiles, counts
    return found


def _measured(p: Tensor, state: dict[str, Tensor]) -> Profile:
    u = adamw_direction(
        state["exp_avg"], state["exp_avg_sq"], int(state["step"]), betas=(0.9, 0.95), decay=0.01 * p.detach().double()
    )
    return profile(p, u)


def _nothing() -> Profile:
    return Profile(np.zeros_like(profile(torch.ones(1), torch.ones(1)).counts_EB))


@pytest.mark.parametrize("lr", RATES)
def test_within_ten_per_cent_on_a_network_that_is_being_trained(trained, lr: float):
    """Each step is predicted from the moments that the step before left."""
    profiles, counts = trained[lr]
    predicted = [predict(found, lr).changed_fraction for found in profiles]
    assert np.mean(predicted) == pytest.approx(np.mean(counts), rel=0.1)
    assert predicted == pytest.approx(counts, rel=0.2), "and no single step is far off"


def test_the_direction_is_that_of_the_optimiser():
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for step in range(1, 4):
        before = p.detach().clone()
        p.grad = torch.randn(50, dtype=torch.float64)
        optimizer.step()
        state = optimizer.state[p]
        u = adamw_direction(state["exp_avg"], state["exp_avg_sq"], step, betas=(0.9, 0.99), decay=0.1 * before)
        torch.testing.assert_close(before - 1e-3 * u, p.detach())
    with pytest.raises(ValueError, match="before its first step"):
        adamw_direction(p, p, 0, betas=(0.9, 0.99))


def test_exponents_are_those_of_frexp():
    w = torch.tensor([1.0, 1.9, 2.0, -0.5, 0.0, 3e-39, 1e38])
    cast = w.bfloat16().float().numpy()
    known = [np.frexp(abs(v))[1] - 1 + 127 if abs(v) >= 2.0**-126 else 0 for v in cast]
    assert exponents(w).tolist() == known


def test_the_bytes_are_the_entropy_of_the_steps():
    """One exponent, one |u|: p of the weights move by one step of the grid. Shannon's formula, and a bit for the sign."""
    found = profile(torch.full((1 << 16,), 0.02), torch.full((1 << 16,), 0.25))
    one = predict(found, 1e-5)
    p = one.changed_fraction
    known = -p * math.log2(p) - (1 - p) * math.log2(1 - p) + p
    assert 0.01 < p < 0.05 and one.bytes == pytest.approx((1 << 16) * known / 8)
    assert predict(found, 0.0).bytes == predict(found, 0.0).changed_fraction == 0
    assert predict(found, 1e9).bytes <= 2 << 16, "never more than the weights"


def test_the_first_steps_change_less_until_masters_are_spread():
    random = torch.Generator().manual_seed(1)
    found = profile(0.02 * torch.randn(20_000, generator=random), 0.2 * torch.randn(20_000, generator=random))
    shares = warm_up(found, 1e-6, 400)
    settled = predict(found, 1e-6).changed_fraction
    assert shares[0] < 0.4 * settled and shares[:10].mean() < 0.7 * shares[-100:].mean()
    assert shares[-100:].mean() == pytest.approx(settled, rel=0.25)
    assert np.array_equal(shares, warm_up(found, 1e-6, 400)), "the same seed, the same numbers"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: profile(torch.ones(2), torch.ones(3)), "directions"),
        (lambda: profile(torch.ones(2), torch.tensor([1.0, math.nan])), "finite"),
        (lambda: predict(profile(torch.ones(2), torch.ones(2)), -1e-6), "lr=-1e-06"),
    ],
)
def test_what_can_not_be_is_refused(call, named: str):
    with pytest.raises(ValueError, match=named):
        call()
