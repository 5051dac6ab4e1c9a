"""Runs of other shapes: one that ends before RL, one with a long-context phase, and one on tasks of every kind."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer_nb import cli
from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.trainer.corpus.build import CorpusSettings, make_corpus
from composer_nb.trainer.drafts import HeadTrainer, load_draft, new_head, rows_of, save_draft
from composer_nb.trainer.learning.data import code_rows, gap_tokens, read_corpus
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import ModelConfig, Yarn
from composer_nb.trainer.recipe.launch import fork, start_or_resume
from composer_nb.trainer.recipe.recipe import run_recipe
from composer_nb.trainer.recipe.report import build_report
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.settings import Settings, from_dict, override
from composer_nb.views.report import pictures
from tests.conftest import MICRO, ROOT, TINY


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
    zeroed = ("data.mistaken_demonstrations", "data.structure_tasks", "data.told", "sft.steps")
    values: dict[str, Any] = dict.fromkeys(zeroed, 0) | {
        "data.code": str(tmp_path / "corpus"),
        "data.level": "functions",
    }
    values |= {"data.demonstrations": 8, "data.rl_tasks": 12, "data.heldout_tasks": 4, "data.tune_tasks": 4, "ranks": 1}
    values |= {"until": "midtrain", "midtrain.infill.share": 0.5}
    values |= {"midtrain.draft_steps": 3, "midtrain.draft_weight": 0.1}
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
    lines: list[str] = []
    start_or_resume(run.path, say=lines.append)
    assert len(lines) == 1 and "the run is complete" in lines[0]


@pytest.mark.whole
def test_the_policy_after_rl_has_a_head_that_learnt_from_its_rollouts(
    tiny_run: RunDir, copy_of: Callable[[RunDir], RunDir]
):
    run = copy_of(tiny_run)
    model = load_pretrained(run.path / "weights/final")
    save_draft(new_head(model, 0), run.path / "weights/start")
    settings = override(from_dict(run.settings()), {"midtrain.draft_steps": 1, "rl.draft_steps": 20})
    with Sandboxes() as sandboxes:
        run_recipe(Stages(run, settings, Ranks(), sandboxes, lambda line: None))
    head, rows = load_draft(run.path / "weights/final", model), rows_of(run.path, "rl_*.parquet")
    assert head is not None
    after, before = (HeadTrainer(model, draft).agreement(rows) for draft in (head, new_head(model, 0)))
    assert after > before and 0 <= run.finished("draft")["draft_same"] <= 1


SHORT = {"model.max_position_embeddings": 256, "limits.tokens": 272, "extend.steps": 4, "extend.factor": 2.0}


def test_stretched_twice_is_stretched_once_by_both() -> None:
    config = ModelConfig(max_position_embeddings=128)
    once = config.stretched(6.0)
    assert once.yarn == Yarn(factor=6.0, original_max_position_embeddings=128, mscale_all_dim=0.0)
    assert once.max_position_embeddings == 768 and config.stretched(2.0).stretched(3.0) == once


@pytest.mark.slow
@pytest.mark.whole
def test_a_run_with_the_phase_goes_on_on_its_positions(tmp_path: Path) -> None:
    drafts = {"midtrain.draft_steps": 2, "extend.draft_weight": 0.1, "sft.draft_weight": 0.1}
    settings = override(Settings(), MICRO | SHORT | drafts | {"extend.tokens": 1024, "ranks": 2})
    run = start_or_resume(None, settings, runs=tmp_path, say=lambda line: None)
    heads = []
    for name in ("extended", "start", "final"):
        model = load_pretrained(run.path / "weights" / name)
        assert model.config.max_position_embeddings == 512 and model.config.yarn.factor == 2, name
        heads.append(load_draft(run.path / "weights" / name, model))
    extended, start, final = (head.join.weight for head in heads if head)
    assert not torch.equal(extended, start) and torch.equal(start, final)
    assert load_pretrained(run.path / "weights" / "midtrained").config.max_position_embeddings == 256
    extension = build_report(run)["extend"]
    assert extension["steps"] == 4 and extension["last"]["heldout_long_loss"] < extension["before"]["stretched"]
    assert extension["before"]["plain"] != extension["before"]["stretched"]
    assert "extend" in json.loads((run.path / "settings.json").read_text())
    assert pictures(run)
    forked = fork(run, override(settings, {"rl_seed": 1}), runs=tmp_path, name="fork")
    assert (forked.path / "weights" / "extended").is_dir() and forked.finished("extend")


KINDS = MICRO | {
    **{"data.level": "repositories", "data.kinds": "[bug,feature,tests,lint]", "data.structure_tasks": 0, "ranks": 1},
    **dict.fromkeys(("data.mistaken_demonstrations", "data.rl_tasks", "data.heldout_tasks"), 12),
    **{"data.demonstrations": 4, "data.tune_tasks": 4, "midtrain.steps": 2, "sft.steps": 1, "limits.turns": 8},
    **{"rl.steps": 1, "rl.group": 2, "rl.evaluate_every": 1, "rl.gate": False, "limits.turn_tokens": 160},
    **dict.fromkeys(("limits.tokens", "model.max_position_embeddings"), 1500),
}


@pytest.mark.whole
@pytest.mark.slow
def test_every_kind_is_trained_on_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = json.dumps(KINDS["reward.weights"])
    changed = {name: weights if name == "reward.weights" else value for name, value in KINDS.items()}
    words = [word for name, value in changed.items() for word in ("--set", f"{name}={value}")]
    assert cli.main(["tour", "--plain", "--runs", str(tmp_path), *words]) == 0
    assert "solved by kind, final" in capsys.readouterr().out
    run = tmp_path / "tour"
    kinds = {
        name: Counter(t.metadata.get("kind", "bug") for t in load_tasks(run / f"data/{name}.jsonl"))
        for name in ("rl", "heldout")
    }
    assert set(kinds["rl"]) == set(kinds["heldout"]) == {"bug", "feature", "tests", "lint"}
    report = json.loads((run / "report.json").read_text())
    assert set(report["eval"]["final"]["by_kind"]) == set(kinds["heldout"])
    assert cli.main(["tour", "--set", "data.kinds=[bug,poem]"]) == 2
    assert cli.main(["tour", "--set", "data.kinds=[lint]", "--set", "data.level=functions"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "data.kinds" in errors[0] and "are bugs" in errors[1]
