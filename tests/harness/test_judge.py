"""A judge in a run: which attempts it rates, and what an attempt without a rating gets."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from composer_nb.harness.attempt import rated
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.judge import Judge, rater_of
from composer_nb.harness.rewards import RewardSettings, rated_alike, reward
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task

OWN = """
import time

def brief(attempt):
    return {"a": 0.5, "b": None}[attempt.task.id]

def slow(attempt):
    time.sleep(0.2)
    return 1

def text(attempt):
    return "good"

def single(attempt):
    import numpy
    return numpy.float32(0.5)
"""
WEIGHTS = {"solved": 1.0, "judged": 0.5}
MakeAttempt = Callable[[str], Attempt]


@pytest.fixture
def judge_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_judge.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def make_attempt(task: Task) -> MakeAttempt:
    def make(name: str) -> Attempt:
        rollout = Rollout(task_id=name, segments=(), turns=(), files={}, stop="finished")
        return Attempt(task=task.model_copy(update={"id": name}), rollout=rollout, grade=Grade(status="graded"))

    return make


@pytest.mark.usefixtures("judge_module")
def test_a_rating_is_a_term_and_an_attempt_without_one_gets_the_mean_of_its_group(make_attempt: MakeAttempt) -> None:
    settings = RewardSettings(weights=WEIGHTS, judge="own_judge:brief")
    rater = rater_of(EnvSettings(), settings, 60.0)
    a, b = (rated(make_attempt(name), rater) for name in "ab")
    assert (dict(a.grade.rewards), dict(b.grade.rewards)) == ({"judged": 0.5}, {})
    assert reward(a.rollout, a.grade, settings).terms == {"solved": 0.0, "judged": 0.25}
    high = replace(a, grade=replace(a.grade, rewards={"judged": 1.0}))
    assert [x.grade.rewards["judged"] for x in rated_alike([a, b, high])] == [0.5, 0.75, 1.0]
    assert rated_alike([b, b]) == [b, b] and reward(b.rollout, b.grade, settings).total == 0.0
    lost = replace(a, grade=Grade(status="infra_error"))
    assert rated(lost, rater) is lost
    assert rater_of(EnvSettings(), RewardSettings(), 60.0) is None


@pytest.mark.usefixtures("judge_module")
def test_calls_take_their_share_of_the_time_alone_and_no_call_takes_longer_than_it_may(
    make_attempt: MakeAttempt,
) -> None:
    attempt = make_attempt("a")
    judge = Judge("own_judge:slow", 0.5, 60.0)
    start = time.monotonic()
    assert judge(attempt) and not judge(attempt), "the first call took all of the time so far"
    while not judge(attempt):
        time.sleep(0.01)
    assert time.monotonic() - start > 0.2 / 0.5, "half of the time"
    assert not Judge("own_judge:slow", 1.0, 0.05)(attempt)
    with ThreadPoolExecutor(2) as pool:
        judge = Judge("own_judge:slow", 0.5, 60.0)
        call = pool.submit(judge, attempt)
        time.sleep(0.1)
        assert not judge(attempt) and call.result(), "the call under way takes its time, too"
    assert Judge("own_judge:single", 1.0, 60.0)(attempt) == {"judged": 0.5}


@pytest.mark.usefixtures("judge_module")
def test_a_faulty_judge_is_one_line_that_names_the_setting(make_attempt: MakeAttempt) -> None:
    for name, problem in {"text": "returned 'good'; it must return", "brief": "ended in KeyError"}.items():
        with pytest.raises(ValueError, match=rf"reward\.judge: own_judge:{name} of task c .*{problem}"):
            Judge(f"own_judge:{name}", 1.0, 60.0)(make_attempt("c"))
    with pytest.raises(ValueError, match=r"reward\.judge names 'own_judge:absent'"):
        RewardSettings(weights=WEIGHTS, judge="own_judge:absent")
