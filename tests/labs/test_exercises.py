"""The check of exercises tells right answers, unfinished ones and each usual mistake apart."""

import numpy as np
import pytest
import torch
from torch import Tensor

from composer_nb.labs.exercises.check import EXERCISES, check
from composer_nb.labs.exercises.exercise import Exercise


@pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
def test_each_usual_mistake_gets_its_own_hint(exercise: Exercise):
    assert exercise.judge(exercise.reference).state == "right"
    assert exercise.judge(lambda *arguments: None).state == "unfinished"
    hints = [" ".join((mistake.__doc__ or "").split()) for mistake in exercise.mistakes]
    judgements = [("wrong", f"not right yet. {hint}") for hint in hints]
    assert all(hints) and [exercise.judge(mistake) for mistake in exercise.mistakes] == judgements


def test_a_gradient_that_is_0_but_for_rounding_is_right():
    def gates(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
        chosen_NK = torch.take_along_dim(logits_NE.softmax(-1), experts_NK, 1)
        return chosen_NK / chosen_NK.sum(1, keepdim=True)

    assert EXERCISES["gates"].judge(gates).state == "right"


def test_other_mistakes_show_an_input_or_their_error_and_leave_the_package_s_function(
    capsys: pytest.CaptureFixture[str],
):
    def pass_at_k(n: int, passed: int, k: int) -> float:
        return passed / (k - 1)

    def misspelt() -> None: ...

    assert check(pass_at_k) is EXERCISES["pass_at_k"].reference
    assert "ZeroDivisionError" in capsys.readouterr().out
    always = EXERCISES["pass_at_k"].judge(lambda n, passed, k: 0.3)
    assert always.text == "not right yet. For (10, 3, 4)\nthe result is 0.3\ninstead of 0.8333333333333334."
    with pytest.raises(ValueError, match="no exercise is called 'misspelt'; the exercises are advantages, policy_loss"):
        check(misspelt)


def test_a_wrong_answer_without_a_hint_is_shown_in_words():
    unread = EXERCISES["unread_edits"].judge(lambda rollout, grade: 0.25).text
    assert unread.splitlines()[0].endswith("For search_replace a.py, read_file b.py, search_replace b.py")
    opposite = EXERCISES["twin"].judge(lambda source: source.replace("assert total([1, 2])", "assert [1, 2]"))
    assert "'same call': False" in opposite.text and "'same form': True" in opposite.text


def test_large_arrays_and_wrong_shapes_are_shown_as_shapes():
    text = EXERCISES["logit_gradient"].judge(lambda reward_BK, is_shown_BK, share_K: reward_BK).text
    arguments = "(an array of shape (32, 4), an array of shape (32, 4), array([0.2, 0.5, 0.8, 0.9]))"
    assert text == f"not right yet. For {arguments}\nthe result has shape (32, 4)\ninstead of (4,)."
    assert "it raises ValueError" in EXERCISES["logit_gradient"].judge(lambda *arguments: np.ones(2).reshape(3)).text


@pytest.mark.parametrize(("expected", "state"), [("4", "right"), ("-1", "right"), ("'4'", "wrong"), ("2 + 2", "wrong")])
def test_a_twin_expects_another_number(expected: str, state: str):
    assert EXERCISES["twin"].judge(lambda source: f"{source.split('==')[0]}== {expected}\n").state == state


def test_a_table_of_numbers_or_of_numpy_is_not_yet_right():
    visible = EXERCISES["visible"]
    for answer in (lambda n: visible.reference(n).int(), lambda n: visible.reference(n).numpy()):
        assert visible.judge(answer).text.startswith("not right yet. The entries are right.")
