"""The environment service: agents and their sandboxes in their own process, with a policy in another.

An environment worker gets dispatches and returns graded, packed attempts. It drives its agents exactly as the plain loop does;
only the policy is a proxy. It does not import torch, so that many workers fit on a machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from composer_nb.harness.agent.driver import Driver
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import rewarded
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import ATTEMPT_STRIDE, Completion, Request, Trace
from composer_nb.harness.sandbox.reap import FOLDER
from composer_nb.harness.store import pack_attempt
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.prompts import Order, prompt_order
from composer_nb.trainer.services.actors import RemoteService, require_seen
from composer_nb.trainer.services.orchestrator import Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOutcome:
    """The end of one rollout of a dispatch. `packed` is None after an infrastructure fault or a cancellation."""

    slot: int
    attempt: int
    place: int
    packed: bytes | None
    oldest_version: int = 0
    sampled: int = 0
    seconds: float = 0.0
    """Time from the start of the agent to its grade."""
    reason: str = ""


@dataclass(slots=True)
class EnginePair:
    """An engine and the environment worker that samples from it; they live and die together."""

    name: str
    engine: RemoteService
    worker: RemoteService
    version: int
    """Version that the engine serves."""
    joined: bool = False
    updating: bool = False
    working: bool = False
    since: float = 0.0
    start: list[Dispatch] = field(default_factory=list)
    cancel: list[tuple[int, int]] = field(default_factory=list)
    assigned: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    _noted: float = field(default_factory=time.perf_counter)
    _told: float = field(default_factory=time.perf_counter)
    _admitted: bool = False
    _without_s: float = 0.0

    def note(self) -> None:
        """Record whether any rollout is admitted from now on."""
        now = time.perf_counter()
        self._without_s += 0.0 if self._admitted else now - self._noted
        self._noted, self._admitted = now, bool(self.assigned)

    def waits(self, idle: float) -> dict[str, float]:
        """Split the engine's idle share of the time since its last report: without rollouts, and with some."""
        self.note()
        without = min(idle, self._without_s / (self._noted - self._told))
        self._told, self._without_s = self._noted, 0.0
        return {"trainer": without, "environments": idle - without}


class RemotePolicy:
    """A policy in another process. Requests are sent with the next step."""

    def __init__(self, engine: RemoteService, name: str, capacity: int) -> None:
        """`name` distinguishes the engine's clients."""
        self._engine, self._name, self.capacity = engine, name, capacity
        self._requests: dict[int, Request] = {}

    def submit(self, request: Request) -> None:
        self._requests[request.rollout] = request

    def step(self) -> list[Completion]:
        requests, self._requests = list(self._requests.values()), {}
        completions: list[Completion] = self._engine.wait("exchange", self._name, requests)
        return completions

    def release(self, rollout: int) -> Future[Trace]:
        self._requests.pop(rollout, None)
        return self._engine.call("release", rollout)


class EnvironmentService:
    """Agents with their sandboxes and a connection to one engine. `work` starts agents and returns those that have ended."""

    def __init__(
        self,
        run: Path,
        env: EnvSettings,
        limits: Limits,
        order: Order,
        group: int,
        policy: tuple[RemoteService, str, int],
        lockstep: bool,
    ) -> None:
        """`policy`: see `RemotePolicy`. `lockstep`: `work` reports each ended rollout at once, so that the number of ended ones
        does not depend on a clock, and one seed gives one result."""
        require_seen(run)
        self._own = env.reward_function(limits.seconds)
        self._sandboxes = Sandboxes(env.backend, run.name, run / FOLDER)
        self._agent = agent = make_agent(env, load_tokenizer(run / "data", needed=()), limits, self._sandboxes)
        self._tasks, self._group, self._lockstep = prompt_order(run, order), group, lockstep
        functions = self._sandboxes.functions if agent.backend is None else self._sandboxes
        self._driver: Driver[Attempt] = Driver(RemotePolicy(*policy), functions, lockstep)
        self._doing: dict[int, tuple[int, int, int]] = {}
        self._since: dict[int, float] = {}
        self._waiting: list[tuple[int, tuple[int, int, int]]] = []

    def work(
        self, start: Sequence[Dispatch], cancel: Sequence[tuple[int, int]], seconds: float
    ) -> tuple[list[RolloutOutcome], set[tuple[int, int]]]:
        """Start dispatches, give up cancelled ones (slot, attempt), and work for about `seconds`. Return the rollouts that ended,
        and the dispatches that made progress or wait for room. Return at once without work. Raises TooManyBlocked."""
        until = time.monotonic() + seconds
        for a in start:
            base = (a.attempt - 1) * ATTEMPT_STRIDE + a.slot * self._group  # as in the plain loop at the first attempt
            self._waiting += [(base + place, (a.slot, a.attempt, place)) for place in a.places]
        outcomes = self._give_up(set(cancel))
        while (self._doing or self._waiting) and (time.monotonic() < until or not self._doing):
            if self._lockstep and outcomes:
                break
            while self._waiting and self._driver.room:
                rollout, names = self._waiting.pop(0)
                self._doing[rollout], self._since[rollout] = names, time.monotonic()
                self._driver.add(rollout, rewarded(self._agent.attempt(self._tasks[names[0]], rollout), self._own))
            for rollout, attempt in self._driver.wait(max(until - time.monotonic(), 0.0)):
                seconds_taken = time.monotonic() - self._since.pop(rollout)
                outcomes.append(_outcome(self._doing.pop(rollout), attempt, seconds_taken))
        moved, self._driver.moved = self._driver.moved, set()
        alive = {self._doing[rollout][:2] for rollout in moved & self._doing.keys()}
        return outcomes, alive | {names[:2] for _, names in self._waiting}

    def _give_up(self, cancelled: set[tuple[int, int]]) -> list[RolloutOutcome]:
        if not cancelled:
            return []
        gone = [names for _, names in self._waiting if names[:2] in cancelled]
        self._waiting = [(rollout, names) for rollout, names in self._waiting if names[:2] not in cancelled]
        for rollout, names in list(self._doing.items()):
            if names[:2] in cancelled:
                self._driver.drop(rollout)
                gone.append(self._doing.pop(rollout))
                self._since.pop(rollout)
        return [RolloutOutcome(slot=s, attempt=a, place=p, packed=None, reason="cancelled") for s, a, p in gone]

    def close(self) -> None:
        """End the sandboxes."""
        self._sandboxes.__exit__(None, None, None)


def _outcome(rollout_key: tuple[int, int, int], attempt: Attempt, seconds: float) -> RolloutOutcome:
    slot, number, place = rollout_key
    rollout = attempt.rollout
    written = rollout.versions
    is_graded = attempt.grade.known
    return RolloutOutcome(
        slot=slot,
        attempt=number,
        place=place,
        packed=pack_attempt(attempt) if is_graded else None,
        oldest_version=int(written.min()) if len(written) else 0,
        sampled=rollout.sampled,
        seconds=seconds,
        reason="" if is_graded else attempt.grade.output or attempt.grade.status,
    )
