"""The mismatch microscope: why an engine and a trainer give the same token different log-probabilities.

    report = examine(model, attempts)                      the engine as its record shows it
    report = examine(model, attempts, engine=Side(...))    and as it is known to compute

The causes make a ladder (`RUNGS`). From the trainer's own computation on, the engine's choice is put in rung by rung, and what
each takes away from the gap is that rung's contribution. At the top everything is the engine's; what is left there is the floor,
or something that nobody has thought of. A contribution is no cause yet: in bf16 the routes mend most of a gap that began in a
product. So a rung is *named* only if it differs by itself: if log-probabilities move when it alone is put into the trainer, and
when it alone is taken out of the engine, or if the record contradicts what the engine's own routers make of the same inputs.

Choices that nobody declared (a shift, a temperature, a dtype, …) are looked for among `suspects` until the record is explained.

Dimensions: N forwarded tokens, S tokens that the policy wrote, L MoE layers, E experts, K of them a token, V vocabulary, P places
of the residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.render import CompactRenderer
from composer_nb.trainer.evidence import (
    Cause,
    Inside,
    RouteChecks,
    Streams,
    Where,
    first_displaced,
    other_weights,
    token_causes,
    unexplained,
)
from composer_nb.trainer.frozen import Batch
from composer_nb.trainer.mismatch import gap_figures
from composer_nb.trainer.model import Model
from composer_nb.trainer.rescore import model_before, stored_batch
from composer_nb.trainer.rundir import RunDir
from composer_nb.trainer.rungs import (
    RUNGS,
    UNEXPLAINED,
    change,
    differing,
    engines,
    ladder,
    recorded_side,
    trainer_side,
    with_rung,
)
from composer_nb.trainer.sides import Seen, Side, observe, record, recorded
from composer_nb.trainer.suspects import complete
from composer_nb.trainer.tokenizer import load_tokenizer

BUDGET = 4096
"""Tokens that are forwarded at a time."""
TOLERANCE = 1e-4
"""Nats that count as rounding: float32 kernels of another order of sums stay below a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Trainer minus engine over the tokens that both have, in nats."""

    p50: float
    p99: float
    most: float
    """Of |Δ log p|."""
    k1: float
    k3: float
    """Estimates of KL(engine ‖ trainer) from the sampled tokens: −mean Δ, and mean(e^Δ − 1 − Δ)."""
    kl: float
    """KL(engine ‖ trainer) over the whole vocabulary, mean of the places that predict these tokens; the engine's distributions
    are recomputed from its choices. NaN where the trainer lacks a token that it needs."""
    missing: float
    """Share of the engine's tokens that the trainer does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The ladder with one more rung of the engine's."""

    rung: str
    change: str
    """From the trainer's choice to the engine's; empty where they are one."""
    found: bool
    """Whether the engine's choice was found out, and not declared or on record."""
    figures: Figures
    alone: float
    """Largest |Δ log p| when this rung alone is put into the trainer, or alone taken out of the engine (on routes of its own),
    whichever is less: coarse arithmetic elsewhere makes much of any rounding. 0 for what is judged by the record itself (tokens,
    template, routes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the microscope saw."""

    start: Figures
    """Trainer and engine as they are."""
    steps: tuple[Step, ...]
    causes: tuple[Cause, ...]
    """Empty: the two differ by rounding at most."""
    first: Where | None
    """Where the residual streams first differ: the lowest layer, in it the first token. None: nowhere, or the engine does not
    show them (the compiled kernel)."""
    first_in: str
    """The half of the layer that it happens in; empty without `first`."""
    flip: Where | None
    """The first token and layer at which the engine used other experts than the trainer would."""
    versions: Mapping[int, Figures]
    """What is left at the top of the ladder, by the policy version on record."""
    streams: Streams | None
    tokens: int
    tolerance: float

    @property
    def left(self) -> Figures:
        """At the top: everything is the engine's."""
        return self.steps[-1].figures

    @property
    def named(self) -> tuple[str, ...]:
        """Rungs that differ by themselves, in the ladder's order."""
        order = [rung.name for rung in RUNGS] + [UNEXPLAINED]
        return tuple(sorted({cause.rung for cause in self.causes}, key=order.index))

    def contributions(self, figure: str) -> dict[str, float]:
        """What each rung takes away from `figure` (a name of `Figures`) when it is put in."""
        values = [getattr(self.start, figure), *(getattr(step.figures, figure) for step in self.steps)]
        return {step.rung: values[at] - values[at + 1] for at, step in enumerate(self.steps)}

    def to_dict(self) -> dict[str, Any]:
        """For programs; without the residual streams."""
        found = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "streams"}
        plain = {
            name: asdict(value) if hasattr(value, "__dataclass_fields__") else value for name, value in found.items()
        }
        plain |= {name: [asdict(each) for each in found[name]] for name in ("steps", "causes")}
        plain["versions"] = {str(version): asdict(figures) for version, figures in self.versions.items()}
        return plain | {"named": list(self.named)}


