"""Notebooks and RL on a Ray cluster of two nodes: both take part, and the second says which folder it does not see."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from clusters import Cluster, two_nodes
from test_jobs_fire import Bench

from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.jobs.runner import run_attempt
from composer_nb.trainer.recipe.launch import fork
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.actors import NotSeen
from composer_nb.trainer.services.environments import EnvironmentService
from composer_nb.trainer.services.services import EngineService, EvaluationService, TrainerService
from composer_nb.trainer.services.trainer_ranks import TrainerRank
from composer_nb.trainer.settings import Settings, override
from tests.conftest import TINY

pytest.importorskip("ray", reason="Ray is an extra")
pytestmark = pytest.mark.whole

HERE, THERE = {"cpus": 2}, {"gpus": 1}
"""What only the first node has, and only the second."""
DOUBLE = "from pathlib import Path\nseen = Path(mark).exists()\ntotal = steps * 2"


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the second node sees empty."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, hidden: Path) -> Iterator[Cluster]:
    first, second = {"num_cpus": 2}, {"num_cpus": 1, "num_gpus": 1}
    with two_nodes(tmp_path_factory.mktemp("cluster"), first, second, hidden) as made:
        yield made


@pytest.fixture
def bench(tmp_path: Path, cluster: Cluster) -> Bench:
    return Bench(tmp_path, like=cluster.bench)


def test_a_node_that_does_not_see_the_runs_says_so(bench: Bench, cluster: Cluster, hidden: Path):
    job = bench.job({"a": {"notebook": bench.notebook("n", "1"), "retries": 0} | THERE})
    bench.runs = hidden / "runs"
    code, said = bench.run("run", str(job), "--ray", cluster.address)
    attempt = bench.attempt("a").resolve() / "attempt.json"
    assert code == 75 and f"does not see {attempt}: keep --runs on a shared file system" in said
    assert not bench.attempt("a").with_name("log.txt").exists()


def test_a_node_that_does_not_see_the_notebooks_says_so(tmp_path: Path):
    attempt = tmp_path / "attempt.json"
    attempt.write_text(json.dumps({"folder": str(tmp_path / "elsewhere")}))
    with pytest.raises(
        FileNotFoundError, match="does not see .*/elsewhere: keep the notebooks on a shared file system"
    ):
        run_attempt(str(attempt), "")


def begun(source: RunDir, runs: Path, name: str, cluster: Cluster) -> RunDir:
    """A fork of a run that is to do RL on the cluster."""
    changes: dict[str, Any] = {
        "services.on": True, "services.address": cluster.address, "rl.steps": 3, "rl.prompts": 2, "rl.max_seconds": 0.0,
        "rl.evaluate_every": 0,
    }  # fmt: skip
    return fork(source, override(Settings(), TINY | changes), runs=runs, name=name)


def reinforce(run: RunDir, bench: Bench) -> tuple[int, str]:
    """The process of RL: its exit status and what it said."""
    command = [sys.executable, "-m", "composer_nb.trainer.services.run", str(run.path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=bench.environment, check=False, timeout=patience(300), **pipes)
    print(done.stdout)
    return done.returncode, done.stdout


def test_rl_over_two_nodes_accounts_for_every_rollout(tiny_run: RunDir, bench: Bench, cluster: Cluster):
    run, before = begun(tiny_run, bench.runs, "shared", cluster), cluster.actors()
    code, said = reinforce(run, bench)
    info = run.finished("rl")
    assert code == 0 and info is not None and "died" not in said
    places = {kind: node for _, kind, node in cluster.actors() - before}
    assert places.keys() == {"TrainerService", "EngineService", "EnvironmentService"}
    assert set(places.values()) == {cluster.head, cluster.other}
    files = sorted((run.path / "rollouts").glob("rl_*.parquet"))
    tasks = [task for file in files for task in pq.read_table(file, columns=["task_id"])["task_id"].to_pylist()]
    assert len(files) == 3 and Counter(Counter(tasks).values()) == {4: 3 * 2}, "no prompt skipped, none twice"
    assert sum(run.ledger().values()) == info["sampled"] > 0
    assert (run.path / "weights" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize("steps", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rl_where_a_node_does_not_see_the_run_ends_with_one_line(
    tiny_run: RunDir, bench: Bench, cluster: Cluster, hidden: Path, steps: int
):
    """Nodes are asked before RL begins; a run that goes on asks where its services start."""
    run = begun(tiny_run, hidden, f"hidden-{steps}", cluster)
    run.take_steps("rl", [{"step": 1}] * steps)
    code, said = reinforce(run, bench)
    assert code == 1 and said.splitlines()[-1].endswith(
        f"does not see {run.path}: keep --runs on a file system that all nodes of services.address share, under the same path"
    )
    assert "made again" not in said and len(said.splitlines()) == 2


@pytest.mark.parametrize("kind", [EngineService, EnvironmentService, TrainerService, TrainerRank, EvaluationService])
def test_a_service_makes_nothing_where_it_does_not_see_the_run(tmp_path: Path, kind: Any):
    run, s = tmp_path / "gone", Settings()
    more = {
        EngineService: (run, s, 0, 0, "engine"),
        EnvironmentService: (run, s.env, s.limits, None, 4, None, False),
        TrainerRank: (0, run, s),
    }
    with pytest.raises(NotSeen, match="does not see .*/gone: keep --runs on"):
        kind(*more.get(kind, (run, s)))
    assert not run.exists()
