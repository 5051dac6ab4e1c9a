"""Notebooks on one Ray cluster of two nodes on this machine: both take part, and the second says which folder it does not see. A
graph gives what the same file gives without Ray. `tests/hosts` has RL over hosts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import Cluster, two_nodes
from test_jobs_fire import DETACHED, LEASED, Bench

from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.services.environments import EnvironmentService
from composer_nb.trainer.services.run_copy import NotSeen
from composer_nb.trainer.services.services import EngineService, EvaluationService
from composer_nb.trainer.services.trainer_ranks import TrainerRank
from composer_nb.trainer.settings import Settings

pytest.importorskip("ray", reason="Ray is an extra")
pytestmark = pytest.mark.slow

THERE = {"gpus": 1}
"""Resources that only the second node has."""
WAITS = "import time\nfrom pathlib import Path\nPath(flag).touch()\nwhile not Path(go).exists(): time.sleep(0.1)"


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the second node sees empty."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, hidden: Path) -> Iterator[Cluster]:
    first, second = {"num_cpus": 2}, {"num_cpus": 1, "num_gpus": 1}
    with two_nodes(tmp_path_factory.mktemp("cluster"), first, second, hidden) as nodes:
        yield nodes


@pytest.fixture
def bench(tmp_path: Path, cluster: Cluster) -> Iterator[Bench]:
    rig = Bench(tmp_path, like=cluster.bench)
    yield rig
    for process in ours(rig):
        process.kill()


def test_a_node_that_does_not_see_the_runs_says_so(bench: Bench, cluster: Cluster, hidden: Path):
    """A job's runner; the test below asks the services of RL."""
    job = bench.job({"a": {"notebook": bench.notebook("n", "1"), "retries": 0} | THERE})
    bench.runs = hidden / "runs"
    code, output = bench.run("run", str(job), "--ray", cluster.address)
    attempt = bench.attempt("a").resolve() / "attempt.json"
    assert code == 75 and f"does not see {attempt}: keep --runs on a shared file system" in output
    assert not bench.attempt("a").with_name("log.txt").exists()


@pytest.mark.parametrize("kind", [EngineService, EnvironmentService, TrainerRank, EvaluationService])
def test_a_service_makes_nothing_where_it_does_not_see_the_run(tmp_path: Path, kind: Any):
    run, s = tmp_path / "gone", Settings()
    more = {
        EngineService: (run, s, 0, 0, "engine"),
        EnvironmentService: (run, s.env, s.limits, s.reward, 4, None, False),
        TrainerRank: (0, run, s),
    }
    with pytest.raises(NotSeen, match="does not see .*/gone: keep --runs on"):
        kind(*more.get(kind, (run, s)))
    assert not run.exists()


# The last test breaks the cluster


def ours(bench: Bench) -> list[psutil.Process]:
    """Return the processes that belong to notebooks and not to the cluster."""
    words = ("composer_nb.jobs", "ipykernel", "sleep 600")
    return [p for p in bench.alive() if any(word in " ".join(p.cmdline()) for word in words)]


def graph(bench: Bench) -> dict[str, Any]:
    book = bench.notebook("n", "total = steps * 2", DETACHED)
    return {
        "a": {"notebook": book, "grid": {"steps": [1, 2, 3]}, "outputs": {"total": "total"}},
        "sum": {"notebook": bench.notebook("s", "total = sum(parts)", parameters="parts: list = []")}
        | {"parameters": {"parts": "${a.total}"}, "outputs": {"total": "total"}},
        "raises": {"notebook": bench.notebook("r", "1 / 0"), "retries": 3},
        "blocked": {"notebook": book, "after": ["raises"]},
        "leased": {"notebook": bench.notebook("l", LEASED), "outputs": {"pid": "server"}},
    }


def outcome(bench: Bench) -> dict[str, Any]:
    nodes = bench.status()["nodes"]
    return {
        name: (node["state"], node["attempt"], {k: v for k, v in node.get("outputs", {}).items() if k != "pid"})
        for name, node in nodes.items()
    }


@pytest.mark.slow
def test_two_nodes_give_the_local_result(bench: Bench, cluster: Cluster):
    greedy = bench.job({"a": {"notebook": bench.notebook("n", "1"), "cpus": 5}})
    code, output = bench.run("run", str(greedy), "--ray", cluster.address)
    assert code == 2 and "no machine of the cluster has that" in output

    job = bench.job(graph(bench))
    assert bench.run("run", str(job))[0] == 1
    local = outcome(bench)
    assert local["sum"] == ("completed", 1, {"total": 12})
    assert bench.run("run", str(job), "--ray", cluster.address)[0] == 1
    assert outcome(bench) == local
    server = bench.record("leased")["outputs"]["pid"]
    bench.wait(lambda: not ours(bench) and not psutil.pid_exists(server), 10)
    bench.everything_is_whole()
    code, output = bench.run("run", str(job), "--ray", cluster.address, "--resume", "--set", "raises:steps=1")
    assert code == 1 and output.count("kept") == 5  # what ran on a cluster counts here, and the other way round


@pytest.mark.slow
def test_a_lost_node_costs_an_attempt_and_nothing_else(bench: Bench, cluster: Cluster, tmp_path: Path):
    book = bench.notebook("w", WAITS, parameters="flag: str = ''\ngo: str = ''")
    flags = {name: tmp_path / name for name in ("one", "two")}
    go = tmp_path / "go"
    nodes = {n: {"notebook": book, "parameters": {"flag": str(f), "go": str(go)}} for n, f in flags.items()}
    runner = bench.start("run", str(bench.job(nodes)), "--ray", cluster.address)
    bench.wait(lambda: all(flag.exists() for flag in flags.values()))  # one CPU a node: both nodes are at work
    cluster.lose(cluster.nodes[1])
    bench.wait(lambda: "lost" in (bench.runs / "job" / "log.txt").read_text())
    go.touch()
    output, _ = runner.communicate(timeout=patience(300))
    print(output)
    assert runner.returncode == 0
    assert sorted(bench.attempts().values()) == [1, 2]
    bench.wait(lambda: not ours(bench), 10)
    bench.everything_is_whole()
