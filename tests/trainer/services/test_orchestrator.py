"""The orchestrator: what it admits, picks, gives up and keeps; and 10,000 random faults, after which nothing is missing."""

import json
import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services import orchestrator as fsm

Key = tuple[int, int, int]


class Driver:
    """A caller that carries out all commands, and keeps its own books for comparison."""

    def __init__(self, schedule: Schedule, *workers: int) -> None:
        self.schedule = schedule
        self.orchestrator = fsm.Orchestrator(schedule)
        self.now = 0.0
        self.running: dict[Key, str] = {}
        self.graded: set[Key] = set()
        self.born: dict[Key, int] = {}
        self.capacity: dict[str, int] = {}
        self.draining: set[str] = set()
        self.finishes: dict[Key, fsm.Finished] = {}
        self.zombies: list[Key] = []
        self.training: fsm.Train | None = None
        self.log: list[fsm.Train] = []
        self.issued: dict[int, fsm.Train] = {}
        self.history: list[tuple[fsm.Event, list[fsm.Command]]] = []
        self.end: fsm.Drained | fsm.Stop | None = None
        for number, capacity in enumerate(workers):
            self.join(f"w{number}", capacity)

    def send(self, event: fsm.Event) -> list[fsm.Command]:
        commands = self.orchestrator.handle(event)
        self.history.append((event, commands))
        for command in commands:
            self.obey(command)
        self.check()
        return commands

    def obey(self, command: fsm.Command) -> None:
        match command:
            case fsm.Dispatch():
                assert command.members and command.worker not in self.draining
                for member in command.members:
                    key = (command.slot, command.attempt, member)
                    assert key not in self.born, "an attempt was used twice"
                    self.running[key] = command.worker
                    self.born[key] = self.orchestrator.served
            case fsm.Cancel():
                for key in [k for k in self.running if k[:2] == (command.slot, command.attempt)]:
                    assert self.running.pop(key) == command.worker
                    self.zombies.append(key)
            case fsm.Train():
                assert self.training is None
                self.training = command
                assert command == self.issued.setdefault(command.step, command), "a step has another batch"
                assert list(command.slots) == sorted(command.slots)
                oldest = min(self.finishes[key].oldest_version for key in command.rollouts)
                assert command.step - oldest <= self.schedule.bound
            case fsm.Drained() | fsm.Stop():
                self.end = command

    def check(self) -> None:
        """Assert what holds after every event, by this caller's own counts."""
        o, s = self.orchestrator, self.schedule
        trained = {slot for train in self.log for slot in train.slots}
        assert len(trained) == sum(len(train.slots) for train in self.log), "a prompt was trained twice"
        assert trained.isdisjoint(o.groups)
        assert len(self.refilled) == o.books.counts["refilled"] <= s.refill, "a prompt was skipped"
        assert len(trained) == o.version * s.prompts
        accepted_and_running = len(trained) * s.group + sum(group.size for group in o.groups.values())
        assert accepted_and_running <= (o.served + s.ahead + 1) * s.batch
        for worker, capacity in self.capacity.items():
            assert sum(w == worker for key, w in self.running.items() if key not in self.graded) <= capacity
        ledger = o.books.ledger
        assert sum(ledger.values()) + o.held() == o.books.counts["received_tokens"]
        assert ledger["trained"] == sum(self.finishes[key].sampled for train in self.log for key in train.rollouts)

    def join(self, worker: str, capacity: int) -> list[fsm.Command]:
        self.capacity[worker] = capacity
        return self.send(fsm.Joined(at=self.now, worker=worker, capacity=capacity))

    def kill(self, worker: str) -> list[fsm.Command]:
        del self.capacity[worker]
        for key in [key for key, at in self.running.items() if at == worker]:
            del self.running[key]
            self.zombies.append(key)
        return self.send(fsm.Left(at=self.now, worker=worker))

    def finish(self, key: Key, tokens: int = 100, lag: int = 0, reward: float | None = None) -> list[fsm.Command]:
        slot, attempt, member = key
        oldest, sampled = max(0, self.born[key] - lag), tokens // 2
        event = fsm.Finished(
            at=self.now,
            slot=slot,
            attempt=attempt,
            member=member,
            oldest_version=oldest,
            sampled=sampled,
            reward=reward,
        )
        self.running.pop(key, None)
        self.finishes[key] = event
        return self.send(event)

    @property
    def refilled(self) -> list[int]:
        """Prompts that were taken and are neither under way nor trained."""
        trained = {slot for train in self.log for slot in train.slots}
        return [
            slot for slot in range(self.orchestrator.next_slot) if slot not in trained | self.orchestrator.groups.keys()
        ]

    def finish_slot(self, slot: int) -> None:
        for key in [key for key in self.running if key[0] == slot]:
            self.finish(key)

    def fault(self, key: Key, sampled: int = 0) -> list[fsm.Command]:
        slot, attempt, member = key
        self.running.pop(key, None)
        event = fsm.Faulted(at=self.now, slot=slot, attempt=attempt, member=member, reason="box lost", sampled=sampled)
        return self.send(event)

    def trained(self) -> list[fsm.Command]:
        assert self.training
        train, self.training = self.training, None
        if train.step == len(self.log):
            self.log.append(train)
        return self.send(fsm.Trained(at=self.now, step=train.step))

    def lose_trainer(self, back: int) -> None:
        """The trainer falls back to a checkpoint `back` steps ago."""
        self.training = None
        self.send(fsm.TrainerLost(at=self.now, redo=tuple(self.log[len(self.log) - back :])))

    def save(self) -> tuple[str, int]:
        return json.dumps(self.orchestrator.snapshot()), len(self.log)

    def crash(self, saved: tuple[str, int], life: int, back: int = 0) -> None:
        """Everything but the stored rollouts is gone; goes on from a snapshot."""
        snapshot, steps = json.loads(saved[0]), saved[1]
        self.zombies += list(self.running)
        self.running, self.capacity, self.training = {}, {}, None
        self.log = self.log[:steps]
        last = steps if snapshot["training"] else steps - 1
        self.issued = {step: train for step, train in self.issued.items() if step <= last}
        redo = self.log[steps - min(back, steps) :]
        self.orchestrator = fsm.Orchestrator.restore(self.schedule, snapshot | {"life": life - 1}, redo=redo)
        self.check()

    def run_out(self, limit: int = 20_000) -> None:
        """Finishes whatever is under way, oldest dispatch first, until the orchestrator ends."""
        for _ in range(limit):
            if self.end:
                return
            if self.training:
                self.trained()
            elif self.running:
                self.finish(next(iter(self.running)))
            else:
                self.now += self.schedule.hang_s
                self.serve() if self.orchestrator.served < len(self.log) else self.send(fsm.Tick(at=self.now))
                assert self.end or self.running or self.training, "nothing runs, and nothing is wanted: a deadlock"
        raise AssertionError("it does not end")

    def drain(self) -> None:
        """As many steps as the prompts that were taken fill."""
        if not self.end:
            admitted = self.orchestrator.next_slot - self.orchestrator.books.counts["refilled"]
            steps = max(1, math.ceil(admitted / self.schedule.prompts))
            self.schedule = replace(self.schedule, steps=steps)
            self.send(fsm.Changed(at=self.now, schedule=self.schedule))

    def serve(self) -> None:
        """The slowest engine takes up the newest weights."""
        self.send(fsm.Served(at=self.now, version=len(self.log)))

    def slots(self) -> set[int]:
        return {slot for slot, _, _ in self.running}


