"""Settings of services, and the schedule of the orchestrator."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from composer_nb.harness.plain import Count, Positive, Share, Some, require_ranges

# Settings that can be changed while a run is live, besides all of `reward` and `monitor`. The denominator of the loss does not
# change.
LIVE = (
    *("services.ahead", "services.bound", "services.window", "services.order", "services.hang_s", "rl.group"),
    *("services.engines", "services.max_engines", "services.standby", "services.drain"),
)
# Changes of live settings by step, from 1, and by name.
Changes = dict[Annotated[str, Field(pattern=r"^[1-9]\d*$")], dict[str, Any]]


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
    made progress, or waited for room or a grader, for `limits.seconds` and this, which must suffice for the grading of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicesSettings(SamplingLimits):
    """Asynchronous RL as services on Ray, or one synchronous loop if `on` is false."""

    on: bool = True
    address: str = ""
    """Address of a Ray cluster, or the folder of a head (`composer-nb up`). Empty: the run starts a cluster of its own and stops
    it at the end."""
    engines: Some = 1
    """Number of inference engines; each has its own environment worker."""
    max_engines: Count = 0
    """More engines join, up to this number, while the trainer waits for rollouts, and leave when the others can do their work."""
    standby: Count = 0
    """Number of further engines that follow the weights without rollouts, and take the place of one that dies or drains."""
    drain: str = ""
    """Name of an engine (`engine-2`) to replace, set while the run is live: it finishes its rollouts, gets no more, and ends."""
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
    """URL (fsspec) of the store of weight versions and finished rollouts, from which nodes that do not see the run directory take
    its inputs. Each run has its own folder there. Empty: the run directory."""


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
