"""Quantisation to MXFP8 and NVFP4 in Triton: equal to the references of `formats.py`, to the byte.

Scales of MXFP8 are made from the bits of the largest magnitude by one addition and a shift: no logarithm, no division, nothing
to round. NVFP4 divides as IEEE 754 says (`div_rn`), while `/` is an approximation on a GPU. The largest magnitude is an integer
maximum of bits, in which infinity and NaN win.

Dimensions: B matrices, R rows, K columns; H rows and W columns of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.aot import Expect, Spec
from composer_nb.kernels.formats import (
    NVFP4_BLOCK,
    MXTensor,
    NVFP4Tensor,
    Rule,
    Share,
    mx_scale_shape,
    nvfp4_global_scale,
)
from composer_nb.kernels.triton_runtime import ran, repair_interpreter

repair_interpreter()

# -- MXFP8 ---------------------------------------------------------------------------------------------------


@triton.jit
def mx_codes(x, ROWS: tl.constexpr, BLOCK: tl.constexpr, RCEIL: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 codes [H, W] as bytes, and scale bytes [H / ROWS, W / BLOCK] as int32, of float32 x [H, W]."""
    H: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    tiles = tl.reshape(x, [H // ROWS, ROWS, W // BLOCK, BLOCK])
    amax = tl.max(tl.max(tiles.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3), axis=1)
    byte = tl.maximum(((amax + (0x1FFFFF if RCEIL else 0)) >> 23) - 8, 0)
    bad = amax >= 0x7F800000
    inverse = tl.where(bad, 0x7FC00000, (254 - byte) << 23).to(tl.float32, bitcast=True)
    # The cast saturates and makes 0x7F of every NaN: it is the only one that the hardware has.
    code = (tiles * inverse[:, None, :, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.reshape(code, [H, W]), tl.where(bad, 255, byte)


@triton.jit
def store_mx(  # type: ignore[no-untyped-def]
    q_ptr, s_ptr, code, byte, at_b, row, col, R, K, ROWS: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr
):
    """A tile of codes and of scales into contiguous [B, R, K] and [B, ⌈R / ROWS⌉, ⌈K / BLOCK⌉], from (row, col) on."""
    H: tl.constexpr = code.shape[0]
    W: tl.constexpr = code.shape[1]
    r = row + tl.arange(0, H)
    k = col + tl.arange(0, W)
    inside = (r < R)[:, None] & (k < K)[None, :]
    tl.store(q_ptr + (at_b * R + r)[:, None] * K + k[None, :], code, mask=inside)
    height = tl.cdiv(R, ROWS)
    sr = row // ROWS + tl.arange(0, H // ROWS)
    if PACKED:  # four scales of a row in one word, where K holds whole words
        words = tl.reshape(byte, [H // ROWS, W // BLOCK // 4, 4]) << (8 * tl.arange(0, 4))[None, None, :]
        sk = col // (4 * BLOCK) + tl.arange(0, W // BLOCK // 4)
        width = K // (4 * BLOCK)
        at = s_ptr.to(tl.pointer_type(tl.int32)) + (at_b * height + sr)[:, None] * width + sk[None, :]
        tl.store(at, tl.sum(words, axis=2), mask=(sr < height)[:, None] & (sk < width)[None, :])
    else:
        sk = col // BLOCK + tl.arange(0, W // BLOCK)
        width = tl.cdiv(K, BLOCK)
        at = s_ptr + (at_b * height + sr)[:, None] * width + sk[None, :]
        tl.store(at, byte.to(tl.uint8), mask=(sr < height)[:, None] & (sk < width)[None, :])


@triton.jit
def mx_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    q_ptr,
    s_ptr,
    qt_ptr,
    st_ptr,
    R,
    K,
    stride_b,
    stride_r,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RCEIL: tl.constexpr,
    ALONG: tl.constexpr,
    DOWN: tl.constexpr,
    PACKED: tl.constexpr,
    PACKED_DOWN: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """x [B, R, K] quantised along its rows (ALONG), and its transpose along the columns (DOWN), from one reading."""
    at_b = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * H
    col = tl.program_id(1) * W
    r = row + tl.arange(0, H)
    k = col + tl.arange(0, W)
    inside = (r < R)[:, None] & (k < K)[None, :]
    at = x_ptr + at_b * stride_b + r.to(tl.int64)[:, None] * stride_r + k[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if ALONG:
        code, byte = mx_codes(x, ROWS, BLOCK, RCEIL)
        store_mx(q_ptr, s_ptr, code, byte, at_b, row, col, R, K, ROWS, BLOCK, PACKED)
    if DOWN:
        code, byte = mx_codes(tl.trans(x), ROWS, BLOCK, RCEIL)
        store_mx(qt_ptr, st_ptr, code, byte, at_b, col, row, K, R, ROWS, BLOCK, PACKED_DOWN)


def mx_tile(along: bool, down: bool, rows: int) -> tuple[int, int, int]:
    """Height, width and warps of a program: long pieces of rows where that is enough, squares where columns matter."""
    return (128, 128, 16) if down or rows > 1 else (8, 512, 4)


def _launch_mx(x_BRK: Tensor, block: int, rows: int, rule: Rule, along: bool, down: bool) -> list[MXTensor]:
    """Of x, if `along`; of its transpose, if `down`. The last dimension of x has stride 1."""
    B, R, K = x_BRK.shape
    made = [
        MXTensor(
            qdata=torch.empty(shape, dtype=torch.float8_e4m3fn, device=x_BRK.device),
            scale=torch.empty(mx_scale_shape(torch.Size(shape), block, rows), dtype=torch.uint8, device=x_BRK.device),
            block=block,
            rows=rows,
            rule=rule,
            made_by=ran(),
        )
        for shape, wanted in (((B, R, K), along), ((B, K, R), down))
        if wanted
    ]
    first, last = made[0], made[-1]
    height, width, warps = mx_tile(along, down, rows)
    if B * R:
        mx_kernel[(triton.cdiv(R, height), triton.cdiv(K, width), B)](
            x_BRK,
            first.qdata.view(torch.uint8),
            first.scale,
            last.qdata.view(torch.uint8),
            last.scale,
            R,
            K,
            x_BRK.stride(0),
            x_BRK.stride(1),
            BLOCK=block,
            ROWS=rows,
            RCEIL=rule == "rceil",
            ALONG=along,
            DOWN=down,
            PACKED=K % (4 * block) == 0 and width >= 4 * block,
            PACKED_DOWN=R % (4 * block) == 0 and height >= 4 * block,
            H=height,
            W=width,
            num_warps=warps,
        )
    return made


def mx_quantize(x: Tensor, block: int, rows: int, rule: Rule) -> MXTensor:
    """x [..., R, K]; a transposed view is read as it lies."""
    x = x.detach()
    x_BRK = (
        x.reshape(-1, *x.shape[-2:])
        if rows > 1 or (x.dim() > 1 and x.stride(-1) != 1)
        else x.reshape(1, -1, x.shape[-1])
    )
    down = x_BRK.stride(-1) != 1 and x_BRK.stride(-2) == 1
    if not down and x_BRK.stride(-1) != 1:
        x_BRK = x_BRK.contiguous()
    (made,) = _launch_mx(x_BRK.mT if down else x_BRK, block, rows, rule, along=not down, down=down)
    return MXTensor(
        qdata=made.qdata.reshape(x.shape),
        scale=made.scale.reshape(mx_scale_shape(x.shape, block, rows)),
        block=block,
        rows=rows,
        rule=rule,
        made_by=made.made_by,
    )


def mx_quantize_dual(x_RK: Tensor, block: int, rule: Rule) -> tuple[MXTensor, MXTensor]:
    x_RK = x_RK.detach()
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    both = _launch_mx(x_RK[None], block, 1, rule, along=True, down=True)
    along, down = (
        MXTensor(qdata=each.qdata[0], scale=each.scale[0], block=block, rule=rule, made_by=each.made_by)
        for each in both
    )
    return along, down


# -- NVFP4 ---------------------------------------------------------------------------------------------------


@triton.jit
def _e2m1(x):  # type: ignore[no-untyped-def]
    """Codes as int32 of float32: as `formats.e2m1_codes`."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code += (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _pack(low, high, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of two codes each, of float32."""
    if HARDWARE:  # Blackwell converts: four bytes of eight numbers at a time
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b8 b0, b1, b2, b3;
            cvt.rn.satfinite.e2m1x2.f32 b0, $5, $1;
            cvt.rn.satfinite.e2m1x2.f32 b1, $6, $2;
            cvt.rn.satfinite.e2m1x2.f32 b2, $7, $3;
            cvt.rn.satfinite.e2m1x2.f32 b3, $8, $4;
            mov.b32 $0, {b0, b1, b2, b3};
            }
            """,
            "=r,r,r,r,r,r,r,r,r",
            [low, high],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    return (_e2m1(low) | (_e2m1(high) << 4)).to(tl.uint8)


@triton.jit
def nvfp4_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    q_ptr,
    s_ptr,
    g_ptr,
    R,
    K,
    stride_r,
    TOKEN: tl.constexpr,
    HARDWARE: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
):
    """x [R, K]: with TOKEN a float32 scale is found for each row, in a first reading, and stored; else one is there."""
    r = tl.program_id(0) * H + tl.arange(0, H)
    x_row = x_ptr + r.to(tl.int64)[:, None] * stride_r
    if TOKEN:
        most = tl.zeros([H, W], tl.int32)
        for col in range(0, K, W):
            k = col + tl.arange(0, W)
            x = tl.load(x_row + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.max(most, axis=1)
        g = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), 2688.0), 1.1754943508222875e-38)
        g = tl.where(largest >= 0x7F800000, float("nan"), g)
        tl.store(g_ptr + r, g, mask=r < R)
    else:
        g = tl.load(g_ptr + r * 0)
    bad = g != g
    for col in range(0, K, W):
        k = col + tl.arange(0, W)
        x = tl.load(x_row + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
        blocks = tl.reshape(x, [H, W // 16, 16])
        a = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2).to(tl.float32, bitcast=True)
        wanted = tl.div_rn(tl.div_rn(a, tl.full([H, W // 16], 6.0, tl.float32)), g[:, None] + tl.zeros_like(a))
        scale = tl.minimum(wanted, 448.0).to(tl.float8e4nv)
        step = scale.to(tl.float32) * g[:, None]
        step = tl.where(step > 0, step, float("inf"))
        y = tl.div_rn(blocks, step[:, :, None] + tl.zeros_like(blocks))
        y = tl.where(bad[:, None, None], 0.0, y)
        low, high = tl.split(tl.reshape(y, [H, W // 2, 2]))
        kq = col // 2 + tl.arange(0, W // 2)
        at = q_ptr + r.to(tl.int64)[:, None] * (K // 2) + kq[None, :]
        tl.store(at, _pack(low, high, HARDWARE), mask=(r < R)[:, None] & (kq < K // 2)[None, :])
        ks = col // 16 + tl.arange(0, W // 16)
        at = s_ptr + r.to(tl.int64)[:, None] * (K // 16) + ks[None, :]
        bits = tl.where(bad[:, None], 0x7F, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)
        tl.store(at, bits, mask=(r < R)[:, None] & (ks < K // 16)[None, :])


def nvfp4_quantize(x: Tensor, share: Share) -> NVFP4Tensor:
    x = x.detach()
    x_RK = x.reshape(-1, x.shape[-1])
    x_RK = x_RK if x_RK.stride(-1) == 1 else x_RK.contiguous()
    R, K = x_RK.shape
    if share == "token":
        global_scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    else:
        global_scale = nvfp4_global_scale(x.abs().amax().float())
    qdata = torch.empty(*x.shape[:-1], K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], K // NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=x.device)
    height, width = 4, min(1024, triton.next_power_of_2(K))
    if R:
        nvfp4_kernel[(triton.cdiv(R, height),)](
            x_RK,
            qdata,
            scale.view(torch.uint8),
            global_scale,
            R,
            K,
            x_RK.stride(0),
            TOKEN=share == "token",
            HARDWARE=x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] == 10,
            H=height,
            W=width,
            num_warps=4,
        )
    return NVFP4Tensor(qdata=qdata, scale=scale, global_scale=global_scale, share=share, made_by=ran())


# -- what must be true of them when compiled ----------------------------------------------------------------


def _mx_spec(name: str, *, block: int = 32, rows: int = 1, along: bool = True, down: bool = False) -> Spec:
    height, width, warps = mx_tile(along, down, rows)
    return Spec(
        name=name,
        kernel=mx_kernel,
        types={
            "x_ptr": "*bf16",
            **dict.fromkeys(("q_ptr", "s_ptr", "qt_ptr", "st_ptr"), "*u8"),
            **dict.fromkeys(("R", "K", "stride_b", "stride_r"), "i32"),
        },
        constants={
            "BLOCK": block,
            "ROWS": rows,
            "RCEIL": True,
            "ALONG": along,
            "DOWN": down,
            "PACKED": width >= 4 * block,
            "PACKED_DOWN": height >= 4 * block,
            "H": height,
            "W": width,
        },
        warps=warps,
        expect=Expect(
            narrow=along + down,  # scales
            ptx=dict.fromkeys((90, 100), r"cvt\.rn\.satfinite\.e4m3x2\.f32"),
            never=r"\.ftz|div\.|rcp\.|lg2\.|ex2\.",
        ),
    )


def _nvfp4_spec(name: str, *, hardware: bool) -> Spec:
    return Spec(
        name=name,
        kernel=nvfp4_kernel,
        types={
            "x_ptr": "*bf16",
            **dict.fromkeys(("q_ptr", "s_ptr"), "*u8"),
            "g_ptr": "*fp32",
            **dict.fromkeys(("R", "K", "stride_r"), "i32"),
        },
        constants={"TOKEN": True, "HARDWARE": hardware, "H": 4, "W": 1024},
        architectures=(100,) if hardware else (90,),
        expect=Expect(
            narrow=8,  # scales
            ptx={90: r"div\.rn\.f32", 100: r"div\.rn\.f32[\s\S]*cvt\.rn\.satfinite\.e2m1x2\.f32"},
            never=r"\.ftz|div\.full|div\.approx|rcp\.approx",
        ),
    )


SPECS = (
    _mx_spec("mx_quantize"),
    _mx_spec("mx_quantize, blocks of 128", block=128),
    _mx_spec("mx_quantize, squares of 128", block=128, rows=128),
    _mx_spec("mx_quantize, transposed", along=False, down=True),
    _mx_spec("mx_quantize_dual", down=True),
    _nvfp4_spec("nvfp4_quantize, codes by comparisons", hardware=False),
    _nvfp4_spec("nvfp4_quantize, codes by conversion", hardware=True),
)
