"""A whole run on every kind of miniature repositories: each is demonstrated, trained on and scored."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from composer_nb import cli
from composer_nb.harness.tasks.task import load_tasks
from tests.trainer.recipe.test_recipe import MICRO

TINY = MICRO | {
    "data.level": "repositories",
    "data.kinds": "[bug,feature,tests,lint]",
    "data.demonstrations": 4,
    "data.mistaken_demonstrations": 12,
    "data.rl_tasks": 12,
    "data.heldout_tasks": 12,
    "data.structure_tasks": 0,
    "data.tune_tasks": 4,
    "midtrain.steps": 2,
    "sft.steps": 1,
    "rl.steps": 1,
    "rl.group": 2,
    "rl.evaluate_every": 1,
    "rl.gate": False,
    "ranks": 1,
    "limits.turns": 8,
    "limits.tokens": 1500,
    "limits.turn_tokens": 160,
    "model.max_position_embeddings": 1500,
}

pytestmark = [pytest.mark.whole, pytest.mark.slow]


def test_every_kind_is_trained_on_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = json.dumps(TINY["reward.weights"])
    changed = {name: weights if name == "reward.weights" else value for name, value in TINY.items()}
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
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "data.kinds" in said[0] and "are bugs" in said[1]