def schedule(**changes: Any) -> Schedule:
    base: dict[str, Any] = {"prompts": 2, "group": 2, "ahead": 1, "hang_s": 60.0, "retries": 2, "deaths": 3}
    base |= {"window": 0.5, "bound": 2 * max(0, changes.get("ahead", 1))}
    return Schedule(**{**base, **changes})


# Admission


@given(
    prompts=st.integers(1, 4),
    group=st.integers(1, 3),
    ahead=st.integers(0, 3),
    capacities=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_admission_is_the_published_rule(prompts: int, group: int, ahead: int, capacities: list[int], seed: int):
    """Groups start while (version + O + 1)·B − (accepted + running) ≥ G and workers have free slots, never more or fewer."""
    d = Driver(schedule(prompts=prompts, group=group, ahead=ahead), *capacities)
    rng, batch = Random(seed), prompts * group
    for _ in range(60):
        slots = {key[0] for key in d.born}
        full = (len(d.log) + ahead + 1) * batch - len(slots) * group < group
        waiting = len(slots) * group > len(d.running) + sum(len(g.finished) for g in d.orchestrator.groups.values()) + (
            len(d.log) * batch
        )
        assert (full and not waiting) or len(d.running) == sum(capacities)
        d.trained() if d.training and rng.random() < 0.3 else d.running and d.finish(rng.choice(list(d.running)))


# Which groups are taken


def test_a_window_takes_what_is_ready_among_the_oldest():
    d = Driver(schedule(prompts=2, ahead=3, window=0.5), 1000)  # the oldest 4 of 8
    for slot in (7, 6, 3):
        d.finish_slot(slot)
    assert d.training is None
    d.finish_slot(1)
    assert d.training and d.training.slots == (1, 3)
    assert d.training.rollouts == ((1, 1, 0), (1, 1, 1), (3, 1, 0), (3, 1, 1))


def test_the_trainer_waits_for_a_long_rollout_rather_than_to_lose_it():
    d = Driver(schedule(ahead=1, bound=2, window=1.0), 1000)
    for _ in range(20):  # all but slot 0
        for slot in sorted(d.slots() - {0}):
            d.finish_slot(slot)
        if not d.training:
            break
        d.trained()
    assert len(d.log) == 2 and not d.training  # step 2 may be the last one for slot 0, so it needs it
    d.finish_slot(0)
    assert d.training and 0 in d.training.slots and d.training.step == 2
    d.trained()
    assert max(d.orchestrator.books.staleness["total"]) == 2 and "stale" not in d.orchestrator.books.ledger


# Faults


def test_too_many_faults_stop_the_run_and_say_so():
    d = Driver(schedule(retries=2), 1000)
    for attempt in (1, 2, 3):
        d.fault((0, attempt, 0))
    assert isinstance(d.end, fsm.Stop)
    assert "slot 0, rollout 0: 3 infrastructure faults, the last one 'box lost'" in d.end.error
    assert "services.retries (2)" in d.end.error
    assert d.send(fsm.Tick(at=1.0)) == [] and d.orchestrator.books.counts["ignored_ended"] == 1
    d.end = None
    d.crash(d.save(), life=1)  # who restarts has mended it: faults are counted anew
    d.join("again", 1000)
    d.drain()
    d.run_out()
    assert isinstance(d.end, fsm.Drained) and len(d.log) == 2


def test_a_group_that_kills_its_workers_stops_the_run():
    d = Driver(schedule(deaths=1), 1000)
    d.kill("w0")
    d.join("b", 1000)
    d.kill("b")
    assert isinstance(d.end, fsm.Stop) and "lost its worker 2 times" in d.end.error and "services.deaths" in d.end.error


def test_what_hangs_is_cancelled_and_goes_to_another_worker():
    d = Driver(schedule(prompts=1, ahead=0), 2)
    d.join("other", 2)
    d.now = 30.0
    d.send(fsm.Alive(at=30.0, slot=0, attempt=1))
    assert d.send(fsm.Tick(at=89.0)) == []
    assert d.send(fsm.Tick(at=90.0)) == [
        fsm.Cancel(worker="w0", slot=0, attempt=1),
        fsm.Dispatch(worker="other", slot=0, attempt=2, members=(0, 1)),
    ]
    d.kill("other")  # only the suspect one is left: better than none
    assert set(d.running.values()) == {"w0"}


# Ends and changes


@pytest.mark.parametrize("refill, replaced", [(0, []), (1, [0]), (10, [0, 3])])
def test_a_group_without_a_signal_makes_room_for_another_prompt(refill: int, replaced: list[int]):
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.5, 0.0), 3: (0.0, 0.0)}
    d = Driver(schedule(ahead=1, steps=3, refill=refill), 1000)
    assert d.slots() == {0, 1, 2, 3}
    for slot in range(4):
        for key in [key for key in d.running if key[0] == slot]:
            d.finish(key, reward=rewards[slot][key[2]])
    assert d.refilled == replaced
    assert d.orchestrator.books.ledger["zero_advantage"] == 100 * len(replaced)
    saved = d.save()
    d.crash(saved, life=1)
    d.join("w1", 1000)
    d.run_out()
    assert len(d.log) == 3 and d.end == fsm.Drained(left=())
    assert sorted(slot for train in d.log for slot in train.slots) == [
        slot for slot in range(6 + len(replaced)) if slot not in replaced
    ]


