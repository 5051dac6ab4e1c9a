"""Attention on a key-value cache in Triton: `attention.cached_attention` on a GPU, where padding decides nothing.

A program takes the query heads that share a key head of one token through PART positions, in blocks of fixed size, in order, with
the softmax kept up to date (Milakov and Gimelshein, arXiv 1805.02867). Long rows have several parts, which a second kernel puts
together (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). What comes out is a function of its own row
alone, whatever is decoded beside it, which products of whole batches do not promise ("Defeating Nondeterminism in LLM Inference",
Thinking Machines, 2025).

Dimensions as in `cached.py`; V width of values, r = Q/G, P parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

# Positions at a time, or half of them for wide float32. Part of what a result is: sums are taken in this order.
BLOCK = 64
# Positions of a part; of what a result is, too.
PART = 512
# Parts of all tokens in memory at a time.
PIECE = 8192


@triton.jit
def part_kernel(  # type: ignore[no-untyped-def]
    q, k, v, slot, position, state, mix, k_slot, k_head, k_at, v_slot, v_head, v_at, scale, HEADS: tl.constexpr,
    EACH: tl.constexpr, C: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BT: tl.constexpr,
    BE: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Store, for each head and part, the largest score and the sum of exponentials, [N, P, Q, 2], and values times
    exponentials, [N, P, Q, V]."""
    token, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, row = tl.load(position + token).to(tl.int32) + 1, tl.load(slot + token).to(tl.int64)
    if part * PART >= length:
        return
    e, c, d = tl.arange(0, BE), tl.arange(0, BC), tl.arange(0, BV)
    head = group * EACH + e
    query = tl.load(
        q + (token * HEADS + head[:, None]) * C + c[None, :], mask=(e < EACH)[:, None] & (c < C)[None, :], other=0.0
    )
    keys, values = k + row * k_slot + group * k_head, v + row * v_slot + group * v_head
    top, whole = tl.full([BE], -float("inf"), tl.float32), tl.zeros([BE], tl.float32)
    mixed = tl.zeros([BE, BV], tl.float32)
    for begin in range(part * PART, min(part * PART + PART, length), BT):
        at = begin + tl.arange(0, BT)
        here = (at < length)[:, None]
        key = tl.load(keys + at[:, None] * k_at + c[None, :], mask=here & (c < C)[None, :], other=0.0)
        value = tl.load(values + at[:, None] * v_at + d[None, :], mask=here & (d < V)[None, :], other=0.0)
        score = tl.dot(query, key.T, input_precision="ieee") * scale
        score = tl.where((at < length)[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight, fade = tl.exp2(score - higher[:, None]), tl.exp2(top - higher)
        near = weight.to(value.dtype)
        mixed = tl.dot(near, value, mixed * fade[:, None], input_precision="ieee")
        if value.dtype != tl.float32:  # what rounding the weights to 16 bits left out
            mixed = tl.dot((weight - near.to(tl.float32)).to(value.dtype), value, mixed)
        whole, top = whole * fade + tl.sum(weight, 1), higher
    at_head = (token * PARTS + part) * HEADS + head
    tl.store(state + at_head * 2, top, mask=e < EACH)
    tl.store(state + at_head * 2 + 1, whole, mask=e < EACH)
    tl.store(mix + at_head[:, None] * V + d[None, :], mixed, mask=(e < EACH)[:, None] & (d < V)[None, :])


@triton.jit
def join_kernel(  # type: ignore[no-untyped-def]
    position, state, mix, out, HEADS: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """Put the parts of one head together, in order."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, d = tl.load(position + token).to(tl.int32) + 1, tl.arange(0, BV)
    top, whole, mixed = -float("inf"), 0.0, tl.zeros([BV], tl.float32)
    for part in range(0, (length + PART - 1) // PART):
        at = (token * PARTS + part) * HEADS + head
        peak = tl.load(state + at * 2)
        higher = tl.maximum(top, peak)
        fade, share = tl.exp2(top - higher), tl.exp2(peak - higher)
        whole = whole * fade + tl.load(state + at * 2 + 1) * share
        mixed = mixed * fade + tl.load(mix + at * V + d, mask=d < V, other=0.0) * share
        top = higher
    tl.store(out + (token * HEADS + head) * V + d, (mixed / whole).to(out.dtype.element_ty), mask=d < V)


def attend(
    q_NQC: Tensor, k_SGTC: Tensor, v_SGTV: Tensor, slot_N: Tensor, position_N: Tensor, scale: float | None = None
) -> Tensor:
    """Return what `cached_attention` returns, without gradients; sums are in float32. The last dimension of keys and values is
    dense."""
    assert k_SGTC.stride(-1) == v_SGTV.stride(-1) == 1, "keys and values lie side by side"
    assert not (torch.is_grad_enabled() and (q_NQC.requires_grad or k_SGTC.requires_grad)), "a cache has no gradient"
    (tokens, heads, width), groups, values = q_NQC.shape, k_SGTC.shape[1], v_SGTV.shape[-1]
    parts = triton.cdiv(k_SGTC.shape[2], PART)
    q_NQC, slot_N, position_N = (x.contiguous() for x in (q_NQC, slot_N, position_N))
    out = q_NQC.new_empty(tokens, heads, values)
    piece = min(tokens, max(1, PIECE // parts))
    state, mix = (q_NQC.new_empty(piece, parts, heads, size, dtype=torch.float32) for size in (2, values))
    sizes = {"HEADS": heads, "V": values, "PARTS": parts, "PART": PART}
    scores = {"EACH": heads // groups, "C": width} | shape(q_NQC.dtype, heads // groups, width, values)
    factor = math.log2(math.e) * (scale or 1 / math.sqrt(width))
    for n in range(0, tokens, piece or 1):
        part = slice(n, min(n + piece, tokens))
        part_kernel[(part.stop - n, groups, parts)](
            q_NQC[part], k_SGTC, v_SGTV, slot_N[part], position_N[part], state, mix, *k_SGTC.stride()[:3], *v_SGTV.stride()[:3],
            factor, **sizes, **scores,
        )  # fmt: skip
        join_kernel[(part.stop - n, heads)](
            position_N[part], state, mix, out[part], BV=scores["BV"], num_warps=1, **sizes
        )
    return out


def shape(dtype: torch.dtype, group_heads: int, width: int, values: int) -> dict[str, int]:
    """Return the sizes of a program's tiles, and its warps. Without tensor cores a product needs more registers, and float32
    twice the shared memory."""
    heads, keys, mix = (max(16, triton.next_power_of_2(size)) for size in (group_heads, width, values))
    narrow = dtype != torch.float32
    block = BLOCK if narrow or heads * max(keys, mix) <= 16 * 128 else BLOCK // 2
    return {"BE": heads, "BC": keys, "BV": mix, "BT": block, "num_warps": 4 if narrow else 8}
