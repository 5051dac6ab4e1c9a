"""Grouped GEMM of quantized operands in Triton, with the tile map of `grouped_gemm_triton.py`.

    mxfp8, nvfp4     `tl.dot_scaled`. On Blackwell, this is a tensor core instruction that takes the scales. Hopper has none:
                     there `triton_steps.py` widens the operands to bf16 in memory, exactly, and multiplies these. (Triton
                     would widen in registers, which took six times as long on an H200.)
    fp8_block128     a plain float8 product for every 128 of K, multiplied by both scales and added to float32 sums: Hopper keeps
                     sums of float8 products in about 14 bits (DeepSeek-V3, arXiv 2412.19437, §3.5.2), too few for long sums.

Dimensions: M rows sorted by expert, K the width of the sum, N output width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.formats.microscaling import NVFP4_BLOCK, MXTensor, NVFP4Tensor
from composer_nb.kernels.formats.quantize_triton import e8m0_value
from composer_nb.kernels.moe.grouped_gemm_triton import Tiles, find_tile, programs, tile_table
from composer_nb.kernels.moe.plain import DispatchPlan
from composer_nb.kernels.moe.recipes import Operand
from composer_nb.kernels.triton_runtime import interpreting


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
    """Return [M, N] in `dtype`; see `plain.PlainSteps.product`."""
    if isinstance(x, NVFP4Tensor) and isinstance(w, NVFP4Tensor):
        return _four_or_mx(x, w, plan, gather, dtype)
    assert isinstance(x, MXTensor) and isinstance(w, MXTensor), "both sides are of one format"
    if x.block == 32:
        return _four_or_mx(x, w, plan, gather, dtype)
    assert w.rows == 128, "blocks of 128 have one scale for 128 rows of weights"
    experts, width, depth = w.qdata.shape
    shape, c_MN = scaled_tiles(128), _room(x.qdata, plan, width, dtype)
    block128_product_kernel[(programs(c_MN.device),)](
        x.qdata, x.scale, w.qdata, w.scale, c_MN, plan.ends_E, plan.token_M,
        E=experts, N=width, K=depth, GATHER=gather, BE=triton.next_power_of_2(experts),
        BM=shape.m, BN=shape.n, GROUP=shape.group, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return c_MN


def _four_or_mx(
    x: MXTensor | NVFP4Tensor, w: MXTensor | NVFP4Tensor, plan: DispatchPlan, gather: bool, dtype: torch.dtype
) -> Tensor:
    experts, width, stored = w.qdata.shape
    four = isinstance(w, NVFP4Tensor)
    globals_of = (rows_global(x), rows_global(w))
    shape, c_MN = scaled_tiles(NVFP4_BLOCK if four else 32), _room(x.qdata, plan, width, dtype)
    scaled_product_kernel[(programs(c_MN.device),)](
        x.qdata, x.scale, globals_of[0], w.qdata, w.scale, globals_of[1], c_MN, plan.ends_E, plan.token_M,
        E=experts, N=width, K=stored * (2 if four else 1), FOUR=four, GATHER=gather,
        BE=triton.next_power_of_2(experts), BM=shape.m, BN=shape.n, BK=shape.k, GROUP=shape.group,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return c_MN


def rows_global(x: MXTensor | NVFP4Tensor) -> Tensor:
    """Return NVFP4's float32 scale of each row. MXFP8 has none, and its kernel reads none."""
    return x.scale if isinstance(x, MXTensor) else x.global_scale.expand(*x.scale.shape[:-1], 1).contiguous()


def _room(q: Tensor, plan: DispatchPlan, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(len(plan.token_M), width, dtype=dtype, device=q.device)
