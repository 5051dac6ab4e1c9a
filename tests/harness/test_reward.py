"""Rewards: the effort curve against its closed forms, and what terms a rollout gets."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.rewards import Effort, RewardSettings, effort_curve, reward
from composer_nb.harness.rollout import Kind, Rollout, Segment, Turn
from composer_nb.harness.terms.registry import TERMS, term

X = st.floats(0, 1e4)
K = st.floats(1e-3, 1e3)
PASSED = Grade(status="graded", tests={"t": True})
FAILED = Grade(status="graded", tests={"t": False})


def rollout(kinds: list[Kind] | None = None, turns: int = 2, invalid: int = 0, stop: str = "finished") -> Rollout:
    kind = np.array([int(token_kind) for token_kind in kinds or [Kind.PROMPT, Kind.TOOL_CALL]], np.uint8)
    blank = np.zeros(len(kind), np.int32)
    segment = Segment(token_ids=blank, kind=kind, logprob=blank.astype(np.float32), policy_version=blank)
    records = [Turn(call="{}", observation="", error="InvalidArguments" if n < invalid else None) for n in range(turns)]
    return Rollout(task_id="t", segments=(segment,), turns=tuple(records), files={}, stop=stop)


@given(x=X, k=K, sign=st.sampled_from([-1, 1]), near=st.sampled_from([1e-6, 1e-8, 1e-10, 1e-12]))
def test_the_curves_closed_forms(x: float, k: float, sign: int, near: float) -> None:
    """And it is continuous in q."""
    assert effort_curve(x, k, 0.0) == pytest.approx(x)
    assert effort_curve(x, k, near) == pytest.approx(x, rel=1e-4)
    assert effort_curve(x, k, 1.0) == pytest.approx(math.log1p(k * x) / k)
    assert effort_curve(x, k, 1 + sign * near) == pytest.approx(math.log1p(k * x) / k, rel=1e-4)
    assert effort_curve(x, k, 0.5) == pytest.approx(2 * (math.sqrt(1 + k * x) - 1) / k, rel=1e-6, abs=1e-9)
    assert effort_curve(x, k, 2.0) == pytest.approx(x / (1 + k * x))


@pytest.mark.parametrize(
    ("status", "total"), [("infra_error", None), ("invalid_task", None), ("tampered", 0.0), ("agent_failed", 0.0)]
)
def test_what_the_agent_did_to_its_grade_counts_and_what_says_nothing_of_it_does_not(
    status: Any, total: float | None
) -> None:
    grade = Grade(status=status, tests={"t.py::test_0": True})
    scored = reward(rollout(), grade, RewardSettings(weights={"solved": 1.0}, effort=Effort()))
    assert scored.total == total and (total is not None or scored.terms == {})


def test_effort_weighs_each_kind_of_token() -> None:
    kinds = [Kind.PROMPT] * 7 + [Kind.THINKING] + [Kind.TOOL_CALL] * 2 + [Kind.OBSERVATION] * 3
    kinds += [Kind.FINAL_MESSAGE] * 4 + [Kind.SUMMARY] * 5
    weights = {"thinking_tokens": 1.0, "tool_call_tokens": 10.0, "tool_output_tokens": 100.0}
    effort = Effort(**weights, final_message_tokens=1000.0, calls=1e5, turns=1e6)
    assert effort.of(rollout(kinds, turns=3)) == 1 + 20 + 300 + 4000 + 3e5 + 3e6


def test_a_reward_is_the_sum_of_its_terms() -> None:
    weights = {"solved": 2.0, "invalid_calls": -0.5, "unfinished": -0.25}
    settings = RewardSettings(weights=weights, effort=Effort(weight=0.1, turns=1.0))
    scored = reward(rollout(turns=4, invalid=1, stop="turns"), PASSED, settings)
    effort = -0.1 * effort_curve(4.0 + 0.01, 1.0, 0.5)
    assert scored.terms == {"solved": 2.0, "invalid_calls": -0.125, "unfinished": -0.25, "effort": effort}
    assert scored.total == pytest.approx(sum(scored.terms.values()))


def test_a_name_of_another_modules_term_is_refused_and_ones_own_can_be_written_again() -> None:
    def solved(candidate: Rollout, grade: Grade) -> float:
        return 5.0

    with pytest.raises(ValueError, match=r"a reward term 'solved' is registered by composer_nb\.harness\.rewards"):
        term(solved)
    assert TERMS["solved"](rollout(), FAILED) == 0.0
    solved_term = TERMS["solved"]
    assert term(solved_term) is solved_term, "a cell of a notebook runs twice"


@pytest.mark.parametrize("value", ["math.nan", "math.inf", "1 / 0", "'much'", "None"])
def test_a_term_that_fails_on_some_rollout_is_one_line_and_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    (tmp_path / "late_terms.py").write_text(f"import math\n\ndef late(r, g):\n    return {value} if r.turns else 0.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "late_terms", raising=False)
    settings = RewardSettings(weights={"solved": 1.0, "late_terms:late": 1.0})
    settings.tried()
    assert reward(rollout(turns=0), PASSED, settings).total == 1.0
    with pytest.raises(ValueError, match=r"reward\.weights: late_terms:late fails on a rollout of task t: ") as error:
        reward(rollout(), PASSED, settings)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="late_terms:late fails on a rollout of task t: "):
        settings.tried([(rollout(), PASSED)])
    for name, why in (("sovled", r"; registered terms: \[.*'solved'"), ("no.such:late", ", which cannot be imported")):
        with pytest.raises(ValueError, match=rf"reward\.weights names '{name}'{why}"):
            RewardSettings(weights={name: 1.0})
