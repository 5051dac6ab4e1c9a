"""The script of the production loop: the control deals verdicts out at random, and requests measure a withdrawal."""

import sys
from pathlib import Path

import pytest

from composer_nb.harness.tasks.task import load_tasks
from composer_nb.production.record import served
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "studies"))
import production_loop as script

START, FINAL = (EXAMPLES[0] / "weights" / name for name in ("start", "final"))
TASKS = EXAMPLES[0] / "data" / "heldout.jsonl"


@pytest.mark.parametrize("shuffled", [False, True])
def test_the_control_deals_the_same_verdicts_out_at_random(tmp_path: Path, shuffled: bool) -> None:
    tasks = load_tasks(TASKS)[:12]
    accepted = script.serve(FINAL, tasks, tmp_path / "cycle0", 0.0, Settings(), shuffled)
    attempts = served(tmp_path / "cycle0")
    judged = [attempts[f"user{number}"].grade.rewards["reward"] for number in range(len(tasks))]
    assert len(judged) == len(tasks) and 0 < sum(accepted) < len(tasks)
    assert sorted(judged) == sorted(accepted) and (judged == accepted) is not shuffled
