"""Operations on rows between the products, in Triton: SwiGLU with its backward pass, and sums over a token's choices. No two
programs add to the same memory, so the order of every sum is fixed.

Dimensions: N tokens, K experts per token, M = N · K rows sorted by expert, D model width, I expert width, F = 2I.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.formats.microscaling import MXTensor, mx_scale_shape
from composer_nb.kernels.formats.quantize_triton import mx_codes, store_mx
from composer_nb.kernels.moe.plain import DispatchPlan
from composer_nb.kernels.moe.recipes import Format, Operand, quantise_rows
from composer_nb.kernels.triton_runtime import interpreting, ran


def columns(width: int) -> int:
    """Return the number of columns of a block: what 128-bit loads by four warps cover, or all in the interpreter, where programs
    are expensive."""
    return min(triton.next_power_of_2(width), 4096 if interpreting() else 1024)


@triton.jit
def combine_kernel(y, out, row, tokens, D: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BD + tl.arange(0, BD)
    mask = (n < tokens)[:, None] & (d < D)[None, :]
    total = tl.zeros([BN, BD], tl.float32)
    for rank in tl.static_range(K):
        source = tl.load(row + n * K + rank, mask=n < tokens, other=0).to(tl.int64)
        total += tl.load(y + source[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n[:, None].to(tl.int64) * D + d[None, :], total.to(out.dtype.element_ty), mask=mask)


def combine(y_MD: Tensor, plan: DispatchPlan) -> Tensor:
    """Return [N, D]; see `plain.PlainSteps.combine`."""
    (tokens, chosen), width = plan.row_NK.shape, y_MD.shape[1]
    out_ND = y_MD.new_empty(tokens, width)
    grid = (triton.cdiv(tokens, 4), triton.cdiv(width, columns(width)))
    combine_kernel[grid](y_MD, out_ND, plan.row_NK, tokens, D=width, K=chosen, BN=4, BD=columns(width))
    return out_ND


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    h, gate, out, q, scale, rows, INNER: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    """Compute the activation, unquantized (BLOCK 0) or as MXFP8 with a scale per BLOCK columns."""
    m, i = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BI + tl.arange(0, BI)
    mask = (m < rows)[:, None] & (i < INNER)[None, :]
    at = m[:, None].to(tl.int64) * (2 * INNER) + i[None, :]
    a = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(h + at + INNER, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + m, mask=m < rows, other=0.0)
    act = (a / (1.0 + tl.exp(-a)) * b * g[:, None]).to(h.dtype.element_ty)
    if BLOCK:
        code, byte = mx_codes(act.to(tl.float32), 1, BLOCK, True)
        store_mx(q, scale, code, byte, 0, tl.program_id(0) * BM, tl.program_id(1) * BI, rows, INNER, 1, BLOCK, PACKED)
    else:
        tl.store(out + m[:, None].to(tl.int64) * INNER + i[None, :], act, mask=mask)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    d, h, gate, dh, act, dgate, q, scale, rows, INNER: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr, BM: tl.constexpr,
    BI: tl.constexpr,
):  # fmt: skip
    """Process a block of whole rows, so that one program sums the gate's gradient. With s = sigmoid(a):
    da = d·g·b·s·(1 + a·(1 − s)), db = d·g·a·s, dg = Σ d·a·s·b."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    g = tl.load(gate + m, mask=m < rows, other=0.0)[:, None]
    total = tl.zeros([BM], tl.float32)
    for i0 in range(0, INNER, BI):
        i = i0 + tl.arange(0, BI)
        mask = (m < rows)[:, None] & (i < INNER)[None, :]
        at_i, at = m[:, None].to(tl.int64) * INNER + i[None, :], m[:, None].to(tl.int64) * (2 * INNER) + i[None, :]
        a = tl.load(h + at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(h + at + INNER, mask=mask, other=0.0).to(tl.float32)
        slope = tl.load(d + at_i, mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-a))
        plain = a * s * b
        total += tl.sum(slope * plain, 1)
        da = (slope * g * b * s * (1.0 + a * (1.0 - s))).to(h.dtype.element_ty)
        db = (slope * g * a * s).to(h.dtype.element_ty)
        tl.store(dh + at, da, mask=mask)
        tl.store(dh + at + INNER, db, mask=mask)
        tl.store(act + at_i, (plain * g).to(h.dtype.element_ty), mask=mask)
        if BLOCK:
            row = tl.program_id(0) * BM
            code, byte = mx_codes(da.to(tl.float32), 1, BLOCK, True)
            store_mx(q, scale, code, byte, 0, row, i0, rows, 2 * INNER, 1, BLOCK, PACKED)
            code, byte = mx_codes(db.to(tl.float32), 1, BLOCK, True)
            store_mx(q, scale, code, byte, 0, row, INNER + i0, rows, 2 * INNER, 1, BLOCK, PACKED)
    tl.store(dgate + m, total, mask=m < rows)


