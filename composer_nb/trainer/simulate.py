"""What a schedule costs: the real orchestrator on replayed durations, in virtual time or with real waits, scaled down.

    orchestrator.handle(event) → commands → executor.execute(command) … executor.wait() → event

`drive` is that loop, for any executor; `simulate` runs it on `VirtualTime` (an event queue) or on `RealTime` (waits).
Work is fixed: the first draw of rollout (slot, place) takes the same time and tokens under every schedule, so schedules are
compared on the same work; a rollout that is dispatched again is drawn anew for the same prompt.

The optimum is an upper bound on samples a second: all places busy all the time, or the trainer busy all the time, whichever
is slower: N / max(sum of durations / places, steps · train_s). Leaves out: that rollouts slow each other down in an engine.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from composer_nb.trainer.orchestrator import Orchestrator
from composer_nb.trainer.schedule import (
    Cancel,
    Command,
    Dispatch,
    Drained,
    Event,
    Executor,
    Faulted,
    Finished,
    Joined,
    Schedule,
    Served,
    Stop,
    Train,
    Trained,
)


def drive(orchestrator: Orchestrator, executor: Executor) -> Drained:
    """Runs until the orchestrator is drained. Raises RuntimeError with its reason when it stops instead."""
    while True:
        for command in orchestrator.handle(executor.wait()):
            if isinstance(command, Stop):
                raise RuntimeError(command.error)
            if isinstance(command, Drained):
                return command
            executor.execute(command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds and tokens of rollouts [prompts, draws]."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @classmethod
    def read(cls, path: Path) -> Durations:
        """A table of prompt, draw, seconds, tokens, as data/durations.csv. Raises ValueError for a table with holes."""
        rows = np.loadtxt(path, delimiter=",", comments=("#", "prompt"), ndmin=2)
        prompts, draws = int(rows[:, 0].max()) + 1, int(rows[:, 1].max()) + 1
        if rows.shape != (prompts * draws, 4) or len(np.unique(rows[:, :2], axis=0)) != len(rows):
            raise ValueError(
                f"{path}: must have four columns and one row for each of {prompts} prompts × {draws} draws"
            )
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        return cls(seconds=rows[:, 2].reshape(prompts, draws), tokens=rows[:, 3].astype(int).reshape(prompts, draws))

    def rollout(self, slot: int, place: int, again: int) -> tuple[float, int]:
        """(seconds, tokens) of a rollout that is dispatched for the (`again` + 1)th time: any draw of the slot's prompt."""
        prompt = slot % len(self.seconds)
        draw = Random(f"{slot} {place} {again}").randrange(self.seconds.shape[1])
        return float(self.seconds[prompt, draw]), int(self.tokens[prompt, draw])


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Who works, and how fast."""

    durations: Durations
    workers: int = 4
    capacity: int = 16
    """Rollouts at a time, a worker."""
    train_s: float = 60.0
    """A training step."""
    publish_s: float = 0.0
    """From the end of a step until every engine serves its weights; what runs then goes on with them."""

    def __post_init__(self) -> None:
        """Raises ValueError for a load that nobody could carry."""
        if self.workers < 1 or self.capacity < 1:
            raise ValueError(f"workers={self.workers} and capacity={self.capacity} must be at least 1")
        for name in ("train_s", "publish_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of seconds, not negative")


class World:
    """Workers and a trainer that only take time. The executors differ in how time passes."""

    def __init__(self, load: Load) -> None:
        self.load, self.version = load, 0
        self.drawn: dict[tuple[int, int], int] = {}
        self.running: dict[tuple[int, int, int], tuple[float, float, int]] = {}
        self.lengths: dict[tuple[int, int, int], int] = {}
        self.batches: list[Train] = []
        self.busy_s = 0.0
        for number in range(load.workers):
            self.after(0.0, Joined(at=0.0, worker=f"w{number}", capacity=load.capacity))
        if load.publish_s:
            self.after(0.0, Served(at=0.0, version=0))

    @property
    def now(self) -> float:
        raise NotImplementedError

    def after(self, seconds: float, event: Event) -> None:
        """Lets an event happen in `seconds`."""
        raise NotImplementedError

    def wait(self) -> Event:
        raise NotImplementedError

    def close(self) -> None:
        """Calls off what is under way."""

    def execute(self, command: Command) -> None:
        match command:
            case Dispatch():
                for place in command.places:
                    self._start(command.slot, command.attempt, place)
            case Cancel():
                for key in [key for key in self.running if key[:2] == (command.slot, command.attempt)]:
                    self._abandon(key)
            case Train():
                self.batches.append(command)
                self.after(self.load.train_s, Trained(at=0.0, step=command.step))

    def _start(self, slot: int, attempt: int, place: int) -> None:
        again = self.drawn.get((slot, place), 0)
        self.drawn[slot, place] = again + 1
        seconds, tokens = self.load.durations.rollout(slot, place, again)
        self.running[slot, attempt, place] = (self.now, seconds, tokens)
        self.lengths[slot, attempt, place] = tokens
        numbers = {"slot": slot, "attempt": attempt, "place": place, "tokens": tokens, "sampled": tokens}
        self.after(seconds, Finished(at=0.0, oldest_version=self.version, **numbers))

    def _abandon(self, key: tuple[int, int, int]) -> None:
        start, seconds, tokens = self.running.pop(key)
        self.busy_s += self.now - start
        sampled = int(tokens * min(1.0, (self.now - start) / seconds))
        names = dict(zip(("slot", "attempt", "place"), key, strict=True))
        self.after(0.0, Faulted(at=0.0, reason="cancelled", sampled=sampled, **names))

    def happened(self, event: Event) -> Event | None:
        """The event as it is told, or None if it was called off."""
        if isinstance(event, Finished):
            found = self.running.pop((event.slot, event.attempt, event.place), None)
            if found is None:
                return None
            self.busy_s += found[1]
        elif isinstance(event, Trained) and self.load.publish_s:
            self.after(self.load.publish_s, Served(at=0.0, version=event.step + 1))
        elif isinstance(event, Trained | Served):
            self.version = event.step + 1 if isinstance(event, Trained) else event.version
        return replace(event, at=self.now)


class VirtualTime(World):
    """Time jumps from event to event."""

    def __init__(self, load: Load) -> None:
        self.queue: list[tuple[float, int, Event]] = []
        self.time, self.number = 0.0, 0
        super().__init__(load)

    @property
    def now(self) -> float:
        return self.time

    def after(self, seconds: float, event: Event) -> None:
        self.number += 1  # events of the same instant stay in order
        heapq.heappush(self.queue, (self.time + seconds, self.number, event))

    def wait(self) -> Event:
        while self.queue:
            self.time, _, event = heapq.heappop(self.queue)
            if told := self.happened(event):
                return told
        raise RuntimeError("nothing is under way and the orchestrator wants nothing: a deadlock")


class RealTime(World):
    """Durations are real waits, `scale` times as long."""

    def __init__(self, load: Load, scale: float) -> None:
        self.loop, self.scale = asyncio.new_event_loop(), scale
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self.start = self.loop.time()
        super().__init__(load)

    @property
    def now(self) -> float:
        return (self.loop.time() - self.start) / self.scale

    def after(self, seconds: float, event: Event) -> None:
        self.loop.call_later(seconds * self.scale, self.queue.put_nowait, event)

    def wait(self) -> Event:
        while True:
            if told := self.happened(self.loop.run_until_complete(self.queue.get())):
                return told

    def close(self) -> None:
        self.loop.close()


def simulate(schedule: Schedule, load: Load, scale: float = 0.0) -> dict[str, Any]:
    """Runs `schedule.steps` batches in virtual time, or with waits of `scale` seconds a second; returns `measure`."""
    if not schedule.steps:
        raise ValueError("services.steps=0: say how many steps to simulate")
    orchestrator, world = Orchestrator(schedule), RealTime(load, scale) if scale else VirtualTime(load)
    try:
        drive(orchestrator, world)
        return measure(orchestrator, world)
    finally:
        world.close()


def measure(orchestrator: Orchestrator, world: World) -> dict[str, Any]:
    """samples_s, optimum and their ratio; utilisation; staleness; tokens not trained; trained against asked lengths.

    Lengths are compared over the first half of the steps (a run that goes on) and over all, with the rollouts that the same
    number of prompts in order would have given: ratio of means, and the KS distance.
    """
    schedule, load, seconds = orchestrator.schedule, world.load, world.now
    places = [(slot, place) for slot in range(schedule.steps * schedule.prompts) for place in range(schedule.group)]
    first = [load.durations.rollout(slot, place, 0) for slot, place in places]
    work_s = sum(duration for duration, _ in first)
    asked = [tokens for _, tokens in first]
    trained = [world.lengths[key] for batch in world.batches for key in batch.rollouts]
    best_s = max(work_s / (load.workers * load.capacity), schedule.steps * load.train_s)
    books, half = orchestrator.books, len(trained) // 2
    return {
        "seconds": seconds,
        "samples_s": len(trained) / seconds,
        "optimum_s": len(trained) / best_s,
        "of_optimum": best_s / seconds,
        "workers_busy": world.busy_s / (load.workers * load.capacity * seconds),
        "trainer_busy": schedule.steps * load.train_s / seconds,
        **{f"staleness_{name}": _mean(counts) for name, counts in books.staleness.items()},
        "staleness_max": max(books.staleness["total"]),
        "not_trained": 1 - books.ledger["trained"] / books.counts["received_tokens"],
        "half_mean_ratio": float(np.mean(trained[:half]) / np.mean(asked[:half])),
        "half_ks": ks(trained[:half], asked[:half]),
        "mean_ratio": float(np.mean(trained) / np.mean(asked)),
        "ks": ks(trained, asked),
    }


def _mean(counts: dict[int, int]) -> float:
    return sum(value * count for value, count in counts.items()) / sum(counts.values())


def ks(a: ArrayLike, b: ArrayLike) -> float:
    """Kolmogorov and Smirnov's distance: the largest gap between two distribution functions."""
    a, b = np.sort(a), np.sort(b)
    at = np.concatenate([a, b])
    return float(np.abs(np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)).max())
