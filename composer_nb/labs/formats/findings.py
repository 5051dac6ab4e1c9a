"""Cursor's findings on low precision, as numbers that anybody can compute again.

NVFP4 as NVIDIA has it shares one float32 scale among all tokens of a tensor. So a token's numbers depend on tokens beside it, and
on later ones; and its divisions must be those of IEEE 754 (Composer 2 technical report, §6.1). Nothing here needs a GPU.

Dimensions: T tokens, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from composer_nb.kernels.formats import microscaling as formats
from composer_nb.kernels.formats.microscaling import (
    MXTensor,
    NVFP4Tensor,
    mx_quantize_reference,
    nvfp4_quantize_reference,
    unpack_e2m1,
)

Quantize = Callable[[Tensor], MXTensor | NVFP4Tensor]

FORMATS: dict[str, Quantize] = {
    "MXFP8": mx_quantize_reference,
    "MXFP8, floor": lambda x: mx_quantize_reference(x, rule="floor"),
    "MXFP8, blocks of 128": lambda x: mx_quantize_reference(x, block=128),
    "NVFP4, a scale per token": nvfp4_quantize_reference,
    "NVFP4, a scale per tensor": lambda x: nvfp4_quantize_reference(x, share="tensor"),
}
"""Quantisers by the names that figures have."""


# -- who sees whom -------------------------------------------------------------------------------------------


def changed_past(quantize: Quantize, x_TK: Tensor, factor: float = 3.0) -> Tensor:
    """[T − 1]: by how much the quantised numbers of each earlier token change, relative to their length, when the last token is
    multiplied by `factor`. Any but 0 lets the future into the past. (A power of two moves a shared scale and no rounding.)"""
    later_TK = x_TK.clone()
    later_TK[-1] *= factor
    before_TK, after_TK = quantize(x_TK).dequantize()[:-1], quantize(later_TK).dequantize()[:-1]
    return (after_TK - before_TK).norm(dim=1) / before_TK.norm(dim=1)


def changed_alone(quantize: Quantize, x_TK: Tensor) -> Tensor:
    """[T]: by how much each token's quantised numbers change, relative to their length, when it is alone in its batch."""
    together_TK = quantize(x_TK).dequantize()
    alone_TK = torch.cat([quantize(token_TK).dequantize() for token_TK in x_TK.split(1)])
    return (alone_TK - together_TK).norm(dim=1) / together_TK.norm(dim=1)


# -- division ------------------------------------------------------------------------------------------------

Division = Literal["ieee", "inverse", "approximate"]
"""Division of float32: rounded to nearest; times the rounded inverse; times an inverse that is cut off instead of rounded. The
last one is within one unit in the last place, which is what PTX promises of `rcp.approx.f32`, that `__fdividef` and `div.full`
go through."""


def quotient(a: Tensor, b: Tensor, how: Division) -> Tensor:
    """a / b in float32. Raises ValueError for an unknown `how`."""
    if how not in get_args(Division):
        raise ValueError(f"division={how!r} must be one of {', '.join(get_args(Division))}")
    if how == "ieee":
        return a / b
    if how == "inverse":
        return a * torch.ones_like(b).div(b)
    exact = 1 / b.double()
    near = exact.float()
    beyond = near.double().abs() > exact.abs()
    return a * torch.where(beyond, torch.nextafter(near, torch.zeros_like(near)), near)


@contextmanager
def dividing(how: Division) -> Iterator[None]:
    """NVFP4 is quantised with this division meanwhile, by the reference: in this whole process, so for experiments only."""
    quotient(torch.ones(1), torch.ones(1), how)
    kept = formats.divide
    formats.divide = lambda a, b: quotient(a, b, how)
    try:
        yield
    finally:
        formats.divide = kept


def differing(x_TK: Tensor, how: Division) -> dict[str, float]:
    """NVFP4 of x with a division against NVFP4 with IEEE's: shares of what is stored that change; of tokens, those with any bit
    changed."""
    exact = nvfp4_quantize_reference(x_TK)
    with dividing(how):
        other = nvfp4_quantize_reference(x_TK)
    g_T = (exact.global_scale != other.global_scale).squeeze(-1)
    s_TB = exact.scale.view(torch.uint8) != other.scale.view(torch.uint8)
    q_TK = unpack_e2m1(exact.qdata) != unpack_e2m1(other.qdata)
    return {
        "float32 scales": float(g_T.float().mean()),
        "e4m3 scales": float(s_TB.float().mean()),
        "codes": float(q_TK.float().mean()),
        "tokens with any": float((g_T | s_TB.any(1) | q_TK.any(1)).float().mean()),
    }
