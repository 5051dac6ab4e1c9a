"""The studies of behaviour: what of a step's push lies in groups that are solved, or failed, as a whole."""

from dataclasses import replace

import pytest

from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rewards import Effort, RewardSettings
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.trainer.learning.loss import LossSettings
from scripts.studies.compare_behaviour import GROUP, push_of_equals, task


def test_the_deviation_gives_a_hundredth_in_a_solved_group_the_weight_of_success() -> None:
    """Of two groups one differs in one message more, worth a hundredth, and the other in one success."""
    effort = Effort(weight=-0.01, q=0.0, turns=1.0, thinking_tokens=0.0, tool_call_tokens=0.0, final_message_tokens=0.0)
    rewards = RewardSettings(weights={"solved": 1.0}, effort=effort)
    turn = Turn(call="{}", observation="")
    short = Rollout(task_id="t", segments=(), turns=(turn,), files={}, stop="finished")
    kinds = [((turn, turn), True), *[((turn,), True)] * GROUP, *[((turn,), False)] * (GROUP - 1)]
    attempts = [
        Attempt(task=task(0), rollout=replace(short, turns=turns), grade=Grade(status="graded", tests={"t": passed}))
        for turns, passed in kinds
    ]
    assert push_of_equals(attempts, (rewards, LossSettings())) == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert push_of_equals(attempts, (rewards, LossSettings(std_norm=True))) == pytest.approx(0.5, rel=1e-3)
