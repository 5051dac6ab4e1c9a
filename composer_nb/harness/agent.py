"""The agent loop, written as a plain loop, and the driver that serves many of them in batches.

An agent is a generator: it yields a Request when it needs the policy and a CallRequest when it needs a sandbox, and is sent
the answer. `drive` runs any number of agents at a time against one policy and one sandbox fleet. So the loop has no
concurrency in it, and the batching knows nothing about agents.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TypeVar

import numpy as np

from composer_nb.harness.execute import Executor
from composer_nb.harness.policy import Completion, Policy, Request, Trace
from composer_nb.harness.render import CompactRenderer, call_json
from composer_nb.harness.rollout import Kind, Rollout, Segment, Turn
from composer_nb.harness.sandbox import CallOutcome, CallRequest, SandboxFailure
from composer_nb.harness.task import Task
from composer_nb.harness.tools import ToolError, ToolSet, Workspace

Result = TypeVar("Result")
Answer = Completion | tuple[CallOutcome, ...] | SandboxFailure
Steps = Generator[Request | CallRequest, "Completion | tuple[CallOutcome, ...]", Result]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a rollout ends at the latest. Raises ValueError for a limit that is not above 0."""

    turns: int = 9
    """Calls a rollout; the last one ends it whatever it was."""
    turn_tokens: int = 64
    """Tokens a turn; a longer one is cut and counts as an invalid call."""
    tokens: int = 288
    """Tokens a rollout, read and written."""
    seconds: float = 300.0
    """Wall-clock time a rollout."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"limits.{name} must be above 0, not {value!r}")


@dataclass(slots=True)
class _Transcript:
    """Token streams under construction."""

    token_ids: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)

    def read(self, token_ids: list[int], kind: Kind) -> None:
        self._add(token_ids, kind, [0.0] * len(token_ids), [-1] * len(token_ids))

    def wrote(self, completion: Completion, kind: Kind) -> None:
        self._add(completion.token_ids, kind, completion.logprobs, completion.policy_versions)

    def _add(self, token_ids: list[int], kind: Kind, logprob: list[float], version: list[int]) -> None:
        self.token_ids += token_ids
        self.kind += [int(kind)] * len(token_ids)
        self.logprob += logprob
        self.version += version

    def segment(self, trace: Trace) -> Segment:
        return Segment(
            token_ids=np.array(self.token_ids, np.int32),
            kind=np.array(self.kind, np.uint8),
            logprob=np.array(self.logprob, np.float32),
            policy_version=np.array(self.version, np.int32),
            trace=trace,
        )


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
        transcript, start = _Transcript(), self.clock()
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
                completion = yield Request(rollout=rollout, token_ids=news, max_tokens=room)
                assert isinstance(completion, Completion) and len(completion.token_ids) <= room
                transcript.wrote(completion, Kind.TOOL_CALL)
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


def drive(agents: Iterable[Steps[Result]], policy: Policy, sandboxes: Executor) -> Iterator[tuple[int, Result]]:
    """Runs agents, at most `policy.capacity` at a time, and yields (position, result) as each ends.

    In each round every agent that waits for the policy shares one step of it, then everything that wants a sandbox shares
    one batch. The order of rounds depends on nothing but the inputs, so one seed gives one result. When the caller stops
    early, the agents still alive are closed.

    Raises ValueError for a policy without capacity.
    """
    if policy.capacity < 1:
        raise ValueError(f"the policy holds {policy.capacity} rollouts at a time; at least 1 is needed")
    queue = enumerate(agents)
    alive: dict[int, Steps[Result]] = {}
    names: dict[int, int] = {}  # rollout -> position of its agent
    executions: list[tuple[int, CallRequest]] = []

    def advance(position: int, answer: Answer | None) -> Result | None:
        agent = alive[position]
        try:
            if isinstance(answer, SandboxFailure):
                request = agent.throw(answer)
            else:
                request = next(agent) if answer is None else agent.send(answer)
        except StopIteration as stop:
            del alive[position]
            return stop.value
        if isinstance(request, Request):
            names[request.rollout] = position
            policy.submit(request)
        else:
            executions.append((position, request))
        return None

    try:
        more = True
        while more or alive:
            results: list[tuple[int, Result]] = []
            while more and len(alive) < policy.capacity:
                following = next(queue, None)
                more = following is not None
                if following is not None:
                    alive[following[0]] = following[1]
                    _collect(results, following[0], advance(following[0], None))
            while executions:
                batch, executions = executions, []
                outcomes = _execute(sandboxes, [request for _, request in batch])
                for (position, _), outcome in zip(batch, outcomes, strict=True):
                    _collect(results, position, advance(position, outcome))
            for completion in policy.step():
                position = names[completion.rollout]
                _collect(results, position, advance(position, completion))
            yield from results
    finally:
        for agent in alive.values():
            agent.close()


def _execute(sandboxes: Executor, requests: list[CallRequest]) -> list[tuple[CallOutcome, ...] | SandboxFailure]:
    """Runs a batch. A batch that fails is tried request by request, so that a fault hits only those that it concerns."""
    try:
        return list(sandboxes.run(requests))
    except SandboxFailure as failure:
        if len(requests) == 1:
            return [failure]
    return [_execute(sandboxes, [request])[0] for request in requests]


def _collect(results: list[tuple[int, Result]], position: int, result: Result | None) -> None:
    if result is not None:
        results.append((position, result))
