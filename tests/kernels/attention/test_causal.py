"""Causal attention within rows: against one query at a time in float64, gradients against autograd's, in both forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.attention import causal
from composer_nb.kernels.attention.causal import LONG, causal_attention

Case = tuple[Tensor, Tensor, Tensor, list[int], float]


def drawn(lengths: list[int], each: int, groups: int, width: int, width_v: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn(tokens, each * groups, width, generator=generator)
    k = torch.randn(tokens, groups, width, generator=generator)
    v = torch.randn(tokens, groups, width_v, generator=generator)
    return q, k, v, lengths, width**-0.5


def by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    out, begin = [], 0
    for length in lengths:
        for n in range(begin, begin + length):
            weight = (torch.einsum("qc,tqc->qt", q[n], k[begin : n + 1]) * scale).softmax(-1)
            out.append(torch.einsum("qt,tqc->qc", weight, v[begin : n + 1]))
        begin += length
    return torch.stack(out)


def with_gradients(form, case: Case, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (x.to(dtype).requires_grad_() for x in case[:3])
    out = form(q, k, v, *case[3:])
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), pull)]


shapes = st.tuples(
    st.lists(st.integers(1, 70), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([1, 4, 7, 32]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 1 << 20),
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from([1, 16, 128]))
def test_blocks_equal_one_query_at_a_time_in_float64_and_so_do_gradients(shape, block):
    case = drawn(*shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "LONG", 1)
        patch.setattr(causal, "BLOCK", block)
        got = with_gradients(causal_attention, case, torch.float32)
    for ours, exact in zip(got, with_gradients(by_hand, case, torch.float64), strict=True):
        assert torch.allclose(ours.double(), exact, rtol=1e-5, atol=3e-6 * (1 + float(exact.abs().max())))


@settings(max_examples=20, deadline=None)
@given(shapes)
def test_short_rows_and_other_dtypes_equal_it_too(shape):
    case = drawn(*shape)
    exact = with_gradients(by_hand, case, torch.float64)
    for ours, wanted in zip(with_gradients(causal_attention, case, torch.float64), exact, strict=True):
        assert torch.allclose(ours, wanted, rtol=1e-10, atol=1e-12)
    for ours, wanted in zip(with_gradients(causal_attention, case, torch.float32), exact, strict=True):
        assert torch.allclose(ours.double(), wanted, rtol=1e-5, atol=3e-6 * (1 + float(wanted.abs().max())))


def test_a_long_row_beside_short_ones_goes_by_blocks(monkeypatch):
    def refuse(*given: object, **named: object) -> None:
        raise AssertionError("torch's attention was called")

    case = drawn([3, LONG, 1], 2, 2, 16, 16)
    exact = by_hand(*(x.double() for x in case[:3]), *case[3:])
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    assert torch.allclose(causal_attention(*case).double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="was called"):
        causal_attention(*drawn([3, LONG - 1, 1], 2, 2, 16, 16))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_result_and_in_the_gradients(bad):
    case = drawn([LONG], 2, 1, 8, 8)
    case[1][200] = bad
    out, dq, dk, _ = with_gradients(causal_attention, case, torch.float32)
    assert out[:200].isfinite().all() and not out[200:].isfinite().any()
    before = 200 // causal.BLOCK * causal.BLOCK  # 0 times what is not finite is not 0, in the products of its block
    assert dq[:before].isfinite().all() and not dq[200:].isfinite().any() and not dk[:200].isfinite().any()
