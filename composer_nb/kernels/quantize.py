"""Quantisation to MXFP8 and NVFP4 by whatever back end is there; `made_by` of the result says which it was.

What they compute is defined in `formats.py`, to the byte.
"""

from __future__ import annotations

from torch import Tensor

from composer_nb.kernels.formats.microscaling import (
    MXTensor,
    NVFP4Tensor,
    Rule,
    Share,
    check_mx,
    check_nvfp4,
    mx_quantize_reference,
    nvfp4_quantize_reference,
)
from composer_nb.kernels.triton_runtime import choose


def mx_quantize(
    x: Tensor, *, block: int = 32, rows: int = 1, rule: Rule = "rceil", backend: str | None = None
) -> MXTensor:
    """MXFP8 of x [..., R, K]; see `mx_quantize_reference`. `backend` as `choose` takes it."""
    check_mx(x, block, rows, rule)
    if choose(x.device, backend)[0] == "torch":
        return mx_quantize_reference(x, block=block, rows=rows, rule=rule)
    from composer_nb.kernels import quantize_triton

    return quantize_triton.mx_quantize(x, block, rows, rule)


def nvfp4_quantize(x: Tensor, *, share: Share = "token", backend: str | None = None) -> NVFP4Tensor:
    """NVFP4 of x [..., K]; see `nvfp4_quantize_reference`. `backend` as `choose` takes it."""
    check_nvfp4(x, share)
    if choose(x.device, backend)[0] == "torch":
        return nvfp4_quantize_reference(x, share=share)
    from composer_nb.kernels import quantize_triton

    return quantize_triton.nvfp4_quantize(x, share)
