"""The arithmetic of an engine or a trainer as a list of choices, its results on a frozen batch, and the causes of a mismatch.

    observe(program, batch)    log-probabilities, distributions, routes and residual streams
    record(program, batch)     the batch as an engine of these choices would have recorded it
    path(own, engine)          the programs between two, cause after cause

All programs start from float32 weights.

Dimensions: R rows, T tokens of a row, W tokens of a row that the policy wrote, N forwarded tokens of all rows, S tokens that the
policy wrote, D width, L MoE layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Segment
from composer_nb.kernels.attention.cached import cached_attention
from composer_nb.kernels.attention.causal import padded
from composer_nb.kernels.moe.routing import Replay, Routing, RoutingRule
from composer_nb.trainer.engine import nucleus
from composer_nb.trainer.learning.data import within
from composer_nb.trainer.learning.packing import ReplayLevel
from composer_nb.trainer.learning.retrace import trace_of
from composer_nb.trainer.models.transformer import Model, PackedRows
from composer_nb.trainer.models.variants import Numerics, variant

# Tokens forwarded at a time.
BUDGET = 4096
# Attention. rows: the trainer's, padded SDPA over whole rows. cache: the engine's compiled attention on a key-value cache.
Layout = Literal["rows", "cache"]
# Tokens that a program reads in place of recorded ones, of a stretch that the policy wrote, or read.
Spelling = Callable[[NDArray[np.int32]], NDArray[np.int32]]
# (layer, what was added last), as in `Model.watch`.
Place = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBatch:
    """R rows. Raises ValueError for parts that do not belong together.

    Attributes:
        rows: The engine's record.
    """

    rows: tuple[Segment, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a batch of no rows: there is nothing to compare")
        for number, row in enumerate(self.rows):
            valid = row.trace.route_valid[: len(row.trace.gates)]
            for name, values, used in (("logprob", row.logprob, row.acted), ("gates", row.trace.gates, valid)):
                if len(bad := np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1) & used)):
                    raise ValueError(f"row {number}: {name} of token {bad[0]} is not finite")

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> FrozenBatch:
        """Take the segments of attempts."""
        return cls(rows=tuple(segment for attempt in attempts for segment in attempt.rollout.segments))

    @property
    def routed(self) -> bool:
        """True if routes and gates are on record."""
        return all(len(row.trace.gates) > 0 for row in self.rows)

    @property
    def lengths(self) -> list[int]:
        """Forwarded tokens of each row: all but the last."""
        return [len(row.token_ids) - 1 for row in self.rows]

    @property
    def written(self) -> list[NDArray[np.int64]]:
        """Places [W] of the tokens that the policy wrote, by row. Nothing predicts the first token of a row."""
        return [np.flatnonzero(row.acted[1:]) + 1 for row in self.rows]

    def of_written(self, stream: str) -> NDArray[Any]:
        """Return [S] a stream of the rows at the written tokens."""
        parts = zip(self.rows, self.written, strict=True)
        return np.concatenate([getattr(row, stream)[at_W] for row, at_W in parts])

    def spread(self, values_S: NDArray[np.floating[Any]]) -> list[NDArray[Any]]:
        """Return the values [T] of each row at the written tokens, 0 at the others."""
        rows = [np.zeros(len(row.token_ids), values_S.dtype) for row in self.rows]
        ends = np.cumsum([len(at_W) for at_W in self.written])
        for row, at_W, part in zip(rows, self.written, np.split(values_S, ends[:-1]), strict=True):
            row[at_W] = part
        return rows

    def parts(self, budget: int) -> Iterator[FrozenBatch]:
        """Yield the batch in pieces of about `budget` tokens."""
        for rows in within(budget, self.rows):
            yield FrozenBatch(rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramChoices:
    """Choices of an engine or a trainer, in the order in which causes are tried.

    Attributes:
        model: Weights in float32.
        spelling, template: Tokens for what the policy wrote, and for what it read; None: those on record. `from_text` spells as
            a trainer that gets texts.
        jump: Added to the positions of a row from its first written token on.
        shift: Log-probabilities are read so many places too late.
        temperature, top_p: Of the reported distributions; the token itself counts as inside the nucleus.
        head: Dtype of the output layer's product.
        replay: Level at which recorded routes are replayed.
        numerics: Arithmetic of all other products; with `dtype` bfloat16 also of the residual stream.
    """

    model: Model
    spelling: Spelling | None = None
    template: Spelling | None = None
    jump: int = 0
    shift: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    head: torch.dtype = torch.float32
    replay: ReplayLevel = "none"
    layout: Layout = "rows"
    attention: torch.dtype = torch.float32
    numerics: Numerics = field(default_factory=Numerics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramValues:
    """A program's values at the N forwarded tokens of a batch, row after row, and at its S written tokens.

    Attributes:
        experts_NLK: Experts used; int64.
        gates_NLK: Gates used; float32.
        own_NLK: Experts that the routers choose, given the same inputs.
        live_NLK: Gates that the routers give the experts used.
        logprob_S: float64; NaN for written tokens that the program's rows lack.
        logprob_SV: float32 distributions.
        streams: The residual stream [N, D] at each place; empty unless asked for.
    """

    experts_NLK: Tensor
    gates_NLK: Tensor
    own_NLK: Tensor
    live_NLK: Tensor
    margin_NL: Tensor
    logprob_S: Tensor
    logprob_SV: Tensor
    streams: dict[Place, Tensor] = field(default_factory=dict)


@torch.no_grad()
def observe(
    program: ProgramChoices, batch: FrozenBatch, *, keep_streams: bool = False, variants: dict[Any, Model] | None = None
) -> ProgramValues:
    """Forward the batch, about BUDGET tokens at a time; with `keep_streams` keep the residual streams. `variants` caches copies
    of models between calls.

    Raises ValueError for rows that are too long and for routes that do not fit.
    """
    variants = {} if variants is None else variants
    key, variant_model = (id(program.model), program.numerics), program.model
    if program.numerics != Numerics():
        variant_model = variants[key] = variants.get(key) or variant(program.model, program.numerics)
    part_values = [_observe(program, variant_model, part, keep_streams) for part in batch.parts(BUDGET)]
    names = [value.name for value in fields(ProgramValues) if value.name != "streams"]
    values = {name: torch.cat([getattr(part, name) for part in part_values]) for name in names}
    streams = {at: torch.cat([part.streams[at] for part in part_values]) for at in part_values[0].streams}
    return ProgramValues(**values, streams=streams)


def _observe(program: ProgramChoices, variant_model: Model, batch: FrozenBatch, keep_streams: bool) -> ProgramValues:
    """Forward a batch at once with `variant_model`, the program's model in its numerics; see `observe`."""
    rows = [_respelled(row, program) for row in batch.rows]
    lengths = [len(ids_T) - 1 for ids_T, _ in rows]
    ids_N = torch.from_numpy(np.concatenate([ids_T[:-1] for ids_T, _ in rows])).long()
    packed = PackedRows.of_lengths(lengths, variant_model.config)
    first_R = torch.tensor([int(at_W[at_W > 0].min(initial=len(ids_T))) for ids_T, at_W in rows])
    position_N = packed.position_N + program.jump * (packed.position_N >= first_R[packed.row_N])

    def attend(layer: int, q_NQC: Tensor, k_NKC: Tensor, v_NKC: Tensor, scale: float) -> Tensor:
        query_NQC, key_NKC, value_NKC = (heads.to(program.attention) for heads in (q_NQC, k_NKC, v_NKC))
        if program.layout == "rows":
            return packed.attend(layer, query_NQC, key_NKC, value_NKC, scale).to(q_NQC.dtype)
        # Each token against exactly the keys that it may see, contiguous as a cache is.
        keys, values = (padded(heads, packed.lengths).contiguous() for heads in (key_NKC, value_NKC))
        return cached_attention(query_NQC, keys, values, packed.row_N, packed.position_N, scale).to(q_NQC.dtype)

    streams: dict[Place, Tensor] = {}
    if keep_streams:
        variant_model.watch = lambda layer, added, residual_ND: streams.update({(layer, added): residual_ND.float()})
    try:
        hidden_ND, routings = variant_model.trunk(ids_N, position_N, attend, _replay(program, batch))
    finally:
        variant_model.watch = None
    places = zip(np.cumsum([0, *lengths])[:-1], lengths, rows, strict=True)
    predicts_S = np.concatenate(
        [start + np.clip(at_W - 1 + program.shift, 0, length - 1) for start, length, (_, at_W) in places]
    )
    lacks_S = torch.from_numpy(np.concatenate([at_W < 0 for _, at_W in rows]))
    token_S = torch.from_numpy(batch.of_written("token_ids")).long()
    hidden_SD, output_weight = hidden_ND[torch.from_numpy(predicts_S)], variant_model.output_weight
    logits_SV = F.linear(hidden_SD.to(program.head), output_weight.to(program.head)).float()
    logprob_SV = reported(logits_SV, token_S, program.temperature, program.top_p)

    def stacked(field_of: Callable[[Routing], Tensor]) -> Tensor:
        return torch.stack([field_of(routing) for routing in routings], 1)

    return ProgramValues(
        experts_NLK=stacked(lambda routing: routing.experts_NK),
        gates_NLK=stacked(lambda routing: routing.gates_NK).float(),
        own_NLK=stacked(lambda routing: routing.own_NK),
        live_NLK=stacked(lambda routing: _live(routing, variant_model.config.rule)).float(),
        margin_NL=stacked(lambda routing: routing.margin_N).float(),
        logprob_S=logprob_SV.gather(1, token_S[:, None])[:, 0].double().masked_fill(lacks_S, torch.nan),
        logprob_SV=logprob_SV,
        streams=streams,
    )


