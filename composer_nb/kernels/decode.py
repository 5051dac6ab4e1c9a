"""The forward pass of a small model for new tokens on a CPU, in one compiled function a layer.

torch spends most of a step with few rows on starting operations, sixty a layer. Here all of a layer is one call, on
weights that stay in the processor's cache, so a step costs what its tokens cost. No sum runs over two tokens:
what comes out for a token depends on its rollout alone and, to the last bit, on nothing else in the batch.

Covers float32 weights of which a layer fits the cache (`fits`); everything else goes through `Model.trunk`, which defines what is
computed and which this is tested against.

Dimensions: N new tokens of all slots, U of them distinct, S rows of logits, D width, Q query heads, G key heads, C head width,
L layers, E experts, K experts a token, H expert width, V vocabulary, T cache positions.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_nb.kernels.attention.cached import attend_one
from composer_nb.kernels.compiled import compiled, exp2
from composer_nb.kernels.norm import norm_row, norm_rows, norm_turn
from composer_nb.kernels.tiles import BLOCK, WIDTH, Floats, Matrix, products


class LayerWeights(NamedTuple):
    """Weights of a layer, contiguous, each matrix in panels.

    Attributes:
        qkv: F = (Q + 2G) · C.
        qkv_bias_F: Empty: none.
        qk_norm_HC: A row for each query head, then one for each key head. Empty: no norm.
        count: Experts; 0: a dense layer, in the place of the first.
        w_in: A leading dimension of experts; F = 2H, gate and up side by side.
    """

    attention_norm_D: Floats
    qkv: Matrix
    qkv_bias_F: Floats
    qk_norm_HC: Floats
    o: Matrix
    moe_norm_D: Floats
    count: int  # type: ignore[assignment]  # of a NamedTuple, whose method nobody calls
    router: Matrix
    w_in: Matrix
    w_out: Matrix


class DecodeWeights(NamedTuple):
    """A model's weights, contiguous. All matrices but the embedding are of one dtype.

    Attributes:
        rope_P2C: Cosines and sines of each position, half a head wide.
    """

    embed_VD: Floats
    layers: tuple[LayerWeights, ...]
    final_norm_D: Floats
    output: Matrix
    rope_P2C: Floats


class NewTokens(NamedTuple):
    """The tokens of a step. Token u attends on cache row slot_U[u]; what it adds to the cache is written to row_N[n] at
    position_N[n] for each n whose source_N[n] is u."""

    ids_U: NDArray[np.int64]
    position_U: NDArray[np.int64]
    slot_U: NDArray[np.int64]
    row_N: NDArray[np.int64]
    position_N: NDArray[np.int64]
    source_N: NDArray[np.int64]


def decode(
    weights: DecodeWeights, new: NewTokens, k_LSGTC: Floats, v_LSGTC: Floats, experts_per_token: int, eps: float
) -> tuple[Floats, NDArray[np.int64], Floats, Floats]:
    """Forward tokens and add them to the cache. Return hidden states [U, D] after the final norm, experts and gates [U, L, K],
    and margins [U, L]."""
    shape = (len(weights.layers), len(new.ids_U))
    is_moe = np.array([layer_weights.count > 0 for layer_weights in weights.layers])
    x_UD = weights.embed_VD[new.ids_U]
    experts_LUK = np.empty((*shape, experts_per_token), np.int64)
    gates_LUK = np.empty((*shape, experts_per_token), np.float32)
    margins_LU = np.empty(shape, np.float32)
    for layer, layer_weights in enumerate(weights.layers):
        records = experts_LUK[layer], gates_LUK[layer], margins_LU[layer]
        _layer(x_UD, layer_weights, weights.rope_P2C, np.float32(eps), new, k_LSGTC[layer], v_LSGTC[layer], *records)
    hidden_UD = np.empty_like(x_UD)
    norm_rows(x_UD, weights.final_norm_D, eps, hidden_UD, np.empty(len(x_UD), np.float32))
    return hidden_UD, experts_LUK[is_moe].swapaxes(0, 1), gates_LUK[is_moe].swapaxes(0, 1), margins_LU[is_moe].T


def project(hidden_SD: Floats, output: Matrix, vocabulary: int) -> Floats:
    """Return logits [S, V], row by row."""
    logits = np.empty((len(hidden_SD), len(output.panels) * WIDTH), np.float32)
    products(hidden_SD, output.panels, output.scale, logits)
    return logits[:, :vocabulary]


@compiled
def _layer(x, w, rope, eps, new, k, v, experts, gates, margins):  # type: ignore[no-untyped-def]
    """Apply a layer to `x` [U, D] in place; add its keys and values to the cache, and fill in its routing."""
    tokens, width = x.shape
    keys, head_width = k.shape[1], k.shape[3]
    queries = w.o.panels.shape[1] // head_width
    h = np.empty((tokens, width), np.float32)
    for n in range(tokens):
        norm_row(x[n], w.attention_norm_D, eps, h[n])
    joined = np.empty((tokens, len(w.qkv.panels) * WIDTH), np.float32)
    products(h, w.qkv.panels, w.qkv.scale, joined)
    for n in range(tokens):
        for f in range(len(w.qkv_bias_F)):
            joined[n, f] += w.qkv_bias_F[f]
        heads = joined[n, : (queries + 2 * keys) * head_width].reshape(-1, head_width)
        for head in range(queries + keys):
            if len(w.qk_norm_HC):
                norm_turn(heads[head], w.qk_norm_HC[head], rope[new.position_U[n]], eps, heads[head])
            else:
                _rope(heads[head], rope[new.position_U[n]])
    for n in range(len(new.row_N)):
        row, position, source = new.row_N[n], new.position_N[n], new.source_N[n]
        for group in range(keys):
            for c in range(head_width):
                k[row, group, position, c] = joined[source, (queries + group) * head_width + c]
                v[row, group, position, c] = joined[source, (queries + keys + group) * head_width + c]
    score = np.empty((queries // keys, k.shape[2]), np.float32)
    attended = np.empty((tokens, queries, head_width), np.float32)
    scale = np.float32(math.log2(math.e) / math.sqrt(head_width))
    for n in range(tokens):
        slot, length = new.slot_U[n], new.position_U[n] + 1
        heads = joined[n, : queries * head_width].reshape(-1, head_width)
        attend_one(heads, k[slot], v[slot], length, scale, score, attended[n])
    y = np.empty((tokens, len(w.o.panels) * WIDTH), np.float32)
    products(attended.reshape(tokens, -1), w.o.panels, w.o.scale, y)
    for n in range(tokens):
        for d in range(width):
            x[n, d] += y[n, d]
        norm_row(x[n], w.moe_norm_D, eps, h[n])
    if w.count:
        scores = np.empty((tokens, len(w.router.panels) * WIDTH), np.float32)
        products(h, w.router.panels, w.router.scale, scores)
        for n in range(tokens):
            margins[n] = _route(scores[n, : w.count], experts[n], gates[n])
        _experts(h, experts, w.w_in, w.w_out, gates, x)
    else:
        _dense(h, w.w_in, w.w_out, x)


@compiled
def _dense(h, w_in, w_out, x):  # type: ignore[no-untyped-def]
    """Add the output of a dense layer to `x`."""
    between = np.empty((len(h), w_in.panels.shape[1] * WIDTH), np.float32)
    y = np.empty((len(h), w_out.panels.shape[1] * WIDTH), np.float32)
    _swiglu_products(h, 0, w_in, w_out, between, y)
    for n in range(len(h)):
        for d in range(x.shape[1]):
            x[n, d] += y[n, d]


@compiled
def _swiglu_products(h, expert, w_in, w_out, between, y):  # type: ignore[no-untyped-def]
    """y = (silu(h · gate) · (h · up)) · w_out of an expert, with room for what lies between."""
    inner = w_out.panels.shape[2]
    products(h, w_in.panels[expert], w_in.scale[expert], between)
    acted = np.empty((len(h), inner), np.float32)
    for m in range(len(h)):
        _swiglu(between[m], acted[m])
    products(acted, w_out.panels[expert], w_out.scale[expert], y)


@compiled
def _experts(h, experts, w_in, w_out, gates, x):  # type: ignore[no-untyped-def]
    """Add the experts' outputs to `x`, for each token in the order of their numbers. A block of an expert's tokens stays in the
    cache from its gathering to its sum."""
    tokens, choices = experts.shape
    end = np.zeros(len(w_in.panels) + 1, np.int64)
    for n in range(tokens):
        for rank in range(choices):
            end[experts[n, rank] + 1] += 1
    end = np.cumsum(end)
    starts, pairs = end.copy(), np.empty((tokens * choices, 2), np.int64)
    for n in range(tokens):
        for rank in range(choices):
            row = starts[experts[n, rank]]
            starts[experts[n, rank]] += 1
            pairs[row, 0], pairs[row, 1] = n, rank
    gathered = np.empty((BLOCK, h.shape[1]), np.float32)
    y = np.empty((BLOCK, w_out.panels.shape[1] * WIDTH), np.float32)
    between = np.empty((BLOCK, w_in.panels.shape[1] * WIDTH), np.float32)
    for expert in range(len(w_in.panels)):
        for first in range(end[expert], end[expert + 1], BLOCK):
            count = min(BLOCK, end[expert + 1] - first)
            for m in range(count):
                n = pairs[first + m, 0]
                for d in range(h.shape[1]):
                    gathered[m, d] = h[n, d]
            _swiglu_products(gathered[:count], expert, w_in, w_out, between[:count], y[:count])
            for m in range(count):
                n, gate = pairs[first + m, 0], gates[pairs[first + m, 0], pairs[first + m, 1]]
                for d in range(x.shape[1]):
                    x[n, d] += gate * y[m, d]


@compiled
def _rope(head, rope):  # type: ignore[no-untyped-def]
    """Turn a head in place."""
    half = len(head) // 2
    for c in range(half):
        a, b = head[c], head[half + c]
        head[c] = a * rope[0, c] - b * rope[1, c]
        head[half + c] = b * rope[0, c] + a * rope[1, c]


@compiled
def _route(scores, experts, gates):  # type: ignore[no-untyped-def]
    """Fill in the experts of the highest scores, highest first, and their gates; return the margin (`moe.Routing`)."""
    choices, count = len(experts), len(scores)
    for rank in range(choices):
        best = -1
        for e in range(count):
            is_chosen = False
            for earlier in range(rank):
                is_chosen |= experts[earlier] == e
            if not is_chosen and (best < 0 or scores[e] > scores[best]):
                best = e
        experts[rank] = best
    top, last = scores[experts[0]], scores[experts[choices - 1]]
    total, chosen_sum, next_best = np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for e in range(count):
        share = np.float32(math.exp(scores[e] - top))
        total += share
        is_chosen = False
        for rank in range(choices):
            is_chosen |= experts[rank] == e
        if not is_chosen:
            next_best = max(next_best, share)
    for rank in range(choices):
        gates[rank] = np.float32(math.exp(scores[experts[rank]] - top))
        chosen_sum += gates[rank]
    for rank in range(choices):
        gates[rank] /= chosen_sum
    return (np.float32(math.exp(last - top)) - next_best) / total


@compiled
def _swiglu(inner, out):  # type: ignore[no-untyped-def]
    """out = silu(inner[:H]) · inner[H:2H]. silu(g) = g / (1 + 2^-|g|/ln 2), or that power in the numerator for g < 0."""
    half = len(out)
    for i in range(half):
        e = exp2(-abs(inner[i]) * np.float32(math.log2(math.e)))
        above = np.float32(1.0) if inner[i] >= 0 else e
        out[i] = inner[i] * above / (np.float32(1.0) + e) * inner[half + i]
