"""A side, engine or trainer, as the list of its choices wherever two can differ, and what it computes on a frozen batch.

    observe(side, batch)    log-probabilities, distributions, routes and residual streams
    record(side, batch)     the batch as an engine of these choices would have recorded it

A side computes from float32 weights; its choices say how. Where the arithmetic of a whole forward pass is another program's, that
program is the choice (`forward`): our compiled kernel, or a module of `transformers`.

Dimensions: R rows, T tokens of a row, N forwarded tokens of all rows, U of the prefix tree, S tokens that the policy wrote, D
width, L MoE layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.policy import Trace, route_checks, route_dtype
from composer_nb.kernels.attention import cached_attention
from composer_nb.kernels.routing import Replay, Routing
from composer_nb.trainer.frozen import Batch, Row, row_of
from composer_nb.trainer.model import Attend, Model, PackedRows
from composer_nb.trainer.packing import Stream, flatten
from composer_nb.trainer.replay_settings import NO_REPLAY, ReplayLevel, ReplaySettings
from composer_nb.trainer.variants import Numerics, variant

Layout = Literal["tree", "rows", "cache"]
"""How tokens attend. tree: the trainer's, beginnings in common once, padded SDPA. rows: padded SDPA, each row whole. cache: the
engine's compiled attention on a key-value cache."""
Place = tuple[int, str]
"""(layer, what was added last), as `Model.watch` is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Choices in the order of the ladder. What is on record is the engine's."""

    model: Model
    """float32; last rung."""
    written: bool = True
    """Whether what the policy wrote is taken as tokens from the record; else from the texts, rendered again."""
    read: bool = True
    """Likewise what it read: prompts, observations, and the special tokens around them."""
    placed: bool = True
    """Whether positions are those on record; else 0, 1, 2, …"""
    jump: int = 0
    """From the first written token on, positions are so much larger."""
    rope_theta: float | None = None
    """None: the model's."""
    shift: int = 0
    """The log-probability at a token is that of the token so many places before it."""
    temperature: float = 1.0
    """Of the distributions that log-probabilities are reported of. Raw ones are of temperature 1 with a top_p of 1, whatever was
    sampled at; 0 reports those of temperature 1, as greedy engines do."""
    top_p: float = 1.0
    """They are of the smallest set of tokens with so much probability; the token itself is always counted in."""
    head: torch.dtype = torch.float32
    """Of the output layer's product."""
    replay: ReplayLevel = "none"
    """What is taken over of the routes on record."""
    layout: Layout = "tree"
    attention: torch.dtype = torch.float32
    numerics: Numerics = field(default_factory=Numerics)
    """Of all other products; with `dtype` bfloat16 the residual stream is, too."""
    alone: bool = False
    """Rows are forwarded one by one, so that matrices have other heights."""
    forward: Forward | None = None
    """Who computes in place of `Model.trunk`, on routes of its own; layout, attention, numerics and alone then say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """N forwarded tokens, row after row."""

    hidden_ND: Tensor
    """After the final norm."""
    experts_NLK: Tensor
    """Used; int64."""
    gates_NLK: Tensor
    """Used; float32."""
    own_NLK: Tensor
    """What the routers would have chosen, given the same inputs."""
    live_NLK: Tensor
    """What the routers make the gates of the experts used."""
    margin_NL: Tensor
    streams: dict[Place, Tensor] = field(default_factory=dict)
    """The residual stream [N, D]; empty unless asked for."""


class Rows(NamedTuple):
    """What is forwarded: all tokens of each row but its last."""

    lengths: list[int]
    ids_N: Tensor
    position_N: Tensor
    row_N: Tensor
    depth_N: Tensor
    """Place in the row."""


Forward = Callable[[Model, Rows], Forwarded]
"""Raises ValueError for a model or rows that it can not compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a side computes of a batch's S written tokens."""

    logprob_S: Tensor
    """float64, as it reports them; NaN where it has no such token."""
    logprob_SV: Tensor
    """float32, the distributions; rows of tokens that it does not have mean nothing."""
    forwarded: Forwarded


