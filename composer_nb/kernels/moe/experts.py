"""The experts and SwiGLU in torch alone, optimized for a CPU. Number formats and Triton are in `layer.py`.

Tokens are grouped by expert: two grouped GEMMs with SwiGLU between, combine.
SwiGLU times the gate of the router goes forward and backward without intermediate copies:

    y = silu(a) · b · g         [M, H] from a and b, the halves of a row of [M, 2H], and g, one number per row

Applying the gate before the second product is equivalent to applying it to the results, on H numbers per row instead of D. In
float32 on a CPU, both passes are compiled. Otherwise they consist of torch operations, which also test the kernels.

Dimensions: N tokens, D model width, E experts, K experts per token, M = N · K rows, P rows with padding, H expert width, F = 2H.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import LOG2E, compiled, dot3, exp2
from composer_nb.kernels.linear import HALF_IS_SLOW, compiles, grouped_mm
from composer_nb.kernels.triton_runtime import fused

# For bf16 on a CPU, the rows of an expert are padded to a multiple of this: the GEMM is compiled again, in a millisecond, for
# every number of rows that is not cached.
ALIGN = 32


def grouped_experts(x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_in_EDF: Tensor, w_out_EHD: Tensor) -> Tensor:
    """Return the experts' output, [N, D] in the dtype of `x_ND`. `w_in_EDF` has gate and up side by side, F = 2H.

    A token's K results are summed in the order of its experts, so that only their recorded order, and no other token, affects the
    sum. Padding rows (`ALIGN`) contain some token with gate 0: their results and gradients are zero.
    """
    choices = experts_NK.shape[1]
    experts_M = experts_NK.reshape(-1)
    order_M = torch.argsort(experts_M, stable=True)
    counts_E = torch.bincount(experts_M, minlength=w_in_EDF.shape[0])
    align = ALIGN if x_ND.dtype == torch.bfloat16 and x_ND.device.type == "cpu" and not HALF_IS_SLOW else 1
    padded_E = -(-counts_E // align) * align
    offsets_E = padded_E.cumsum(0)
    shift_E = (offsets_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    row_M = torch.arange(len(order_M), device=order_M.device) + shift_E[experts_M[order_M]]
    place_NK = torch.empty_like(order_M).scatter_(0, order_M, row_M).view(-1, choices)
    row_count = int(offsets_E[-1]) if align > 1 else len(order_M)
    token_P = order_M.new_zeros(row_count).scatter_(0, row_M, order_M // choices)
    gate_P = x_ND.new_zeros(row_count).scatter(0, row_M, gates_NK.reshape(-1)[order_M].to(x_ND.dtype))
    ends_E = offsets_E.to(torch.int32)
    hidden_PF = grouped_mm(_ScatterRows.apply(x_ND, token_P, place_NK), w_in_EDF, ends_E)
    act_PH = swiglu(hidden_PF, gate_P)
    return _Combine.apply(grouped_mm(act_PH, w_out_EHD, ends_E), token_P, place_NK)


def _gathered_sum(x_PD: Tensor, place_NK: Tensor) -> Tensor:
    """Return [N, D], the sum of each token's K rows, in order."""
    if compiles(x_PD) and fused("experts"):
        out_ND = x_PD.new_empty(len(place_NK), x_PD.shape[1])
        _add_up(x_PD.detach().contiguous().numpy(), place_NK.numpy(), out_ND.numpy())
        return out_ND
    return x_PD.index_select(0, place_NK.reshape(-1)).unflatten(0, place_NK.shape).sum(1)


@compiled("f4[:,::1], i8[:,::1], f4[:,::1]")
def _add_up(x, rows, out):  # type: ignore[no-untyped-def]
    for n in range(len(out)):
        out[n] = x[rows[n, 0]]
        for k in range(1, rows.shape[1]):
            row = x[rows[n, k]]
            for d in range(len(row)):
                out[n, d] += row[d]


class _ScatterRows(torch.autograd.Function):
    """Copy a token's row for each of its choices. Both this and `_Combine` know the place of each row, so neither needs atomic
    sums, and the order of sums is that of the choices."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_P: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(place_NK)
        return x_ND.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered_sum(gradients[0], *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, token_P: Tensor, place_NK: Tensor) -> Tensor:
        ctx.save_for_backward(token_P)
        return _gathered_sum(x_PD, place_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(0, *ctx.saved_tensors), None, None


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
        if not (compiles(hidden_MF) and fused("experts")):
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
        if compiles(hidden_MF) and fused("experts"):
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
