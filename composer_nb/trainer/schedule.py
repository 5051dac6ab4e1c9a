"""The vocabulary of the orchestrator: its settings, the limits on running ahead (`Schedule`), events, and commands."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from composer_nb.harness.plain import Count, Positive, Share, Some, require_ranges

WORK_S = 0.25
"""Seconds between two reports of an environment worker."""
LIVE = ("services.ahead", "services.bound", "services.window", "services.order", "services.hang_s", "rl.group")
"""Settings that can be changed while a run is live, besides all of `reward` and `monitor`.
The denominator of the loss does not change."""
Changes = dict[Annotated[str, Field(pattern=r"^[1-9]\d*$")], dict[str, Any]]
"""Changes of live settings by step, from 1, and by name."""


def whole(value: Any, least: int = 0) -> bool:
    """Return whether a value is an integer of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_live(name: str) -> None:
    """Raise ValueError for a setting that a live run cannot change."""
    if name not in LIVE and not name.startswith(("reward.", "monitor.")):
        raise ValueError(f"{name} cannot be changed while a run is live; {', '.join(LIVE)}, reward.* and monitor.* can")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Limits on running ahead and on failures."""

    ahead: Count = 1
    """Batches that may be in flight beyond the one that is due (O); 0: on-policy."""
    bound: Count = 2
    """Maximum staleness of a rollout's oldest token at training time, in batches."""
    window: Share = 1.0
    """A batch is taken from the oldest max(P, window · (O + 1) · P) groups."""
    order: Literal["window", "fifo", "discard"] = "window"
    """`discard` takes the groups that are ready first and drops those too old: biased to short rollouts, for comparison."""
    retries: Count = 3
    """Maximum retries of a rollout after an infrastructure fault or a hang."""
    deaths: Count = 20
    """Maximum number of times that a group may lose its worker, or a batch its trainer."""
    hang_s: Positive = 120.0
    """Seconds of silence after which a worker counts as hung and is stopped. A dispatch is given up when none of its rollouts has
    made progress for `limits.seconds` and this, which must suffice for the grading of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesSettings(SamplingLimits):
    """Asynchronous RL as services on Ray, or one synchronous loop if `on` is false."""

    on: bool = True
    address: str = ""
    """Address of a Ray cluster, or the folder of a head (`composer-nb up`). Empty: the run starts a cluster of its own and stops
    it at the end."""
    engines: Some = 1
    """Number of inference engines; each has its own environment worker."""
    lockstep: bool = False
    """Step engines only while an environment worker waits for them. With ahead=0 and one engine, runs are bit-reproducible."""
    changes: Changes = field(default_factory=dict)
    """Live settings by the step from which they apply, as {"5": {"reward.effort.weight": 0.05}}. `composer-nb jobs from` writes
    here what was changed while a run was live."""
    full_every: Some = 25
    """Interval between full weight versions; the versions in between are deltas."""
    serve: Annotated[int, Field(ge=0, le=65535)] = 0
    """Loopback port that serves the policy to users while it trains, as `composer-nb serve` does. Their requests take priority
    over rollouts. 0: none."""
    store: str = ""
    """URL (fsspec) of the store of weight versions. Each run has its own folder there. Empty: the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(SamplingLimits):
    """The schedule of the orchestrator; `ahead=0` is the synchronous one."""

    prompts: Some = 8
    """P: groups per batch."""
    group: Some = 8
    """G: rollouts per group."""
    steps: Count = 0
    """Total number of batches; 0: no end."""
    refill: Count = 0
    """Maximum total of groups without a signal (all rewards equal) that are replaced by groups at other prompts."""

    def __post_init__(self) -> None:
        require_ranges(self, "services")
        if self.bound < self.ahead:
            raise ValueError(f"services.bound={self.bound}: must be at least services.ahead ({self.ahead})")

    @property
    def batch(self) -> int:
        """B: rollouts per batch."""
        return self.prompts * self.group

    @property
    def width(self) -> int:
        """W: groups in the window."""
        return max(self.prompts, math.floor(self.window * (self.ahead + 1) * self.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event, `at` seconds on the caller's clock."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """A worker that can run `capacity` rollouts at a time joined. `Left` must come before a worker of this name joins again."""

    worker: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Event):
    """A worker died, left or is lost."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """One rollout is graded and stored. `oldest_version` is that of its oldest token, and `sampled` counts its tokens."""

    slot: int
    attempt: int
    place: int
    oldest_version: int
    sampled: int
    reward: float | None = None
    """Its reward, if groups without a signal are replaced."""

    def sound(self, version: int) -> bool:
        """Return whether the numbers are possible while `version` is the newest."""
        known = whole(self.oldest_version) and self.oldest_version <= version
        return known and _named(self) and whole(self.place) and whole(self.sampled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(Event):
    """One rollout was lost to an infrastructure fault, or given up after `Cancel`, after `sampled` tokens."""

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
    """A dispatch makes progress, for instance because a turn ended."""

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
    """The trainer died and returned to a checkpoint. `redo` are the logged batches since then."""

    redo: tuple[Train, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(Event):
    """Every engine now serves `version` or a newer one. A caller that sends this event sends `Served(version=0)` first."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Event):
    """Settings changed during the run. Groups under way keep their size; groups too old for a new bound are dropped."""

    schedule: Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command for the caller to execute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch(Command):
    """Run these rollouts of a group. The number of the attempt is new for the slot and identifies this dispatch."""

    worker: str
    slot: int
    attempt: int
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """Give up the remaining rollouts of a dispatch, and report them with `Faulted`, so that their tokens are accounted for."""

    worker: str
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Command):
    """Train on these groups in this order. `rollouts` are the (slot, attempt, place) of the accepted rollouts, in order."""

    step: int
    slots: tuple[int, ...]
    rollouts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Command):
    """Sampling and training have ended. `left` are ready groups that are too few for a batch, kept in the snapshot."""

    left: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Command):
    """The run cannot continue."""

    error: str