@torch.no_grad()
def observe(side: Side, batch: Batch, *, streams: bool = False, made: dict[Any, Model] | None = None) -> Seen:
    """Forwards the batch in one piece; with `streams` keeps the residual streams. `made` holds copies of models between calls.

    Raises ValueError for rows that are too long, routes that do not fit, and a `forward` that can not compute this.
    """
    rows = [_row(side, batch, number) for number in range(len(batch.rows))]
    model = _prepared(side, {} if made is None else made)
    found = _forwarded(side, model, batch, rows, streams)
    logits_SV = F.linear(found.hidden_ND[_before(rows)].to(side.head), model.output_weight.to(side.head)).float()
    logprob_SV = distributions(logits_SV, token_S := _targets(rows), side.temperature, side.top_p)
    logprob_S = logprob_SV.gather(1, token_S[:, None])[:, 0].double()
    there_S = torch.from_numpy(np.concatenate([row.at_W for row in rows]) >= 0)
    logprob_S = torch.where(there_S, logprob_S, torch.nan)
    if side.shift:
        logprob_S = _shifted(batch, logprob_S.numpy(), side.shift)
    return Seen(logprob_S=logprob_S, logprob_SV=logprob_SV, forwarded=found)


def distributions(logits_SV: Tensor, token_S: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probabilities as they are reported; `token_S` are counted into every nucleus."""
    logprob_SV = (logits_SV / (temperature or 1.0)).log_softmax(-1)
    if top_p >= 1:
        return logprob_SV
    order = logprob_SV.sort(stable=True, dim=-1, descending=True)
    above_SV = order.values.exp().cumsum(-1) - order.values.exp()
    kept_SV = torch.zeros_like(logprob_SV, dtype=torch.bool).scatter_(1, order.indices, above_SV < top_p)
    kept_SV.scatter_(1, token_S[:, None], True)
    return logprob_SV.masked_fill(~kept_SV, -torch.inf).log_softmax(-1)


def recorded(batch: Batch) -> NDArray[np.float64]:
    """[S]: the engine's log-probabilities. A token that begins a row has none."""
    return np.concatenate([row.logprob[1:][row.acted[1:]] for row in batch.rows]).astype(np.float64)


def record(side: Side, batch: Batch) -> Batch:
    """The batch with log-probabilities, routes, gates and margins as an engine of these choices records them. Raises ValueError
    for an engine that does not read the tokens on record."""
    if not (side.written and side.read):
        raise ValueError("an engine records the tokens that it read and wrote: written and read must be on")
    seen = observe(side, batch)
    ends = np.cumsum([len(row.token_ids) - 1 for row in batch.rows]).tolist()
    written = np.cumsum([int(row.acted[1:].sum()) for row in batch.rows]).tolist()
    values = seen.logprob_S.float().numpy()
    rows = []
    for row, end, last in zip(batch.rows, ends, written, strict=True):
        tokens, acted = len(row.token_ids), row.acted.copy()
        acted[0] = False
        logprob = np.zeros(tokens, np.float32)
        logprob[acted] = values[last - int(acted.sum()) : last]
        rows.append(replace(row, logprob=logprob, trace=_trace(side, row.token_ids, seen.forwarded, end - tokens + 1)))
    return replace(batch, rows=tuple(rows))


def _trace(side: Side, token_ids: NDArray[np.int32], found: Forwarded, start: int) -> Trace:
    cut, tokens = slice(start, start + len(token_ids) - 1), len(token_ids)
    routes = _padded(found.experts_NLK[cut].numpy().astype(route_dtype(side.model.config.num_experts)))
    valid = np.arange(tokens) < tokens - 1
    return Trace(
        routes=routes,
        gates=_padded(found.gates_NLK[cut].float().numpy()),
        margins=_padded(found.margin_NL[cut].float().numpy()),
        route_valid=valid,
        checks=np.where(valid, route_checks(np.arange(tokens), token_ids, routes), 0).astype(np.uint64),
    )


def _padded(rows: NDArray[Any]) -> NDArray[Any]:
    """With a row of zeros for the last token, which is never forwarded."""
    return np.concatenate([rows, np.zeros_like(rows[:1])]) if len(rows) else np.zeros((1, *rows.shape[1:]), rows.dtype)


def _row(side: Side, batch: Batch, number: int) -> Row:
    return row_of(batch, number, written=side.written, read=side.read, placed=side.placed, jump=side.jump)


def _prepared(side: Side, made: dict[Any, Model]) -> Model:
    """The weights as the side computes with them."""
    plain = side.numerics == Numerics() and side.rope_theta is None
    if plain or side.forward is not None:
        return side.model
    key = id(side.model), side.numerics, side.rope_theta
    if key not in made:
        made[key] = variant(side.model, side.numerics)
        if side.rope_theta is not None:
            made[key].config = replace(side.model.config, rope_theta=side.rope_theta)
            made[key].rope_table(
                torch.zeros(0, dtype=torch.float64)
            )  # of another dtype, so that none is kept of the old
    return made[key]


def _before(rows: Sequence[Row]) -> Tensor:
    """[S]: which forwarded token's output predicts each written one; any where there is none."""
    starts = np.cumsum([0, *(len(row.token_ids) - 1 for row in rows)])
    return torch.from_numpy(
        np.concatenate([start + np.maximum(row.at_W - 1, 0) for start, row in zip(starts[:-1], rows, strict=True)])
    )


def _targets(rows: Sequence[Row]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.token_ids[row.at_W] for row in rows])).long()


