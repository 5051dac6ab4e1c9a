"""Products in tiles: right, and the same for a row whatever is beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.kernels import linear as module
from composer_nb.kernels.linear import TILE, grouped_mm, linear, matmul, sigmoid, silu

DTYPES = [torch.float32, torch.bfloat16]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.sampled_from([8, 24, 96]), st.sampled_from([8, 40]), st.sampled_from([0, 4, TILE]))
def test_products_are_those_of_float64(rows: int, inner: int, outer: int, tile: int):
    x, w = normal(rows, rows, inner), normal(1, outer, inner)
    exact = x.double() @ w.double().T
    for got in (linear(x, w, tile), matmul(x, w.T, tile)):
        assert got.shape == (rows, outer)
        torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("tile", [0, TILE])
def test_bf16_is_rounded_once_whatever_the_processor_has(slow: bool, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "HALF_IS_SLOW", slow)
    x, w = (normal(n, 30, 64).bfloat16().requires_grad_() for n in range(2))
    stack = normal(2, 3, 64, 40).bfloat16().requires_grad_()
    ends = torch.tensor([10, 10, 30], dtype=torch.int32)
    parts = [x[:10], x[10:10], x[10:]]
    grouped = torch.cat([part.double() @ each.double() for part, each in zip(parts, stack, strict=True)])
    pairs = [(linear(x, w, tile), x.double() @ w.double().T), (grouped_mm(x, stack, ends, tile), grouped)]
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


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(DTYPES))
def test_a_row_is_the_same_whatever_is_beside_it(data: st.DataObject, dtype: torch.dtype):
    inner, outer = data.draw(st.sampled_from([(64, 8), (128, 384), (96, 40)]))
    x, w = normal(3, 90, inner).to(dtype), normal(4, outer, inner).to(dtype)
    alone = linear(x[:1], w, TILE)[0]
    others = data.draw(st.permutations(range(1, 90)))[: data.draw(st.integers(0, 60))]
    place = data.draw(st.integers(0, len(others)))
    together = torch.stack([*(x[o] for o in others[:place]), x[0], *(x[o] for o in others[place:])])
    assert torch.equal(linear(together, w, TILE)[place], alone)


def test_without_tiles_it_is_not_so():
    """Which is what tiles are for; should the library one day be invariant by itself, they can go."""
    x, w = normal(3, 64, 512), normal(4, 1536, 512)
    assert not torch.equal(linear(x[:1], w)[0], linear(x, w)[0])


@pytest.mark.parametrize("form", [sigmoid, silu])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [6, 8, 61, 1000])
def test_nor_is_what_stands_between_products(form: Any, dtype: torch.dtype, width: int):
    x = normal(9, 40, width).to(dtype) * 30
    whole = form(x, TILE)
    for rows in (1, 2, 3, 7, 16, 33):
        assert torch.equal(form(x[:rows].clone(), TILE), whole[:rows])
    close = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(whole, form(x), atol=close, rtol=close)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.sampled_from([0, 4, TILE]), st.booleans())
def test_groups_are_multiplied_with_their_own_weights(sizes: list[int], tile: int, wide: bool):
    dtype = torch.float64 if wide else torch.float32
    x, w = normal(5, sum(sizes), 16).to(dtype), normal(6, len(sizes), 16, 8).to(dtype)
    got = grouped_mm(x, w, torch.tensor(sizes).cumsum(0).int(), tile)
    parts = [a.double() @ b.double() for a, b in zip(x.split(sizes), w, strict=True)]
    torch.testing.assert_close(got.double(), torch.cat(parts), atol=1e-5, rtol=1e-5)


def test_gradients_pass_through_tiles():
    x, w = normal(7, 21, 6).double().requires_grad_(), normal(8, 5, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: linear(x, w, 4), (x, w))
