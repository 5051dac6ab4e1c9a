"""Attention of new tokens on a key-value cache, one query at a time against exactly the positions that it may see.

Dimensions: N new tokens, Q query heads, G key heads, C head width (of queries and keys; that of values may be another), S cache
slots, T cache positions.
`cached_attention` picks numba on a CPU (no padding is read, no compiler is needed), Triton on a GPU that its kernels are for, and
the plain torch form elsewhere; `cached_attention_reference` is the definition that all are tested against.
"""

import math

import numpy as np
import torch
from torch import Tensor

from composer_nb.kernels.compiled import compiled, dot, exp2, largest, total
from composer_nb.kernels.tiles import LANES, dots, mixed
from composer_nb.kernels.triton_runtime import choose, fused


def cached_attention(
    q_NQC: Tensor, k_SGTC: Tensor, v_SGTC: Tensor, slot_N: Tensor, position_N: Tensor, scale: float | None = None
) -> Tensor:
    """Return [N, Q, width of values]: token n attends to positions 0..position_N[n] of cache row slot_N[n], its own key among
    them. All are of one dtype: float32, float64, or bfloat16 in Triton, which sums in float32. `scale` is that of the scores,
    C^-½ if not given."""
    where = q_NQC.device
    if where.type != "cpu" and q_NQC.dtype != torch.float64 and choose(where, kernel="attention")[0] == "triton":
        from composer_nb.kernels.attention.cached_triton import attend

        return attend(q_NQC, k_SGTC, v_SGTC, slot_N, position_N, scale)
    if where.type != "cpu" or q_NQC.dtype != torch.float32 or not fused("attention"):
        return cached_attention_reference(q_NQC, k_SGTC, v_SGTC, slot_N, position_N, scale)
    if (position_N >= k_SGTC.shape[2]).any():
        raise ValueError(f"position_N holds {int(position_N.max())}; the cache has {k_SGTC.shape[2]} positions, from 0")
    # The compiled loops load vectors from row to row, whatever the strides are.
    q_NQC, k_SGTC, v_SGTC = (x.contiguous() for x in (q_NQC, k_SGTC, v_SGTC))
    out = q_NQC.new_empty(*q_NQC.shape[:2], v_SGTC.shape[-1])
    arrays = (x.numpy() for x in (q_NQC, k_SGTC, v_SGTC, slot_N, position_N, out))
    _attend(*arrays, np.float32(math.log2(math.e) * (scale or 1 / math.sqrt(q_NQC.shape[-1]))))
    return out


def cached_attention_reference(
    q_NQC: Tensor, k_SGTC: Tensor, v_SGTC: Tensor, slot_N: Tensor, position_N: Tensor, scale: float | None = None
) -> Tensor:
    """Return the same, computed with whole cache rows and a mask."""
    scale = scale or 1 / math.sqrt(q_NQC.shape[-1])
    groups = q_NQC.shape[1] // k_SGTC.shape[1]
    longest = int(position_N.max()) + 1
    k_NQTC = k_SGTC[slot_N, :, :longest].repeat_interleave(groups, dim=1)
    v_NQTC = v_SGTC[slot_N, :, :longest].repeat_interleave(groups, dim=1)
    score_NQT = torch.einsum("nqc,nqtc->nqt", q_NQC, k_NQTC) * scale
    hidden_NT = torch.arange(longest, device=q_NQC.device) > position_N[:, None]
    weight_NQT = score_NQT.masked_fill(hidden_NT[:, None], -math.inf).softmax(-1)
    return torch.einsum("nqt,nqtc->nqc", weight_NQT, v_NQTC)


@compiled
def _attend(q, k, v, slot, position, out, scale):  # type: ignore[no-untyped-def]
    score = np.empty((q.shape[1] // k.shape[1], k.shape[2]), dtype=np.float32)
    for n in range(len(q)):
        attend_one(q[n], k[slot[n]], v[slot[n]], position[n] + 1, scale, score, out[n])


@compiled
def attend_one(q, k, v, length, scale, score, out):  # type: ignore[no-untyped-def]
    """One token's heads [Q, C] on the first `length` positions of its row [G, T, C]. `score` [Q / G, T] is scratch space. Softmax
    in base 2, so `scale` is that of the scores over ln 2."""
    heads, width = len(score), v.shape[2]
    whole = length - length % LANES if q.shape[1] % LANES == 0 else 0
    for group in range(len(k)):
        keys, values, mix = k[group], v[group], out[group * heads : (group + 1) * heads]
        for head in range(heads):
            query, row = q[group * heads + head], score[head]
            for t in range(0, whole, LANES):
                dots(query, keys, t, row)
            for t in range(whole, length):
                row[t] = dot(query, keys[t])
            for t in range(length):
                row[t] *= scale
            top = largest(row[:length])
            for t in range(length):
                row[t] = exp2(row[t] - top)
            share = np.float32(1.0) / total(row[:length])
            for t in range(length):
                row[t] *= share
        if width % LANES == 0:
            mixed(score, values, length, mix)
        else:
            mix[:] = np.float32(0.0)
            for head in range(heads):
                for t in range(length):
                    for c in range(width):
                        mix[head, c] += score[head, t] * values[t, c]
