"""An excerpt of a run: small, true to the run, without the machine, never written to."""

import json
import runpy
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from composer_nb.harness.tasks.task import load_tasks
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.reader import example_run, open_run, solved_by_task, stored_steps
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.journal import Journal
from composer_nb.trainer.settings import Settings, from_dict, override
from composer_nb.views import rollout
from composer_nb.views.report import write_report

# Settings of the examples that are not the defaults any more.
OLDER: dict[str, Any] = {"sft.steps": 300, "rl.rehearsal": 0.0}
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "data" / "make_example.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def cut(tiny_run: RunDir, script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Return an excerpt of the tiny run."""
    script["main"].__globals__.update(HELDOUT_TASKS=5, DEMONSTRATIONS=7)
    out = tmp_path_factory.mktemp("cut") / "example"
    script["main"]([str(tiny_run.path), str(out)])
    return open_run(out)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def test_numbers_are_those_of_the_full_run(tiny_run: RunDir, cut: RunDir):
    full, excerpt = build_report(tiny_run), build_report(cut)
    assert excerpt.pop("excerpt") == cut.excerpt
    for name in ("settings", "provenance"):
        full.pop(name), excerpt.pop(name)
    assert excerpt == full
    assert excerpt["eval"]["final"]["n_tasks"] > len(solved_by_task(cut, "final")) == 5
    for stage in ("midtrain", "sft", "rl"):
        assert cut.steps(stage) == tiny_run.steps(stage)
    assert cut.ledger() == tiny_run.ledger()


def test_what_is_left_fits_together(tiny_run: RunDir, cut: RunDir):
    assert cut.excerpt is not None
    assert stored_steps(cut) == cut.excerpt["rollouts_of_rl_steps"] == [1, 3] and stored_steps(tiny_run) == [1, 2, 3]
    for step in (1, 3):
        full, excerpt = rollout.sampled(tiny_run, step), rollout.sampled(cut, step)
        assert [s.advantage for s in excerpt] == [s.advantage for s in full]
        for short, long in zip(excerpt, full, strict=True):
            assert np.array_equal(short.segment.trace.routes, long.segment.trace.routes)
    full_scores, scores = solved_by_task(tiny_run, "start"), solved_by_task(cut, "start")
    assert scores == {name: full_scores[name] for name in scores}
    names = {task.id for task in load_tasks(cut.path / "data" / "heldout.jsonl")}
    assert names == set(scores) and set(rollout.held_out(cut, "final")) == names
    training_ids = {task.id for task in load_tasks(cut.path / "data" / "rl.jsonl")}
    task_ids = {s.attempt.task.id for step in (1, 3) for s in rollout.sampled(cut, step)}
    assert training_ids == task_ids
    load_pretrained(cut.path / "weights" / "before_final")
    before = contents(cut.path)  # looking at it writes nothing
    run = open_run(cut.path)
    build_report(run), rollout.sampled(run), rollout.held_out(run, "final"), rollout.experts(run)
    assert run.checkpoint("rl") is None and contents(cut.path) == before


def test_nothing_of_a_running_process_or_of_the_machine_is_left(tiny_run: RunDir, cut: RunDir):
    assert tiny_run.query("SELECT * FROM checkpoint") and not cut.query("SELECT * FROM checkpoint")
    assert not {"journal", "launch.lock", "said.log", "checkpoints"} & {path.name for path in cut.path.iterdir()}
    provenance = json.loads((cut.path / "provenance.json").read_text())
    assert provenance["system"] == "Linux" and provenance["versions"] == build_report(tiny_run)["versions"]
    for path in cut.path.rglob("*"):
        assert not path.is_file() or str(tiny_run.path).encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "write",
    [
        lambda run: run.finish("rl", 1.0, {}),
        lambda run: Journal(run),
        lambda run: write_report(run),
        lambda run: start_or_resume(run.path, override(Settings(), {"rl.steps": 99})),
        lambda run: fork(run, None),  # type: ignore[arg-type]
    ],
    ids=["finish", "journal", "report", "resume", "fork"],
)
def test_whatever_would_write_to_it_is_refused(cut: RunDir, write: Callable[[RunDir], Any]):
    before = contents(cut.path)
    with pytest.raises((ValueError, sqlite3.OperationalError), match="excerpt|readonly|other settings"):
        write(cut)
    assert contents(cut.path) == before


def test_a_result_that_is_too_large_or_names_the_machine_is_refused(
    tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir], script: dict[str, Any], tmp_path: Path
):
    run = copy_of(tiny_run)
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"stage": "rl", "step": 99, "note": f"{run.path}/weights"}) + "\n")
    with pytest.raises(SystemExit, match=r"metrics\.jsonl names the machine"):
        script["main"]([str(run.path), str(tmp_path / "out")])
    (run.path / "metrics.jsonl").write_text(json.dumps({"stage": "rl", "step": 99, "note": "x" * 16_000_000}) + "\n")
    with pytest.raises(SystemExit, match="bytes, more than"):
        script["main"]([str(run.path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_example_that_ships_is_small_and_whole():
    run = example_run()
    before = contents(run.path)
    report = build_report(run)
    assert report["complete"] and run.excerpt is not None and len(stored_steps(run)) == 3
    assert sum(len(data) for _, data in before.values()) < 20_000_000
    assert report["eval"]["final"]["n_tasks"] == run.excerpt["of_heldout_tasks"] > run.excerpt["heldout_tasks"]
    rows = pq.read_table(run.path / "rollouts" / "eval_final.parquet", columns=["task_id"])["task_id"].to_pylist()
    assert len(set(rows)) == run.excerpt["heldout_tasks"]
    assert contents(run.path) == before


@pytest.mark.parametrize("seed", [0, 1])
def test_the_examples_that_ship_are_of_the_current_recipe(seed: int):
    """A change of the recipe's defaults needs new examples: `make example`. Their time limit is lifted, since the number of
    batches must not depend on the machine. OLDER is what the next ones leave behind."""
    settings = from_dict(example_run(seed).settings())
    assert settings == override(Settings(), OLDER | {"seed": seed, "rl.max_seconds": settings.rl.max_seconds})
    assert len(example_run(seed).steps("rl")) == Settings().rl.steps
