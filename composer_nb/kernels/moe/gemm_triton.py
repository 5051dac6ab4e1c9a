"""Grouped GEMM in Triton: the rows of each expert times its weight, quantized or not, and the gradients of the weights.

    product   c[m] = a[row m] · b[expert of m]ᵀ     forward, and with the transposed weight the gradient of the rows
    outer     dw[e] = Σ over rows of e of g ⊗ x     gradient of the weights

`product` is persistent: it runs one program per multiprocessor of the GPU, and each computes its tiles from the experts' ends in
device memory. Within an expert, tiles are visited in groups of GROUP tiles of rows, so that concurrent programs cover a square of
the output and share their reads in L2 (Cursor's supergroups, cursor.com/blog/kernels). Rows can be gathered through an index, so
tokens are never copied for their experts. No sum is split, and the shape of a tile does not depend on the number of rows, so the
result of a row does not depend on other rows.

Quantized operands (`scaled_product`):

    mxfp8, nvfp4     `tl.dot_scaled`. On Blackwell, this is a tensor core instruction that takes the scales. Hopper has none:
                     there `steps_triton.py` widens the operands to bf16 in memory, exactly, and multiplies these. (Triton
                     would widen in registers, which took six times as long on an H200.)
    fp8_block128     a plain float8 product for every 128 of K, multiplied by both scales and added to float32 sums: Hopper keeps
                     sums of float8 products in about 14 bits (DeepSeek-V3, arXiv 2412.19437, §3.5.2), too few for long sums.

Dimensions: M rows sorted by expert, A or K the width of the sum, B or N output width, E experts.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from composer_nb.kernels.formats.microscaling import NVFP4_BLOCK, MXTensor, NVFP4Tensor
from composer_nb.kernels.formats.quantize_triton import e8m0_value
from composer_nb.kernels.moe.plain import DispatchPlan
from composer_nb.kernels.moe.recipes import Operand
from composer_nb.kernels.triton_runtime import interpreting

# Number of programs in the interpreter, small so that each has several tiles.
INTERPRETED_PROGRAMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Shape of a tile, and its compilation options."""

    m: int = 128
    n: int = 256
    k: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3


INTERPRETED = Tiles(m=32, n=64, k=64, group=2)


def tiles(dtype: torch.dtype, out: torch.dtype | None = None) -> Tiles:
    """Return the tiles of operands of a dtype, with a result in `out` (by default the same dtype). A choice by the number of rows
    would make results depend on that number."""
    if interpreting():
        return INTERPRETED
    if dtype == torch.float32:
        return Tiles(n=64, k=32)
    return Tiles() if out in (None, dtype) else Tiles(n=128)  # wider results need shared memory of the stages


def outer_tiles(dtype: torch.dtype, gather: bool) -> Tiles:
    """Return the tiles of a gradient. The index of gathered rows is loaded before the rows, so two stages hold one tile."""
    shape = tiles(dtype)
    return replace(shape, stages=5) if gather else shape


