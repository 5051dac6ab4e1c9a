"""Schedules in virtual time, on the durations that ship with the project."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_nb.labs.planning import Durations, SimulatedLoad, ks, measured, simulate
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule

DURATIONS = Path(__file__).resolve().parents[3] / "data" / "durations.csv"
LOAD = SimulatedLoad(durations=Durations.read(DURATIONS))


@cache
def result(**changes: Any) -> dict[str, Any]:
    limits = {"ahead": 4, "bound": 2 * changes.get("ahead", 4), "window": 0.5, "hang_s": 1800.0}
    return simulate(Schedule(**{"steps": 60, **limits, **changes}), LOAD)


def even(seconds: float) -> Durations:
    return Durations(seconds=np.full((1, 1), seconds), tokens=np.full((1, 1), 10))


# Durations


def test_a_table_with_holes_is_refused(tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text("prompt,draw,seconds,tokens\n0,0,1.5,10\n1,1,2.5,20\n")
    with pytest.raises(ValueError, match="one row for each of 2 prompts × 2 draws"):
        Durations.read(table)
    table.write_text("# any order\nprompt,draw,seconds,tokens\n1,0,2.5,20\n0,0,1.5,10\n")
    assert Durations.read(table).seconds.tolist() == [[1.5], [2.5]]


def test_a_rollout_takes_as_long_under_every_schedule_and_anew_when_it_is_dispatched_again():
    draws = [LOAD.durations.rollout(3, 1, again) for again in range(20)]
    assert draws == [LOAD.durations.rollout(3, 1, again) for again in range(20)] and len(set(draws)) > 5
    assert {seconds for seconds, _ in draws} <= set(LOAD.durations.seconds[3])


# By hand


def test_the_synchronous_schedule_by_hand():
    """Three times 10 s of sampling and 4 s of training."""
    load = SimulatedLoad(durations=even(10.0), workers=2, capacity=2, train_s=4.0)
    r = simulate(Schedule(prompts=2, group=2, ahead=0, steps=3), load)
    assert r["seconds"] == 42.0 and r["samples_s"] == 12 / 42 and r["optimum_s"] == 12 / 30
    assert r["workers_busy"] == pytest.approx(30 / 42) and r["trainer_busy"] == pytest.approx(12 / 42)
    assert r["staleness_max"] == 0 and r["not_trained"] == 0


def test_one_batch_ahead_by_hand():
    """Training is hidden behind sampling, but for the last step."""
    load = SimulatedLoad(durations=even(10.0), workers=2, capacity=2, train_s=4.0)
    r = simulate(Schedule(prompts=2, group=2, ahead=1, steps=3), load)
    assert r["seconds"] == 34.0 and r["staleness_max"] == 1


def test_a_run_without_durations_is_refused(monkeypatch: pytest.MonkeyPatch):
    run, steps = example_run(), RunDir.steps
    monkeypatch.setattr(RunDir, "steps", lambda run, stage: [{**each, "time": {}} for each in steps(run, stage)])
    with pytest.raises(ValueError, match="keeps no durations of rollouts"):
        measured(run)


@pytest.mark.parametrize(
    "a, b, distance",
    [
        ([1, 2, 3], [1, 2, 3], 0.0),
        ([1, 2], [3, 4], 1.0),
        ([1, 2, 3, 4], [3, 4, 5, 6], 0.5),
        ([1, 1, 1, 2], [1, 2], 0.25),
    ],
)
def test_the_distance_of_two_distributions(a: list[int], b: list[int], distance: float):
    assert ks(a, b) == distance == ks(b, a)


# Schedules compared


def test_running_ahead_doubles_the_throughput_and_comes_near_the_optimum():
    synchronous, window = result(ahead=0), result()
    assert window["samples_s"] >= 2 * synchronous["samples_s"]
    assert window["of_optimum"] >= 0.85
    assert result(order="fifo")["samples_s"] < window["samples_s"]


@pytest.mark.parametrize("order", ["window", "fifo", "discard"])
@pytest.mark.parametrize("ahead, bound", [(0, 0), (1, 1), (2, 2), (2, 5), (4, 4)])
def test_staleness_stays_within_its_bound(order: str, ahead: int, bound: int):
    r = result(order=order, ahead=ahead, bound=bound, steps=20)
    assert r["staleness_max"] <= bound
    assert r["staleness_total"] == pytest.approx(r["staleness_in_flight"] + r["staleness_in_queue"])
    assert 0 < r["of_optimum"] < 1 and 0 < r["workers_busy"] <= 1


def test_a_bound_costs_a_wait_and_never_a_rollout():
    r = result(bound=4)
    assert r["not_trained"] == 0 and r["mean_ratio"] == 1 and r["ks"] == 0
    assert r["of_optimum"] < result(bound=8)["of_optimum"]


def test_the_same_load_gives_the_same_run():
    assert simulate(Schedule(steps=10, hang_s=1800.0), LOAD) == simulate(Schedule(steps=10, hang_s=1800.0), LOAD)