def test_settings_change_while_running():
    d = Driver(schedule(ahead=1, bound=4, window=1.0), 1000)
    for _ in range(2):
        d.finish_slot(min(d.slots() - {0})), d.finish_slot(min(d.slots() - {0}))
        d.trained()
    d.schedule = schedule(ahead=1, bound=1)
    commands = d.send(fsm.Changed(at=0.0, schedule=d.schedule))
    assert fsm.Cancel(worker="w0", slot=0, attempt=1) in commands  # too old for the new bound
    assert fsm.Dispatch(worker="w0", slot=0, attempt=2, members=(0, 1)) in commands
    d.drain()
    d.run_out()
    assert isinstance(d.end, fsm.Drained)


# Restart


def test_a_lower_bound_on_restart_drops_what_is_too_old():
    d = Driver(schedule(ahead=1, bound=4, window=1.0), 1000)
    d.finish((0, 1, 0))
    for slot in (1, 2):
        d.finish_slot(slot)
    d.trained()
    d.finish_slot(3), d.finish_slot(4)
    d.trained()
    o = fsm.Orchestrator.restore(schedule(ahead=1, bound=1), d.orchestrator.snapshot())
    assert o.books.ledger["stale"] == 50 and o.groups[0].finished == {}


def test_rollouts_that_are_not_stored_are_sampled_again():
    d = Driver(schedule(), 1000)
    d.finish_slot(0), d.finish_slot(1)
    stored = {(0, 1, 0), (0, 1, 1), (1, 1, 0)}
    o = fsm.Orchestrator.restore(d.schedule, d.orchestrator.snapshot(), stored=stored)
    commands = o.handle(fsm.Joined(at=0.0, worker="new", capacity=1))
    assert commands == [fsm.Dispatch(worker="new", slot=1, attempt=fsm.ATTEMPTS_A_LIFE + 2, members=(1,))]
    assert o.books.ledger["lost"] == 50


