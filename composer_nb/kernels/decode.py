"""The forward pass of a small model for new tokens on a CPU, in one compiled function a layer.

torch spends most of a step with few rows on starting operations, sixty a layer. Here all of a layer is one call, on
weights that stay in the processor's cache, so a step costs what its tokens cost. No sum runs over two tokens:
what comes out for a token depends on its rollout alone and, to the last bit, on nothing else in the batch.

Covers float32 weights of which a layer fits the cache (`fits`); everything else goes through `Model.trunk`, which defines what is
computed and which this is tested against.

Dimensions: N new tokens of all slots, U of them distinct, S rows of logits, D width, Q query heads, G key heads, C head width,
L layers, E experts, K experts a token, H expert width, V vocabulary, T cache positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_nb.kernels.attention.cached import attend_one
from composer_nb.kernels.compiled import compiled, dot, exp2

Floats = NDArray[np.float32]
CACHE_BYTES = 4 << 20
"""Weights of a layer up to this size stay in a core's cache from one token to the next."""


class LayerWeights(NamedTuple):
    """Weights of a layer, float32 and contiguous, each matrix as [in, out]."""

    attention_norm_D: Floats
    qkv_DF: Floats
    """F = (Q + 2G) · C."""
    qk_norm_HC: Floats
    """A row for each query head, then one for each key head."""
    o_AD: Floats
    """A = Q · C."""
    moe_norm_D: Floats
    router_DE: Floats
    w_in_EDF: Floats
    """F = 2H, gate and up side by side."""
    w_out_EHD: Floats


class DecodeWeights(NamedTuple):
    """A model's weights, float32 and contiguous."""

    embed_VD: Floats
    layers: tuple[LayerWeights, ...]
    final_norm_D: Floats
    output_DV: Floats
    rope_P2C: Floats
    """Cosines and sines of each position, half a head wide."""


class NewTokens(NamedTuple):
    """The tokens of a step. Token u attends on cache row slot_U[u]; what it adds to the cache is written to row_N[n] at
    position_N[n] for each n whose source_N[n] is u."""

    ids_U: NDArray[np.int64]
    position_U: NDArray[np.int64]
    slot_U: NDArray[np.int64]
    row_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    source_N: NDArray[np.int64]


def fits(layer_bytes: int) -> bool:
    """Return whether a layer of this size is better read once a token than once a batch."""
    return layer_bytes <= CACHE_BYTES


def decode(
    weights: DecodeWeights, new: NewTokens, k_LSGTC: Floats, v_LSGTC: Floats, chosen: int, eps: float
) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
    """Hidden states [U, D] after the final norm, experts [U, L, K], gates [U, L, K] and margins [U, L]. Adds to the cache."""
    shape = (len(weights.layers), len(new.ids_U))
    x_UD = weights.embed_VD[new.ids_U]
    experts_LUK = np.empty((*shape, chosen), np.int64)
    gates_LUK = np.empty((*shape, chosen), np.float32)
    margins_LU = np.empty(shape, np.float32)
    for layer, own in enumerate(weights.layers):
        recorded = experts_LUK[layer], gates_LUK[layer], margins_LU[layer]
        _layer(x_UD, own, weights.rope_P2C, np.float32(eps), new, k_LSGTC[layer], v_LSGTC[layer], *recorded)
    hidden_UD = np.empty_like(x_UD)
    _norm_rows(x_UD, weights.final_norm_D, np.float32(eps), hidden_UD)
    return hidden_UD, experts_LUK.swapaxes(0, 1), gates_LUK.swapaxes(0, 1), margins_LU.T


def project(hidden_SD: Floats, output_DV: Floats) -> Floats:
    """Logits [S, V], row by row."""
    rows = len(hidden_SD)
    even_SD = np.concatenate([hidden_SD, np.zeros((rows % 2, hidden_SD.shape[1]), np.float32)])
    logits_SV = np.empty((len(even_SD), output_DV.shape[1]), np.float32)
    _products(even_SD, output_DV, logits_SV)
    return logits_SV[:rows]


@compiled
def _layer(x, w, rope, eps, new, k, v, experts, gates, margins):  # type: ignore[no-untyped-def]
    tokens, width = x.shape
    keys, head_width = k.shape[1], k.shape[3]
    queries = len(w.qk_norm_HC) - keys
    even = tokens + tokens % 2  # products take rows in pairs
    h = np.zeros((even, width), np.float32)
    heads = np.empty((even, queries + 2 * keys, head_width), np.float32)
    for n in range(tokens):
        _norm(x[n], w.attention_norm_D, eps, h[n])
    _products(h, w.qkv_DF, heads.reshape(even, -1))
    for n in range(tokens):
        for head in range(queries + keys):
            _norm_rope(heads[n, head], w.qk_norm_HC[head], rope[new.position_U[n]], eps)
    for n in range(len(new.row_N)):
        row, at, source = new.row_N[n], new.position_N[n], new.source_N[n]
        for group in range(keys):
            for c in range(head_width):
                k[row, group, at, c] = heads[source, queries + group, c]
                v[row, group, at, c] = heads[source, queries + keys + group, c]
    score = np.empty(k.shape[2], np.float32)
    attended = np.zeros((even, queries, head_width), np.float32)
    scale = np.float32(math.log2(math.e) / math.sqrt(head_width))
    for n in range(tokens):
        slot, seen = new.slot_U[n], new.position_U[n] + 1
        attend_one(heads[n, :queries], k[slot], v[slot], seen, scale, score, attended[n])
    y = np.empty((even, width), np.float32)
    _products(attended.reshape(even, -1), w.o_AD, y)
    for n in range(tokens):
        for d in range(width):
            x[n, d] += y[n, d]
        _norm(x[n], w.moe_norm_D, eps, h[n])
    scores = np.empty((even, w.router_DE.shape[1]), np.float32)
    _products(h, w.router_DE, scores)
    for n in range(tokens):
        margins[n] = _route(scores[n], experts[n], gates[n])
    _experts(h, experts, w.w_in_EDF, w.w_out_EHD, gates, x)


