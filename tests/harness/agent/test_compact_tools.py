"""The compact format of any tools: what it writes it reads, and nothing else is taken for a call."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.scripts import turn
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.harness.tools.toolset import ToolSet

CURSOR = ToolSet.cursor(described=False).schemas
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text("abc<|>", max_size=3), inside, max_size=3),
    max_leaves=5,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PATH = st.from_regex(r"\A\S{1,20}\Z").filter(lambda text: not any("\ud800" <= letter <= "\udfff" for letter in text))


@pytest.fixture(scope="module")
def cursor(renderer: CompactRenderer) -> CompactRenderer:
    return CompactRenderer(renderer.tokenizer, CURSOR)


@st.composite
def calls(draw: st.DrawFn) -> ToolCall:
    """A call whose paths have no white space and whose numbers are small."""
    function = draw(st.sampled_from(CURSOR))["function"]
    parameters = function["parameters"]
    needed = parameters.get("required", [])
    arguments: dict[str, Any] = {}
    for name, schema in parameters["properties"].items():
        if name not in needed and draw(st.booleans()):
            continue
        kind = schema.get("type")
        short = name.endswith(("path", "file", "directory"))
        values = {"string": PATH if short else TEXT, "integer": st.integers(0, 999_999), "boolean": st.booleans()}
        arguments[name] = draw(values.get(kind, JSON))
    return ToolCall(name=function["name"], arguments=arguments)


@given(call=calls())
def test_what_is_written_is_read(cursor: CompactRenderer, call: ToolCall) -> None:
    written = cursor.turn(turn([call]))
    [read] = cursor.parse(written).calls
    assert isinstance(read.call, ToolCall) and read.call.json == call.json
    assert cursor.stop & set(written) == {cursor.end}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_ends_the_rollout_where_no_tool_does(cursor: CompactRenderer, text: str) -> None:
    assert cursor.parse(cursor.turn(Said(text=text))) == Said(text=text)


@given(pieces=st.lists(st.sampled_from(["read_file", " a.py", "done", "grep", "{}", "x", " 3", -1, -2]), max_size=8))
def test_whatever_is_written_is_one_call_or_a_text(cursor: CompactRenderer, pieces: list[str | int]) -> None:
    marks = {-1: cursor.to, -2: cursor.call}
    ids = [i for piece in pieces for i in ([marks[piece]] if isinstance(piece, int) else cursor.encode(piece))]
    said = cursor.parse([*ids, cursor.end])
    [call] = [written.call for written in said.calls] or [None]
    assert call is None or isinstance(call, ToolCall) or call.kind == "InvalidArguments"
    if isinstance(call, ToolCall):
        assert cursor.parse(cursor.render_call(call)).calls[0].call == call


BAD = {
    "two calls": turn([ToolCall(name="read_lints", arguments={})] * 2),
    "a text beside a call": turn([ToolCall(name="read_lints", arguments={})], "I look."),
    "white space in a path": turn([ToolCall(name="read_file", arguments={"target_file": "a b.py"})]),
    "a tool that is not there": turn([ToolCall(name="edit_line", arguments={"path": "a", "line": 1, "text": ""})]),
    "a missing argument": turn([ToolCall(name="write", arguments={"file_path": "a"})]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_expressed_is_refused(cursor: CompactRenderer, name: str) -> None:
    with pytest.raises(ValueError):
        cursor.turn(BAD[name])


def test_a_text_does_not_end_a_rollout_that_a_tool_ends(renderer: CompactRenderer) -> None:
    with pytest.raises(ValueError, match="cannot express"):
        renderer.turn(Said(text="I am done."))
    [written] = renderer.parse([*renderer.encode("done"), renderer.to, *renderer.encode("x"), renderer.end]).calls
    assert isinstance(written.call, ToolError)