MX_BLOCK: dict[Format | None, int] = {"mxfp8": 32, "fp8_block128": 128}
"""Formats that are quantized in the same pass; NVFP4 needs a whole row first."""


def swiglu_shape(width: int, block: int) -> tuple[int, int]:
    """Return the rows and columns of a tile. A quantized tile must end where half a row ends, because it would otherwise store
    into the other half."""
    most = 4096 if interpreting() else 512
    return 4, min(width & -width if block else triton.next_power_of_2(width), most)


def _room(rows: int, width: int, block: int, like: Tensor) -> MXTensor | None:
    if not block:
        return None
    shape = torch.Size((rows, width))
    q = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    scale = like.new_empty(mx_scale_shape(shape, block, 1), dtype=torch.uint8)
    return MXTensor(qdata=q, scale=scale, block=block, made_by=ran())


def _parts(quantized: MXTensor | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    return (unused, unused) if quantized is None else (quantized.qdata.view(torch.uint8), quantized.scale)


def _packed(half: int, block: int, wide: int) -> bool:
    """Return whether four scales can be stored as a word."""
    return bool(block) and half % (4 * block) == 0 and wide >= 4 * block


def swiglu(h_MF: Tensor, gate_M: Tensor, format: Format | None) -> Operand:
    """Return the activation; see `plain.PlainSteps.swiglu`."""
    rows, half = h_MF.shape[0], h_MF.shape[1] // 2
    block = MX_BLOCK.get(format, 0)
    act_MI = h_MF.new_empty(0 if block else rows, half)
    quantized = _room(rows, half, block, h_MF)
    high, wide = swiglu_shape(half, block)
    swiglu_kernel[(triton.cdiv(rows, high), triton.cdiv(half, wide))](
        h_MF, gate_M, act_MI, *_parts(quantized, act_MI), rows, INNER=half, BLOCK=block, PACKED=_packed(half, block, wide),
        BM=high, BI=wide,
    )  # fmt: skip
    return quantized or quantise_rows(act_MI, format, "triton")


def swiglu_backward(
    d_MI: Tensor, h_MF: Tensor, gate_M: Tensor, format: Format | None
) -> tuple[Tensor, Operand, Tensor, Tensor]:
    """Return the gradients; see `plain.PlainSteps.swiglu_backward`."""
    rows, half = d_MI.shape
    block = MX_BLOCK.get(format, 0)
    dh_MF, act_MI, dgate_M = torch.empty_like(h_MF), torch.empty_like(d_MI), torch.empty_like(gate_M)
    quantized = _room(rows, 2 * half, block, h_MF)
    high, wide = swiglu_shape(half, block)
    swiglu_backward_kernel[(triton.cdiv(rows, high),)](
        d_MI, h_MF, gate_M, dh_MF, act_MI, dgate_M, *_parts(quantized, act_MI), rows, INNER=half, BLOCK=block,
        PACKED=_packed(half, block, wide), BM=high, BI=wide,
    )  # fmt: skip
    return dh_MF, quantized or quantise_rows(dh_MF, format, "triton"), act_MI, dgate_M
