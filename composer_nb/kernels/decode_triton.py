"""The experts for a few tokens, in two kernels in Triton: nothing is sorted, padded, scattered or combined (the idea of Cursor's
"warp decode", cursor.com/blog, April 2026, and of its two kernels).

With few tokens an expert has one or two rows, and time is what it takes to read weights. So each program owns a few output
neurons and reads their weights once, with every lane of the GPU reading memory that lies side by side:

    up     (choice, BI neurons): silu(x · W_gateᵀ) · (x · W_upᵀ) · gate of the choice, kept in float32
    down   (token, BD neurons): the sum over the token's choices, in order, of that times W_downᵀ

Activations are not quantised and no sum leaves float32. Not for many tokens: a weight is read again for each of its rows.

Dimensions: N tokens, K experts a token, D model width, I expert width, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.aot import Expect, Spec
from composer_nb.kernels.triton_runtime import interpreting, repair_interpreter

repair_interpreter()

MOST_TOKENS = 64
"""Up to here two kernels that read weights once a row beat sorting (to be measured on each GPU)."""


@triton.jit
def decode_up_kernel(  # type: ignore[no-untyped-def]
    x, w, experts, gates, act, D: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, BI: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    choice, i = tl.program_id(0), tl.program_id(1) * BI + tl.arange(0, BI)
    expert = tl.load(experts + choice).to(tl.int64)
    at = w + expert * (2 * INNER * D) + i[:, None].to(tl.int64) * D
    gate_sum, up_sum = tl.zeros([BI, BD], tl.float32), tl.zeros([BI, BD], tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        mask = (i < INNER)[:, None] & (d < D)[None, :]
        token = tl.load(x + (choice // K).to(tl.int64) * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        gate_sum += tl.load(at + d[None, :], mask=mask, other=0.0).to(tl.float32) * token
        up_sum += tl.load(at + INNER * D + d[None, :], mask=mask, other=0.0).to(tl.float32) * token
    a, b = tl.sum(gate_sum, 1), tl.sum(up_sum, 1)
    tl.store(act + choice * INNER + i, a / (1.0 + tl.exp(-a)) * b * tl.load(gates + choice), mask=i < INNER)


@triton.jit
def decode_down_kernel(  # type: ignore[no-untyped-def]
    act, w, experts, out, D: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr
):  # fmt: skip
    token, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    total = tl.zeros([BD, BI], tl.float32)
    for place in tl.static_range(K):
        choice = token * K + place
        at = w + tl.load(experts + choice).to(tl.int64) * (D * INNER) + d[:, None].to(tl.int64) * INNER
        for i0 in range(0, INNER, BI):
            i = i0 + tl.arange(0, BI)
            hidden = tl.load(act + choice * INNER + i, mask=i < INNER, other=0.0)[None, :]
            mask = (d < D)[:, None] & (i < INNER)[None, :]
            total += tl.load(at + i[None, :], mask=mask, other=0.0).to(tl.float32) * hidden
    tl.store(out + token.to(tl.int64) * D + d, tl.sum(total, 1).to(out.dtype.element_ty), mask=d < D)


def decode_block(width: int) -> tuple[int, int]:
    """Neurons of a program, and how much of the sum it takes at a time: rows of 512 bytes in bf16."""
    return (32, triton.next_power_of_2(width)) if interpreting() else (8, 256)


def decode_experts(x_ND: Tensor, experts_NK: Tensor, gates_NK: Tensor, w_up_EFD: Tensor, w_down_EDI: Tensor) -> Tensor:
    """[N, D] in the dtype of `x_ND`, without gradients; `layer.experts` for few tokens. Weights must be contiguous."""
    (tokens, width), chosen, half = x_ND.shape, experts_NK.shape[1], w_down_EDI.shape[2]
    x_ND, experts_NK, gates_NK = (each.contiguous() for each in (x_ND, experts_NK, gates_NK.float()))
    act = gates_NK.new_empty(tokens * chosen, half)
    out_ND = x_ND.new_empty(tokens, width)
    rows, deep = decode_block(width)
    decode_up_kernel[(tokens * chosen, triton.cdiv(half, rows))](
        x_ND, w_up_EFD, experts_NK, gates_NK, act, D=width, INNER=half, K=chosen, BI=rows, BD=deep, num_warps=4
    )
    rows, deep = decode_block(half)
    decode_down_kernel[(tokens, triton.cdiv(width, rows))](
        act, w_down_EDI, experts_NK, out_ND, D=width, INNER=half, K=chosen, BD=rows, BI=deep, num_warps=4
    )
    return out_ND


SPECS = (
    Spec(
        name="decode, up",
        kernel=decode_up_kernel,
        types={"x": "*bf16", "w": "*bf16", "experts": "*i64", "gates": "*fp32", "act": "*fp32"},
        constants={"D": 2048, "INNER": 768, "K": 8, "BI": 8, "BD": 256},
        expect=Expect(narrow=4),
    ),
    Spec(
        name="decode, down",
        kernel=decode_down_kernel,
        types={"act": "*fp32", "w": "*bf16", "experts": "*i64", "out": "*bf16"},
        constants={"D": 2048, "INNER": 768, "K": 8, "BD": 8, "BI": 256},
        expect=Expect(narrow=2),
    ),
)
