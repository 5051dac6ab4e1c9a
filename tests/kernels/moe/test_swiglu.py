"""SwiGLU with gates: both forms against the definition in float64, and their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.moe.experts import swiglu


def exact(hidden: Tensor, gate: Tensor) -> Tensor:
    a, b = hidden.double().chunk(2, -1)
    return F.silu(a) * b * gate.double()[:, None]


def drawn(seed: int, rows: int, half: int, size: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(rows, 2 * half, generator=generator) * size).to(dtype).requires_grad_()
    gate = torch.rand(rows, generator=generator).to(dtype).requires_grad_()
    return hidden, gate, torch.randn(rows, half, generator=generator).to(dtype)


CLOSE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 3e-2}


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 9999),
    st.integers(0, 20),
    st.sampled_from([1, 3, 16, 50]),
    st.sampled_from([1e-3, 1.0, 40.0]),
    st.sampled_from(list(CLOSE)),
)
def test_values_and_gradients_are_those_of_float64(seed: int, rows: int, half: int, size: float, dtype):
    hidden, gate, pull = drawn(seed, rows, half, size, dtype)
    twin, twin_gate = (x.detach().double().requires_grad_() for x in (hidden, gate))
    got, wanted = swiglu(hidden, gate), exact(twin, twin_gate)
    assert got.dtype == dtype and got.shape == (rows, half)
    found = torch.autograd.grad((got * pull).sum(), (hidden, gate))
    right = torch.autograd.grad((wanted * pull.double()).sum(), (twin, twin_gate))
    for ours, true in zip((got, *found), (wanted, *right), strict=True):
        bound = CLOSE[dtype] * (1 + size) ** 2
        torch.testing.assert_close(ours.double(), true, atol=bound * 4, rtol=CLOSE[dtype] * 8)
