"""The asynchronous schedule of RL as a pure state machine, without clocks, threads or files.

    slot = one group = one prompt position:   waiting → running → ready → training → trained
                                                 ↑_________|________|   faulted, hung, left, stale: dispatched again
    version = batches trained; step v trains from version v and makes version v + 1

`handle(event)` returns the commands to execute, in order; the same events always give the same commands. The caller
1. stamps events with its own clock, and sends `Finished` only for a rollout that is graded and stored;
2. saves `snapshot()` (and each `Train`, which is the log of batches) before it executes the commands;
3. sends `Trained(v)` before any engine serves version v + 1, and `Served` whenever the slowest engine has moved up; without
   any `Served`, a version counts as served when it is trained.

Admission: (served + O + 1)·B − (accepted + running) ≥ G, where accepted = trained, in training or ready. The staleness of a
rollout is the step that trains it − the version of its oldest token. It never exceeds `bound`, because a batch is only taken if
the remaining groups can still be trained in time: the trainer waits for a long rollout rather than lose it. Rollouts that are
dropped nevertheless are counted by reason and dispatched again. Only the prompts of up to `refill` groups with equal rewards are
skipped: another prompt replaces each, so that a batch is full of signal (DAPO, arXiv:2503.14476, section 3.2).

After a crash, `restore` dispatches running rollouts again. It issues the batch in training again, with the same rollouts in the
same order, after the steps since the trainer's checkpoint, if any.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services.slots import Books, DispatchLease, Done, Group, Worker, choose, pick

# Seconds between two reports of an environment worker.
WORK_S = 0.25
# Numbers of attempts in different lives never collide: attempt = life · this + number in the slot.
ATTEMPTS_A_LIFE = 1_000_000


# Events and commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event, `at` seconds on the caller's clock."""

    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """A worker that can run `capacity` rollouts at a time joined. `Left` must come before a worker of this name joins again."""

    worker: str
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Event):
    """A worker finishes what it runs, and gets nothing more. `Left` follows."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(Event):
    """A worker died, left or is lost."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """One rollout is graded and stored. `oldest_version` is that of its oldest token, and `sampled` counts its tokens.

    Attributes:
        reward: Its reward, if groups without a signal are replaced.
        seconds: Time from the start of the agent to its grade.
    """

    slot: int
    attempt: int
    member: int
    oldest_version: int
    sampled: int
    reward: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted(Event):
    """One rollout was lost to an infrastructure fault, or given up after `Cancel`, after `sampled` tokens."""

    slot: int
    attempt: int
    member: int
    reason: str
    sampled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive(Event):
    """A dispatch makes progress, for instance because a turn ended. With `member`: the conversation of this rollout has ended,
    and while it is graded its worker has room for another."""

    slot: int
    attempt: int
    member: int | None = None


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
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel(Command):
    """Give up the remaining rollouts of a dispatch, and report them with `Faulted`, so that their tokens are accounted for."""

    worker: str
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(Command):
    """Train on these groups in this order. `rollouts` are the (slot, attempt, member) of the accepted rollouts, in order."""

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


class Orchestrator:
    """The state of a run and the one function that changes it, `handle`."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.life = schedule, 0
        self.version, self.next_slot, self.now = 0, 0, -math.inf
        self.slowest: int | None = None
        self.groups: dict[int, Group] = {}
        self.workers: dict[str, Worker] = {}
        self.training: Train | None = None
        self.redo: list[Train] = []
        self.issued = self.ended = False
        self.books = Books()
        self._commands: list[Command] = []

    def handle(self, event: Event) -> list[Command]:
        """Process an event and return the commands to execute, in order. Late, repeated and unknown events are ignored
        and counted."""
        if self.ended:
            self.books.counts["ignored_ended"] += 1
            return []
        self.now = max(self.now, event.at)
        self._commands = []
        if ignored_reason := self._apply(event):
            self.books.counts[f"ignored_{ignored_reason}"] += 1
        self._give_up_hung()
        if not self.ended:
            self._train()
            self._dispatch()
            self._end()
        return self._commands

    @property
    def served(self) -> int:
        """The version of the slowest engine."""
        return self.version if self.slowest is None else self.slowest

    def room(self) -> int:
        """Number of rollouts that may be admitted: (served + O + 1)·B − (accepted + running), among those not trained yet."""
        ahead = self.schedule.ahead + 1 - (self.version - self.served)
        return ahead * self.schedule.batch - sum(group.size for group in self.groups.values())

    def running(self, worker: str) -> int:
        """Number of rollouts that a worker is to return."""
        leases = (lease for group in self.groups.values() for lease in group.leases.values())
        return sum(len(lease.members) for lease in leases if lease.worker == worker)

    def awaits(self, slot: int, attempt: int, member: int) -> bool:
        """Return whether a worker is to return this rollout."""
        lease = self.groups[slot].leases.get(attempt) if slot in self.groups else None
        return lease is not None and member in lease.members

    def held(self) -> int:
        """Sampled tokens of finished rollouts that are neither trained nor dropped: received = held + ledger."""
        return sum(finished.sampled for group in self.groups.values() for finished in group.finished.values())

    # What happens

    def _apply(self, event: Event) -> str | None:
        """Apply an event, or return why it is ignored."""
        match event:
            case Finished() | Faulted() | Alive():
                return self._rollout(event)
            case Joined():
                if event.worker in self.workers:
                    return "duplicate"
                self.workers[event.worker] = Worker(event.capacity)
            case Draining():
                if event.worker not in self.workers:
                    return "unknown"
                self.workers[event.worker].capacity = 0
            case Left():
                return self._left(event.worker)
            case Trained():
                return self._trained(event.step)
            case TrainerLost():
                self.redo, self.issued = self._checked(event.redo), False
            case Served():
                if not (self.slowest or 0) <= event.version <= self.version:
                    return "impossible"
                self.slowest = event.version
            case Changed():
                self.schedule = event.schedule
                self._sweep()
            case Tick():
                pass
            case _:
                return "unknown"
        return None

    def _rollout(self, event: Finished | Faulted | Alive) -> str | None:
        """Apply an event of a rollout, or return why it is ignored."""
        group = self.groups.get(event.slot)
        if group is None:
            return "late" if event.slot < self.next_slot else "unknown"
        lease = group.leases.get(event.attempt)
        if isinstance(event, Alive):
            if lease:
                self._heard(lease)
                if event.member in lease.members and event.member not in lease.graded:
                    lease.graded.append(event.member)
                    self.workers[lease.worker].busy -= 1
            return None if lease else "late" if event.attempt <= self._attempt(group) else "unknown"
        rollout_key = (event.attempt, event.member)
        if lease is None or event.member not in lease.members:
            if rollout_key in group.gone:
                drop_reason, worker_name = group.gone.pop(rollout_key)
                self.books.receive(event.sampled, drop_reason)
                if worker_name in self.workers:
                    self.workers[worker_name].suspect = False
                return "late"
            finished = group.finished.get(event.member)
            return "duplicate" if finished and finished.attempt == event.attempt else "unknown"
        self._heard(lease)
        self._close(group, event.attempt, event.member)
        if isinstance(event, Faulted):
            self.books.receive(event.sampled, "faulted")
            self.books.counts["faulted"] += 1
            self._fault(group, event.member, event.reason)
        else:
            self._finished(group, event)
        return None

    def _finished(self, group: Group, event: Finished) -> None:
        """Accept a rollout; drop its group if it is too old, or replace it if it is complete and has no signal."""
        self.books.receive(event.sampled)
        self.books.counts["finished"] += 1
        group.finished[event.member] = Done(
            event.attempt, event.oldest_version, self.version, event.sampled, event.reward
        )
        group.ready = self.books.counts["finished"]
        if self.version - event.oldest_version > self.schedule.bound:
            self._drop(group)
        elif group.without_signal and self.books.counts["refilled"] < self.schedule.refill:
            for finished in group.finished.values():
                self.books.settle(finished, "zero_advantage")
            self.books.counts["refilled"] += 1
            del self.groups[group.slot]

    def _heard(self, lease: DispatchLease) -> None:
        lease.last_event = self.now
        self.workers[lease.worker].suspect = False

    def _left(self, worker_name: str) -> str | None:
        """Give up what a worker ran, and stop the run if that was one worker too many for a group. Return why the event is
        ignored, if it is."""
        if worker_name not in self.workers:
            return "unknown"
        del self.workers[worker_name]
        for group in self.groups.values():
            lost_attempts = [attempt for attempt, lease in group.leases.items() if lease.worker == worker_name]
            group.deaths += bool(lost_attempts)
            for attempt in lost_attempts:
                self._give_up(group, attempt, "left")
            if group.deaths > self.schedule.deaths:
                self._stop(
                    f"slot {group.slot} lost its worker {group.deaths} times; look at the errors above, at what its task does to "
                    f"a worker, or raise services.deaths ({self.schedule.deaths})"
                )
        return None

    def _trained(self, step: int) -> str | None:
        """Take note of a trained or repeated batch, or return why the event is ignored."""
        due_batch = self.redo[0] if self.redo else self.training
        if due_batch is None or not self.issued or step != due_batch.step:
            return "duplicate" if step < self.version else "unknown"
        self.issued = False
        if self.redo:
            del self.redo[0]
            return None
        for slot in due_batch.slots:
            for finished in self.groups.pop(slot).finished.values():
                self.books.trained(finished, step)
        self.version, self.training = self.version + 1, None
        self._sweep()
        return None

    # What is given up

    def _close(self, group: Group, attempt: int, member: int) -> None:
        lease = group.leases[attempt]
        lease.members.remove(member)
        if lease.worker in self.workers and member not in lease.graded:
            self.workers[lease.worker].busy -= 1
        if not lease.members:
            del group.leases[attempt]

    def _give_up(self, group: Group, attempt: int, reason: str) -> list[int]:
        """End a dispatch and return the rollouts that are missing as a result."""
        lease = group.leases[attempt]
        members = list(lease.members)
        if lease.worker in self.workers:
            self._commands.append(Cancel(worker=lease.worker, slot=group.slot, attempt=attempt))
        for member in members:
            group.gone[attempt, member] = (reason, lease.worker)
            self._close(group, attempt, member)
        return members

    def _give_up_hung(self) -> None:
        for group in self.groups.values():
            for attempt, lease in list(group.leases.items()):
                if self.now - lease.last_event >= self.schedule.hang_s:
                    self.workers[lease.worker].suspect = True
                    group.avoid.add(lease.worker)
                    for member in self._give_up(group, attempt, "hung"):
                        self._fault(group, member, f"no event for {self.schedule.hang_s:g} s")

    def _drop(self, group: Group) -> None:
        """Restart a group that is too old to train on, as a whole: resampling its long rollouts alone would select by length."""
        for attempt in list(group.leases):
            self._give_up(group, attempt, "stale")
        for finished in group.finished.values():
            self.books.settle(finished, "stale")
        group.finished.clear()

    def _sweep(self) -> None:
        for group in self._open():
            if group.oldest(self.version) + self.schedule.bound < self.version:
                self._drop(group)

    def _fault(self, group: Group, member: int, reason: str) -> None:
        group.faults[member] += 1
        if group.faults[member] > self.schedule.retries:
            self._stop(
                f"slot {group.slot}, rollout {member}: {group.faults[member]} infrastructure faults, the last one "
                f"{reason!r}; run `composer-nb doctor`, or raise services.retries ({self.schedule.retries})"
            )

    # What to do

    def _open(self) -> Iterator[Group]:
        """Yield the groups that are not in training, oldest first."""
        in_training = self.training.slots if self.training else ()
        return (group for slot, group in list(self.groups.items()) if slot not in in_training)

    def _train(self) -> None:
        if not self.redo and self.training is None and not (0 < self.schedule.steps <= self.version):
            batch_groups = pick(list(self._open()), self.schedule, self.version, self.served)
            self.training = self._batch(batch_groups) if batch_groups else None
        due_batch = self.redo[0] if self.redo else self.training
        if due_batch and not self.issued:
            self._commands.append(due_batch)
            self.issued = True

    def _dispatch(self) -> None:
        """Fill every free place: with the oldest missing rollouts first, then with new groups."""
        if self.ended or self.version - self.served > self.schedule.bound:
            return
        for group in self._open():
            if not self._free():
                return
            self._place(group)
        while not self._closed() and self._free() and self.room() >= self.schedule.group:
            group = Group(self.next_slot, self.schedule.group)
            if not self._place(group):
                return
            self.groups[group.slot] = group
            self.next_slot += 1

    def _place(self, group: Group) -> bool:
        """Dispatch a group's missing rollouts as far as workers have room. Return whether any was dispatched."""
        missing_places = group.missing()
        attempts_before = group.attempts
        while missing_places and (worker_name := choose(self.workers, group.avoid)) is not None:
            worker = self.workers[worker_name]
            members, missing_places = missing_places[: worker.free], missing_places[worker.free :]
            group.attempts += 1
            command = Dispatch(
                worker=worker_name, slot=group.slot, attempt=self._attempt(group), members=tuple(members)
            )
            group.leases[command.attempt] = DispatchLease(worker_name, members, self.served, self.now)
            worker.busy += len(members)
            self.books.counts["dispatched"] += len(members)
            self._commands.append(command)
        return group.attempts > attempts_before

    def _free(self) -> bool:
        return any(worker.free for worker in self.workers.values())

    def _closed(self) -> bool:
        """Return whether no further group is admitted."""
        admitted = self.next_slot - self.books.counts["refilled"]
        return 0 < self.schedule.steps * self.schedule.prompts <= admitted

    def _attempt(self, group: Group) -> int:
        return self.life * ATTEMPTS_A_LIFE + group.attempts

    def _end(self) -> None:
        if self.ended or not self._closed() or self.training or self.redo:
            return
        open_groups = list(self._open())
        all_steps_trained = 0 < self.schedule.steps <= self.version
        too_few = all(group.complete for group in open_groups) and len(open_groups) < self.schedule.prompts
        if all_steps_trained or too_few:
            self._commands.append(Drained(left=tuple(group.slot for group in open_groups if group.complete)))
            self.ended = True

    def _stop(self, error: str) -> None:
        if not self.ended:
            self._commands.append(Stop(error=error))
            self.ended = True

    # What is kept

    def report(self) -> dict[str, Any]:
        """Return counters since the start of the surviving lineage, ready for JSON."""
        return {"version": self.version, "served": self.served, "held_tokens": self.held(), **self.books.pack()}

    def snapshot(self) -> dict[str, Any]:
        """Return the state, ready for JSON, without workers, which join again after a restart."""
        return {
            **self.report(),
            "life": self.life,
            "slowest": self.slowest,
            "next_slot": self.next_slot,
            "training": list(self.training.slots) if self.training else [],
            "groups": [group.pack() for group in self.groups.values()],
        }

    @classmethod
    def restore(
        cls,
        schedule: Schedule,
        snapshot: dict[str, Any],
        *,
        redo: Sequence[Train] = (),
        stored: Container[tuple[int, int, int]] | None = None,
    ) -> Orchestrator:
        """Return an orchestrator that continues from a snapshot. The first `handle` issues the batch in training again.

        Its life is one more than the snapshot's, so save a snapshot first. `redo` are the logged batches since the trainer's
        checkpoint. With `stored`, rollouts (slot, attempt, member) that are not in it are sampled again.
        """
        self = cls(schedule)
        self.life = snapshot["life"] + 1
        self.version, self.next_slot, self.slowest = snapshot["version"], snapshot["next_slot"], snapshot["slowest"]
        self.books = Books.unpack(snapshot)
        self.groups = {packed["slot"]: Group.unpack(packed) for packed in snapshot["groups"]}
        for group in self.groups.values() if stored is not None else ():
            for finished in group.forget(stored or ()):
                self.books.settle(finished, "lost")
        training_groups = [self.groups[slot] for slot in snapshot["training"]]
        if training_groups and all(group.complete for group in training_groups):
            self.training = self._batch(training_groups)
        self.redo = self._checked(redo)
        self._sweep()
        return self

    def _checked(self, redo: Sequence[Train]) -> list[Train]:
        steps = [train.step for train in redo]
        if steps != list(range(self.version - len(steps), self.version)):
            raise ValueError(f"redo has steps {steps}, not every logged batch from the checkpoint to {self.version}")
        return list(redo)

    def _batch(self, groups: Sequence[Group]) -> Train:
        rollouts = [
            (group.slot, group.finished[member].attempt, member) for group in groups for member in range(group.size)
        ]
        return Train(step=self.version, slots=tuple(group.slot for group in groups), rollouts=tuple(rollouts))
