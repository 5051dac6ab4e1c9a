"""A Ray head on one host, nodes on others, and RL over them without a shared folder, whoever is cut off or dies."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from network import HOME, Host, Link, Network, ObjectStore
from nodes import RUN, START_S, UP, address_of, join, send_run, start_head

from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.records.rundir import RunDir

pytest.importorskip("moto.server", reason="moto, a development dependency, serves S3")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# The services of the newest run, and where they are or were.
NODES = """
import json, sys
from composer_nb.trainer.services.cluster import attach
attach(sys.argv[1], "test")
import ray
from ray._private.state import actors
newest = max(a["JobID"] for a in actors().values())
print(json.dumps([[a["ActorClassName"], a["Address"]["IPAddress"]] for a in actors().values() if a["JobID"] == newest]))
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
    return start_head(network, store, "head")


@pytest.fixture(scope="module")
def address(head: Host) -> str:
    return address_of(head)


@pytest.fixture(scope="module")
def nodes(network: Network, store: ObjectStore, head: Host, address: str) -> Iterator[list[Host]]:
    """Two hosts each with room for a rank of a trainer, for an engine in a region, near or far, and for an environment."""
    roles = ("trainer", "trainer", "engine", "engine", "environment", "environment")
    delays = {3: 40.0}
    hosts = [
        network.host(f"{role}-{number}", Link(rate=200, delay=delays.get(number, 5.0)))
        for number, role in enumerate(roles)
    ]
    with pytest.raises(AssertionError, match=r"auth_token is missing: copy it from the head's machine"):
        hosts[0].run(*UP, "--join", address, "--host", hosts[0].address, seconds=START_S)
    for host, role in zip(hosts, roles, strict=True):
        join(host, head, store, f"{role}=1")
    yield hosts
    for host in hosts:
        assert "ended" in host.run(*UP, "--down")
        assert "cnb-" not in host.run("ls", "/tmp") and host.run("ls", "/dev/shm") == ""
        processes = host.run("ps", "-eo", "stat,args").splitlines()
        assert not [line for line in processes if "ray" in line and not line.startswith("Z")]  # the host reaps nothing


@pytest.mark.parametrize("ranks", [1, 2])
def test_trainer_engines_and_environments_on_hosts_that_share_no_folder(
    network: Network,
    store: ObjectStore,
    head: Host,
    address: str,
    nodes: list[Host],
    tiny_run: RunDir,
    tmp_path: Path,
    ranks: int,
) -> None:
    trainers, engines, environments = nodes[:2], nodes[2:4], nodes[4:]
    changes = {"rl.steps": 4, "ranks": ranks, "mesh.shard": ranks, "services.engines": 2}
    run = send_run(tiny_run, head, store, tmp_path, changes)
    output = head.run(*RUN, run, seconds=600, env=store.environment)
    assert "died" not in output and "rl: done" in output
    services = {tuple(row) for row in json.loads(head.python(NODES, address))}
    trainer_hosts = {host for name, host in services if name == "TrainerRank"}
    assert len(trainer_hosts) == ranks and trainer_hosts <= {host.address for host in trainers}
    placed = {"EngineService": engines, "EnvironmentService": environments}
    assert services - {("TrainerRank", host) for host in trainer_hosts} == {
        (name, host.address) for name, hosts in placed.items() for host in hosts
    }
    head.take(run, tmp_path / "result")
    result = RunDir(tmp_path / "result")
    info = assert_whole(result, 4)
    for number, region in enumerate(engines, 1):
        served = result.query("SELECT version FROM served WHERE engine = ?", f"engine-{number}")
        assert len(region.run("ls", "node/relay").split()) >= len(served) > 0, "versions come through the relay"
    assert (result.path / "weights" / "final" / "model.safetensors").is_file()
    assert not list((result.path / "weights").glob("versions/*")) and info["store"]["delta"] > 0
    print(output, info["store"])


