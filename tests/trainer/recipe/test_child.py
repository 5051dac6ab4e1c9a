"""A child's life ends with its parent's, even before it has imported what it is to run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from composer_nb.harness.sandbox.reap import started
from composer_nb.harness.sandbox.system.linux import patience

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


def child(parent: int, *words: str) -> int:
    return subprocess.run([sys.executable, "-m", "composer_nb.trainer.recipe.child", str(parent), *words]).returncode


def test_it_runs_a_module_as_the_main_one_with_its_arguments(module: Path) -> None:
    assert child(os.getpid(), "slow_to_import", "one", "two") == 0
    assert module.read_text().split(" ", 1)[1] == "['one', 'two'] __main__"


def test_one_whose_parent_is_gone_runs_nothing(module: Path) -> None:
    assert child(os.getppid(), "slow_to_import", "one") == 1 and not module.exists()


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
