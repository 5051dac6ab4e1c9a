"""A baseline per phase, against its definition and the group's mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.policy import Trace
from composer_nb.harness.rollout import Kind, Rollout, Segment, Turn
from composer_nb.trainer.learning.phases import PRIOR, failures_before, phase_advantages, token_phases

GROUPS = st.lists(
    st.lists(st.tuples(st.floats(-1, 1), st.integers(0, 4)), min_size=2, max_size=6), min_size=1, max_size=4
)


def split(groups: list[list[tuple[float, int]]]) -> tuple[list[list[float]], list[list[int]]]:
    return [[r for r, _ in group] for group in groups], [[n for _, n in group] for group in groups]


@given(groups=GROUPS)
def test_the_phases_of_a_rollout_sum_to_its_reward_less_the_mean(groups: list[list[tuple[float, int]]]) -> None:
    rewards, last = split(groups)
    for group, phases, found in zip(rewards, last, phase_advantages(rewards, last), strict=True):
        assert [len(each) for each in found] == [n + 1 for n in phases]
        for reward, each in zip(group, found, strict=True):
            assert sum(each) == pytest.approx(reward - np.mean(group))


def test_without_failed_tests_it_is_the_groups_mean() -> None:
    assert phase_advantages([[1.0, 0.0, 0.0, 1.0]], [[0, 0, 0, 0]]) == [[[0.5], [-0.5], [-0.5], [0.5]]]


def test_the_try_that_mends_has_the_credit_and_the_one_before_the_blame() -> None:
    [[mended, gave_up, *_]] = phase_advantages([[1.0, 0.0, 1.0, 1.0]], [[1, 1, 0, 0]])
    value = (1.0 + PRIOR * (0.75 - 0.25)) / (2 + PRIOR)
    assert mended == pytest.approx([value - 0.75, 1.0 - value]) and mended[0] < 0 < mended[1]
    assert gave_up == pytest.approx([value - 0.75, 0.0 - value])


def test_tokens_belong_to_the_phase_of_their_message() -> None:
    edit = '{"name": "edit_line"}'
    turns = (
        Turn(call='{"name": "run_tests"}', observation="", tests_passed=0, tests_run=2),
        Turn(call=edit, observation="ok"),
        Turn(call='{"name": "run_tests"}', observation="", tests_passed=1, tests_run=2, beside=True),
        Turn(call='{"name": "undo"}', observation="ok"),
        Turn(call='{"name": "run_tests"}', observation="", tests_passed=2, tests_run=2, beside=True),
        Turn(call='{"name": "finish"}', observation=""),
    )
    kinds = [Kind.PROMPT] + ([Kind.TOOL_CALL] * 2 + [Kind.OBSERVATION] * 3) * 3 + [Kind.TOOL_CALL]
    size = len(kinds)
    segment = Segment(
        token_ids=np.zeros(size, np.int32),
        kind=np.array(kinds, np.uint8),
        logprob=np.zeros(size, np.float32),
        policy_version=np.zeros(size, np.int32),
        trace=Trace(),
    )
    rollout = Rollout(task_id="a", segments=(segment,), turns=turns, files={}, stop="finished")
    assert failures_before(rollout) == [0, 1, 2, 2]
    [phases] = token_phases(rollout)
    assert phases.tolist() == [0, *[0] * 5, *[1] * 5, *[2] * 5, 2]


def piece(*kinds: Kind) -> Segment:
    blank = np.zeros(len(kinds), np.int32)
    kind = np.array(kinds, np.uint8)
    return Segment(token_ids=blank, kind=kind, logprob=blank.astype(np.float32), policy_version=blank)


def test_phases_go_on_over_segments_and_a_summary_belongs_to_the_message_before_it() -> None:
    failed = Turn(call='{"name": "run_tests"}', observation="", tests_passed=0, tests_run=2)
    turns = (
        failed,
        failed,
        Turn(call='{"name": "read"}', observation=""),
        Turn(call='{"name": "finish"}', observation=""),
    )
    call, seen, prompt = Kind.TOOL_CALL, Kind.OBSERVATION, Kind.PROMPT
    segments = (
        piece(prompt, call, seen, prompt, Kind.THINKING, Kind.SUMMARY),
        piece(prompt, call, call, seen, prompt, Kind.SUMMARY),
        piece(prompt, call, seen, call),
    )
    rollout = Rollout(task_id="a", segments=segments, turns=turns, files={}, stop="finished")
    assert failures_before(rollout) == [0, 1, 2, 2]
    found = [phases.tolist() for phases in token_phases(rollout)]
    assert found == [[0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1], [1, 2, 2, 2]]
    assert [segment.reused for segment in segments] == [1, 2, 0]
