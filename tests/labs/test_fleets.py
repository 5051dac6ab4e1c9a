"""Bursts of environments: a few on this machine, thousands in virtual time, by the same scheduler."""

import json
from dataclasses import replace

import pytest

from composer_nb.cli import main
from composer_nb.harness.sandbox.fleet import FleetScheduler
from composer_nb.labs.fleets import ClusterLoad, SpreadScheduler, simulate_fleet


def test_all_of_a_burst_are_alive_and_hosts_are_filled_but_never_overfilled():
    load = ClusterLoad(hosts=24, burst=5000)
    packed, spread = simulate_fleet(load, FleetScheduler, 64), simulate_fleet(load, SpreadScheduler, 0)
    for figures in (packed, spread):
        assert figures["alive"] >= 5000 and figures["host_memory_most"] <= 0.9
        # 16 starts at a time and host, of two seconds each
        assert figures["starts_s"] == pytest.approx(24 * 16 / 2, rel=0.1)
    assert packed["hosts_at_end"] <= 2 * packed["hosts_at_end_least"] < spread["hosts_at_end"] == 24
    assert packed["stream_wait_s_p99"] == 0 and spread["stream_wait_s_p99"] == pytest.approx(2)
    # Limits would take hosts of 170 each; the log-normal use of 1 GiB, cut at three, less than half of them.
    assert packed["hosts_by_limits"] >= 5000 / 170 > 2 * packed["hosts_by_use"]
    small = simulate_fleet(replace(load, hosts=6, seconds=300), FleetScheduler, 0)
    assert small["alive"] < 5000 and small["host_memory_most"] <= 0.9, "what does not fit waits"


def test_sandboxes_live_here_at_the_same_time(capsys: pytest.CaptureFixture[str]):
    assert main(["sandbox", "fleet", "--alive", "20", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["here"]
    assert report["alive"] == report["commands"] == 20 and report["stopped"] == ""
    assert 20 <= report["processes"] <= 25 and 1 < report["mib_each"] < 20
    assert main(["sandbox", "fleet", "--alive", "20", "--gib", "-1000", "--json"]) == 0
    assert "is reached" in json.loads(capsys.readouterr().out)["here"]["stopped"]
