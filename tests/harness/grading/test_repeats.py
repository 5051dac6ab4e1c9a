"""The same tree of the same task is graded once; nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from composer_nb.harness.grading import front
from composer_nb.harness.grading.check import check_task
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import GradePlan, digest, with_plan
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET

CLEAN = Grade(status="graded", tests={"a": True}, cost={"wall_s": 9.0})


class Counted:
    """Stands for the grader: counts what it is asked, and answers what it is told."""

    def __init__(self, *answers: Grade) -> None:
        self.answers, self.asked = list(answers), 0

    def __call__(self, *_: Any) -> Grade:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


class Named:
    name = "bwrap"

    def create(self) -> None: ...


def files(task: Task, **changed: str) -> dict[str, bytes]:
    return {path: text.encode() for path, text in (task.files | changed).items()}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(front, "_known", type(front._known)())

    def use(*answers: Grade) -> Counted:
        grader = Counted(*answers)
        monkeypatch.setattr(front, "grade_pytest", grader)
        return grader

    return use


def one(task: Task = TARGET, left: Mapping[str, bytes] | None = None, name: str = "bwrap") -> Grade:
    backend: Any = Named()
    backend.name = name
    return grade(task, files(task) if left is None else left, backend)


def test_the_same_tree_is_graded_once_and_says_so(ask: Any) -> None:
    grader = ask(CLEAN)
    first, second = one(), one(left=files(TARGET) | {"__pycache__/ledger.pyc": b"never graded"})
    assert grader.asked == 1 and first == second
    assert "repeats" not in first.cost and second.cost["repeats"] == 1 and second.cost["wall_s"] != first.cost["wall_s"]


@pytest.mark.parametrize(
    "other",
    [
        {"left": files(TARGET, **{MODULE: RIGHT})},
        {"left": files(TARGET) | {"util/more.py": b""}},
        {"left": {path: data for path, data in files(TARGET).items() if path != "util/__init__.py"}},
        {"left": files(TARGET) | {"outside.py": b""}},
        {"task": TARGET.model_copy(update={"id": "another"})},
        {"task": TARGET.model_copy(update={"tests": TARGET.tests | {"tests/test_more.py": ""}})},
        {"task": TARGET.model_copy(update={"metadata": {"pytest.plan": "another"}})},
        {"task": TARGET.model_copy(update={"files": TARGET.files | {"conftest.py": ""}})},
        {"name": "docker"},
    ],
)
def test_another_tree_or_task_is_graded_anew(ask: Any, other: dict[str, Any]) -> None:
    grader = ask(CLEAN)
    one()
    one(**other)
    assert grader.asked == 2


@pytest.mark.parametrize(
    "unclean",
    [
        Grade(status="infra_error"),
        Grade(status="agent_failed", tests={"a": False}, flags=("ended_early",)),
        Grade(status="invalid_task"),
        Grade(status="tampered", tests={"a": False}, flags=("twin_passed",)),
        Grade(status="graded", tests={"a": False}, flags=("inconsistent",)),
        Grade(status="graded", tests={"a": False}, flags=("timeout",)),
    ],
)
def test_what_chance_or_the_machine_decided_is_not_remembered(ask: Any, unclean: Grade) -> None:
    grader = ask(unclean, CLEAN)
    assert (one(), one(), one()) == (unclean, CLEAN, CLEAN) and grader.asked == 2


def test_a_real_grade_is_looked_up(backend: Backend, plans: Mapping[str, GradePlan]) -> None:
    task = with_plan(TARGET, plans[TARGET.id])
    right, wrong = files(task, **{MODULE: RIGHT + "# once\n"}), files(task)
    first, again, other = (grade(task, left, backend) for left in (right, right, wrong))
    assert first == again and first.passed and again.cost["repeats"] == 1 and not other.passed


def test_a_check_runs_the_tests_again(ask: Any) -> None:
    """`tasks check` compares two runs, and would never find a difference between a run and what was remembered of it."""
    backend: Any = Named()
    task = with_plan(TARGET, GradePlan(digest=digest(TARGET), tests={"a": "a"})).model_copy(
        update={"solution": {MODULE: RIGHT}}
    )
    failed = Grade(status="graded", tests={"a": False})
    grader = ask(CLEAN, failed, failed, failed)
    row = check_task(task, backend)
    assert grader.asked == 4 and row["problem"] == "two runs gave different results: a" and not row["repeatable"]
