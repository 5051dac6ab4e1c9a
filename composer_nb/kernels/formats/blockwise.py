"""Block-wise float8: the format in which DeepSeek-V3 is published (arXiv 2412.19437, §3.3.2).

A matrix is kept as float8 (e4m3fn), with one float32 scale for a block of 128 × 128 weights. A block at the right or the
lower edge may be cut; its scale is there all the same.

Dimensions: R rows (output), C columns (input).
"""

from __future__ import annotations

import torch
from torch import Tensor


def dequantize_blocks(code_RC: Tensor, scale: Tensor, *, rows: int = 128, columns: int = 128) -> Tensor:
    """`code · scale of its block` in float32, rounded once; `scale` is [⌈R / rows⌉, ⌈C / columns⌉]."""
    wide_RC = code_RC.to(torch.float32)
    width = wide_RC.shape[1]
    for strip, scale_of_blocks in zip(wide_RC.split(rows), scale, strict=True):
        strip *= scale_of_blocks.float().repeat_interleave(columns)[:width]
    return wide_RC