def from_text(tokenizer: Tokenizer) -> Spelling:
    """Return the tokens of the text that tokens stand for."""

    def tokenised_again(ids_T: NDArray[np.int32]) -> NDArray[np.int32]:
        text = tokenizer.decode(ids_T.tolist(), skip_special_tokens=False)
        return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    return tokenised_again


def _respelled(row: Segment, program: ProgramChoices) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return the tokens that a program reads for a row, and where in them the written tokens are: −1 for those between the
    longest common beginning and end of a stretch and its spelling."""
    written_T = row.acted & (np.arange(len(row.acted)) > 0)
    ids, places, length = [], [], 0
    for stretch_T in np.split(np.arange(len(written_T)), np.flatnonzero(np.diff(written_T)) + 1):
        is_written, old_T = bool(written_T[stretch_T[0]]), row.token_ids[stretch_T]
        spelling = program.spelling if is_written else program.template
        new_T = old_T if spelling is None else spelling(old_T)
        if is_written:
            short = min(len(old_T), len(new_T))
            head = int(np.append(old_T[:short] != new_T[:short], True).argmax())
            tail = int(np.append(old_T[::-1][: short - head] != new_T[::-1][: short - head], True).argmax())
            ends = [
                np.arange(head),
                np.full(len(old_T) - head - tail, -length - 1),
                len(new_T) - tail + np.arange(tail),
            ]
            places.append(length + np.concatenate(ends))
        ids.append(new_T)
        length += len(new_T)
    return np.concatenate(ids), np.concatenate([*places, np.zeros(0, np.int64)]).astype(np.int64)


def reported(logits_SV: Tensor, token_S: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return log-probabilities at a temperature, within a nucleus that contains the token."""
    logprob_SV = (logits_SV / temperature).log_softmax(-1)
    if top_p >= 1:
        return logprob_SV
    inside_SV = nucleus(logprob_SV, top_p).isfinite().scatter(1, token_S[:, None], True)
    return logprob_SV.masked_fill(~inside_SV, -torch.inf).log_softmax(-1)


