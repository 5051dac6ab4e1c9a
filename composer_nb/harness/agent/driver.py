"""Many agents against one policy: each is a plain function in its own thread, and a driver serves all of them in batches."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from composer_nb.harness.policy import Completion, Policy, Request, Trace
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor

__all__ = ["Driver", "Job", "Seat", "drive"]
Result = TypeVar("Result")
# The work of one agent, in its own thread; requests go through its seat.
Job = Callable[["Seat[Any]"], Result]
# Seconds that an idle driver waits for agents.
LOOK_S = 0.05


class Dropped(BaseException):
    """Raised in a dropped agent at its next request."""


# A request that the policy forget this rollout.
Release = int
Asked = Request | CallRequest | Release | Future[Any]
Answer = Completion | tuple[CallOutcome, ...] | Trace | Future[Trace] | BaseException


class Seat(Generic[Result]):
    """One agent in its thread, with access to the shared policy and sandboxes."""

    def __init__(self, position: int, requests: SimpleQueue[tuple[int, Asked]], lockstep: bool = False) -> None:
        self.position, self.lockstep = position, lockstep
        # Called from another thread when the agent is dropped.
        self.at_drop: list[Callable[[], None]] = []
        self.dropped = self.ended = False
        self._requests = requests
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # Start of the current wait for an answer, if there is one, and the seconds of all earlier waits.
        self._waits: tuple[float | None, float] = None, 0.0
        # Allows one request at a time: a custom tool that was given up may still make some.
        self._lock = threading.Lock()

    def clock(self) -> float:
        """Return the seconds that count for this agent's time limit: in lockstep, where agents wait for each other, only those in
        which it did not wait for an answer."""
        if not self.lockstep:
            return time.monotonic()
        since, waited = self._waits
        return (time.monotonic() if since is None else since) - waited

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Return the next turn of a rollout. Raises ProviderFailure if the provider fails."""
        completion: Completion = self._answer(request)
        return completion

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Execute calls. Raises SandboxFailure if a sandbox fails."""
        return [self._answer(request) for request in requests]

    def release(self, rollout: int) -> Trace:
        """Have the policy forget a rollout, and return its records."""
        trace: Trace | Future[Trace] = self._answer(rollout)
        return trace.result() if isinstance(trace, Future) else trace

    def answer(self, answer: Answer) -> None:
        """Answer the agent's request. Called by the driver."""
        self._answers.put(answer)

    def work(self, job: Job[Result]) -> None:
        """Run the job in the agent's thread, and report its result or its error."""
        ended: Future[Result] = Future()
        try:
            ended.set_result(job(self))
        except BaseException as error:  # raised again where the driver runs
            ended.set_exception(error)
        with self._lock:
            self.ended = True
            self._requests.put((self.position, ended))

    def _answer(self, request: Request | CallRequest | Release) -> Any:
        with self._lock:
            if self.ended or (self.dropped and not isinstance(request, Release)):
                raise Dropped
            began, waited = time.monotonic(), self._waits[1]
            self._waits = began, waited
            self._requests.put((self.position, request))
            answer = self._answers.get()
            self._waits = None, waited + time.monotonic() - began
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Driver(Generic[Result]):
    """Runs agents against one policy and one fleet of sandboxes.

    In each round, all sandbox requests share one batch, then all agents that wait for the policy share one step of it. In
    lockstep, a round waits for every agent and serves them in order of position, so that one seed gives one result. Otherwise
    agents do not wait for others: calls run beside the policy's steps, one batch at a time, and own sandboxes delay no agent.
    """

    def __init__(self, policy: Policy, sandboxes: Executor, lockstep: bool = True) -> None:
        """Raise ValueError for a policy without capacity."""
        if policy.capacity < 1:
            raise ValueError(f"the policy holds {policy.capacity} rollouts at a time; at least 1 is needed")
        self.policy, self.sandboxes, self.lockstep = policy, sandboxes, lockstep
        self._requests: SimpleQueue[tuple[int, Asked]] = SimpleQueue()
        self._alive: dict[int, Seat[Result]] = {}
        # Positions of agents without a request.
        self._working: set[int] = set()
        self._names: dict[int, int] = {}  # rollout -> position of its agent
        self._waiting: dict[int, Request | CallRequest | Release] = {}
        self._results: list[tuple[int, Future[Result]]] = []
        # Positions of agents that made a request or ended. The caller clears it.
        self.moved = set[int]()
        # Whether the policy has made its step in the unfinished round.
        self._stepped = False
        self._beside = None if lockstep else ThreadPoolExecutor(1, thread_name_prefix="calls")
        # Batch of calls that runs beside the policy's steps.
        self._batch = Future[None]()
        self._batch.set_result(None)

    @property
    def room(self) -> int:
        """Number of agents that may be added now."""
        return self.policy.capacity - len(self._alive)

    @property
    def alive(self) -> list[int]:
        """Positions of the agents under way."""
        return list(self._alive)

    def add(self, position: int, job: Job[Result]) -> None:
        """Start an agent under a number of the caller's, which is returned with its result."""
        seat = self._alive[position] = Seat[Result](position, self._requests, self.lockstep)
        self._working.add(position)
        threading.Thread(target=seat.work, args=(job,), name="agent", daemon=True).start()

    def round(self, seconds: float = math.inf) -> list[tuple[int, Result]]:
        """Serve all agents once. Return (position, result) of the agents that ended, in order of position. In lockstep, a round
        in which agents work for longer than `seconds` returns no results, and the next call continues it."""
        until = time.monotonic() + seconds
        if self._batch.done():
            self._batch.result()
        if not self._stepped:
            if not self._hear(until):
                return []
            while self._waits(Release) or (self._waits(CallRequest) and self._batch.done()):
                self._execute()
                for position, released in self._taken(Release):
                    self._answer(position, self.policy.release(released))
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
        """End an agent and wait for it; its result is lost. A missing agent is no error, since it may just have ended. Raises the
        exception with which the agent ends."""
        if (seat := self._alive.get(position)) is None:
            return
        seat.dropped = True
        in_policy = position in self._names.values()
        self._names = {rollout: owner for rollout, owner in self._names.items() if owner != position}
        for stop in seat.at_drop:
            stop()
        if in_policy:
            self._answer(position, Dropped())
        while position in self._alive:
            request = self._waiting.pop(position, None)
            if request is None:
                self._take(*self._requests.get())
            else:
                self._answer(position, self.policy.release(request) if isinstance(request, Release) else Dropped())
        ended = self._results.pop()[1]
        if not isinstance(error := ended.exception(), Dropped | None):
            raise error

    def close(self) -> None:
        """End all live agents."""
        for position in self.alive:
            self.drop(position)
        if self._beside is not None:
            self._beside.shutdown()

    def _hear(self, until: float) -> bool:
        """Collect the agents' requests: in lockstep until no agent works, otherwise those present, with a short wait if the
        driver is idle. Return whether the round may continue: in lockstep, only if no agent works."""
        while self._working:
            stuck = not self._waiting or not self._batch.done()
            idle = stuck and not self._names and not self._waits(Request, Release)
            left = max(until - time.monotonic(), 0.0)
            timeout = LOOK_S if not self.lockstep else left if math.isfinite(left) else None
            try:
                self._take(*self._requests.get(block=self.lockstep or idle, timeout=timeout))
            except Empty:
                return not self.lockstep
        return True

    def _take(self, position: int, request: Asked) -> None:
        self._working.discard(position)
        self.moved.add(position)
        if isinstance(request, Future):
            del self._alive[position]
            self._results.append((position, request))
        else:
            self._waiting[position] = request

    def _taken(self, kind: type[Any]) -> list[tuple[int, Any]]:
        """Remove the requests of a kind and return them in order of position."""
        requests = sorted(
            (position, request) for position, request in self._waiting.items() if isinstance(request, kind)
        )
        for position, _ in requests:
            del self._waiting[position]
        return requests

    def _answer(self, position: int, answer: Answer) -> None:
        self._working.add(position)
        self._alive[position].answer(answer)

    def _waits(self, *kinds: type[Any]) -> bool:
        return any(isinstance(request, kinds) for request in self._waiting.values())

    def _execute(self) -> None:
        """Execute the requested calls: in lockstep now, otherwise beside the policy's steps, after the last batch."""
        if not self._batch.done() or not (requests := self._taken(CallRequest)):
            return
        self._working |= {position for position, _ in requests}
        seats = [self._alive[position] for position, _ in requests]

        def run() -> None:
            outcomes = _execute(self.sandboxes, [request for _, request in requests])
            for seat, outcome in zip(seats, outcomes, strict=True):
                seat.answer(outcome)

        if self._beside is None:
            run()
        else:
            self._batch = self._beside.submit(run)


def drive(agents: Iterable[Job[Result]], policy: Policy, sandboxes: Executor) -> Iterator[tuple[int, Result]]:
    """Run agents, at most `policy.capacity` at a time, and yield (position, result) as each ends. If the caller stops early, live
    agents are closed. Raises ValueError for a policy without capacity."""
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
    """Run a batch. A failed batch is retried request by request, so that a fault affects only the requests that cause it."""
    try:
        return list(sandboxes.run(requests))
    except SandboxFailure as failure:
        if len(requests) == 1:
            return [failure]
    return [_execute(sandboxes, [request])[0] for request in requests]
