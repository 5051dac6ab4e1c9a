"""The long-context phase: what it makes of a configuration, and a run that has one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from test_recipe import MICRO

from composer_nb.trainer.learning.data import TokenRow, mixture, mixture_code
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model, ModelConfig, Yarn
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.settings import Settings, override
from composer_nb.views.report import pictures

SHORT = {"model.max_position_embeddings": 256, "limits.tokens": 272, "extend.steps": 4, "extend.factor": 2.0}


def test_stretched_twice_is_stretched_once_by_both() -> None:
    config = ModelConfig(max_position_embeddings=128)
    once = config.stretched(6.0)
    assert (
        once.yarn == Yarn(factor=6.0, original_max_position_embeddings=128, mscale_all_dim=0.0)
        and once.max_position_embeddings == 768
    )
    assert config.stretched(2.0).stretched(3.0) == once


def test_what_turns_fast_stays_and_what_turns_slowly_is_stretched() -> None:
    config = ModelConfig(max_position_embeddings=2048)
    plain, long = (Model(c).rope_table(torch.zeros(1)) for c in (config, config.stretched(4.0)))
    sharper = 0.1 * math.log(4) + 1  # both of queries and keys, so that their products grow by its square
    torch.testing.assert_close(long[:2048, :, 0], sharper * plain[:, :, 0])
    torch.testing.assert_close(long[4 * 2047, :, -1], sharper * plain[2047, :, -1], rtol=1e-3, atol=1e-3)


def test_the_phase_takes_its_share_in_rows_as_long_as_all_positions() -> None:
    long, short = ([TokenRow(torch.zeros(n).numpy(), torch.zeros(n).numpy())] * 40 for n in (512, 100))
    batches = list(mixture(long, short, steps=30, tokens=1000, code_first=0.0, code_share=0.6, seed=0))
    taken = sum(len(row.token_ids) == 512 for batch in batches for row in batch)
    assert taken == int(30 * 600 / 512) and taken <= mixture_code(30, 1000, 0.0, 0.6, 512)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limits.tokens": 513}, r"limits.tokens=513: .*\(512\).*extend.factor"),
        ({"extend.steps": 0}, r"limits.tokens=272: .*\(256\)"),
        ({"model.max_position_embeddings": 255}, r"model.max_position_embeddings=255: must be at least 256"),
        ({"extend.tokens": 600}, r"extend.tokens=600: .*0.8.* one row of 512"),
        ({"extend.factor": 0.5}, r"extend.factor=0.5: must be greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        override(Settings(), SHORT | changes)


@pytest.mark.slow
@pytest.mark.whole
def test_a_run_with_the_phase_goes_on_on_its_positions(tmp_path: Path) -> None:
    settings = override(Settings(), MICRO | SHORT | {"extend.tokens": 1024, "ranks": 2})
    run = start_or_resume(None, settings, runs=tmp_path, say=lambda line: None)
    for name in ("extended", "start", "final"):
        config = load_pretrained(run.path / "weights" / name).config
        assert config.max_position_embeddings == 512 and config.yarn.factor == 2, name
    assert load_pretrained(run.path / "weights" / "midtrained").config.max_position_embeddings == 256
    found = build_report(run)["extend"]
    assert found["steps"] == 4 and found["last"]["heldout_long_loss"] < found["before"]["stretched"]
    assert found["before"]["plain"] != found["before"]["stretched"]
    assert "extend" in json.loads((run.path / "settings.json").read_text())
    assert pictures(run)
    again = fork(run, override(settings, {"rl_seed": 1}), runs=tmp_path, name="fork")
    assert (again.path / "weights" / "extended").is_dir() and again.finished("extend")
