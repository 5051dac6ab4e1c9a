"""Looking at a run: what is seen at every moment of it, and that nothing of it is touched."""

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe.launch import _only_launcher as live
from composer_nb.trainer.recipe.reader import ReadOnly, Status, prompts, read_status, wait_until
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Schedule
from composer_nb.trainer.services.journal import Journal, request_change
from composer_nb.trainer.services.orchestrator import Dispatch, Event, Finished, Joined, Orchestrator, Train, Trained
from composer_nb.trainer.settings import Settings, override, to_dict

SAMPLED = 3
"""Tokens of every rollout that `train` pretends."""


def tree(path: Path) -> dict[str, tuple[int, int]]:
    """Every file with its size and the time of its last change."""
    return {str(f.relative_to(path)): (f.stat().st_size, f.stat().st_mtime_ns) for f in path.rglob("*")}


def step(reward: float = 0.0, wall: float = 1.0) -> dict[str, Any]:
    return {"reward": reward, "solved": 0.0, "staleness": 0.0, "time": {"wall_s": wall, "train_s": wall / 4}}


def train(run: RunDir, steps: int, after: int = 0) -> None:
    """Run RL whose rollouts and steps take no time, until `steps` steps and `after` more rollouts are done. Orchestrator, journal
    and transactions are real."""
    orchestrator = Orchestrator(Schedule(prompts=2, group=2, ahead=1, bound=2))
    journal = Journal(run)
    waiting: list[Event] = [Joined(at=0.0, worker="engine-1", capacity=5)]
    remaining = after
    while waiting:
        event = waiting.pop(0)
        if orchestrator.version == steps and isinstance(event, Finished):
            if not remaining:
                continue
            remaining -= 1
        with journal.transaction():
            if isinstance(event, Trained):
                tokens = SAMPLED * 4
                journal.log_step(event.step + 1, step(), {"trained": tokens - 5, "zero_advantage": 5})
                journal.log_version(event.step + 1, event.step, f"hash {event.step + 1}")
            commands = orchestrator.handle(event)
            for command in commands:
                if isinstance(command, Train):
                    journal.log_batch(command, 1e-3)
            journal.save(orchestrator.snapshot())
        for command in commands:
            if isinstance(command, Dispatch):
                name = {"slot": command.slot, "attempt": command.attempt}
                waiting += [
                    Finished(at=0.0, **name, member=p, oldest_version=orchestrator.version, sampled=SAMPLED)
                    for p in command.members
                ]
            elif isinstance(command, Train) and command.step < steps:
                waiting.append(Trained(at=0.0, step=command.step))
    journal.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was created and not started."""
    run_dir = RunDir(tmp_path / "runs" / "it")
    write_json(run_dir.path / "settings.json", to_dict(override(Settings(), {"rl.steps": 20, "rl.max_seconds": 0.0})))
    return run_dir


def test_a_finished_run_is_seen_whole_and_left_as_it_is(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]) -> None:
    run = copy_of(tiny_run)
    before = tree(run.path)
    status = read_status(run.path)
    assert tree(run.path) == before
    assert (status.state, status.stage, status.pid, status.left_s) == ("complete", "", None, None)
    assert list(status.steps) == run.steps("rl") and (status.steps_done, status.total) == (3, 3)
    assert dict(status.ledger) == run.ledger() and status.sampled is None
    assert sum(status.ledger.values()) == sum(point["sampled"] for point in status.steps)
    assert status.last_line.startswith("the run is complete") and "numerics" in status.stages
    assert (status.served, status.slots, status.engines, status.bound) == (None, (), (), 0)
    (run.path / "said.log").unlink()
    assert read_status(run.path).state == "complete", "its stages say so as well"


def test_looking_makes_no_run_and_changes_none(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run here"):
        read_status(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        ReadOnly(run.path).finish("rl", 1.0, {})
    before = tree(run.path)
    for folder in (run.path / "weights", run.path / "figures"):
        folder.rmdir()
        ReadOnly(run.path).steps("rl")
        assert not folder.exists()
    assert tree(run.path).keys() < before.keys()


def test_state_is_that_of_the_lock_and_of_the_last_words(run: RunDir) -> None:
    status = read_status(run.path)
    assert (status.state, status.last_line, status.stage, status.steps_done) == ("dead", "", "tokenizer", 0)
    log_path, began = run.path / "said.log", time.time()
    log_path.write_text("midtrain …\nmidtrain 20/100: loss 1.0\nhalf a li")
    assert wait_until(run.path, lambda status: False, 60.0).state == "dead", "a run that is over changes no more"
    with live(run):
        status = wait_until(run.path, lambda status: status.state == "live", 60.0)
        assert (status.state, status.pid, status.last_line) == ("live", os.getpid(), "midtrain 20/100: loss 1.0")
        # Some disks store times in whole seconds.
        assert status.quiet_s is not None and 0 <= status.quiet_s <= time.time() - began + 1
        with pytest.raises(TimeoutError, match=r"it: not within 0.1 s; its last line: 'midtrain 20/100: loss 1.0'"):
            wait_until(run.path, lambda status: False, 0.1)
    log_path.write_text("a\nthe run is complete after 3 s: here\n")
    assert (read_status(run.path).state, read_status(run.path).stage) == ("complete", "")


def test_how_far_it_is_and_what_is_left(run: RunDir) -> None:
    def finish(*stages: str) -> None:
        for name in stages:
            run.finish(name, 1.0, {})

    finish("tokenizer", "data")
    run.commit("midtrain", 500, {}, [(500, {"loss": 1.0})], seconds=10.0)
    with live(run):
        status = read_status(run.path)
        assert (status.stage, status.steps_done, status.total, status.left_s) == (
            "midtrain",
            500,
            1600,
            pytest.approx(22.0),
        )
    finish("midtrain", "sft", "eval_base", "eval_midtrained", "eval_start")
    walls = [60.0, *[2.0] * 5]  # the first step waited for the services to start
    run.commit("rl", 6, {}, [(at + 1, step(wall=wall)) for at, wall in enumerate(walls)])
    assert read_status(run.path).left_s is None, "nobody works on it"
    with live(run):
        status = read_status(run.path)
        assert (status.stage, status.steps_done, status.total, status.left_s) == ("rl", 6, 20, pytest.approx(28.0))
        write_json(run.path / "settings.json", to_dict(override(Settings(), {"rl.steps": 20, "rl.max_seconds": 75.0})))
        assert read_status(run.path).left_s == pytest.approx(5.0), "its time will be up"


def test_a_line_that_is_being_written_is_not_read(run: RunDir) -> None:
    run.commit("rl", 2, {}, [(1, step(0.1)), (2, step(0.2))])
    for at, reward in ((2, 0.2), (3, 0.3), (4, 0.4)):
        run.log("rl", at, step(reward))
    text = (run.path / "metrics.jsonl").read_text()
    last = len(text.splitlines()[-1])
    with live(run):
        for cut, rewards in ((last, [0.1, 0.2, 0.3]), (1, [0.1, 0.2, 0.3]), (0, [0.1, 0.2, 0.3, 0.4])):
            (run.path / "metrics.jsonl").write_text(text[: len(text) - cut])
            assert [point["reward"] for point in read_status(run.path).steps] == rewards
    assert len(read_status(run.path).steps) == 2, "of a dead run only what is durable: the rest will be done again"


def test_the_books_add_up_at_every_moment_of_a_run_that_writes(run: RunDir) -> None:
    statuses: list[Status] = []
    with live(run):
        writer = threading.Thread(target=train, args=(run, 300))
        writer.start()
        while writer.is_alive():
            statuses.append(read_status(run.path))
        writer.join()
        statuses.append(read_status(run.path))
    counted = [status for status in statuses if status.sampled is not None]
    assert all(sum(status.ledger.values()) == status.sampled for status in counted)
    assert all(len(status.steps) == status.trained == status.versions for status in counted)
    assert counted[-1].trained == 300 and len({status.sampled for status in counted}) > 3, (
        "it was seen at several moments"
    )


def test_work_under_way_is_that_of_the_orchestrator(run: RunDir) -> None:
    train(run, 3, after=1)
    status = read_status(run.path)
    assert status.trained == 3 and status.served == 3 and not status.engines
    snapshot = json.loads(run.query("SELECT snapshot FROM orchestrator")[0][0])
    assert [slot.slot for slot in status.slots] == [group["slot"] for group in snapshot["groups"]] != []
    assert sum(slot.finished for slot in status.slots) * SAMPLED == snapshot["held_tokens"] == status.ledger["held"] > 0
    assert sum(slot.running for slot in status.slots) > 0
    assert all(slot.size == 2 >= slot.finished + slot.running for slot in status.slots)


def test_engines_and_changes_are_the_newest(run: RunDir) -> None:
    train(run, 2)
    rows = [(1, "engine-1", "a", 9, 0.5, 0.1), (1, "engine-2", "a", 9, 0.5, 0.1), (2, "engine-1", "b", 9, 0.2, 0.05)]
    with run.connect() as db:
        db.executemany("INSERT INTO served VALUES (?, ?, ?, ?, ?, ?)", rows)
    request_change(run, "services.bound", "5")
    status = read_status(run.path)
    assert [(e.name, e.version, e.hash) for e in status.engines] == [("engine-2", 1, "a"), ("engine-1", 2, "b")]
    assert [(c.name, c.value, c.step) for c in status.changes] == [("services.bound", "5", None)] and status.bound == 2
    journal = Journal(run)
    journal.judge(1, 2)
    journal.close()
    status = read_status(run.path)
    assert [c.step for c in status.changes] == [2] and status.bound == 5


def test_prompts_of_a_log_of_batches(run: RunDir) -> None:
    train(run, 5, after=1)
    fates = prompts(run.path)
    assert fates is not None and not fates.skipped and not fates.twice
    assert fates.trained == tuple(range(10)) and fates.in_flight
    with run.connect() as db:
        [(text,)] = db.execute("SELECT train FROM batch WHERE step = 2").fetchall()
        lost, repeated = json.loads(text)["slots"]
        db.execute(
            "UPDATE batch SET train = ? WHERE step = 2", (json.dumps(json.loads(text) | {"slots": [repeated, 0]}),)
        )
    fates = prompts(run.path)
    assert fates is not None and (fates.skipped, fates.twice) == ((lost,), (0,))


def test_prompts_of_the_plain_loop_are_those_of_its_rollouts(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    fates = prompts(tiny_run.path)
    assert fates is not None and fates.trained == tuple(range(3 * 4)) and not (fates.skipped or fates.twice)
    run = copy_of(tiny_run)
    first, second = (run.path / "rollouts" / f"rl_0000{at}_0.parquet" for at in (0, 1))
    second.unlink()
    assert prompts(run.path) is None, "an excerpt does not tell"
    second.write_bytes(first.read_bytes())
    fates = prompts(run.path)
    assert fates is not None
    assert (fates.twice, fates.skipped) == ((0, 2), (4, 6)), "one of two ranks has every other prompt"
