"""Grading again what is stored: the same files, the same plan, a fresh sandbox."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.grade import Grade
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.sandboxes.contract import Backend, SandboxSpec
from composer_nb.harness.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """A stored grade and a new one of the same files."""

    task_id: str
    before: Grade
    after: Grade

    @property
    def same(self) -> bool:
        """Whether they say the same: status, tests and flags. Costs may differ."""
        return self.before == self.after


def regrade(
    attempts: Iterable[Attempt],
    backend: Backend,
    tasks: Mapping[str, Task] | None = None,
    *,
    timeout_s: float = 60.0,
    spec: SandboxSpec | None = None,
) -> Iterator[Regraded]:
    """Grades what each attempt left once more, in order.

    Depends on nothing but the stored files and the tasks: the attempts' own, or those of the same ids in `tasks`, as when a task
    got another plan. Raises ValueError for a task of another grader.
    """
    for attempt in attempts:
        task = (tasks or {}).get(attempt.task.id, attempt.task)
        if task.grader != "pytest":
            raise ValueError(f"task {task.id}: its grader is {task.grader!r}, not 'pytest'")
        files = {path: text.encode("utf-8", "surrogateescape") for path, text in attempt.rollout.files.items()}
        after = grade_pytest(task, files, backend, timeout_s=timeout_s, spec=spec)
        yield Regraded(task_id=task.id, before=attempt.grade, after=after)
