"""MXFP8 and NVFP4: numbers of eight and of four bits that share scales, and what quantisation to them means, bit by bit.

MXFP8 (OCP Microscaling Formats v1.0): float8 e4m3fn, and for each block of neighbours one power of two, kept as its biased
exponent in a byte (E8M0: 2^(byte − 127), 255 is NaN). NVFP4 (Composer 2 technical report, §6.1; NVIDIA, arXiv 2509.25149): float4
e2m1, two a byte, an e4m3 scale for 16 neighbours, and a float32 scale for each token, or for the whole tensor as NVIDIA has it.

Blocks lie along the last dimension, the one that a product sums over. To quantise along another one, pass a transposed view.
The `_reference` functions are the definition. They run on any device, and the kernels of `quantize_triton.py` equal them
to the byte.

Dimensions: R rows, K columns, B blocks of K; any number of dimensions before these.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.triton_runtime import choose

# Choice of the scale by the largest magnitude a of a block: 2^⌈log2(a / 448)⌉, so that nothing saturates (arXiv 2506.08027;
# what Cursor, cuBLAS and TransformerEngine do), or OCP's 2^(⌊log2 a⌋ − 8), by which all above 448 scales saturates.
Rule = Literal["rceil", "floor"]

# Sharing of NVFP4's float32 scale.
Share = Literal["token", "tensor"]

# Division of NVFP4. ieee rounds as IEEE 754 says (`__fdiv_rn`). fast multiplies by a reciprocal, which on a GPU is approximate
# (`__fdividef`): training in RL diverged with it (Composer 2 technical report, §6.1).
Division = Literal["ieee", "fast"]

MX_BLOCKS = (32, 128)
NVFP4_BLOCK = 16
E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Least float32 scale of NVFP4, that of a token of zeros too: with it no division by zero and none by a subnormal number.
SMALLEST_GLOBAL = 2.0**-126

NOT_FINITE = 0x7F800000  # bits of |x| from here on are infinity or NaN
SCALE_NAN, E4M3_NAN = 255, 0x7F


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MXTensor:
    """A quantised tensor: `qdata · 2^(scale − 127)`.

    Attributes:
        qdata: float8_e4m3fn [..., R, K], contiguous.
        scale: uint8 [..., ⌈R / rows⌉, ⌈K / block⌉]: E8M0. The last block of a row may be cut.
        rows: Rows that share a scale: 1, or `block` for squares, which weights may have: transposed they are the same numbers.
    """

    qdata: Tensor
    scale: Tensor
    block: int = 32
    rows: int = 1

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [..., R, K]. Exact in float32 wherever the result is not beyond its range: four bits times a power of two."""
        scale = e8m0_to_float(self.scale)
        if self.rows > 1:
            scale = scale.repeat_interleave(self.rows, -2)[..., : self.qdata.shape[-2], :]
        scale = scale.repeat_interleave(self.block, -1)[..., : self.qdata.shape[-1]]
        return (self.qdata.float() * scale).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NVFP4Tensor:
    """A quantised tensor: `code · scale · global_scale`.

    Attributes:
        qdata: uint8 [..., K / 2]: two e2m1 codes, the first one in the lower bits; bit 3 of a code is its sign.
        scale: float8_e4m3fn [..., K / 16].
        global_scale: float32: [..., 1], one for each token (row), or [] for the tensor.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor
    share: Share = "token"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [..., K]. code · scale is exact; times the float32 scale it is rounded, once in float32."""
        value = e2m1_to_float(unpack_e2m1(self.qdata)).unflatten(-1, (-1, NVFP4_BLOCK)) * self.scale.float()[..., None]
        return (value.flatten(-2) * self.global_scale).to(dtype)