def record(program: ProgramChoices, batch: FrozenBatch) -> FrozenBatch:
    """Return the batch with the log-probabilities, routes, gates and margins that an engine of these choices records. Raises
    ValueError for an engine that does not read the tokens on record."""
    if program.spelling or program.template:
        raise ValueError("an engine records the tokens that it read and wrote: only a trainer can spell them otherwise")
    values = observe(program, batch)
    routed = (tensor.split(batch.lengths) for tensor in (values.experts_NLK, values.gates_NLK, values.margin_NL))
    logprobs = batch.spread(values.logprob_S.float().numpy())
    rows = tuple(
        replace(row, logprob=logprob, trace=trace_of(row.token_ids, parts, program.model.config.num_experts))
        for row, logprob, parts in zip(batch.rows, logprobs, zip(*routed, strict=True), strict=True)
    )
    return replace(batch, rows=rows)


def _live(routing: Routing, rule: RoutingRule) -> Tensor:
    """Return the gates of the experts used, from the router's own scores."""
    chosen_NK = routing.probs_NE.gather(1, routing.experts_NK)
    shares_NK = chosen_NK / (chosen_NK.sum(-1, keepdim=True) + 1e-20) if rule.normalised else chosen_NK
    return shares_NK * rule.scale


def _replay(program: ProgramChoices, batch: FrozenBatch) -> Replay | None:
    """Return the recorded routes to replay."""
    if program.replay == "none":
        return None
    if program.spelling or program.template:
        raise ValueError(f"replay of {program.replay!r} needs the tokens on record, which the program spells otherwise")
    if not batch.routed:
        raise ValueError(f"replay of {program.replay!r} needs routes and gates on record, and the batch has none")
    routes, gates, valid = (
        torch.from_numpy(np.concatenate([getattr(row.trace, name)[:-1] for row in batch.rows]).astype(dtype))
        for name, dtype in (("routes", np.int64), ("gates", np.float32), ("route_valid", np.bool_))
    )
    return Replay(experts=routes, level=program.replay, gates=gates, valid_N=valid)


