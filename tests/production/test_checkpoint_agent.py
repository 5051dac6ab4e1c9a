"""A checkpoint directory as an agent: its tokenizer with Qwen's tokens and chat template, the engine, the loop, the server.

`transformers` renders the template, as an independent word on which tokens a conversation is. The model is small and random, so
it babbles: what the loop makes of that is part of what is tested.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from composer_nb.cli import main
from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.agent.loop import LIMITS, converse, system_text
from composer_nb.harness.agent.qwen import HOW, QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.agent.turns import Limits, TokenTurnPolicy
from composer_nb.harness.environment import Carried, EnvSettings, carry
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.rollout import Kind
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import WORKSPACE
from composer_nb.harness.tasks.task import load_tasks
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.production import policies
from composer_nb.production.agents import run_agent
from composer_nb.production.bench import ARMS, evaluate
from composer_nb.production.policies import equipment, open_engine, trained_with
from composer_nb.trainer.models.checkpoint import save_pretrained
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig
from tests.production.conftest import Turns, serving
from tests.tiny_models import SIZES

FUNCTIONS = Path(__file__).parents[2] / "data" / "example" / "data" / "heldout.jsonl"
POSITIONS = 12_288
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == "system" -%}
<|im_start|>system¶{{ m.content }}
{%- if tools -%}
¶¶# Tools¶¶<tools>¶
{%- for tool in tools -%}
{%- set f = tool.function -%}
<function>¶<name>{{ f.name }}</name>¶<description>{{ f.description | trim }}</description>¶<parameters>¶
{%- for name, told in f.parameters.properties.items() -%}
<parameter>¶<name>{{ name }}</name>¶
{%- for key, value in told.items() -%}
<{{ key }}>{{ value if value is string else value | tojson }}</{{ key }}>¶
{%- endfor -%}
</parameter>¶
{%- endfor -%}
{%- for key, value in f.parameters.items() if key not in ("type", "properties") -%}
<{{ key }}>{{ value | tojson }}</{{ key }}>¶
{%- endfor -%}
</parameters>¶</function>¶
{%- endfor -%}
</tools>HOW
{%- endif -%}
<|im_end|>¶
{%- elif m.role == "user" -%}
<|im_start|>user¶{{ m.content }}<|im_end|>¶
{%- elif m.role == "assistant" -%}
<|im_start|>assistant¶{{ m.content }}
{%- if m.tool_calls -%}
{%- if m.content -%}¶¶{%- endif -%}
{%- for call in m.tool_calls -%}
{%- if not loop.first -%}¶{%- endif -%}
<tool_call>¶<function={{ call.function.name }}>¶
{%- for name, value in call.function.arguments.items() -%}
<parameter={{ name }}>¶{{ value if value is string else value | tojson }}¶</parameter>¶
{%- endfor -%}
</function>¶</tool_call>
{%- endfor -%}
{%- endif -%}
<|im_end|>¶
{%- else -%}
{%- if loop.first or loop.previtem.role != "tool" -%}<|im_start|>user¶{%- endif -%}
<tool_response>¶{{ m.content }}¶</tool_response>¶
{%- if loop.last or loop.nextitem.role != "tool" -%}<|im_end|>¶{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant¶{%- endif -%}"""


