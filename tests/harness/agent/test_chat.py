"""Wire formats of chat models: what is rendered is read back, turn by turn is at once, and no text becomes a special token.

The models' own tokenizers can not be had here. So a small one is trained, with Qwen's splitting and both formats' tokens as the
models have them (Qwen's `<tool_call>` is added, but not special), and the layout is held against templates written here from the
public descriptions, rendered by Jinja and encoded at once.
"""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, Said, User, Written
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer, kinds, read_value
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.harness.tools.toolset import ToolSet

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = ["assistant\nuser\nsystem\n<function=read_file>\n<parameter=path>\nf.py\n</parameter>\n</function>\n"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([token for token in (*QwenRenderer.tokens[:2], *KimiRenderer.tokens, "<|endoftext|>")])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in QwenRenderer.tokens[2:]])
    return tokenizer


TOKENIZER = trained()
SCHEMAS: dict[str, Any] = {
    "s": {"type": "string", "description": "text"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "a": {"type": "array", "items": {"type": "string"}},
    "o": {"type": "object"},
    "z": {"type": "null"},
    "m": {"type": ["string", "null"]},
    "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "do",
        "description": "Does.",
        "parameters": {"type": "object", "properties": SCHEMAS, "required": ["s"]},
    },
}
TOOLS = [TOOL, *ToolSet.tiny().schemas]
QWEN, KIMI = QwenRenderer(TOKENIZER, TOOLS), KimiRenderer(TOKENIZER, TOOLS)
RENDERERS = pytest.mark.parametrize("renderer", [QWEN, KIMI], ids=["qwen", "kimi"])
MARKS = [
    *QwenRenderer.tokens,
    *KimiRenderer.tokens,
    "<|endoftext|>",
    "</parameter>",
    "\n</parameter>\n",
    "<parameter=s>",
    "</function>",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.lists(
    st.sampled_from(
        [*MARKS, "<function=do>", "<", "|>", "\n", " ", "null", "3", "true", "é", "e\u0301", "😀", '"', "\\"]
    ),
    max_size=6,
).map("".join)
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


def said(renderer: ChatRenderer, text: str, calls: list[ToolCall], first: int = 0) -> Said:
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
    turn = said(renderer, text, calls)
    try:
        token_ids = renderer.turn(turn)
    except ValueError as error:
        # Kimi can say everything; Qwen all but texts that end a value, or read as another type of their schema.
        assert renderer is QWEN and "cannot express" in str(error)
        strings = [value for call in calls for value in call.arguments.values() if isinstance(value, str)]
        held = json.dumps([dict(call.arguments) for call in calls], ensure_ascii=False)
        other = [v for call in calls for k, v in call.arguments.items() if k in "mu" and isinstance(v, str) and v != ""]
        assert "</parameter>" in held or any(
            read_value(v, kinds(SCHEMAS["u"])) != v or read_value(v, kinds(SCHEMAS["m"])) != v for v in other
        ), strings
        return
    read = renderer.parse(token_ids)
    assert read == turn
    assert [json.dumps(dict(w.call.arguments)) for w in read.calls] == [json.dumps(dict(c.arguments)) for c in calls]  # type: ignore[union-attr]


def test_what_qwens_format_can_not_say() -> None:
    fine = said(QWEN, "", [ToolCall(name="do", arguments={"s": "a</parameter>b\n</parameter>\nc"})])
    assert QWEN.parse(QWEN.turn(fine)) == fine
    for value in ("a\n</parameter>\n</function>\n", "a</parameter>\n<parameter=i>\n3"):
        with pytest.raises(ValueError, match="the format cannot express this turn"):
            QWEN.turn(said(QWEN, "", [ToolCall(name="do", arguments={"s": value})]))
    with pytest.raises(ValueError, match="cannot express"):
        QWEN.turn(said(QWEN, "", [ToolCall(name="do", arguments={"m": "null"})]))
    with pytest.raises(ValueError, match="is invalid"):
        QWEN.turn(Said(calls=(Written(id="x", call=ToolError("InvalidArguments", "no")),)))


@RENDERERS
@given(text=TEXT)
def test_text_never_becomes_a_special_token_nor_anything_but_itself(renderer: ChatRenderer, text: str) -> None:
    assert not special(renderer, renderer.encode(text))
    assert TOKENIZER.decode(renderer.encode(text), skip_special_tokens=False) == text
    assert special(renderer, renderer.ask(text)) == special(renderer, renderer.ask("x"))
    assert special(renderer, renderer.open(text + "x")) == special(renderer, renderer.open("x"))
    one = [CallResult(id="functions.do:0", text=text)]
    assert special(renderer, renderer.results(one)) == special(
        renderer, renderer.results([CallResult(id="a", text="x")])
    )
    turn = renderer.turn(said(renderer, "", [ToolCall(name="do", arguments={"a": [text.replace("</parameter>", "")]})]))
    assert special(renderer, turn) == special(
        renderer, renderer.turn(said(renderer, "", [ToolCall(name="do", arguments={"a": []})]))
    )


CONVERSATION = st.lists(st.tuples(PLAIN, st.lists(CALL, max_size=2), TEXT), min_size=1, max_size=3)


@RENDERERS
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
        turn = said(renderer, text, calls, count)
        try:
            written = renderer.turn(turn)
        except ValueError:
            continue
        results = [CallResult(id=call.id, text=answer) for call in turn.calls]
        news: list[Message] = [*results] if results else [User(text=answer)]
        messages += [turn, *news]
        count += len(calls)
        later = (
            renderer.results(results) if results else renderer.render(messages, system)[len(token_ids) + len(written) :]
        )
        token_ids = token_ids + written + later
        assert renderer.render(messages, system) == token_ids
        assert renderer.parse(written) == turn


QWEN_TEMPLATE = """\
{%- if system %}<|im_start|>system
{{ system }}<|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == "user" %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == "assistant" %}<|im_start|>assistant
{% if m.content %}{{ m.content }}{% if m.calls %}

{% endif %}{% endif %}{%- for c in m.calls %}{% if not loop.first %}
{% endif %}<tool_call>
<function={{ c.name }}>
{% for k, v in c.arguments.items() %}<parameter={{ k }}>
{{ v if v is string else (v | tojson) }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% else %}{% if loop.previtem.role != "tool" %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>
{% if loop.last or loop.nextitem.role != "tool" %}<|im_end|>
{% endif %}{% endif %}{% endfor %}<|im_start|>assistant
"""
KIMI_TEMPLATE = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools }}<|im_end|>{% endif %}
{%- if system %}<|im_system|>system<|im_middle|>{{ system }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == "user" %}<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>
{%- elif m.role == "assistant" %}<|im_assistant|>assistant<|im_middle|>{{ m.content }}
{%- if m.calls %}<|tool_calls_section_begin|>{% for c in m.calls -%}
<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- else %}<|im_system|>tool<|im_middle|>## Return of {{ m.id }}
{{ m.content }}<|im_end|>
{%- endif %}{% endfor %}<|im_assistant|>assistant<|im_middle|>"""


def by_template(renderer: ChatRenderer, messages: list[Message], system: str) -> list[int]:
    held: list[dict[str, Any]] = []
    for message in messages:
        if isinstance(message, Said):
            calls = [{"id": w.id, "name": w.call.name, "arguments": dict(w.call.arguments)} for w in message.calls]  # type: ignore[union-attr]
            held.append({"role": "assistant", "content": message.text, "calls": calls})
        elif isinstance(message, CallResult):
            held.append({"role": "tool", "content": message.text, "id": message.id})
        else:
            held.append({"role": "user", "content": message.text})
    source = QWEN_TEMPLATE if isinstance(renderer, QwenRenderer) else KIMI_TEMPLATE
    environment = jinja2.Environment(keep_trailing_newline=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    tools = json.dumps(list(renderer.tools), ensure_ascii=False, separators=(",", ":")) if renderer.tools else ""
    text = environment.from_string(source).render(messages=held, system=system, tools=tools)
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("renderer", [QwenRenderer(TOKENIZER), KimiRenderer(TOKENIZER, TOOLS)], ids=["qwen", "kimi"])
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("text", ["", "Let me look: a < b.", "é 😀\n\nlines"])
def test_the_layout_is_the_templates(renderer: ChatRenderer, count: int, text: str) -> None:
    calls = [
        ToolCall(name="read_file", arguments={"path": "f.py"}),
        ToolCall(name="do", arguments={"s": "def f(x):\n    return x\n", "i": 3, "a": ["é", 1], "b": True}),
    ][:count]
    names = [
        f"functions.{c.name}:{n}" if isinstance(renderer, KimiRenderer) else f"call_{n}" for n, c in enumerate(calls)
    ]
    turn = Said(text=text, calls=tuple(Written(id=n, call=c) for n, c in zip(names, calls, strict=True)))
    results: list[Message] = [CallResult(id=name, text=f"1|x\n2|{name}") for name in names] or [User(text="and?")]
    messages = [User(text="fix f.py"), turn, *results]
    if isinstance(renderer, QwenRenderer) and calls:  # what it can not know without schemas is given as strings
        read = renderer.encoded([*renderer._said(turn), renderer.end])
        rendered = (
            renderer.render(messages[:1], "You fix.")
            + read
            + renderer.results([r for r in results if isinstance(r, CallResult)])
        )
    else:
        rendered = renderer.render(messages, "You fix.")
    assert rendered == by_template(renderer, messages, "You fix.")


def errors(renderer: ChatRenderer, *pieces: str | int) -> list[str]:
    """Of each call of a turn: why it is invalid, or nothing."""
    read = renderer.parse(renderer.encoded(pieces))
    assert all(not isinstance(w.call, ToolError) or w.call.kind == "InvalidArguments" for w in read.calls)
    return [str(w.call) if isinstance(w.call, ToolError) else "" for w in read.calls]


Q, K = QWEN.ids, KIMI.ids
BODY = "\n<function=do>\n<parameter=s>\nx\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("", "a call is"),
        ("do", "a call is"),
        ('{"name": "do", "arguments": {}}', "a call is"),
        ("<function=>\n</function>", "a call is"),
        ("\n<function=do>\n", "a parameter is"),
        ("\n<function=do>\n<parameter=s>\nx\n</function>\n", "a parameter is"),
        ("\n<function=do>\n<parameter=s>\nx\n</parameter>\n", "a parameter is"),
        ("\n<function=do>\nx\n</function>\n", "a parameter is"),
        (BODY + "more", "a parameter is"),
        (BODY + BODY, "a parameter is"),
        (BODY.replace("</function>", "<parameter=s>\ny\n</parameter>\n</function>"), "is repeated"),
        (BODY.replace("=s>", "=i>"), "i: not of type integer"),
        (BODY.replace("=s>\nx", "=i>\n3.0"), "i: not of type integer"),
        (BODY.replace("=s>\nx", "=i>\ntrue"), "i: not of type integer"),
        (BODY.replace("=s>\nx", "=n>\nNaN"), "n: not of type number"),
        (BODY.replace("=s>\nx", "=b>\nyes"), "b: not of type boolean"),
        (BODY.replace("=s>\nx", '=a>\n{"a": 1}'), "a: not of type array"),
        (BODY.replace("=s>\nx", '=o>\n{"a": 1, "a": 2}'), "o: not of type object"),
        (BODY.replace("=s>\nx", '=a>\n["\\ud800"]'), "a: not of type array"),
        (BODY.replace("=s>\nx", "=a>\n" + "[" * 20000), "a: not of type array"),
    ],
)
def test_qwens_malformed_calls_are_invalid_ones(body: str, why: str) -> None:
    [error] = errors(QWEN, Q["<tool_call>"], body, Q["</tool_call>"], Q["<|im_end|>"])
    assert why in error
    assert errors(
        QWEN, Q["<tool_call>"], BODY, Q["</tool_call>"], Q["<tool_call>"], body, Q["</tool_call>"], Q["<|im_end|>"]
    ) == ["", error]


def test_qwen_reads_what_its_template_writes_and_values_without_line_breaks() -> None:
    body = (
        "<function=do><parameter=s>x</parameter><parameter=b>True</parameter><parameter=z>None</parameter></function>"
    )
    read = QWEN.parse(QWEN.encoded([Q["<tool_call>"], body, Q["</tool_call>"], Q["<|im_end|>"]]))
    assert read.calls[0].call == ToolCall(name="do", arguments={"s": "x", "b": True, "z": None})


def kimi(name: str, arguments: str) -> list[str | int]:
    return [K["<|tool_call_begin|>"], name, K["<|tool_call_argument_begin|>"], arguments, K["<|tool_call_end|>"]]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("functions.do", "{}", "is not the id"),
        ("do:x", "{}", "is not the id"),
        (" ", "{}", "is not the id"),
        ("functions.do:0", "", "not JSON"),
        ("functions.do:0", "{", "not JSON"),
        ("functions.do:0", "[]", "one JSON object"),
        ("functions.do:0", '{"a": NaN}', "is not a number"),
        ("functions.do:0", '{"a": 1, "a": 2}', "is repeated"),
        ("functions.do:0", '{"a": "\\ud800"}', "not JSON"),
        ("functions.do:0", '{"a": ' * 20000, "not JSON"),
    ],
)
def test_kimis_malformed_calls_are_invalid_ones(name: str, arguments: str, why: str) -> None:
    section, end = K["<|tool_calls_section_begin|>"], [K["<|tool_calls_section_end|>"], K["<|im_end|>"]]
    found = errors(KIMI, section, *kimi("do:0", "{}"), *kimi(name, arguments), *kimi("functions.do:2", "{}"), *end)
    assert found[0] == "" and why in found[1] and found[2] == ""


@RENDERERS
@settings(max_examples=150)
@given(
    pieces=st.lists(
        st.sampled_from([*MARKS, BODY, "functions.do:0", "{}", "x"]).map(
            lambda m: m if TOKENIZER.token_to_id(m) is None else TOKENIZER.token_to_id(m)
        )
        | TEXT,
        max_size=8,
    )
)
def test_whatever_was_written_is_read_without_an_exception(renderer: ChatRenderer, pieces: list[str | int]) -> None:
    read = renderer.parse(renderer.encoded(pieces))
    written = [
        p for p in pieces if isinstance(p, int) and p in renderer.names and renderer.names[p] in renderer.spelled[:1]
    ]
    assert len(read.calls) >= bool(written) * (renderer is QWEN)
    assert renderer.parse(renderer.encoded(pieces)).text == read.text
