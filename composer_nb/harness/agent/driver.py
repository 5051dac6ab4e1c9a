"""Many agents against one policy: each is a plain function in a thread of its own, and a driver serves all of them in batches."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from composer_nb.harness.policy import Completion, Policy, Request, Trace
from composer_nb.harness.sandbox.calls import CallOutcome, CallRequest, Executor
from composer_nb.harness.sandbox.contract import SandboxFailure

__all__ = ["Driver", "Job", "Seat", "drive"]
Result = TypeVar("Result")
Job = Callable[["Seat[Any]"], Result]
"""The work of one agent, in a thread of its own; it asks its seat."""
LOOK_S = 0.05
"""Seconds that a driver waits for agents when nothing else is to be done."""


class Dropped(BaseException):
    """Raised in an agent that is no longer wanted, at its next request."""


@dataclass(frozen=True, slots=True)
class Release:
    """A rollout that the policy may forget."""

    rollout: int


Asked = Request | CallRequest | Release | Future[Any]
Answer = Completion | tuple[CallOutcome, ...] | Trace | Future[Trace] | BaseException


class Seat(Generic[Result]):
    """One agent in its thread, and its way to the policy and the sandboxes that it shares with others."""

    def __init__(self, position: int, asked: SimpleQueue[tuple[int, Asked]]) -> None:
        self.position = position
        self.at_drop: list[Callable[[], None]] = []
        """Called from another thread when the agent is no longer wanted."""
        self.dropped = False
        self._asked = asked
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Return the next turn of a rollout. Raises ProviderFailure."""
        done: Completion = self._answer(request)
        return done

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Execute calls. Raises SandboxFailure."""
        return [self._answer(request) for request in requests]

    def release(self, rollout: int) -> Trace:
        """Have the policy forget a rollout, and return what it recorded."""
        trace: Trace | Future[Trace] = self._answer(Release(rollout))
        return trace.result() if isinstance(trace, Future) else trace

    def answer(self, answer: Answer) -> None:
        """Let the agent go on. For the driver."""
        self._answers.put(answer)

    def work(self, job: Job[Result]) -> None:
        """Do the job, in the agent's thread, and report its result or its error."""
        ended: Future[Result] = Future()
        try:
            ended.set_result(job(self))
        except BaseException as error:  # raised again where the driver runs
            ended.set_exception(error)
        self._asked.put((self.position, ended))

    def _answer(self, request: Request | CallRequest | Release) -> Any:
        if self.dropped and not isinstance(request, Release):
            raise Dropped
        self._asked.put((self.position, request))
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Driver(Generic[Result]):
    """Agents under way against one policy and one sandbox fleet.

    In each round everything that wants a sandbox shares one batch, then every agent that waits for the policy shares one step
    of it. In lockstep a round waits for every agent, and serves them in order of position, so that one seed gives one result.
    Otherwise nobody waits for others: calls run beside the policy's steps, one batch at a time, and agents that work in
    sandboxes of their own hold up nobody.
    """

    def __init__(self, policy: Policy, sandboxes: Executor, lockstep: bool = True) -> None:
        """Raises ValueError for a policy without capacity."""
        if policy.capacity < 1:
            raise ValueError(f"the policy holds {policy.capacity} rollouts at a time; at least 1 is needed")
        self.policy, self.sandboxes, self.lockstep = policy, sandboxes, lockstep
        self._asked: SimpleQueue[tuple[int, Asked]] = SimpleQueue()
        self._alive: dict[int, Seat[Result]] = {}
        self._working: set[int] = set()
        """Positions of agents that have asked for nothing."""
        self._names: dict[int, int] = {}  # rollout -> position of its agent
        self._waiting: dict[int, Request | CallRequest | Release] = {}
        self._results: list[tuple[int, Future[Result]]] = []
        self._stepped = False
        """The policy made the step of a round that is not over."""
        self._beside = None if lockstep else ThreadPoolExecutor(1, thread_name_prefix="calls")
        self._batch = Future[None]()
        """Calls that run beside the policy's steps."""
        self._batch.set_result(None)

    @property
    def room(self) -> int:
        """Agents that may be added now."""
        return self.policy.capacity - len(self._alive)

    @property
    def alive(self) -> list[int]:
        """Positions of the agents under way."""
        return list(self._alive)

    def add(self, position: int, job: Job[Result]) -> None:
        """Start an agent under a number of the caller's, which comes back with its result."""
        seat = self._alive[position] = Seat[Result](position, self._asked)
        self._working.add(position)
        threading.Thread(target=seat.work, args=(job,), name="agent", daemon=True).start()

    def round(self, seconds: float = math.inf) -> list[tuple[int, Result]]:
        """Serve all agents once. Returns (position, result) of the agents that ended, in order of position. In lockstep, a round
        in which agents work for longer than `seconds` is broken off without results, and the next call goes on with it."""
        until = time.monotonic() + seconds
        if self._batch.done():
            self._batch.result()
        if not self._stepped:
            if not self._hear(until):
                return []
            while self._waits(Release) or (self._waits(CallRequest) and self._batch.done()):
                self._execute()
                for position, given in self._taken(Release):
                    self._answer(position, self.policy.release(given.rollout))
                if not self._hear(until):
                    return []
            for position, request in self._taken(Request):
                self._names[request.rollout] = position
                self.policy.submit(request)
            for completion in self.policy.step() if self._names else ():
                self._answer(self._names.pop(completion.rollout), completion)
        self._stepped = self.lockstep and not self._hear(until)
        if self._stepped:
            return []
        results, self._results = sorted(self._results, key=lambda ended: ended[0]), []
        return [(position, ended.result()) for position, ended in results]

    def drop(self, position: int) -> None:
        """End an agent under way, and wait for it; its result is lost. One that is not there is no error: it may just have
        ended. Raises what it raises on its way out."""
        if (seat := self._alive.get(position)) is None:
            return
        seat.dropped = True
        asked = position in self._names.values()
        self._names = {rollout: place for rollout, place in self._names.items() if place != position}
        for stop in seat.at_drop:
            stop()
        if asked:
            self._answer(position, Dropped())
        while position in self._alive:
            given = self._waiting.pop(position, None)
            if given is None:
                self._take(*self._asked.get())
            else:
                self._answer(position, self.policy.release(given.rollout) if isinstance(given, Release) else Dropped())
        ended = self._results.pop()[1]
        if not isinstance(error := ended.exception(), Dropped | None):
            raise error

    def close(self) -> None:
        """End every agent still alive."""
        for position in self.alive:
            self.drop(position)
        if self._beside is not None:
            self._beside.shutdown()

    def _hear(self, until: float) -> bool:
        """Take what agents ask: in lockstep until none works, otherwise what is there, or a moment later if nothing else is to be
        done. Returns whether the round may go on: in lockstep only if none works."""
        while self._working:
            idle = (
                not self._names and not self._waits(Request, Release) and (not self._waiting or not self._batch.done())
            )
            left = max(until - time.monotonic(), 0.0)
            timeout = LOOK_S if not self.lockstep else left if math.isfinite(left) else None
            try:
                self._take(*self._asked.get(block=self.lockstep or idle, timeout=timeout))
            except Empty:
                return not self.lockstep
        return True

    def _take(self, position: int, asked: Asked) -> None:
        self._working.discard(position)
        if isinstance(asked, Future):
            del self._alive[position]
            self._results.append((position, asked))
        else:
            self._waiting[position] = asked

    def _taken(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """Return what is asked of a kind, in order of position, and no longer keep it."""
        found = sorted((position, asked) for position, asked in self._waiting.items() if isinstance(asked, kind))
        for position, _ in found:
            del self._waiting[position]
        return found

    def _answer(self, position: int, answer: Answer) -> None:
        self._working.add(position)
        self._alive[position].answer(answer)

    def _waits(self, *kinds: type[Any]) -> bool:
        return any(isinstance(asked, kinds) for asked in self._waiting.values())

    def _execute(self) -> None:
        """Execute the calls that are asked for: in lockstep now, otherwise beside the policy's steps, after the last batch."""
        if not self._batch.done() or not (asked := self._taken(CallRequest)):
            return
        self._working |= {position for position, _ in asked}
        seats = [self._alive[position] for position, _ in asked]

        def run() -> None:
            outcomes = _execute(self.sandboxes, [request for _, request in asked])
            for seat, outcome in zip(seats, outcomes, strict=True):
                seat.answer(outcome)

        if self._beside is None:
            run()
        else:
            self._batch = self._beside.submit(run)


def drive(agents: Iterable[Job[Result]], policy: Policy, sandboxes: Executor) -> Iterator[tuple[int, Result]]:
    """Run agents, at most `policy.capacity` at a time, and yield (position, result) as each ends. When the caller stops early,
    the agents still alive are closed. Raises ValueError for a policy without capacity."""
    driver: Driver[Result] = Driver(policy, sandboxes)
    queue = enumerate(agents)
    more = True
    try:
        while more or driver.alive:
            while more and driver.room:
                following = next(queue, None)
                if more := following is not None:
                    driver.add(*following)
            yield from driver.round()
    finally:
        driver.close()


def _execute(sandboxes: Executor, requests: list[CallRequest]) -> list[tuple[CallOutcome, ...] | SandboxFailure]:
    """Run a batch. A batch that fails is tried request by request, so that a fault hits only those that it concerns."""
    try:
        return list(sandboxes.run(requests))
    except SandboxFailure as failure:
        if len(requests) == 1:
            return [failure]
    return [_execute(sandboxes, [request])[0] for request in requests]
