"""Causal attention within rows: against one query at a time in float64, gradients against autograd's, in both forms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.attention import causal
from composer_nb.kernels.attention.causal import LONG, causal_attention

Case = tuple[Tensor, Tensor, Tensor, list[int], float]


def random_case(lengths: list[int], heads_per_group: int, groups: int, width: int, width_v: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn(tokens, heads_per_group * groups, width, generator=generator)
    k = torch.randn(tokens, groups, width, generator=generator)
    v = torch.randn(tokens, groups, width_v, generator=generator)
    return q, k, v, lengths, width**-0.5


def by_hand(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], scale: float) -> Tensor:
    heads_per_group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads_per_group, 1), v.repeat_interleave(heads_per_group, 1)
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


lengths, counts = st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(1, 3)
widths = st.sampled_from([1, 4, 7, 32]), st.sampled_from([1, 4, 16])
shapes = st.tuples(lengths, counts, counts, *widths, st.integers(0, 1 << 20))


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([(1, 1), (1, 16), (1, 128), (LONG, 16)]), st.booleans())
def test_values_and_gradients_equal_one_query_at_a_time_in_float64(shape, form: tuple[int, int], wide: bool):
    """Covers the blocked form, and the short rows and other dtypes that go through torch's attention."""
    case, dtype = random_case(*shape), torch.float64 if wide else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal, "LONG", form[0])
        patch.setattr(causal, "BLOCK", form[1])
        actual = with_gradients(causal_attention, case, dtype)
    for ours, exact in zip(actual, with_gradients(by_hand, case, torch.float64), strict=True):
        limit = 1e-12 if wide else 3e-6 * (1 + float(exact.abs().max()))
        assert torch.allclose(ours.double(), exact, rtol=1e-10 if wide else 1e-5, atol=limit)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_the_result_and_in_the_gradients(bad):
    case = random_case([LONG], 2, 1, 8, 8)
    case[1][200] = bad
    out, dq, dk, _ = with_gradients(causal_attention, case, torch.float32)
    assert out[:200].isfinite().all() and not out[200:].isfinite().any()
    # 0 times a number that is not finite is not 0, so it reaches its whole block.
    before = 200 // causal.BLOCK * causal.BLOCK
    assert dq[:before].isfinite().all() and not dq[200:].isfinite().any() and not dk[:200].isfinite().any()
