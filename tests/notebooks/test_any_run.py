"""No notebook fails because of what a run found: runs that went to an extreme are read like any other."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from extremes import cut_off, execute, has_no_new_structures, pays_for_nothing, ran_out_of_time, solves

from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.views.report import last_update

SOLVED = "everything solved"
EXTREMES: dict[str, Callable[[RunDir], None]] = {
    "nothing solved": lambda run: solves(run, False),
    SOLVED: lambda run: solves(run, True),
    "all groups dead": pays_for_nothing,
    "cut off": cut_off,
}
SMALL: dict[str, dict[str, Any]] = {
    "02_mid_training": {"steps": 24, "tokens": 256, "demonstrations": 16, "hidden": 32, "looks": 8},
    "04_reward_design": {"shuffles": 20},
    "04b_judges_and_reruns": {},
    "10_router_replay": {"rollouts": 8},
    "11_mismatch": {"rollouts": 8},
    "11b_losses": {"rollouts": 8},
    "05_rl_run": {},
    "07_long_horizon": {"tasks_wanted": 2},
    "07b_forks_and_hints": {"futures": 2},
    "12_weight_sync": {},
    "06_compare_runs": {},
}
OFTEN = {
    ("04_reward_design", "all groups dead"),
    ("05_rl_run", "cut off"),
    ("06_compare_runs", "cut off"),
    ("11_mismatch", "all groups dead"),
    ("11b_losses", "all groups dead"),
}
"""Where an extreme reaches most code of a notebook: `make test` reads these, and `make test-slow` the others."""
READ = [
    pytest.param(book, extreme, marks=[] if (book, extreme) in OFTEN else [pytest.mark.slow], id=f"{book}, {extreme}")
    for extreme in EXTREMES
    for book in SMALL
]


@pytest.mark.parametrize(("book", "extreme"), READ)
def test_a_run_of_any_outcome_can_be_read(
    book: str, extreme: str, tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]
) -> None:
    run = copy_of(tiny_run)
    EXTREMES[extreme](run)
    two = {"first": str(tiny_run.path), "second": str(run.path)}
    parameters = two if book == "06_compare_runs" else {"run_dir": str(run.path)}
    text = execute(book, parameters | SMALL[book])
    assert not re.search(r"(?<!\w)nan(?!\w)", text, re.I), "a missing value is told by a word or a dash"


@pytest.mark.parametrize(
    "extreme",
    [
        "all groups dead",
        *(pytest.param(x, marks=pytest.mark.slow) for x in (SOLVED, "no new structures", "out of time")),
    ],
)
@pytest.mark.whole
def test_the_tour_of_any_outcome_comes_to_its_end(
    extreme: str, tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]
) -> None:
    run = copy_of(tiny_run)
    others = {"out of time": ran_out_of_time, "no new structures": has_no_new_structures}
    {**EXTREMES, **others}[extreme](run)
    execute("01_tour", {"run_dir": str(run.path)})
    assert ("no group that teaches" in last_update(build_report(run)["weights"])) == (extreme == "all groups dead")