# Causes

LEVELS: tuple[ReplayLevel, ...] = ("none", "ids", "ids+order", "weights")


class Cause(NamedTuple):
    """A cause, as the fields of `ProgramChoices` that it consists of.

    Attributes:
        level: Level of replay; the causes in routes are levels of one field.
    """

    name: str
    fields: tuple[str, ...]
    level: ReplayLevel = "none"


# Causes, the cheapest to rule out first. `weights` are no arithmetic; they come last because nothing else explains them.
CAUSES = (
    Cause("tokens", ("spelling",)),
    Cause("template", ("template",)),
    Cause("position and shift", ("jump", "shift")),
    Cause("log-prob mode", ("temperature", "top_p")),
    Cause("head dtype", ("head",)),
    Cause("route ids", ("replay",), "ids"),
    Cause("order", ("replay",), "ids+order"),
    Cause("gate weights", ("replay",), "weights"),
    Cause("attention", ("layout", "attention")),
    Cause("GEMM", ("numerics",)),
    Cause("weights", ("model",)),
)


def engines(model: Model) -> dict[str, ProgramChoices]:
    """Return engines that compute differently from the same weights, by name."""
    bf16, plain = torch.bfloat16, ProgramChoices(model=model, layout="cache")
    return {
        "float32": plain,
        "bf16": replace(plain, head=bf16, numerics=Numerics(dtype=bf16)),
        "bf16-head": replace(plain, head=bf16),
        "bf16-attention": ProgramChoices(model=model, attention=bf16),
        "bf16-router": replace(plain, numerics=Numerics(router_dtype=bf16)),
        "int8": replace(plain, numerics=Numerics(matrices=True)),
        "int8-experts": replace(plain, numerics=Numerics(expert_bits=8)),
        "int4-experts": replace(plain, numerics=Numerics(expert_bits=4)),
    }


def path(trainer: ProgramChoices, engine: ProgramChoices) -> list[ProgramChoices]:
    """Return the trainer with the engine's choices put in, cause after cause; the last is the engine."""
    programs = [trainer]
    for cause in CAUSES:
        programs.append(with_cause(programs[-1], engine, cause))
    return programs[1:]


def with_cause(program: ProgramChoices, source: ProgramChoices, cause: Cause) -> ProgramChoices:
    """Return `program` with the choices of `source` for one cause."""
    if cause.level != "none":
        return replace(program, replay=LEVELS[min(LEVELS.index(cause.level), LEVELS.index(source.replay))])
    return replace(program, **{name: getattr(source, name) for name in cause.fields})


def differing(trainer: ProgramChoices, engine: ProgramChoices) -> list[Cause]:
    """Return the causes, apart from recorded routes, in which two programs differ."""
    plain = [cause for cause in CAUSES if cause.level == "none"]
    return [cause for cause in plain if any(getattr(trainer, name) != getattr(engine, name) for name in cause.fields)]


def change(trainer: ProgramChoices, engine: ProgramChoices, cause: Cause) -> str:
    """Describe the trainer's and the engine's choice; empty if they are the same."""
    if cause.level != "none":
        switched = LEVELS.index(engine.replay) >= LEVELS.index(cause.level)
        return "the engine's, on record" if switched else ""
    pairs = [(name, getattr(trainer, name), getattr(engine, name)) for name in cause.fields]
    return ", ".join(f"{name} {text_of(before)} → {text_of(other)}" for name, before, other in pairs if before != other)


def text_of(value: object) -> str:
    """Describe a choice."""
    if isinstance(value, Numerics):
        pairs = [(e.name, getattr(value, e.name), getattr(Numerics(), e.name)) for e in fields(value)]
        return " and ".join(f"{name} {text_of(new)}" for name, new, usual in pairs if new != usual) or "float32"
    if isinstance(value, Model):
        return "its own"
    if value is None or callable(value):
        return "as recorded" if value is None else getattr(value, "__name__", "other").replace("_", " ")
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).removeprefix("torch.")
