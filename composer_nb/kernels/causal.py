"""Causal attention within rows of tokens, for training.

Long rows in float32 on a CPU go block by block: all heads of a block's queries that share a key head meet the keys up to the
block's last one in one matrix product, what is between the products is one compiled pass, and backwards the weights are computed
again from the softmax's normaliser (FlashAttention-2, arXiv 2307.08691). Nothing is padded. torch's own fused kernel takes about
1.5 times as long on rows of 512 tokens, and less on rows of 128 (`scripts/model_bench.py`).

Dimensions: N tokens, Q query heads, G key heads, r = Q/G, C width of queries and keys, V width of values, T keys of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from composer_nb.kernels.compiled import compiled, exp2, largest, total, zeros
from composer_nb.kernels.linear import widened

BLOCK = 96
"""Queries of a block: few products, and little that the mask then hides."""
LONG = 384
"""From rows of this length on it is worth it; products for short ones are too small."""
LOG2E = math.log2(math.e)
VECTORS = 32
"""Elements that compiled loops take at a time: four vectors of eight."""
HIDDEN = np.float32(-3e38)
"""A score that is below all others, and finite."""


def causal_attention(q_NQC: Tensor, k_NGC: Tensor, v_NGV: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """[N, Q, V]: each token attends to those of its row up to itself. Rows of `lengths` lie one after another; `scale` is that
    of the scores. On a CPU in float32 rows of which one has `LONG` tokens go through the blocks of this file, where a token
    with a score that is not finite comes out as NaN; all others through torch's attention, padded to one length."""
    if sum(lengths) != len(q_NQC) or not lengths:
        raise ValueError(f"rows of {list(lengths)} tokens, and {len(q_NQC)} tokens")
    dtype = q_NQC.dtype
    q_NQC, k_NGC, v_NGV = widened(q_NQC, k_NGC, v_NGV)
    if q_NQC.dtype == torch.float32 and q_NQC.device.type == "cpu" and max(lengths) >= LONG:
        blocked: Tensor = _Causal.apply(q_NQC, k_NGC, v_NGV, tuple(lengths), scale)
        return blocked.to(dtype)
    q, k, v = (padded(x, lengths) for x in (q_NQC, k_NGC, v_NGV))
    out = (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2).to(dtype)
    )
    if min(lengths) == max(lengths):
        return out.flatten(0, 1)
    return torch.cat([row[:length] for row, length in zip(out, lengths, strict=True)])