@compiled
def _experts(h, experts, w_in, w_out, gates, x):  # type: ignore[no-untyped-def]
    """Add the experts' outputs to `x`, for each token in the order of its experts."""
    tokens, chosen = experts.shape
    width, inner = w_out.shape[2], w_out.shape[1]
    out = np.empty((tokens, chosen, width), np.float32)
    where = np.empty((tokens, 2), np.int64)
    for expert in range(len(w_in)):
        count = 0
        for n in range(tokens):
            for place in range(chosen):
                if experts[n, place] == expert:
                    where[count, 0], where[count, 1] = n, place
                    count += 1
        even = count + count % 2
        mine = np.zeros((even, width), np.float32)
        between, y = np.empty((even, 2 * inner), np.float32), np.empty((even, width), np.float32)
        for m in range(count):
            mine[m] = h[where[m, 0]]
        _products(mine, w_in[expert], between)
        for m in range(even):
            _swiglu(between[m])
        _products(between[:, :inner], w_out[expert], y)
        for m in range(count):
            out[where[m, 0], where[m, 1]] = y[m]
    for n in range(tokens):
        for place in range(chosen):
            for d in range(width):
                x[n, d] += gates[n, place] * out[n, place, d]


@compiled
def _products(x, w, out):  # type: ignore[no-untyped-def]
    """out[n, f] = Σ_d x[n, d] · w[d, f] for an even number of rows.

    Two rows and four terms at a time: weights are read for both rows, results are read and written a quarter as often. Each
    row's sum is taken in the same order wherever it stands, so it does not depend on its neighbours.
    """
    rows, depth = x.shape
    width = w.shape[1]
    whole = depth - depth % 4
    for n in range(0, rows, 2):
        a, b = out[n], out[n + 1]
        for f in range(width):
            a[f] = b[f] = np.float32(0.0)
        for d in range(0, whole, 4):
            a0, a1, a2, a3 = x[n, d], x[n, d + 1], x[n, d + 2], x[n, d + 3]
            b0, b1, b2, b3 = x[n + 1, d], x[n + 1, d + 1], x[n + 1, d + 2], x[n + 1, d + 3]
            w0, w1, w2, w3 = w[d], w[d + 1], w[d + 2], w[d + 3]
            for f in range(width):
                a[f] += a0 * w0[f] + a1 * w1[f] + a2 * w2[f] + a3 * w3[f]
                b[f] += b0 * w0[f] + b1 * w1[f] + b2 * w2[f] + b3 * w3[f]
        for d in range(whole, depth):
            for f in range(width):
                a[f] += x[n, d] * w[d, f]
                b[f] += x[n + 1, d] * w[d, f]


@compiled
def _norm(x, weight, eps, out):  # type: ignore[no-untyped-def]
    scale = np.float32(1.0) / np.sqrt(dot(x, x) / np.float32(len(x)) + eps)
    for d in range(len(x)):
        out[d] = x[d] * scale * weight[d]


@compiled
def _norm_rope(head, weight, rope, eps):  # type: ignore[no-untyped-def]
    """Normalises and turns a head where it lies."""
    half = len(head) // 2
    scale = np.float32(1.0) / np.sqrt(dot(head, head) / np.float32(len(head)) + eps)
    for c in range(half):
        a, b = head[c] * scale * weight[c], head[half + c] * scale * weight[half + c]
        head[c] = a * rope[0, c] - b * rope[1, c]
        head[half + c] = b * rope[0, c] + a * rope[1, c]


@compiled
def _route(scores, experts, gates):  # type: ignore[no-untyped-def]
    """Fill in the experts of the highest scores, highest first, and their gates; return the margin (`moe.Routing`)."""
    chosen, count = len(experts), len(scores)
    for place in range(chosen):
        best = -1
        for e in range(count):
            taken = False
            for before in range(place):
                taken |= experts[before] == e
            if not taken and (best < 0 or scores[e] > scores[best]):
                best = e
        experts[place] = best
    top, last = scores[experts[0]], scores[experts[chosen - 1]]
    total, picked, following = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for e in range(count):
        share = np.float32(math.exp(scores[e] - top))
        total += share
        taken = False
        for place in range(chosen):
            taken |= experts[place] == e
        if not taken:
            following = max(following, share)
    for place in range(chosen):
        gates[place] = np.float32(math.exp(scores[experts[place]] - top))
        picked += gates[place]
    for place in range(chosen):
        gates[place] /= picked
    return (np.float32(math.exp(last - top)) - following) / total


@compiled
def _swiglu(inner):  # type: ignore[no-untyped-def]
    """inner[:H] becomes silu(inner[:H]) · inner[H:]. silu(g) = g / (1 + 2^-|g|/ln 2), or that power in the numerator for
    g < 0."""
    half = len(inner) // 2
    for i in range(half):
        e = exp2(-abs(inner[i]) * np.float32(math.log2(math.e)))
        above = np.float32(1.0) if inner[i] >= 0 else e
        inner[i] = inner[i] * above / (np.float32(1.0) + e) * inner[half + i]


@compiled
def _norm_rows(x, weight, eps, out):  # type: ignore[no-untyped-def]
    for n in range(len(x)):
        _norm(x[n], weight, eps, out[n])