@cache
def programs(device: torch.device) -> int:
    """Return the number of programs of a persistent kernel."""
    if interpreting():
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def tile_table(ends, E: tl.constexpr, BE: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return, for each expert, its first row, end, number of row tiles, and number of tiles up to its last."""
    e = tl.arange(0, BE)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    down = tl.where(e < E, (end - begin + BM - 1) // BM, 0)
    return begin, end, down, tl.cumsum(down * ((N + BN - 1) // BN), 0)


@triton.jit
def find_tile(  # type: ignore[no-untyped-def]
    t, begin, end, down, through, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return the expert, first row, end of the expert's rows, and first column of tile t."""
    across: tl.constexpr = (N + BN - 1) // BN
    expert = tl.sum((through <= t).to(tl.int32), 0)
    mine = tl.arange(0, BE) == expert
    rows = tl.sum(tl.where(mine, down, 0), 0)
    local = t - tl.sum(tl.where(mine, through - down * across, 0), 0)
    first = (local // (GROUP * across)) * GROUP
    size = tl.minimum(rows - first, GROUP)
    inner = local % (GROUP * across)
    m0 = tl.sum(tl.where(mine, begin, 0), 0) + (first + inner % size) * BM
    return expert, m0, tl.sum(tl.where(mine, end, 0), 0), (inner // size) * BN


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    a, b, c, a_scale, b_scale, ends, row_of, stride_am, stride_be, stride_bn: tl.constexpr, stride_bk: tl.constexpr,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr, SCALED: tl.constexpr, BULK_A: tl.constexpr,
    BULK_B: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of one program. An operand that is BULK is a descriptor, from which the tensor memory accelerator loads
    tiles. One of `a` that crosses the end of an expert contains rows of the next one, whose results are not stored."""
    begin, end, down, through = tile_table(ends, E, BE, N, BM, BN)
    for t in tl.range(tl.program_id(0), tl.max(through, 0), tl.num_programs(0), flatten=BULK_A):
        expert, m0, last, n0 = find_tile(t, begin, end, down, through, N, BM, BN, BE, GROUP)
        m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        inside = m < last
        row = tl.load(row_of + m, mask=inside, other=0) if GATHER else m
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            k = k0 + tl.arange(0, BK)
            if BULK_A:
                x = a.load([m0, k0])
            else:
                mask_a = inside[:, None] if K % BK == 0 else inside[:, None] & (k < K)[None, :]
                x = tl.load(a + row[:, None].to(tl.int64) * stride_am + k[None, :], mask=mask_a, other=0.0)
            if BULK_B and stride_bk == 1:
                w = b.load([expert * N + n0, k0]).T
            elif BULK_B:
                w = b.load([expert * K + k0, n0])
            else:
                mask_b = (n < N)[None, :] if K % BK == 0 else (n < N)[None, :] & (k < K)[:, None]
                at_b = b + expert.to(tl.int64) * stride_be + n[None, :] * stride_bn
                w = tl.load(at_b + k[:, None] * stride_bk, mask=mask_b, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if SCALED:
            acc *= tl.load(a_scale + row, mask=inside, other=0.0)[:, None]
            acc *= tl.load(b_scale + expert.to(tl.int64) * N + n, mask=n < N, other=0.0)[None, :]
        at = c + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc.to(c.dtype.element_ty), mask=inside[:, None] & (n < N)[None, :])


def product(
    a_RA: Tensor,
    b_EBA: Tensor,
    plan: DispatchPlan,
    *,
    gather: bool,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return [M, B] in `dtype`; see `plain.PlainSteps.product`. `a_RA` is contiguous along A, and `b_EBA` along A or B. `scales`:
    float32 factors of the rows of a [R] and of the outputs of b [E, B], which the float32 sums are multiplied with."""
    experts, width, depth = b_EBA.shape
    shape = tiles(a_RA.dtype, dtype)
    c_MB = a_RA.new_empty(len(plan.token_M), width, dtype=dtype)
    whole = depth % shape.k == 0
    bulk_a = whole and not gather and loads_in_bulk(a_RA)
    bulk_b = whole and (loads_in_bulk(b_EBA) or loads_in_bulk(b_EBA.mT))
    flat, block = (b_EBA, [shape.n, shape.k]) if b_EBA.stride(2) == 1 else (b_EBA.mT, [shape.k, shape.n])
    product_kernel[(programs(a_RA.device),)](
        in_bulk(a_RA, [shape.m, shape.k]) if bulk_a else a_RA,
        in_bulk(flat, block) if bulk_b else b_EBA,
        c_MB, *(scales or (a_RA, b_EBA)), plan.ends_E, plan.token_M, a_RA.stride(0), *b_EBA.stride(), E=experts, N=width, K=depth,
        GATHER=gather, SCALED=scales is not None, BULK_A=bulk_a, BULK_B=bulk_b, BE=triton.next_power_of_2(experts), BM=shape.m,
        BN=shape.n, BK=shape.k, GROUP=shape.group, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return c_MB


def loads_in_bulk(tensor: Tensor) -> bool:
    """Return whether the tensor memory accelerator can load tiles of rows: they are contiguous and aligned to 16 bytes."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.shape[-1] * tensor.itemsize % 16 == 0
    return aligned and tensor.is_contiguous() and tensor.numel() > 0


def in_bulk(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor of all rows. A single row may have any stride, which a descriptor would refuse; views set it."""
    return TensorDescriptor.from_tensor(tensor.view(-1).view(-1, tensor.shape[-1]), block)


@triton.jit
def outer_kernel(  # type: ignore[no-untyped-def]
    first, second, dw, ends, row_of, stride_f, stride_s, stride_we, stride_wf: tl.constexpr, stride_ws: tl.constexpr,
    F: tl.constexpr, S: tl.constexpr, GATHER: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    BS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one expert's gradient. The tiles of an expert are visited in squares, too. If `second` is BULK, a
    descriptor, it also loads rows of the next experts, where `first` is 0. NaN or an infinity in these makes this gradient NaN,
    too: to mask the last tile would take `second` through registers."""
    across_f: tl.constexpr = (F + BF - 1) // BF
    across_s: tl.constexpr = (S + BS - 1) // BS
    tile, expert = tl.program_id(0), tl.program_id(1)
    pf, ps = tl.swizzle2d(tile // across_s, tile % across_s, across_f, across_s, GROUP)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    f, s = pf * BF + tl.arange(0, BF), ps * BS + tl.arange(0, BS)
    acc = tl.zeros([BF, BS], tl.float32)
    for m0 in tl.range(begin, end, BM):
        m = m0 + tl.arange(0, BM)
        inside = m < end
        row = tl.load(row_of + m, mask=inside, other=0) if GATHER else m
        at_f = first + row[:, None].to(tl.int64) * stride_f + f[None, :]
        y = tl.load(at_f, mask=inside[:, None] & (f < F)[None, :], other=0.0)
        if BULK:
            v = second.load([m0, ps * BS])
        else:
            at_s = second + m[:, None].to(tl.int64) * stride_s + s[None, :]
            v = tl.load(at_s, mask=inside[:, None] & (s < S)[None, :], other=0.0)
        acc = tl.dot(y.T, v, acc, input_precision="ieee")
    out, at = acc.to(dw.dtype.element_ty), dw + expert.to(tl.int64) * stride_we
    if stride_ws == 1:
        tl.store(at + f[:, None] * stride_wf + s[None, :], out, mask=(f < F)[:, None] & (s < S)[None, :])
    else:
        tl.store(at + s[:, None] * stride_ws + f[None, :] * stride_wf, out.T, mask=(s < S)[:, None] & (f < F)[None, :])


def outer(g: Tensor, x: Tensor, plan: DispatchPlan, *, gather_g: bool, gather_x: bool, like: Tensor) -> Tensor:
    """Return [E, B, A] in the layout of `like`; see `plain.PlainSteps.outer`. At most one operand is gathered: the first."""
    shape = outer_tiles(g.dtype, gather_g or gather_x)
    dw_EBA = torch.empty_like(like)
    first, second, dw_EFS = (x, g, dw_EBA.mT) if gather_x else (g, x, dw_EBA)
    experts, high, wide = dw_EFS.shape
    bulk = loads_in_bulk(second)
    outer_kernel[(triton.cdiv(high, shape.m) * triton.cdiv(wide, shape.n), experts)](
        first, in_bulk(second, [shape.k, shape.n]) if bulk else second, dw_EBA, plan.ends_E, plan.token_M,
        first.stride(0), second.stride(0), *dw_EFS.stride(), F=high, S=wide, GATHER=gather_g or gather_x, BULK=bulk, BM=shape.k,
        BF=shape.m, BS=shape.n, GROUP=shape.group, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return dw_EBA


# Quantized operands


def scaled_tiles(block: int) -> Tiles:
    """Return tiles with 128 of K per step: four blocks of 32, eight of 16, one of 128."""
    if interpreting():
        return Tiles(m=32, n=64, k=128, group=2)
    return Tiles(n=128, k=128, stages=3 if block == 128 else 2)


@triton.jit
def scaled_product_kernel(  # type: ignore[no-untyped-def]
    a, a_scale, a_global, b, b_scale, b_global, c, ends, row_of, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FOUR: tl.constexpr, GATHER: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply scaled operands. FOUR: NVFP4, with two codes per byte, an e4m3 scale per 16 and a float32 scale per row of either
    side. Otherwise MXFP8 with a scale per 32."""
    PACK: tl.constexpr = 2 if FOUR else 1
    PER: tl.constexpr = 16 if FOUR else 32
    KIND: tl.constexpr = "e2m1" if FOUR else "e4m3"
    begin, end, down, through = tile_table(ends, E, BE, N, BM, BN)
    for t in tl.range(tl.program_id(0), tl.max(through, 0), tl.num_programs(0)):
        expert, m0, last, n0 = find_tile(t, begin, end, down, through, N, BM, BN, BE, GROUP)
        m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
        in_m, in_n = m < last, n < N
        row = (tl.load(row_of + m, mask=in_m, other=0) if GATHER else m).to(tl.int64)
        out_row = expert.to(tl.int64) * N + n
        acc = tl.zeros([BM, BN], tl.float32)
        for k0 in range(0, K, BK):
            q, s = k0 // PACK + tl.arange(0, BK // PACK), k0 // PER + tl.arange(0, BK // PER)
            mask_x, mask_xs, mask_w, mask_ws = in_m[:, None], in_m[:, None], in_n[:, None], in_n[:, None]
            if K % BK != 0:
                in_q, in_s = (q < K // PACK)[None, :], (s < K // PER)[None, :]
                mask_x, mask_xs, mask_w, mask_ws = mask_x & in_q, mask_xs & in_s, mask_w & in_q, mask_ws & in_s
            x = tl.load(a + row[:, None] * (K // PACK) + q[None, :], mask=mask_x, other=0.0)
            xs = tl.load(a_scale + row[:, None] * (K // PER) + s[None, :], mask=mask_xs, other=0.0)
            w = tl.load(b + out_row[:, None] * (K // PACK) + q[None, :], mask=mask_w, other=0.0)
            ws = tl.load(b_scale + out_row[:, None] * (K // PER) + s[None, :], mask=mask_ws, other=0.0)
            acc = tl.dot_scaled(x, xs, KIND, w.T, ws, KIND, acc)
        if FOUR:
            acc *= tl.load(a_global + row, mask=in_m, other=0.0)[:, None]
            acc *= tl.load(b_global + out_row, mask=in_n, other=0.0)[None, :]
        at = c + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc.to(c.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def block128_product_kernel(  # type: ignore[no-untyped-def]
    a, a_scale, b, b_scale, c, ends, row_of, E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GATHER: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply blocks: a has a scale per 128 columns of a row, b one per square of 128. BN divides 128: one per tile and step."""
    begin, end, down, through = tile_table(ends, E, BE, N, BM, BN)
    STEPS: tl.constexpr = K // 128
    for t in tl.range(tl.program_id(0), tl.max(through, 0), tl.num_programs(0)):
        expert, m0, last, n0 = find_tile(t, begin, end, down, through, N, BM, BN, BE, GROUP)
        m, n, k = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN), tl.arange(0, 128)
        in_m, in_n = m < last, n < N
        row = (tl.load(row_of + m, mask=in_m, other=0) if GATHER else m).to(tl.int64)
        at_a = a + row[:, None] * K + k[None, :]
        at_b = b + (expert.to(tl.int64) * N + n)[None, :] * K + k[:, None]
        at_bs = b_scale + (expert.to(tl.int64) * ((N + 127) // 128) + n0 // 128) * STEPS
        acc = tl.zeros([BM, BN], tl.float32)
        for step in range(0, STEPS):
            x = tl.load(at_a + step * 128, mask=in_m[:, None], other=0.0)
            w = tl.load(at_b + step * 128, mask=in_n[None, :], other=0.0)
            scale = e8m0_value(tl.load(a_scale + row * STEPS + step, mask=in_m, other=0)) * e8m0_value(
                tl.load(at_bs + step)
            )
            acc += tl.dot(x, w) * scale[:, None]
        at = c + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc.to(c.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def scaled_product(x: Operand, w: Operand, plan: DispatchPlan, *, gather: bool, dtype: torch.dtype) -> Tensor:
    """Return [M, N] in `dtype`; see `plain.PlainSteps.product`. Both operands are of one format."""
    assert not isinstance(x, Tensor) and not isinstance(w, Tensor)
    experts, width, stored = w.qdata.shape
    four = isinstance(w, NVFP4Tensor)
    block = NVFP4_BLOCK if isinstance(w, NVFP4Tensor) else w.block
    shape, c_MN = scaled_tiles(block), x.qdata.new_empty(len(plan.token_M), width, dtype=dtype)
    common = dict(
        E=experts, N=width, K=stored * (2 if four else 1), GATHER=gather, BE=triton.next_power_of_2(experts), BM=shape.m,
        BN=shape.n, GROUP=shape.group, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    outputs = c_MN, plan.ends_E, plan.token_M
    if block == 128:
        assert isinstance(w, MXTensor) and w.rows == 128, "blocks of 128 have one scale for 128 rows of weights"
        block128_product_kernel[(programs(c_MN.device),)](x.qdata, x.scale, w.qdata, w.scale, *outputs, **common)
    else:
        operands = x.qdata, x.scale, rows_global(x), w.qdata, w.scale, rows_global(w)
        scaled_product_kernel[(programs(c_MN.device),)](*operands, *outputs, FOUR=four, BK=shape.k, **common)
    return c_MN


def rows_global(x: MXTensor | NVFP4Tensor) -> Tensor:
    """Return NVFP4's float32 scale of each row. MXFP8 has none, and its kernel reads none."""
    return x.scale if isinstance(x, MXTensor) else x.global_scale.expand(*x.scale.shape[:-1], 1).contiguous()
