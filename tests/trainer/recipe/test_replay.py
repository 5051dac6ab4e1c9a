"""Runs that cannot be replayed are refused in one line; `test_coordinator.py` replays real ones."""

from pathlib import Path

import pytest

from composer_nb.trainer.recipe.replay import replay
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.settings import Settings, from_dict, override
from tests.conftest import ROOT


def test_an_excerpt_and_a_run_of_the_plain_loop_are_refused(tmp_path: Path) -> None:
    example, plain = RunDir(ROOT / "data" / "example"), create(tmp_path, "plain")
    with pytest.raises(ValueError, match="data/example is an excerpt, which lacks batches of its run"):
        next(replay(example, from_dict(example.settings()), 1))
    with pytest.raises(ValueError, match="its RL was the plain loop"):
        next(replay(plain, override(Settings(), {"services.on": False}), 1))
