"""Ways to colour the tokens of a rollout, in colours that people with any colour vision can distinguish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.rollout import Segment
from composer_nb.trainer.learning.retrace import Recomputed
from composer_nb.views import style

Floats = NDArray[np.float64]
ColorBy = Literal["logprob", "advantage", "ratio", "written"]
DOUBT = 3.0
"""Nats of surprise (−log p) with full colour."""
DRIFT = 0.25
"""|log ratio| with full colour; clips of 0.2 to 0.28 lie near it."""
OPAQUE = 0.5
"""Opacity of a full tint over a page; text stays readable in both themes."""


@dataclass(frozen=True, slots=True)
class Tint:
    """A hue (#rrggbb) and its strength from 0 to 1."""

    hue: str
    strength: float = 1.0

    @property
    def over_page(self) -> str:
        """The tint in CSS, transparent, for a light or a dark page."""
        red, green, blue = (int(self.hue[at : at + 2], 16) for at in (1, 3, 5))
        return f"rgba({red},{green},{blue},{OPAQUE * self.strength:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Tints of T tokens (None for tokens that the agent read) and their meaning."""

    tints: list[Tint | None]
    key: tuple[tuple[Tint, str], ...]


def colouring(segment: Segment, by: ColorBy, advantage: Floats | None, trainer: Recomputed | None) -> Colouring:
    """Return the tint of each token of a segment, by its `advantage` or other values, float64 [T].

    Raise ValueError when `by` needs what is missing: advantages, or the values of a trainer."""
    low, high = Tint(style.ORANGE), Tint(style.SKY)
    key: tuple[tuple[Tint, str], ...]
    values: NDArray[Any]
    if by == "advantage":
        if advantage is None:
            raise ValueError(
                "only rollouts that RL trained on have an advantage; color='advantage' needs one, 'logprob' does not"
            )
        values, key = advantage, ((low, "worse than expected, made less likely"), (high, "better, made likelier"))
    elif by == "ratio":
        if trainer is None:
            raise ValueError("color='ratio' needs the values that a model computes here; see `rollout.with_trainer`")
        values = log_ratio(segment, trainer) / DRIFT
        key = ((low, "the trainer finds it less likely"), (high, "likelier"))
    elif by == "written":
        values, key = np.ones(len(segment.acted)), ((high, "written by the agent"),)
    else:
        values, key = np.minimum(0.0, segment.logprob) / DOUBT, ((low, "less likely"),)
    pairs = zip(values.tolist(), segment.acted.tolist(), strict=True)
    return Colouring(tints=[_signed(value) if mine else None for value, mine in pairs], key=key)


def log_ratio(segment: Segment, trainer: Recomputed) -> NDArray[np.float32]:
    """Return [T] the trainer's log p − the sampled log p; 0 for tokens that the agent read."""
    return np.where(segment.acted, trainer.logprob - segment.logprob, 0.0).astype(np.float32)


def _signed(value: float) -> Tint:
    return Tint(style.SKY if value > 0 else style.ORANGE, min(1.0, abs(value)))
