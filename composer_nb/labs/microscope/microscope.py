"""The mismatch microscope: why an engine and a trainer give the same token different log-probabilities.

    report = examine(model, attempts)                         the engine as its record shows it
    report = examine(model, attempts, engine=Program(...))    and as it is known to compute

The examination starts from the trainer's own computation and puts in the engine's choices, cause after cause (`CAUSES`). What
each takes off the gap is its contribution. With all of them in, the program is the engine; a gap that is left is rounding, or
something that nobody thought of. A contribution alone proves nothing: in bf16, replaying routes mends most of a gap that began
in a product. So a cause is *named* only if it differs by itself: log-probabilities move when it alone is put into the trainer
and when it alone is taken out of the engine, or the record contradicts the engine's own routers on the same inputs.

What a cause takes off the gap does not prove it, so routes, their order and gates are checked against the engine's own routers on
the engine's own inputs (earlier layers on the recorded routes). One foreign expert is then not blamed on all the layers above it.

Dimensions: T tokens of a row, N forwarded tokens, S tokens that the policy wrote, L MoE layers, K experts a token, V vocabulary,
P places of the residual stream.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.grading.grade import Attempt
from composer_nb.labs.microscope.numerics import (
    CAUSES,
    Cause,
    FrozenBatch,
    Place,
    ProgramChoices,
    ProgramValues,
    change,
    differing,
    engines,
    from_text,
    observe,
    path,
    record,
    with_cause,
)
from composer_nb.labs.rewards.rescore import model_before, stored_batch
from composer_nb.trainer.models.checkpoint import hugging_face_views
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.recipe.mismatch import gap_figures
from composer_nb.trainer.records.rundir import RunDir

UNEXPLAINED = "unexplained"
# Router margin up to which a flip is float32 rounding.
TIE = 1e-6
# Rounding of a gate, and of a token's residual stream relative to its length.
GATE, STREAM = 1e-5, 2e-5


# Nats that count as rounding. Other orders of summation in float32 kernels move a tenth of that.
TOLERANCE = 1e-4
ORDER = [cause.name for cause in CAUSES] + [UNEXPLAINED]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The first token concerned. Rows, tokens and layers count from 0; layers are those of the model.

    Attributes:
        experts: The engine's experts; for a difference within experts those all of whose tokens differ.
    """

    row: int
    token: int
    layer: int | None = None
    experts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that differs by itself."""

    cause: str
    text: str
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Trainer minus engine, in nats.

    Attributes:
        p50, p99, most: Percentiles and maximum of |Δ log p|.
        k1, k3: Estimates of KL(engine ‖ trainer) from the sampled tokens: −mean Δ, and mean(e^Δ − 1 − Δ).
        kl: KL(engine ‖ trainer) over the whole vocabulary, mean over the places that predict these tokens. The engine's
            distributions are recomputed from its choices.
        missing: Share of the written tokens that are not in the program's rows; the other figures leave them out.
    """

    p50: float
    p99: float
    most: float
    k1: float
    k3: float
    kl: float
    missing: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseStep:
    """The figures with one more cause put in.

    Attributes:
        change: The trainer's choice and the engine's; empty if they are the same.
        alone: Largest |Δ log p| when this cause alone is put into the trainer, or alone taken out of the engine on
            routes of its own, whichever is less: coarse arithmetic elsewhere amplifies any rounding. 0 for routes,
            which the record itself decides.
    """

    cause: str
    change: str
    figures: Figures
    alone: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Result of an examination.

    Attributes:
        start: Trainer and engine as they are.
        findings: Causes that differ; empty if the two differ by rounding at most.
        first: First difference of the residual streams: the lowest layer, in it the first token.
        first_in: Half of the layer that `first` is in; empty without `first`.
        versions: Figures with all causes put in, by recorded policy version.
        places, apart_PN: Distance ‖trainer − engine‖ / ‖engine‖ of the residual streams inside the model, on the engine's
            tokens; the trainer on its own routes.
        lengths: Forwarded tokens of each row.
    """

    start: Figures
    steps: tuple[CauseStep, ...]
    findings: tuple[Finding, ...]
    first: Where | None
    first_in: str
    versions: Mapping[int, Figures]
    places: tuple[Place, ...]
    apart_PN: NDArray[np.float32]
    lengths: tuple[int, ...]
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

    def to_dict(self) -> dict[str, Any]:
        """Return plain data without the residual streams."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("places", "apart_PN", "lengths")}
        versions = {str(version): figures for version, figures in plain["versions"].items()}
        return plain | {"versions": versions, "named": list(self.named)}


