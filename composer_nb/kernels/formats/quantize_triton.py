"""Quantisation to MXFP8 and NVFP4 in Triton: equal to the references of `formats.py`, to the byte.

Scales of MXFP8 are made from the bits of the largest magnitude by one addition and a shift: no logarithm, no division, nothing
to round. NVFP4 divides as IEEE 754 says (`div_rn`), or by a reciprocal, for which a GPU has an approximation. The largest
magnitude is an integer maximum of bits, in which infinity and NaN win.

Dimensions: B matrices, R rows, K columns; H rows and W columns of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.formats import microscaling

# -- MXFP8 ---------------------------------------------------------------------------------------------------


@triton.jit
def mx_codes(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """e4m3 codes [H, W] as bytes, and scale bytes [H / ROWS, W / BLOCK] as int32, of float32 x [H, W]."""
    H: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    tiles = tl.reshape(x, [H // ROWS, ROWS, W // BLOCK, BLOCK])
    amax = tl.max(tl.max(tiles.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3), axis=1)
    byte = tl.maximum(((amax + 0x1FFFFF) >> 23) - 8, 0)
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
    tl.store(q_ptr + (at_b * R + r.to(tl.int64))[:, None] * K + k[None, :], code, mask=inside)
    height = tl.cdiv(R, ROWS)
    sr = (row // ROWS + tl.arange(0, H // ROWS)).to(tl.int64)
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
    x_ptr, q_ptr, s_ptr, R, K, stride_b, stride_r, BLOCK: tl.constexpr, ROWS: tl.constexpr, DOWN: tl.constexpr,
    PACKED: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Quantise x [B, R, K] along its rows, or with DOWN its transpose, along the columns of x."""
    at_b = tl.program_id(2).to(tl.int64)
    row, col = tl.program_id(0) * H, tl.program_id(1) * W
    r, k = row + tl.arange(0, H), col + tl.arange(0, W)
    inside = (r < R)[:, None] & (k < K)[None, :]
    at = x_ptr + at_b * stride_b + r.to(tl.int64)[:, None] * stride_r + k[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if DOWN:
        code, byte = mx_codes(tl.trans(x), ROWS, BLOCK)
        store_mx(q_ptr, s_ptr, code, byte, at_b, col, row, K, R, ROWS, BLOCK, PACKED)
    else:
        code, byte = mx_codes(x, ROWS, BLOCK)
        store_mx(q_ptr, s_ptr, code, byte, at_b, row, col, R, K, ROWS, BLOCK, PACKED)


def mx_tile(down: bool, rows: int) -> tuple[int, int, int]:
    """Return the height, width and warps of a program: long row segments if possible, squares where columns matter."""
    return (128, 128, 16) if down or rows > 1 else (8, 512, 4)


def mx_quantize(x: Tensor, block: int, rows: int) -> microscaling.MXTensor:
    """Return MXFP8 of x [..., R, K]. A transposed view is read in its memory order, without a copy."""
    x = x.detach()
    matrices = rows > 1 or (x.dim() > 1 and x.stride(-1) != 1)
    x_BRK = x.reshape(-1, *x.shape[-2:]) if matrices else x.reshape(1, -1, x.shape[-1])
    down = x_BRK.stride(-1) != 1 and x_BRK.stride(-2) == 1
    if down:
        x_BRK = x_BRK.mT
    elif x_BRK.stride(-1) != 1:
        x_BRK = x_BRK.contiguous()
    B, R, K = x_BRK.shape
    tensor = microscaling.MXTensor(
        qdata=torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        scale=torch.empty(microscaling.mx_scale_shape(x.shape, block, rows), dtype=torch.uint8, device=x.device),
        block=block,
        rows=rows,
    )
    height, width, warps = mx_tile(down, rows)
    length, most = (R, height) if down else (K, width)
    if x.numel():
        mx_kernel[(triton.cdiv(R, height), triton.cdiv(K, width), B)](
            x_BRK, tensor.qdata.view(torch.uint8), tensor.scale, R, K, x_BRK.stride(0), x_BRK.stride(1),
            BLOCK=block, ROWS=rows, DOWN=down,
            PACKED=length % (4 * block) == 0 and most >= 4 * block, H=height, W=width, num_warps=warps,
        )  # fmt: skip
    return tensor


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
def _divide(a, b, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """a / b, or a · (1/b)."""
    return a * (1.0 / b) if FAST else tl.div_rn(a, b)


@triton.jit
def nvfp4_kernel(  # type: ignore[no-untyped-def]
    x_ptr, q_ptr, s_ptr, g_ptr, R, K, stride_r, TOKEN: tl.constexpr, FAST: tl.constexpr, HARDWARE: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr,
):  # fmt: skip
    """Quantise x [R, K]. With TOKEN a first pass finds and stores a float32 scale for each row; else g_ptr holds one scale."""
    r = tl.program_id(0) * H + tl.arange(0, H)
    x_row = x_ptr + r.to(tl.int64)[:, None] * stride_r
    if TOKEN:
        most = tl.zeros([H, W], tl.int32)
        for col in range(0, K, W):
            k = col + tl.arange(0, W)
            x = tl.load(x_row + k[None, :], mask=(r < R)[:, None] & (k < K)[None, :], other=0.0).to(tl.float32)
            most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        largest = tl.max(most, axis=1)
        g = tl.maximum(
            _divide(largest.to(tl.float32, bitcast=True), tl.full([H], 2688.0, tl.float32), FAST),
            1.1754943508222875e-38,
        )
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
        sixth = _divide(a, tl.full([H, W // 16], 6.0, tl.float32), FAST)
        exact_scale = _divide(sixth, g[:, None] + tl.zeros_like(a), FAST)
        scale = tl.minimum(exact_scale, 448.0).to(tl.float8e4nv)
        step = scale.to(tl.float32) * g[:, None]
        step = tl.where(step > 0, step, float("inf"))
        y = _divide(blocks, step[:, :, None] + tl.zeros_like(blocks), FAST)
        y = tl.where(bad[:, None, None], 0.0, y)
        low, high = tl.split(tl.reshape(y, [H, W // 2, 2]))
        kq = col // 2 + tl.arange(0, W // 2)
        at = q_ptr + r.to(tl.int64)[:, None] * (K // 2) + kq[None, :]
        tl.store(at, _pack(low, high, HARDWARE), mask=(r < R)[:, None] & (kq < K // 2)[None, :])
        ks = col // 16 + tl.arange(0, W // 16)
        at = s_ptr + r.to(tl.int64)[:, None] * (K // 16) + ks[None, :]
        bits = tl.where(bad[:, None], 0x7F, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)
        tl.store(at, bits, mask=(r < R)[:, None] & (ks < K // 16)[None, :])


def nvfp4_quantize(x: Tensor, share: microscaling.Share, division: microscaling.Division) -> microscaling.NVFP4Tensor:
    """Quantise x [..., K] to NVFP4 in Triton kernels; see `nvfp4_quantize_reference`."""
    x = x.detach()
    x_RK = x.reshape(-1, x.shape[-1])
    x_RK = x_RK if x_RK.stride(-1) == 1 else x_RK.contiguous()
    R, K = x_RK.shape
    if share == "token":
        global_scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    else:
        global_scale = microscaling.nvfp4_global_scale(x.abs().amax().float(), division)
    qdata = torch.empty(*x.shape[:-1], K // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(*x.shape[:-1], K // microscaling.NVFP4_BLOCK, dtype=torch.float8_e4m3fn, device=x.device)
    height, width = 4, min(1024, triton.next_power_of_2(K))
    if R:
        hardware = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] == 10
        nvfp4_kernel[(triton.cdiv(R, height),)](
            x_RK, qdata, scale.view(torch.uint8), global_scale, R, K, x_RK.stride(0),
            TOKEN=share == "token", FAST=division == "fast", HARDWARE=hardware, H=height, W=width, num_warps=4,
        )  # fmt: skip
    return microscaling.NVFP4Tensor(qdata=qdata, scale=scale, global_scale=global_scale, share=share)


# -- widening ------------------------------------------------------------------------------------------------


@triton.jit
def e8m0_value(byte):  # type: ignore[no-untyped-def]
    """Return 2^(byte − 127) in float32: 0 is a subnormal number, 255 is NaN."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_value(code):  # type: ignore[no-untyped-def]
    """Return float32 values of codes in the lower four bits: sign, two bits of exponent, one of mantissa."""
    wide = code.to(tl.int32)
    exponent, half = (wide >> 1) & 3, wide & 1
    normal = ((exponent + 126) << 23) | (half << 22)
    bits = tl.where(exponent == 0, half * 0x3F000000, normal) | ((wide >> 3) & 1) << 31
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen_kernel(q_ptr, s_ptr, out_ptr, total, FOUR: tl.constexpr, PER: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Widen W of `total` numbers, one block of PER after another. FOUR: two e2m1 codes per byte, e4m3 scales."""
    first = tl.program_id(0).to(tl.int64) * W
    block = first // PER + tl.arange(0, W // PER)
    scale = tl.load(s_ptr + block, mask=block < total // PER, other=0.0)
    if FOUR:
        at = first // 2 + tl.arange(0, W // 2)
        packed = tl.load(q_ptr + at, mask=at < total // 2, other=0)
        value = tl.join(_e2m1_value(packed & 15), _e2m1_value(packed >> 4)).reshape([W // PER, PER])
        factor = scale.to(tl.float32)
    else:
        at = first + tl.arange(0, W)
        value = tl.load(q_ptr + at, mask=at < total, other=0.0).to(tl.float32).reshape([W // PER, PER])
        factor = e8m0_value(scale)
    at = first + tl.arange(0, W)
    tl.store(out_ptr + at, (value * factor[:, None]).reshape([W]).to(tl.bfloat16), mask=at < total)


def widened(x: microscaling.MXTensor | microscaling.NVFP4Tensor) -> Tensor:
    """Return a quantised tensor in bf16, NVFP4 without its float32 scales. This is exact for normal numbers of bf16: e4m3 has
    four significant bits, and a code of e2m1 times a scale in e4m3 at most six. Blocks lie along the last dimension and divide
    it."""
    four, per = (True, microscaling.NVFP4_BLOCK) if isinstance(x, microscaling.NVFP4Tensor) else (False, x.block)
    assert isinstance(x, microscaling.NVFP4Tensor) or x.rows == 1, "blocks of one row"
    shape = (*x.qdata.shape[:-1], x.qdata.shape[-1] * (2 if four else 1))
    out, width = x.qdata.new_empty(shape, dtype=torch.bfloat16), 4096
    if out.numel():
        widen_kernel[(triton.cdiv(out.numel(), width),)](
            x.qdata, x.scale, out, out.numel(), FOUR=four, PER=per, W=width, num_warps=8
        )
    return out
