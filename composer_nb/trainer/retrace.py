"""Stored rollouts as another model finds them: the same tokens, with its log-probabilities, entropies and routes.

    recompute(model, segments)   what a trainer (or an engine) computes at each token
    retrace(model, attempts)     the rollouts as an engine of that model would have recorded them, had it written these tokens
    reroute(attempt, routes)     a rollout with other routes on record; for questions of the form “what if nobody had noticed”

With `variants` beside it this puts engines of any numerics next to trainers of any numerics on the very same tokens, so that
pairs can be compared token by token. It samples nothing: how an engine would have gone on is not its subject.

Dimensions: T tokens of a rollout, N forwarded tokens of several, L layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.policy import Trace, route_checks, route_dtype
from composer_nb.harness.rollout import Segment
from composer_nb.kernels.routing import Replay, Routing
from composer_nb.trainer.model import Model, PackedRows

BUDGET = 4096
"""Tokens that are forwarded at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """What a model computes at the T tokens of a segment."""

    logprob: NDArray[np.float32]
    """[T], of each token given those before; 0 for the first."""
    entropy: NDArray[np.float32]
    """[T], in nats, of the distribution that each token was drawn from; 0 for the first."""
    trace: Trace


@torch.no_grad()
def recompute(model: Model, segments: Sequence[Segment], *, replay: bool = False) -> list[Recomputed]:
    """Forwards each segment as a row of its own, with `replay` on the routes that it has on record. Attention is computed in
    float32 and logits become float32 before the softmax, as in the engine; of a model in batch-invariant mode it is the engine's
    own arithmetic, and so its very numbers. Raises ValueError for rows that are too long and for
    routes that do not fit the model."""
    found: list[Recomputed] = []
    for part in _parts(segments):
        lengths = [len(segment.token_ids) - 1 for segment in part]
        packed = PackedRows.of_lengths(lengths, model.config)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, packed: PackedRows = packed) -> Tensor:
            attend = packed.attend_one_by_one if model.tile else packed.attend
            return attend(layer, q.float(), k.float(), v.float(), scale).to(q.dtype)

        ids_N, next_N = (
            torch.from_numpy(np.concatenate([segment.token_ids[cut] for segment in part])).long()
            for cut in (slice(None, -1), slice(1, None))
        )
        routes = np.concatenate([segment.trace.routes[:-1] for segment in part]) if replay else None
        given = None if routes is None else Replay(experts=torch.from_numpy(routes.astype(np.int64)))
        hidden_ND, routings = model.trunk(ids_N, packed.position_N, attend, given)
        logprob_NV = model.linear(hidden_ND, model.output_weight).float().log_softmax(-1)
        logprob_N = logprob_NV.gather(1, next_N[:, None])[:, 0]
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
        traces = _traces(part, routings, route_dtype(model.config.num_experts))
        for logprob, entropy, trace in zip(logprob_N.split(lengths), entropy_N.split(lengths), traces, strict=True):
            first = torch.zeros(1)
            found.append(
                Recomputed(
                    logprob=torch.cat([first, logprob]).numpy(),
                    entropy=torch.cat([first, entropy]).numpy(),
                    trace=trace,
                )
            )
    return found


def retrace(model: Model, attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts with the log-probabilities, routes, gates and margins that an engine of `model` computes for their tokens."""
    segments = [_only(done) for done in attempts]
    made = []
    for done, segment, seen in zip(attempts, segments, recompute(model, segments), strict=True):
        logprob = np.where(segment.acted, seen.logprob, 0).astype(np.float32)
        made.append(_with(done, replace(segment, logprob=logprob, trace=seen.trace)))
    return made


def reroute(done: Attempt, routes: NDArray[np.unsignedinteger[Any]]) -> Attempt:
    """The attempt with `routes` [T, L, K] on record, and checks that vouch for them. Raises ValueError for another shape."""
    segment = _only(done)
    if routes.shape != segment.trace.routes.shape:
        raise ValueError(f"routes of {routes.shape} for a rollout with routes of {segment.trace.routes.shape}")
    checks = route_checks(np.arange(len(routes)), segment.token_ids, routes)
    trace = replace(
        segment.trace, routes=routes, checks=np.where(segment.trace.route_valid, checks, 0).astype(np.uint64)
    )
    return _with(done, replace(segment, trace=trace))


def _only(done: Attempt) -> Segment:
    [segment] = done.rollout.segments
    return segment


def _with(done: Attempt, segment: Segment) -> Attempt:
    return replace(done, rollout=replace(done.rollout, segments=(segment,)))


def _parts(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    part: list[Segment] = []
    for segment in segments:
        if part and sum(len(s.token_ids) for s in part) + len(segment.token_ids) > BUDGET:
            yield part
            part = []
        part.append(segment)
    if part:
        yield part


def _traces(
    part: Sequence[Segment], routings: Sequence[Routing], dtype: type[np.unsignedinteger[Any]]
) -> Iterator[Trace]:
    """What an engine would have recorded of each segment; the last token is never forwarded."""
    routes_NLK = torch.stack([r.experts_NK for r in routings], 1).numpy().astype(dtype)
    gates_NLK = torch.stack([r.gates_NK for r in routings], 1).float().numpy()
    margins_NL = torch.stack([r.margin_N for r in routings], 1).float().numpy()
    ends = np.cumsum([len(segment.token_ids) - 1 for segment in part])
    for segment, end in zip(part, ends.tolist(), strict=True):
        tokens = len(segment.token_ids)
        cut = slice(end - tokens + 1, end)
        checks = route_checks(np.arange(tokens - 1), segment.token_ids[:-1], routes_NLK[cut])
        yield Trace(
            routes=_with_last(routes_NLK[cut]),
            gates=_with_last(gates_NLK[cut]),
            margins=_with_last(margins_NL[cut]),
            route_valid=np.arange(tokens) < tokens - 1,
            checks=_with_last(checks),
        )


def _with_last(rows: NDArray) -> NDArray:
    """A row of zeros for the last token."""
    return np.concatenate([rows, np.zeros_like(rows[:1])])
