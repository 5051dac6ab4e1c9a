"""What RL could find: the verdicts, and the gate before training."""

from collections.abc import Callable
from typing import Any

import pytest

from composer_nb.harness.files import write_json
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Trace
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.rollout import Rollout, Transcript, Turn
from composer_nb.harness.tasks.task import Task
from composer_nb.trainer.headroom import headroom, run_headroom
from composer_nb.trainer.recipe.launch import settle, start_or_resume
from composer_nb.trainer.recipe.reader import open_run
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import from_dict, override, to_dict

EDIT, TEST = '{"name": "edit_line"}', '{"name": "run_tests"}'


@pytest.fixture
def task() -> Task:
    tests = {"t.py": "from f import f\n\n\ndef test_0():\n    assert f(1) == 1\n"}
    return Task(id="a", instruction="x", files={}, tests=tests, source_scope=("f.py",))


def attempt(task: Task, *tests: int, solved: bool) -> Attempt:
    """An attempt with an edit before each test; each test passes so many of two."""
    edit, turns, segments = Turn(call=EDIT, observation="ok"), list[Turn](), (Transcript().segment(Trace()),)
    for passed in tests:
        turns += [edit, Turn(call=TEST, observation="", tests_passed=passed, tests_run=2)]
    rollout = Rollout(task_id=task.id, segments=segments, turns=tuple(turns), files={}, stop="finished")
    return Attempt(task=task, rollout=rollout, grade=Grade(status="graded", tests={"a": solved}))


@pytest.mark.parametrize(
    ("attempts", "live", "verdict"),
    [
        ([((2,), False), ((2,), False)], 0.0, "nothing to find: the 2 attempts at each task earn the same reward"),
        ([((2,), True), ((2,), False)], 1.0, "no attempt edits again after a failed test"),
        ([((0, 2), True), ((2,), False)], 1.0, "recovery 1.00: tests and further tries can pay"),
        ([((0, 0), False), ((2,), True)], 1.0, "recovery 0.00 is below 0.15: RL will probably unlearn testing"),
    ],
)
def test_the_verdict(task: Task, attempts: list[tuple[tuple[int, ...], bool]], live: float, verdict: str) -> None:
    sampled = [attempt(task, *tests, solved=solved) for tests, solved in attempts]
    report = headroom(sampled, sampled[:1], RewardSettings())
    assert report["live"] == live and verdict in report["verdict"]
    assert report["gain"] == report["best_of_k"] - report["pass_at_1"]
    assert report["nothing"] == (live == 0)


def test_an_environment_with_a_reward_of_its_own_need_not_solve_tasks(task: Task) -> None:
    attempts = [attempt(task, *tests, solved=False) for tests in ((2,), (2, 2))]
    report = headroom(attempts, attempts[:1], RewardSettings(), lambda rollout, grade: float(len(rollout.turns)))
    assert report["live"] and not report["nothing"] and "only the environment's own reward" in report["verdict"]


def test_a_run_tells_its_headroom(tiny_run: Any) -> None:
    report = build_report(tiny_run)
    assert report["headroom"] == run_headroom(open_run(tiny_run.path))
    assert "headroom" not in report["eval"]["start"]
    assert {"recovery", "filtered_best_of", "live", "verdict"} <= set(report["headroom"])
    with pytest.raises(ValueError, match="nobody has not been evaluated"):
        run_headroom(tiny_run, "nobody")


def test_the_recipe_refuses_rl_that_has_nothing_to_find(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]) -> None:
    run = copy_of(tiny_run)
    with run.connect() as db:
        db.execute("DELETE FROM stage WHERE name IN ('rl', 'eval_final', 'numerics')")
        for table in ("checkpoint", "step"):
            db.execute(f"DELETE FROM {table} WHERE stage = 'rl'")
    with_gate = override(from_dict(run.settings()), {"rl.gate": True})
    write_json(run.path / "settings.json", to_dict(with_gate))
    with pytest.raises(ValueError, match=r"^RL has nothing to find but other terms of the reward.*rl\.gate=false$"):
        start_or_resume(run.path, say=lambda line: None)
    assert run.finished("rl") is None
    settle(run, override(with_gate, {"rl.gate": False}))
    assert not from_dict(run.settings()).rl.gate, "so it may be resumed"
