"""Starting the ranks: one launcher a run, honest last words, forks that take over what they say and no more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from composer_nb.harness.files import write_json
from composer_nb.trainer.recipe import launch
from composer_nb.trainer.recipe.launch import BEFORE_RL, LOST, RunBusy, RunFailed, fork, start_or_resume
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict

PYTHON = sys.executable
HOLDER = """
import sys, time
from pathlib import Path
from composer_nb.trainer.recipe import launch
def ranks(run, world, say):
    print("runs", flush=True)
    time.sleep(60)
launch._run_ranks = ranks
launch.start_or_resume(Path(sys.argv[1]), say=lambda line: None)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create(tmp_path / "runs", "tour")
    write_json(made.path / "settings.json", to_dict(override(Settings(), {"services.on": False})))
    return made


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_run_ranks", lambda run, world, say: None)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell script that stands for every rank."""
    script = tmp_path / "worker"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(script))
    return script


def quiet(line: str) -> None:
    """Says nothing."""


def go(run: Path) -> None:
    """Start a run whose ranks do nothing and end with 0: that is never a run that is complete."""
    with pytest.raises(RunFailed, match=r"ended with 0 before the run was complete: .*said\.log"):
        start_or_resume(run, say=quiet)


def test_a_batch_that_is_called_again_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_launch", lambda run, settings, say: None)
    said: list[str] = []

    def call(**dotted: object) -> RunDir:
        settings = override(Settings(), {"seed": 1, **dotted})
        return start_or_resume(None, settings, runs=tmp_path / "runs", resume=True, say=said.append)

    first = call()
    assert call().path == first.path and not said
    assert call(**{"rl.gate": False}).path == first.path and not said
    assert not from_dict(first.settings()).rl.gate, "a refused run goes on without its gate"
    assert call().path == first.path and from_dict(first.settings()).rl.gate
    other = call(seed=2)
    assert other.path != first.path
    newest = tmp_path / "runs" / "tour"
    assert said == [f"{first.path} was begun with seed=1, now 2; {newest} is now the new run {other.path.name}"]
    with pytest.raises(FileNotFoundError, match="no task file"):
        call(**{"env.tasks": str(tmp_path / "nowhere")})
    assert len(said) == 1, "what is refused is no new run"
    made = other.path / "provenance.json"
    write_json(made, json.loads(made.read_text()) | {"package_digest": "another"})
    assert call(seed=2).path != other.path
    assert said[-1].startswith(f"{other.path} was begun by another version of this package; ")
    (tmp_path / "runs" / "tour").unlink()
    (tmp_path / "runs" / "tour").symlink_to("gone")
    assert call().path.is_dir()


def test_a_second_launcher_is_refused_until_the_first_is_dead(run: RunDir, no_ranks: None) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "runs\n"
    message = f"{run.path.name} is being run by process {holder.pid}"
    with pytest.raises(RunBusy, match=message):
        start_or_resume(run.path, say=quiet)
    with pytest.raises(RunBusy, match=message):
        start_or_resume(run.path.parent / "tour", say=quiet)  # by its other name
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    go(run.path)
    go(run.path)


def test_the_ranks_do_not_hold_the_lock(run: RunDir, worker: Path, tmp_path: Path) -> None:
    """Otherwise a child that outlives its launcher would keep everybody out."""
    worker.write_text(f"#!/bin/sh\nls -l /proc/$$/fd > {tmp_path}/open-$9\n")
    go(run.path)
    for rank in range(2):
        held = (tmp_path / f"open-{rank}").read_text()
        assert f"rank{rank}.log" in held and "launch.lock" not in held


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("kill -9 $$", r"rank [01] ended with -9: it said nothing"),
        ("echo oh >&2; kill -9 $$", r"rank [01] ended with -9: oh \("),
        ("printf 'oh \\377' >&2; exit 3", r"rank [01] ended with 3: oh . \("),
        ("echo '[rank1]: ValueError: no such tasks' >&2; exit 1", r"^no such tasks \("),
    ],
)
def test_last_words_are_of_this_launch(run: RunDir, worker: Path, program: str, words: str) -> None:
    worker.write_text(f"#!/bin/sh\n{program}\n")
    for rank in range(2):
        (run.path / f"rank{rank}.log").write_text("ValueError: of the day before\n")
    with pytest.raises(RunFailed, match=words):
        start_or_resume(run.path, say=quiet)
    assert (run.path / "rank0.log").read_text(errors="replace").startswith("ValueError: of the day before\n")


def test_a_fork_takes_over_what_the_stages_before_rl_made_and_nothing_else(run: RunDir, tmp_path: Path) -> None:
    before = [
        "data/tokenizer.json",
        "data/rl.jsonl",
        "weights/base/x",
        "weights/midtrained/x",
        "weights/start/config.json",
    ]
    before += ["rollouts/eval_base.parquet", "rollouts/eval_midtrained.safetensors", "rollouts/eval_start.parquet"]
    after = ["weights/control/x", "weights/final/x", "weights/before_final/x", "weights/v000012/config.json"]
    after += [f"rollouts/{name}.parquet" for name in ("eval_control", "eval_final", "rl_00001_0", "eval_tune_000010")]
    for name in (*before, *after, "checkpoints/rl-000001.safetensors"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(name)
    for stage in (*BEFORE_RL, "control", "eval_control"):
        run.finish(stage, 1.0, {})
        run.commit(stage, 5, {}, [(5, {"loss": 1.0})])
    forked = fork(run, Settings(), runs=tmp_path / "forks")
    folders = ("data", "weights", "rollouts", "checkpoints")
    files = (path for folder in folders for path in (forked.path / folder).rglob("*") if path.is_file())
    assert {str(path.relative_to(forked.path)) for path in files} == set(before)
    assert forked.finished("control") is None and forked.finished("eval_start") is not None
    assert forked.steps("midtrain") == [{"step": 5, "loss": 1.0}] and not forked.steps("control")


def test_services_that_were_lost_are_started_again_and_those_that_said_why_are_not(tmp_path: Path, monkeypatch):
    run = create(tmp_path, "lost")
    ends = [RunFailed("services ended with 1: it said nothing (services.log)", 1), RunFailed("gone", LOST), None]

    def one(*given: object) -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    monkeypatch.setattr(launch, "_run_processes", one)
    said: list[str] = []
    launch._run_services(run, said.append)
    assert ends == [] and len(said) == 2
    ends = [RunFailed("services ended with 1: rl.lr is too high (services.log)", 1)]
    with pytest.raises(RunFailed, match="rl.lr"):
        launch._run_services(run, said.append)
