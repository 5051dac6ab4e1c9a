"""The wire format: calls survive the way there and back, everything else is an error, and no text becomes a special token."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.compact import SPECIALS, CompactRenderer
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, call
from composer_nb.harness.tools.toolset import ToolSet

FRAGMENTS = ["<", "|", ">", "<|", "|>", "<<||", "end", "call", "pad", "to", " ", "\n", *SPECIALS, "< |end|>", "é", "😀"]
TEXT = st.text(max_size=20) | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def specials(renderer: CompactRenderer) -> set[int]:
    return {renderer.tokenizer.token_to_id(token) for token in SPECIALS}


# -- any tools -----------------------------------------------------------------------------------------------

CURSOR = ToolSet.cursor(search=lambda session: None).schemas  # type: ignore[arg-type, return-value]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXT,
    "boolean": st.booleans(),
    "integer": st.integers(-(10**8), 10**8),
    "array": st.lists(JSON, max_size=3),
}
LINE = st.integers(0, 999_999)


@pytest.fixture(scope="module")
def cursor(renderer: CompactRenderer) -> CompactRenderer:
    return CompactRenderer(renderer.tokenizer, CURSOR)


def turn_of(*calls: ToolCall, text: str = "") -> Said:
    return Said(text=text, calls=tuple(Written(id=f"call_{n}", call=call) for n, call in enumerate(calls)))


@settings(max_examples=400)
@given(data=st.data())
def test_any_tools_can_be_called_several_in_a_turn(
    renderer: CompactRenderer, cursor: CompactRenderer, data: st.DataObject
) -> None:
    drawn_renderer, tools = data.draw(st.sampled_from([(cursor, CURSOR), (renderer, ToolSet.tiny().schemas)]))
    calls, paths = list[ToolCall](), list[str]()
    for _ in range(data.draw(st.integers(1, 4))):
        function = data.draw(st.sampled_from(tools))["function"]
        schemas, required = function["parameters"]["properties"], function["parameters"].get("required", [])
        optional = sorted({*schemas} - {*required})
        names = [*required, *(data.draw(st.lists(st.sampled_from(optional), unique=True)) if optional else [])]
        values = {name: LINE if name == "line" else VALUES[schemas[name]["type"]] for name in names}
        arguments = {name: data.draw(values[name]) for name in data.draw(st.permutations(names))}
        calls.append(ToolCall(name=function["name"], arguments=arguments))
        paths += [arguments[name] for name in required if name.endswith(("path", "file", "directory"))]
    message = turn_of(*calls)
    if not all(re.fullmatch(r"\S+", path) for path in paths):
        with pytest.raises(ValueError, match="cannot express"):
            drawn_renderer.turn(message)
        return
    token_ids = drawn_renderer.turn(message)
    assert drawn_renderer.parse(token_ids) == message and {*drawn_renderer.kinds(token_ids)} == {Kind.TOOL_CALL}
    assert token_ids[-1] == drawn_renderer.end and token_ids.count(drawn_renderer.call) == len(calls) - 1
    assert {*token_ids[:-1]} & specials(drawn_renderer) <= {drawn_renderer.to, drawn_renderer.call}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (("read_file", {"target_file": "a.py"}), "read_file a.py"),
        (("read_file", {"offset": 3, "target_file": "a.py"}), 'read_file a.py<|to|>{"offset": 3}'),
        (("write", {"file_path": "a.py", "contents": "x = 1\n"}), "write a.py<|to|>x = 1\n"),
        (("run_terminal_cmd", {"command": "ls", "is_background": False}), "run_terminal_cmd false<|to|>ls"),
        (("read_lints", {}), "read_lints"),
        (("codebase_search", {"query": "why?", "target_directories": []}), "codebase_search<|to|>why?<|to|>[]"),
    ],
)
def test_how_calls_look(cursor: CompactRenderer, call: tuple[str, dict[str, Any]], text: str) -> None:
    token_ids = cursor.turn(turn_of(ToolCall(name=call[0], arguments=call[1])))
    assert cursor.tokenizer.decode(token_ids, skip_special_tokens=False) == f"{text}<|end|>"


@pytest.mark.parametrize(
    "text",
    [
        *("read_file", "read_file a b", "read_file a<|to|>3", "read a.py", "ls", "search_replace a<|to|>x"),
        *("read_file a<|to|>{}<|to|>{}", 'read_file a<|to|>{"target_file": "b"}', "write a<|to|>b<|to|>["),
        *("run_terminal_cmd maybe<|to|>ls", "done ", "done now", "done<|to|>a<|to|>b", "", "<|to|>", "read_file\ta"),
    ],
)
def test_what_is_no_call(cursor: CompactRenderer, text: str) -> None:
    message = cursor.parse(cursor.spell(text))
    [written] = message.calls
    assert isinstance(written.call, ToolError) and written.call.kind == "InvalidArguments"
    assert written.text == f"{text}<|end|>" and message.text == ""


def test_what_a_turn_can_not_say(cursor: CompactRenderer) -> None:
    for message in (
        turn_of(call("read_file", target_file="a"), text="I look."),
        *(turn_of(call("rm")), turn_of(call("read_file")), turn_of(call("read_file", target_file=3))),
        turn_of(call("read_lints", paths={1, 2})),
        turn_of(call("write", file_path="a", contents="\ud800")),
    ):
        with pytest.raises(ValueError):
            cursor.turn(message)


def tool(name: str, *required: str, **kinds: str) -> dict[str, Any]:
    parameters = {"properties": {name: {"type": kind} for name, kind in kinds.items()}, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "tools",
    [
        *([tool("a b")], [tool("")], [tool("a"), tool("a")], [tool("done")], [tool("done"), tool("finish")]),
        [tool("read"), tool("read_file", "path", path="string")],
        [{"type": "function", "function": {"name": "a", "parameters": {"required": 3}}}],
        [{"type": "function", "function": {"name": "a", "parameters": {"properties": [1]}}}],
    ],
)
def test_tools_that_can_not_be_told_apart_are_refused(renderer: CompactRenderer, tools: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="tools: "):
        CompactRenderer(renderer.tokenizer, tools)
