"""The mismatch microscope: why an engine and a trainer give the same token different log-probabilities.

    report = examine(model, attempts)                         the engine as its record shows it
    report = examine(model, attempts, engine=Program(...))    and as it is known to compute

The examination starts from the trainer's own computation and puts in the engine's choices, cause after cause (`CAUSES`). What
each takes off the gap is its contribution. With all of them in, the program is the engine; a gap that is left is rounding, or
something that nobody thought of. A contribution alone proves nothing: in bf16, replaying routes mends most of a gap that began
in a product. So a cause is *named* only if it differs by itself: log-probabilities move when it alone is put into the trainer
and when it alone is taken out of the engine, or the record contradicts the engine's own routers on the same inputs.

Dimensions: S tokens that the policy wrote, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.grading.grade import Attempt
from composer_nb.labs.microscope.causes import CAUSES, change, differing, engines, path, with_cause
from composer_nb.labs.microscope.evidence import (
    UNEXPLAINED,
    Finding,
    Streams,
    Where,
    check_routes,
    first_apart,
    other_weights,
    streams_apart,
    unexplained,
)
from composer_nb.labs.microscope.frozen import FrozenBatch
from composer_nb.labs.microscope.numerics import ProgramChoices, ProgramValues, observe, record
from composer_nb.labs.rewards.rescore import model_before, stored_batch
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.mismatch import gap_figures
from composer_nb.trainer.records.rundir import RunDir

TOLERANCE = 1e-4
"""Nats that count as rounding. Other orders of summation in float32 kernels move a tenth of that."""
ORDER = [cause.name for cause in CAUSES] + [UNEXPLAINED]
Floats = NDArray[np.float64]
Made = dict[Any, Model]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Trainer minus engine, in nats."""

    p50: float
    p99: float
    most: float
    """Percentiles and maximum of |Δ log p|."""
    k1: float
    k3: float
    """Estimates of KL(engine ‖ trainer) from the sampled tokens: −mean Δ, and mean(e^Δ − 1 − Δ)."""
    kl: float
    """KL(engine ‖ trainer) over the whole vocabulary, mean over the places that predict these tokens. The engine's distributions
    are recomputed from its choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseStep:
    """The figures with one more cause put in."""

    cause: str
    change: str
    """The trainer's choice and the engine's; empty if they are the same."""
    figures: Figures
    alone: float
    """Largest |Δ log p| when this cause alone is put into the trainer, or alone taken out of the engine on routes of its own,
    whichever is less: coarse arithmetic elsewhere amplifies any rounding. 0 for routes, which the record itself
    decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Result of an examination."""

    start: Figures
    """Trainer and engine as they are."""
    steps: tuple[CauseStep, ...]
    findings: tuple[Finding, ...]
    """Empty: the two differ by rounding at most."""
    first: Where | None
    """First difference of the residual streams: the lowest layer, in it the first token."""
    first_in: str
    """Half of the layer that `first` is in; empty without `first`."""
    versions: Mapping[int, Figures]
    """Figures with all causes put in, by recorded policy version."""
    streams: Streams
    tokens: int
    tolerance: float

    @property
    def left(self) -> Figures:
        """Figures with all causes put in."""
        return self.steps[-1].figures

    @property
    def named(self) -> tuple[str, ...]:
        """Causes that differ by themselves, in the order of `CAUSES`."""
        return tuple(sorted({finding.cause for finding in self.findings}, key=ORDER.index))

    def contributions(self, figure: str) -> dict[str, float]:
        """Return what each cause takes off `figure` (a field of `Figures`)."""
        values = [getattr(self.start, figure), *(getattr(step.figures, figure) for step in self.steps)]
        return {step.cause: values[at] - values[at + 1] for at, step in enumerate(self.steps)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the residual streams."""
        plain = asdict(self)
        del plain["streams"]
        versions = {str(version): figures for version, figures in plain["versions"].items()}
        return plain | {"versions": versions, "named": list(self.named)}


