"""Agents with the tools of tiny models, and the driver that serves many of them in batches."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.loop import conversation
from composer_nb.harness.agent.turns import Limits, Speaker, TokenSpeaker
from composer_nb.harness.policy import Completion, Policy, Request, Trace
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.calls import CallOutcome, CallRequest, Executor
from composer_nb.harness.sandbox.contract import SandboxFailure
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tiny import Workspace
from composer_nb.harness.tools.toolset import ToolSet

__all__ = ["Agent", "Driver", "Job", "Limits", "Seat", "drive", "play"]
Result = TypeVar("Result")
Job = Callable[["Seat[Any]"], Result]
"""The work of one agent, in a thread of its own; it asks its seat."""
Answer = Completion | tuple[CallOutcome, ...] | BaseException


@dataclass(frozen=True, slots=True)
class Agent:
    """Runs a task with a tool set under limits."""

    renderer: CompactRenderer
    tools: ToolSet = field(default_factory=ToolSet.tiny)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic

    def run(self, task: Task, rollout: int, release: Callable[[int], Trace], seat: Seat[Any]) -> Rollout:
        """Run the loop against a policy that continues tokens. Raises ValueError for a prompt that leaves no room to answer."""
        size, most = len(self.renderer.prompt(task.instruction)), self.limits.tokens
        if size >= most:
            raise ValueError(f"task {task.id}: its prompt has {size} tokens, and limits.tokens={most}")
        speaker = TokenSpeaker(self.renderer, rollout, self.limits, seat.ask, release)
        return play(task, speaker, self.tools, self.limits, seat, self.clock)


def play(
    task: Task,
    speaker: Speaker,
    tools: ToolSet,
    limits: Limits,
    sandboxes: Executor,
    clock: Callable[[], float] = time.monotonic,
) -> Rollout:
    """Run the loop in a workspace of plain files."""
    workspace = Workspace(files=dict(task.files), visible_tests=task.visible_tests, sandboxes=sandboxes)
    try:
        done = conversation(task.instruction, speaker, tools, workspace, limits, clock=clock)
    finally:  # also when the driver drops the agent: the policy must not keep a rollout that will not continue
        segment = speaker.close()
    if done.stop == "interrupted":
        raise KeyboardInterrupt
    counted = (0, 0) if len(segment.token_ids) else (done.read, done.written)
    return replace(done.rollout(task.id, segment, workspace.files), counted=counted, seconds=0.0)


class Dropped(BaseException):
    """Raised in an agent that is no longer wanted, at its next request."""


class Seat(Generic[Result]):
    """One agent in its thread, and its way to the policy and the sandboxes that it shares with others.

    The agent and its driver take turns: while one works the other waits, so the order of everything is the driver's.
    """

    def __init__(self, job: Job[Result]) -> None:
        self._asked: SimpleQueue[Request | CallRequest | Future[Result]] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(job,), name="agent", daemon=True)

    def ask(self, request: Request, until: float = math.inf) -> Completion:
        """Return the next turn of a rollout. Raises ProviderFailure. For the agent."""
        return self._answer(request)

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Execute calls. Raises SandboxFailure. For the agent."""
        return [self._answer(request) for request in requests]

    def start(self) -> Request | CallRequest | Future[Result]:
        """Run the agent until it asks or ends. For the driver, like all that follows."""
        self._thread.start()
        return self._asked.get()

    def resume(self, answer: Answer) -> Request | CallRequest | Future[Result]:
        """Answer the agent, and run it until it asks again or ends."""
        self._answers.put(answer)
        return self._asked.get()

    def close(self) -> None:
        """End the agent at its request. Raises what it raises on its way out."""
        if self._thread.ident is None:  # it never began
            return
        ended = self.resume(Dropped())
        while not isinstance(ended, Future):  # it was not waited for
            ended = self._asked.get()
        if not isinstance(error := ended.exception(), Dropped | None):
            raise error

    def _answer(self, request: Request | CallRequest) -> Any:
        self._asked.put(request)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _work(self, job: Job[Result]) -> None:
        ended: Future[Result] = Future()
        try:
            ended.set_result(job(self))
        except BaseException as error:  # raised again where the driver runs
            ended.set_exception(error)
        self._asked.put(ended)


class Driver(Generic[Result]):
    """Agents under way against one policy and one sandbox fleet.

    In each round everything that wants a sandbox shares one batch, then every agent that waits for the policy shares one step
    of it. The order of rounds depends on nothing but what was added when, so one seed gives one result.
    """

    def __init__(self, policy: Policy, sandboxes: Executor) -> None:
        """Raises ValueError for a policy without capacity."""
        if policy.capacity < 1:
            raise ValueError(f"the policy holds {policy.capacity} rollouts at a time; at least 1 is needed")
        self.policy, self.sandboxes = policy, sandboxes
        self._alive: dict[int, Seat[Result]] = {}
        self._names: dict[int, int] = {}  # rollout -> position of its agent
        self._executions: list[tuple[int, CallRequest]] = []
        self._results: list[tuple[int, Result]] = []

    @property
    def room(self) -> int:
        """Agents that may be added now."""
        return self.policy.capacity - len(self._alive)

    @property
    def alive(self) -> list[int]:
        """Positions of the agents under way."""
        return list(self._alive)

    def add(self, position: int, job: Job[Result]) -> None:
        """Start an agent under a name of the caller's, which comes back with its result."""
        seat = self._alive[position] = Seat(job)
        self._take(position, seat.start())

    def round(self) -> list[tuple[int, Result]]:
        """Serve all agents once. Returns (position, result) of the agents that ended."""
        while self._executions:
            batch, self._executions = self._executions, []
            outcomes = _execute(self.sandboxes, [request for _, request in batch])
            for (position, _), outcome in zip(batch, outcomes, strict=True):
                if position in self._alive:
                    self._take(position, self._alive[position].resume(outcome))
        for completion in self.policy.step():
            position = self._names.pop(completion.rollout)
            self._take(position, self._alive[position].resume(completion))
        results, self._results = self._results, []
        return results

    def drop(self, position: int) -> None:
        """Close an agent under way; its result is lost. One that is not there is no error: it may just have ended."""
        if seat := self._alive.pop(position, None):
            self._names = {rollout: place for rollout, place in self._names.items() if place != position}
            seat.close()

    def close(self) -> None:
        """Close every agent still alive."""
        for position in self.alive:
            self.drop(position)

    def _take(self, position: int, request: Request | CallRequest | Future[Result]) -> None:
        if isinstance(request, Future):
            del self._alive[position]
            self._results.append((position, request.result()))
        elif isinstance(request, Request):
            self._names[request.rollout] = position
            self.policy.submit(request)
        else:
            self._executions.append((position, request))


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
