"""The study of remedies: gains by task, and the tokens that open a turn."""

import numpy as np
import pytest

from composer_nb.harness.rollout import Kind, Segment
from composer_nb.trainer.settings import Settings, override
from scripts.studies.remedies import REMEDIES, gains, surprise


def test_gains_are_paired_by_task_and_seeds_that_share_a_task_are_one_gain() -> None:
    first = [{"a": [0.25, 0.5], "b": [0.5, 1.0]}, {"a": [0.0, 0.0]}]
    second = [{"b": [1.0, 1.0], "a": [0.5, 0.25]}, {"a": [0.5, 1.0]}]
    by_task, seeds = gains(first, second)
    assert by_task.tolist() == [[37.5, 37.5], [50, 0]] and seeds.tolist() == [[37.5, -12.5], [50, 100]]


def test_a_turn_opens_where_the_policy_begins_to_write() -> None:
    kind = np.array([Kind.PROMPT, *[Kind.TOOL_CALL] * 2, Kind.OBSERVATION, *[Kind.TOOL_CALL] * 3], np.uint8)
    logprob = -np.arange(7, dtype=np.float32)
    segment = Segment(token_ids=np.arange(7), kind=kind, logprob=logprob, policy_version=np.zeros(7, np.int32))
    assert surprise([segment, segment]) == ([1, 4, 1, 4], [2, 5, 6, 2, 5, 6])


@pytest.mark.parametrize("name", REMEDIES)
def test_every_remedy_is_a_fork_of_the_default(name: str) -> None:
    changed = override(Settings(), {"data.rl_tasks": 10_400, **REMEDIES[name]})
    fixed = ("seed", "data", "env", "tokenizer", "model", "optimizer", "midtrain", "extend", "sft", "limits", "eval")
    plain = override(Settings(), {"data.rl_tasks": 10_400})
    assert all(getattr(changed, group) == getattr(plain, group) for group in fixed)
