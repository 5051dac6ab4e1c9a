"""The controls of the tour: fresh contexts, by hand."""

from __future__ import annotations

import pytest

from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from scripts.studies.measure_tour import restarted

TASK = Task(
    id="a",
    instruction="x",
    files={},
    tests={"t.py": "from f import f\n\n\ndef test_0():\n    assert f(1) == 1\n"},
    source_scope=("f.py",),
)


def tried(calls: int, accepted: bool, solved: bool) -> Attempt:
    """An attempt of `calls` calls: reads, and a test whose outcome is `accepted`."""
    read = Turn(call=ToolCall(name="read_file", arguments={"path": "f.py"}).json, observation="")
    test = Turn(
        call=ToolCall(name="run_tests", arguments={}).json, observation="", tests_passed=int(accepted), tests_run=1
    )
    rollout = Rollout(task_id="a", segments=(), turns=(*[read] * (calls - 1), test), files={}, stop="finished")
    return Attempt(task=TASK, rollout=rollout, grade=Grade(status="graded", tests={"t.py::test_0": solved}))


RIGHT, LONG, FOOLED, GIVEN_UP = (
    tried(5, True, True),
    tried(9, True, True),
    tried(5, True, False),
    tried(3, False, False),
)


@pytest.mark.parametrize(
    ("tries", "patience", "share"),
    [
        ([RIGHT], 4, 0.0),  # cut off before it is done
        ([LONG, RIGHT], 6, 1.0),  # 6 calls of the first, then 5
        ([LONG, RIGHT], 8, 0.5),  # 4 are left for the second, too few
        ([FOOLED, RIGHT], 6, 0.5),  # the visible tests pass: nobody begins anew
        ([GIVEN_UP, GIVEN_UP, GIVEN_UP, RIGHT], 6, 0.75),  # 9 calls of three leave too few, once
    ],
)
def test_what_has_not_passed_its_tests_is_begun_anew(tries: list[Attempt], patience: int, share: float) -> None:
    assert restarted(tries, patience) == share
