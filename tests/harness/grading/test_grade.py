"""Grades: gold 1, nothing 0, only changes in scope, and only what a fresh sandbox said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.functions import parse_test_files
from composer_nb.harness.tasks.task import Task

Make = Callable[..., Any]


class Given:
    """Sandboxes with these outcomes, which note what they are asked."""

    def __init__(self, *outcomes: CallOutcome) -> None:
        self.outcomes, self.asked = outcomes, list[CallRequest]()

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        self.asked += requests
        return [self.outcomes]


def test_gold_passes_and_nothing_fails(task: Task, sandboxes: SandboxExecutor) -> None:
    gold = grade(task, task.files | task.solution, sandboxes)
    assert gold.passed and gold.status == "graded" and gold.flags == ()
    assert gold.tests == {f"test_hidden.py::test_{n}": True for n in range(3)}
    nothing = grade(task, task.files, sandboxes)
    assert not nothing.passed and nothing.status == "graded" and set(nothing.tests) == set(gold.tests)


def test_only_the_code_under_test_enters_the_sandbox(task: Task) -> None:
    files = task.files | task.solution | {"test_f.py": "evil", "conftest.py": "evil", "test_hidden.py": "evil"}
    inside = Given()
    grade_functions(task, files, inside)
    [request] = inside.asked
    assert dict(request.files) == task.solution
    assert request.arguments == tuple(test.arguments for test in parse_test_files(task.tests))
    assert "[9]" not in str(request)  # what the first test wants


@pytest.mark.parametrize(
    "change",
    [{"test_f.py": "x"}, {"test_f.py": None}, {"g.py": "x = 1"}, {"sitecustomize.py": "x"}, {"a/b.py": "x"}],
    ids=str,
)
def test_changes_outside_the_scope_are_dropped_and_flagged(
    task: Task, sandboxes: SandboxExecutor, change: dict[str, str | None]
) -> None:
    for inside, passed in ((task.solution, True), ({}, False)):
        wanted = task.files | inside | change
        files = {path: text for path, text in wanted.items() if text is not None}
        found = grade(task, files, sandboxes)
        assert found.passed is passed and found.flags == ("outside_scope",)


def test_a_file_of_the_scope_may_be_new(task: Task, sandboxes: SandboxExecutor) -> None:
    wide = task.model_copy(update={"source_scope": ("f.py", "new.py")})
    files = task.files | {"f.py": "from new import f\n", "new.py": task.solution["f.py"]}
    assert grade(wide, files, sandboxes) == Grade(
        status="graded", tests={f"test_hidden.py::test_{n}": True for n in range(3)}
    )
    assert not grade(task, files, sandboxes).passed


STATUSES = ["returned", "raised", "timeout", "died", "unreadable", "not_run"]


@settings(max_examples=100)
@given(data=st.data())
def test_a_test_passes_only_if_its_call_returned_the_value(task: Task, data: st.DataObject) -> None:
    tests = parse_test_files(task.tests)
    texts = st.sampled_from([test.expected for test in tests] + ["", "True", "[9 ]", "([9],)"])
    outcome = st.builds(CallOutcome, status=st.sampled_from(STATUSES), text=texts)  # type: ignore[arg-type]
    outcomes = tuple(data.draw(st.lists(outcome, max_size=5)))
    found = grade_functions(task, task.files, Given(*outcomes))
    assert list(found.tests) == [test.id for test in tests]
    for place, test in enumerate(tests):
        right = place < len(outcomes) and outcomes[place] == CallOutcome(status="returned", text=test.expected)
        assert found.tests[test.id] is right
    assert found.passed is all(found.tests.values())
