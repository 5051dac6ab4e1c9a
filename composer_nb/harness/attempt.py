"""An attempt: an agent's rollout and its grade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer_nb.harness.agent.loop import Steps
from composer_nb.harness.agent.tiny import Agent
from composer_nb.harness.grading.grade import Grade, grading
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.contract import SandboxFailure
from composer_nb.harness.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout and what the hidden tests said of it."""

    task: Task
    rollout: Rollout
    grade: Grade


def attempt(agent: Agent, task: Task, rollout: int, release: Callable[[int], Trace]) -> Steps[Attempt]:
    """Run the agent, then grade what it left. A fault of the infrastructure in either is a grade of `infra_error`."""
    return (yield from graded(task, agent.run(task, rollout, release)))


def graded(task: Task, steps: Steps[Rollout]) -> Steps[Attempt]:
    """Run a rollout of a task with the grader `functions`, then grade what it left."""
    done = yield from steps
    grade = Grade(status="infra_error")
    if done.stop != "infrastructure":
        try:
            grade = yield from grading(task, done.files)
        except SandboxFailure:
            pass
    return Attempt(task=task, rollout=done, grade=grade)
