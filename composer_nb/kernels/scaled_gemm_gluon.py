"""Grouped GEMM of float8 with scales per 128 for Hopper, in Gluon: Triton's language in which a kernel says which warps do what.

One warp fetches tiles of 128 × 128 into a ring of shared memory (TMA). Two groups of four warps multiply 64 rows each on the
tensor cores, and add every product over 128 of K to their sums in float32, times both scales, as `block128_product_kernel`
does: Hopper keeps sums of float8 products in some 14 bits (DeepSeek-V3, arXiv 2412.19437, §3.5.2). The groups wait for each
other nowhere but at the ring, so the tensor cores can multiply for one while the other one adds, which plain Triton can not
arrange (DeepGEMM's design, github.com/deepseek-ai/DeepGEMM).

For few experts: to find a tile, every group of warps goes through all of them.

Two barriers a slot of the ring: `full` is passed when its bytes have come, `empty` when both groups are done with it. A slot's
n-th use waits for phase n of `full`, and for phase n − 1 of `empty`.

No interpreter runs Gluon; tests/kernels/gluon_on_cpu.py runs this source with threads for warps. No GPU has.

Dimensions: M rows sorted by expert, K the width that is summed over, N output width, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from composer_nb.kernels.aot import Expect, Spec
from composer_nb.kernels.explanation import INSTRUCTIONS
from composer_nb.kernels.formats import MXTensor
from composer_nb.kernels.grouped_gemm_triton import programs
from composer_nb.kernels.plain import Plan

HALF, WIDTH, STAGES = 64, 128, 6
"""Rows of a group of warps, columns of a tile, slots of the ring: 6 · 32 KiB of 227."""
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
"""How rows of 128 bytes lie in shared memory."""


@gluon.jit
def e8m0_value(byte):  # type: ignore[no-untyped-def]
    """2^(byte − 127) in float32: 0 is a subnormal number, 255 is NaN."""
    wide = byte.to(gl.int32)
    bits = gl.where(wide == 0, 0x00400000, gl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def tile_count(ends, E, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):  # type: ignore[no-untyped-def]
    begin, high = 0, 0
    for e in range(E):
        end = gl.load(ends + e)
        high += (end - begin + BM - 1) // BM
        begin = end
    return high * ((N + BN - 1) // BN)


@gluon.jit
def tile_at(t, ends, E, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of the t-th tile: expert, first row, behind the expert's last row, first column. Tiles of the same columns come one after
    another, and share what they read of the weights."""
    begin, before, expert, m0, last, n0 = 0, 0, 0, 0, 0, 0
    for e in range(E):
        end = gl.load(ends + e)
        high = (end - begin + BM - 1) // BM
        count = high * ((N + BN - 1) // BN)
        inside = t - before
        if (inside >= 0) & (inside < count):
            expert = e
            m0 = begin + inside % high * BM
            n0 = inside // high * BN
            last = end
        before += count
        begin = end
    return expert, m0, last, n0


@gluon.jit
def fetch(  # type: ignore[no-untyped-def]
    a, b, ends, xs, ws, full, empty, E, N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    step = 0
    for t in range(gl.program_id(0), tile_count(ends, E, N, 2 * BM, BN), gl.num_programs(0)):
        expert, m0, _, n0 = tile_at(t, ends, E, N, 2 * BM, BN)
        for k in range(K // 128):
            slot = step % SLOTS
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), (2 * BM + BN) * 128)
            tma.async_copy_global_to_shared(a, [m0, k * 128], full.index(slot), xs.index(2 * slot))
            tma.async_copy_global_to_shared(a, [m0 + BM, k * 128], full.index(slot), xs.index(2 * slot + 1))
            tma.async_copy_global_to_shared(b, [expert * N + n0, k * 128], full.index(slot), ws.index(slot))
            step += 1


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    half: gl.constexpr, a_scale, b_scale, c, ends, xs, ws, full, empty, E, N: gl.constexpr, K: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = K // 128
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    zero = gl.zeros([BM, BN], gl.float32, sums)
    step = 0
    for t in range(gl.program_id(0), tile_count(ends, E, N, 2 * BM, BN), gl.num_programs(0)):
        expert, m0, last, n0 = tile_at(t, ends, E, N, 2 * BM, BN)
        row = (m0 + half * BM + gl.arange(0, BM, gl.SliceLayout(1, sums))).to(gl.int64)
        at_b = b_scale + (expert.to(gl.int64) * ((N + 127) // 128) + n0 // 128) * STEPS
        acc = gl.zeros([BM, BN], gl.float32, sums)
        for k in range(STEPS):
            slot = step % SLOTS
            mbarrier.wait(full.index(slot), (step // SLOTS) & 1)
            x, w = xs.index(2 * slot + half), ws.index(slot).permute((1, 0))
            part = warpgroup_mma(x, w, zero, use_acc=False, is_async=True)
            of_rows = e8m0_value(gl.load(a_scale + row * STEPS + k, mask=row < last, other=0))
            scale = of_rows * e8m0_value(gl.load(at_b + k))
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * scale[:, None]
            step += 1
        made = gl.convert_layout(acc.to(c.dtype.element_ty), wide)
        m = (m0 + half * BM + gl.arange(0, BM, gl.SliceLayout(1, wide))).to(gl.int64)
        n = n0 + gl.arange(0, BN, gl.SliceLayout(0, wide))
        gl.store(c + m[:, None] * N + n[None, :], made, mask=(m < last)[:, None] & (n < N)[None, :])


@gluon.jit
def specialised_product_kernel(  # type: ignore[no-untyped-def]
    a, b, a_scale, b_scale, c, ends, E, N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    xs = gl.allocate_shared_memory(a.dtype, [2 * SLOTS, BM, 128], a.layout)
    ws = gl.allocate_shared_memory(b.dtype, [SLOTS, BN, 128], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    gl.warp_specialize(
        [
            (multiply, (0, a_scale, b_scale, c, ends, xs, ws, full, empty, E, N, K, BM, BN, SLOTS)),
            (multiply, (1, a_scale, b_scale, c, ends, xs, ws, full, empty, E, N, K, BM, BN, SLOTS)),
            (fetch, (a, b, ends, xs, ws, full, empty, E, N, K, BM, BN, SLOTS)),
        ],
        [4, 1],
        [168, 24],
    )


def specialised_product(x: MXTensor, w: MXTensor, plan: Plan, *, dtype: torch.dtype) -> Tensor:
    """[M, N] in `dtype`: each row of x [M, K] times the transposed weight [E, N, K] of its expert. x has a scale for 128
    columns of a row, w one for a square of 128, and x lies in the order of the plan. Raises ValueError for other blocks, for a K
    that is not x's and w's or no multiple of 128, and on anything but Hopper."""
    if x.block != 128 or x.rows != 1 or w.block != 128 or w.rows != 128:
        raise ValueError(
            f"x has blocks of {x.rows} × {x.block} and w of {w.rows} × {w.block}: must be 1 × 128 and 128 × 128"
        )
    experts, width, depth = w.qdata.shape
    if x.qdata.shape[1] != depth or depth % 128:
        raise ValueError(f"x has K = {x.qdata.shape[1]} and w {depth}: must be one, and a multiple of 128")
    if x.qdata.device.type != "cuda" or torch.cuda.get_device_capability(x.qdata.device)[0] != 9:
        raise ValueError(f"x is on {x.qdata.device}: must be on a Hopper GPU, of compute capability 9")
    c_MN = torch.empty(len(x.qdata), width, dtype=dtype, device=x.qdata.device)
    if not len(c_MN):  # no tensor of no rows can be described
        return c_MN
    specialised_product_kernel[(programs(c_MN.device),)](
        TensorDescriptor.from_tensor(x.qdata, [HALF, 128], SWIZZLED),
        TensorDescriptor.from_tensor(w.qdata.flatten(0, 1), [WIDTH, 128], SWIZZLED),
        x.scale, w.scale, c_MN, plan.ends_E,
        E=experts, N=width, K=depth, BM=HALF, BN=WIDTH, SLOTS=STAGES, num_warps=4,
    )  # fmt: skip
    return c_MN


SPECS = (
    Spec(
        name="grouped product, fp8_block128, warps specialised",
        kernel=specialised_product_kernel,
        types={
            "a": f"tensordesc<fp8e4nv[{HALF}, 128],{SWIZZLED!r}>",
            "b": f"tensordesc<fp8e4nv[{WIDTH}, 128],{SWIZZLED!r}>",
            "a_scale": "*u8",
            "b_scale": "*u8",
            "c": "*bf16",
            "ends": "*i32",
            "E": "i32",
        },
        constants={"N": 4096, "K": 7168, "BM": HALF, "BN": WIDTH, "SLOTS": STAGES},
        warps=4,
        architectures=(90,),
        # What is narrow are scales and the experts' ends.
        expect=Expect(
            ptx={90: r"(?s)(?=.*cp\.async\.bulk\.tensor).*" + INSTRUCTIONS["fp8_block128", 90][1]}, narrow=40
        ),
    ),
)
