"""Recorded runs and fleets: closed forms, and tables that come back as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from composer_nb.labs.planning import Durations, Fleet, RunSpeed, SimulatedLoad, simulate
from composer_nb.trainer.schedule import Schedule

TABLE = Path(__file__).resolve().parents[3] / "data" / "tour_durations.csv"
FLEET = Fleet(gpus=10, regions=4, sandboxes=400, batch=100, step_s=50.0, rollout_s=100.0, update_bytes=1e9)


def test_the_recorded_table_predicts_what_its_run_reached_within_15_per_cent():
    run = RunSpeed.read(TABLE)
    predicted = simulate(replace(run.schedule, refill=0), run.load)["samples_s"]
    assert predicted == pytest.approx(run.reached, rel=0.15)
    assert "2 cores" in run.origin and 0 < run.delta_bytes < run.full_bytes / 5


def test_a_table_comes_back_as_it_was(tmp_path: Path):
    run = RunSpeed.read(TABLE)
    run.write(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == TABLE.read_text()


def test_a_fleet_that_its_trainer_limits():
    assert FLEET.rate == 2.0 and FLEET.needed == 200.0
    assert FLEET.bytes_s == 1e9 / 50
    assert FLEET.dollars(36.0, 0.0, 0.0) == pytest.approx(10 * 36 / 3600 * 500)  # 1,000 rollouts take 500 s
    assert FLEET.dollars(0.0, 3.6, 0.0) == pytest.approx(400 * 3.6 / 3600 * 500)
    assert FLEET.dollars(0.0, 0.0, 0.5) == pytest.approx(10 * 4 * 0.5)  # 10 updates of 1 GB to 4 regions


def test_a_fleet_that_its_sandboxes_limit():
    few = replace(FLEET, sandboxes=100)
    assert few.rate == 1.0 and few.bytes_s == 1e9 / 100 and few.needed == 200.0


@pytest.mark.parametrize("sandboxes, busy", [(100, 0.5), (200, 1.0), (400, 1.0)])
def test_littles_number_keeps_the_trainer_busy_where_durations_are_even(sandboxes: int, busy: float):
    even = Durations(seconds=np.full((1, 1), FLEET.rollout_s), tokens=np.full((1, 1), 1))
    load = SimulatedLoad(durations=even, workers=1, capacity=sandboxes, train_s=FLEET.step_s)
    found = simulate(Schedule(prompts=10, group=10, ahead=4, bound=8, window=0.5, hang_s=1800.0, steps=60), load)
    assert found["trainer_busy"] == pytest.approx(busy, rel=0.07)
    assert found["samples_s"] <= replace(FLEET, sandboxes=sandboxes).rate
