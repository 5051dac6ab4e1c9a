"""Log-probabilities and entropies of an output layer, a piece of the rows at a time.

What a loss needs of [U, V] logits is a number or two a row. Here logits live in one piece that fits a core's cache; only the
probabilities are kept, and only where a gradient will be asked for. On a GPU `logprob_triton.py` does without logits in memory.

Dimensions: U rows of hidden states of width D, V vocabulary, S sampled tokens; one row may have predicted several.
"""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.compiled import LOG2E, compiled, dot, exp2, largest, zeros
from composer_nb.kernels.compiled import total as sum_of
from composer_nb.kernels.linear import compiles, linear, widened
from composer_nb.kernels.triton_runtime import choose, fused

# Rows at a time.
PIECE = 256


def logprob_entropy(hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p of `token_S` by the rows `from_S` (int64), [S], and the entropy of every row in nats, [U], which takes no part
    in gradients. Both in float32, or float64 where the hidden states are."""
    if not fused("logprob"):
        wide = torch.promote_types(hidden_UD.dtype, torch.float32)
        log_UV = linear(hidden_UD, weight_VD).to(wide).log_softmax(-1)
        return log_UV[from_S, token_S], -(log_UV.exp() * log_UV).detach().sum(-1)
    if hidden_UD.dtype != torch.float64 and choose(hidden_UD.device)[0] == "triton":
        from composer_nb.kernels import logprob_triton

        return logprob_triton.logprob_entropy(hidden_UD, weight_VD, from_S, token_S)
    keep = torch.is_grad_enabled() and (hidden_UD.requires_grad or weight_VD.requires_grad)
    return _LogprobEntropy.apply(hidden_UD, weight_VD, from_S, token_S, keep)


def _normalise(logit_PV: Tensor, total_P: Tensor, entropy_P: Tensor) -> Tensor:
    """Return the probabilities of each row, in the same memory where it can be. Fill in the logarithm of its sum of exponentials,
    and its entropy."""
    if compiles(logit_PV):
        _normalise_compiled(*(x.detach().numpy() for x in (logit_PV, total_P, entropy_P)))
        return logit_PV
    total_P.copy_(logit_PV.logsumexp(-1))
    log_PV = logit_PV.sub_(total_P[:, None])
    prob_PV = log_PV.exp()
    entropy_P.copy_(-torch.linalg.vecdot(prob_PV, log_PV))
    return prob_PV


@compiled("f4[:,::1], f4[::1], f4[::1]")
def _normalise_compiled(prob, total, entropy):  # type: ignore[no-untyped-def]
    """Turn logits into probabilities in place. With z = x − max: p = e^z / s, log-sum = max + log s, entropy = log s − Σ p·z."""
    rows, width = prob.shape
    z = np.empty(width, np.float32)
    for n in range(rows):
        row = prob[n]
        if zeros(row) != np.float32(0.0):  # one that is not finite
            row[:] = np.float32(np.nan)
            total[n] = entropy[n] = np.float32(np.nan)
            continue
        top: Any = largest(row)
        for v in range(width):
            z[v] = row[v] - top
            row[v] = exp2(z[v] * np.float32(LOG2E))
        s = sum_of(row)
        share = np.float32(1.0) / s
        for v in range(width):
            row[v] *= share
        log_s = np.float32(math.log(s))
        total[n] = top + log_s
        entropy[n] = log_s - dot(row, z)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        rows = len(hidden_UD)
        logit_S = hidden_UD.new_empty(len(from_S), dtype=dtype)
        total_U, entropy_U = (hidden_UD.new_empty(rows, dtype=dtype) for _ in range(2))
        order_S = from_S.argsort(stable=True)
        bounds = torch.searchsorted(from_S[order_S], torch.arange(0, rows + PIECE, PIECE, device=from_S.device))
        parts = (slice(start, start + PIECE) for start in range(0, rows, PIECE))
        ctx.pieces = [(part, slice(*ends)) for part, ends in zip(parts, pairwise(bounds.tolist()), strict=True)]
        wide_UD, wide_VD = widened(hidden_UD, weight_VD)
        saved_probs = []
        for part, tokens in ctx.pieces:
            logit_PV = linear(wide_UD[part], wide_VD).to(hidden_UD.dtype).to(dtype)
            mine_S = order_S[tokens]
            logit_S[mine_S] = logit_PV[from_S[mine_S] - part.start, token_S[mine_S]]
            prob_PV = _normalise(logit_PV, total_U[part], entropy_U[part])
            if keep:
                saved_probs.append(prob_PV)
        ctx.save_for_backward(hidden_UD, weight_VD, from_S, token_S, order_S, *saved_probs)
        ctx.mark_non_differentiable(entropy_U)
        return logit_S - total_U[from_S], entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        """Compute d logits = Σ g · (one-hot − p) over the tokens of a row; a piece at a time, which is memory that was just in
        use. A frozen weight has no gradient."""
        hidden_UD, weight_VD, from_S, token_S, order_S, *saved_probs = ctx.saved_tensors
        g_S = gradients[0]
        g_U = g_S.new_zeros(len(hidden_UD)).index_add_(0, from_S, g_S)
        wide_UD, wide_VD = widened(hidden_UD, weight_VD)
        d_UD = torch.empty_like(hidden_UD)
        d_VD = g_S.new_zeros(weight_VD.shape) if ctx.needs_input_grad[1] else None
        room_PV = g_S.new_empty(min(PIECE, len(hidden_UD)), len(weight_VD))
        for (part, tokens), prob_PV in zip(ctx.pieces, saved_probs, strict=True):
            mine_S = order_S[tokens]
            d_PV = torch.mul(prob_PV, -g_U[part, None], out=room_PV[: len(prob_PV)])
            d_PV.index_put_((from_S[mine_S] - part.start, token_S[mine_S]), g_S[mine_S], accumulate=True)
            d_PV = d_PV.to(hidden_UD.dtype).to(wide_VD.dtype)
            d_UD[part] = d_PV @ wide_VD
            if d_VD is None:
                continue
            if d_VD.dtype == d_PV.dtype:
                d_VD.addmm_(d_PV.T, wide_UD[part])
            else:
                d_VD += d_PV.T @ wide_UD[part]
        return d_UD, None if d_VD is None else d_VD.to(weight_VD.dtype), None, None, None
