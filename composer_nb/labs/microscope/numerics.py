"""The arithmetic of an engine or a trainer as a list of choices, and its results on a frozen batch.

    observe(program, batch)    log-probabilities, distributions, routes and residual streams
    record(program, batch)     the batch as an engine of these choices would have recorded it

All programs start from float32 weights.

Dimensions: R rows, T tokens of a row, N forwarded tokens of all rows, S tokens that the policy wrote, D width, L MoE layers,
K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from composer_nb.kernels.attention.cached import cached_attention
from composer_nb.kernels.attention.causal import padded
from composer_nb.kernels.moe.routing import Replay, Routing, RoutingRule
from composer_nb.labs.microscope.frozen import FrozenBatch
from composer_nb.trainer.learning.packing import ReplayLevel
from composer_nb.trainer.learning.retrace import trace_of
from composer_nb.trainer.models.transformer import Model, PackedRows
from composer_nb.trainer.models.variants import Numerics, variant

BUDGET = 4096
"""Tokens forwarded at a time."""
Layout = Literal["rows", "cache"]
"""Attention. rows: the trainer's, padded SDPA over whole rows. cache: the engine's compiled attention on a key-value cache."""
Place = tuple[int, str]
"""(layer, what was added last), as in `Model.watch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChoices:
    """Choices of an engine or a trainer, in the order in which causes are tried."""

    model: Model
    """Weights in float32."""
    head: torch.dtype = torch.float32
    """Dtype of the output layer's product."""
    replay: ReplayLevel = "none"
    """Level at which recorded routes are replayed."""
    layout: Layout = "rows"
    attention: torch.dtype = torch.float32
    numerics: Numerics = field(default_factory=Numerics)
    """Arithmetic of all other products; with `dtype` bfloat16 also of the residual stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """Values at N forwarded tokens, row after row."""

    hidden_ND: Tensor
    """After the final norm."""
    experts_NLK: Tensor
    """Experts used; int64."""
    gates_NLK: Tensor
    """Gates used; float32."""
    own_NLK: Tensor
    """Experts that the routers choose, given the same inputs."""
    live_NLK: Tensor
    """Gates that the routers give the experts used."""
    margin_NL: Tensor
    streams: dict[Place, Tensor] = field(default_factory=dict)
    """The residual stream [N, D] at each place; empty unless asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramValues:
    """A program's values at the S written tokens of a batch."""

    logprob_S: Tensor
    """float64."""
    logprob_SV: Tensor
    """float32 distributions."""
    forwarded: Forwarded


@torch.no_grad()
def observe(
    program: ProgramChoices, batch: FrozenBatch, *, streams: bool = False, made: dict[Any, Model] | None = None
) -> ProgramValues:
    """Forward the batch, about BUDGET tokens at a time; with `streams` keep the residual streams. `made` caches copies of models
    between calls.

    Raises ValueError for rows that are too long and for routes that do not fit.
    """
    made = {} if made is None else made
    parts = [_observe(program, part, streams, made) for part in batch.parts(BUDGET)]
    return ProgramValues(
        logprob_S=torch.cat([part.logprob_S for part in parts]),
        logprob_SV=torch.cat([part.logprob_SV for part in parts]),
        forwarded=joined([part.forwarded for part in parts]),
    )


def _observe(program: ProgramChoices, batch: FrozenBatch, streams: bool, made: dict[Any, Model]) -> ProgramValues:
    model, head = _prepared(program, made), program.head
    found = _forwarded(program, model, batch, streams)
    starts = np.cumsum([0, *batch.lengths])[:-1]
    before_S = np.concatenate([start + at_W - 1 for start, at_W in zip(starts, batch.written, strict=True)])
    token_S = torch.from_numpy(batch.of_written("token_ids")).long()
    logits_SV = F.linear(found.hidden_ND[torch.from_numpy(before_S)].to(head), model.output_weight.to(head)).float()
    logprob_SV = logits_SV.log_softmax(-1)
    logprob_S = logprob_SV.gather(1, token_S[:, None])[:, 0].double()
    return ProgramValues(logprob_S=logprob_S, logprob_SV=logprob_SV, forwarded=found)


def record(program: ProgramChoices, batch: FrozenBatch) -> FrozenBatch:
    """Return the batch with the log-probabilities, routes, gates and margins that an engine of these choices records."""
    seen = observe(program, batch)
    found = seen.forwarded
    routed = (values.split(batch.lengths) for values in (found.experts_NLK, found.gates_NLK, found.margin_NL))
    logprobs = batch.spread(seen.logprob_S.float().numpy())
    rows = tuple(
        replace(row, logprob=logprob, trace=trace_of(row.token_ids, parts, program.model.config.num_experts))
        for row, logprob, parts in zip(batch.rows, logprobs, zip(*routed, strict=True), strict=True)
    )
    return replace(batch, rows=rows)


def _prepared(program: ProgramChoices, made: dict[Any, Model]) -> Model:
    """Return the weights as the program computes with them."""
    if program.numerics == Numerics():
        return program.model
    key = id(program.model), program.numerics
    if key not in made:
        made[key] = variant(program.model, program.numerics)
    return made[key]


# Forward passes


def joined(parts: Sequence[Forwarded]) -> Forwarded:
    """Concatenate rows."""
    names = [each.name for each in fields(Forwarded) if each.name != "streams"]
    streams = {place: torch.cat([part.streams[place] for part in parts]) for place in parts[0].streams}
    return Forwarded(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names}, streams=streams)


def _forwarded(program: ProgramChoices, model: Model, batch: FrozenBatch, streams: bool) -> Forwarded:
    ids_N = torch.from_numpy(np.concatenate([row.token_ids[:-1] for row in batch.rows])).long()
    packed = PackedRows.of_lengths(batch.lengths, model.config)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        wanted = q.to(program.attention), k.to(program.attention), v.to(program.attention)
        if program.layout == "rows":
            return packed.attend(layer, *wanted, scale).to(q.dtype)
        # Each token against exactly the keys that it may see, contiguous as a cache is.
        keys, values = (padded(x, packed.lengths).contiguous() for x in wanted[1:])
        return cached_attention(wanted[0], keys, values, packed.row_N, packed.position_N, scale).to(q.dtype)

    seen: dict[Place, Tensor] = {}
    if streams:
        model.watch = lambda layer, part, x: seen.update({(layer, part): x})
    try:
        hidden, routings = model.trunk(ids_N, packed.position_N, attend, _replay(program, batch))
    finally:
        model.watch = None

    def stacked(of: Callable[[Routing], Tensor]) -> Tensor:
        return torch.stack([of(routing) for routing in routings], 1)

    return Forwarded(
        hidden_ND=hidden,
        experts_NLK=stacked(lambda routing: routing.experts_NK),
        gates_NLK=stacked(lambda routing: routing.gates_NK).float(),
        own_NLK=stacked(lambda routing: routing.own_NK),
        live_NLK=stacked(lambda routing: _live(routing, model.config.rule)).float(),
        margin_NL=stacked(lambda routing: routing.margin_N).float(),
        streams={place: x.float() for place, x in seen.items()},
    )


def _live(routing: Routing, rule: RoutingRule) -> Tensor:
    """Return the gates of the experts used, from the router's own scores."""
    chosen_NK = routing.probs_NE.gather(1, routing.experts_NK)
    shares_NK = chosen_NK / (chosen_NK.sum(-1, keepdim=True) + 1e-20) if rule.normalised else chosen_NK
    return shares_NK * rule.scale


def _replay(program: ProgramChoices, batch: FrozenBatch) -> Replay | None:
    """Return the recorded routes to replay."""
    if program.replay == "none":
        return None
    if not batch.routed:
        raise ValueError(f"replay of {program.replay!r} needs routes and gates on record, and the batch has none")
    routes, gates, valid = (
        torch.from_numpy(np.concatenate([getattr(row.trace, name)[:-1] for row in batch.rows]).astype(dtype))
        for name, dtype in (("routes", np.int64), ("gates", np.float32), ("route_valid", np.bool_))
    )
    return Replay(experts=routes, level=program.replay, gates=gates, valid_N=valid)
