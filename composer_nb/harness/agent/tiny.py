"""Agents with the tools of tiny models, and the driver that serves many of them in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.loop import Steps, conversation
from composer_nb.harness.agent.turns import Limits, Speaker, TokenTurns
from composer_nb.harness.policy import Completion, Policy, ProviderFailure, Request, Trace
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.calls import CallOutcome, CallRequest, Executor
from composer_nb.harness.sandbox.contract import SandboxFailure
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tiny import Workspace
from composer_nb.harness.tools.toolset import ToolSet

__all__ = ["Agent", "Driver", "Limits", "Steps", "drive", "play"]
Result = TypeVar("Result")
Answer = Completion | tuple[CallOutcome, ...] | SandboxFailure | ProviderFailure


@dataclass(frozen=True, slots=True)
class Agent:
    """Runs a task with a tool set under limits."""

    renderer: CompactRenderer
    tools: ToolSet = field(default_factory=ToolSet.tiny)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic

    def run(self, task: Task, rollout: int, release: Callable[[int], Trace]) -> Steps[Rollout]:
        """Run the loop against a policy that continues tokens. Raises ValueError for a prompt that leaves no room to answer."""
        size, most = len(self.renderer.prompt(task.instruction)), self.limits.tokens
        if size >= most:
            raise ValueError(f"task {task.id}: its prompt has {size} tokens, and limits.tokens={most}")
        speaker = TokenTurns(self.renderer, rollout, self.limits, release)
        return (yield from play(task, speaker, self.tools, self.limits, self.clock))


def play(
    task: Task, speaker: Speaker, tools: ToolSet, limits: Limits, clock: Callable[[], float] = time.monotonic
) -> Steps[Rollout]:
    """Run the loop in a workspace of plain files."""
    workspace = Workspace(files=dict(task.files), visible_tests=task.visible_tests)
    try:
        done = yield from conversation(task.instruction, speaker, tools, workspace, limits, clock=clock)
    finally:  # also when the driver closes the agent: the policy must not keep what nobody will continue
        segment = speaker.close()
    if done.stop == "interrupted":
        raise KeyboardInterrupt
    return Rollout(
        task_id=task.id,
        segments=(segment,),
        turns=done.turns,
        files=workspace.files,
        stop=done.stop,
        counted=(0, 0) if len(segment.token_ids) else (done.read, done.written),
    )


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
        self._alive: dict[int, Steps[Result]] = {}
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

    def add(self, position: int, agent: Steps[Result]) -> None:
        """Starts an agent under a name of the caller's, which comes back with its result."""
        self._alive[position] = agent
        self._advance(position, None)

    def round(self) -> list[tuple[int, Result]]:
        """Serves everybody once. Returns (position, result) of the agents that ended."""
        while self._executions:
            batch, self._executions = self._executions, []
            outcomes = _execute(self.sandboxes, [request for _, request in batch])
            for (position, _), outcome in zip(batch, outcomes, strict=True):
                if position in self._alive:
                    self._advance(position, outcome)
        for completion in self.policy.step():
            self._advance(self._names.pop(completion.rollout), completion)
        results, self._results = self._results, []
        return results

    def drop(self, position: int) -> None:
        """Closes an agent under way; its result is lost. One that is not there is no error: it may just have ended."""
        if agent := self._alive.pop(position, None):
            self._names = {rollout: place for rollout, place in self._names.items() if place != position}
            agent.close()

    def close(self) -> None:
        """Closes every agent still alive."""
        for position in self.alive:
            self.drop(position)

    def _advance(self, position: int, answer: Answer | None) -> None:
        agent = self._alive[position]
        try:
            if isinstance(answer, SandboxFailure | ProviderFailure):
                request = agent.throw(answer)
            else:
                request = next(agent) if answer is None else agent.send(answer)
        except StopIteration as stop:
            del self._alive[position]
            self._results.append((position, stop.value))
            return
        if isinstance(request, Request):
            self._names[request.rollout] = position
            self.policy.submit(request)
        else:
            self._executions.append((position, request))


def drive(agents: Iterable[Steps[Result]], policy: Policy, sandboxes: Executor) -> Iterator[tuple[int, Result]]:
    """Runs agents, at most `policy.capacity` at a time, and yields (position, result) as each ends. When the caller stops
    early, the agents still alive are closed. Raises ValueError for a policy without capacity."""
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
    """Runs a batch. A batch that fails is tried request by request, so that a fault hits only those that it concerns."""
    try:
        return list(sandboxes.run(requests))
    except SandboxFailure as failure:
        if len(requests) == 1:
            return [failure]
    return [_execute(sandboxes, [request])[0] for request in requests]
