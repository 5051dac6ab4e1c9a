"""Figures of the bench: rows that can be computed by hand, and the power that is promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from composer_nb.cli import main
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task
from composer_nb.production.bench import detectable, figures


def attempt(task: str, passed: bool, **grade: Any) -> Attempt:
    rollout = Rollout(task_id=task, segments=(), turns=(), files={}, stop="finished", counted=(9000, 1000), seconds=2.0)
    known = {"status": "graded", "tests": {"t": passed}} | grade
    made = Task.model_construct(id=task, grader="pytest", metadata={}, files={}, solution={})
    return Attempt(task=made, rollout=rollout, grade=Grade(**known))


def test_a_row_by_hand() -> None:
    rows = [attempt("a", True), attempt("a", True), attempt("b", True), attempt("b", False), attempt("c", False)]
    rows += [attempt("c", False, status="tampered", flags=("twin_passed",))]
    found = figures(rows, price=(0.5, 2.5))
    assert (found["pass_at_1"], found["best_of_k"], found["all_of_k"]) == pytest.approx((1 / 2, 2 / 3, 1 / 3))
    assert found["flagged"] == pytest.approx(1 / 6) and found["disqualified"] == ["c"]
    assert found["dollars_per_task"] == pytest.approx((9000 * 0.5 + 1000 * 2.5) / 1e6)
    assert figures(rows)["dollars_per_task"] is None


@pytest.mark.parametrize(("tasks", "samples", "spread"), [(50, 4, 0.0), (200, 2, 0.0), (100, 16, 0.2)])
def test_the_difference_that_shows_does_so_four_times_in_five(tasks: int, samples: int, spread: float) -> None:
    """The test is over tasks, as the bench's interval is; attempts are coins, whose differences vary most at a half, and gains
    differ from task to task."""
    rng, gain = np.random.default_rng(0), detectable(tasks, samples, spread)
    gains = gain + spread * rng.choice([-1, 1], (4000, tasks))
    one, other = (rng.binomial(samples, 0.5 + side * gains / 2) / samples for side in (1, -1))
    gains = one - other
    seen = np.abs(gains.mean(1)) > 1.96 * gains.std(1, ddof=1) / np.sqrt(tasks)
    assert seen.mean() == pytest.approx(0.8, abs=0.03)


def test_a_price_is_two_numbers(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for price in ("1", "a,b", "1,-2"):
        words = [
            "eval",
            "--policy",
            "scripted:lazy",
            "--tasks",
            "data/example/data/heldout.jsonl",
            "--out",
            str(tmp_path),
        ]
        assert main([*words, "--price", price]) == 2
        assert "--price" in capsys.readouterr().err
