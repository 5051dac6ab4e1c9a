"""Stored rollouts as another model computes them: the same tokens, its log-probabilities, entropies and routes.

    recompute(model, segments)   what a trainer or an engine computes at each token
    retrace(model, attempts)     the rollouts as an engine of that model would have recorded them
    reroute(attempt, routes)     a rollout with other routes on record

With `variants` this puts engines of any numerics beside trainers of any numerics on the same tokens. Nothing is sampled.

Dimensions: T tokens of a rollout, N forwarded tokens of several, L layers, K experts a token, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Trace, route_checks, route_dtype
from composer_nb.harness.rollout import Segment
from composer_nb.kernels.linear import linear
from composer_nb.trainer.learning.data import within
from composer_nb.trainer.models.transformer import Model, PackedRows

# Tokens forwarded at a time.
BUDGET = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Values of a model at the T tokens of a segment.

    Attributes:
        logprob: [T], of each token given those before; 0 for the first.
        entropy: [T], in nats, of the distribution that each token was drawn from; 0 for the first.
    """

    logprob: NDArray[np.float32]
    entropy: NDArray[np.float32]
    trace: Trace


@torch.no_grad()
def recompute(model: Model, segments: Sequence[Segment]) -> list[Recomputed]:
    """Forward each segment as a row of its own.

    Attention runs in float32, and logits become float32 before the softmax, as in the engine. Raises
    ValueError for rows that are too long.
    """
    results: list[Recomputed] = []
    for part in within(BUDGET, segments):
        lengths = [len(segment.token_ids) - 1 for segment in part]
        packed = PackedRows.of_lengths(lengths, model.config)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, packed: PackedRows = packed) -> Tensor:
            return packed.attend(layer, q.float(), k.float(), v.float(), scale).to(q.dtype)

        ids_N, next_N = (
            torch.from_numpy(np.concatenate([segment.token_ids[cut] for segment in part])).long()
            for cut in (slice(None, -1), slice(1, None))
        )
        hidden_ND, routings = model.trunk(ids_N, packed.position_N, attend)
        logprob_NV = linear(hidden_ND, model.output_weight).float().log_softmax(-1)
        streams_N = (
            logprob_NV.gather(1, next_N[:, None])[:, 0],
            -(logprob_NV.exp() * logprob_NV).sum(-1),
            torch.stack([routing.experts_NK for routing in routings], 1),
            torch.stack([routing.gates_NK for routing in routings], 1).float(),
            torch.stack([routing.margin_N for routing in routings], 1).float(),
        )
        split = zip(*(stream.split(lengths) for stream in streams_N), strict=True)
        for segment, (logprob, entropy, *routed) in zip(part, split, strict=True):
            first, trace = torch.zeros(1), trace_of(segment.token_ids, routed, model.config.num_experts)
            values = (torch.cat([first, values]).numpy() for values in (logprob, entropy))
            results.append(Recomputed(logprob=next(values), entropy=next(values), trace=trace))
    return results


def trace_of(token_ids: NDArray[np.int32], routed: Sequence[Tensor], experts: int) -> Trace:
    """Return the trace that an engine of so many `experts` records. `routed` are experts [T − 1, L, K], gates [T − 1, L, K] and
    margins [T − 1, L]: the last token is never forwarded."""
    experts_TLK, gates_TLK, margin_TL = routed
    routes, gates, margins = (
        np.concatenate([values, np.zeros((1, *values.shape[1:]), values.dtype)])
        for values in (experts_TLK.numpy().astype(route_dtype(experts)), gates_TLK.numpy(), margin_TL.numpy())
    )
    valid = np.arange(len(token_ids)) < len(token_ids) - 1
    return with_checks(Trace(routes=routes, gates=gates, margins=margins, route_valid=valid), token_ids)


def with_checks(trace: Trace, token_ids: NDArray[np.int32]) -> Trace:
    """Return the trace with checks that tie its routes to these tokens."""
    checks = route_checks(np.arange(len(token_ids)), token_ids, trace.routes)
    return replace(trace, checks=np.where(trace.route_valid, checks, 0).astype(np.uint64))


def retrace(model: Model, attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts with the log-probabilities, routes, gates and margins that an engine of `model` computes for their
    tokens."""
    traces = iter(recompute(model, [segment for attempt in attempts for segment in attempt.rollout.segments]))

    def again(segment: Segment) -> Segment:
        routings = next(traces)
        logprob = np.where(segment.acted, routings.logprob, 0).astype(np.float32)
        return replace(segment, logprob=logprob, trace=routings.trace)

    return [_with(attempt, [again(segment) for segment in attempt.rollout.segments]) for attempt in attempts]


def reroute(attempt: Attempt, routes: NDArray[np.unsignedinteger[Any]]) -> Attempt:
    """Return the attempt with `routes` [T, L, K] on record for its tokens, segment after segment, and matching checks. Raises
    ValueError for another shape."""
    segments = attempt.rollout.segments
    before = np.concatenate([segment.trace.routes for segment in segments])
    if routes.shape != before.shape:
        raise ValueError(f"routes of {routes.shape} for a rollout with routes of {before.shape}")
    parts = np.split(routes, np.cumsum([len(segment.token_ids) for segment in segments])[:-1])
    pairs = zip(segments, parts, strict=True)
    return _with(attempt, [replace(s, trace=with_checks(replace(s.trace, routes=r), s.token_ids)) for s, r in pairs])


def _with(attempt: Attempt, segments: Sequence[Segment]) -> Attempt:
    return replace(attempt, rollout=replace(attempt.rollout, segments=tuple(segments)))
