"""The ladder of causes: its rungs as data, and the sides that stand on them.

Dimensions: as in `sides`.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import torch

from composer_nb.trainer.frozen import Batch
from composer_nb.trainer.model import Model
from composer_nb.trainer.programs import compiled
from composer_nb.trainer.replay_settings import ReplayLevel
from composer_nb.trainer.sides import Side
from composer_nb.trainer.variants import Numerics

LEVELS: tuple[ReplayLevel, ...] = ("none", "ids", "ids+order", "weights")


class Rung(NamedTuple):
    """A cause, as the fields of `Side` that it consists of."""

    name: str
    fields: tuple[str, ...]
    level: ReplayLevel = "none"
    """Of replay; rungs of routes are levels of one field."""


RUNGS = (
    Rung("tokens", ("written",)),
    Rung("template", ("read",)),
    Rung("position and shift", ("placed", "jump", "rope_theta", "shift")),
    Rung("log-prob mode", ("temperature", "top_p")),
    Rung("head dtype", ("head",)),
    Rung("route ids", ("replay",), "ids"),
    Rung("order", ("replay",), "ids+order"),
    Rung("gate weights", ("replay",), "weights"),
    Rung("attention", ("layout", "attention")),
    Rung("GEMM", ("numerics", "alone", "forward")),
    Rung("weights", ("model",)),
)
"""From what is cheap to rule out to what is dear. `weights` are no arithmetic; they come last because nothing else explains
them."""
UNEXPLAINED = "unexplained"


def trainer_side(model: Model, batch: Batch) -> Side:
    """The trainer's own computation: texts rendered where the batch says so, the prefix tree, float32, its own routes."""
    tokens = not batch.rendered
    return Side(model=model, written=tokens, read=tokens, placed=not batch.positions)


def recorded_side(model: Model, batch: Batch) -> Side:
    """An engine of which nothing is known but its record."""
    return Side(model=model, layout="tree", replay="weights" if batch.routed else "none")


def engines(model: Model) -> dict[str, Side]:
    """Engines that really compute otherwise, from the same weights, by name."""
    bf16, plain = torch.bfloat16, Side(model=model, layout="cache")
    return {
        "float32": plain,
        "padded": Side(model=model, layout="rows"),
        "alone": replace(plain, alone=True),
        "compiled": Side(model=model, layout="cache", forward=compiled),
        "bf16": replace(plain, head=bf16, numerics=Numerics(dtype=bf16)),
        "bf16-head": replace(plain, head=bf16),
        "bf16-attention": Side(model=model, layout="rows", attention=bf16),
        "bf16-router": replace(plain, numerics=Numerics(router_dtype=bf16)),
        "int8-experts": replace(plain, numerics=Numerics(expert_bits=8)),
        "int4-experts": replace(plain, numerics=Numerics(expert_bits=4)),
    }


def ladder(own: Side, engine: Side) -> list[Side]:
    """The trainer with the engine's rungs put in one after the other; the last is the engine."""
    sides, side = [], own
    for rung in RUNGS:
        side = with_rung(side, engine, rung)
        sides.append(side)
    return sides


def with_rung(side: Side, source: Side, rung: Rung) -> Side:
    if rung.level != "none":
        return replace(side, replay=LEVELS[min(LEVELS.index(rung.level), LEVELS.index(source.replay))])
    return replace(side, **{name: getattr(source, name) for name in rung.fields})


def differing(own: Side, engine: Side) -> list[Rung]:
    """Rungs at which a choice (not the record of routes) is another."""
    return [
        rung
        for rung in RUNGS
        if rung.level == "none" and any(getattr(own, name) != getattr(engine, name) for name in rung.fields)
    ]


def change(own: Side, engine: Side, rung: Rung) -> str:
    """The trainer's and the engine's choice in words."""
    if rung.level != "none":
        switched = LEVELS.index(engine.replay) >= LEVELS.index(rung.level)
        return "the engine's, on record" if switched else ""
    names = [name for name in rung.fields if getattr(own, name) != getattr(engine, name)]
    return ", ".join(f"{name} {text_of(getattr(own, name))} → {text_of(getattr(engine, name))}" for name in names)


def text_of(value: object) -> str:
    """A choice, for eyes."""
    if isinstance(value, Numerics):
        default = Numerics()
        parts = [
            f"{e.name} {text_of(getattr(value, e.name))}"
            for e in fields(value)
            if getattr(value, e.name) != getattr(default, e.name)
        ]
        return " and ".join(parts) or "float32"
    if isinstance(value, Model):
        return "its own"
    if isinstance(value, float):
        return f"{value:g}"
    if callable(value):
        return str(getattr(value, "__qualname__", value)).partition(".")[0]
    return str(value).removeprefix("torch.")
