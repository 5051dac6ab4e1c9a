"""The environment service: agents and their sandboxes in their own process, with a policy in another.

    dispatches ──▶ conversations, one thread each ──▶ graders ──▶ rollouts/finished ──▶ reports
                       ▲ turns of the engine             beside the conversations, so that slow tests hold up nobody

An environment worker drives its agents exactly as the plain loop does; only the policy is a proxy. It stores each graded rollout
before it reports its end. It does not import torch, so that many workers fit on a machine.
"""

import math
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from composer_nb.harness.agent.driver import Driver
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Environment, graded, rated
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.judge import rater_of
from composer_nb.harness.policy import ATTEMPT_STRIDE, Completion, Request, Trace
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.reap import FOLDER
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.services.actors import RemoteService
from composer_nb.trainer.services.finished import FinishedRollouts, RolloutName
from composer_nb.trainer.services.orchestrator import Alive, Dispatch, Faulted, Finished
from composer_nb.trainer.services.run_copy import local_run

# Distance between the numbers of a slot's first `group` members, of as many that a live change of `rl.group` adds, and so on.
BEYOND_STRIDE = 1 << 26
# What a worker reports; the coordinator, which has the clock, stamps it.
Report = Finished | Faulted | Alive


@dataclass(slots=True)
class EnginePair:
    """An engine and the environment worker that samples from it; they live and die together.

    Attributes:
        version: Version that the engine serves.
        state: `standby` once the engine has weights and the worker answers; `working` while it gets rollouts; `draining` when it
            gets no more.
        work: The worker's next reports, asked for at the time `since`, at first the time at which the pair was made.
        update: The engine's next version, asked for at the time `update_since`.
    """

    name: str
    engine: RemoteService
    worker: RemoteService
    version: int
    state: Literal["starting", "standby", "working", "draining"] = "starting"
    work: Future[Any] | None = None
    since: float = 0.0
    update: Future[Any] | None = None
    update_since: float = 0.0
    start: list[tuple[Dispatch, Task]] = field(default_factory=list)
    cancel: list[tuple[int, int]] = field(default_factory=list)
    _counted: float = field(default_factory=time.perf_counter)
    _reported: float = field(default_factory=time.perf_counter)
    _admitted: bool = False
    _without_s: float = 0.0

    @property
    def worker_name(self) -> str:
        """`environment-1` for `engine-1`."""
        return self.name.replace("engine", "environment")

    def update_waits(self, admitted: bool) -> None:
        """Count the time without rollouts, and record whether any is `admitted` from now on."""
        now = time.perf_counter()
        self._without_s += 0.0 if self._admitted else now - self._counted
        self._counted, self._admitted = now, admitted

    def waits(self, idle: float) -> dict[str, float]:
        """Split the engine's idle share of the time since its last report: without rollouts, and with some."""
        self.update_waits(self._admitted)
        without = min(idle, self._without_s / (self._counted - self._reported))
        self._reported, self._without_s = self._counted, 0.0
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
        completions: list[Completion] = self._engine.call("exchange", self._name, requests).result()
        return completions

    def release(self, rollout: int) -> Future[Trace]:
        self._requests.pop(rollout, None)
        return self._engine.call("release", rollout)