def examine(
    trainer: Model,
    attempts: Sequence[Attempt] | Batch,
    engine: Side | None = None,
    *,
    tolerance: float = TOLERANCE,
    budget: int = BUDGET,
    thetas: Sequence[float] = (1e4, 5e5, 1e6),
) -> Report:
    """Walks the ladder from `trainer` (float32) to `engine`, whose routes are replayed if they are on record and whose choices
    are completed by what the record shows. Without `engine` the record alone is asked.

    `tolerance` is what counts as rounding, in nats. `thetas` are rope bases to try. Raises ValueError for rows that are too long
    and for routes that are not of such a model.
    """
    batch = attempts if isinstance(attempts, Batch) else Batch.of(attempts)
    _require_routes(batch, trainer)
    own, known = trainer_side(trainer, batch), recorded_side(trainer, batch) if engine is None else engine
    if known.forward is None and batch.routed:
        known = replace(known, replay="weights")
    made: dict[Any, Model] = {}
    full = complete(known, batch, tolerance, budget, thetas, made)
    return _walk(own, known, full, batch, tolerance, budget, made)


def examine_run(run: RunDir, engine: str = "recorded", *, step: int = -1, rollouts: int = 16) -> Report:
    """The first rollouts of an RL step (from 1; −1 is the last) under the weights that the step began with: the engine as it
    recorded them (`recorded`), or one of `engines` that reads the same tokens. Raises ValueError for an unknown engine and for a
    step whose rollouts or weights are not kept."""
    if rollouts < 1:
        raise ValueError(f"rollouts={rollouts}: must be at least 1")
    batch = stored_batch(run, step)
    model = model_before(run, batch.step)
    choices = engines(model)
    if engine not in ("recorded", *choices):
        raise ValueError(f"engine {engine!r}: must be one of recorded, {', '.join(choices)}")
    frozen = Batch.of(batch.attempts[:rollouts], CompactRenderer(load_tokenizer(run.path / "data")))
    if engine == "recorded":
        return examine(model, frozen)
    return examine(model, record(choices[engine], frozen), choices[engine])


def _require_routes(batch: Batch, model: Model) -> None:
    c = model.config
    for number, row in enumerate(batch.rows):
        routes = row.trace.routes
        if batch.routed and (
            routes.shape[1:] != (c.moe_layers, c.num_experts_per_tok) or routes.max() >= c.num_experts
        ):
            raise ValueError(
                f"row {number}: routes {routes.shape[1:]} with expert {routes.max()}; the model has {c.moe_layers} layers "
                f"of {c.num_experts} experts, {c.num_experts_per_tok} a token"
            )


class _Sums:
    """Collects what a side's parts are apart from the engine."""

    def __init__(self) -> None:
        self.gaps: list[NDArray[np.float64]] = []
        self.kls: list[NDArray[np.float64]] = []

    def add(self, seen: Seen, engine: Seen, recorded_S: NDArray[np.float64]) -> None:
        gap_S = seen.logprob_S.numpy() - recorded_S
        self.gaps.append(gap_S)
        kl_S = kl_divergence(engine.logprob_SV, seen.logprob_SV).numpy()
        self.kls.append(np.where(np.isnan(gap_S), np.nan, kl_S))

    def figures(self) -> Figures:
        return figures(np.concatenate(self.gaps), np.concatenate(self.kls))


def kl_divergence(engine_SV: Tensor, trainer_SV: Tensor) -> Tensor:
    """KL(engine ‖ trainer) [S] in float64 of log-probabilities [S, V]; infinite where the trainer excludes what the engine does
    not.

    Σ p (log p − log q) − p + q, which is the same for distributions and never below 0 when rounding keeps them from adding up to
    1."""
    one, other = engine_SV.double(), trainer_SV.double()
    p_SV, q_SV = one.exp(), other.exp()
    term_SV = torch.where(p_SV > 0, p_SV * (one - other), 0.0) - p_SV + q_SV
    return term_SV.sum(-1)


