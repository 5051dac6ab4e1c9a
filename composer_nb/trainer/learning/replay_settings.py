"""Settings of router replay; `docs/replay.md` explains and measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_nb.harness.plain import Share, require_ranges

ReplayLevel = Literal["none", "ids", "ids+order", "weights"]
Source = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The part of the recorded routes that the trainer's forward pass takes over."""

    level: ReplayLevel = "none"
    """none: nothing. ids: the set of experts. ids+order: their order too, in which their results are added up. weights: their
    gates too; the router then learns nothing from the tokens replayed."""
    source: Source = "engine"
    """engine: the routes of sampling (R3). trainer: those of the trainer's own forward pass before the first optimiser step on a
    batch (R2), which keeps the experts still between its minibatches; then streams need no routes."""
    plausible: Share = 0.0
    """Replayed experts whose live score is below this times the lowest of the router's own choice are replaced by its own
    candidates. 0 replays all; 1 next to none that the router would not choose itself, where that score alone decides its choice
    (a bias or limits of groups, as DeepSeek-V3 has, decide too and are not asked)."""
    missing: Share = 0.0
    """Share of a rollout's forwarded tokens that may be without routes; these take the trainer's own experts."""

    def __post_init__(self) -> None:
        require_ranges(self, "replay")
        if self.level == "none" and (self.source != "engine" or self.plausible or self.missing):
            raise ValueError(
                "replay.level is none, so the other replay settings would do nothing: set it, as to 'ids+order'"
            )
        if self.source == "trainer" and self.missing:
            raise ValueError("replay.missing is of routes on record, and replay.source=trainer makes its own")

    @property
    def on(self) -> bool:
        return self.level != "none"

    @property
    def recorded(self) -> bool:
        """True if streams must bring their routes with them."""
        return self.on and self.source == "engine"


NO_REPLAY = ReplaySettings()
FULL = ReplaySettings(level="ids+order")
"""Experts and their order, live gates: what R3 is."""
