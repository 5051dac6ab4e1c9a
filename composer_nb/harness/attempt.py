"""An attempt: an agent's rollout and its grade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from composer_nb.harness.agent.tiny import Agent, Job
from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.calls import Executor
from composer_nb.harness.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout and the grade by the hidden tests."""

    task: Task
    rollout: Rollout
    grade: Grade


def attempt(agent: Agent, task: Task, rollout: int, release: Callable[[int], Trace]) -> Job[Attempt]:
    """Return the job of running an agent and grading what it left."""
    return lambda seat: graded(task, agent.run(task, rollout, release, seat), seat)


def graded(task: Task, done: Rollout, sandboxes: Executor) -> Attempt:
    """Grade a rollout of a task with the grader `functions`. A failure of the infrastructure is the grade `infra_error`."""
    grade = Grade(status="infra_error")
    if done.stop != "infrastructure":
        grade = grade_functions(task, done.files, sandboxes)
    return Attempt(task=task, rollout=done, grade=grade)
