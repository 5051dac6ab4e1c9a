"""Grading: what the hidden tests say of the files that an agent left.

Never where the agent worked: the agent's changes, restricted to the task's source scope, are laid over a pristine copy of
the workspace, which runs in a fresh sandbox. The expected values stay outside (`functions.py`). A test that gives no result
is a failure. An infrastructure fault is no result at all: it raises SandboxFailure, and the grade says `infra_error`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from composer_nb.harness.calls import CallOutcome, CallRequest
from composer_nb.harness.functions import parse_test_files
from composer_nb.harness.task import Task
from composer_nb.harness.tools import passes, request_tests

Status = Literal["graded", "infra_error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """What the tests said. `tests` maps each hidden test's id to passed or not; it is empty unless `status` is graded."""

    status: Status
    tests: Mapping[str, bool] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Things a person should look at: `outside_scope` (a change that was dropped)."""

    @property
    def passed(self) -> bool:
        return self.status == "graded" and bool(self.tests) and all(self.tests.values())


def grading(task: Task, files: Mapping[str, str]) -> Generator[CallRequest, tuple[CallOutcome, ...], Grade]:
    """Yields the one execution that a grade needs and returns the grade."""
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