class EnvironmentService:
    """Agents with their sandboxes and a connection to one engine. `work` starts agents and reports those that have ended."""

    def __init__(
        self,
        run: Path,
        env: EnvSettings,
        limits: Limits,
        reward: RewardSettings,
        group: int,
        policy: tuple[RemoteService, str, int],
        lockstep: bool,
        store: str = "",
    ) -> None:
        """`group`: `rl.group` as the run began, which numbers rollouts. `policy`: see `RemotePolicy`. `store`:
        `services.store`. `lockstep`: `work` grades and reports each ended rollout at once, so that the number of ended ones
        does not depend on a clock, and one seed gives one result."""
        run = local_run(run, store)
        self._rater = rater_of(env, reward, limits.seconds)
        self._sandboxes = sandboxes = Sandboxes(env, run.name, run / FOLDER)
        # Their own, because those that call functions serve one batch at a time.
        self._grading_sandboxes = sandboxes if lockstep else Sandboxes(env, run.name, run / FOLDER)
        self._agent = agent = make_agent(env, load_tokenizer(run / "data", needed=()), limits, sandboxes)
        self._group, self._lockstep = group, lockstep
        self._driver: Driver[Attempt] = Driver(
            RemotePolicy(*policy), sandboxes.functions if agent.backend is None else sandboxes, lockstep
        )
        self._finished, self._graders = FinishedRollouts(run, store), ThreadPoolExecutor(policy[2], "grader")
        # Rollouts that wait for a seat, are in conversation since a time, and are graded, with their sampled tokens.
        self._waiting: list[tuple[int, RolloutName, Task]] = []
        self._conversations: dict[int, tuple[RolloutName, float]] = {}
        self._grading: dict[RolloutName, Future[Finished | Faulted]] = {}
        self._sampled: dict[RolloutName, int] = {}
        # Gradings that were given up and go on.
        self._in_vain: list[Future[Finished | Faulted]] = []
        self._most = env.sandboxes if env.boxed else math.inf

    def host(self) -> str:
        """Return the name of this host."""
        return socket.gethostname()

    def stop(self) -> None:
        """Close the sandboxes, which otherwise end with the process."""
        self._sandboxes.close()
        self._grading_sandboxes.close()

    def work(
        self, start: Sequence[tuple[Dispatch, Task]], cancel: Sequence[tuple[int, int]], seconds: float
    ) -> list[Report]:
        """Start dispatches at their tasks, give up cancelled ones (slot, attempt), and work for about `seconds`. Report the
        rollouts that ended, and the dispatches that made progress, or wait for room or a grader. Return at once without work.
        Raises TooManyBlocked."""
        deadline = time.monotonic() + seconds
        for dispatch, task in start:
            slot, attempt = dispatch.slot, dispatch.attempt
            first = (attempt - 1) * ATTEMPT_STRIDE + slot * self._group  # as in the plain loop at the first attempt
            for member in dispatch.members:
                number = first + member % self._group + member // self._group * BEYOND_STRIDE
                self._waiting.append((number, (slot, attempt, member), task))
        reports: list[Report] = [*self._give_up(set(cancel))]
        earlier = set(self._grading)
        while self._waiting or self._conversations or self._grading:
            under_way = self._conversations or self._grading or self._in_vain
            time_is_up = time.monotonic() >= deadline and under_way
            if time_is_up or (self._lockstep and reports):
                break
            while self._waiting and self._has_room():
                rollout, name, task = self._waiting.pop(0)
                self._conversations[rollout] = name, time.monotonic()
                self._driver.add(rollout, self._agent.attempt(task, rollout, graded=False))
            only_grades = not self._conversations or (self._lockstep and self._grading)  # for grades alone
            for rollout, ended in () if only_grades else self._driver.wait(max(0.0, deadline - time.monotonic())):
                name, start_s = self._conversations.pop(rollout)
                try:
                    functions = self._grading_sandboxes.functions if ended.task.grader == "functions" else None
                except SandboxFailure as slow:  # it is opened again for the next
                    slot, attempt, member = name
                    lost = Faulted(
                        slot=slot, attempt=attempt, member=member, reason=str(slow), sampled=ended.rollout.sampled
                    )
                    reports.append(lost)
                    continue
                env = self._agent.environment(functions)
                self._grading[name] = self._graders.submit(self._report, name, ended, env, start_s)
                self._sampled[name] = ended.rollout.sampled
            if self._lockstep or not self._conversations:
                left = max(0.0, deadline - time.monotonic())
                graders = list(self._grading.values()) or self._in_vain
                wait(graders, left, ALL_COMPLETED if self._lockstep else FIRST_COMPLETED)
            graded_names = [name for name, report in self._grading.items() if report.done()]
            if not self._lockstep or len(graded_names) == len(self._grading):
                reports += [self._grading.pop(name).result() for name in graded_names]
        self._sampled = {name: self._sampled[name] for name in self._grading}
        progressed, self._driver.moved = self._driver.moved, set()
        alive = {name[:2] for rollout, (name, _) in self._conversations.items() if rollout in progressed}
        alive |= {name[:2] for _, name, _ in self._waiting}
        alive |= {name[:2] for name, grade in self._grading.items() if not grade.running() and not grade.done()}
        reports += [Alive(slot=slot, attempt=attempt) for slot, attempt in sorted(alive)]
        for slot, attempt, member in () if self._lockstep else self._grading.keys() - earlier:
            reports.append(Alive(slot=slot, attempt=attempt, member=member))
        return reports

    def _has_room(self) -> bool:
        """Return whether a conversation may begin. Conversations and graders hold a sandbox each."""
        self._in_vain = [grading for grading in self._in_vain if not grading.done()]
        sandbox_count = len(self._conversations) + len(self._grading) + len(self._in_vain)
        return self._driver.room > 0 and sandbox_count < self._most

    def _report(self, name: RolloutName, ended: Attempt, env: Environment, start_s: float) -> Finished | Faulted:
        """Grade a rollout, store it, and return the report of its end."""
        attempt = rated(graded(ended, env), self._rater)
        identity = dict(zip(("slot", "attempt", "member"), name, strict=True))
        rollout, grade = attempt.rollout, attempt.grade
        if not grade.known:
            return Faulted(**identity, reason=grade.output or grade.status, sampled=rollout.sampled)
        self._finished.save(name, attempt)
        oldest_version = int(rollout.versions.min()) if len(rollout.versions) else 0
        seconds = time.monotonic() - start_s
        return Finished(**identity, oldest_version=oldest_version, sampled=rollout.sampled, seconds=seconds)

    def _give_up(self, cancelled: set[tuple[int, int]]) -> list[Faulted]:
        """Drop the rollouts of cancelled dispatches (slot, attempt), and return their reports."""
        if not cancelled:
            return []
        lost = {name: 0 for _, name, _ in self._waiting if name[:2] in cancelled}
        self._waiting = [waiting for waiting in self._waiting if waiting[1][:2] not in cancelled]
        dropped = [rollout for rollout, (name, _) in self._conversations.items() if name[:2] in cancelled]
        self._driver.drop(*dropped)
        lost |= {self._conversations.pop(rollout)[0]: 0 for rollout in dropped}
        for name in [name for name in self._grading if name[:2] in cancelled]:
            if not (grading := self._grading.pop(name)).cancel():
                self._in_vain.append(grading)
            lost[name] = self._sampled[name]
        return [Faulted(slot=s, attempt=a, member=p, reason="cancelled", sampled=n) for (s, a, p), n in lost.items()]
