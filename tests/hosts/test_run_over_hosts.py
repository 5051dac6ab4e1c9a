"""A Ray head on one host, nodes on two more, and RL over them without a shared folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from network import HOME, Host, Link, Network, ObjectStore

from composer_nb.trainer.recipe.launch import fork
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from tests.conftest import TINY

pytest.importorskip("moto.server", reason="moto, a development dependency, serves S3")
pytestmark = pytest.mark.slow

UP = ("python", "-P", "-m", "composer_nb.cli", "up", "node")
START_S = 300.0
TOKEN = ".ray/auth_token"
NODES = """
import json, sys
from composer_nb.trainer.services.cluster import attach
attach(sys.argv[1], "test")
import ray
from ray._private.state import actors
print(json.dumps([[a["ActorClassName"], a["Address"]["IPAddress"]] for a in actors().values()]))
"""
# What a machine without the token gets from the head.
STRANGER = """
import os, sys
from composer_nb.trainer.services.cluster import attach
try:
    attach(sys.argv[1], "stranger")
except ConnectionError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def store(network: Network) -> ObjectStore:
    return ObjectStore(network.host("store"), "runs")


@pytest.fixture(scope="module")
def head(network: Network, store: ObjectStore) -> Host:
    host = network.host("head")
    host.run(*UP, "--host", host.address, seconds=START_S, env=store.environment)
    return host


@pytest.fixture(scope="module")
def address(head: Host) -> str:
    return str(json.loads(head.run("cat", "node/head.json"))["address"])


@pytest.fixture(scope="module")
def nodes(network: Network, store: ObjectStore, head: Host, address: str) -> Iterator[list[Host]]:
    """The trainer's host, and one of engines and environments."""
    hosts = [network.host(name, Link(rate=200, delay=5)) for name in ("trainer", "engines")]
    token = {"TOKEN": head.run("cat", TOKEN)}
    for host, roles in zip(hosts, ("trainer", "engine,environment"), strict=True):
        join = (*UP, "--join", address, "--host", host.address, "--roles", roles)
        with pytest.raises(AssertionError, match=r"auth_token is missing: copy it from the head's machine"):
            host.run(*join, seconds=START_S)
        host.run("sh", "-c", f"umask 77; mkdir .ray; printf %s $TOKEN > {TOKEN}", env=token)
        host.run(*join, seconds=START_S, env=store.environment)
    yield hosts
    for host in hosts:
        assert "ended" in host.run(*UP, "--down")
        assert "cnb-" not in host.run("ls", "/tmp") and host.run("ls", "/dev/shm") == ""
        assert "ray" not in host.run("ps", "-eo", "args")


def test_trainer_and_engines_on_hosts_that_share_no_folder(
    network: Network, store: ObjectStore, head: Host, address: str, nodes: list[Host], tiny_run: RunDir, tmp_path: Path
) -> None:
    trainer, engines = nodes
    changes: dict[str, Any] = {
        "services.on": True, "services.address": f"{HOME}/node", "services.store": store.url, "rl.steps": 4, "rl.prompts": 2,
        "rl.max_seconds": 0.0, "rl.evaluate_every": 0,
    }  # fmt: skip
    source = fork(tiny_run, override(Settings(), TINY | changes), runs=tmp_path, name="far")
    run = f"{HOME}/{source.path.name}"
    head.send(source.path, run)
    said = head.run("python", "-m", "composer_nb.trainer.services.run", run, seconds=600, env=store.environment)
    assert "died" not in said and "rl: done" in said
    places = {tuple(row) for row in json.loads(head.python(NODES, address))}
    services = {(name, engines.address) for name in ("EngineService", "EnvironmentService")}
    assert places == services | {("TrainerRank", trainer.address)}
    head.take(run, tmp_path / "result")
    result = RunDir(tmp_path / "result")
    info = result.finished("rl")
    assert info is not None
    files = sorted((result.path / "rollouts").glob("rl_*.parquet"))
    tasks = [task for file in files for task in pq.read_table(file, columns=["task_id"])["task_id"].to_pylist()]
    assert len(files) == 4 and Counter(Counter(tasks).values()) == {4: 4 * 2}, "no prompt skipped, none twice"
    assert sum(result.ledger().values()) == info["sampled"] > 0
    assert (result.path / "weights" / "final" / "model.safetensors").is_file()
    assert not list((result.path / "weights").glob("versions/*")) and info["store"]["delta"] > 0
    print(said, info["store"])


def test_a_machine_without_the_token_gets_nowhere(network: Network, address: str, nodes: list[Host]) -> None:
    stranger = network.host("stranger")
    for guess in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        said = stranger.python(STRANGER, address, seconds=START_S, env=guess)
        assert "Unauthenticated" in said and "\nrefused: no Ray answers" in said
        assert guess or "RAY_AUTH_MODE=token" in said
