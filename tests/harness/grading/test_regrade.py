"""Stored attempts, graded again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from composer_nb.harness.attacks.patch_target import FAULTY, MODULE, RIGHT, TARGET
from composer_nb.harness.attacks.snippets import ANSWER, module
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.grade import Grade
from composer_nb.harness.grading.plan import Plan, digest, with_plan
from composer_nb.harness.grading.regrade import regrade
from composer_nb.harness.rollout import Rollout, Segment
from composer_nb.harness.sandboxes.contract import Backend
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.task import Task

EMPTY = Segment(
    token_ids=np.zeros(0, np.int32),
    kind=np.zeros(0, np.uint8),
    logprob=np.zeros(0, np.float32),
    policy_version=np.zeros(0, np.int32),
)
TEXTS = {"right": RIGHT, "faulty": FAULTY, "hostile": module(answer=ANSWER["frame_peek"])}


def attempt(task: Task, text: str, grade: Grade) -> Attempt:
    rollout = Rollout(task_id=task.id, segments=(EMPTY,), turns=(), files=task.files | {MODULE: text}, stop="finished")
    return Attempt(task=task, rollout=rollout, grade=grade)


@pytest.fixture
def ledger(plans: Mapping[str, Plan]) -> Task:
    return with_plan(TARGET, plans[TARGET.id])


def test_a_stored_attempt_is_graded_from_its_files_alone(ledger: Task, backend: Backend) -> None:
    stored = [
        unpack_attempt(pack_attempt(attempt(ledger, text, Grade(status="infra_error"))), ledger)
        for text in TEXTS.values()
    ]
    found = list(regrade(stored, backend))
    assert [each.after.status for each in found] == ["graded", "graded", "tampered"]
    assert [each.after.passed for each in found] == [True, False, False] and not any(each.same for each in found)
    again = regrade([attempt(ledger, RIGHT, found[0].after)], backend)
    assert next(again).same


def test_another_plan_may_be_given(ledger: Task, backend: Backend) -> None:
    plain = with_plan(TARGET, Plan(digest=digest(TARGET), tests={}))
    [found] = regrade([attempt(ledger, RIGHT, Grade(status="graded"))], backend, {plain.id: plain})
    assert found.after.tests == {} and found.task_id == "ledger"


def test_attempts_of_another_grader_are_refused(ledger: Task, backend: Backend) -> None:
    other = ledger.model_copy(update={"grader": "functions"})
    with pytest.raises(ValueError, match="its grader is 'functions'"):
        next(regrade([attempt(other, RIGHT, Grade(status="graded"))], backend))


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_twenty_regrades_are_identical(ledger: Task, backend: Backend, name: str) -> None:
    [first] = regrade([attempt(ledger, TEXTS[name], Grade(status="infra_error"))], backend)
    stored = attempt(ledger, TEXTS[name], first.after)
    assert [each.same for each in regrade([stored] * 20, backend)] == [True] * 20
