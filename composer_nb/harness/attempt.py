"""An attempt: an agent's rollout and its grade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer_nb.harness.agent import Agent, Steps
from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.grade import Grade, grading
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout and what the hidden tests said of it."""

    task: Task
    rollout: Rollout
    grade: Grade


def attempt(agent: Agent, task: Task, rollout: int, release: Callable[[int], Trace]) -> Steps[Attempt]:
    """Runs the agent, then grades what it left. A fault of the infrastructure in either is a grade of `infra_error`."""
    done = yield from agent.run(task, rollout, release)
    grade = Grade(status="infra_error")
    if done.stop != "infrastructure":
        try:
            grade = yield from grading(task, done.files)
        except SandboxFailure:
            pass
    return Attempt(task=task, rollout=done, grade=grade)
