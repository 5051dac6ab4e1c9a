"""The state of the orchestrator (workers, dispatches, rollouts, groups, books), and its choice of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from composer_nb.trainer.schedule import Schedule


@dataclass(slots=True)
class Worker:
    """`capacity`: maximum number of conversations at a time; 0: it gets no more."""

    capacity: int
    busy: int = 0
    suspect: bool = False
    """Whether a dispatch of this worker hung and it has sent no event since."""

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.busy)


@dataclass(slots=True)
class DispatchLease:
    """A dispatch under way.

    Attributes:
        version: Version served at the dispatch. No token of it is older, unless an engine lags behind its report.
        graded: Those of `members` whose conversation has ended.
    """

    worker: str
    members: list[int]
    version: int
    last_event: float
    graded: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Done:
    """A finished rollout that is not trained yet.

    Attributes:
        finished: Version at its end.
    """

    attempt: int
    oldest: int
    finished: int
    sampled: int
    reward: float | None = None


@dataclass(slots=True, eq=False)
class Group:
    """The rollouts of one prompt. Groups are compared by identity.

    Attributes:
        ready: Count of finished rollouts of the run when the group became ready.
        avoid: Workers on which the group hung.
        gone: Reason and worker, by (attempt, member), of rollouts that were given up and have not reported since.
    """

    slot: int
    size: int
    attempts: int = 0
    deaths: int = 0
    ready: int = 0
    finished: dict[int, Done] = field(default_factory=dict)
    leases: dict[int, DispatchLease] = field(default_factory=dict)
    faults: Counter[int] = field(default_factory=Counter)
    avoid: set[str] = field(default_factory=set)
    gone: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.finished) == self.size

    @property
    def without_signal(self) -> bool:
        """Whether the group is complete and its rewards are known and equal, so that no rollout has an advantage."""
        rewards = [finished.reward for finished in self.finished.values() if finished.reward is not None]
        return self.complete and len(rewards) == self.size and max(rewards) - min(rewards) < 1e-6

    def missing(self) -> list[int]:
        under_way = {member for lease in self.leases.values() for member in lease.members}
        return [member for member in range(self.size) if member not in self.finished and member not in under_way]

    def oldest(self, served: int) -> int:
        """Return the oldest version that a token of the group can have. Missing rollouts will come from `served`."""
        versions = [d.oldest for d in self.finished.values()] + [lease.version for lease in self.leases.values()]
        return min(versions, default=served)

    def forget(self, stored: Container[tuple[int, int, int]]) -> list[Done]:
        """Remove finished rollouts (slot, attempt, member) that are not stored, and return them."""
        lost = [
            member for member, finished in self.finished.items() if (self.slot, finished.attempt, member) not in stored
        ]
        return [self.finished.pop(member) for member in lost]

    def pack(self) -> dict[str, Any]:
        """Return the group, ready for JSON. Live dispatches are marked as given up, so that the reader dispatches them again."""
        gone = [(*key, *why) for key, why in self.gone.items()]
        for attempt, lease in self.leases.items():
            gone += [(attempt, member, "restored", lease.worker) for member in lease.members]
        finished = [(member, *astuple(rollout)) for member, rollout in self.finished.items()]
        return {
            "slot": self.slot, "size": self.size, "attempts": self.attempts, "ready": self.ready,
            "avoid": sorted(self.avoid), "done": finished, "gone": gone,
        }  # fmt: skip

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Group:
        """Return a group from `pack`. Faults and deaths are counted anew, since their cause may be fixed before a restart."""
        group = cls(packed["slot"], packed["size"], packed["attempts"], ready=packed["ready"])
        group.avoid = set(packed["avoid"])
        group.finished = {member: Done(*values) for member, *values in packed["done"]}
        group.gone = {(attempt, member): (why, worker) for attempt, member, why, worker in packed["gone"]}
        return group


@dataclass(slots=True)
class Books:
    """Counters since the start of the surviving lineage.

    Attributes:
        ledger: Sampled tokens by their use.
        staleness: Trained rollouts by the number of versions that passed while they were sampled, while they waited, and in
            total.
    """

    counts: Counter[str] = field(default_factory=Counter)
    ledger: Counter[str] = field(default_factory=Counter)
    staleness: dict[str, Counter[int]] = field(default_factory=dict)

    def receive(self, sampled: int, what: str | None = None) -> None:
        """Book reported tokens. Without `what`, they are held until the rollout is trained or dropped."""
        self.counts["received_tokens"] += sampled
        if what:
            self.ledger[what] += sampled

    def settle(self, rollout: Done, what: str) -> None:
        """Book the use of a finished rollout."""
        self.ledger[what] += rollout.sampled

    def trained(self, rollout: Done, step: int) -> None:
        self.settle(rollout, "trained")
        sampled, waited = rollout.finished - rollout.oldest, step - rollout.finished
        passed = {"in_flight": sampled, "in_queue": waited, "total": sampled + waited}
        for name, versions in passed.items():
            self.staleness.setdefault(name, Counter())[versions] += 1

    def pack(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "ledger": dict(self.ledger),
            "staleness": {name: sorted(counts.items()) for name, counts in self.staleness.items()},
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Books:
        staleness = {name: Counter(dict(pairs)) for name, pairs in packed["staleness"].items()}
        return cls(Counter(packed["counts"]), Counter(packed["ledger"]), staleness)


def choose(workers: Mapping[str, Worker], avoid: Container[str]) -> str | None:
    """Return the worker with the most room, preferably one that is neither suspect nor to be avoided; None if it is full."""
    staying = [name for name, worker in workers.items() if worker.capacity]
    sound = [name for name in staying if not workers[name].suspect]
    names = [name for name in sound if name not in avoid] or sound or staying
    best = max(names, key=lambda name: workers[name].free, default=None)
    return best if best is not None and workers[best].free else None


def pick(live: Sequence[Group], schedule: Schedule, version: int, served: int) -> list[Group]:
    """Return the next batch from groups not in training (oldest first), in the order of slots; empty if it has to wait."""
    size = schedule.prompts
    ready = [group for group in live if group.complete]
    if len(ready) < size:
        return []
    if schedule.order == "discard":
        return sorted(sorted(ready, key=lambda group: (group.ready, group.slot))[:size], key=lambda group: group.slot)
    if schedule.order == "fifo":
        return list(live[:size]) if all(group.complete for group in live[:size]) else []
    picked = due(live, schedule, version, served)
    if picked is None:
        return []
    window = [group for group in live[: schedule.width] if group.complete and group not in picked]
    picked += window[: size - len(picked)]
    return sorted(picked, key=lambda group: group.slot) if len(picked) == size else []


def due(live: Sequence[Group], schedule: Schedule, version: int, served: int) -> list[Group] | None:
    """Return the fewest groups that the next batch must have, so that all others can be trained within the bound.

    With D(j) groups whose last possible step is at most version + j, and P groups trained per step, at least D(j) − j·P must be
    trained now, for each j. None if one of them is not ready.
    """
    size, picked = schedule.prompts, list[Group]()
    for j in range(schedule.bound + 1):
        within = [group for group in live if group.oldest(served) + schedule.bound - version <= j]
        short = min(size, len(within) - j * size) - sum(group in within for group in picked)
        candidates = [group for group in within if group.complete and group not in picked][: max(0, short)]
        if len(candidates) < short:
            return None
        picked += candidates
    return picked
