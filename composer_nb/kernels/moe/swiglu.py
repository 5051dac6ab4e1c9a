"""SwiGLU times the gate of the router, forward and backward without intermediate copies.

    y = silu(a) · b · g         [M, H] from a and b, the halves of a row of [M, 2H], and g, one number per row

Applying the gate before the second product is equivalent to applying it to the results, on H numbers per row instead of D. In
float32 on a CPU, both passes are compiled. Otherwise they consist of torch operations, which also test the kernels.

Dimensions: M rows, H expert width, F = 2H.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import compiled, dot3, exp2


def swiglu(hidden_MF: Tensor, gate_M: Tensor | None = None) -> Tensor:
    """Return silu(hidden[:, :H]) · hidden[:, H:] · gate, [M, H]. `gate_M` has the dtype of `hidden_MF`; None is 1."""
    if gate_M is None:
        gate_M = hidden_MF.new_ones(len(hidden_MF))
    return _SwiGlu.apply(hidden_MF, gate_M)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_MF: Tensor, gate_M: Tensor) -> Tensor:
        hidden_MF, gate_M = hidden_MF.contiguous(), gate_M.contiguous()
        ctx.save_for_backward(hidden_MF, gate_M)
        a_MH, b_MH = hidden_MF.chunk(2, dim=-1)
        if not _plain(hidden_MF):
            return F.silu(a_MH).mul_(b_MH).mul_(gate_M[:, None])
        y_MH = hidden_MF.new_empty(a_MH.shape)
        _forward(hidden_MF.detach().numpy(), gate_M.detach().numpy(), y_MH.numpy())
        return y_MH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden_MF, gate_M = ctx.saved_tensors
        dy_MH = gradients[0].contiguous()
        d_MF, d_M = torch.empty_like(hidden_MF), torch.empty_like(gate_M)
        if _plain(hidden_MF):
            arrays = (x.detach().numpy() for x in (dy_MH, hidden_MF, gate_M, d_MF, d_M))
            _backward(*arrays)
            return d_MF, d_M
        (a_MH, b_MH), (da_MH, db_MH) = hidden_MF.chunk(2, dim=-1), d_MF.chunk(2, dim=-1)
        act_MH = F.silu(a_MH)
        torch.linalg.vecdot(act_MH * b_MH, dy_MH, out=d_M)
        scaled_MH = dy_MH * gate_M[:, None]
        torch.mul(scaled_MH, act_MH, out=db_MH)
        da_MH.copy_(torch.ops.aten.silu_backward(scaled_MH.mul_(b_MH), a_MH))
        return d_MF, d_M


def _plain(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu"


LOG2E = math.log2(math.e)


@compiled("f4[::1], f4[::1]")
def _sigmoids(x, out):  # type: ignore[no-untyped-def]
    """Compute out = 1 / (1 + 2^(-x / ln 2)) at |x|; for negative x it is one minus that."""
    for i in range(len(x)):
        e = exp2(-abs(x[i]) * np.float32(LOG2E))
        above = np.float32(1.0) if x[i] >= 0 else e
        out[i] = above / (np.float32(1.0) + e)


@compiled("f4[:,::1], f4[::1], f4[:,::1]")
def _forward(hidden, gate, y):  # type: ignore[no-untyped-def]
    rows, half = y.shape
    s = np.empty(half, np.float32)
    for m in range(rows):
        a, b = hidden[m, :half], hidden[m, half:]
        _sigmoids(a, s)
        for h in range(half):
            y[m, h] = a[h] * s[h] * b[h] * gate[m]


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4[:,::1], f4[::1]")
def _backward(dy, hidden, gate, d, dgate):  # type: ignore[no-untyped-def]
    """Compute da = dy·g·b·s·(1 + a·(1 − s)), db = dy·g·a·s, dg = Σ dy·a·s·b, with s = sigmoid(a)."""
    rows, half = dy.shape
    s = np.empty(half, np.float32)
    for m in range(rows):
        a, b, g = hidden[m, :half], hidden[m, half:], gate[m]
        _sigmoids(a, s)
        for h in range(half):
            d[m, h] = dy[m, h] * g * b[h] * s[h] * (np.float32(1.0) + a[h] * (np.float32(1.0) - s[h]))
            s[h] = a[h] * s[h]
        dgate[m] = dot3(dy[m], s, b)
        for h in range(half):
            d[m, half + h] = dy[m, h] * g * s[h]
