"""Grammars of calls: all that a format writes is allowed, and all that is allowed is a call that fits its tool's schema."""

from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import ChatRenderer, Said, Written
from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.tools.tool_call import ToolCall
from tests.production.test_product_calls import FORMATS

PAIR = {"type": "object", "properties": {"a": {"type": ["number", "null"]}}, "required": ["a"]}
PUT = {
    "path": {"type": "string"},
    "text": {"type": "string", "description": "the new text"},
    "line": {"type": "integer"},
    "all": {"type": "boolean"},
    "mode": {"enum": ["a", "b\n"], "type": "string"},
    "pairs": {"type": "array", "items": {"$ref": "#/$defs/pair"}},
}
SCHEMAS: dict[str, Any] = {
    "put": {"type": "object", "properties": PUT, "required": ["path", "text"], "$defs": {"pair": PAIR}},
    "test": {"type": "object", "properties": {}},
    "edit": {"type": "object", "properties": {n: PUT[n] for n in ("path", "line")}, "required": ["path", "line"]},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
RENDERERS = {name: renderer.offering(TOOLS) for name, renderer in FORMATS.items()}

TEXTS = st.text(st.sampled_from('ab <>/\n"\\é{}'), max_size=8).filter(lambda text: "</parameter>" not in text)
OPTIONAL = {
    "line": st.integers(-5, 10**6),
    "all": st.booleans(),
    "mode": st.sampled_from(["a", "b\n"]),
    "pairs": st.lists(st.fixed_dictionaries({"a": st.none() | st.sampled_from([0, -2.5, 1e-7])}), max_size=2),
}
PUTS = st.fixed_dictionaries({"path": st.sampled_from(["f.py", "a/b-c.py"]), "text": TEXTS}, optional=OPTIONAL)
CALLS = st.one_of(
    st.tuples(st.just("put"), PUTS),
    st.tuples(st.just("test"), st.just({})),
    st.tuples(st.just("edit"), st.fixed_dictionaries({"path": st.just("f.py"), "line": st.integers(0, 999_999)})),
)


def grammar(renderer: ChatRenderer, *names: str, text: bool = False, several: bool = True) -> Grammar:
    return renderer.grammar(names or [*SCHEMAS], text=text, several=several)


def follows(compiled: Grammar, token_ids: list[int]) -> bool:
    """Return whether each token of a turn, its end included, is allowed."""
    turn = compiled.fresh()
    return all(turn.allowed(token_ids[:count])[token] for count, token in enumerate(token_ids))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(RENDERERS)), st.lists(CALLS, min_size=1, max_size=3), st.sampled_from(["", "I look."]))
def test_turns_as_they_are_rendered_are_allowed(name: str, calls: list[tuple[str, dict[str, Any]]], text: str) -> None:
    renderer = RENDERERS[name]
    id = "functions.{}:{}" if isinstance(renderer, KimiRenderer) else "call_{1}"
    written_calls = tuple(
        Written(id=id.format(tool, n), call=ToolCall(name=tool, arguments={k: v[k] for k in PUT if k in v}))
        for n, (tool, v) in enumerate(calls)
    )
    try:
        token_ids = renderer.turn(Said(text="" if name == "CompactRenderer" else text, calls=written_calls))
    except ValueError:  # the format cannot express it
        return
    says = bool(text) and name != "CompactRenderer"
    assert follows(grammar(renderer, text=True), token_ids)
    assert follows(grammar(renderer), token_ids) is not says
    assert follows(grammar(renderer, several=False), token_ids) is (len(calls) == 1 and not says)
    assert follows(grammar(renderer, "put"), token_ids) is (not says and {tool for tool, _ in calls} == {"put"})


