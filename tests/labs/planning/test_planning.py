"""Schedules in virtual time on recorded durations, and closed forms of a fleet."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_nb.labs.planning import Durations, Fleet, RegionLink, RunSpeed, SimulatedLoad, deliveries, simulate
from composer_nb.trainer.recipe.reader import example_run
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule

DATA = Path(__file__).resolve().parents[3] / "data"
LOAD = SimulatedLoad(durations=Durations.read(DATA / "durations.csv"))
FLEET = Fleet(gpus=10, regions=4, sandboxes=400, batch=100, step_s=50.0, rollout_s=100.0, update_bytes=1e9)


@cache
def result(**changes: Any) -> dict[str, Any]:
    limits = {"ahead": 4, "bound": 2 * changes.get("ahead", 4), "window": 0.5, "hang_s": 1800.0}
    return simulate(Schedule(**{"steps": 60, **limits, **changes}), LOAD)


def even(seconds: float, **load: Any) -> SimulatedLoad:
    durations = Durations(seconds=np.full((1, 1), seconds), tokens=np.full((1, 1), 10))
    return SimulatedLoad(durations=durations, **load)


def test_tables_of_durations(tmp_path: Path):
    table = tmp_path / "table.csv"
    table.write_text("prompt,draw,seconds,tokens\n0,0,1.5,10\n1,1,2.5,20\n")
    with pytest.raises(ValueError, match="one row for each of 2 prompts × 2 draws"):
        Durations.read(table)
    table.write_text("# any order\nprompt,draw,seconds,tokens\n1,0,2.5,20\n0,0,1.5,10\n")
    assert Durations.read(table).seconds.tolist() == [[1.5], [2.5]]


def test_schedules_by_hand():
    """Three times 10 s of sampling and 4 s of training; one batch ahead, training is hidden but for the last step."""
    load = even(10.0, workers=2, capacity=2, train_s=4.0)
    r = simulate(Schedule(prompts=2, group=2, ahead=0, steps=3), load)
    assert r["seconds"] == 42.0 and r["samples_s"] == 12 / 42 and r["optimum_s"] == 12 / 30
    assert r["workers_busy"] == pytest.approx(30 / 42) and r["trainer_busy"] == pytest.approx(12 / 42)
    assert r["staleness_max"] == 0 and r["not_trained"] == 0
    r = simulate(Schedule(prompts=2, group=2, ahead=1, steps=3), load)
    assert r["seconds"] == 34.0 and r["staleness_max"] == 1


def test_running_ahead_doubles_the_throughput_and_a_bound_costs_a_wait_and_never_a_rollout():
    synchronous, window, bounded = result(ahead=0), result(), result(bound=4)
    assert window["samples_s"] >= 2 * synchronous["samples_s"] and window["of_optimum"] >= 0.85
    assert result(order="fifo")["samples_s"] < window["samples_s"]
    assert bounded["not_trained"] == 0 and bounded["mean_ratio"] == 1 and bounded["ks"] == 0
    assert bounded["of_optimum"] < window["of_optimum"]
    assert simulate(Schedule(steps=10, hang_s=1800.0), LOAD) == simulate(Schedule(steps=10, hang_s=1800.0), LOAD)


def test_a_pause_is_part_of_the_seconds_to_publish():
    run = example_run()
    seconds, paused = np.array(run.query("SELECT seconds, paused FROM served")).T
    assert paused.min() > 0 and RunSpeed.of_run(run).load.publish_s == pytest.approx(seconds.mean(), rel=1e-9)


def test_a_run_of_one_step_has_no_speed_yet(monkeypatch: pytest.MonkeyPatch):
    first_step = example_run().steps("rl")[:1]
    monkeypatch.setattr(RunDir, "steps", lambda run, stage: first_step)
    with pytest.raises(ValueError, match="one RL step"):
        RunSpeed.of_run(example_run())


def test_the_recorded_table_predicts_its_run_and_comes_back_as_it_was(tmp_path: Path):
    table = DATA / "tour_durations.csv"
    run = RunSpeed.read(table)
    predicted = simulate(replace(run.schedule, refill=0), run.load)["samples_s"]
    assert predicted == pytest.approx(run.reached, rel=0.15)
    assert "2 cores" in run.origin and 0 < run.delta_bytes < run.full_bytes / 5
    run.write(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == table.read_text()


@pytest.mark.parametrize("size", [64e6, 2e4])
def test_a_version_takes_its_requests_slow_start_and_bytes(size: float):
    rate, trip_s = 100e6 / 8 * 1448 / 1514, 0.08
    direct_s, relayed_s = deliveries(size, RegionLink(rate=100, round_trip=trip_s), 3, 0.5)
    for engines, requests, seconds in ((3, 15, direct_s), (1, 12.5, relayed_s)):
        remaining, window, expected = engines * size, 14_600.0, 0.5 + requests * trip_s
        while window < rate * trip_s and remaining > window:
            remaining, window, expected = remaining - window, 2 * window, expected + trip_s
        assert seconds == pytest.approx(expected + remaining / rate, abs=trip_s)


def test_a_fleet_in_closed_form():
    """The trainer limits the fleet or, if there are fewer, the sandboxes do."""
    assert FLEET.rate == 2.0 and FLEET.needed == 200.0 and FLEET.bytes_s == 1e9 / 50
    assert FLEET.dollars(36.0, 0.0, 0.0) == pytest.approx(10 * 36 / 3600 * 500)  # 1,000 rollouts take 500 s
    assert FLEET.dollars(0.0, 3.6, 0.0) == pytest.approx(400 * 3.6 / 3600 * 500)
    assert FLEET.dollars(0.0, 0.0, 0.5) == pytest.approx(10 * 4 * 0.5)  # 10 updates of 1 GB to 4 regions
    small_fleet = replace(FLEET, sandboxes=100)
    assert small_fleet.rate == 1.0 and small_fleet.bytes_s == 1e9 / 100 and small_fleet.needed == 200.0


@pytest.mark.parametrize("sandboxes, busy", [(100, 0.5), (200, 1.0), (400, 1.0)])
def test_littles_number_keeps_the_trainer_busy_where_durations_are_even(sandboxes: int, busy: float):
    load = even(FLEET.rollout_s, workers=1, capacity=sandboxes, train_s=FLEET.step_s)
    r = simulate(Schedule(prompts=10, group=10, ahead=4, bound=8, window=0.5, hang_s=1800.0, steps=60), load)
    assert r["trainer_busy"] == pytest.approx(busy, rel=0.07)
    assert r["samples_s"] <= replace(FLEET, sandboxes=sandboxes).rate
