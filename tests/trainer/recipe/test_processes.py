"""Runs that depend on no notebook, followed from their files, and processes whose life ends with their parent's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from composer_nb.cli import main
from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.reap import started
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.recipe import detached, launch
from composer_nb.trainer.recipe.detached import follow, start_detached, stop
from composer_nb.trainer.recipe.launch import RunFailed, start_or_resume
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services import head
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.settings import Settings, override, to_dict

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


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = create(tmp_path / "runs", "tour")
    write_json(made.path / "settings.json", to_dict(override(Settings(), {"services.on": False})))
    return made


def test_what_a_run_says_can_be_read_elsewhere_and_how_it_ended(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert follow(run.path, said.append) == "dead" and not said
    here: list[str] = []

    def ranks(run: RunDir, world: int, say: Callable[[str], None]) -> None:
        for n in range(30):
            say(f"step {n}")
        run.finish("numerics", 0.0, {})

    monkeypatch.setattr(launch, "_run_ranks", ranks)
    start_or_resume(run.path, say=here.append)
    assert follow(run.path, said.append) == "complete"
    assert said == here[-20:] and said[-1].startswith("the run is complete")

    def failing(run: RunDir, world: int, say: object) -> None:
        raise RunFailed("rank 0 ended with 1: oh")

    monkeypatch.setattr(launch, "_run_ranks", failing)
    other = create(run.path.parent, "other")
    write_json(other.path / "settings.json", run.settings())
    with pytest.raises(RunFailed):
        start_or_resume(other.path, say=here.append)
    assert follow(other.path, said.append, lines=1) == "dead" and said[-1] == "rank 0 ended with 1: oh"


def test_a_live_run_is_followed_until_it_is_stopped(run: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run.path)])
    said: list[str] = []
    begun = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        begun.set()

    while holder(run.path / "launch.lock") is None:
        assert process.poll() is None
        time.sleep(0.02)
    follower = threading.Thread(target=follow, args=(run.path, say))
    follower.start()
    assert begun.wait(120)
    assert start_detached(run.path).path == run.path, "it is live, and left alone"
    assert holder(run.path / "launch.lock") == process.pid
    assert stop(run.path) and process.wait() == 1
    follower.join(120)
    assert said == ["step 1", "KeyboardInterrupt"] and not stop(run.path)


def test_a_run_that_does_not_stop_is_killed_in_time_and_what_is_waited_for_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = LAUNCHER.replace("signal.default_int_handler", "signal.SIG_IGN")
    process, said = subprocess.Popen([sys.executable, "-c", deaf, str(run.path)]), list[str]()
    while holder(run.path / "launch.lock") is None:
        assert process.poll() is None
        time.sleep(0.02)
    monkeypatch.setattr(detached, "END_S", 0.5)
    monkeypatch.setattr(head, "SAY_S", 0.1)
    assert stop(run.path, said.append) and process.wait() == -signal.SIGKILL
    assert said[0] == f"{run.path.name}: process {process.pid} is asked to end its ranks, services and sandboxes"
    assert all(line.startswith(f"waiting for process {process.pid} to end, ") for line in said[1:-1])
    assert said[-1] == f"process {process.pid} was killed: it had not ended within 0.5 s"
    assert main(["stop", str(run.path)]) == 0, "nothing lives"


def test_it_is_refused_before_it_is_started(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other settings"):
        start_detached(run.path, Settings(seed=9))
    for call in (start_detached, follow):
        with pytest.raises(FileNotFoundError, match="no run here"):
            call(tmp_path / "elsewhere")


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


def test_it_runs_a_module_as_the_main_one_but_nothing_once_its_parent_is_gone(module: Path) -> None:
    command = [sys.executable, "-m", "composer_nb.trainer.recipe.child"]
    assert (
        subprocess.run([*command, str(os.getppid()), "slow_to_import", "one"]).returncode == 1 and not module.exists()
    )
    assert subprocess.run([*command, str(os.getpid()), "slow_to_import", "one", "two"]).returncode == 0
    assert module.read_text().split(" ", 1)[1] == "['one', 'two'] __main__"


def test_it_ends_with_its_parent_while_it_imports(module: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    deadline = time.monotonic() + patience(60)
    while not (module.exists() and module.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int(module.read_text().split()[0])
    tick = started(pid)
    assert tick is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    while started(pid) == tick:
        assert time.monotonic() < deadline
        time.sleep(0.02)
