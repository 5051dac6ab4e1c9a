"""A run that ends before RL, and one on a corpus, with gaps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from composer_nb.harness.environment import Sandboxes
from composer_nb.trainer.corpus.build import CorpusSettings, make_corpus
from composer_nb.trainer.drafts import DraftHead, load_draft, save_draft
from composer_nb.trainer.learning.data import code_rows, gap_tokens, read_corpus
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.recipe.launch import start_or_resume
from composer_nb.trainer.recipe.recipe import run_recipe
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, from_dict, override
from tests.conftest import ROOT, TINY


@pytest.mark.whole
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_mid_training_alone_on_a_corpus_with_gaps(tmp_path: Path):
    """The tokenizer has tokens for gaps, the codebase is what the corpus holds out, and nothing follows mid-training."""
    (tmp_path / "repositories").mkdir()
    for name in ("kernels", "harness"):
        (tmp_path / "repositories" / name).mkdir()
        (tmp_path / "repositories" / name / "pyproject.toml").write_text('[project]\nlicense = "MIT"\n')
        for path in (ROOT / "composer_nb" / name).rglob("*.py"):
            copy = tmp_path / "repositories" / name / path.relative_to(ROOT / "composer_nb")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(path.read_text())
    make_corpus(tmp_path / "repositories", tmp_path / "corpus", CorpusSettings(heldout=0.4))
    few = {"data.demonstrations": 8, "data.mistaken_demonstrations": 0, "data.rl_tasks": 12, "data.heldout_tasks": 4}
    few |= {
        "data.structure_tasks": 0,
        "data.tune_tasks": 4,
        "sft.steps": 0,
        "data.level": "functions",
        "data.told": 0.0,
    }
    values = few | {
        "data.code": str(tmp_path / "corpus"),
        "until": "midtrain",
        "midtrain.infill.share": 0.5,
        "midtrain.draft_steps": 3,
        "midtrain.draft_weight": 0.1,
        "ranks": 1,
    }
    settings = override(Settings(), TINY | {"midtrain.code_first": 1.0, "midtrain.steps": 10} | values)
    run = start_or_resume(None, settings, runs=tmp_path / "runs", name="alone", say=lambda line: None)
    assert run.finished("midtrain") is not None and run.finished("sft") is None
    points = run.steps("midtrain")
    assert points[-1]["step"] == 10 and np.isfinite(points[-1]["heldout_code_loss"])
    model = load_pretrained(run.path / "weights/midtrained")
    assert load_draft(run.path / "weights/midtrained", model) and 0 <= run.finished("midtrain")["draft_same"] <= 1
    tokenizer = load_tokenizer(run.path / "data")
    assert len(set(gap_tokens(tokenizer))) == 3
    heldout = code_rows(read_corpus(str(tmp_path / "corpus")).validation, tokenizer, 1.0, limit=48)
    assert not any(set(gap_tokens(tokenizer)) & set(row.token_ids.tolist()) for row in heldout)
    said: list[str] = []
    start_or_resume(run.path, say=said.append)
    assert len(said) == 1 and "the run is complete" in said[0]


@pytest.mark.whole
def test_the_policy_after_rl_has_the_head_of_mid_training(tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]):
    run = copy_of(tiny_run)
    model = load_pretrained(run.path / "weights/final")
    save_draft(DraftHead(model.config.hidden_size), run.path / "weights/midtrained")
    assert load_draft(run.path / "weights/final", model) is None
    settings = override(from_dict(run.settings()), {"midtrain.draft_steps": 1})
    with Sandboxes() as sandboxes:
        run_recipe(Stages(run, settings, Ranks(), sandboxes, lambda line: None))
    head, own = (load_draft(run.path / "weights" / name, model) for name in ("final", "midtrained"))
    assert head is not None and own is not None and torch.equal(head.join.weight, own.join.weight)
