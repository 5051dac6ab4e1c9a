"""Rates of a machine: their intervals, a step's seconds and dollars at their bounds, and the cluster file."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from composer_nb.cli import main
from composer_nb.labs.planning import Durations
from composer_nb.labs.rates import MachineRates, Rate, step_cost
from composer_nb.trainer.models.transformer import ModelConfig
from composer_nb.trainer.schedule import Schedule
from scripts.bench import rates_bench
from tests.tiny_models import SIZES

QWEN = ModelConfig(**SIZES | {"max_position_embeddings": 160})
SPEED: dict[str, Any] = {"decode": Rate(2.0, 1.0, 4.0), "train": Rate(10.0, 5.0, 20.0), "mfu": Rate(0.3, 0.2, 0.4)}
MACHINE = MachineRates(chip="c", torch="2", date="d", weights=9, places=2, matmul=Rate(1e9, 1e9, 1e9), **SPEED)


@pytest.mark.parametrize(("count", "rank"), [(6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (50, 18)])
def test_an_interval_of_a_median_is_that_of_the_tables(count: int, rank: int):
    samples = np.random.default_rng(0).permutation(count) + 1.0
    assert Rate.of(samples) == ((count + 1) / 2, rank, count + 1 - rank)


def test_fewer_than_six_rounds_have_no_interval():
    with pytest.raises(ValueError, match="--repeats 5: an interval of 95% needs at least 6"):
        Rate.of(range(5))


def test_rates_are_work_by_time_and_mfu_is_the_model_s_operations(monkeypatch, tmp_path: Path):
    """By a clock on which each round takes a second longer than the one before."""
    ticks = iter(np.repeat(np.arange(1, 101), 6) * np.tile([0, 1], 300))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)), strftime=lambda form: "d")
    monkeypatch.setattr(rates_bench, "time", clock)
    measured = rates_bench.measure(QWEN, repeats=9, places=4, tokens=256)
    middle, lower, upper = 6, 9, 3  # seconds of a round
    assert measured.decode == (4 * 64 / middle, 4 * 64 / lower, 4 * 64 / upper)
    assert measured.train == (256 / middle, 256 / lower, 256 / upper)
    assert measured.matmul == pytest.approx([4 * 2 * 1024**3 / s for s in (middle, lower, upper)])
    c = QWEN
    attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
    experts = c.num_experts_per_tok * 3 * c.hidden_size * c.moe_intermediate_size + c.num_experts * c.hidden_size
    norms = 2 * c.hidden_size + 2 * c.head_dim
    weights = c.num_hidden_layers * (attention + experts + norms) + (c.vocab_size + 1) * c.hidden_size
    pairs = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * 129 / 2
    assert measured.mfu.middle == pytest.approx((6 * weights + pairs) * 256 / (4 * 2 * 1024**3), rel=0.01)
    measured.write(tmp_path / "rates.json")
    assert MachineRates.read(tmp_path / "rates.json") == measured


def test_a_step_costs_more_at_the_lower_rates_by_hand():
    """Two places decode 10 tokens each in 10, 20 and 5 s; 40 tokens train in 4, 8 and 2 s; all cost 36 dollars an hour."""
    durations = Durations(seconds=np.full((1, 1), 1.0), tokens=np.full((1, 1), 10))
    loads = MACHINE.loads(durations, 4, workers=2, ranks=1, rollout_tokens=0, publish_s=0.0)
    costs = step_cost(Schedule(prompts=2, group=2, ahead=0, steps=3), loads, 36.0)
    assert costs["samples_s"] == pytest.approx([4 / 14, 4 / 28, 4 / 7]) and costs["step_s"] == (14, 7, 28)
    assert costs["dollars_step"] == pytest.approx([0.14, 0.07, 0.28]) and costs["staleness_max"] == 0
    [load, *_] = MACHINE.loads(durations, 4, workers=2, ranks=2, rollout_tokens=50, publish_s=0.0)
    assert load.train_s == 4 * 50 / 10 / 2


def test_the_plan_writes_a_cluster_whose_hosts_know_their_roles(tmp_path: Path, capsys, monkeypatch):
    MACHINE.write(tmp_path / "rates.json")
    file, hosts = tmp_path / "cluster.yaml", ["10.0.0.1", "10.0.0.12", "10.0.0.13"]
    options = ["plan", "--measured", str(tmp_path / "rates.json"), "--steps", "2", "--ranks", "2", "--workers", "1"]
    options += ["--ray-cluster", str(file), "--dollars-hour", "1.2"]
    assert main([*options, "--hosts", ",".join(hosts), "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        middle, lower, upper = row["dollars_step"]
        assert 0 < lower < middle < upper and middle == pytest.approx(row["step_s"][0] * 3 * 1.2 / 3600)
    cluster = yaml.safe_load(file.read_text())
    config = prepare_config(cluster)
    validate_config(config)
    assert config["provider"] == {"type": "local", "head_ip": hosts[0], "worker_ips": hosts[1:]}
    assert config["available_node_types"]["local.cluster.node"]["min_workers"] == 2
    for name, code in (("hostname", "echo $HOST 172.17.0.1"), ("ray", 'echo "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for host, role in zip(hosts, ("trainer", "trainer", "engine"), strict=True):
        for kind in ("head", "worker"):
            command = cluster[f"{kind}_start_ray_commands"][-1]
            monkeypatch.setenv("HOST", host)
            started = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout
            assert started.startswith(f'start --resources={{"{role}": 1000')
    for wrong, why in (
        (["--hosts", "10.0.0.1"], "--hosts has 1: one for each of --ranks 2 and --workers 1"),
        (["--hosts", "10.0.0.1,10.0.0.1,10.0.0.2"], "give each host once"),
        (["--hosts", "a,b,c"], "--hosts: 'a' is not an IPv4 address"),
        (["--measured", str(file)], f"--measured {file}"),
        (["--ranks", "0", "--workers", "3", "--hosts", ",".join(hosts)], "--ranks 0"),
    ):
        assert main([*options, *wrong]) != 0 and why in capsys.readouterr().err
