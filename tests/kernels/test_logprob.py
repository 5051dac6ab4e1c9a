"""Log-probabilities of an output layer in pieces, against whole logits in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.logprob import PIECE, logprob_entropy

CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 5e-2}


def exact(hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    every = (hidden @ weight.T).log_softmax(-1)
    return every[rows, tokens], -(every.exp() * every).sum(-1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9999),
    st.sampled_from([1, 2, 31, PIECE, PIECE + 1, 2 * PIECE + 7]),
    st.sampled_from([2, 7, 64]),
    st.sampled_from(list(CLOSE)),
    st.sampled_from([0.1, 1.0, 8.0]),
)
def test_values_and_gradients_are_those_of_whole_logits(seed: int, rows: int, vocabulary: int, dtype, size: float):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 16, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 16, generator=g) * size / 4).to(dtype).requires_grad_()
    sampled = int(torch.randint(0, 2 * rows, (1,), generator=g))
    at = torch.randint(0, rows, (sampled,), generator=g)
    tokens = torch.randint(0, vocabulary, (sampled,), generator=g)
    pull = torch.randn(sampled, generator=g)
    twins = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logprob, entropy = logprob_entropy(hidden, weight, at, tokens)
    expected, expected_entropy = exact(*twins, at, tokens)
    assert logprob.dtype == entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not entropy.requires_grad
    close = CLOSE[dtype] * max(1, size)
    torch.testing.assert_close(logprob.double(), expected, atol=close, rtol=close)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=close, rtol=close)
    gradients = torch.autograd.grad((logprob * pull).sum(), (hidden, weight))
    slopes = torch.autograd.grad((expected * pull.double()).sum(), twins)
    for ours, true in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=close * (1 + float(true.abs().max())), rtol=close)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_logit_that_is_not_finite_spoils_its_row_and_no_other(bad: float, dtype: torch.dtype):
    hidden, weight = torch.randn(9, 4, dtype=dtype), torch.randn(40, 4, dtype=dtype)
    at, tokens = torch.arange(9), torch.arange(9)
    clean = logprob_entropy(hidden, weight, at, tokens)
    hidden[5] = torch.tensor([bad, 0, 0, 0])
    weight[11, 0] = 0.0  # a logit that is not a number, among infinite ones
    spoilt = logprob_entropy(hidden, weight, at, tokens)
    assert spoilt[0][5].isnan() and spoilt[1][5].isnan()
    other_rows = at[(at != 5)]
    assert all(f[other_rows].isfinite().all() for f in spoilt) and clean[0][5].isfinite()