def figures(gap_S: NDArray[np.float64], kl_S: NDArray[np.float64]) -> Figures:
    """Of gaps (NaN: no such token) and divergences."""
    there = ~np.isnan(gap_S)
    if not there.any():
        nothing = dict.fromkeys(("p50", "p99", "most", "k1", "k3", "kl"), math.nan)
        return Figures(**nothing, missing=1.0)
    gap = gap_S[there]
    tail = gap_figures(gap)
    return Figures(
        p50=tail["logprob_gap_p50"],
        p99=tail["logprob_gap_p99"],
        most=float(np.abs(gap).max()),
        k1=float(-gap.mean()),
        k3=tail["k3"],
        kl=float(kl_S[there].mean()),
        missing=float(1 - there.mean()),
    )


def _walk(
    own: Side, known: Side, engine: Side, batch: Batch, tolerance: float, budget: int, made: dict[Any, Model]
) -> Report:
    sides = ladder(own, engine)
    judged = [rung for rung in differing(own, engine) if rung.fields[0] not in ("written", "read")]
    same = sides[1]  # the engine's tokens, everything else the trainer's
    sums = [_Sums() for _ in (own, *sides)]
    moved = {rung.name: [0.0, 0.0] for rung in judged}
    inside, checks = Inside(), RouteChecks(same.model)
    for start, part in batch.parts(budget):
        wanted = recorded(part)
        top = observe(engine, part, streams=True, made=made)
        below = observe(same, part, streams=True, made=made)
        before, seen = None, None
        for side, total in zip((own, *sides), sums, strict=True):
            if side == engine:
                seen = top
            elif seen is None or side != before:
                seen = below if side == same else observe(side, part, made=made)
            total.add(seen, top, wanted)
            before = side
        free = replace(engine, replay="none")  # on routes of its own: pinned ones hide what moves routers alone
        alive = observe(free, part, made=made) if judged and free != engine else top
        for rung in judged:
            sides_of = (with_rung(same, engine, rung), below), (with_rung(free, own, rung), alive)
            for place, (side, base) in enumerate(sides_of):
                apart = (observe(side, part, made=made).logprob_S - base.logprob_S).abs().nan_to_num(0.0)
                moved[rung.name][place] = max(moved[rung.name][place], float(apart.max()) if len(apart) else 0.0)
        inside.add(below.forwarded, top.forwarded, start, part, engine)
        if part.routed:
            checks.add(part, top.forwarded, start)
    found = {rung.name for rung in differing(known, engine)}
    steps = tuple(
        Step(
            rung=rung.name,
            change=change(own, engine, rung),
            found=rung.name in found,
            figures=total.figures(),
            alone=min(moved.get(rung.name, [0.0])),
        )
        for rung, total in zip(RUNGS, sums[1:], strict=True)
    )
    gap_S, kl_S = (np.concatenate(each) for each in (sums[-1].gaps, sums[-1].kls))
    first, first_in = inside.first()
    causes = [
        *token_causes(batch),
        *_choice_causes(own, engine, steps, tolerance, batch, first),
        *checks.causes(),
    ]
    if steps[-1].figures.most > tolerance:
        # Whatever is wrong there moves routers, too: what they contradict is evidence then, and no cause.
        doubted = [cause for cause in checks.causes() if cause.rung != "route ids" or not checks.hits["missing"]]
        causes = [unexplained(gap_S, batch, tolerance, checks), *(cause for cause in causes if cause not in doubted)]
    order = [rung.name for rung in RUNGS] + [UNEXPLAINED]
    return Report(
        start=sums[0].figures(),
        steps=steps,
        causes=tuple(sorted(causes, key=lambda cause: order.index(cause.rung))),
        first=first,
        first_in=first_in,
        flip=inside.flip,
        versions=_by_version(batch, gap_S, kl_S),
        streams=inside.streams(),
        tokens=len(gap_S),
        tolerance=tolerance,
    )


def _by_version(batch: Batch, gap_S: NDArray[np.float64], kl_S: NDArray[np.float64]) -> dict[int, Figures]:
    version_S = np.concatenate([row.policy_version[1:][row.acted[1:]] for row in batch.rows])
    return {int(v): figures(gap_S[version_S == v], kl_S[version_S == v]) for v in np.unique(version_S)}


def _choice_causes(
    own: Side, engine: Side, steps: Sequence[Step], tolerance: float, batch: Batch, first: Where | None
) -> Iterator[Cause]:
    for step, rung in zip(steps, RUNGS, strict=True):
        if step.alone <= tolerance:
            continue
        text, where = f"{step.change}: moves log-probabilities by up to {step.alone:.1e}", None
        if rung.name == "position and shift" and own.placed != engine.placed and batch.positions:
            where = first_displaced(batch)
        if rung.name == "weights":
            names = other_weights(own.model, engine.model)
            text = f"{len(names)} tensors differ, first {names[0]}" if names else "other weights"
        if rung.name in ("attention", "GEMM", "weights"):
            where = first
        yield Cause(rung=rung.name, text=text, where=where)
