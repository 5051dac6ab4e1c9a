"""A folder of runs with a Ray head in it, for a module of tests."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_nb.harness.sandbox.reap import reap
from composer_nb.trainer.services.head import Head, find, up


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def head(runs: Path) -> Iterator[Head]:
    yield up(runs / "head")
    if (living := find(runs / "head")) is not None:
        os.kill(living.pid, signal.SIGKILL)
    reap(runs)
