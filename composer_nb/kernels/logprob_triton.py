"""Log-probabilities and entropies over a vocabulary in Triton, without logits in memory: the twin of `logprob.py` on a GPU.

forward    a program takes BM rows through the whole vocabulary, BV tokens at a time: logits of a tile live in registers, and
           three numbers a row are carried along (Milakov and Gimelshein, arXiv 1805.02867, with the entropy's sum beside theirs):
           the largest logit so far, t; s = Σ e^(z − t); r = Σ (z − t) e^(z − t). Then log Σ e^z = t + ln s, entropy = ln s − r
/ s. backward   logits of PIECE rows are computed once more and turned into their gradient on the spot, g · (one-hot − p); two
           ordinary products finish a piece before the next one is begun.

Dimensions: U rows of hidden states of width D, V vocabulary, S sampled tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.moe.grouped_gemm_triton import Tiles
from composer_nb.kernels.triton_runtime import interpreting

PIECE = 4096
"""Rows whose logits' gradient is in memory at a time, in the backward pass."""


@triton.jit
def logit_tile(  # type: ignore[no-untyped-def]
    hidden, weight, u, v, U, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr
):
    """float32 [BM, BV]."""
    acc = tl.zeros([BM, BV], tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        mask_h, mask_w = (u < U)[:, None], (v < V)[None, :]
        if D % BD != 0:
            mask_h, mask_w = mask_h & (d < D)[None, :], mask_w & (d < D)[:, None]
        h = tl.load(hidden + u[:, None].to(tl.int64) * D + d[None, :], mask=mask_h, other=0.0)
        w = tl.load(weight + v[None, :].to(tl.int64) * D + d[:, None], mask=mask_w, other=0.0)
        acc = tl.dot(h, w, acc, input_precision="ieee")
    return acc


@triton.jit
def normaliser_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, total, entropy, U, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    u = tl.program_id(0) * BM + tl.arange(0, BM)
    top = tl.full([BM], -float("inf"), tl.float32)
    s, r = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for v0 in range(0, V, BV):
        v = v0 + tl.arange(0, BV)
        logit = logit_tile(hidden, weight, u, v, U, D, V, BM, BV, BD)
        logit = tl.where((v < V)[None, :], logit, -float("inf"))
        higher = tl.maximum(top, tl.max(logit, 1))
        drop = tl.where(s > 0, top - higher, 0.0)
        z = logit - higher[:, None]
        e = tl.exp(z)
        r = tl.exp(drop) * (r + drop * s) + tl.sum(tl.where(e > 0, z * e, 0.0), 1)
        s = tl.exp(drop) * s + tl.sum(e, 1)
        top = higher
    log_s = tl.log(s)
    tl.store(total + u, top + log_s, mask=u < U)
    tl.store(entropy + u, log_s - r / s, mask=u < U)


@triton.jit
def chosen_kernel(hidden, weight, from_s, token_s, out, S, D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the sampled tokens alone."""
    i = tl.program_id(0) * BS + tl.arange(0, BS)
    row = tl.load(from_s + i, mask=i < S, other=0).to(tl.int64)
    token = tl.load(token_s + i, mask=i < S, other=0).to(tl.int64)
    total = tl.zeros([BS, BD], tl.float32)
    for d0 in range(0, D, BD):
        d = d0 + tl.arange(0, BD)
        mask = (i < S)[:, None] & (d < D)[None, :]
        h = tl.load(hidden + row[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
        total += h * tl.load(weight + token[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + i, tl.sum(total, 1), mask=i < S)


@triton.jit
def slope_kernel(  # type: ignore[no-untyped-def]
    hidden, weight, total, g, slope, U, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """−g · p of a piece of rows, [U, V] in the dtype of `slope`."""
    u, v = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BV + tl.arange(0, BV)
    logit = logit_tile(hidden, weight, u, v, U, D, V, BM, BV, BD)
    p = tl.exp(logit - tl.load(total + u, mask=u < U, other=0.0)[:, None])
    out = p * -tl.load(g + u, mask=u < U, other=0.0)[:, None]
    at = slope + u[:, None].to(tl.int64) * V + v[None, :]
    tl.store(at, out.to(slope.dtype.element_ty), mask=(u < U)[:, None] & (v < V)[None, :])


def logprob_tiles() -> Tiles:
    """n is of the vocabulary, k of the width."""
    return Tiles(m=32, n=64, k=64) if interpreting() else Tiles(n=128)


def logprob_entropy(hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `logprob.logprob_entropy` returns, in float32: log p of `token_S` by the rows `from_S`, [S], and the entropy
    of every row, [U], which takes no part in gradients."""
    return _LogprobEntropy.apply(hidden_UD.contiguous(), weight_VD.contiguous(), from_S, token_S)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        (rows, width), vocabulary, shape = hidden_UD.shape, len(weight_VD), logprob_tiles()
        total_U, entropy_U = (hidden_UD.new_empty(rows, dtype=torch.float32) for _ in range(2))
        logit_S = hidden_UD.new_empty(len(from_S), dtype=torch.float32)
        normaliser_kernel[(triton.cdiv(rows, shape.m),)](
            hidden_UD, weight_VD, total_U, entropy_U, rows, D=width, V=vocabulary, BM=shape.m, BV=shape.n, BD=shape.k,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        chosen_kernel[(triton.cdiv(len(from_S), 16),)](
            hidden_UD, weight_VD, from_S, token_S, logit_S, len(from_S), D=width, BS=16,
            BD=min(256, triton.next_power_of_2(width)),
        )  # fmt: skip
        logprob_S = logit_S - total_U[from_S]
        ctx.save_for_backward(hidden_UD, weight_VD, from_S, token_S, total_U, logprob_S)
        ctx.mark_non_differentiable(entropy_U)
        return logprob_S, entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """d logits = Σ g · (one-hot − p) over the tokens of a row. Where a token was sampled the difference is taken in float32:
        of a likely one little is left, less than what bf16 would round away of either part."""
        hidden_UD, weight_VD, from_S, token_S, total_U, logprob_S = ctx.saved_tensors
        g_S, shape, vocabulary = gradients[0].float(), logprob_tiles(), len(weight_VD)
        g_U = torch.zeros_like(total_U).index_add_(0, from_S, g_S)
        at_sampled_S = _sum_of_equals(from_S * vocabulary + token_S, g_S) - g_U[from_S] * logprob_S.exp()
        rows, width = hidden_UD.shape
        dh_UD, dw_VD = torch.empty_like(hidden_UD), torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, rows, PIECE):
            part = slice(start, min(start + PIECE, rows))
            hidden, count = hidden_UD[part], part.stop - start
            slope = hidden.new_empty(count + 1, vocabulary)  # the last row takes what is of other pieces
            slope_kernel[(triton.cdiv(count, shape.m), triton.cdiv(vocabulary, shape.n))](
                hidden, weight_VD, total_U[part], g_U[part], slope, count, D=width, V=vocabulary, BM=shape.m, BV=shape.n,
                BD=shape.k, num_warps=shape.warps, num_stages=shape.stages,
            )  # fmt: skip
            here_S = torch.where((from_S >= start) & (from_S < part.stop), from_S - start, count)
            slope[here_S, token_S] = at_sampled_S.to(slope.dtype)
            torch.mm(slope[:count], weight_VD, out=dh_UD[part])
            dw_VD += (slope[:count].T @ hidden).float()
        return dh_UD, dw_VD.to(weight_VD.dtype), None, None


def _sum_of_equals(key_S: Tensor, value_S: Tensor) -> Tensor:
    """[S]: for each, the sum of the values that have its key."""
    sorted_S, order_S = key_S.sort(stable=True)
    run_S = torch.cat([sorted_S.new_zeros(1), (sorted_S[1:] != sorted_S[:-1]).cumsum(0)])[: len(key_S)]
    total_S = torch.zeros_like(value_S).index_add_(0, run_S, value_S[order_S])
    return torch.empty_like(value_S).scatter_(0, order_S, total_S[run_S])
