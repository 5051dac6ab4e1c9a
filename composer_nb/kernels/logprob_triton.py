"""Log-probabilities and entropies over a vocabulary in Triton, without logits in memory: the twin of `logprob.py` on a GPU.

forward    a program takes BM rows through one of SPLITS parts of the vocabulary, BV tokens at a time: logits of a tile live in
           registers, and three numbers a row are carried along (Milakov and Gimelshein, arXiv 1805.02867, with the entropy's sum
           beside theirs): the largest logit so far, t; s = Σ e^(z − t); r = Σ (z − t) e^(z − t). The parts are put together, and
           log Σ e^z = t + ln s, entropy = ln s − r / s.
backward   logits of PIECE rows are computed once more and turned into their gradient on the spot, g · (one-hot − p); two
           ordinary products finish a piece before the next one is begun.

Dimensions: U rows of hidden states of width D, V vocabulary, S sampled tokens, C parts of the vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.moe.gemm_triton import Tiles, in_bulk, loads_in_bulk
from composer_nb.kernels.triton_runtime import interpreting

# Most parts of the vocabulary, so that few rows keep a GPU busy. No result depends on the number of rows, so this does not.
SPLITS = 8
# Rows whose logits' gradient is in memory at a time, in the backward pass.
PIECE = 4096


@triton.jit
def logit_tile(  # type: ignore[no-untyped-def]
    hidden, weight, u0, v0, U, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BV]; with BULK, hidden states and weights are descriptors."""
    acc = tl.zeros([BM, BV], tl.float32)
    u, v = u0 + tl.arange(0, BM), v0 + tl.arange(0, BV)
    for d0 in range(0, D, BD):
        if BULK:
            h, w = hidden.load([u0, d0]), weight.load([v0, d0]).T
        else:
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
    hidden, weight, out, U, D: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr,
    BD: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """t, s and r of one part of the vocabulary, PART tokens wide: out [C, 3, U]."""
    u0, part = tl.program_id(0) * BM, tl.program_id(1)
    top = tl.full([BM], -float("inf"), tl.float32)
    s, r = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    for v0 in range(part * PART, min(part * PART + PART, V), BV):
        logit = logit_tile(hidden, weight, u0, v0, U, D, V, BM, BV, BD, BULK)
        logit = tl.where((v0 + tl.arange(0, BV) < V)[None, :], logit, -float("inf"))
        higher = tl.maximum(top, tl.max(logit, 1))
        drop = tl.where(s > 0, top - higher, 0.0)
        z = logit - higher[:, None]
        e = tl.exp(z)
        r = tl.exp(drop) * (r + drop * s) + tl.sum(tl.where(e > 0, z * e, 0.0), 1)
        s = tl.exp(drop) * s + tl.sum(e, 1)
        top = higher
    u = u0 + tl.arange(0, BM)
    at = out + part.to(tl.int64) * 3 * U + u
    tl.store(at, top, mask=u < U)
    tl.store(at + U, s, mask=u < U)
    tl.store(at + 2 * U, r, mask=u < U)


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
    hidden, weight, total, g, slope, U, D: tl.constexpr, V: tl.constexpr, BM: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    BULK: tl.constexpr,
):  # fmt: skip
    """−g · p of a piece of rows, [U, V] in the dtype of `slope`."""
    u0, v0 = tl.program_id(0) * BM, tl.program_id(1) * BV
    u, v = u0 + tl.arange(0, BM), v0 + tl.arange(0, BV)
    logit = logit_tile(hidden, weight, u0, v0, U, D, V, BM, BV, BD, BULK)
    p = tl.exp(logit - tl.load(total + u, mask=u < U, other=0.0)[:, None])
    out = p * -tl.load(g + u, mask=u < U, other=0.0)[:, None]
    at = slope + u[:, None].to(tl.int64) * V + v[None, :]
    tl.store(at, out.to(slope.dtype.element_ty), mask=(u < U)[:, None] & (v < V)[None, :])