# Random faults

FAULTS = ("kill", "drain", "hang", "rubbish", "fault", "repeat", "zombie", "crash", "rewind", "trainer", "lag")
schedules = st.builds(
    lambda more, **fields: Schedule(bound=fields["ahead"] + more, retries=10**6, deaths=10**6, hang_s=10.0, **fields),
    more=st.integers(0, 3),
    prompts=st.integers(1, 3),
    group=st.integers(1, 3),
    ahead=st.integers(0, 3),
    window=st.floats(0, 1),
    order=st.sampled_from(["window", "fifo", "discard"]),
    refill=st.sampled_from([0, 3, 100]),
)


class Chaos(Driver):
    """A driver that works, and injects faults in between."""

    def __init__(self, schedule: Schedule, rng: Random) -> None:
        super().__init__(schedule)
        self.rng, self.names, self.life = rng, 0, 0
        self.publishes = rng.random() < 0.5
        if self.publishes:
            self.serve()
        self.old = self.save()
        self.hire()

    def hire(self) -> None:
        self.names += 1
        self.join(f"h{self.names}", self.rng.randint(1, 6))

    def work(self) -> None:
        """One step of ordinary life."""
        self.now += self.rng.random()
        if not self.capacity or (len(self.capacity) < 3 and self.rng.random() < 0.3):
            self.hire()
        elif self.training and self.rng.random() < 0.4:
            self.trained()
        elif self.running:
            reward = self.rng.choice((None, 0.0, 0.0, 1.0))
            slot, attempt, member = key = self.rng.choice(list(self.running))
            if self.rng.random() < 0.3:
                self.graded.add(key)
                self.send(fsm.Alive(at=self.now, slot=slot, attempt=attempt, member=member))
            else:
                self.finish(key, tokens=self.rng.randrange(1, 9000), reward=reward)
        if self.publishes and self.rng.random() < 0.3:
            self.serve()
        if self.rng.random() < 0.1:
            self.old = self.save()

    def inject(self, kind: str) -> bool:
        """Inject a fault, and return whether there was anything to inject it into."""
        rng = self.rng
        if kind == "kill" and self.capacity:
            self.kill(rng.choice(list(self.capacity)))
        elif kind == "drain" and self.capacity:
            self.draining.add(worker := rng.choice(list(self.capacity)))
            self.send(fsm.Draining(at=self.now, worker=worker))
        elif kind == "hang":
            self.now += self.schedule.hang_s * rng.random() * 2
            self.send(fsm.Tick(at=self.now))
        elif kind == "fault" and self.running:
            self.fault(rng.choice(list(self.running)), sampled=rng.randrange(50))
        elif kind == "lag" and self.running:
            self.finish(rng.choice(list(self.running)), lag=rng.randint(1, 5))
        elif kind == "repeat" and (events := [event for event, _ in self.history if self.repeatable(event)]):
            self.send(replace(rng.choice(events), at=self.now))
        elif kind == "zombie" and self.zombies:
            self.finish(self.zombies.pop(rng.randrange(len(self.zombies))))
        elif kind in ("crash", "rewind"):
            self.life += 1
            self.crash(self.save() if kind == "crash" else self.old, self.life, back=rng.randint(0, 3))
            self.old = self.save()
            self.hire()
        elif kind == "trainer":
            self.lose_trainer(rng.randint(0, min(3, len(self.log))))
        elif kind == "rubbish":
            self.send(self.rubbish())
        else:
            return False
        return True

    def repeatable(self, event: fsm.Event) -> bool:
        """Whether a worker or the trainer sent it, and it does not happen to be what is awaited now (a step done anew, or a
        dispatch that rubbish named before it was made)."""
        if isinstance(event, fsm.Trained):
            return event.step < len(self.log) and not (self.training and self.training.step == event.step)
        if isinstance(event, fsm.Finished | fsm.Faulted):
            return (event.slot, event.attempt, event.member) not in self.running
        return isinstance(event, fsm.Alive)

    def rubbish(self) -> fsm.Event:
        """A message that nobody meant: its numbers are near the right ones, and never all right."""
        rng = self.rng
        slot, attempt = rng.randint(-1, 30), rng.randint(-1, 5) - 2 * fsm.ATTEMPTS_A_LIFE * rng.randint(0, 1)
        member = rng.randint(-1, 4)
        if (slot, attempt, member) in self.born:
            attempt = self.life * fsm.ATTEMPTS_A_LIFE + 999
        numbers = {"slot": slot, "attempt": attempt, "member": member}
        return rng.choice(
            [
                fsm.Finished(at=self.now, oldest_version=rng.randint(-1, 9), sampled=rng.randint(-5, 50), **numbers),
                fsm.Faulted(at=self.now, reason="rubbish", sampled=rng.randint(-2, 2), **numbers),
                fsm.Alive(at=self.now, slot=slot, attempt=attempt),
                fsm.Left(at=self.now, worker="nobody"),
                fsm.Trained(at=self.now, step=len(self.log) + rng.randint(1, 3)),
                fsm.Served(at=self.now, version=len(self.log) + rng.randint(1, 3)),
            ]
        )