def _shifted(batch: Batch, logprob_S: NDArray[np.float64], shift: int) -> Tensor:
    """Each row's log-probabilities, 0 at what was read, moved along the row; 0 comes in at its end."""
    moved, start = [], 0
    for row in batch.rows:
        acted = row.acted.copy()
        acted[0] = False
        values = np.zeros(len(acted))
        values[acted] = logprob_S[start : start + int(acted.sum())]
        start += int(acted.sum())
        around = np.pad(values, abs(shift))
        moved.append(around[abs(shift) - shift :][: len(values)][acted])
    return torch.from_numpy(np.concatenate(moved))


# Forward passes


def _forwarded(side: Side, model: Model, batch: Batch, rows: Sequence[Row], streams: bool) -> Forwarded:
    longest = max(int(row.position[:-1].max(initial=0)) for row in rows)
    lowest = min(int(row.position[:-1].min(initial=0)) for row in rows)
    if lowest < 0 or longest >= model.config.max_position_embeddings:
        raise ValueError(
            f"positions {lowest} to {longest}: they must lie in 0..{model.config.max_position_embeddings - 1} "
            "(model.max_position_embeddings)"
        )
    if side.forward is not None:
        return side.forward(model, _rows(rows))
    replay = None if side.replay == "none" else _replay(batch, rows, side.replay)
    pieces = [[number] for number in range(len(rows))] if side.alone else [list(range(len(rows)))]
    done = []
    for piece in pieces:
        mine = [rows[number] for number in piece]
        routes = None if replay is None else [replay[number] for number in piece]
        done.append(_trunk(side, model, mine, routes, streams))
    return done[0] if len(done) == 1 else joined(done)


def joined(parts: Sequence[Forwarded]) -> Forwarded:
    """Rows one after another."""
    names = [name for name in Forwarded.__dataclass_fields__ if name != "streams"]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    streams = {place: torch.cat([part.streams[place] for part in parts]) for place in parts[0].streams}
    return Forwarded(**joined, streams=streams)


def _rows(rows: Sequence[Row]) -> Rows:
    lengths = [len(row.token_ids) - 1 for row in rows]
    sizes = torch.tensor(lengths)
    return Rows(
        lengths=lengths,
        ids_N=torch.from_numpy(np.concatenate([row.token_ids[:-1] for row in rows])).long(),
        position_N=torch.from_numpy(np.concatenate([row.position[:-1] for row in rows])),
        row_N=torch.repeat_interleave(torch.arange(len(lengths)), sizes),
        depth_N=torch.cat([torch.arange(length) for length in lengths]),
    )


def _replay(batch: Batch, rows: Sequence[Row], level: ReplayLevel) -> list[Trace]:
    """Each row's trace, vouched for: what is on record is what is asked about here, right or wrong."""
    if not batch.routed:
        raise ValueError(f"replay of {level!r} needs routes and gates on record, and the batch has none")
    found = []
    for number, (row, segment) in enumerate(zip(rows, batch.rows, strict=True)):
        if len(row.token_ids) != len(segment.token_ids):
            raise ValueError(f"row {number}: routes of {len(segment.token_ids)} tokens for {len(row.token_ids)}")
        checks = route_checks(np.arange(len(row.token_ids)), row.token_ids, segment.trace.routes)
        found.append(replace(segment.trace, checks=checks))
    return found


class _Plan(NamedTuple):
    """What `trunk` is called with, and which of its tokens each of the N is."""

    ids: Tensor
    position: Tensor
    attend: Attend
    replay: Replay | None
    node_N: Tensor | None


