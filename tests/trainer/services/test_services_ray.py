"""The services as they really run: actors of a Ray head, a trainer of one rank or two, a launcher in a session of its own,
processes that are killed.

`test_coordinator.py` asks the same of threads; here it is Ray that is tried. Ray is started once.
"""

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from test_coordinator import IN_STEP, MICRO, points, trained, versions, weights

from composer_nb.harness.sandbox.reap import reap, started
from composer_nb.trainer.recipe.detached import follow, start_detached, stop
from composer_nb.trainer.recipe.launch import RunFailed, begin_run, fork, start_or_resume
from composer_nb.trainer.recipe.replay import replay
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.head import Head, holder
from composer_nb.trainer.settings import Settings, override
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RANKS = {"services.on": True, "ranks": 2, "mesh.shard": 2, "mesh.ep": 2, "rl.max_seconds": 0.0}


def quiet(line: str) -> None:
    """Says nothing."""


@pytest.fixture(scope="module")
def loop(runs: Path) -> RunDir:
    """A run of the plain loop."""
    return start_or_resume(None, override(Settings(), MICRO), runs=runs, name="loop", say=quiet)


def below(pid: int) -> dict[int, tuple[int, str]]:
    """Return a process and its descendants: pid -> (clock tick of its start, title)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    pids = [pid]
    for process in pids:
        pids += [child for child, parent in parents.items() if parent == process]
    titles = {}
    for process in pids:
        with suppress(OSError):
            if tick := started(process):
                titles[process] = (tick, Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return titles


def test_left_alone_it_survives_the_death_of_an_engine_and_of_its_launcher(loop: RunDir, runs: Path, head: Head):
    """The run is started detached and followed; an engine is killed, the run is stopped, and then started again."""
    asynchronous = {
        "services.on": True, "services.ahead": 1, "services.bound": 2, "rl.steps": 12, "rl.max_seconds": 0.0,
    }  # fmt: skip
    settings = override(Settings(), MICRO | asynchronous | {"services.address": head.folder})
    run = fork(loop, settings, runs=runs, name="left-alone")
    assert start_detached(run.path).path == run.path and holder(run.path / "launch.lock"), "it is live"
    wait_until(lambda: len(run.steps("rl")) >= 1, 400)
    engines = [pid for pid, (_, title) in below(head.pid).items() if title.startswith("ray::EngineService")]
    os.kill(engines[0], signal.SIGKILL)
    at = len(run.steps("rl"))
    wait_until(lambda: len(run.steps("rl")) >= at + 2, 400)
    assert "died" in (run.path / "said.log").read_text()
    assert stop(run.path) and not stop(run.path)
    lines: list[str] = []
    assert follow(run.path, lines.append) == "dead" and lines[-1] == "KeyboardInterrupt"
    start_detached(run.path)
    start_detached(run.path)  # it is live: nothing happens
    assert follow(run.path, lines.append, lines=0) == "complete"
    tasks = [task for _, ids in trained(run) for task in ids]
    assert Counter(Counter(tasks).values()) == {4: 12 * 2}, "no prompt is skipped, none is trained twice"
    info = run.finished("rl")
    assert info is not None and sum(run.ledger().values()) == info["sampled"]
    assert [step.version for step in replay(run, settings, 12) if step.same] == sorted(versions(run))
    assert not list((run.path / "journal").iterdir())


def rank_pids(head: Head) -> list[int]:
    return [pid for pid, (_, title) in below(head.pid).items() if title.startswith("ray::TrainerRank")]


def test_two_ranks_learn_what_one_process_does(loop: RunDir, runs: Path, head: Head) -> None:
    settings = override(Settings(), MICRO | IN_STEP | RANKS | {"services.address": head.folder})
    run = fork(loop, settings, runs=runs, name="ranks")
    start_or_resume(run.path, say=quiet)
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
    whole = start_or_resume(None, settings, runs=runs, name="mesh", say=quiet)
    assert {"midtrain", "sft", "rl"} <= {stage for (stage,) in whole.query("SELECT DISTINCT stage FROM step")}
    assert all(file.is_dir() for file in (whole.path / "checkpoints").iterdir()), "no rank wrote a whole checkpoint"
    run = begin_run(settings, runs, "cut")
    for stage, rank in (("midtrain", 0), ("sft", 1)):
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(start_or_resume, run.path, say=quiet)
            wait_until(lambda stage=stage: run.steps(stage), 400)  # type: ignore[misc]
            [pid] = (
                pid
                for pid, (_, title) in below(os.getpid()).items()
                if f"recipe.worker {run.path}" in title and title.split()[-1] == str(rank)
            )
            os.kill(pid, signal.SIGKILL)
            assert isinstance(failed.exception(), RunFailed)
        assert run.finished(stage) is None
    start_or_resume(run.path, say=quiet)
    for stage in ("midtrain", "sft"):
        assert run.steps(stage) == whole.steps(stage)
    assert weights(run, "start") == weights(whole, "start")
    assert weights(run) == weights(whole)


def test_a_rank_that_is_killed_costs_no_prompt(loop: RunDir, runs: Path, head: Head) -> None:
    changes: dict[str, Any] = {"services.ahead": 1, "services.bound": 2, "rl.steps": 12}
    settings = override(Settings(), MICRO | RANKS | changes | {"services.address": head.folder})
    run = fork(loop, settings, runs=runs, name="killed")
    lines: list[str] = []
    alive = threading.Thread(target=lambda: start_or_resume(run.path, say=lines.append))
    alive.start()
    for kill, at in enumerate((1, 5)):
        wait_until(lambda at=at: len(run.steps("rl")) >= at, 400)  # type: ignore[misc]
        os.kill(rank_pids(head)[kill], signal.SIGKILL)
        wait_until(lambda kill=kill: sum("resuming from step" in line for line in lines) > kill, 400)  # type: ignore[misc]
    alive.join(400)
    assert not alive.is_alive(), lines[-5:]
    tasks = [task for _, ids in trained(run) for task in ids]
    assert Counter(Counter(tasks).values()) == {4: 12 * 2}, "no prompt is skipped, none is trained twice"
    assert sorted(versions(run)) == list(range(2, 25, 2)), "each batch makes two; the journal keeps the last"
    assert sum(run.ledger().values()) == run.finished("rl")["sampled"]  # type: ignore[index]
    assert not rank_pids(head) and not list((run.path / "journal").iterdir())


def test_reap_ends_a_killed_head_with_all_of_ray(runs: Path, head: Head) -> None:
    processes = below(head.pid)
    assert any("raylet" in title for _, title in processes.values()) and any(
        "gcs" in title for _, title in processes.values()
    )
    [folder] = [line.split('"name": "')[1].split('"')[0] for line in journal_lines(runs) if '"directory"' in line]
    assert Path(folder).is_dir()
    os.kill(head.pid, signal.SIGKILL)
    wait_until(lambda: holder(runs / "head" / "head.lock") is None, 400)
    reaped = reap(runs)
    assert not reaped.failed and folder in reaped.directories and not Path(folder).exists()
    wait_until(lambda: not [pid for pid, (tick, _) in processes.items() if started(pid) == tick], 10)
    assert not list((runs / "head" / "journal").iterdir())


def journal_lines(runs: Path) -> list[str]:
    return [line for file in (runs / "head" / "journal").iterdir() for line in file.read_text().splitlines()]
