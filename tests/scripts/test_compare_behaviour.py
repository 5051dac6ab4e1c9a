"""The script that compares behaviour over seeds: its table, its tasks and its figures."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
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


def test_the_demonstrations_of_effort_solve_and_differ_in_words() -> None:
    with Sandboxes() as sandboxes:
        agent = make_agent(EnvSettings(), script.TOKENIZER, Limits(turns=12, turn_tokens=96, tokens=512), sandboxes)
        rows = script.told(agent, sandboxes, Random(3), 60)  # refuses one that fails
    written = [int((row.weight == 1.0).sum()) for row in rows]
    for odd in (0, 1):
        assert max(written[odd::2]) > 2 * min(written[odd::2])
    assert {script.either(n).id.partition("-")[0] for n in (4, 5)} == {"add", "either"}


def test_only_a_test_says_which_sign_is_wrong() -> None:
    for number in range(1, 20, 2):
        hard = script.either(number)
        assert hard.instruction == "fix f.py: one sign"
        wrong = [hard.files["f.py"].replace(*signs) for signs in script.SIGNS.values()]
        assert hard.solution["f.py"] in wrong and len(set(wrong)) == 2 and hard.files["f.py"] not in wrong
