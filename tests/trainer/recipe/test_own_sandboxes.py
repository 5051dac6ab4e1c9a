"""RL with the product's tools on tasks that are made of a library which is not ours, graded by pytest with twins: one seed gives
one result, nobody's death costs a reward, and what a run reports."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import websocket

from composer_nb.cli import main
from composer_nb.harness import attempt as attempts
from composer_nb.harness.grading.plan import plan_of, with_plan
from composer_nb.harness.grading.recorded import guard_of
from composer_nb.harness.sandbox.contract import Sandbox
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.prepare import unguarded
from composer_nb.trainer.recipe.reader import EXAMPLES
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, override
from composer_nb.views.report import fact_rows
from tests.trainer.services.test_coordinator import IN_STEP as MICRO_IN_STEP
from tests.trainer.services.test_coordinator import cut_off, go

pytestmark = pytest.mark.slow
WEIGHTS = EXAMPLES[0] / "weights" / "final"
SMALL: dict[str, Any] = {
    "env.sandboxes": 3, "env.tools": "cursor", "ranks": 1, "services.on": False, "eval.samples": 1, "limits.turns": 4,
    "rl.gate": False, "rl.steps": 2, "rl.prompts": 2, "rl.group": 3, "rl.evaluate_every": 0, "rl.checkpoint_every": 1,
    "data.heldout_tasks": 1, "data.structure_tasks": 4, "data.tune_tasks": 1, "reward.effort.weight": 0.1,
}  # fmt: skip
"""Fewer sandboxes than rollouts of a batch, so that some wait for others to end."""
ALONE = dict.fromkeys(("midtrain.steps", "sft.steps", "data.demonstrations", "data.mistaken_demonstrations"), 0)
IN_STEP = MICRO_IN_STEP | {"services.on": True}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `composer-nb tasks make` makes of a library that is not ours, with the part of its suite that needs no network."""
    folder, library = tmp_path_factory.mktemp("tasks"), Path(websocket.__file__).parent
    shutil.copytree(library, folder / "lib" / "websocket", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    for name in ("url", "cookiejar"):
        (folder / "lib" / "tests").mkdir(exist_ok=True)
        shutil.copyfile(library / "tests" / f"test_{name}.py", folder / "lib" / "tests" / f"test_{name}.py")
    out = folder / "made"
    assert main(["tasks", "make", str(folder / "lib"), "--out", str(out), "--limit", "5"]) == 0
    return out


def test_tasks_that_nothing_guards_are_named(tasks: Path):
    loaded = load_tasks(tasks)
    bare = [with_plan(task, replace(plan_of(task), twins=(), calls=())) for task in loaded]
    assert unguarded(bare) == [task.id for task in loaded]
    assert set(unguarded(loaded)) == {task.id for task in loaded if guard_of(task).by == "none"} != set(unguarded(bare))


@pytest.fixture(scope="module")
def loop(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the plain loop."""
    settings = override(Settings(), SMALL | ALONE | {"model.start": str(WEIGHTS), "env.tasks": str(tasks)})
    return start_or_resume(None, settings, runs=tmp_path_factory.mktemp("loop"), say=lambda line: None)


@pytest.fixture
def rl(loop: RunDir, tmp_path: Path) -> Callable[..., tuple[RunDir, Settings, list[str]]]:
    """`rl(name, cut, **changes)`: RL of that run again, as services; gives its run, settings and lines. With `cut` it is killed
    after so many commands, and resumed."""

    def forked(name: str, cut: int = 0, **changes: Any) -> tuple[RunDir, Settings, list[str]]:
        base = override(Settings(), SMALL | ALONE | {"model.start": str(WEIGHTS)})
        settings = override(base, {"env.tasks": loop.settings()["env"]["tasks"], **IN_STEP, **changes})
        run = fork(loop, settings, runs=tmp_path, name=name)
        lines = cut_off(run, settings, cut) if cut else []
        run.finish("rl", 1.0, go(run, settings, lines=lines))
        return run, settings, lines

    return forked


def results_of(run: RunDir) -> tuple[list[Any], bytes, list[Any]]:
    """Return the versions, final weights and rollouts of a run."""
    columns = ["task_id", "token_ids", "logprob", "policy_version", "reward", "advantage", "status"]
    stored = [
        pq.read_table(path, columns=columns).to_pylist() for path in sorted(run.path.glob("rollouts/rl_*.parquet"))
    ]
    versions = run.query("SELECT version, hash FROM version ORDER BY version")
    return versions, (run.path / "weights" / "final" / "model.safetensors").read_bytes(), stored


def test_a_run_says_how_its_place_differs_from_the_product(loop: RunDir) -> None:
    report = build_report(loop)
    fidelity = report["fidelity"]
    assert fidelity["calls"] > 10 and fidelity["differences"] == [] and report["complete"]
    fact = dict(fact_rows(report))["training and the product"]
    assert fact == f"no difference in {fidelity['calls']} calls, byte by byte"


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Make the n-th turn's calls take `seconds(n)` longer."""
    run, number = ToolSet.run, count()

    def slowly(tools: ToolSet, *args: Any) -> Any:
        time.sleep(seconds(next(number)))
        return run(tools, *args)

    monkeypatch.setattr(ToolSet, "run", slowly)


def test_in_lockstep_one_seed_gives_one_result_and_its_steps_replay(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result depends neither on how long calls take, even beyond the time after which a silent worker counts as hung, nor on
    a kill in the middle of the second batch."""
    first, _, _ = rl("first")
    with monkeypatch.context() as patch:
        slow(patch, lambda number: (0.0, 0.1, 0.7)[number % 3] if number else 5.0)
        second, _, lines = rl("second", cut=4, **{"services.hang_s": 4.0})
    assert not any("said nothing" in line for line in lines)
    assert (
        results_of(first) == results_of(second) and results_of(first)[1] != (WEIGHTS / "model.safetensors").read_bytes()
    )
    for run in (first, second):
        info = run.finished("rl")
        assert info is not None and sum(run.ledger().values()) == info["sampled"] > 0
        assert info["counts"]["finished"] == 12, "each ended once"
    assert main(["replay", str(second.path), "--step", "2"]) == 0


Boxes = Callable[..., Sandbox]


def killed(
    patch: pytest.MonkeyPatch, owner: Any, name: str, box_of: Boxes, numbers: set[int], dead: list[Sandbox]
) -> None:
    """Kill the sandboxes of these calls of a function, each once, as a machine does that runs out of memory."""
    original, number = getattr(owner, name), count()

    def shot(*args: Any, **kwargs: Any) -> Any:
        box = box_of(*args)
        if next(number) in numbers and all(box is not dead_box for dead_box in dead):
            dead.append(box)
            os.kill(box._machine.channel.peer, signal.SIGKILL)  # type: ignore[attr-defined]
        return original(*args, **kwargs)

    patch.setattr(owner, name, shot)


def test_a_sandbox_that_is_killed_is_no_reward_of_0(rl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dispatched again, whether it is killed while the agent works or when its work is carried out."""
    dead: list[Sandbox] = []
    killed(monkeypatch, ToolSet, "run", lambda tools, session, calls: session.sandbox, {1, 6}, dead)
    killed(monkeypatch, attempts, "carry_back", lambda box: box, {4}, dead)
    run, _, _ = rl("killed")
    steps = run.steps("rl")
    stored = [
        pq.read_table(path, columns=["dispatch", "status"]).to_pylist()
        for path in run.path.glob("rollouts/rl_*.parquet")
    ]
    assert sum(step["infra_errors"] for step in steps) == len(dead) == build_report(run)["rewards"]["infra_errors"] > 0
    assert [len(rows) for rows in stored] == [6, 6] and max(row["dispatch"] for rows in stored for row in rows) > 1
    assert {row["status"] for rows in stored for row in rows} == {"graded"}


@pytest.mark.docker
def test_rl_in_containers_of_docker(tasks: Path, tmp_path: Path, docker_client: Any) -> None:
    words = ["rl", "--model", str(WEIGHTS), "--tasks", str(tasks), "--out", str(tmp_path / "rl")]
    values = SMALL | {"env.backend": "docker", "services.on": True, "services.engines": 1}
    values |= {"reward.weights": '{"solved": 1.0}'}
    assert main([*words, *(part for name, value in values.items() for part in ("--set", f"{name}={value}"))]) == 0
    report = build_report(RunDir((tmp_path / "rl").resolve()))
    assert report["complete"] and report["train"]["steps"] == 2 and report["rewards"]["rollouts"] == 12
    assert report["fidelity"]["differences"] == [] and report["train"]["tokens_accounted"] == 1.0
    assert not docker_client.containers.list(all=True, filters={"label": f"composer_nb.run={report['run']}"})
