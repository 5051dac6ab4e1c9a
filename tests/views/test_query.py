"""What a search over runs and rollouts selects, and how runs are named."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.bench import T_975
from composer_nb.harness.monitors import DETECTORS
from composer_nb.trainer.recipe.reader import EXAMPLES, ReadOnly, read_status
from composer_nb.views import rollouts
from composer_nb.views.curves import overlaid
from composer_nb.views.query import selector
from composer_nb.views.runs import grouped, run_rows, runs_below

ROWS: list[dict[str, Any]] = [
    {"advantage": -0.6, "rl.lr": 3e-5, "ended": "turns", "solved": "no", "text": "assert x == None and more"},
    {"advantage": 0.25, "rl.lr": 1e-4, "ended": "finished", "solved": "yes", "text": "Parse_Day or not"},
    {"advantage": None, "rl.lr": 1e-4, "ended": "time", "solved": True, "text": "a/b"},
]
FLAGS = {"edited a test": lambda row: row["ended"] == "turns"}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", [0, 1, 2]),
        ("advantage < -.5", [0]),
        ("advantage < −.5 and Edited a test", [0]),
        ("not edited a test and advantage>=0.25", [1]),
        ("rl.lr == 0.00003", [0]),
        ("rl.lr != 3e-5", [1, 2]),
        ("ended = Finished", [1]),
        (r"/None and \w+$/", [0]),
        (r"not /^a\/b/", [0, 1]),
        ("parse_day", [1]),
        ("and more", [0]),
        ("solved = true", [1, 2]),
        ("solved != yes", [0]),
        ("parse_day or not", [1]),
    ],
)
def test_a_query_selects_rows(query: str, expected: list[int]) -> None:
    fits = selector(query, {"advantage", "rl.lr", "ended", "solved"}, lambda row: row["text"], FLAGS)
    assert [at for at, row in enumerate(ROWS) if fits(row, row)] == expected


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("gain > 1", "no such"),
        ("/(/", "no regular"),
        ("advantage < low", "no number"),
        ("gain and", "put `and`"),
        ("/a/ gain", "put `and`"),
        ("odd or advantage > 3", "no `or`"),
        ("advantage < 1 or more", "no `or`"),
    ],
)
def test_what_cannot_be_asked_is_said(query: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        selector(query, {"advantage"}, str, {"odd": bool})


def test_flags_are_the_monitors_and_held_out_rollouts_are_searched_too() -> None:
    run = ReadOnly(EXAMPLES[0])
    assert set(rollouts.FLAGS) - {"solved", "tampered", "invalid call"} and len(rollouts.FLAGS) == len(DETECTORS) + 3
    everything, solved = rollouts.search(run, "final"), rollouts.search(run, "final", "solved and calls < 10")
    assert 0 < len(solved) < len(everything)
    fitting = [s for s in everything if s.attempt.grade.passed and s.attempt.rollout.calls < 10]
    assert [stored.attempt.task.id for stored in solved] == [stored.attempt.task.id for stored in fitting]
    with pytest.raises(ValueError, match="has rollouts of step 160"):
        rollouts.search(run, "step 2")


def test_runs_are_named_by_what_differs_and_seeds_are_one_line_with_an_interval(tmp_path: Path) -> None:
    for run in EXAMPLES:
        shutil.copytree(run, tmp_path / "deep" / run.name)
    (begun := tmp_path / "begun").mkdir()
    (begun / "run.db").touch()
    shutil.copy(EXAMPLES[0] / "settings.json", begun)
    paths = runs_below(tmp_path)
    assert len(paths) == 3, "of these one has only begun"
    assert {row["name"]: row["seed"] for row in run_rows(paths)} == {"seed 0": 0, "seed 1": 1}
    assert [row["run"] for row in run_rows(paths, "final > .69 and seed = 1")] == ["example_seed_1"]
    assert not run_rows(paths, "rl.steps < 9") and len(run_rows(paths, "rl.steps >= 9")) == 2, "what all runs share"

    first = read_status(EXAMPLES[0])
    seeds = [replace(first, settings={**first.settings, "seed": seed}) for seed in (0, 1, 2)]
    three_ranks = replace(first, settings={**first.settings, "ranks": 3})
    groups = grouped([*seeds, three_ranks])
    assert {name: len(runs) for name, runs in groups.items()} == {"ranks 2, 3 seeds": 3, "seed 0, ranks 3": 1}
    assert [*grouped([*seeds, seeds[0]])] == ["4 runs"], "a repeated seed is none of its own"
    repeated = replace(three_ranks, path=Path("again"))
    assert [*grouped([first, three_ranks, repeated])] == ["ranks 2", "ranks 3", "ranks 3, again"]
    points = [[{"step": 2, "reward": value + 2}, {"step": 1, "reward": value}] for value in (1.0, 2.0, 3.0)]
    [chart] = overlaid({"x": points})
    rows = [(row["step"], row["value"], row["low"], row["high"]) for row in chart.rows]
    half = T_975[1] / 3**0.5
    assert rows == [pytest.approx((1, 2, 2 - half, 2 + half)), pytest.approx((2, 4, 3 - half, 3 + half))]
