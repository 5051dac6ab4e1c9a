"""Starting and following runs: one launcher a run, honest last words, forks that take over what they say and no more; and
processes whose life ends with their parent's. `test_services_ray.py` starts a detached run for real."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from composer_nb.cli import main
from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.reap import started
from composer_nb.trainer.recipe import detached, launch
from composer_nb.trainer.recipe.detached import follow, start_detached, stop
from composer_nb.trainer.recipe.launch import BEFORE_RL, LOST, RunBusy, RunFailed, fork, start_or_resume
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services import head
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.settings import Settings, from_dict, override, to_dict
from tests.waiting import wait_until

LAUNCHER = """
import signal, sys, time
from pathlib import Path
from composer_nb.trainer.recipe import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may have it ignored
def ranks(run, world, say):
    say("step 1")
    time.sleep(60)
launch._run_ranks = ranks
try:
    launch.start_or_resume(Path(sys.argv[1]), say=lambda line: None)
except KeyboardInterrupt:
    sys.exit(1)
"""


def launcher(run: RunDir, program: str = LAUNCHER) -> subprocess.Popen[bytes]:
    """Start a launcher, whose ranks take a minute, in a process of its own. It holds the run's lock on return."""
    process = subprocess.Popen([sys.executable, "-c", program, str(run.path)])
    while holder(run.path / "launch.lock") is None:
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run_dir = create(tmp_path / "runs", "tour")
    write_json(run_dir.path / "settings.json", to_dict(override(Settings(), {"services.on": False})))
    return run_dir


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
    lines: list[str] = []

    def call(**dotted: object) -> RunDir:
        settings = override(Settings(), {"seed": 1, **dotted})
        return start_or_resume(None, settings, runs=tmp_path / "runs", resume=True, say=lines.append)

    first = call()
    assert call().path == first.path and not lines
    assert call(**{"rl.gate": False}).path == first.path and not lines
    assert not from_dict(first.settings()).rl.gate, "a refused run goes on without its gate"
    assert call().path == first.path and from_dict(first.settings()).rl.gate
    new_run = call(seed=2)
    assert new_run.path != first.path
    newest = tmp_path / "runs" / "tour"
    assert lines == [f"{first.path} was begun with seed=1, now 2; {newest} is now the new run {new_run.path.name}"]
    with pytest.raises(FileNotFoundError, match="no task file"):
        call(**{"env.tasks": str(tmp_path / "nowhere")})
    assert len(lines) == 1, "what is refused is no new run"
    provenance_path = new_run.path / "provenance.json"
    write_json(provenance_path, json.loads(provenance_path.read_text()) | {"package_digest": "another"})
    assert call(seed=2).path != new_run.path
    assert lines[-1].startswith(f"{new_run.path} was begun by another version of this package; ")
    (tmp_path / "runs" / "tour").unlink()
    (tmp_path / "runs" / "tour").symlink_to("gone")
    assert call().path.is_dir()


def test_a_second_launcher_is_refused_until_the_first_is_dead(run: RunDir, no_ranks: None) -> None:
    process = launcher(run)
    for path in (run.path, run.path.parent / "tour"):  # its other name
        with pytest.raises(RunBusy, match=f"{run.path.name} is being run by process {process.pid}"):
            start_or_resume(path, say=quiet)
    process.kill()
    process.wait()
    go(run.path)
    go(run.path)


def test_the_ranks_do_not_hold_the_lock(run: RunDir, worker: Path, tmp_path: Path) -> None:
    """Otherwise a child that outlives its launcher would block every other launch."""
    worker.write_text(f"#!/bin/sh\nls -l /proc/$$/fd > {tmp_path}/open-$9\n")
    go(run.path)
    for rank in range(2):
        open_files = (tmp_path / f"open-{rank}").read_text()
        assert f"rank{rank}.log" in open_files and "launch.lock" not in open_files


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
    before = ["data/tokenizer.json", "data/rl.jsonl", "rollouts/eval_base.parquet", "rollouts/eval_start.parquet"]
    before += [f"weights/{name}/x" for name in ("base", "midtrained", "start")]
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

    def run_once(*args: object) -> None:
        if (end := ends.pop(0)) is not None:
            raise end

    monkeypatch.setattr(launch, "_run_processes", run_once)
    lines: list[str] = []
    launch._run_services(run, lines.append)
    assert ends == [] and len(lines) == 2
    ends = [RunFailed("services ended with 1: rl.lr is too high (services.log)", 1)]
    with pytest.raises(RunFailed, match="rl.lr"):
        launch._run_services(run, lines.append)


def test_a_live_run_is_followed_until_it_is_stopped(run: RunDir) -> None:
    process, begun, lines = launcher(run), threading.Event(), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        begun.set()

    follower = threading.Thread(target=follow, args=(run.path, say))
    follower.start()
    assert begun.wait(120)
    assert start_detached(run.path).path == run.path, "it is live, and left alone"
    assert holder(run.path / "launch.lock") == process.pid
    assert stop(run.path) and process.wait() == 1
    follower.join(120)
    assert lines == ["step 1", "KeyboardInterrupt"] and not stop(run.path)


def test_a_run_that_does_not_stop_is_killed_in_time_and_what_is_waited_for_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, lines = launcher(run, LAUNCHER.replace("signal.default_int_handler", "signal.SIG_IGN")), list[str]()
    monkeypatch.setattr(detached, "END_S", 0.5)
    monkeypatch.setattr(head, "SAY_S", 0.1)
    assert stop(run.path, lines.append) and process.wait() == -signal.SIGKILL
    assert lines[0] == f"{run.path.name}: process {process.pid} is asked to end its ranks, services and sandboxes"
    assert all(line.startswith(f"waiting for process {process.pid} to end, ") for line in lines[1:-1])
    assert lines[-1] == f"process {process.pid} was killed: it had not ended within 0.5 s"
    assert main(["stop", str(run.path)]) == 0, "nothing lives"


def test_a_launcher_that_has_not_written_its_id_yet_is_stopped(run: RunDir) -> None:
    # A background job of a shell has SIGINT ignored, and so would its children.
    process = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    with (run.path / "launch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines: list[str] = []
        stopper = threading.Thread(target=stop, args=(run.path, lines.append))
        stopper.start()
        stopper.join(0.5)
        assert stopper.is_alive() and not lines and process.poll() is None
        lock.write(str(process.pid))
        lock.flush()
        assert process.wait(60) == -signal.SIGINT
    stopper.join(60)
    assert lines[0].startswith(f"{run.path.name}: process {process.pid} is asked to end")


PARENT = """
import os, subprocess, sys, time
command = [sys.executable, "-m", "composer_nb.trainer.recipe.child", str(os.getpid()), "slow_to_import"]
subprocess.Popen(command)
time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a module writes when it is imported; it then takes a minute."""
    (tmp_path / "slow_to_import.py").write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "Path(__file__).with_name('said').write_text(f'{os.getpid()} {sys.argv[1:]} {__name__}')\n"
        "time.sleep(60 * (len(sys.argv) < 2))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "said"


def test_it_ends_with_its_parent_while_it_imports(module: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    wait_until(lambda: module.exists() and module.read_text())
    pid = int(module.read_text().split()[0])
    tick = started(pid)
    assert tick is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: started(pid) != tick)