def walk(compiled: Grammar, renderer: ChatRenderer, rng: np.random.Generator) -> list[int]:
    """Write a turn at random, which closes what it has begun sooner or later."""
    turn, token_ids, closing = compiled.fresh(), list[int](), renderer.encode("</parameter>")
    closed = 0
    while not token_ids or token_ids[-1] != renderer.end:
        allowed = np.flatnonzero(turn.allowed(token_ids))
        marks = [
            token for token in allowed if token in renderer.special or renderer.tokenizer.id_to_token(token) in '"}]'
        ]
        if closed or (len(allowed) > 99 and isinstance(renderer, QwenRenderer) and rng.random() < 0.2):
            token, closed = closing[closed], (closed + 1) % len(closing)
            token = token if token in allowed else rng.choice(allowed)
        else:
            token = rng.choice(marks if marks and rng.random() < 0.4 else allowed)
        token_ids.append(int(token))
        assert len(token_ids) < 5000
    return token_ids


@pytest.mark.parametrize("name", RENDERERS)
def test_whatever_is_allowed_is_a_call_that_fits_its_schema(name: str) -> None:
    renderer, rng, counts = RENDERERS[name], np.random.default_rng(0), set[int]()
    for several in [True] * 20 + [False] * 5:
        message = renderer.parse(walk(grammar(renderer, several=several), renderer, rng))
        assert message.calls and not message.text and (several or len(message.calls) == 1)
        for call in (written.call for written in message.calls):
            assert isinstance(call, ToolCall), call
            jsonschema.validate(dict(call.arguments), SCHEMAS[call.name])
        counts.add(len(message.calls))
    assert len(counts) > 1


def at(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"at": schema}, "required": ["at"]}


NUMBER = at({"type": "integer"})


def look(name: str, parameters: Any, tool: str = "look") -> ChatRenderer:
    return FORMATS[name].offering([{"type": "function", "function": {"name": tool, "parameters": parameters}}])


@pytest.mark.parametrize("name", RENDERERS)
def test_long_enumerations_are_followed_and_endless_ones_refused(name: str) -> None:
    schema = {"type": "string", "enum": [f"value_{n}" for n in range(3000)]}
    renderer = look(name, at(schema))
    compiled = grammar(renderer, "look", several=False)
    [written] = renderer.parse(walk(compiled, renderer, np.random.default_rng(0))).calls
    assert isinstance(written.call, ToolCall) and written.call.arguments["at"] in schema["enum"] and not compiled.fault
    schema["enum"] = [f"value_{n}" for n in range(60_000)]
    renderer = look(name, at(schema))
    with pytest.raises(ValueError, match="tools: a grammar of .* letters"):
        grammar(renderer, "look")


@pytest.mark.parametrize(
    ("name", "tool", "parameters", "match"),
    [
        ("QwenRenderer", "look", at({"type": "string", "pattern": "a+"}), "at: .*pattern"),
        ("CompactRenderer", "look", at({"type": "string", "minLength": 2}), "at: .*minLength"),
        ("KimiRenderer", "look", at({"type": "object", "not": {"required": ["x"]}}), "not"),
        ("QwenRenderer", "look", at({"type": "array", "items": {"$ref": "#/$defs/none"}}), "none"),
        ("QwenRenderer", "look", at({"enum": ["5", 5]}), "at: .*from others"),
        ("QwenRenderer", "look", at({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}), "at: .*minimum"),
        ("QwenRenderer", "a>b", NUMBER, "a>b"),
        ("QwenRenderer", "look", {"type": "object", "properties": {"a>b": {"type": "integer"}}}, "a>b"),
        ("KimiRenderer", "naïve", NUMBER, "naïve"),
        ("QwenRenderer", "look", {"anyOf": [NUMBER, {"type": "object"}]}, "anyOf"),
        ("CompactRenderer", "look", {"$ref": "#/$defs/x", "$defs": {"x": NUMBER}}, "ref"),
        ("CompactRenderer", "look", {"properties": {"line": {"type": "integer", "minimum": 5}}, "required": ["line"]}, "line"),
    ],
)  # fmt: skip
def test_names_and_schemas_that_a_format_cannot_write_are_refused(
    name: str, tool: str, parameters: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s)^tools: .*{match}"):
        grammar(look(name, parameters, tool), tool)
