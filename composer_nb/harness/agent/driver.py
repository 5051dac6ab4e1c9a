"""Many agents against one policy: each is a plain function in its own thread, with a seat at the policy and the sandboxes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from composer_nb.harness.agent.shared import Shared, settle
from composer_nb.harness.policy import Completion, Policy, Request, Trace
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor

__all__ = ["Driver", "Job", "Seat", "drive"]
Result = TypeVar("Result")
# The work of one agent, in its own thread; requests go through its seat.
Job = Callable[["Seat[Any]"], Result]
Outcomes = list[tuple[CallOutcome, ...]]
# Calls of an agent, and their outcomes once they have run.
Calls = tuple[Sequence[CallRequest], Future[Outcomes]]


class Dropped(BaseException):
    """Raised in a dropped agent at its next request."""


class Seat(Generic[Result]):
    """One agent in its thread, with access to the shared policy and sandboxes."""

    def __init__(self, driver: Driver[Result], position: int) -> None:
        self._driver, self.position = driver, position
        # Called from another thread when the agent is dropped.
        self.at_drop: list[Callable[[], None]] = []
        self.dropped = False
        # The turn that the agent waits for, or the last one.
        self.turn = Future[Completion]()
        # Start of the current wait for an answer, if there is one, and the seconds of all earlier waits.
        self._waits: tuple[float | None, float] = None, 0.0
        # Allows one request at a time: a custom tool that was given up may still make some.
        self._lock = threading.Lock()

    def clock(self) -> float:
        """Return the seconds that count for this agent's time limit: in lockstep, where agents wait for each other, only those in
        which it did not wait for an answer."""
        if not self._driver.lockstep:
            return time.monotonic()
        since, waited = self._waits
        return (time.monotonic() if since is None else since) - waited

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Return the next turn of a rollout. Raises ProviderFailure if the provider fails."""
        try:
            completion: Completion = self._timed(lambda: self._driver.begin(self, request).result())
        except CancelledError:
            raise Dropped from None
        return completion

    def run(self, requests: Sequence[CallRequest]) -> Outcomes:
        """Execute calls. Raises SandboxFailure if a sandbox fails."""
        try:
            outcomes: Outcomes = self._timed(lambda: self._driver.run(self, requests))
        except CancelledError:
            raise Dropped from None
        return outcomes

    def release(self, rollout: int) -> Trace:
        """Have the policy forget a rollout, and return its records, which are empty for a dropped agent."""
        trace: Trace | Future[Trace] = self._timed(lambda: self._driver.release(self, rollout))
        trace = trace.result() if isinstance(trace, Future) else trace
        return Trace() if self.dropped else trace

    def _timed(self, request: Callable[[], Any]) -> Any:
        with self._lock:
            began, waited = time.monotonic(), self._waits[1]
            self._waits = began, waited
            self._driver.moved.add(self.position)
            try:
                return request()
            finally:
                self._waits = None, waited + time.monotonic() - began


