"""The agent loop, written as a plain loop, and the driver that serves many of them in batches.

An agent is a generator: it yields a Request when it needs the policy and a CallRequest when it needs a sandbox, and is sent
the answer. `drive` runs any number of agents at a time against one policy and one sandbox fleet. So the loop has no
concurrency in it, and the batching knows nothing about agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from composer_nb.harness.execute import Executor
from composer_nb.harness.policy import Completion, Policy, ProviderFailure, Request, Trace
from composer_nb.harness.render import CompactRenderer, call_json
from composer_nb.harness.rollout import Kind, Rollout, Transcript, Turn
from composer_nb.harness.sandbox import CallOutcome, CallRequest, SandboxFailure
from composer_nb.harness.task import Task
from composer_nb.harness.tools import ToolError, ToolSet, Workspace

Result = TypeVar("Result")
Answer = Completion | tuple[CallOutcome, ...] | SandboxFailure | ProviderFailure
Steps = Generator[Request | CallRequest, "Completion | tuple[CallOutcome, ...]", Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a rollout ends at the latest. Raises ValueError for a limit that is not above 0."""

    turns: int = 12
    """Calls a rollout; the last one ends it whatever it was."""
    turn_tokens: int = 64
    """Tokens a turn; a longer one is cut and counts as an invalid call."""
    tokens: int = 384
    """Tokens a rollout, read and written."""
    seconds: float = 300.0
    """Wall-clock time a rollout."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True)
class Agent:
    """Runs a task with a tool set under limits."""

    renderer: CompactRenderer
    tools: ToolSet = field(default_factory=ToolSet.tiny)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic

    def run(self, task: Task, rollout: int, release: Callable[[int], Trace]) -> Steps[Rollout]:
        """The loop: ask the policy for a call, carry it out, show the observation, until the agent finishes or a limit
        is reached. An invalid call is answered with an error and stays in the rollout. Raises ValueError for a task whose
        prompt leaves no room to answer."""
        workspace = Workspace(files=dict(task.files), visible_tests=task.visible_tests)
        transcript, start = Transcript(), self.clock()
        turns: list[Turn] = []
        news, stop = self.renderer.prompt(task.instruction), "turns"
        if len(news) >= self.limits.tokens:
            raise ValueError(
                f"task {task.id}: its prompt has {len(news)} tokens, and limits.tokens={self.limits.tokens}"
            )
        transcript.read(news, Kind.PROMPT)
        try:
            while len(turns) < self.limits.turns:
                room = min(self.limits.turn_tokens, self.limits.tokens - len(transcript.token_ids))
                try:
                    completion = yield Request(rollout=rollout, token_ids=news, max_tokens=room)
                except ProviderFailure:
                    stop = "infrastructure"
                    break
                assert isinstance(completion, Completion) and len(completion.token_ids) <= room
                transcript.wrote(completion, [Kind.TOOL_CALL] * len(completion.token_ids))
                try:
                    turn, ends = yield from self._carry_out(completion, workspace)
                except SandboxFailure:
                    stop = "infrastructure"
                    break
                turns.append(turn)
                news = self.renderer.observation(turn.observation)
                if ends:
                    stop = "finished"
                    break
                if len(turns) == self.limits.turns:
                    break
                if len(transcript.token_ids) + len(news) >= self.limits.tokens:
                    stop = "tokens"
                    break
                if self.clock() - start > self.limits.seconds:
                    stop = "time"
                    break
                transcript.read(news, Kind.OBSERVATION)
        finally:  # also when the driver closes the agent: the policy must not keep what nobody will continue
            trace = release(rollout)
        return Rollout(
            task_id=task.id, segments=(transcript.segment(trace),), turns=tuple(turns), files=workspace.files, stop=stop
        )

    def _carry_out(self, completion: Completion, workspace: Workspace) -> Steps[tuple[Turn, bool]]:
        written = self.renderer.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        try:
            call = self.renderer.parse_call(completion.token_ids)
            written = call_json(call)
            tool = self.tools.get(call)
            observation = yield from tool.run(workspace, call.arguments)
        except ToolError as error:
            return Turn(call=written, observation=f"error: {error}", error=error.kind), False
        turn = Turn(
            call=written,
            observation=observation.text,
            tests_passed=observation.tests_passed,
            tests_run=observation.tests_run,
        )
        return turn, tool.ends


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
