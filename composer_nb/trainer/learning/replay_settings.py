"""Settings of router replay; `docs/replay.md` explains and measures it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer_nb.harness.plain import Share, require_ranges

ReplayLevel = Literal["none", "ids", "ids+order", "weights"]
Source = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The part of the recorded routes that the trainer's forward pass uses."""

    level: ReplayLevel = "none"
    """none: nothing. ids: the set of experts. ids+order: also their order, in which their results are summed. weights: also their
    gates; the router then learns nothing from the replayed tokens."""
    source: Source = "engine"
    """engine: the routes of sampling (R3). trainer: the routes of the trainer's own forward pass before the first optimizer step
    on a batch (R2), which fixes the experts over its minibatches; streams then need no routes."""
    plausible: Share = 0.0
    """Replayed experts whose live score is below this times the lowest score of the router's own choice are replaced by its own
    candidates. 0 replays all experts; 1 replays almost none that the router would not choose, if the score alone decides (a bias
    or limits of groups, as in DeepSeek-V3, are ignored here)."""
    missing: Share = 0.0
    """Share of a rollout's forwarded tokens that may lack routes; these use the trainer's own experts."""

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
        """Whether streams must contain their routes."""
        return self.on and self.source == "engine"


NO_REPLAY = ReplaySettings()
FULL = ReplaySettings(level="ids+order")
"""R3: recorded experts and their order, with live gates."""