def e8m0_to_float(byte: Tensor) -> Tensor:
    """2^(byte − 127) in float32: byte 0 is a subnormal number there, 255 is NaN."""
    wide = byte.int()
    bits = (wide << 23).masked_fill(wide == 0, 0x00400000).masked_fill(wide == SCALE_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def e2m1_codes(x: Tensor) -> Tensor:
    """Return uint8 codes, a byte each, of float32: the nearest of ±`E2M1_VALUES`, in the middle the one whose code is even;
    beyond 6 it is 6. The sign of zero is kept. NaN, which the format has not, becomes a zero."""
    a = x.abs()
    # Middles, and to which side they fall.
    code = (a > 0.25).byte() + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    return code | (x.signbit().byte() << 3)


def e2m1_to_float(code: Tensor) -> Tensor:
    """Return float32 of codes, a byte each."""
    signed_values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=code.device)
    return signed_values[code.int()]


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the codes [..., K] of packed codes [..., K / 2]."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def mx_quantize_reference(x: Tensor, *, block: int = 32, rows: int = 1, rule: Rule = "rceil") -> MXTensor:
    """Quantise x [..., R, K] (float32, bfloat16 or float16) to MXFP8, with a scale for `rows` × `block` elements.

    Values are divided by the scale, which is exact, brought into ±448, and rounded to nearest, ties to even. Scales are at
    least 2^-127. A block of zeros has scale byte 0 and keeps the signs. A block with an infinity or a NaN has scale byte 255, and
    each of its elements is NaN (0x7F): what went wrong is seen, and nothing beside it is touched. Raises ValueError for other
    dtypes, blocks or rules.
    """
    check_mx(x, block, rows)
    if rule not in get_args(Rule):
        raise ValueError(f"rule={rule!r} must be rceil or floor")
    wide = x.detach().float() if x.dim() > 1 else x.detach().float()[None]
    wide = F.pad(wide, (0, -wide.shape[-1] % block, 0, -wide.shape[-2] % rows))  # tiles are filled up with zeros
    tiles = wide.unflatten(-1, (-1, block)).unflatten(-3, (wide.shape[-2] // rows, rows))
    amax = (tiles.view(torch.int32) & 0x7FFFFFFF).amax((-3, -1), keepdim=True)
    # 448 is 1.75 · 2^8, and a mantissa above .75 carries into the exponent.
    byte = (((amax + (0x1FFFFF if rule == "rceil" else 0)) >> 23) - 8).clamp_min(0)
    inverse = ((254 - byte) << 23).view(torch.float32)
    code = (tiles * inverse).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    code = code.masked_fill(amax >= NOT_FINITE, E4M3_NAN).flatten(-2).flatten(-3, -2)
    scale = byte.masked_fill(amax >= NOT_FINITE, SCALE_NAN).to(torch.uint8)[..., 0, :, 0]
    height = x.shape[-2] if x.dim() > 1 else 1
    qdata = code[..., :height, : x.shape[-1]].reshape(x.shape).contiguous().view(torch.float8_e4m3fn)
    scale = scale.reshape(mx_scale_shape(x.shape, block, rows))
    return MXTensor(qdata=qdata, scale=scale, block=block, rows=rows)


def divide(a: Tensor, b: Tensor, division: Division) -> Tensor:
    """Return a / b, or a · (1/b)."""
    return a / b if division == "ieee" else a * b.reciprocal()


def nvfp4_quantize_reference(x: Tensor, *, share: Share = "token", division: Division = "ieee") -> NVFP4Tensor:
    """Quantise x [..., K] (float32, bfloat16 or float16; K a multiple of 16) to NVFP4.

    With A the largest magnitude of a token (or of the tensor) and a that of a block: g = max(A / 2688, 2^-126),
    s = e4m3(min((a / 6) / g, 448)), code = e2m1(x / (s · g)), all in float32, every division and product rounded as IEEE 754
    says, unless `division` is fast. A block whose s is 0 has codes of ±0. If A is not finite, g and every s that
    shares it are NaN, and their codes 0. Raises ValueError for other dtypes, shapes or shares.
    """
    check_nvfp4(x, share, division)
    blocks = x.detach().float().unflatten(-1, (x.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK))
    a_B = blocks.abs().amax(-1)
    global_scale = nvfp4_global_scale(a_B.amax(-1, keepdim=True) if share == "token" else a_B.amax(), division)
    is_nan = global_scale.isnan()
    exact_B = divide(divide(a_B, torch.full_like(a_B, E2M1_MAX), division), global_scale, division)
    scale_B = exact_B.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    step_B = scale_B.float() * global_scale
    step_B = torch.where(step_B > 0, step_B, math.inf)
    code = e2m1_codes(divide(blocks, step_B[..., None], division)).flatten(-2).masked_fill(is_nan, 0)
    scale_B = scale_B.view(torch.uint8).masked_fill(is_nan, E4M3_NAN).view(torch.float8_e4m3fn)
    qdata = code[..., ::2] | (code[..., 1::2] << 4)
    return NVFP4Tensor(qdata=qdata, scale=scale_B, global_scale=global_scale, share=share)


def mx_quantize(x: Tensor, *, block: int = 32, rows: int = 1, backend: str | None = None) -> MXTensor:
    """Quantise x [..., R, K] to MXFP8 by the back end that is there; see `mx_quantize_reference`. `backend` as `choose` takes
    it."""
    check_mx(x, block, rows)
    if choose(x.device, backend, "quantize")[0] == "torch":
        return mx_quantize_reference(x, block=block, rows=rows)
    from composer_nb.kernels.formats import quantize_triton

    return quantize_triton.mx_quantize(x, block, rows)


def nvfp4_quantize(
    x: Tensor, *, share: Share = "token", division: Division = "ieee", backend: str | None = None
) -> NVFP4Tensor:
    """Quantise x [..., K] to NVFP4 by the back end that is there; see `nvfp4_quantize_reference`. `backend` as `choose` takes
    it."""
    check_nvfp4(x, share, division)
    if choose(x.device, backend, "quantize")[0] == "torch":
        return nvfp4_quantize_reference(x, share=share, division=division)
    from composer_nb.kernels.formats import quantize_triton

    return quantize_triton.nvfp4_quantize(x, share, division)


def nvfp4_global_scale(largest: Tensor, division: Division) -> Tensor:
    """Return float32 scales for largest magnitudes: NaN where those are not finite."""
    # A tensor: by a number torch multiplies with its inverse on a GPU.
    divisor = torch.full_like(largest, E4M3_MAX * E2M1_MAX)
    return divide(largest, divisor, division).clamp_min(SMALLEST_GLOBAL).masked_fill(~largest.isfinite(), math.nan)


def mx_scale_shape(shape: torch.Size, block: int, rows: int) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of `shape`."""
    height = (-(-shape[-2] // rows),) if len(shape) > 1 else ()
    return (*shape[:-2], *height, -(-shape[-1] // block))


def check_mx(x: Tensor, block: int, rows: int) -> None:
    """Raise ValueError unless `mx_quantize` can take these."""
    _check_dtype(x)
    if block not in MX_BLOCKS:
        raise ValueError(f"block={block} must be 32 or 128")
    if rows not in (1, block) or (rows > 1 and x.dim() < 2):
        raise ValueError(f"rows={rows} must be 1, or {block} as block is, for a tensor of two dimensions or more")
    if x.dim() < 1 or not x.shape[-1]:
        raise ValueError(f"x of shape {tuple(x.shape)} has no columns to quantise")


def check_nvfp4(x: Tensor, share: str, division: str) -> None:
    """Raise ValueError unless `nvfp4_quantize` can take these."""
    _check_dtype(x)
    if share not in get_args(Share):
        raise ValueError(f"share={share!r} must be token or tensor")
    if division not in get_args(Division):
        raise ValueError(f"division={division!r} must be ieee or fast")
    if x.dim() < 1 or not x.shape[-1] or x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"x of shape {tuple(x.shape)} must have a multiple of 16 columns")
    if not x.numel() and share == "tensor":
        raise ValueError(f"x of shape {tuple(x.shape)} is empty: nothing could share a scale")


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x is {x.dtype}: float32, bfloat16 and float16 can be quantised")
