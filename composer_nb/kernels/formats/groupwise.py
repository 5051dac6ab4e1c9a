"""Group-wise symmetric integers: the format in which large mixture-of-experts models are served.

Kimi K2 Thinking and K2.5 publish their routed experts as int4 with one bf16 scale for 32 neighbours along the input, and were
trained to be right in it (quantisation-aware); MLX serves Qwen3-MoE's routers as int8 with groups of 64. A weight is stored
as `code · scale`, so `dequantize(*quantize(w))` are the very numbers that such an engine multiplies with.

Codes are kept one a byte here: this file is about the numbers, not about the memory. `unpack` reads them from the words in
which they are published.

Dimensions: I input width (the dimension that a product sums over), G groups of I.
"""

import torch
from torch import Tensor


def quantize(weight: Tensor, *, bits: int = 4, group: int = 32, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return codes (int8, shape of `weight`) and scales (bfloat16, `weight`'s shape with G in place of I at `dim`).

    scale = bf16(max |w| / (2^(bits−1) − 1)) over a group, code = round half to even (w / scale), so the largest weight of a
    group is met and none is clipped by more than the rounding of its scale. `group` is cut to I where I is smaller. Raises
    ValueError for bits outside 2..8, an I that is no multiple of the group, or weights that are not finite.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits} must lie in 2..8")
    wide = weight.movedim(dim, -1).double()
    group = min(group, wide.shape[-1])
    if group < 1 or wide.shape[-1] % group:
        raise ValueError(f"an input width of {wide.shape[-1]} is no multiple of the group, {group}")
    if not wide.isfinite().all():
        raise ValueError("weights that are not finite cannot be quantised")
    top = 2 ** (bits - 1) - 1
    wide_G = wide.unflatten(-1, (-1, group))
    scale_G = (wide_G.abs().amax(-1) / top).to(torch.bfloat16)
    # A group of zeros has scale 0, and so has one so small that bf16 has no number for its scale: their codes are 0.
    step_G = torch.where(scale_G > 0, scale_G, 1.0).double()
    code = (wide_G / step_G[..., None]).round().clamp(-top - 1, top) * (scale_G > 0)[..., None]
    return code.flatten(-2).to(torch.int8).movedim(-1, dim).contiguous(), scale_G.movedim(-1, dim).contiguous()


def dequantize(code: Tensor, scale: Tensor, *, dim: int = -1) -> Tensor:
    """`code · scale` in float32, exact: a code of 8 bits times bf16's 8 has at most 16 of float32's 24."""
    code_I, scale_G = code.movedim(dim, -1), scale.movedim(dim, -1)
    wide_G = code_I.float().unflatten(-1, (scale_G.shape[-1], -1)) * scale_G.float()[..., None]
    return wide_G.flatten(-2).movedim(-1, dim).contiguous()


def unpack(word: Tensor, columns: int, *, bits: int = 4) -> Tensor:
    """Return codes int8 [..., columns] of int32 words, as compressed-tensors' `pack-quantized` has them: a word's first code lies
    in its lowest bits, all are raised by 2^(bits−1), and the last word may have bits to spare. Raises ValueError unless bits is 4
    or 8."""
    if bits not in (4, 8):
        raise ValueError(f"bits={bits} must be 4 or 8")
    byte = word.contiguous().view(torch.uint8)
    if bits == 8:
        return (byte ^ 128).view(torch.int8)[..., :columns]
    return torch.stack([byte & 15, byte >> 4], dim=-1).flatten(-2)[..., :columns].view(torch.int8) - 8


def rounded(weight: Tensor, *, bits: int = 4, group: int = 32, dim: int = -1) -> Tensor:
    """Return `weight` rounded to the format, in its own dtype."""
    return dequantize(*quantize(weight, bits=bits, group=group, dim=dim), dim=dim).to(weight.dtype)


def dequantize_blocks(code_RC: Tensor, scale: Tensor, *, rows: int = 128, columns: int = 128) -> Tensor:
    """`code · scale of its block` in float32, rounded once; `scale` is [⌈R / rows⌉, ⌈C / columns⌉].

    The block-wise float8 in which DeepSeek-V3 is published (arXiv 2412.19437, §3.3.2): a matrix is kept as e4m3fn, with one
    float32 scale for a block of 128 × 128 weights. A block at the right or the lower edge may be cut; its scale is there all the
    same.
    """
    wide_RC = code_RC.to(torch.float32)
    width = wide_RC.shape[1]
    for strip, scale_of_blocks in zip(wide_RC.split(rows), scale, strict=True):
        strip *= scale_of_blocks.float().repeat_interleave(columns)[:width]
    return wide_RC
