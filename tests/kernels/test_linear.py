"""Products with weights, in every dtype."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.booleans())
def test_groups_are_multiplied_with_their_own_weights(sizes: list[int], wide: bool):
    dtype = torch.float64 if wide else torch.float32
    x, w = normal(5, sum(sizes), 16).to(dtype), normal(6, len(sizes), 16, 8).to(dtype)
    got = grouped_mm(x, w, torch.tensor(sizes).cumsum(0).int())
    parts = [a.double() @ b.double() for a, b in zip(x.split(sizes), w, strict=True)]
    torch.testing.assert_close(got.double(), torch.cat(parts), atol=1e-5, rtol=1e-5)
