"""Router and route plan in Triton, without a wait for the GPU: nothing is read back, every size is known from shapes.

`choose` is `routing.choose_experts`, with the scores of `routing.route`; `plan` is `PlainSteps.plan`: a stable counting sort
of the choices by expert, by a histogram a block of choices and a running count inside it, so no atomic adds and one order.

Dimensions: N tokens, E experts, K experts a token, M = N · K choices, B blocks of choices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from composer_nb.kernels.aot import Expect, Spec
from composer_nb.kernels.plain import Plan
from composer_nb.kernels.triton_runtime import repair_interpreter

repair_interpreter()

CHOICES = 256
"""Of a block of the plan."""
TAKEN = tl.constexpr(-0x80000000)


@triton.jit
def router_kernel(  # type: ignore[no-untyped-def]
    logits, bias, experts, gates, tokens, stride_n, E: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr,
    BIASED: tl.constexpr, SCALE: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Experts int32 [N, K] and gates float32 [N, K]. What is compared are integers that have the order of the floats, so that
    ties and NaN are as `choose_experts` has them; softmax does not change the order, so logits are compared."""
    n, e, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BE), tl.arange(0, BK)
    inside = (n < tokens)[:, None] & (e < E)[None, :]
    x = tl.load(logits + n[:, None].to(tl.int64) * stride_n + e[None, :], mask=inside, other=0.0).to(tl.float32)
    score = x
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    value = score
    if BIASED:
        value = score + tl.load(bias + e, mask=e < E, other=0.0).to(tl.float32)[None, :]
    value = tl.where(value == 0.0, 0.0, value)  # no negative zeros
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(inside, key, TAKEN)
    won_id = tl.zeros([BN, BK], tl.int32)
    won_score = tl.full([BN, BK], -float("inf"), tl.float32)
    for place in tl.static_range(K):
        best = tl.argmax(key, 1, tie_break_left=True)
        won = e[None, :] == best[:, None]
        here = (k == place)[None, :]
        won_id = tl.where(here, best[:, None].to(tl.int32), won_id)
        won_score = tl.where(here, tl.sum(tl.where(won, score, 0.0), 1)[:, None], won_score)
        key = tl.where(won, TAKEN, key)
    if SIGMOID:
        share = tl.where((k < K)[None, :], won_score, 0.0)
        share = share / (tl.sum(share, 1) + 1e-20)[:, None]
    else:
        share = tl.exp(won_score - tl.max(won_score, 1)[:, None])
        share = share / tl.sum(share, 1)[:, None]
    at = n[:, None] * K + k[None, :]
    kept = (n < tokens)[:, None] & (k < K)[None, :]
    tl.store(experts + at, won_id, mask=kept)
    tl.store(gates + at, share * SCALE, mask=kept)


def router(
    logits_NE: Tensor, k: int, *, bias_E: Tensor | None = None, sigmoid: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Experts int32 [N, K], best first, and gates float32 [N, K]: a softmax over the chosen logits, or DeepSeek-V3's sigmoids
    divided by their sum, with a bias for the choice alone; times `scale`."""
    tokens, count = logits_NE.shape
    logits_NE = logits_NE if logits_NE.stride(1) == 1 else logits_NE.contiguous()
    experts_NK = logits_NE.new_empty(tokens, k, dtype=torch.int32)
    gates_NK = logits_NE.new_empty(tokens, k, dtype=torch.float32)
    wide = triton.next_power_of_2(count)
    block = max(1, min(16, 2048 // wide))
    router_kernel[(triton.cdiv(tokens, block),)](
        logits_NE, logits_NE if bias_E is None else bias_E, experts_NK, gates_NK, tokens, logits_NE.stride(0),
        E=count, K=k, SIGMOID=sigmoid, BIASED=bias_E is not None, SCALE=scale, BE=wide, BK=triton.next_power_of_2(k), BN=block,
    )  # fmt: skip
    return experts_NK, gates_NK


@triton.jit
def histogram_kernel(experts, counts, choices, E: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """counts[b, e]: choices of expert e in block b."""
    b = tl.program_id(0)
    m = b * BM + tl.arange(0, BM)
    chosen = tl.load(experts + m, mask=m < choices, other=0).to(tl.int32)
    e = tl.arange(0, BE)
    found = tl.histogram(chosen, BE)
    found -= tl.where(
        e == 0, tl.sum((m >= choices).to(tl.int32), 0), 0
    )  # what fills the last block up counted as expert 0
    tl.store(counts + b * E + e, found, mask=e < E)


@triton.jit
def place_kernel(  # type: ignore[no-untyped-def]
    experts, base, token, slot, row, choices, K: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, CHUNK: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """The row of a choice is base[block, expert] plus how many before it in the block chose the same. Experts are taken CHUNK at
    a time, so that the one-hot matrix fits into registers."""
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


def plan(experts_NK: Tensor, experts: int) -> Plan:
    """See `plain.Plan`."""
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
    return Plan(ends_E, token_M, slot_M, row_M.view(experts_NK.shape))


SPECS = (
    *(
        Spec(
            name=f"router, {'sigmoid and bias' if sigmoid else 'softmax'}",
            kernel=router_kernel,
            types={
                "logits": "*fp32", "bias": "*fp32", "experts": "*i32", "gates": "*fp32", "tokens": "i32", "stride_n": "i32",
            },
            constants={
                "E": 128, "K": 8, "SIGMOID": sigmoid, "BIASED": sigmoid, "SCALE": 1.0, "BE": 128, "BK": 8, "BN": 16,
            },
            expect=Expect(narrow=3),  # results, of which a token has eight, and the bias
        )
        for sigmoid in (False, True)
    ),
    Spec(
        name="plan, histograms",
        kernel=histogram_kernel,
        types={"experts": "*i32", "counts": "*i32", "choices": "i32"},
        constants={"E": 128, "BE": 128, "BM": CHOICES},
        expect=Expect(narrow=2),
    ),
    Spec(
        name="plan, places",
        kernel=place_kernel,
        types={**dict.fromkeys(("experts", "base", "token", "slot", "row"), "*i32"), "choices": "i32"},
        constants={"K": 8, "E": 128, "BE": 128, "CHUNK": 32, "BM": CHOICES},
        expect=Expect(narrow=16),  # each choice to a place of its own
    ),
)  # fmt: skip