def _trunk(side: Side, model: Model, rows: Sequence[Row], traces: Sequence[Trace] | None, streams: bool) -> Forwarded:
    plan = (_tree if side.layout == "tree" else _flat)(side, model, rows, traces)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        dtype = side.attention
        return plan.attend(layer, q.to(dtype), k.to(dtype), v.to(dtype), scale).to(q.dtype)

    seen: dict[Place, Tensor] = {}
    if streams:
        model.watch = lambda layer, part, x: seen.update({(layer, part): x})
    try:
        hidden, routings = model.trunk(plan.ids, plan.position, attend, plan.replay)
    finally:
        model.watch = None

    def of_tokens(x: Tensor) -> Tensor:
        return x if plan.node_N is None else x.index_select(0, plan.node_N)

    def stacked(values: Sequence[Tensor]) -> Tensor:
        return of_tokens(torch.stack(list(values), 1))

    return Forwarded(
        hidden_ND=of_tokens(hidden),
        experts_NLK=stacked([routing.experts_NK for routing in routings]),
        gates_NLK=stacked([routing.gates_NK for routing in routings]).float(),
        own_NLK=stacked([routing.own_NK for routing in routings]),
        live_NLK=stacked([_live(routing, model.config.rule.scale) for routing in routings]).float(),
        margin_NL=stacked([routing.margin_N for routing in routings]).float(),
        streams={place: of_tokens(x).float() for place, x in seen.items()},
    )


def _live(routing: Routing, scale: float) -> Tensor:
    """Gates of the experts used, from the router's own scores."""
    chosen_NK = routing.probs_NE.gather(1, routing.experts_NK)
    return chosen_NK / (chosen_NK.sum(-1, keepdim=True) + 1e-20) * scale


def _flat(side: Side, model: Model, rows: Sequence[Row], traces: Sequence[Trace] | None) -> _Plan:
    """Rows side by side."""
    flat = _rows(rows)
    packed = PackedRows.of_lengths(flat.lengths, model.config)
    replay = None
    if traces is not None:
        assert side.replay != "none"
        routes, gates, valid = (
            torch.from_numpy(np.concatenate([getattr(trace, name)[:-1] for trace in traces]).astype(dtype))
            for name, dtype in (("routes", np.int64), ("gates", np.float32), ("route_valid", np.bool_))
        )
        replay = Replay(experts=routes, level=side.replay, gates=gates, valid_N=valid)
    attend = packed.attend if side.layout == "rows" else _cache(flat)
    return _Plan(flat.ids_N, flat.position_N, attend, replay, None)


def _cache(flat: Rows) -> Attend:
    """Attention as the engine's, on keys and values that lie in a cache."""

    def filled(x: Tensor) -> Tensor:
        room = x.new_zeros(len(flat.lengths), max(flat.lengths), *x.shape[1:])
        return room.index_put_((flat.row_N, flat.depth_N), x).transpose(1, 2).contiguous()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return cached_attention(q, filled(k), filled(v), flat.row_N, flat.depth_N, scale)

    return attend


def _tree(side: Side, model: Model, rows: Sequence[Row], traces: Sequence[Trace] | None) -> _Plan:
    """The trainer's prefix tree. A token's position is part of what makes it the same as another: it travels with its id."""
    vocabulary = model.config.vocab_size
    offsets = [np.append((row.position - np.arange(len(row.position)))[:-1], 0) for row in rows]
    lowest = min(int(offset.min()) for offset in offsets)
    streams = []
    for number, (row, offset) in enumerate(zip(rows, offsets, strict=True)):
        ids = (row.token_ids + vocabulary * (offset - lowest)).astype(np.int32)
        trace = Trace() if traces is None else traces[number]
        routed = len(trace.route_valid) > 0
        blank = np.zeros(len(ids), np.float32)
        streams.append(
            Stream(
                token_ids=ids,
                acted=np.ones(len(ids), np.bool_),  # so that every forwarded token is named as a place that predicts
                logprob=blank,
                advantage=blank,
                routes=trace.routes,
                gates=trace.gates,
                route_valid=trace.route_valid,
                checks=route_checks(np.arange(len(ids)), ids, trace.routes) if routed else trace.checks,
            )
        )
    settings = NO_REPLAY if traces is None else ReplaySettings(level=side.replay, missing=1.0)
    batch = flatten(streams, settings)
    marks_N = torch.div(batch.inputs_N, vocabulary, rounding_mode="floor")
    return _Plan(
        batch.inputs_N % vocabulary,
        batch.position_N + marks_N + lowest,
        batch.attend,
        batch.recorded,
        batch.place_U[batch.from_S],
    )