def made_tokenizer() -> Tokenizer:
    made = Tokenizer(BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [json.dumps(ARMS["all"].tools().schemas), system_text(WORKSPACE), HOW] * 2
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is padded, as in the published ones: it can write ids that no token has."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "small", made_tokenizer()
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size() + 7,
        max_position_embeddings=POSITIONS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    save_pretrained(Model(config), path, dtype=torch.bfloat16)
    tokenizer.save(str(path / "tokenizer.json"))
    template = TEMPLATE.replace("HOW", HOW.replace("\n", "¶")).replace("¶", '{{ "\\n" }}')
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(checkpoint)


def templated(oracle: Any, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
    text = oracle.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return list(oracle(text, add_special_tokens=False)["input_ids"])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    made.mkdir()
    (made / "f.py").write_text("def double(x):\n    return x + x + 1\n")
    return made


@pytest.fixture(scope="module")
def compact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the compact format that was trained with the tools of the product."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "compact", train_tokenizer(["read f.py test done"], 300)
    torch.manual_seed(0)
    config = ModelConfig(**SIZES | {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 400})
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
    few = load_tasks(FUNCTIONS)[:2]
    with pytest.raises(ValueError, match="agents have the tiny tools, with the arms"):
        evaluate(str(compact), few, tmp_path / "bench", samples=1)
    carry(compact, EnvSettings(), Limits(turns=1, tokens=400))
    found = evaluate(str(compact), few, tmp_path / "bench", samples=1, workers=2)
    assert found["tool_calls_per_task"] == found["calls_per_turn"]  # one turn each


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
                equipment(gone := f"openai:{server.url}")
    tools, limits = equipment(f"{gone}#named")
    assert "run_terminal_cmd" in tools.tools and limits == LIMITS
    monkeypatch.setattr(policies, "Endpoint", partial(Endpoint, retries=0))
    with pytest.raises(ProviderFailure):
        equipment(gone)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "damaged"),
        ('{"renderer": "xml", "tools": "tiny"}', "renderer"),
        (
            '{"renderer": "compact", "tools": "tiny", "limits": {"turns": 0}}',
            "limits.turns Input should be greater than",
        ),
        ('{"renderer": "compact", "tools": "os:abort"}', "trained with the tools of os:abort, which"),
    ],
)
def test_a_damaged_environment_is_one_line(
    compact: Path, repository: Path, tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (compact / "environment.json").write_text(text)
    asked = ["agent", str(repository), "fix", "--policy", str(compact), "--out", str(tmp_path / "out")]
    assert main(asked) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert why in line


def test_turn_after_turn_the_tokens_are_the_templates(checkpoint: Path, oracle: Any) -> None:
    tools = ARMS["all"].tools()
    renderer = QwenRenderer(Tokenizer.from_file(str(checkpoint / "tokenizer.json")), tools.schemas)
    look = [
        ToolCall(name="read_file", arguments={"target_file": "f.py"}),
        ToolCall(name="grep", arguments={"pattern": "def", "output_mode": "count"}),
    ]
    said = [
        ("I look.", look),
        ("", [ToolCall(name="read_file", arguments={"target_file": "f.py", "offset": 1, "limit": 1})]),
        ("", [ToolCall(name="read_file", arguments={"target_file": "none.py"})]),
        ("It is well.", []),
    ]
    written = [
        Said(text=text, calls=tuple(Written(id=f"call_{n}", call=call) for n, call in enumerate(calls)))
        for text, calls in said
    ]
    turns = [renderer.turn(each) for each in written]
    policy = Turns(*turns)
    with BwrapBackend() as backend, backend.create() as box, Shared(policy) as shared:
        box.write("f.py", b"def f():\n    return 1\n")
        limits = Limits(turns=9, turn_tokens=4000, tokens=60_000)
        turn_policy = TokenTurnPolicy(renderer, 0, limits, shared.ask, shared.release, "You fix.")
        done = converse("fix f", turn_policy, tools, tools.open(box))
        [segment] = turn_policy.close()
    talk: list[dict[str, Any]] = [{"role": "system", "content": "You fix."}, {"role": "user", "content": "fix f"}]
    observations = iter([turn.observation for turn in done.turns if turn.call])
    tokens = list[int]()
    for (text, calls), request, turn in zip(said, policy.asked, turns, strict=True):
        tokens += request.token_ids
        assert tokens == templated(oracle, talk, tools.schemas)
        tokens += turn
        wire = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in calls]
        talk.append({"role": "assistant", "content": text} | ({"tool_calls": wire} if wire else {}))
        talk += [{"role": "tool", "content": next(observations)} for _ in calls]
    assert done.stop == "finished" and segment.token_ids.tolist() == tokens
    whole = oracle.apply_chat_template(talk, tools=tools.schemas, tokenize=False).removesuffix("\n")
    assert tokens == oracle(whole, add_special_tokens=False)["input_ids"]


def test_a_thinking_model_is_read_and_other_special_tokens_end_a_turn(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    renderer = QwenRenderer(tokenizer, ARMS["all"].tools().schemas)
    call = "<tool_call>\n<function=read_file>\n<parameter=target_file>\nf.py\n</parameter>\n</function>\n</tool_call>"
    text = f"<think>\nI look.\n</think>\n\n{call}<|im_end|>"
    written = tokenizer.encode(text, add_special_tokens=False).ids
    said = renderer.parse(written)
    assert said.text == "<think>\nI look.\n</think>"
    assert [each.call for each in said.calls] == [ToolCall(name="read_file", arguments={"target_file": "f.py"})]
    assert renderer.kinds(written)[0] == Kind.THINKING and renderer.kinds(written)[-2] == Kind.TOOL_CALL
    end, thought = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<think>")
    assert {end, tokenizer.token_to_id("<|im_end|>")} <= renderer.stop and thought not in renderer.stop
    [bad] = renderer.parse([*renderer.encode("Done."), end]).calls
    assert isinstance(bad.call, ToolError)


def test_a_conversation_is_as_long_as_the_model_reads(checkpoint: Path, repository: Path, tmp_path: Path) -> None:
    """131,072 tokens are the usual limit, and more than this model, and many published ones, read."""
    asked = ["agent", str(repository), "x " * POSITIONS, "--policy", str(checkpoint), "--out", str(tmp_path / "out")]
    assert main([*asked, "--verdict", "later"]) == 1
    with open_engine(checkpoint, slots=1, tokens=131_072) as engine:
        assert engine.tokens == POSITIONS
