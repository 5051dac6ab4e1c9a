"""The causes of a mismatch as data, engines to try, and the search for choices that nobody declared.

Dimensions: as in `numerics`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from composer_nb.labs.microscope.evidence import RouteChecks, check_routes
from composer_nb.labs.microscope.frozen import Batch
from composer_nb.labs.microscope.numerics import BUDGET, Program, compiled, observe
from composer_nb.trainer.learning.replay_settings import ReplayLevel
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import Numerics

LEVELS: tuple[ReplayLevel, ...] = ("none", "ids", "ids+order", "weights")
THETAS = (1e4, 5e5, 1e6)
"""RoPE bases to try."""
Made = dict[Any, Model]
"""Cache of models for `observe`."""


class Cause(NamedTuple):
    """A cause, as the fields of `Program` that it consists of."""

    name: str
    fields: tuple[str, ...]
    level: ReplayLevel = "none"
    """Level of replay; the causes in routes are levels of one field."""


CAUSES = (
    Cause("tokens", ("written",)),
    Cause("template", ("read",)),
    Cause("position and shift", ("jump", "rope_theta", "shift")),
    Cause("log-prob mode", ("temperature", "top_p")),
    Cause("head dtype", ("head",)),
    Cause("route ids", ("replay",), "ids"),
    Cause("order", ("replay",), "ids+order"),
    Cause("gate weights", ("replay",), "weights"),
    Cause("attention", ("layout", "attention")),
    Cause("GEMM", ("numerics", "alone", "forward")),
    Cause("weights", ("model",)),
)
"""Causes, the cheapest to rule out first. `weights` are no arithmetic; they come last because nothing else explains them."""


def trainer_of(model: Model, batch: Batch) -> Program:
    """Return the trainer's own computation: texts rendered again if the batch has them, float32, own routes."""
    tokens = not batch.rendered
    return Program(model=model, written=tokens, read=tokens)


def recorded_engine(model: Model, batch: Batch) -> Program:
    """Return an engine of which only its record is known."""
    return Program(model=model, replay="weights" if batch.routed else "none")


def engines(model: Model) -> dict[str, Program]:
    """Return engines that compute differently from the same weights, by name."""
    bf16, plain = torch.bfloat16, Program(model=model, layout="cache")
    return {
        "float32": plain,
        "alone": replace(plain, alone=True),
        "compiled": Program(model=model, layout="cache", forward=compiled),
        "bf16": replace(plain, head=bf16, numerics=Numerics(dtype=bf16)),
        "bf16-head": replace(plain, head=bf16),
        "bf16-attention": Program(model=model, attention=bf16),
        "bf16-router": replace(plain, numerics=Numerics(router_dtype=bf16)),
        "int8-experts": replace(plain, numerics=Numerics(expert_bits=8)),
        "int4-experts": replace(plain, numerics=Numerics(expert_bits=4)),
    }


def path(own: Program, engine: Program) -> list[Program]:
    """Return the trainer with the engine's choices put in, cause after cause; the last is the engine."""
    programs = [own]
    for cause in CAUSES:
        programs.append(with_cause(programs[-1], engine, cause))
    return programs[1:]


def with_cause(program: Program, source: Program, cause: Cause) -> Program:
    """Return `program` with the choices of `source` for one cause."""
    if cause.level != "none":
        return replace(program, replay=LEVELS[min(LEVELS.index(cause.level), LEVELS.index(source.replay))])
    return replace(program, **{name: getattr(source, name) for name in cause.fields})


def differing(own: Program, engine: Program) -> list[Cause]:
    """Return the causes, apart from recorded routes, in which two programs differ."""
    plain = [cause for cause in CAUSES if cause.level == "none"]
    return [cause for cause in plain if any(getattr(own, name) != getattr(engine, name) for name in cause.fields)]


def change(own: Program, engine: Program, cause: Cause) -> str:
    """Describe the trainer's and the engine's choice; empty if they are the same."""
    if cause.level != "none":
        switched = LEVELS.index(engine.replay) >= LEVELS.index(cause.level)
        return "the engine's, on record" if switched else ""
    pairs = [(name, getattr(own, name), getattr(engine, name)) for name in cause.fields]
    return ", ".join(f"{name} {text_of(one)} → {text_of(other)}" for name, one, other in pairs if one != other)


def text_of(value: object) -> str:
    """Describe a choice."""
    if isinstance(value, Numerics):
        pairs = [(e.name, getattr(value, e.name), getattr(Numerics(), e.name)) for e in fields(value)]
        return " and ".join(f"{name} {text_of(one)}" for name, one, usual in pairs if one != usual) or "float32"
    if isinstance(value, Model):
        return "its own"
    if isinstance(value, float):
        return f"{value:g}"
    if callable(value):
        return str(getattr(value, "__qualname__", value)).partition(".")[0]
    return str(value).removeprefix("torch.")