def survive(schedule: Schedule, faults: list[str], seed: int) -> tuple[Chaos, int]:
    """Return a run with these faults, drained by a last worker, and the number of faults that took effect."""
    rng, effective = Random(seed), 0
    chaos = Chaos(schedule, rng)
    for kind in faults:
        for _ in range(rng.randint(0, 4)):
            chaos.work()
        effective += chaos.inject(kind)
    chaos.drain()
    if not chaos.end:
        chaos.join("last", 2)
    chaos.run_out()
    return chaos, effective


def assert_nothing_is_missing(chaos: Chaos) -> None:
    o = chaos.orchestrator
    assert isinstance(chaos.end, fsm.Drained), chaos.end
    trained = sorted(slot for train in chaos.log for slot in train.slots)
    assert sorted(trained + list(chaos.end.left) + chaos.refilled) == list(range(o.next_slot))
    assert [train.step for train in chaos.log] == list(range(len(chaos.log)))
    assert len(chaos.end.left) < chaos.schedule.prompts
    assert sum(o.books.staleness.get("total", {}).values()) == len(trained) * chaos.schedule.group
    assert max(o.books.staleness.get("total", {0: 0})) <= chaos.schedule.bound


def test_ten_thousand_faults_lose_nothing_and_repeat_nothing():
    total = 0

    @given(schedules, st.lists(st.sampled_from(FAULTS), min_size=50, max_size=50), st.integers(0, 2**32))
    @settings(max_examples=280, deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck])
    def run(schedule: Schedule, faults: list[str], seed: int) -> None:
        nonlocal total
        chaos, effective = survive(schedule, faults, seed)
        assert_nothing_is_missing(chaos)
        total += effective

    run()
    assert total >= 10_000