def padded(x_NQC: Tensor, lengths: Sequence[int]) -> Tensor:
    """[rows, Q, longest, C], zeros behind the shorter ones."""
    if min(lengths) == max(lengths):
        return x_NQC.unflatten(0, (len(lengths), -1)).transpose(1, 2)
    return pad_sequence(x_NQC.split(list(lengths)), batch_first=True).transpose(1, 2)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_NQC: Tensor, k_NGC: Tensor, v_NGV: Tensor, lengths: tuple[int, ...], scale: float
    ) -> Tensor:
        heads = k_NGC.shape[1]
        q_GMC, k_GNC, v_GNV = _by_head(q_NQC, heads), _by_head(k_NGC, heads), _by_head(v_NGV, heads)
        out_GMV = q_GMC.new_empty(*q_GMC.shape[:2], v_GNV.shape[2])
        norm_GM2 = q_GMC.new_empty(*q_GMC.shape[:2], 2)
        blocks = _Blocks(q_GMC.shape[1] // max(len(k_NGC), 1), lengths)
        (score,) = blocks.room(q_GMC, 1)
        for head in range(heads):
            for queries, keys, before in blocks:
                s_MT = score[: (queries.stop - queries.start) * (keys.stop - keys.start)].view(
                    queries.stop - queries.start, -1
                )
                torch.mm(q_GMC[head, queries], k_GNC[head, keys].T, out=s_MT)
                norm_M2 = norm_GM2[head, queries]
                _softmax(s_MT.numpy(), before, blocks.each, np.float32(scale * LOG2E), norm_M2.numpy())
                torch.mm(s_MT, v_GNV[head, keys], out=out_GMV[head, queries])
        out_GMV *= norm_GM2[..., 1:]
        ctx.save_for_backward(q_GMC, k_GNC, v_GNV, out_GMV, norm_GM2)
        ctx.blocks, ctx.scale = blocks, scale
        return _by_token(out_GMV, blocks.each)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_GMC, k_GNC, v_GNV, out_GMV, norm_GM2 = ctx.saved_tensors
        blocks, scale = ctx.blocks, ctx.scale
        do_GMV = _by_head(gradients[0], len(k_GNC))
        shift_GM = torch.linalg.vecdot(do_GMV, out_GMV)
        dq_GMC, dk_GNC, dv_GNV = torch.empty_like(q_GMC), torch.zeros_like(k_GNC), torch.zeros_like(v_GNV)
        weight, slope = blocks.room(q_GMC, 2)
        for head in range(len(k_GNC)):
            for queries, keys, before in blocks:
                shape = queries.stop - queries.start, keys.stop - keys.start
                w_MT, s_MT = weight[: math.prod(shape)].view(shape), slope[: math.prod(shape)].view(shape)
                q_MC, do_MV = q_GMC[head, queries], do_GMV[head, queries]
                torch.mm(q_MC, k_GNC[head, keys].T, out=w_MT)
                torch.mm(do_MV, v_GNV[head, keys].T, out=s_MT)
                arrays = (x.numpy() for x in (w_MT, s_MT, norm_GM2[head, queries], shift_GM[head, queries]))
                _slopes(*arrays, before, blocks.each, np.float32(scale * LOG2E), np.float32(scale))
                dv_GNV[head, keys].addmm_(w_MT.T, do_MV)
                dk_GNC[head, keys].addmm_(s_MT.T, q_MC)
                torch.mm(s_MT, k_GNC[head, keys], out=dq_GMC[head, queries])
        return _by_token(dq_GMC, blocks.each), _by_token(dk_GNC, 1), _by_token(dv_GNV, 1), None, None


class _Blocks:
    """Of each block: its queries, r heads a token; its keys; how many keys are before its first token."""

    def __init__(self, each: int, lengths: tuple[int, ...]) -> None:
        self.each, self.lengths = each, lengths

    def __iter__(self) -> Iterator[tuple[slice, slice, int]]:
        begin = 0
        for length in self.lengths:
            for first in range(0, length, BLOCK):
                last = min(first + BLOCK, length)
                yield slice((begin + first) * self.each, (begin + last) * self.each), slice(begin, begin + last), first
            begin += length

    def room(self, like: Tensor, parts: int) -> Tensor:
        longest = max(self.lengths, default=0)
        return like.new_empty(parts, min(BLOCK, longest) * self.each * longest)


def _by_head(x_NQC: Tensor, heads: int) -> Tensor:
    """[heads, N · r, C], the r heads of a token beside one another."""
    return x_NQC.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _by_token(x_GMC: Tensor, each: int) -> Tensor:
    return x_GMC.unflatten(1, (-1, each)).transpose(0, 1).flatten(1, 2)


@compiled
def _ends(row, before, each, width):  # type: ignore[no-untyped-def]
    """Of a row of scores: how many keys its query sees, and these filled up to whole vectors, as far as the row goes. Elements
    that are left over are computed one by one, and take as long as all others."""
    seen = before + row // each + 1
    return seen, min((seen + VECTORS - 1) // VECTORS * VECTORS, width)


@compiled
def _softmax(score, before, each, scale, norm):  # type: ignore[no-untyped-def]
    """Weights as multiples of each row's largest, in place; of each row the largest score, and what the weights are yet to be
    multiplied with, which is done to their products: there are fewer."""
    for m in range(len(score)):
        seen, end = _ends(m, before, each, score.shape[1])
        row = score[m, :end]
        for t in range(seen, end):
            row[t] = HIDDEN
        if zeros(row) != np.float32(0.0):
            score[m] = norm[m] = np.float32(np.nan)
            continue
        norm[m, 0] = largest(row)
        top = norm[m, 0]
        for t in range(end):
            row[t] = exp2((row[t] - top) * scale)
        score[m, seen:] = np.float32(0.0)
        norm[m, 1] = np.float32(1.0) / total(row)


@compiled
def _slopes(weight, slope, norm, shift, before, each, scale, factor):  # type: ignore[no-untyped-def]
    """Scores to weights, and gradients of weights to those of products of queries and keys: both in place."""
    for m in range(len(weight)):
        seen, end = _ends(m, before, each, weight.shape[1])
        w, d = weight[m, :end], slope[m, :end]
        top, share, off = norm[m, 0], norm[m, 1], shift[m]  # not a number where the row's scores were not finite
        for t in range(end):
            w[t] = exp2((w[t] - top) * scale) * share
            d[t] = w[t] * (d[t] - off) * factor
        weight[m, seen:] = slope[m, seen:] = np.float32(0.0)
