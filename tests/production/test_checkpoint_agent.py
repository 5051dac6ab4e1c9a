"""A checkpoint directory as an agent: its environment, the engine, the loop, the server; and the tokens of Qwen's chat template,
which `transformers` renders. The model is small and random, so it babbles: what the loop makes of that is part of what is tested.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.agent.loop import LIMITS
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.environment import Carried, EnvSettings, carry
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.production import policies
from composer_nb.production.agents import run_agent
from composer_nb.production.bench import evaluate
from composer_nb.production.policies import equipment, open_engine, trained_with
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig
from tests.production.conftest import serving
from tests.tiny_models import SIZES

FUNCTIONS = Path(__file__).parents[2] / "data" / "example" / "data" / "heldout.jsonl"
POSITIONS = 400


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the compact format. Its vocabulary is padded: it can write ids that no token has."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "compact", train_tokenizer(["read f.py test done"], 300)
    torch.manual_seed(0)
    config = ModelConfig(**SIZES | {"vocab_size": tokenizer.get_vocab_size() + 7, "max_position_embeddings": POSITIONS})
    save_pretrained(Model(config), path, dtype=torch.bfloat16)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_a_checkpoint_carries_its_environment(compact: Path, repository: Path, tmp_path: Path) -> None:
    """Its tools and limits are those of its training, at work and behind the server; without the file, those of its format."""
    assert trained_with(compact) == Carried(renderer="compact", tools="tiny")
    carry(compact, EnvSettings(tools="cursor"), Limits(turns=2, turn_tokens=9, tokens=300))
    tools, limits = equipment(str(compact))
    assert "run_terminal_cmd" in tools.tools and (limits.turns, limits.turn_tokens) == (2, 9)
    work = run_agent(repository, "fix double", str(compact), tmp_path / "out")
    assert work.conversation.stop == "turns" and work.conversation.written <= 18
    with open_engine(compact, slots=1, tokens=300) as engine:
        call = Said(calls=(Written(id="call_0", call=ToolCall(name="list_dir", arguments={"target_directory": "."})),))
        renderer = engine.format(engine.tokenizer)
        assert renderer.parse(renderer.turn(call)) == call
    tasks = load_tasks(FUNCTIONS)[:2]
    with pytest.raises(ValueError, match="agents have the tiny tools, with the arms"):
        evaluate(str(compact), tasks, tmp_path / "bench", samples=1)
    carry(compact, EnvSettings(), Limits(turns=1, tokens=400))
    report = evaluate(str(compact), tasks, tmp_path / "bench", samples=1, workers=2)
    assert report["tool_calls_per_task"] == report["calls_per_turn"]  # one turn each


def test_served_tools_are_those_of_training(compact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carry(compact, EnvSettings(), Limits(turns=3, turn_tokens=9, tokens=300))
    with open_engine(compact, slots=1, tokens=300) as engine:
        with serving(engine, model="tour", trained=engine.training) as server:
            for name in ("", "#tour"):
                tools, limits = equipment(f"openai:{server.url}{name}")
                assert (set(tools.tools), limits) == (set(ToolSet.tiny().tools), trained_with(compact).limits)
            assert "run_terminal_cmd" in equipment(f"openai:{server.url}#another")[0].tools
        foreign = replace(engine.training, tools="my.module:Mine")
        damaged = replace(engine.training, renderer="none")  # type: ignore[arg-type]
        for training, why in ((foreign, "which only its training has"), (damaged, r"training is damaged \(renderer ")):
            with serving(engine, trained=training) as server, pytest.raises(ValueError, match=why):
                equipment(policy := f"openai:{server.url}")
    tools, limits = equipment(f"{policy}#named")
    assert "run_terminal_cmd" in tools.tools and limits == LIMITS
    monkeypatch.setattr(policies, "Endpoint", partial(Endpoint, retries=0))
    with pytest.raises(ProviderFailure):
        equipment(policy)


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "damaged"), ('{"renderer": "compact", "tools": "os:abort"}', "trained with the tools of os:abort, which")],
)
def test_a_damaged_environment_is_one_line(
    compact: Path, repository: Path, tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (compact / "environment.json").write_text(text)
    args = ["agent", str(repository), "fix", "--policy", str(compact), "--out", str(tmp_path / "out")]
    assert main(args) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_a_conversation_is_as_long_as_the_model_reads(compact: Path, repository: Path, tmp_path: Path) -> None:
    """The usual limit of 131,072 tokens is more than this model, or many a published one, can read."""
    carry(compact, EnvSettings(), Limits())
    args = ["agent", str(repository), "x " * POSITIONS, "--policy", str(compact), "--out", str(tmp_path / "out")]
    assert main([*args, "--verdict", "later"]) == 1
    with open_engine(compact, slots=1, tokens=131_072) as engine:
        assert engine.tokens == POSITIONS
