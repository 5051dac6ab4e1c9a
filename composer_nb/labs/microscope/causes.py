"""The causes of a mismatch as data, and engines to try."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import torch

from composer_nb.labs.microscope.numerics import ProgramChoices
from composer_nb.trainer.learning.packing import ReplayLevel
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.models.variants import Numerics

LEVELS: tuple[ReplayLevel, ...] = ("none", "ids", "ids+order", "weights")


class Cause(NamedTuple):
    """A cause, as the fields of `ProgramChoices` that it consists of."""

    name: str
    fields: tuple[str, ...]
    level: ReplayLevel = "none"
    """Level of replay; the causes in routes are levels of one field."""


CAUSES = (
    Cause("head dtype", ("head",)),
    Cause("route ids", ("replay",), "ids"),
    Cause("order", ("replay",), "ids+order"),
    Cause("gate weights", ("replay",), "weights"),
    Cause("attention", ("layout", "attention")),
    Cause("GEMM", ("numerics",)),
    Cause("weights", ("model",)),
)
"""Causes, the cheapest to rule out first. `weights` are no arithmetic; they come last because nothing else explains them."""


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


def path(own: ProgramChoices, engine: ProgramChoices) -> list[ProgramChoices]:
    """Return the trainer with the engine's choices put in, cause after cause; the last is the engine."""
    programs = [own]
    for cause in CAUSES:
        programs.append(with_cause(programs[-1], engine, cause))
    return programs[1:]


def with_cause(program: ProgramChoices, source: ProgramChoices, cause: Cause) -> ProgramChoices:
    """Return `program` with the choices of `source` for one cause."""
    if cause.level != "none":
        return replace(program, replay=LEVELS[min(LEVELS.index(cause.level), LEVELS.index(source.replay))])
    return replace(program, **{name: getattr(source, name) for name in cause.fields})


def differing(own: ProgramChoices, engine: ProgramChoices) -> list[Cause]:
    """Return the causes, apart from recorded routes, in which two programs differ."""
    plain = [cause for cause in CAUSES if cause.level == "none"]
    return [cause for cause in plain if any(getattr(own, name) != getattr(engine, name) for name in cause.fields)]


def change(own: ProgramChoices, engine: ProgramChoices, cause: Cause) -> str:
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
    return str(value).removeprefix("torch.")
