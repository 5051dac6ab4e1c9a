"""Products with weights, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.kernels import linear as module
from composer_nb.kernels.linear import grouped_mm, linear, matmul

DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.sampled_from([8, 24, 96]), st.sampled_from([8, 40]))
def test_products_are_those_of_float64(rows: int, inner: int, outer: int):
    x, w = normal(rows, rows, inner), normal(1, outer, inner)
    exact = x.double() @ w.double().T
    for got in (linear(x, w), matmul(x, w.T)):
        assert got.shape == (rows, outer)
        torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("slow", [True, False])
def test_bf16_is_rounded_once_whatever_the_processor_has(slow: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HALF_IS_SLOW", slow)
    x, w = (normal(n, 30, 64).bfloat16().requires_grad_() for n in range(2))
    stack = normal(2, 3, 64, 40).bfloat16().requires_grad_()
    ends = torch.tensor([10, 10, 30], dtype=torch.int32)
    parts = [x[:10], x[10:10], x[10:]]
    grouped = torch.cat([part.double() @ each.double() for part, each in zip(parts, stack, strict=True)])
    pairs = [(linear(x, w), x.double() @ w.double().T), (grouped_mm(x, stack, ends), grouped)]
    for got, exact in pairs:
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, atol=1e-3, rtol=2**-8)
        leaves = (x, w) if exact is pairs[0][1] else (x, stack)
        pull = normal(5, *got.shape).bfloat16()
        for one, other in zip(
            torch.autograd.grad(got, leaves, pull), torch.autograd.grad(exact, leaves, pull.double()), strict=True
        ):
            assert one.dtype == torch.bfloat16
            torch.testing.assert_close(one, other, atol=0.2, rtol=2**-6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.booleans())
def test_groups_are_multiplied_with_their_own_weights(sizes: list[int], wide: bool):
    dtype = torch.float64 if wide else torch.float32
    x, w = normal(5, sum(sizes), 16).to(dtype), normal(6, len(sizes), 16, 8).to(dtype)
    got = grouped_mm(x, w, torch.tensor(sizes).cumsum(0).int())
    parts = [a.double() @ b.double() for a, b in zip(x.split(sizes), w, strict=True)]
    torch.testing.assert_close(got.double(), torch.cat(parts), atol=1e-5, rtol=1e-5)
