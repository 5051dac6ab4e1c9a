"""Causal attention within rows of tokens, for training.

Long rows in float32 on a CPU go block by block: all heads of a block's queries that share a key head meet the keys up to the
block's last one in one matrix product, what is between the products is one compiled pass, and backwards the weights are computed
again from the softmax's normaliser (FlashAttention-2, arXiv 2307.08691). Nothing is padded. A block's scores are in memory once,
backwards twice, for all heads. torch's own fused kernel takes about 1.5 times as long on rows of 512 tokens
(`scripts/bench/model_bench.py`), and less on rows of 128.

Dimensions: N tokens, Q query heads, G key heads, r = Q/G, M = N·r, C width of queries and keys, V width of values; of a block, B
queries of a key head and T keys.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pad_sequence

from composer_nb.kernels.compiled import LOG2E, compiled, exp2, largest, total, zeros
from composer_nb.kernels.linear import widened
from composer_nb.kernels.triton_runtime import fused

# Queries of a block: few products, and little that the mask then hides.
BLOCK = 96
# Shortest row for which blocks are faster; the products of shorter ones are too small.
LONG = 384
# Elements that compiled loops take at a time: four vectors of eight.
VECTORS = 32
# A score that no other is below, and finite.
HIDDEN = np.finfo(np.float32).min


def causal_attention(q_NQC: Tensor, k_NGC: Tensor, v_NGV: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Return attention [N, Q, V]: each token attends to those of its row up to itself. Rows of `lengths` lie one after another;
    `scale` is that of the scores. On a CPU in float32 rows of which one has `LONG` tokens go through the blocks of this file,
    where a token with a score that is not finite comes out as NaN, and values of 1e38 / T and more may overflow; all others
    through torch's attention, padded to one length."""
    if sum(lengths) != len(q_NQC) or not lengths:
        raise ValueError(f"rows of {list(lengths)} tokens, and {len(q_NQC)} tokens")
    dtype = q_NQC.dtype
    q_NQC, k_NGC, v_NGV = widened(q_NQC, k_NGC, v_NGV)
    if q_NQC.dtype == torch.float32 and q_NQC.device.type == "cpu" and max(lengths) >= LONG and fused("attention"):
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
    """Return [rows, Q, longest, C], zeros behind the shorter ones."""
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
        group_heads = q_GMC.shape[1] // max(k_GNC.shape[1], 1)
        (score,) = _room(q_GMC, group_heads, lengths, 1)
        for queries, keys, before in _blocks(group_heads, lengths):
            s_GMT = _scores(score, heads, queries, keys)
            torch.bmm(q_GMC[:, queries], k_GNC[:, keys].mT, out=s_GMT)
            norm_GB2 = norm_GM2[:, queries]
            _softmax(s_GMT.numpy(), before, group_heads, np.float32(scale * LOG2E), norm_GB2.numpy())
            out_GMV[:, queries] = torch.bmm(s_GMT, v_GNV[:, keys]).mul_(norm_GB2[..., 1:])
        ctx.save_for_backward(q_GMC, k_GNC, v_GNV, out_GMV, norm_GM2)
        ctx.group_heads, ctx.lengths, ctx.scale = group_heads, lengths, scale
        return _by_token(out_GMV, group_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q_GMC, k_GNC, v_GNV, out_GMV, norm_GM2 = ctx.saved_tensors
        group_heads, lengths, scale, heads = ctx.group_heads, ctx.lengths, ctx.scale, len(k_GNC)
        do_GMV = _by_head(gradients[0], heads)
        shift_GM = torch.linalg.vecdot(do_GMV, out_GMV)
        dq_GMC, dk_GNC, dv_GNV = torch.empty_like(q_GMC), torch.zeros_like(k_GNC), torch.zeros_like(v_GNV)
        weight, slope = _room(q_GMC, group_heads, lengths, 2)
        for queries, keys, before in _blocks(group_heads, lengths):
            w_GMT, s_GMT = (_scores(x, heads, queries, keys) for x in (weight, slope))
            q_GBC, k_GTC, do_GBV = q_GMC[:, queries], k_GNC[:, keys], do_GMV[:, queries]
            torch.bmm(q_GBC, k_GTC.mT, out=w_GMT)
            torch.bmm(do_GBV, v_GNV[:, keys].mT, out=s_GMT)
            arrays = (x.numpy() for x in (w_GMT, s_GMT, norm_GM2[:, queries], shift_GM[:, queries]))
            _slopes(*arrays, before, group_heads, np.float32(scale * LOG2E), np.float32(scale))
            dv_GNV[:, keys].baddbmm_(w_GMT.mT, do_GBV)
            dk_GNC[:, keys].baddbmm_(s_GMT.mT, q_GBC)
            dq_GMC[:, queries] = torch.bmm(s_GMT, k_GTC)
        return _by_token(dq_GMC, group_heads), _by_token(dk_GNC, 1), _by_token(dv_GNV, 1), None, None


def _blocks(group_heads: int, lengths: tuple[int, ...]) -> Iterator[tuple[slice, slice, int]]:
    """Yield the queries of each block (r heads a token), its keys, and the number of keys before the first token."""
    begin = 0
    for length in lengths:
        for first in range(0, length, BLOCK):
            last = begin + min(first + BLOCK, length)
            yield slice((begin + first) * group_heads, last * group_heads), slice(begin, last), first
        begin += length


def _room(q_GMC: Tensor, group_heads: int, lengths: tuple[int, ...], parts: int) -> Tensor:
    """Return memory for the scores of any block, `parts` times."""
    longest = max(lengths, default=0)
    return q_GMC.new_empty(parts, len(q_GMC) * min(BLOCK, longest) * group_heads * longest)


def _scores(room: Tensor, heads: int, queries: slice, keys: slice) -> Tensor:
    """Return the first of it as [heads, queries, keys]."""
    shape = heads, queries.stop - queries.start, keys.stop - keys.start
    return room[: math.prod(shape)].view(shape)


def _by_head(x_NQC: Tensor, heads: int) -> Tensor:
    """Return [heads, N · r, C], the r heads of a token beside one another."""
    return x_NQC.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _by_token(x_GMC: Tensor, group_heads: int) -> Tensor:
    return x_GMC.unflatten(1, (-1, group_heads)).transpose(0, 1).flatten(1, 2)


@compiled
def _ends(row, before, group_heads, width):  # type: ignore[no-untyped-def]
    """Return how many keys the query of a row of scores sees, and that number rounded up to whole vectors within the row.
    Elements that are left over are computed one by one, and take as long as all others."""
    length = before + row // group_heads + 1
    return length, min((length + VECTORS - 1) // VECTORS * VECTORS, width)


@compiled
def _softmax(score, before, group_heads, scale, norm):  # type: ignore[no-untyped-def]
    """Weights as multiples of each row's largest, in place; of each row the largest score, and what the weights are yet to be
    multiplied with, which is done to their products: there are fewer."""
    heads, rows, width = score.shape
    for g in range(heads):
        for m in range(rows):
            length, end = _ends(m, before, group_heads, width)
            row = score[g, m, :end]
            for t in range(length, end):
                row[t] = HIDDEN
            if zeros(row) != np.float32(0.0):
                score[g, m] = norm[g, m] = np.float32(np.nan)
                continue
            norm[g, m, 0] = largest(row)
            top = norm[g, m, 0]
            for t in range(end):
                row[t] = exp2((row[t] - top) * scale)
            score[g, m, length:] = np.float32(0.0)
            norm[g, m, 1] = np.float32(1.0) / total(row)


@compiled
def _slopes(weight, slope, norm, shift, before, group_heads, scale, factor):  # type: ignore[no-untyped-def]
    """Scores to weights, and gradients of weights to those of products of queries and keys: both in place."""
    heads, rows, width = weight.shape
    for g in range(heads):
        for m in range(rows):
            length, end = _ends(m, before, group_heads, width)
            w, d = weight[g, m, :end], slope[g, m, :end]
            top, share, off = norm[g, m, 0], norm[g, m, 1], shift[g, m]  # not numbers where scores were not finite
            for t in range(end):
                w[t] = exp2((w[t] - top) * scale) * share
                d[t] = w[t] * (d[t] - off) * factor
            weight[g, m, length:] = slope[g, m, length:] = np.float32(0.0)
