"""The files beside the weights: carried from every load to every save, and read by `transformers` as we read them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import CallResult, Said, User, Written
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import TINY_NAMES, ToolSet
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.companions import for_format, read_companions
from composer_nb.trainer.models.convert import convert
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.models.transformer import Model, ModelConfig

SYSTEM = "You repair code.\n  Be brief."


def written(id: str, name: str, **arguments: Any) -> Written:
    return Written(id=id, call=ToolCall(name=name, arguments=arguments))


EDIT = written("call_0", "edit_line", path="f.py", line=2, text="    return sum(xs)")
TINY: list[Any] = [
    User(text="fix f.py: sum of the items > 3"),
    Said(calls=(written("call_0", "read_file", path="f.py"),)),
    CallResult(id="call_0", text="1def f(xs):\n2    return 4"),
    Said(calls=(EDIT, written("call_1", "run_tests"))),
    CallResult(id="call_0", text="edited"),
    CallResult(id="call_1", text="1 passed"),
]
ASKING = [*TINY, Said(text="Shall an item equal to 3 stay?"), User(text="It shall.")]
"""Of an agent whose turns may be plain text, as it has no tool to finish."""


def talk_of(format: str, kind: str) -> list[Any]:
    if format == "compact":
        return TINY if kind == "whole" else ASKING
    name = "functions.{}:{}" if format == "kimi" else "call_{1}"
    todos = [{"id": "1", "content": "añ", "status": "pending"}]
    calls = (
        written(name.format("grep", 0), "grep", pattern="é <b>", path="."),
        written(name.format("write", 1), "write", file_path="a.py", contents="x = [1]\n\n\ny"),
        written(name.format("todo_write", 2), "todo_write", merge=True, todos=todos),
    )
    results = [CallResult(id=call.id, text=f"line\n{n}") for n, call in enumerate(calls)]
    return [User(text="do it"), Said(text="I look.", calls=calls), *results, Said(text="Done."), User(text="more")]


def as_openai(talk: list[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for message in talk:
        if isinstance(message, User):
            messages.append({"role": "user", "content": message.text})
        elif isinstance(message, CallResult):
            messages.append({"role": "tool", "tool_call_id": message.id, "content": message.text})
        else:
            calls = [
                {"id": w.id, "type": "function", "function": {"name": w.call.name, "arguments": dict(w.call.arguments)}}
                for w in message.calls
            ]
            messages.append({"role": "assistant", "content": message.text, "tool_calls": calls or None})
    return messages


def tools_of(format: str, kind: str) -> ToolSet:
    if format == "compact":
        return ToolSet.tiny() if kind == "whole" else ToolSet.tiny({*TINY_NAMES} - {"finish"})
    return ToolSet.named("cursor" if kind == "whole" else "grep,write,todo_write")


def small_tokenizer(format: str) -> Tokenizer:
    return train_tokenizer(
        ["def f(xs):\n    return sum(x for x in xs)\n"] * 9, 420, () if format == "compact" else FORMATS[format].tokens
    )


@pytest.mark.parametrize("kind", ["whole", "brief"])
@pytest.mark.parametrize("format", list(FORMATS))
def test_the_template_renders_the_tokens_of_the_renderer(format: str, kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, tools = small_tokenizer(format), tools_of(format, kind).schemas
    for name, data in for_format({}, tokenizer, format).items():
        (tmp_path / name).write_bytes(data)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token == FORMATS[format].closing
    for offered in (tools, []) if format != "compact" else (tools,):
        renderer, talk = FORMATS[format](tokenizer, offered), talk_of(format, kind) if offered else [User(text="hi")]
        for end in range(1, len(talk) + 1):
            if isinstance(talk[end - 1], CallResult) and end < len(talk) and isinstance(talk[end], CallResult):
                continue  # a turn's results are rendered together
            for system in ("", SYSTEM):
                messages = [*([{"role": "system", "content": system}] if system else []), *as_openai(talk[:end])]
                cue = not isinstance(talk[end - 1], Said)
                ids = theirs.apply_chat_template(
                    messages, tools=offered or None, add_generation_prompt=cue, return_dict=False
                )
                assert ids == renderer.render(talk[:end], system), theirs.decode(ids)


def stopping(path: Path, end: int) -> list[int]:
    """Return what `transformers` generates from a checkpoint that says token 60 twice and then `end` for ever."""
    from transformers import AutoModelForCausalLM, LogitsProcessor

    class Script(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[:] = -1e9
            scores[:, end if input_ids.shape[1] >= 5 else 60] = 0
            return scores

    model = AutoModelForCausalLM.from_pretrained(path)
    output = model.generate(torch.tensor([[5, 6, 8]]), max_new_tokens=20, do_sample=False, logits_processor=[Script()])
    return output[0, 3:].tolist()


CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint whose files say that <|endoftext|> ends a text."""
    torch.manual_seed(1)
    tokenizer = train_tokenizer(["a few words\n"] * 9, 400, ["<|endoftext|>"])
    number = tokenizer.token_to_id("<|endoftext|>")
    config = ModelConfig(family="qwen3", vocab_size=400, intermediate_size=48, num_hidden_layers=2)
    model = Model(config)
    model.companions = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(
            {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left"}
        ).encode(),
        "generation_config.json": json.dumps({"eos_token_id": number, "temperature": 0.7, "do_sample": True}).encode(),
        "chat_template.jinja": CHAT.encode(),
        "special_tokens_map.json": json.dumps({"eos_token": "<|endoftext|>"}).encode(),
        "LICENSE": b"Apache",
    }
    save_pretrained(model, tmp_path / "source")
    (tmp_path / "source" / "secrets.txt").write_text("not a companion")
    return tmp_path / "source"


def test_what_came_with_a_model_leaves_with_it(source: Path, tmp_path: Path) -> None:
    save_pretrained(load_pretrained(source), tmp_path / "saved", dtype=torch.bfloat16)
    convert(source, tmp_path / "moe", experts=4)
    for path in (tmp_path / "saved", tmp_path / "moe"):
        names = {file.name for file in path.iterdir()} - {"model.safetensors", "config.json"}
        assert names == {*read_companions(source)} and "LICENSE" in names and "secrets.txt" not in names
        assert all((path / name).read_bytes() == (source / name).read_bytes() for name in names)
        assert json.loads((path / "config.json").read_text())["eos_token_id"]


def test_a_converted_model_stops_at_the_end_of_a_turn(source: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    convert(source, tmp_path / "out", format="qwen")
    theirs, out = AutoTokenizer.from_pretrained(tmp_path / "out"), tmp_path / "out"
    end, text = theirs.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert theirs.eos_token == "<|im_end|>" and theirs.padding_side == "left"
    assert GenerationConfig.from_pretrained(out).eos_token_id == [end, text]
    assert GenerationConfig.from_pretrained(out).temperature == 0.7
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [end, text]
    assert theirs.chat_template == CHAT, "nothing was trained yet"
    assert stopping(out, end) == [60, 60, end] and stopping(out, text) == [60, 60, text]


def test_a_file_that_is_damaged_or_too_large_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="larger than 10 bytes"):
        patch.setattr("composer_nb.trainer.models.companions.MOST_BYTES", 10)
        load_pretrained(source)
    for name, text in (("generation_config.json", "[1]"), ("config.json", "[")):
        (source / name).write_text(text)
        with pytest.raises(ValueError, match=name):
            load_pretrained(source)