def assert_whole(run: RunDir, steps: int) -> dict[str, Any]:
    """Assert that nothing was lost and nothing came twice; return the results of RL."""
    info = run.finished("rl")
    assert info is not None
    files = sorted((run.path / "rollouts").glob("rl_*.parquet"))
    tasks = [task for file in files for task in pq.read_table(file, columns=["task_id"])["task_id"].to_pylist()]
    assert len(files) == steps and Counter(Counter(tasks).values()) == {4: steps * 2}, "no prompt skipped, none twice"
    assert sum(run.ledger().values()) == info["sampled"] > 0
    trained = dict(run.query("SELECT version, hash FROM version"))
    served = run.query("SELECT version, hash FROM served")
    assert served and all(trained[version] == hash for version, hash in served if version), (
        "engines run what was trained"
    )
    return info


def test_nothing_is_lost_whoever_is_cut_off_or_dies(
    network: Network, store: ObjectStore, tiny_run: RunDir, tmp_path: Path
) -> None:
    """The host of the trainer is cut off for 30 s, another dies for good, and then the head; the run goes on from its store."""
    head, steps = start_head(network, store, "first-head"), 14
    trainer_host, engine_host = (network.host(name, Link(rate=200, delay=5)) for name in ("cut", "dead"))
    join(trainer_host, head, store, "trainer,engine,environment")
    join(engine_host, head, store, "engine,environment")
    run = send_run(tiny_run, head, store, tmp_path, {"rl.steps": steps, "services.engines": 2})
    process = head.start(*RUN, run, env=store.environment, stdout=None, stderr=None)

    def wait_for(step: int) -> None:
        deadline = time.monotonic() + patience(600)
        while int(head.run("sh", "-c", f"cat {run}/metrics.jsonl 2>/dev/null | grep -c '\"rl\"' || true")) < step:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)

    wait_for(1)
    network.cut(trainer_host)
    time.sleep(30)
    network.cut(trainer_host, down=False)
    wait_for(4)
    engine_host.kill()
    wait_for(6)
    head.kill()
    head = start_head(network, store, "second-head")
    restore = ("restore", f"{store.url}/{Path(run).name}", "--runs", HOME)
    head.run("python", "-P", "-m", "composer_nb.cli", *restore, env=store.environment)
    trainer_host.run(*UP, "--down")  # it may still wait for its first head
    join(trainer_host, head, store, "trainer,engine,environment")
    head.run(*RUN, run, seconds=600, env=store.environment)
    head.take(run, tmp_path / "result")
    assert_whole(RunDir(tmp_path / "result"), steps)
    # Weight versions are in the store, which this machine does not reach. Fails unless all are identical.
    head.run("python", "-P", "-m", "composer_nb.cli", "replay", run, seconds=600, env=store.environment)


# The ports of a host that others reach, and what they answer without the token.
PORTS = """
import psutil
listening = [c.laddr for c in psutil.net_connections("tcp") if c.status == "LISTEN"]
print(*{at.port for at in listening if at.ip != "127.0.0.1"})
"""
KNOCK = """
import http.client, sys
host, *ports = sys.argv[1:]
for port in ports:
    for path in ("/", "/metrics", "/api/jobs/"):
        connection = http.client.HTTPConnection(host, int(port), timeout=3)
        try:
            connection.request("GET", path)
            if (status := connection.getresponse().status) < 400:
                print(port, path, status)
        except (OSError, http.client.HTTPException):
            pass
"""


def test_a_machine_without_the_token_gets_nowhere(
    network: Network, head: Host, address: str, nodes: list[Host]
) -> None:
    stranger = network.host("stranger")
    for guess in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        output = stranger.python(STRANGER, address, seconds=START_S, env=guess)
        assert "Unauthenticated" in output and "\nrefused: no Ray answers" in output
        assert guess or "RAY_AUTH_MODE=token" in output
    for host in (head, *nodes):
        ports = host.python(PORTS).split()
        assert len(ports) >= 3 and not stranger.python(KNOCK, host.address, *ports, seconds=START_S)
