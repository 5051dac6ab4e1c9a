"""Log-probabilities and entropies of an output layer, a piece of the rows at a time.

What a loss needs of [U, V] logits is a number or two a row. Here logits live in one piece that fits a core's cache; only the
probabilities are kept, and only where a gradient will be asked for. On a GPU `logprob_triton.py` does without logits in memory.

Dimensions: U rows of hidden states of width D, V vocabulary, S sampled tokens; one row may have predicted several.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from composer_nb.kernels.attention import power_of_two
from composer_nb.kernels.compiled import compiled, dot
from composer_nb.kernels.compiled import total as sum_of
from composer_nb.kernels.linear import linear, matmul
from composer_nb.kernels.triton_runtime import choose

LOG2E = math.log2(math.e)
PIECE = 256
"""Rows at a time."""


def logprob_entropy(
    hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor, *, tile: int = 0
) -> tuple[Tensor, Tensor]:
    """log p of `token_S` by the rows `from_S` (int64), [S], and the entropy of every row in nats, [U], which takes no part in
    gradients. Both in float32, or float64 where the hidden states are. `tile`: as in `linear.py`."""
    if not tile and hidden_UD.dtype != torch.float64 and choose(hidden_UD.device)[0] == "triton":
        from composer_nb.kernels import logprob_triton

        return logprob_triton.logprob_entropy(hidden_UD, weight_VD, from_S, token_S)
    keep = torch.is_grad_enabled() and (hidden_UD.requires_grad or weight_VD.requires_grad)
    return _LogprobEntropy.apply(hidden_UD, weight_VD, from_S, token_S, tile, keep)


def _normalise(logit_PV: Tensor, prob_PV: Tensor, total_P: Tensor, entropy_P: Tensor) -> None:
    """Fills in the probabilities of each row, the logarithm of its sum of exponentials, and its entropy."""
    if logit_PV.dtype == torch.float32 and logit_PV.device.type == "cpu":
        _normalise_compiled(*(x.detach().numpy() for x in (logit_PV, prob_PV, total_P, entropy_P)))
        return
    total_P.copy_(logit_PV.logsumexp(-1))
    torch.sub(logit_PV, total_P[:, None], out=prob_PV).exp_()
    entropy_P.copy_(total_P - torch.linalg.vecdot(prob_PV, logit_PV))


@compiled("f4[:,::1], f4[:,::1], f4[::1], f4[::1]")
def _normalise_compiled(logit, prob, total, entropy):  # type: ignore[no-untyped-def]
    """With z = x − max: p = e^z / s, log-sum = max + log s, entropy = log s − Σ p·z. The exponential as in `attend_one`."""
    rows, width = logit.shape
    z, bits = np.empty(width, np.float32), np.empty(width, np.int32)
    power = bits.view(np.float32)
    for n in range(rows):
        top = logit[n, 0]
        for v in range(width):
            top = max(top, logit[n, v])
        for v in range(width):
            z[v] = logit[n, v] - top
            t = max(z[v] * np.float32(LOG2E), np.float32(-126.0))
            whole = np.int32(t - np.float32(0.5))
            bits[v] = (whole + np.int32(127)) << np.int32(23)
            prob[n, v] = power_of_two(t - np.float32(whole))
        for v in range(width):
            prob[n, v] *= power[v]
        s = sum_of(prob[n])
        share = np.float32(1.0) / s
        for v in range(width):
            prob[n, v] *= share
        log_s = np.float32(math.log(s))
        total[n] = top + log_s
        entropy[n] = log_s - dot(prob[n], z)


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_UD: Tensor, weight_VD: Tensor, from_S: Tensor, token_S: Tensor, tile: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden_UD.dtype, torch.float32)
        rows = len(hidden_UD)
        prob_UV = hidden_UD.new_empty(rows, len(weight_VD), dtype=dtype) if keep else None
        logit_S = hidden_UD.new_empty(len(from_S), dtype=dtype)
        total_U, entropy_U = (hidden_UD.new_empty(rows, dtype=dtype) for _ in range(2))
        order_S = from_S.argsort(stable=True)
        ends = torch.searchsorted(from_S[order_S], torch.arange(0, rows + PIECE, PIECE, device=from_S.device)).tolist()
        for number, start in enumerate(range(0, rows, PIECE)):
            part = slice(start, start + PIECE)
            logit_PV = linear(hidden_UD[part], weight_VD, tile).to(dtype)
            mine_S = order_S[ends[number] : ends[number + 1]]
            logit_S[mine_S] = logit_PV[from_S[mine_S] - start, token_S[mine_S]]
            share_PV = torch.empty_like(logit_PV) if prob_UV is None else prob_UV[part]
            _normalise(logit_PV, share_PV, total_U[part], entropy_U[part])
        ctx.save_for_backward(hidden_UD, weight_VD, from_S, token_S, prob_UV)
        ctx.mark_non_differentiable(entropy_U)
        return logit_S - total_U[from_S], entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        """d logits = Σ g · (one-hot − p) over the tokens of a row."""
        hidden_UD, weight_VD, from_S, token_S, prob_UV = ctx.saved_tensors
        g_S = gradients[0]
        g_U = g_S.new_zeros(len(hidden_UD)).index_add_(0, from_S, g_S)
        d_UV = prob_UV * -g_U[:, None]
        d_UV.index_put_((from_S, token_S), g_S, accumulate=True)
        d_UV = d_UV.to(hidden_UD.dtype)
        return matmul(d_UV, weight_VD), matmul(d_UV.T, hidden_UD), None, None, None, None