class Driver(Generic[Result]):
    """Runs agents against one policy and one fleet of sandboxes.

    Each agent waits for its own requests alone, and the policy steps in a thread of its own. In lockstep, it pauses while any
    agent works: when all wait, their calls run together, then their turns begin in order of position, and `wait` steps the
    policy until one ends, so that one seed gives one result. Then only the caller's thread uses the policy, with its device and
    number of threads.
    """

    def __init__(self, policy: Policy, sandboxes: Executor, lockstep: bool = True) -> None:
        """Raise ValueError for a policy without capacity."""
        if policy.capacity < 1:
            raise ValueError(f"the policy holds {policy.capacity} rollouts at a time; at least 1 is needed")
        self.policy, self.sandboxes, self.lockstep = policy, sandboxes, lockstep
        self.shared = None if lockstep else Shared(policy).__enter__()
        # Positions of agents that made a request or ended. The caller clears it.
        self.moved = set[int]()
        self._changed = threading.Condition()
        self._alive: dict[int, Seat[Result]] = {}
        # Results that the caller has not taken yet.
        self._ended: dict[int, Future[Result]] = {}
        # In lockstep: turns, calls and releases that wait for the other agents, by position, and turns under way, by rollout.
        self._turns: dict[int, tuple[Request, Future[Completion]]] = {}
        self._calls: dict[int, Calls] = {}
        self._releases: dict[int, tuple[int, Future[Any]]] = {}
        self._under_way: dict[int, Future[Completion]] = {}

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
        seat = self._alive[position] = Seat(self, position)

        def work() -> None:
            result: Future[Result] = Future()
            try:
                result.set_result(job(seat))
            except BaseException as error:  # raised again where the driver runs
                result.set_exception(error)
            with self._changed:
                self.moved.add(position)
                self._ended[position] = result
                self._changed.notify_all()

        threading.Thread(target=work, name="agent", daemon=True).start()

    def begin(self, seat: Seat[Result], request: Request) -> Future[Completion]:
        """Begin a turn of an agent, in lockstep once all agents wait. Raises Dropped."""
        with self._changed:
            if seat.dropped:
                raise Dropped
            if self.shared:
                [seat.turn] = self.shared.start(request)
            else:
                seat.turn = Future()
                self._turns[seat.position] = request, seat.turn
                if self._at_rest():
                    self._changed.notify_all()
            return seat.turn

    def run(self, seat: Seat[Result], requests: Sequence[CallRequest]) -> Outcomes:
        """Execute calls of an agent, in lockstep once all agents wait. Raises Dropped."""
        answer = Future[Outcomes]()
        with self._changed:
            if seat.dropped:
                raise Dropped
            works = self._alive.get(seat.position) is seat and seat.position not in self._ended
            if self.lockstep and works:  # else a custom tool that was given up
                self._calls[seat.position] = requests, answer
                if self._at_rest():
                    self._changed.notify_all()
        return answer.result() if self.lockstep and works else self.sandboxes.run(requests)

    def release(self, seat: Seat[Result], rollout: int) -> Trace | Future[Trace]:
        """Release a rollout of an agent, in lockstep once all agents wait."""
        if self.shared:
            return self.shared.release(rollout)
        answer: Future[Trace | Future[Trace]] = Future()
        with self._changed:
            self._releases[seat.position] = rollout, answer
            self._changed.notify_all()
        return answer.result()

    def wait(self, seconds: float = math.inf) -> list[tuple[int, Result]]:
        """Wait until agents have ended, for about `seconds`. Return (position, result) of each, in order of position."""
        until = time.monotonic() + seconds
        while self._alive:
            with self._changed:
                left = None if until == math.inf else max(until - time.monotonic(), 0.0)
                if not self._changed.wait_for(self._at_rest if self.lockstep else lambda: self._ended, left):
                    break
                if self._releases:
                    for position in sorted(self._releases):
                        self._release(position)
                    continue
                if self._calls:
                    self._execute([self._calls[position] for position in sorted(self._calls)])
                    self._calls = {}
                    continue
                if self._ended:
                    ended, self._ended = sorted(self._ended.items()), {}
                    for position, _ in ended:
                        del self._alive[position]
                    return [(position, result.result()) for position, result in ended]
                for position in sorted(self._turns):
                    request, turn = self._turns.pop(position)
                    self.policy.submit(request)
                    self._under_way[request.rollout] = turn
            while not (completions := self.policy.step()):
                pass
            with self._changed:
                for completion in completions:
                    if completion.rollout in self._under_way:
                        settle(self._under_way.pop(completion.rollout), completion)
            if time.monotonic() > until:
                break
        return []

    def drop(self, *positions: int) -> None:
        """End agents and wait for them, all in one step of the policy; their results are lost. A missing agent is no error, since
        it may just have ended. Raises the first exception with which an agent ends."""
        seats = [self._alive[position] for position in positions if position in self._alive]
        with self._changed:
            for seat in seats:
                seat.dropped = True
                self._turns.pop(seat.position, None)
                if seat.position in self._calls:
                    self._calls.pop(seat.position)[1].cancel()
            turns = [seat.turn for seat in seats]
            self._under_way = {rollout: turn for rollout, turn in self._under_way.items() if turn not in turns}
        for seat in seats:
            for stop in seat.at_drop:
                stop()
            seat.turn.cancel()
        errors = []
        with self._changed:
            for position in [seat.position for seat in seats]:  # releases in lockstep come in this order
                while position not in self._ended:
                    if position in self._releases:
                        self._release(position)
                    else:
                        self._changed.wait()
                errors.append(self._ended.pop(position).exception())
                del self._alive[position]
        for error in errors:
            if not isinstance(error, Dropped | None):
                raise error

    def close(self) -> None:
        """End all live agents."""
        self.drop(*self.alive)
        if self.shared:
            self.shared.__exit__(None, None, None)

    def _execute(self, calls: Sequence[Calls]) -> None:
        """Answer calls of agents together, or one after the other if that fails."""
        try:
            outcomes = iter(self.sandboxes.run([request for requests, _ in calls for request in requests]))
        except Exception as error:  # raised again in the agent
            if len(calls) == 1:
                calls[0][1].set_exception(error)
                return
            for agent_calls in calls:
                self._execute([agent_calls])
            return
        for requests, answer in calls:
            answer.set_result([next(outcomes) for _ in requests])

    def _release(self, position: int) -> None:
        rollout, answer = self._releases.pop(position)
        try:
            answer.set_result(self.policy.release(rollout))
        except Exception as error:  # raised again in the agent
            answer.set_exception(error)

    def _at_rest(self) -> bool:
        waiting = len(self._turns) + len(self._calls) + len(self._releases) + len(self._under_way)
        return waiting + len(self._ended) == len(self._alive)


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
            yield from driver.wait()
    finally:
        driver.close()