def logprob_tiles(dtype: torch.dtype) -> Tiles:
    """n is of the vocabulary, k of the width."""
    if interpreting():
        return Tiles(m=32, n=64, k=64)
    return Tiles(n=128, k=32) if dtype == torch.float32 else Tiles(stages=4)


def normalisers(hidden_UD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exponentials, and its entropy, both [U]."""
    rows, vocabulary, shape = len(hidden_UD), len(weight_VD), logprob_tiles(hidden_UD.dtype)
    hidden, weight, constants = blocks(hidden_UD, weight_VD, shape)
    part = shape.n * triton.cdiv(triton.cdiv(vocabulary, shape.n), SPLITS)
    parts = triton.cdiv(vocabulary, part)
    out_C3U = hidden_UD.new_empty(parts, 3, rows, dtype=torch.float32)
    normaliser_kernel[(triton.cdiv(rows, shape.m), parts)](hidden, weight, out_C3U, rows, PART=part, **constants)
    top_CU, s_CU, r_CU = out_C3U.unbind(1)
    top_U = top_CU.amax(0)
    drop_CU = top_CU - top_U
    s_U = (drop_CU.exp() * s_CU).sum(0)
    r_U = (drop_CU.exp() * (r_CU + drop_CU * s_CU)).sum(0)
    return top_U + s_U.log(), s_U.log() - r_U / s_U


def blocks(hidden_UD: Tensor, weight_VD: Tensor, shape: Tiles) -> tuple[Any, Any, dict[str, Any]]:
    """Return the operands of `logit_tile`, as descriptors if they load in bulk, and the constants of its kernels."""
    width = hidden_UD.shape[1]
    bulk = width % shape.k == 0 and loads_in_bulk(hidden_UD) and loads_in_bulk(weight_VD)
    hidden = in_bulk(hidden_UD, [shape.m, shape.k]) if bulk else hidden_UD
    weight = in_bulk(weight_VD, [shape.n, shape.k]) if bulk else weight_VD
    sizes = {"D": width, "V": len(weight_VD), "BM": shape.m, "BV": shape.n, "BD": shape.k, "BULK": bulk}
    return hidden, weight, sizes | {"num_warps": shape.warps, "num_stages": shape.stages}


def logprob_entropy(hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `logprob.logprob_entropy` returns, in float32: log p of `token_S` by the rows `from_S`, [S], and the entropy
    of every row, [U], which takes no part in gradients."""
    return _FusedLogprobEntropy.apply(*(x.contiguous() for x in (hidden_UD, weight_VD, from_S, token_S)))


class _FusedLogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor
    ) -> tuple[Tensor, Tensor]:
        width = hidden_UD.shape[1]
        total_U, entropy_U = normalisers(hidden_UD, weight_VD)
        logit_S = hidden_UD.new_empty(len(from_S), dtype=torch.float32)
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
        g_S, shape, vocabulary = gradients[0].float(), logprob_tiles(hidden_UD.dtype), len(weight_VD)
        g_U = torch.zeros_like(total_U).index_add_(0, from_S, g_S)
        at_sampled_S = _sum_of_equals(from_S * vocabulary + token_S, g_S) - g_U[from_S] * logprob_S.exp()
        dh_UD, dw_VD = torch.empty_like(hidden_UD), torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(hidden_UD), PIECE):
            part = slice(start, min(start + PIECE, len(hidden_UD)))
            hidden, count = hidden_UD[part], part.stop - start
            slope = hidden.new_empty(count + 1, vocabulary)  # the last row takes what is of other pieces
            rows, weight, constants = blocks(hidden, weight_VD, shape)
            slope_kernel[(triton.cdiv(count, shape.m), triton.cdiv(vocabulary, shape.n))](
                rows, weight, total_U[part], g_U[part], slope, count, **constants
            )
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