# The search for undeclared choices


def suspects(engine: Program) -> list[Program]:
    """Return the engine with one choice changed, for every change that is tried blindly. The temperature is fitted instead."""
    bf16, n = torch.bfloat16, engine.numerics
    choices: dict[str, tuple[Any, ...]] = {"shift": (-1, 1), "top_p": (0.8, 0.9, 0.95, 0.99)}
    choices["head"] = bf16, torch.float16
    if engine.forward is None:
        choices |= {"jump": (-1, 1), "replay": ("none",), "attention": (bf16,)}
        choices["rope_theta"] = tuple(theta for theta in THETAS if theta != engine.model.config.rope_theta)
        numerics = [{"dtype": bf16}, {"router_dtype": bf16}, {"expert_bits": 4}, {"expert_bits": 8}]
        choices["numerics"] = tuple(replace(n, **each) for each in numerics)  # type: ignore[arg-type]
    tried = [replace(engine, **{name: value}) for name, values in choices.items() for value in values]
    return [program for program in tried if program != engine]


def complete(known: Program, batch: Batch, tolerance: float, made: Made) -> Program:
    """Add undeclared choices to what is known of an engine, judged on the part of the batch that is explained worst.

    A choice is added while one takes away a third of the remaining gap (root mean square). If something stays unexplained, only
    choices that took away nine tenths count, so that a fault outside the list does not pass for one inside it.
    """
    worst = max(batch.parts(BUDGET), key=lambda part: _left(known, part, made)[0])
    best, (rms, most) = known, _left(known, worst, made)
    steps = [(best, rms)]
    while most > tolerance:
        scored = []
        for program in (*suspects(best), _fitted(best, worst, made)):
            try:
                scored.append((*_left(program, worst, made), program))
            except ValueError:  # positions past the model's last
                continue
        lowest, highest, program = min(scored, key=lambda each: each[0])
        if lowest > rms * 2 / 3:
            break
        best, rms, most = program, lowest, highest
        steps.append((best, rms))
    if most > tolerance:
        sure = [after <= before / 10 for (_, before), (_, after) in pairwise(steps)]
        best, rms = steps[sure.index(False) if False in sure else -1]
    for cause in differing(known, best):
        back = with_cause(best, known, cause)
        if _left(back, worst, made)[0] <= max(rms * 1.2, tolerance / 10):
            best = back
    return _with_router(best, batch, made)


def _with_router(program: Program, batch: Batch, made: Made) -> Program:
    """Add the router's arithmetic that recorded routes and gates fit. Log-probabilities on replayed routes do not show it."""
    if program.forward is not None or not batch.routed:
        return program
    n = program.numerics
    doubts = _checks(program, batch, made).doubts
    for numerics in (replace(n, router_dtype=torch.bfloat16), replace(n, router_bits=8)) if doubts else ():
        other = replace(program, numerics=numerics)
        if _checks(other, batch, made).doubts <= doubts / 10:
            return other
    return program


def _checks(program: Program, batch: Batch, made: Made) -> RouteChecks:
    return check_routes(batch, observe(program, batch, made=made).forwarded, program.model.config.sparse_layers)


def _left(program: Program, part: Batch, made: Made) -> tuple[float, float]:
    """Return root mean square and maximum of the gap."""
    gap = observe(program, part, made=made).logprob_S.numpy() - part.of_written("logprob").astype(np.float64)
    gap = gap[~np.isnan(gap)]
    return (float(np.sqrt((gap**2).mean())), float(np.abs(gap).max())) if len(gap) else (0.0, 0.0)


def _fitted(program: Program, part: Batch, made: Made) -> Program:
    """Fit a temperature between a quarter and four, by the mean |Δ log p|."""
    raw = observe(replace(program, temperature=1.0, top_p=1.0, shift=0), part, made=made)
    token_S = torch.from_numpy(part.of_written("token_ids")).long()
    wanted = torch.from_numpy(part.of_written("logprob").astype(np.float64))

    def apart(temperature: float) -> float:
        logprob_S = (raw.logprob_SV / temperature).log_softmax(-1).gather(1, token_S[:, None])[:, 0]
        return float((logprob_S.double() - wanted).abs().mean())

    grid = np.geomspace(0.25, 4, 25)
    at = int(np.argmin([apart(t) for t in grid]))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    for _ in range(40):  # ternary search
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if apart(left) < apart(right) else (left, high)
    exact = (low + high) / 2
    rounded = [round(exact, digits) for digits in (1, 2, 3)]
    near = [t for t in rounded if t and apart(t) <= 1.1 * apart(exact)]
    return replace(program, temperature=float(near[0] if near else exact))
