"""Wire formats of chat models: what is rendered is read back, turn by turn is at once, and no text becomes a special token.

The models' own tokenizers can not be had here. So a small one is trained, with Qwen's splitting and both formats' tokens as the
models have them (Qwen's `<tool_call>` is added, but not special), and the layout is held against templates written here from the
public descriptions, rendered by Jinja and encoded at once.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, Said, User, Written
from composer_nb.harness.agent.compact import SPECIALS, CompactRenderer
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer, kinds, read_value
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, call
from composer_nb.harness.tools.toolset import ToolSet

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split, byte_level = pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    text = ["assistant\nuser\nsystem\n<function=read_file>\n<parameter=path>\nf.py\n</parameter>\n</function>\n"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([*QwenRenderer.tokens[:2], *KimiRenderer.tokens, *SPECIALS, "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QwenRenderer.tokens[2:]])
    return tokenizer


TOKENIZER = trained()
SCHEMAS: dict[str, Any] = {
    **{kind[0]: {"type": kind} for kind in ("string", "integer", "number", "boolean", "object")},
    "a": {"type": "array", "items": {"type": "string"}},
    "z": {"type": "null"},
    "m": {"type": ["string", "null"]},
    "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
PARAMETERS = {"type": "object", "properties": SCHEMAS, "required": ["s"]}
TOOL = {"type": "function", "function": {"name": "do", "description": "Does.", "parameters": PARAMETERS}}
TOOLS = [TOOL, *ToolSet.tiny().schemas]
QWEN, KIMI, COMPACT = QwenRenderer(TOKENIZER, TOOLS), KimiRenderer(TOKENIZER, TOOLS), CompactRenderer(TOKENIZER, [TOOL])
RENDERERS = pytest.mark.parametrize("renderer", [QWEN, KIMI], ids=["qwen", "kimi"])
ALL = pytest.mark.parametrize("renderer", [QWEN, KIMI, COMPACT], ids=["qwen", "kimi", "compact"])
MARKS = [*QwenRenderer.tokens, *KimiRenderer.tokens, *SPECIALS, "<|endoftext|>"]
MARKS += ["</parameter>", "\n</parameter>\n", "<parameter=s>", "</function>"]
PARTS = [*MARKS, "<function=do>", "<", "|>", "\n", " ", "null", "3", "true", "é", "e\u0301", "😀", '"', "\\"]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXT |= st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
JSON = st.recursive(
    TEXT | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "s": TEXT,
    "i": st.integers(),
    "n": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "b": st.booleans(),
    "a": st.lists(JSON, max_size=3),
    "o": st.dictionaries(TEXT, JSON, max_size=3),
    "z": st.none(),
    "m": TEXT | st.none(),
    "u": TEXT | st.integers(),
}
CALL = st.fixed_dictionaries({}, optional=VALUES).map(lambda arguments: ToolCall(name="do", arguments=arguments))
PLAIN = st.text("ab .\n<é", max_size=10).map(str.strip)


def make_turn(renderer: ChatRenderer, text: str, calls: list[ToolCall], first: int = 0) -> Said:
    names = [f"functions.{c.name}:{first + n}" if renderer is KIMI else f"call_{n}" for n, c in enumerate(calls)]
    return Said(text=text, calls=tuple(Written(id=name, call=call) for name, call in zip(names, calls, strict=True)))


def special(renderer: ChatRenderer, token_ids: list[int]) -> list[int]:
    return [token for token in token_ids if token in TOKENIZER.get_added_tokens_decoder()]


@RENDERERS
@settings(max_examples=200)
@given(text=PLAIN, calls=st.lists(CALL, max_size=3))
def test_a_turn_survives_the_way_there_and_back_or_is_refused(
    renderer: ChatRenderer, text: str, calls: list[ToolCall]
) -> None:
    turn = make_turn(renderer, text, calls)
    try:
        token_ids = renderer.turn(turn)
    except ValueError as error:
        # Kimi can say everything; Qwen all but texts that end a value, or read as another type of their schema.
        assert renderer is QWEN and "cannot express" in str(error)
        strings = [value for call in calls for value in call.arguments.values() if isinstance(value, str)]
        arguments = json.dumps([dict(call.arguments) for call in calls], ensure_ascii=False)
        texts = [v for call in calls for k, v in call.arguments.items() if k in "mu" and isinstance(v, str) and v != ""]
        assert "</parameter>" in arguments or any(
            read_value(v, kinds(SCHEMAS["u"])) != v or read_value(v, kinds(SCHEMAS["m"])) != v for v in texts
        ), strings
        return
    parsed_turn = renderer.parse(token_ids)
    assert parsed_turn == turn
    assert [json.dumps(dict(w.call.arguments)) for w in parsed_turn.calls] == [
        json.dumps(dict(c.arguments)) for c in calls
    ]  # type: ignore[union-attr]


@ALL
@given(text=TEXT)
def test_text_never_becomes_a_special_token_nor_anything_but_itself(renderer: ChatRenderer, text: str) -> None:
    assert not special(renderer, renderer.encode(text))
    assert TOKENIZER.decode(renderer.encode(text), skip_special_tokens=False) == text
    assert special(renderer, renderer.ask(text)) == special(renderer, renderer.ask("x"))
    assert special(renderer, renderer.open(text + "x")) == special(renderer, renderer.open("x"))
    results = [CallResult(id="functions.do:0", text=text)]
    baseline = [CallResult(id="a", text="x")]
    assert special(renderer, renderer.read(results)) == special(renderer, renderer.read(baseline))
    turns = [make_turn(renderer, "", [call("do", s="", a=a)]) for a in ([text.replace("</parameter>", "")], [])]
    assert len({str(special(renderer, renderer.turn(turn))) for turn in turns}) == 1


CONVERSATION = st.lists(st.tuples(PLAIN, st.lists(CALL, max_size=2), TEXT), min_size=1, max_size=3)


@ALL
@settings(max_examples=50)
@given(system=TEXT, first=TEXT, turns=CONVERSATION)
def test_turn_by_turn_is_at_once(
    renderer: ChatRenderer, system: str, first: str, turns: list[tuple[str, list[ToolCall], str]]
) -> None:
    """Every rendering of a beginning is a beginning of the rendering: what a cache of keys and values needs."""
    messages: list[Message] = [User(text=first)]
    token_ids = renderer.render(messages, system)
    count = 0
    for text, calls, answer in turns:
        turn = make_turn(renderer, text, calls, count)
        try:
            turn_ids = renderer.turn(turn)
        except ValueError:
            continue
        results = [CallResult(id=call.id, text=answer) for call in turn.calls]
        news: list[Message] = [*results] if results else [User(text=answer)]
        messages += [turn, *news]
        count += len(calls)
        token_ids += turn_ids + renderer.render(news, system, after=True)
        assert renderer.render(messages, system) == token_ids
        assert renderer.parse(turn_ids) == turn


def piece(mark: str) -> str | int:
    number = TOKENIZER.token_to_id(mark)
    return mark if number is None else int(number)


def errors(renderer: ChatRenderer, *pieces: str | int) -> list[str]:
    """Return why each call of a turn is invalid, or an empty text."""
    parsed_turn = renderer.parse(renderer.encoded(pieces))
    return [str(w.call) if isinstance(w.call, ToolError) else "" for w in parsed_turn.calls]


Q, K = QWEN.ids, KIMI.ids
BODY = "\n<function=do>\n<parameter=s>\nx\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "a call is"),
        ('{"name": "do", "arguments": {}}', "a call is"),
        ("\n<function=do>\n<parameter=s>\nx\n</function>\n", "a parameter is"),
        ("\n<function=do>\n<parameter=s>\nx\n</parameter>\n", "a parameter is"),
        (BODY + BODY, "a parameter is"),
        (BODY.replace("</function>", "<parameter=s>\ny\n</parameter>\n</function>"), "is repeated"),
        (BODY.replace("=s>\nx", "=i>\ntrue"), "i: not of type integer"),
        (BODY.replace("=s>\nx", "=n>\nNaN"), "n: not of type number"),
        (BODY.replace("=s>\nx", '=a>\n{"a": 1}'), "a: not of type array"),
        (BODY.replace("=s>\nx", '=o>\n{"a": 1, "a": 2}'), "o: not of type object"),
        (BODY.replace("=s>\nx", '=a>\n["\\ud800"]'), "a: not of type array"),
    ],
)
def test_qwens_malformed_calls_are_invalid_ones(body: str, why: str) -> None:
    [error] = errors(QWEN, Q["<tool_call>"], body, Q["</tool_call>"], Q["<|im_end|>"])
    assert why in error
    assert errors(
        QWEN, Q["<tool_call>"], BODY, Q["</tool_call>"], Q["<tool_call>"], body, Q["</tool_call>"], Q["<|im_end|>"]
    ) == ["", error]


def kimi(name: str, arguments: str) -> list[str | int]:
    return [K["<|tool_call_begin|>"], name, K["<|tool_call_argument_begin|>"], arguments, K["<|tool_call_end|>"]]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("functions.do", "{}", "is not the id"),
        ("functions.do:0", "", "not JSON"),
        ("functions.do:0", '{"a": NaN}', "is not a number"),
        ("functions.do:0", '{"a": 1, "a": 2}', "is repeated"),
        ("functions.do:0", '{"a": "\\ud800"}', "not JSON"),
        ("functions.do:0", '{"a": ' * 20000, "not JSON"),
    ],
)
def test_kimis_malformed_calls_are_invalid_ones(name: str, arguments: str, why: str) -> None:
    section, end = K["<|tool_calls_section_begin|>"], [K["<|tool_calls_section_end|>"], K["<|im_end|>"]]
    reported = errors(KIMI, section, *kimi("do:0", "{}"), *kimi(name, arguments), *kimi("functions.do:2", "{}"), *end)
    assert reported[0] == "" and why in reported[1] and reported[2] == ""


@ALL
@settings(max_examples=200)
@given(pieces=st.lists(st.sampled_from([*MARKS, BODY, "functions.do:0", "{}", "x"]).map(piece) | TEXT, max_size=8))
def test_whatever_was_written_is_read_without_an_exception(renderer: ChatRenderer, pieces: list[str | int]) -> None:
    parsed_turn = renderer.parse(renderer.encoded(pieces))
    assert all(not isinstance(w.call, ToolError) or w.call.kind == "InvalidArguments" for w in parsed_turn.calls)
    assert parsed_turn.calls or renderer is not QWEN or QWEN.ids[QWEN.spelled[0]] not in pieces
