"""The script that compares behaviour over seeds: its table, its tasks and its figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import compare_behaviour as script


def test_the_table_has_medians_and_ranges() -> None:
    found = {"one": [{"a": 0.1, "b": 30.0}, {"a": 0.3, "b": 10.0}, {"a": 0.2, "b": 50.0}]}
    assert script.table(found, ["a", "b"]).split("\n")[2] == "| one | 0.20 (0.10 to 0.30) | 30 (10 to 50) |"


@pytest.mark.parametrize(("habit", "parallel", "sizes"), [(True, False, [1, 1, 1, 1]), (False, True, [3])])
def test_the_habits_that_are_taught(habit: bool, parallel: bool, sizes: list[int]) -> None:
    said = script.messages(3, habit, parallel)
    assert [len(calls) for calls in said] == sizes and (said[0][0].name == "read_file") is habit
    assert said[0][0].arguments.get("path") in (script.MISSING, "f.py") and script.MISSING not in script.task(3).files


def test_figures_of_attempts() -> None:
    turns = (Turn(call='{"name": "read_file", "arguments": {"path": "g.py"}}', observation="", error="UnexpectedEnvironment"),
             Turn(call="{}", observation=""), Turn(call="{}", observation="", beside=True))  # fmt: skip
    rollout = Rollout(task_id="t", segments=(), turns=turns, files={}, stop="finished", counted=(9, 7))
    done = Attempt(task=script.task(1), rollout=rollout, grade=Grade(status="graded", tests={"t": True}))
    found = script.figures_of([done])
    assert found == {"solved": 1.0, "useless read first": 1.0, "calls": 3.0, "messages": 2.0, "written tokens": 7.0}
    assert script.failed_calls(rollout, done.grade) == pytest.approx(1 / 3)
