"""What the colour of a token says: seven ways of looking at a rollout, all in colours that all eyes can tell apart.

A tint is a hue and how much of it. Over a page it is transparent, so that it works on light and on dark; in a figure it is mixed
with white.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.harness.rollout import Segment
from composer_nb.trainer.loss import LossSettings, trained
from composer_nb.trainer.retrace import Recomputed
from composer_nb.views import style

ColorBy = Literal["logprob", "advantage", "ratio", "entropy", "mask", "version", "written"]
DOUBT = 3.0
"""Nats of surprise (−log p) at which the colour is full."""
SPREAD = 1.5
"""Nats of entropy at which it is."""
DRIFT = 0.25
"""|log ratio| at which it is; a clip of 0.2 to 0.28 lies there."""
OPAQUE = 0.5
"""Opacity of a full tint over a page: text of either theme stays readable on it."""
TRAINS, NO_ADVANTAGE, MASKED = "trains", "no advantage", "clipped"
_REASONS = {TRAINS: style.SKY, NO_ADVANTAGE: style.YELLOW, MASKED: style.VERMILION}
_VERSIONS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW, style.BLUE, style.VERMILION)


@dataclass(frozen=True, slots=True)
class Tint:
    """A hue (as #rrggbb) and how much of it, from 0 to 1."""

    hue: str
    strength: float = 1.0

    @property
    def over_page(self) -> str:
        """For CSS."""
        red, green, blue = self._parts
        return f"rgba({red},{green},{blue},{OPAQUE * self.strength:.2f})"

    @property
    def on_white(self) -> str:
        """For figures, as #rrggbb."""
        mixed = (round(255 + (part - 255) * self.strength) for part in self._parts)
        return "#" + "".join(f"{part:02x}" for part in mixed)

    @property
    def _parts(self) -> tuple[int, int, int]:
        return int(self.hue[1:3], 16), int(self.hue[3:5], 16), int(self.hue[5:7], 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Colouring:
    """Tints of T tokens, None where the agent did not write, and what they mean."""

    tints: list[Tint | None]
    key: tuple[tuple[Tint, str], ...]


def colouring(
    segment: Segment, by: ColorBy, advantage: float | None, trainer: Recomputed | None, loss: LossSettings
) -> Colouring:
    """Raises ValueError when `by` needs what is not there: an advantage, or what a trainer computes."""
    if by in ("advantage", "mask") and advantage is None:
        raise ValueError(
            f"only rollouts that RL trained on have an advantage; color={by!r} needs one, 'logprob' does not"
        )
    if by in ("ratio", "entropy") and trainer is None:
        raise ValueError(f"color={by!r} needs what a model computes at these tokens; see `rollout.with_trainer`")
    if by == "written":
        return _alike(segment, Tint(style.SKY), "written by the agent")
    if by == "advantage":
        return _alike(segment, _signed(advantage or 0.0), "advantage of the rollout")
    if by == "version":
        names = [f"version {number}" for number in segment.policy_version.tolist()]
        return _by_name(
            segment, names, dict(zip(dict.fromkeys(_written(segment, names)), cycle(_VERSIONS), strict=False))
        )
    if by == "mask":
        return _by_name(segment, mask_reasons(segment, advantage or 0.0, trainer, loss), _REASONS)
    key: tuple[tuple[Tint, str], ...]
    if by == "ratio":
        assert trainer is not None
        low, high = (Tint(hue) for hue in (style.ORANGE, style.SKY))
        key = ((low, "the trainer finds it less likely"), (high, "likelier"))
        return _by_number(segment, log_ratio(segment, trainer) / DRIFT, _signed, key)
    if by == "entropy":
        assert trainer is not None
        key = ((Tint(style.PURPLE), f"{SPREAD:g} nats of entropy or more"),)
        return _by_number(segment, trainer.entropy / SPREAD, lambda x: Tint(style.PURPLE, min(1.0, x)), key)
    key = ((Tint(style.ORANGE), "less likely"),)
    return _by_number(segment, -segment.logprob / DOUBT, lambda x: Tint(style.ORANGE, min(1.0, max(0.0, x))), key)


def log_ratio(segment: Segment, trainer: Recomputed) -> NDArray[np.float32]:
    """[T]: log p of the trainer − log p as sampled; 0 where the agent did not write."""
    return np.where(segment.acted, trainer.logprob - segment.logprob, 0.0).astype(np.float32)


def mask_reasons(segment: Segment, advantage: float, trainer: Recomputed | None, loss: LossSettings) -> list[str]:
    """[T]: why each token trains or does not, "" where the agent did not write. Without a trainer's log-probabilities every ratio
    is 1, as it is on the batch's first optimiser step."""
    acted = segment.acted
    sampled_N = torch.from_numpy(segment.logprob[acted])
    logprob_N = sampled_N if trainer is None else torch.from_numpy(trainer.logprob[acted])
    moved = np.zeros(len(acted), np.bool_)
    if acted.any():
        rollout_N = torch.zeros(len(sampled_N), dtype=torch.int64)
        moved[acted] = trained(logprob_N, sampled_N, torch.full_like(sampled_N, advantage), rollout_N, loss).numpy()
    why = NO_ADVANTAGE if abs(advantage) <= 1e-6 else MASKED
    return [
        ("" if not mine else TRAINS if moves else why)
        for mine, moves in zip(acted.tolist(), moved.tolist(), strict=True)
    ]


def _signed(value: float) -> Tint:
    return Tint(style.SKY if value > 0 else style.ORANGE, min(1.0, abs(value)))


def _written(segment: Segment, names: Sequence[str]) -> list[str]:
    return [name for name, mine in zip(names, segment.acted.tolist(), strict=True) if mine]


def _alike(segment: Segment, tint: Tint, meaning: str) -> Colouring:
    return Colouring(tints=[tint if mine else None for mine in segment.acted.tolist()], key=((tint, meaning),))


def _by_number(
    segment: Segment, values: NDArray[np.float32], tint: Callable[[float], Tint], key: tuple[tuple[Tint, str], ...]
) -> Colouring:
    pairs = zip(values.tolist(), segment.acted.tolist(), strict=True)
    return Colouring(tints=[tint(value) if mine else None for value, mine in pairs], key=key)


def _by_name(segment: Segment, names: Sequence[str], hues: Mapping[str, str]) -> Colouring:
    """The hue of each token's name; the key holds those that occur, in order of first appearance."""
    tints = {name: Tint(hues[name], 0.8) for name in dict.fromkeys(_written(segment, names))}
    pairs = zip(names, segment.acted.tolist(), strict=True)
    return Colouring(
        tints=[tints[name] if mine else None for name, mine in pairs],
        key=tuple((tint, name) for name, tint in tints.items()),
    )
