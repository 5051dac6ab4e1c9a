"""The experts in torch alone, optimized for a CPU: tokens grouped by expert, two grouped GEMMs with SwiGLU between, combine.
Number formats and Triton are in `layer.py`.

Dimensions: N tokens, D model width, E experts, K experts per token, M = N · K rows, P rows with padding, H expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import compiled
from composer_nb.kernels.linear import HALF_IS_SLOW, grouped_mm
from composer_nb.kernels.moe.swiglu import swiglu

ALIGN = 32
"""For bf16 on a CPU, the rows of an expert are padded to a multiple of this: the GEMM is compiled again, in a millisecond, for
every number of rows that is not cached."""


def grouped_experts(x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_in_EDF: Tensor, w_out_EHD: Tensor) -> Tensor:
    """Return the experts' output, [N, D] in the dtype of `x_ND`. `w_in_EDF` has gate and up side by side, F = 2H.

    A token's K results are summed in the order of its experts, so that only their recorded order, and no other token, affects the
    sum. Padding rows (`ALIGN`) contain some token with gate 0: their results and gradients are zero.
    """
    chosen = experts_NK.shape[1]
    experts_M = experts_NK.reshape(-1)
    order_M = torch.argsort(experts_M, stable=True)
    counts_E = torch.bincount(experts_M, minlength=w_in_EDF.shape[0])
    align = ALIGN if x_ND.dtype == torch.bfloat16 and x_ND.device.type == "cpu" and not HALF_IS_SLOW else 1
    room_E = -(-counts_E // align) * align
    offsets_E = room_E.cumsum(0)
    shift_E = (offsets_E - room_E) - (counts_E.cumsum(0) - counts_E)
    at_M = torch.arange(len(order_M), device=order_M.device) + shift_E[experts_M[order_M]]
    place_NK = torch.empty_like(order_M).scatter_(0, order_M, at_M).view(-1, chosen)
    rows = int(offsets_E[-1]) if align > 1 else len(order_M)
    token_P = order_M.new_zeros(rows).scatter_(0, at_M, order_M // chosen)
    gate_P = x_ND.new_zeros(rows).scatter(0, at_M, gates_NK.reshape(-1)[order_M].to(x_ND.dtype))
    ends_E = offsets_E.to(torch.int32)
    hidden_PF = grouped_mm(_ScatterRows.apply(x_ND, token_P, place_NK), w_in_EDF, ends_E)
    act_PH = swiglu(hidden_PF, gate_P)
    return _Combine.apply(grouped_mm(act_PH, w_out_EHD, ends_E), token_P, place_NK)


def _gathered_sum(x_PD: Tensor, place_NK: Tensor) -> Tensor:
    """Return [N, D], the sum of each token's K rows, in order."""
    if x_PD.dtype == torch.float32 and x_PD.device.type == "cpu":
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
