"""The RL stage without services: the loop of `rl.py` on the recipe's ranks, with each batch sampled from the newest weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent, rewarded
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Policy
from composer_nb.harness.rewards import Term
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.ranks import release_memory
from composer_nb.trainer.models.variants import as_engine
from composer_nb.trainer.prompts import Order, prompt_order
from composer_nb.trainer.recipe.evaluate import evaluate_model
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.batches import batch_file, save_batch
from composer_nb.trainer.rl import Batch, Scored, reinforce, scores_line, time_is_up
from composer_nb.trainer.services.services import hinter_of, learn_batch, make_learner


def reinforcement(s: Stages) -> None:
    """Run reinforcement learning from `start`. Publish `final` and the version before it."""
    with s.stage("rl") as info:
        if info is None:
            return
        work = InProcess(s)
        reinforce(work)
        work.save(work.step)
        info |= {"seconds_before": work.before, "versions": work.version, "stopped_early": work.stopped_early}
        s.publish(work.learner.model, "final")


class InProcess:
    """The `Services` of one process, or of ranks that each sample a share of the batch and learn together."""

    def __init__(self, s: Stages) -> None:
        self.stages, self.settings, self.ranks = s, s.settings, s.ranks
        self.learner, self.step, self.before = make_learner(s.run, s.settings)
        self.hinter = hinter_of(s.run, s.settings)
        self.tasks = prompt_order(s.run.path, Order.of(s.settings))
        self._points: list[tuple[int, dict[str, Any]]] = []
        self._ledgers: list[tuple[int, dict[str, int]]] = []
        self._start = self._begin = time.perf_counter()
        self._lr = 0.0
        self.stopped_early = False

    @property
    def version(self) -> int:
        """Number of optimizer steps so far."""
        return self.step * self.settings.rl.minibatches

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self._start

    def past(self) -> list[dict[str, Any]]:
        return self.stages.run.steps("rl")

    def take(self) -> Batch | None:
        """Sample this rank's share of the next batch. Every rank stops at the same step."""
        s, rl = self.stages, self.settings.rl
        seconds = max(self.ranks.gather(self.seconds))
        if self.step < rl.steps and rl.max_seconds and seconds > rl.max_seconds:
            self.stopped_early = True
            self.say(time_is_up(rl.max_seconds, self.step, rl.steps))
        if self.step >= rl.steps or self.stopped_early:
            return None
        self._begin, self._lr = time.perf_counter(), rl.rate(self.step, seconds)
        release_memory()  # of the step before, which a large model has no room for beside an engine
        slots = range(self.step * rl.prompts, (self.step + 1) * rl.prompts)[self.ranks.rank :: self.ranks.world]
        sampler = as_engine(self.learner.model, self.settings.engine.numerics)
        engine = s.engine(sampler, seed=self.settings.sampling_seed, version=self.version)
        tasks = {slot: self.tasks[slot] for slot in slots}
        reward_function = self.settings.env.reward_function(self.settings.limits.seconds)
        groups, lost = sample_groups(engine, s.agent(), tasks, rl.group, s.sandboxes, reward_function)
        return Batch(step=self.step, groups=groups, lost=lost)

    def keep(self, batch: Batch, groups: list[list[Scored]]) -> None:
        save_batch(batch_file(self.stages.run.path, batch.step, self.ranks.rank), groups)

    def learn(self, batch: Batch, streams: list[Stream]) -> dict[str, Any]:
        sampled = time.perf_counter()
        streams = [stream for part in self.ranks.gather(streams) for stream in part]
        waited = time.perf_counter()
        release_memory()
        if streams or not self.step:
            self.stages.publish(self.learner.model, "before_final")
        train_metrics = learn_batch(self.learner, streams, self.ranks, self.settings, self.step, self._lr)
        self.step += 1
        now = time.perf_counter()
        clock = {"sample_s": sampled - self._begin, "wait_s": waited - sampled, "train_s": now - waited}
        mean = {name: total / self.ranks.world for name, total in self.ranks.sums(clock).items()}
        return {**train_metrics, "version": self.version, "time": {"wall_s": now - self._begin, **mean}}

    def evaluate(self, batch: Batch, metrics: dict[str, Any]) -> dict[str, float]:
        scores = {}
        for name, temperature in (("tune_pass_at_1", 1.0), ("tune_greedy", 0.0)):
            attempts = evaluate_model(self.stages, self.learner.model, self.stages.tasks("tune"), 1, temperature)
            scores[name] = float(np.mean([attempt.grade.passed for attempt in attempts]))
        self.say(scores_line(batch.step + 1, scores))
        return scores

    def record(self, batch: Batch, point: dict[str, Any], tokens: dict[str, int]) -> None:
        """Log the metrics; they become durable with the next checkpoint."""
        self._points.append((self.step, point))
        self._ledgers.append((self.step, tokens))
        if self.ranks.first:
            self.stages.run.log("rl", self.step, point)

    def save(self, step: int) -> None:
        if self.ranks.first and self._points:
            state = self.learner.optimizer.state()
            self.stages.run.commit("rl", step, state, self._points, self._ledgers, self.seconds)
        self._points, self._ledgers = [], []

    def say(self, line: str) -> None:
        if self.ranks.first:
            self.stages.say(line)


TRIES = 3
"""How often an attempt is dispatched before its loss to infrastructure faults stops the run."""


def sample_groups(
    policy: Policy, agent: Agent, tasks: Mapping[int, Task], group: int, executor: Executor, custom: Term | None = None
) -> tuple[Sequence[Sequence[Attempt]], int]:
    """Return `group` attempts at each task, and the number of attempts lost to infrastructure faults.

    `tasks` are keyed by their place in the order of the run's prompts, which numbers the rollouts and thus determines their
    draws. A lost attempt is dispatched again, up to `TRIES` times in all. Raises SandboxFailure after that, because a batch
    without the attempt would be biased.
    """
    order = [(slot * group + sample, task) for slot, task in tasks.items() for sample in range(group)]
    attempts: dict[int, Attempt] = {}
    lost = 0
    for _ in range(TRIES):
        missing = [number for number in range(len(order)) if number not in attempts]
        runs = (rewarded(agent.attempt(order[number][1], order[number][0]), custom) for number in missing)
        results = [(missing[index], result) for index, result in drive(runs, policy, executor)]
        attempts |= {number: result for number, result in results if result.grade.known}
        faults = [result.grade.output or result.grade.status for _, result in results if not result.grade.known]
        lost += len(faults)
        if len(attempts) == len(order):
            return [[attempts[i] for i in range(at, at + group)] for at in range(0, len(order), group)], lost
    raise SandboxFailure(
        f"{len(order) - len(attempts)} attempts got no grade in {TRIES} tries, the last {faults[-1]!r}; run `composer-nb doctor`"
    )