def examine(
    trainer: Model,
    attempts: Sequence[Attempt] | FrozenBatch,
    engine: ProgramChoices | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> Examination:
    """Examine the gap between `trainer` (float32) and `engine`. Recorded routes are replayed; without `engine` only they are
    known of it.

    `tolerance` is what counts as rounding, in nats. Raises ValueError for rows that are too long and for routes that do not fit
    the model.
    """
    batch = attempts if isinstance(attempts, FrozenBatch) else FrozenBatch.of(attempts)
    _require_routes(batch, trainer)
    known = engine or ProgramChoices(model=trainer)
    known = replace(known, replay="weights") if batch.routed else known
    return _examine(ProgramChoices(model=trainer), known, batch, tolerance)


def examine_run(run: RunDir, engine: str = "recorded", *, step: int = -1, rollouts: int = 16) -> Examination:
    """Examine the first rollouts of an RL step (from 1; −1 is the last) under the weights that the step began with.

    The engine is the one that recorded them (`recorded`), or one of `engines` that reads the same tokens. Raises ValueError for
    an unknown engine and for a step whose rollouts or weights are not kept.
    """
    if rollouts < 1:
        raise ValueError(f"rollouts={rollouts}: must be at least 1")
    batch = stored_batch(run, step)
    model = model_before(run, batch.step)
    choices = engines(model)
    if engine not in ("recorded", *choices):
        raise ValueError(f"engine {engine!r}: must be one of recorded, {', '.join(choices)}")
    frozen = FrozenBatch.of(batch.attempts[:rollouts])
    if engine == "recorded":
        return examine(model, frozen)
    return examine(model, record(choices[engine], frozen), choices[engine])


def _require_routes(batch: FrozenBatch, model: Model) -> None:
    c = model.config
    for number, row in enumerate(batch.rows if batch.routed else ()):
        routes = row.trace.routes
        if routes.shape[1:] != (c.moe_layers, c.num_experts_per_tok) or routes.max() >= c.num_experts:
            raise ValueError(
                f"row {number}: routes {routes.shape[1:]} with expert {routes.max()}; the model has {c.moe_layers} layers "
                f"of {c.num_experts} experts, {c.num_experts_per_tok} a token"
            )


def kl_divergence(engine_SV: Tensor, trainer_SV: Tensor) -> Tensor:
    """Return KL(engine ‖ trainer) [S] in float64 of log-probabilities [S, V]; infinite where only the trainer excludes a token.

    Σ p (log p − log q) − p + q equals the divergence for distributions and stays non-negative when rounding keeps them from
    summing to 1."""
    one, other = engine_SV.double(), trainer_SV.double()
    p_SV, q_SV = one.exp(), other.exp()
    term_SV = torch.where(p_SV > 0, p_SV * (one - other), 0.0) - p_SV + q_SV
    return term_SV.sum(-1)


def figures(gap_S: Floats, kl_S: Floats) -> Figures:
    """Summarise gaps and divergences."""
    tail = gap_figures(gap_S)
    return Figures(
        p50=tail["logprob_gap_p50"],
        p99=tail["logprob_gap_p99"],
        most=float(np.abs(gap_S).max()),
        k1=float(-gap_S.mean()),
        k3=tail["k3"],
        kl=float(kl_S.mean()),
    )


def _examine(own: ProgramChoices, engine: ProgramChoices, batch: FrozenBatch, tolerance: float) -> Examination:
    made: Made = {}
    programs = path(own, engine)
    top = observe(engine, batch, streams=True, made=made)
    below = observe(own, batch, streams=True, made=made)
    sparse = own.model.config.sparse_layers
    gaps = _gaps([own, *programs], {own: below, engine: top}, top, batch, made)
    alone = _alone(own, below, engine, top, batch, made)
    steps = tuple(
        CauseStep(
            cause=cause.name,
            change=change(own, engine, cause),
            figures=figures(*gaps[program]),
            alone=alone.get(cause.name, 0.0),
        )
        for cause, program in zip(CAUSES, programs, strict=True)
    )
    streams = streams_apart(below.forwarded, top.forwarded, batch)
    first, first_in = first_apart(streams, top.forwarded, sparse)
    gap_S, kl_S = gaps[engine]
    findings = list(_choices(own, engine, steps, tolerance, first))
    checks = check_routes(batch, top.forwarded, sparse) if batch.routed else None
    of_routes = list(checks.findings()) if checks else []
    if steps[-1].figures.most > tolerance:  # it moves routers, too, so what they contradict proves nothing
        missing = bool(checks and checks.hits["missing"])
        of_routes = [finding for finding in of_routes if finding.cause == "route ids" and missing]
        findings.append(unexplained(gap_S, batch, tolerance, checks.first_gate if checks else None))
    version_S = batch.of_written("policy_version")
    return Examination(
        start=figures(*gaps[own]),
        steps=steps,
        findings=tuple(sorted([*findings, *of_routes], key=lambda finding: ORDER.index(finding.cause))),
        first=first,
        first_in=first_in,
        versions={int(v): figures(gap_S[version_S == v], kl_S[version_S == v]) for v in np.unique(version_S)},
        streams=streams,
        tokens=len(gap_S),
        tolerance=tolerance,
    )


def _gaps(
    programs: Sequence[ProgramChoices],
    seen: Mapping[ProgramChoices, ProgramValues],
    engine: ProgramValues,
    batch: FrozenBatch,
    made: Made,
) -> dict[ProgramChoices, tuple[Floats, Floats]]:
    """Return each program's gap and KL divergence [S] to the record and the engine."""
    found: dict[ProgramChoices, tuple[Floats, Floats]] = {}
    for program in programs:
        if program not in found:
            one = seen.get(program) or observe(program, batch, made=made)
            gap_S = one.logprob_S.numpy() - batch.of_written("logprob").astype(np.float64)
            found[program] = gap_S, kl_divergence(engine.logprob_SV, one.logprob_SV).numpy()
    return found


def _alone(
    own: ProgramChoices,
    below: ProgramValues,
    engine: ProgramChoices,
    top: ProgramValues,
    batch: FrozenBatch,
    made: Made,
) -> dict[str, float]:
    """Return `CauseStep.alone` of each cause that is a choice of arithmetic."""
    judged = differing(own, engine)
    free = replace(engine, replay="none")  # replayed routes would hide what moves routers
    live = observe(free, batch, made=made) if judged and free != engine else top

    def moved(program: ProgramChoices, base: ProgramValues) -> float:
        apart = (observe(program, batch, made=made).logprob_S - base.logprob_S).abs()
        return float(apart.max()) if len(apart) else 0.0

    return {
        cause.name: min(moved(with_cause(own, engine, cause), below), moved(with_cause(free, own, cause), live))
        for cause in judged
    }


def _choices(
    own: ProgramChoices, engine: ProgramChoices, steps: Sequence[CauseStep], tolerance: float, first: Where | None
) -> Iterator[Finding]:
    for step in steps:
        if step.alone <= tolerance:
            continue
        text, where = f"{step.change}: moves log-probabilities by up to {step.alone:.1e}", None
        if step.cause == "weights":
            names = other_weights(own.model, engine.model)
            text = f"{len(names)} tensors differ, first {names[0]}" if names else "other weights"
        if step.cause in ("attention", "GEMM", "weights"):
            where = first
        yield Finding(cause=step.cause, text=text, where=where)
