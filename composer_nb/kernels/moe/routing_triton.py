"""Router and route plan in Triton, without a wait for the GPU: nothing is read back, and all sizes follow from shapes.

`choose` is `routing.choose_experts`. `plan` is `PlainSteps.plan`: a stable counting sort of the choices by expert. It uses one
histogram per block of choices and a running count within the block, so there are no atomic adds, and the order is fixed.

Dimensions: N tokens, E experts, K experts per token, M = N · K choices, B blocks of choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.moe.plain import DispatchPlan

CHOICES = 256
"""Number of choices per block of the plan."""
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def choice_kernel(  # type: ignore[no-untyped-def]
    logits, experts, tokens, stride_n, E: tl.constexpr, K: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Compute experts, int32 [N, K]. The kernel compares integers in the order of the floats, so that ties and NaN are resolved
    as in `choose_experts`. Softmax does not change the order, so logits are compared."""
    n, e, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, BK)
    inside = (n < tokens)[:, None] & (e < E)[None, :]
    value = tl.load(logits + n[:, None].to(tl.int64) * stride_n + e[None, :], mask=inside, other=0.0).to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)  # no negative zeros
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(inside, key, TAKEN)
    won = tl.zeros([BN, BK], tl.int32)
    for rank in tl.static_range(K):
        best = tl.argmax(key, 1, tie_break_left=True)
        won = tl.where((k == rank)[None, :], best[:, None].to(tl.int32), won)
        key = tl.where(e[None, :] == best[:, None], TAKEN, key)
    valid = (n < tokens)[:, None] & (k < K)[None, :]
    tl.store(experts + n[:, None] * K + k[None, :], won, mask=valid)


def choose(logits_NE: Tensor, k: int) -> Tensor:
    """Return experts, int32 [N, K], best first; see `routing.choose_experts`."""
    tokens, count = logits_NE.shape
    logits_NE = logits_NE if logits_NE.stride(1) == 1 else logits_NE.contiguous()
    experts_NK = logits_NE.new_empty(tokens, k, dtype=torch.int32)
    wide = triton.next_power_of_2(count)
    block = max(1, min(16, 2048 // wide))
    choice_kernel[(triton.cdiv(tokens, block),)](
        logits_NE, experts_NK, tokens, logits_NE.stride(0), E=count, K=k, BE=wide, BK=triton.next_power_of_2(k), BN=block
    )  # fmt: skip
    return experts_NK


@triton.jit
def histogram_kernel(experts, counts, choices, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the choices of expert e in block b, counts[b, e]."""
    b = tl.program_id(0)
    m = b * BM + tl.arange(0, BM)
    chosen = tl.load(experts + m, mask=m < choices, other=0).to(tl.int32)
    e = tl.arange(0, BE)
    histogram = tl.histogram(chosen, BE)
    histogram -= tl.where(
        e == 0, tl.sum((m >= choices).to(tl.int32), 0), 0
    )  # the padding of the last block was counted as expert 0
    tl.store(counts + b * E + e, histogram, mask=e < E)


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    experts, base, token, slot, row, choices, K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Compute the row of each choice: base[block, expert] plus the number of earlier choices of the same expert in the block.
    CHUNK experts are processed at a time, so that the one-hot matrix fits into registers."""
    b = tl.program_id(0)
    m = b * BM + tl.arange(0, BM)
    inside = m < choices
    chosen = tl.load(experts + m, mask=inside, other=-1).to(tl.int32)
    at = tl.load(base + b * E + chosen, mask=inside, other=0)
    for first in tl.static_range(0, BE, CHUNK):
        hit = (chosen[:, None] == (first + tl.arange(0, CHUNK))[None, :]).to(tl.int32)
        at += tl.sum(hit * (tl.cumsum(hit, 0) - 1), 1)
    tl.store(row + m, at, mask=inside)
    tl.store(slot + at, m, mask=inside)
    tl.store(token + at, m // K, mask=inside)


def plan(experts_NK: Tensor, experts: int) -> DispatchPlan:
    """Return the plan; see `plain.Plan`."""
    flat_M = experts_NK.reshape(-1)
    choices, wide = len(flat_M), triton.next_power_of_2(experts)
    blocks = triton.cdiv(choices, CHOICES)
    counts_BE = flat_M.new_empty(blocks, experts, dtype=torch.int32)
    histogram_kernel[(blocks,)](flat_M, counts_BE, choices, E=experts, BE=max(2, wide), BM=CHOICES)
    through_BE = counts_BE.cumsum(0, dtype=torch.int32)
    ends_E = through_BE[-1].cumsum(0, dtype=torch.int32)
    base_BE = through_BE - counts_BE + (ends_E - through_BE[-1])
    token_M, slot_M, row_M = (torch.empty_like(flat_M, dtype=torch.int32) for _ in range(3))
    place_kernel[(blocks,)](
        flat_M, base_BE, token_M, slot_M, row_M, choices, K=experts_NK.shape[1], E=experts, BE=wide,
        CHUNK=min(wide, 32), BM=CHOICES,
    )  # fmt: skip
    return DispatchPlan(ends_E, token_M, slot_M, row_M.view(experts_NK.shape))
