"""Arms of an experiment over seeds: the mean of each, and its gain over the first, paired by seed."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe.arms import compare_arms, label
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.settings import Settings, override, to_dict
from composer_nb.views.compare import arms_page, arms_table

MakeRun = Callable[..., RunDir]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    def make(solved: float, **changes: Any) -> RunDir:
        run = create(tmp_path, "run")
        write_json(run.path / "settings.json", to_dict(override(Settings(), changes)))
        score = {"pass_within": {"12": solved - 0.1}, "pass_at_1": solved, "pass_greedy": None, "best_of_k": solved}
        run.finish("eval_final", 1.0, score)
        return run

    return make


def test_each_arm_is_compared_with_the_first_over_the_seeds_of_both(make_run: MakeRun) -> None:
    usual = [make_run(solved, seed=seed) for seed, solved in enumerate((0.5, 0.6, 0.7))]
    faster = [make_run(solved, seed=seed, **{"rl.lr": 1e-3}) for seed, solved in ((0, 0.52), (1, 0.63), (7, 0.9))]
    alone = make_run(0.1, seed=2, **{"rl.lr": 2.0})
    comparison = compare_arms([*usual, *faster, alone])
    first, second, third = comparison["arms"].values()
    assert [*comparison["arms"]] == [f"lr {lr}" for lr in (Settings().rl.lr, 0.001, 2.0)]
    assert first["scores"]["in 12 calls"] == pytest.approx({"mean": 0.5, "gain": 0.0, "half": 0.0})
    assert "greedy" not in first["scores"], "no run was scored so"
    half = 12.71 * 0.01 / math.sqrt(2) / math.sqrt(2)  # gains of .02 and .03: their deviation is .01 / √2
    assert second["scores"]["pass@1"] == pytest.approx({"mean": 2.05 / 3, "gain": 0.025, "half": half}, abs=1e-9)
    assert (second["paired"], third["paired"]) == (2, 1)
    assert label({"rl.steps": 4, "sft.steps": 8, "rl.lr": 2.0}) == "rl.steps 4, sft.steps 8, lr 2.0"
    assert third["scores"]["pass@1"] == pytest.approx({"mean": 0.1, "gain": -0.6, "half": None})
    out = io.StringIO()
    Console(file=out, width=160).print(arms_table(comparison))
    text, page = out.getvalue(), arms_page(comparison)
    for row in ("0.683 (+2.5 ± 6.4)", "0.100 (-60.0 ± –)"):
        assert row in text and row in page
    assert "<svg" in page and "one arm only" in arms_page(compare_arms(usual))


def test_runs_that_cannot_be_compared_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(0.5)
    with pytest.raises(ValueError, match=r"the seeds \(0, 0\) too"):
        compare_arms([run, make_run(0.5)])
    unscored = create(tmp_path, "run")
    write_json(unscored.path / "settings.json", to_dict(Settings()))
    with pytest.raises(ValueError, match=f"{unscored.path}: has no final scores yet"):
        compare_arms([run, unscored])
