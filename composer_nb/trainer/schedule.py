"""The words of the orchestrator: what may run ahead of what (`Schedule`), what happens (events), what to do (commands)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from composer_nb.harness.plain import Count, Positive, Share, Some, require_ranges

WORK_S = 0.25
"""Seconds between two reports of an environment worker."""


def whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Limits on what may run ahead. The defaults are asynchronous; `ahead=0` is the synchronous schedule."""

    prompts: Some = 8
    """P: groups a batch."""
    group: Some = 8
    """G: rollouts a group."""
    ahead: Count = 4
    """O: batches that may be under way beyond the one that is due; 0 = on policy."""
    bound: Annotated[int, Field(ge=-1)] = -1
    """Versions that the oldest token of a rollout may be behind when it is trained; −1: twice `ahead`."""
    window: Share = 0.5
    """A batch is taken from the oldest max(P, window · (O + 1) · P) groups."""
    order: Literal["window", "fifo", "discard"] = "window"
    """`discard` takes whatever is ready first and drops what gets too old: biased to short rollouts, for comparison."""
    retries: Count = 3
    """Times that one rollout is dispatched again after an infrastructure fault or a hang."""
    deaths: Count = 20
    """Times that a group may lose its worker, or a batch its trainer."""
    hang_s: Positive = 1800.0
    """A dispatch without any event of its own for so long is taken for hung."""
    steps: Count = 0
    """Batches in all; 0: until `Drain`."""
    refill: Count = 0
    """Groups without a signal (all rewards equal) that are replaced by a group at another prompt, in all."""

    def __post_init__(self) -> None:
        require_ranges(self, "services")
        if self.bound == -1:
            object.__setattr__(self, "bound", 2 * self.ahead)
        if self.bound < self.ahead:
            raise ValueError(f"services.bound={self.bound}: must be at least services.ahead ({self.ahead})")

    @property
    def batch(self) -> int:
        """B: rollouts a batch."""
        return self.prompts * self.group

    @property
    def width(self) -> int:
        """W: groups in the window."""
        return max(self.prompts, math.floor(self.window * (self.ahead + 1) * self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened, `at` seconds by the caller's clock."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """A worker that can run `capacity` rollouts at a time. A name is good for one life: `Left` comes before it joins again."""

    worker: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Event):
    """A worker died, left or is lost."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """One rollout is graded and stored: `oldest_version` of its tokens, of which the policy `sampled` so many."""

    slot: int
    attempt: int
    place: int
    oldest_version: int
    sampled: int
    reward: float | None = None
    """Its reward, where groups without a signal are replaced."""

    def sound(self, version: int) -> bool:
        """Return whether the numbers are possible while `version` is the newest."""
        known = whole(self.oldest_version) and self.oldest_version <= version
        return known and _named(self) and whole(self.place) and whole(self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(Event):
    """One rollout was lost to the infrastructure, or given up after `Cancel`, after it had `sampled` tokens."""

    slot: int
    attempt: int
    place: int
    reason: str
    sampled: int = 0

    def sound(self, version: int) -> bool:
        """Return whether the numbers are possible."""
        return _named(self) and whole(self.place) and whole(self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(Event):
    """A dispatch makes progress (a turn ended, say): it does not hang."""

    slot: int
    attempt: int

    def sound(self, version: int) -> bool:
        """Return whether the numbers are possible."""
        return _named(self)


def _named(event: Finished | Faulted | Alive) -> bool:
    return whole(event.slot) and whole(event.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Event):
    """A batch is trained and durable."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLost(Event):
    """The trainer died and stands at a checkpoint again: `redo` are the logged batches since then."""

    redo: tuple[Train, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Event):
    """Every engine now serves `version` or a newer one. A caller that sends it sends `Served(version=0)` first of all."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(Event):
    """Admit nothing more; finish and train what is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Event):
    """Settings changed while running. Groups under way keep their size; what is too old for a new bound is dropped."""

    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Something for the caller to carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Command):
    """Run these rollouts of a group. The number of the attempt is new for the slot and names this dispatch."""

    worker: str
    slot: int
    attempt: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """Give up what is left of a dispatch; report it with `Faulted`, so that its tokens are accounted for."""

    worker: str
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Command):
    """Train on these groups in this order; `rollouts` are (slot, attempt, place) of what was accepted, in order."""

    step: int
    slots: tuple[int, ...]
    rollouts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Command):
    """Nothing runs or trains any more; `left` are ready groups too few for a batch, kept by the snapshot."""

    left: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Command):
    """The run cannot go on."""

    error: str
