"""Attention on a key-value cache in Triton: `attention.cached_attention` on a GPU, where padding decides nothing.

A program is one head of one token. It goes through the positions that it may see in blocks of fixed size, in order, with the
softmax kept up to date (Milakov and Gimelshein, arXiv 1805.02867). What comes out is a function of its own row alone, whatever
is decoded beside it, which products of whole batches do not promise ("Defeating Nondeterminism in LLM Inference", Thinking
Machines, 2025).

Dimensions as in `attention.py`; V width of values, r = Q/G.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64
"""Positions at a time. Part of what a result is: sums are taken in this order."""


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    q, k, v, slot, position, out, k_slot, k_head, k_at, v_slot, v_head, v_at, scale, HEADS: tl.constexpr, EACH: tl.constexpr,
    C: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen, row = tl.load(position + token).to(tl.int32) + 1, tl.load(slot + token).to(tl.int64)
    c, d = tl.arange(0, BC), tl.arange(0, BV)
    query = tl.load(q + (token * HEADS + head) * C + c, mask=c < C, other=0.0).to(tl.float32)
    keys, values = k + row * k_slot + head // EACH * k_head, v + row * v_slot + head // EACH * v_head
    top, whole, mixed = -float("inf"), 0.0, tl.zeros([BV], tl.float32)
    for begin in range(0, seen, BT):
        at = begin + tl.arange(0, BT)
        here = (at < seen)[:, None]
        key = tl.load(keys + at[:, None] * k_at + c[None, :], mask=here & (c < C)[None, :], other=0.0).to(tl.float32)
        score = tl.where(at < seen, tl.sum(key * query[None, :], 1) * scale, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 0))
        weight, fade = tl.exp2(score - higher), tl.exp2(top - higher)
        value = tl.load(values + at[:, None] * v_at + d[None, :], mask=here & (d < V)[None, :], other=0.0).to(
            tl.float32
        )
        mixed = mixed * fade + tl.sum(weight[:, None] * value, 0)
        whole, top = whole * fade + tl.sum(weight, 0), higher
    tl.store(out + (token * HEADS + head) * V + d, (mixed / whole).to(out.dtype.element_ty), mask=d < V)


def attend(
    q_NQC: Tensor, k_SGTC: Tensor, v_SGTV: Tensor, slot_N: Tensor, position_N: Tensor, scale: float | None = None
) -> Tensor:
    """Return what `cached_attention` returns, without gradients; sums are in float32. The last dimension of keys and values is
    dense."""
    assert k_SGTC.stride(-1) == v_SGTV.stride(-1) == 1, "keys and values lie side by side"
    assert not (torch.is_grad_enabled() and (q_NQC.requires_grad or k_SGTC.requires_grad)), "a cache has no gradient"
    tokens, heads, width = q_NQC.shape
    out = q_NQC.new_empty(tokens, heads, v_SGTV.shape[-1])
    attend_kernel[(tokens, heads)](
        q_NQC.contiguous(), k_SGTC, v_SGTV, slot_N, position_N, out, *k_SGTC.stride()[:3], *v_SGTV.stride()[:3],
        math.log2(math.e) * (scale or 1 / math.sqrt(width)), HEADS=heads, EACH=heads // k_SGTC.shape[1], C=width,
        V=out.shape[2], BT=BLOCK, BC=triton.next_power_of_2(width), BV=triton.next_power_of_2(out.shape[2]), num_warps=4,
    )  # fmt: skip
    return out
