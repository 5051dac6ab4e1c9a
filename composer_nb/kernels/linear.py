"""Products with weights, in float32 where a processor has no bf16.

A GEMM library picks its kernel, and with it the order in which it sums, by the number of rows. So what comes out for a token
depends in its last bits on how many others are computed beside it.

Dimensions: N rows, A input width, B output width, E experts, M rows sorted by expert.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# True if oneDNN has no bf16 on this processor: torch then multiplies number by number, 3 to 30 times slower than float32.
HALF_IS_SLOW = not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def compiles(*tensors: Tensor) -> bool:
    """Return whether kernels compiled for a CPU take these: float32 on a CPU."""
    return all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the operands to multiply: bf16 as float32 where bf16 products are slow. Sums are in float32 either way, and a
    bf16 unit also rounds its result once."""
    if HALF_IS_SLOW and all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in tensors):
        return tuple(x.float() for x in tensors)
    return tensors


def linear(x_NA: Tensor, w_BA: Tensor) -> Tensor:
    """Return x · wᵀ, [N, B]."""
    return F.linear(*widened(x_NA, w_BA)).to(x_NA.dtype)


def matmul(x_NA: Tensor, w_AB: Tensor) -> Tensor:
    """Return x · w, [N, B]."""
    x, w = widened(x_NA, w_AB)
    return (x @ w).to(x_NA.dtype)


def grouped_mm(x_MA: Tensor, w_EAB: Tensor, offsets_E: Tensor) -> Tensor:
    """Multiply rows up to offsets_E[0] times w_EAB[0], the next ones times w_EAB[1], and so on: [M, B]. Where torch's kernel does
    not know the dtype (float64) or the widths (rows of other than whole 16 bytes), expert by expert."""
    whole = all(width * x_MA.itemsize % 16 == 0 for width in w_EAB.shape[1:])
    if x_MA.dtype != torch.float64 and whole:
        x, w = widened(x_MA, w_EAB)
        return F.grouped_mm(x, w, offs=offsets_E).to(x_MA.dtype)
    sizes = offsets_E.diff(prepend=offsets_E.new_zeros(1)).tolist()
    return torch.cat([matmul(part, w) for part, w in zip(x_MA.split(sizes), w_EAB, strict=True)])
