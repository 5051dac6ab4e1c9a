"""The studies of behaviour: what of a step's push lies in groups of one outcome, and what judges terms of reward."""

from dataclasses import replace

import pytest

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.tools.tool_call import call
from composer_nb.trainer.learning.loss import LossSettings
from scripts.studies import compare_terms
from scripts.studies.compare_behaviour import GROUP, played, push_of_equals, task


def test_the_deviation_gives_a_hundredth_in_a_solved_group_the_weight_of_success() -> None:
    """Of two groups one differs in one message more, worth a hundredth, and the other in one success."""
    effort = Effort(weight=-0.01, q=0.0, turns=1.0, thinking_tokens=0.0, tool_call_tokens=0.0, final_message_tokens=0.0)
    rewards = RewardSettings(weights={"solved": 1.0}, effort=effort)
    one = Turn(call="{}", observation="")
    short = Rollout(task_id="t", segments=(), turns=(one,), files={}, stop="finished")
    kinds = [((one, one), True), *[((one,), True)] * GROUP, *[((one,), False)] * (GROUP - 1)]
    attempts = [
        Attempt(task=task(0), rollout=replace(short, turns=turns), grade=Grade(status="graded", tests={"t": passed}))
        for turns, passed in kinds
    ]
    assert push_of_equals(attempts, (rewards, LossSettings())) == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert push_of_equals(attempts, (rewards, LossSettings(std_norm=True))) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "lint", "style", "lines"),
    [
        ("return x + 8", 0.0, 0.0, 1.0),
        ("y = x - 8\n    return x + 8", 0.5, 0.0, 1.25),
        ("y = x + 8\n    return y", 0.0, 0.5, 1.25),
    ],
    ids=compare_terms.STYLES,
)
def test_terms_are_judged_by_what_they_do_not_know(text: str, lint: float, style: float, lines: float) -> None:
    """Of an easy task and one beyond repair, both changed and both said to pass, one passes; each repair has its own fault."""
    edits = [("return x - 8", text), ("x -", "x +")]
    talks = [
        [turn([call("substitute", path="f.py", old=old, new=new)]), Said(text=compare_terms.PASS)] for old, new in edits
    ]
    with Sandboxes() as sandboxes:
        agent = compare_terms.reporting_agent()
        attempts = played(agent, sandboxes, talks, lambda number: compare_terms.repair(9 + 2 * number))
    assert compare_terms.measures(attempts) == {
        "solved": 1.0,
        "tested": 0.0,
        "claims where solved": 1.0,
        "false claims": 1.0,
        "lint": lint,
        "style": style,
        "lines": lines,
    }
