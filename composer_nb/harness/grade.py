"""Grading: what the hidden tests say of the files that an agent left.

Never where the agent worked: the agent's changes, restricted to the task's source scope, are laid over a pristine copy of
the workspace, which runs in a fresh sandbox. A test that gives no result is a failure. An infrastructure fault is no result at
all: it raises SandboxFailure, and the grade says `infra_error`.

Here is what a grade is, and the grader `functions`, whose expected values stay outside the sandbox (`functions.py`). The grader
`pytest` is `grading/pytest_grader.py`, `script` `grading/script_grader.py`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from composer_nb.harness.calls import CallOutcome, CallRequest
from composer_nb.harness.functions import parse_test_files
from composer_nb.harness.task import Task
from composer_nb.harness.tools import passes, request_tests

Status = Literal["graded", "tampered", "agent_failed", "infra_error", "invalid_task", "ungraded"]
"""graded: the tests ran, and what is missing failed. tampered: something made tests pass that no right answer passes, or spoke in
the tests' stead. agent_failed: the agent's code ended the sandbox that it was tested in. infra_error, invalid_task: the sandbox,
or the task, is at fault, so nothing is known of the agent's work. ungraded: work on a user's repository, which has no hidden
tests; what the user made of it is kept beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What the tests said. `tests` maps each hidden test's id to passed or not; it is empty where no test could be run."""

    status: Status
    tests: Mapping[str, bool] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Things a person should look at: `outside_scope` (a change that was dropped); of the other graders, also what
    `pytest_grader.py` and `script_grader.py` list."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of the grader `script`: the numbers that its script wrote."""
    cost: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What the grade took: `wall_s` and `tests_s`, by the host's clock and the runner's. Two grades that differ in nothing else
    are equal."""

    @property
    def known(self) -> bool:
        """Whether it says something of the agent's work."""
        return self.status in ("graded", "tampered", "agent_failed")

    @property
    def passed(self) -> bool:
        return self.status == "graded" and bool(self.tests) and all(self.tests.values())


def grading(task: Task, files: Mapping[str, str]) -> Generator[CallRequest, tuple[CallOutcome, ...], Grade]:
    """Yields the one execution that a grade needs and returns the grade. Raises ValueError for a task of another grader."""
    if task.grader != "functions":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, which is no function call")
    changed = {path for path in {*files, *task.files} if files.get(path) != task.files.get(path)}
    graded = dict(task.files)
    for path in task.source_scope:
        graded.pop(path, None)
        if path in files:
            graded[path] = files[path]
    tests = parse_test_files(task.tests)
    outcomes = yield request_tests(graded, tests)
    results = {test.id: False for test in tests}
    results |= {test.id: passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=False)}
    flags = ("outside_scope",) if changed - set(task.source_scope) else ()
    return Grade(status="graded", tests=results, flags=flags)
