"""The script that makes both published failures: its requests, what each arm judges, and its figure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.sandbox.calls import SandboxExecutor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
import production_failures as script


def test_one_number_of_a_request_is_right() -> None:
    [_, _, task, _] = script.requests("seed", 4)
    numbers = task.instruction.partition("add ")[2].split(" or ")
    assert len(numbers) == 4
    with SandboxExecutor() as executor:
        tried = [
            grade(task, {**task.files, "f.py": task.files["f.py"].replace("+ 0", f"+ {n}")}, executor) for n in numbers
        ]
        assert sum(each.passed for each in tried) == 1 and not grade(task, task.files, executor).passed


def attempt(turn: Turn, passed: bool = False) -> Attempt:
    task = script.requests("seed", 1)[0]
    rollout = Rollout(task_id=task.id, segments=(), turns=(turn,), files={}, stop="finished")
    return Attempt(task=task, rollout=rollout, grade=Grade(status="graded", tests={"t": passed}))


EDIT = Turn(call='{"name": "substitute", "arguments": {}}', observation="ok")
BROKEN = Turn(call="", observation="bad call", error="InvalidArguments")
ASK = Turn(call='{"name": "finish", "arguments": {}}', observation="")


@pytest.mark.parametrize(
    ("arm", "rewards"),
    [
        ("all judged", [1.0, -1.0, -1.0, -1.0]),
        ("broken dropped", [1.0, -1.0, -1.0]),
        ("asks unjudged", [1.0, -1.0, -1.0, 0.0]),
    ],
)
def test_an_arm_changes_what_is_judged(arm: str, rewards: list[float]) -> None:
    done = [attempt(EDIT, passed=True), attempt(EDIT), attempt(BROKEN), attempt(ASK)]
    assert [each.grade.rewards["reward"] for _, each in script.judged(done, script.ARMS[arm])] == rewards


def test_a_picture_of_two_seeds() -> None:
    row = {f"{what} at {n}": 0.5 for what in ("edits", "broken") for n in script.CHOICES}
    assert script.figure({arm: [[row, row]] * 2 for arm in script.ARMS}).png()[1:4] == b"PNG"