def examine(
    trainer: Model | ProgramChoices,
    attempts: Sequence[Attempt] | FrozenBatch,
    engine: ProgramChoices | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> Examination:
    """Examine the gap between `trainer` and `engine`. A model is a trainer in float32, on the tokens on record. Recorded routes
    are replayed; without `engine` only they are known of it.

    `tolerance` is what counts as rounding, in nats. Raises ValueError for rows that are too long and for routes that do not fit
    the model.
    """
    batch = attempts if isinstance(attempts, FrozenBatch) else FrozenBatch.of(attempts)
    plain = trainer if isinstance(trainer, ProgramChoices) else ProgramChoices(model=trainer)
    config, variants = plain.model.config, dict[Any, Model]()
    _require_fit(batch, config)
    engine = engine or ProgramChoices(model=plain.model)
    engine = replace(engine, replay="weights") if batch.routed else engine
    aligned = replace(plain, spelling=engine.spelling, template=engine.template)  # streams of other tokens say nothing
    values = {program: observe(program, batch, keep_streams=True, variants=variants) for program in (engine, aligned)}
    engine_values, trainer_values = values[engine], values[aligned]
    recorded_S = batch.of_written("logprob").astype(np.float64)

    @cache
    def gap_and_kl(program: ProgramChoices) -> tuple[Floats, Floats]:
        other = values.get(program) or observe(program, batch, variants=variants)
        return other.logprob_S.numpy() - recorded_S, kl_divergence(engine_values.logprob_SV, other.logprob_SV).numpy()

    pairs = [(stream, engine_values.streams[location]) for location, stream in trainer_values.streams.items()]
    apart = [((x_ND - y_ND).norm(dim=-1) / y_ND.norm(dim=-1).clamp_min(1e-30)).numpy() for x_ND, y_ND in pairs]
    apart_by_place = dict(zip(engine_values.streams, apart, strict=True))
    first_place, first_in = first_apart(apart_by_place, engine_values, batch, config.sparse_layers)
    alone = _moved_alone(plain, engine, values, batch, variants)
    steps, findings = list[CauseStep](), list[Finding]()
    for cause, program in zip(CAUSES, path(plain, engine), strict=True):
        choices, moved = change(plain, engine, cause), alone.get(cause.name, 0.0)
        steps.append(CauseStep(cause=cause.name, change=choices, figures=figures(*gap_and_kl(program)), alone=moved))
        if moved > tolerance:
            text = f"{choices}: moves log-probabilities by up to {moved:.1e}"
            if cause.name == "tokens" and math.isinf(moved):
                text = f"{choices}: {figures(*gap_and_kl(plain)).missing:.1%} of the written tokens are lost"
            if cause.name == "weights":
                tensors = other_weights(plain.model, engine.model)
                text = f"{len(tensors)} tensors differ, first {tensors[0]}" if tensors else "other weights"
            where = first_place if cause.name in ("attention", "GEMM", "weights") else None
            findings.append(Finding(cause=cause.name, text=text, where=where))
    gap_S, kl_S = gap_and_kl(engine)
    hits, route_findings = check_routes(batch, engine_values, config.sparse_layers) if batch.routed else ({}, [])
    if steps[-1].figures.most > tolerance:  # it moves routers, too, so what they contradict proves nothing
        route_findings = [finding for finding in route_findings if finding.cause == "route ids" and hits["missing"]]
        findings.append(unexplained(gap_S, batch, tolerance, _lowest(hits.get("gate weights", []))))
    version_S = batch.of_written("policy_version")
    return Examination(
        start=figures(*gap_and_kl(plain)),
        steps=tuple(steps),
        findings=tuple(sorted([*findings, *route_findings], key=lambda finding: ORDER.index(finding.cause))),
        first=first_place,
        first_in=first_in,
        versions={int(v): figures(gap_S[version_S == v], kl_S[version_S == v]) for v in np.unique(version_S)},
        places=tuple(engine_values.streams),
        apart_PN=np.stack(apart),
        lengths=tuple(batch.lengths),
        tokens=len(gap_S),
        tolerance=tolerance,
    )


def toggled(trainer: ProgramChoices, engine: ProgramChoices, batch: FrozenBatch, causes: Collection[str]) -> Figures:
    """Return the figures of the trainer with the engine's choices for these causes, beside the record. Routes have levels: a
    higher one contains the lower ones."""
    chosen = (cause for cause in CAUSES if cause.name in causes)
    program = reduce(lambda choices, cause: with_cause(choices, engine, cause), chosen, trainer)
    values, of_engine = observe(program, batch), observe(engine, batch)
    gap_S = values.logprob_S.numpy() - batch.of_written("logprob").astype(np.float64)
    return figures(gap_S, kl_divergence(of_engine.logprob_SV, values.logprob_SV).numpy())


def _require_fit(batch: FrozenBatch, config: ModelConfig) -> None:
    """Raise ValueError for routes that do not fit the model."""
    for number, row in enumerate(batch.rows if batch.routed else ()):
        routes = row.trace.routes
        if routes.shape[1:] != (config.moe_layers, config.num_experts_per_tok) or routes.max() >= config.num_experts:
            raise ValueError(
                f"row {number}: routes {routes.shape[1:]} with expert {routes.max()}; the model has {config.moe_layers} layers "
                f"of {config.num_experts} experts, {config.num_experts_per_tok} a token"
            )


def examine_run(
    run: RunDir, engine: str = "recorded", *, step: int = -1, rollouts: int = 16, texts: bool = False
) -> Examination:
    """Examine the first rollouts of an RL step (from 1; −1 is the last) under the weights that the step began with.

    The engine is the one that recorded them (`recorded`), or one of `engines` that reads the same tokens. `texts`:
    the trainer reads the rollouts' texts, tokenised again. Raises ValueError for
    an unknown engine and for a step whose rollouts or weights are not kept.
    """
    if rollouts < 1:
        raise ValueError(f"rollouts={rollouts}: must be at least 1")
    batch = stored_batch(run, step)
    model = model_before(run, batch.step)
    choices = engines(model)
    if engine not in ("recorded", *choices):
        raise ValueError(f"engine {engine!r}: must be one of recorded, {', '.join(choices)}")
    frozen, trainer = FrozenBatch.of(batch.attempts[:rollouts]), ProgramChoices(model=model)
    if texts:
        again = from_text(load_tokenizer(run.path / "data"))
        trainer = replace(trainer, spelling=again, template=again)
    if engine == "recorded":
        return examine(trainer, frozen)
    return examine(trainer, record(choices[engine], frozen), choices[engine])


def kl_divergence(engine_SV: Tensor, trainer_SV: Tensor) -> Tensor:
    """Return KL(engine ‖ trainer) [S] in float64 of log-probabilities [S, V]; infinite where only the trainer excludes a token.

    Σ p (log p − log q) − p + q equals the divergence for distributions and stays non-negative when rounding keeps them from
    summing to 1."""
    log_p_SV, other = engine_SV.double(), trainer_SV.double()
    p_SV, q_SV = log_p_SV.exp(), other.exp()
    term_SV = torch.where(p_SV > 0, p_SV * (log_p_SV - other), 0.0) - p_SV + q_SV
    return term_SV.sum(-1)


def figures(gap_S: Floats, kl_S: Floats) -> Figures:
    """Summarise gaps and divergences."""
    missing_S = np.isnan(gap_S)
    gap_S, kl_S = gap_S[~missing_S], kl_S[~missing_S]
    tail = gap_figures(gap_S)
    return Figures(
        missing=float(missing_S.mean()),
        p50=tail["logprob_gap_p50"],
        p99=tail["logprob_gap_p99"],
        most=float(np.abs(gap_S).max()),
        k1=float(-gap_S.mean()),
        k3=tail["k3"],
        kl=float(kl_S.mean()),
    )


def _moved_alone(
    trainer: ProgramChoices,
    engine: ProgramChoices,
    values: Mapping[ProgramChoices, ProgramValues],
    batch: FrozenBatch,
    variants: dict[Any, Model],
) -> dict[str, float]:
    """Return `CauseStep.alone` of each cause that is a choice of arithmetic."""
    free = replace(engine, replay="none")  # replayed routes would hide what moves routers

    def logprobs(program: ProgramChoices) -> Tensor:
        return (values.get(program) or observe(program, batch, variants=variants)).logprob_S

    causes = differing(trainer, engine)
    bases = {program: logprobs(program) for program in ((trainer, free) if causes else ())}

    def moved(program: ProgramChoices, other: ProgramChoices, cause: Cause) -> float:
        new_S, old_S = logprobs(with_cause(program, other, cause)), bases[program]
        apart = torch.where(new_S.isnan() != old_S.isnan(), torch.inf, (new_S - old_S).abs().nan_to_num(0.0))
        return float(apart.max()) if len(apart) else 0.0

    return {cause.name: min(moved(trainer, engine, cause), moved(free, trainer, cause)) for cause in causes}


# Evidence


def other_weights(model: Model, other: Model) -> list[str]:
    """Return the Hugging Face names of tensors that differ."""
    theirs = hugging_face_views(other)
    return [name for name, view in hugging_face_views(model).items() if not torch.equal(view, theirs[name])]


def unexplained(gap_S: NDArray[np.float64], batch: FrozenBatch, tolerance: float, gate: Where | None) -> Finding:
    """Describe a gap that is left with all causes the engine's; `gate` is where recorded gates first disagree."""
    size_S = np.abs(gap_S)
    row_S = np.repeat(np.arange(len(batch.rows)), [len(at_W) for at_W in batch.written])
    at = int((size_S > tolerance).argmax())
    inside = "" if gate is None else f"; gates first disagree in layer {gate.layer}, row {gate.row}, token {gate.token}"
    return Finding(
        cause=UNEXPLAINED,
        text=f"{int((size_S > tolerance).sum())} of {len(size_S)} tokens are up to {size_S.max():.1e} apart with all causes the "
        f"engine's: other weights, or arithmetic that was not declared{inside}",
        where=Where(row=int(row_S[at]), token=int(np.concatenate(batch.written)[at])),
    )


# Routes

# Kind of contradiction between record and routers -> cause and text.
ROUTE_FINDINGS = {
    "missing": ("route ids", "have no route on record"),
    "route ids": ("route ids", "have experts on record that the engine's router would not choose"),
    "order": ("order", "have their experts in another order than the engine's router"),
    "gate weights": ("gate weights", "have gates on record that are not the engine's router's"),
}


def check_routes(
    batch: FrozenBatch, engine: ProgramValues, sparse_layers: Sequence[int]
) -> tuple[dict[str, list[Where]], list[Finding]]:
    """Compare the recorded routes with those that the engine's routers make of the engine's inputs.

    Returns the (token, layer) pairs that contradict, by kind of ROUTE_FINDINGS, and what they say. `sparse_layers`: indices of
    the layers with experts."""
    routes_NLK, gates_NLK, valid = (
        np.concatenate([getattr(row.trace, name)[:-1] for row in batch.rows])
        for name in ("routes", "gates", "route_valid")
    )
    own_NLK, used_NLK, live_NLK, margin_NL = (
        values.numpy() for values in (engine.own_NLK, engine.experts_NLK, engine.live_NLK, engine.margin_NL)
    )

    def live_gates(experts_NLK: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the live gates of experts, where each is among those used."""
        at_NLK = (used_NLK[:, :, None, :] == experts_NLK[:, :, :, None]).argmax(-1)
        return np.take_along_axis(live_NLK, at_NLK, -1)

    routes_NLK, valid_NL = routes_NLK.astype(np.int64), np.broadcast_to(valid[:, None], margin_NL.shape)
    is_other_NL = (np.sort(routes_NLK, -1) != np.sort(own_NLK, -1)).any(-1)
    # Falling gates are the order of choice unless the choice has a bias; then the router's own order decides.
    is_turned_NL = (routes_NLK != own_NLK).any(-1) & ~is_other_NL
    gate_step_NL = np.abs(np.diff(live_gates(own_NLK), axis=-1)).min(-1, initial=np.inf)
    is_off_NL = np.abs(gates_NLK - live_gates(routes_NLK)).max(-1) > GATE
    is_off_NL &= valid_NL & (np.sort(routes_NLK, -1) == np.sort(used_NLK, -1)).all(-1)
    hits_by_kind_NL = {
        "missing": ~valid_NL,
        "route ids": is_other_NL & valid_NL & ~(margin_NL <= TIE),
        "order": is_turned_NL & valid_NL & ~(gate_step_NL <= TIE),
        "gate weights": is_off_NL,
    }
    hits: dict[str, list[Where]] = {kind: [] for kind in hits_by_kind_NL}
    for kind, hit_NL in hits_by_kind_NL.items():
        for position, layer in np.argwhere(hit_NL).tolist():
            row, token = _row_token(position, batch.lengths)
            experts = tuple(routes_NLK[position, layer].tolist())
            hits[kind].append(Where(row=row, token=token, layer=sparse_layers[layer], experts=experts))
    wrong_gates = torch.from_numpy(gates_NLK[is_off_NL].ravel())
    findings = []
    for kind, (cause, text) in ROUTE_FINDINGS.items():
        places = hits[kind]
        if kind == "order":  # a foreign expert changes later inputs, and with them their order
            places = [hit for hit in places if not any(_before(foreign, hit) for foreign in hits["route ids"])]
        if places:
            text = f"{len(places)} of {margin_NL.size} (token, layer) pairs {text}"
            for dtype in (torch.bfloat16, torch.float16) if kind == "gate weights" else ():
                if torch.equal(wrong_gates.to(dtype).float(), wrong_gates):
                    text += f"; all of them are numbers of {str(dtype).removeprefix('torch.')}"
                    break
            findings.append(Finding(cause=cause, text=text, where=_lowest(places)))
    return hits, findings


def _row_token(position: int, lengths: Sequence[int]) -> tuple[int, int]:
    ends = np.cumsum([0, *lengths])
    row = int(np.searchsorted(ends, position, "right")) - 1
    return row, position - int(ends[row])


def _before(earlier: Where, other: Where) -> bool:
    """Return whether `other` sees what happens at `earlier`: a higher layer, the same token or a later one of the row."""
    return earlier.row == other.row and other.token >= earlier.token and (other.layer or 0) > (earlier.layer or 0)


def _lowest(hits: Sequence[Where]) -> Where | None:
    return min(hits, key=lambda where: (where.layer or 0, where.row, where.token), default=None)


def first_apart(
    apart: Mapping[Place, NDArray[np.float32]], engine: ProgramValues, batch: FrozenBatch, sparse: Sequence[int]
) -> tuple[Where | None, str]:
    """Return the lowest place at which any token's residual streams differ, with the first token there, and the half of the
    layer."""
    for (layer, part), place_N in apart.items():
        unlike_N = place_N > STREAM
        if unlike_N.any():
            row, token = _row_token(int(unlike_N.argmax()), batch.lengths)
            experts: tuple[int, ...] = ()
            if part == "experts" and layer in sparse:
                used_NK = engine.experts_NLK.numpy()[:, sparse.index(layer)]
                experts = tuple(e for e in np.unique(used_NK).tolist() if unlike_N[(used_NK == e).any(-1)].all())
            return Where(row=row, token=token, layer=layer, experts=experts), part
    return None, ""
