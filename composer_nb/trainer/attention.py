"""Attention of new tokens on a key-value cache, one query at a time against exactly the positions that it may see.

Dimensions: N new tokens, Q query heads, G key heads, C head width, S cache slots, T cache positions.
`cached_attention` picks numba on a CPU (no padding is read, no compiler is needed) and the plain torch form elsewhere;
`cached_attention_reference` is the definition that both are tested against.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch
from torch import Tensor


def cached_attention(q_NQC: Tensor, k_SGTC: Tensor, v_SGTC: Tensor, slot_N: Tensor, position_N: Tensor) -> Tensor:
    """[N, Q, C], all float32: token n attends to positions 0..position_N[n] of cache row slot_N[n], where its own key already lies."""
    if q_NQC.device.type != "cpu":
        return cached_attention_reference(q_NQC, k_SGTC, v_SGTC, slot_N, position_N)
    q_NQC = q_NQC.contiguous()
    out = torch.empty_like(q_NQC)
    arrays = (x.numpy() for x in (q_NQC, k_SGTC, v_SGTC, slot_N, position_N, out))
    _attend(*arrays)
    return out


def cached_attention_reference(
    q_NQC: Tensor, k_SGTC: Tensor, v_SGTC: Tensor, slot_N: Tensor, position_N: Tensor
) -> Tensor:
    """The same with whole cache rows and a mask."""
    groups = q_NQC.shape[1] // k_SGTC.shape[1]
    longest = int(position_N.max()) + 1
    k_NQTC = k_SGTC[slot_N, :, :longest].repeat_interleave(groups, dim=1)
    v_NQTC = v_SGTC[slot_N, :, :longest].repeat_interleave(groups, dim=1)
    score_NQT = torch.einsum("nqc,nqtc->nqt", q_NQC, k_NQTC) / math.sqrt(q_NQC.shape[-1])
    hidden_NT = torch.arange(longest, device=q_NQC.device) > position_N[:, None]
    weight_NQT = score_NQT.masked_fill(hidden_NT[:, None], -math.inf).softmax(-1)
    return torch.einsum("nqt,nqtc->nqc", weight_NQT, v_NQTC)


@numba.njit(fastmath={"reassoc", "contract", "nsz"}, cache=True, error_model="numpy")
def _attend(q, k, v, slot, position, out):  # type: ignore[no-untyped-def]
    tokens, heads, width = q.shape
    groups = heads // k.shape[1]
    scale = np.float32(1.0 / math.sqrt(width))
    score = np.empty((groups, k.shape[2]), dtype=np.float32)
    total = np.empty((groups, width), dtype=np.float32)
    for n in range(tokens):
        last = position[n] + 1
        for g in range(k.shape[1]):
            keys, values = k[slot[n], g], v[slot[n], g]
            for h in range(groups):
                query = q[n, g * groups + h]
                top = np.float32(-np.inf)
                for t in range(last):
                    s = np.float32(0.0)
                    for c in range(width):
                        s += query[c] * keys[t, c]
                    s *= scale
                    score[h, t] = s
                    top = max(top, s)
                norm = np.float32(0.0)
                for t in range(last):
                    w = np.exp(score[h, t] - top)
                    score[h, t] = w
                    norm += w
                total[h, :] = 0.0
                inverse = np.float32(1.0) / norm
                for t in range(last):
                    w = score[h, t] * inverse
                    for c in range(width):
                        total[h, c] += w * values[t, c]
                out[n, g * groups + h] = total[h]
