"""A whole run whose trainer is two ranks, actors of Ray in a placement group; and what is left of it when ranks are killed."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_coordinator import IN_STEP, MICRO, points, trained, versions, weights
from test_services_ray import below, wait

from composer_nb.trainer.recipe.launch import RunFailed, begin_run, fork, start_or_resume
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.head import Head
from composer_nb.trainer.settings import Settings, override

pytestmark = pytest.mark.slow

RANKS = {"services.on": True, "ranks": 2, "mesh.shard": 2, "mesh.ep": 2, "rl.max_seconds": 0.0}


@pytest.fixture(scope="module")
def loop(runs: Path) -> RunDir:
    """A run of the plain loop, in one process."""
    return start_or_resume(None, override(Settings(), MICRO), runs=runs, name="loop", say=print)


def rank_pids(head: Head) -> list[int]:
    return [pid for pid, (_, title) in below(head.pid).items() if title.startswith("ray::TrainerRank")]


def test_two_ranks_learn_what_one_process_does(loop: RunDir, runs: Path, head: Head) -> None:
    settings = override(Settings(), MICRO | IN_STEP | RANKS | {"services.address": head.folder})
    run = fork(loop, settings, runs=runs, name="ranks")
    start_or_resume(run.path, say=print)
    ours, theirs = points(run), points(loop)
    assert len(ours) == len(theirs) == 4
    for name, value in theirs[0].items():  # later batches are sampled from weights that may be rounded the other way
        if isinstance(value, float):
            assert ours[0][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert trained(run) == trained(loop), "the same tasks in the same batches"
    assert sum(run.ledger().values()) == run.finished("rl")["sampled"]  # type: ignore[index]
    assert len(weights(run)) == len(weights(loop)), "the final weights are whole"
    assert not rank_pids(head) and not list((run.path / "journal").iterdir())


def test_every_stage_is_on_the_mesh_and_goes_on_after_a_kill(runs: Path, head: Head) -> None:
    """A rank is killed in mid-training and another in fine-tuning; the weights are those of a run without kills."""
    settings = override(Settings(), MICRO | IN_STEP | RANKS | {"services.address": head.folder})
    whole = start_or_resume(None, settings, runs=runs, name="mesh", say=print)
    assert {"midtrain", "sft", "rl"} <= {stage for (stage,) in whole.query("SELECT DISTINCT stage FROM step")}
    assert all(file.is_dir() for file in (whole.path / "checkpoints").iterdir()), "no rank wrote a whole checkpoint"
    run = begin_run(settings, runs, "cut")
    for stage, rank in (("midtrain", 0), ("sft", 1)):
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(start_or_resume, run.path, say=print)
            wait(lambda stage=stage: run.steps(stage))  # type: ignore[misc]
            [pid] = (
                pid
                for pid, (_, title) in below(os.getpid()).items()
                if f"recipe.worker {run.path}" in title and title.split()[-1] == str(rank)
            )
            os.kill(pid, signal.SIGKILL)
            assert isinstance(failed.exception(), RunFailed)
        assert run.finished(stage) is None
    start_or_resume(run.path, say=print)
    for stage in ("midtrain", "sft"):
        assert run.steps(stage) == whole.steps(stage)
    assert weights(run, "start") == weights(whole, "start")
    assert weights(run) == weights(whole)


def test_a_rank_that_is_killed_costs_no_prompt(loop: RunDir, runs: Path, head: Head) -> None:
    changes: dict[str, Any] = {"services.ahead": 1, "services.bound": 2, "rl.steps": 12}
    settings = override(Settings(), MICRO | RANKS | changes | {"services.address": head.folder})
    run = fork(loop, settings, runs=runs, name="killed")
    said: list[str] = []
    alive = threading.Thread(target=lambda: start_or_resume(run.path, say=said.append))
    alive.start()
    for kill, at in enumerate((1, 5)):
        wait(lambda at=at: len(run.steps("rl")) >= at)  # type: ignore[misc]
        os.kill(rank_pids(head)[kill], signal.SIGKILL)
        wait(lambda kill=kill: sum("resuming from step" in line for line in said) > kill)  # type: ignore[misc]
    alive.join(400)
    assert not alive.is_alive(), said[-5:]
    tasks = [task for _, ids in trained(run) for task in ids]
    assert Counter(Counter(tasks).values()) == {4: 12 * 2}, "no prompt is skipped, none is trained twice"
    assert sorted(versions(run)) == list(range(2, 25, 2)), "each batch makes two; the journal keeps the last"
    assert sum(run.ledger().values()) == run.finished("rl")["sampled"]  # type: ignore[index]
    assert not rank_pids(head) and not list((run.path / "journal").iterdir())
