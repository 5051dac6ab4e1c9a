"""The wire format: calls survive the way there and back, everything else is an error, and no text becomes a special token."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from composer_nb.harness.agent.compact import SPECIALS, CompactRenderer
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.harness.tools.toolset import ToolSet

FRAGMENTS = ["<", "|", ">", "<|", "|>", "<<||", "end", "call", "pad", "to", " ", "\n", *SPECIALS, "< |end|>", "é", "😀"]
TEXT = st.text(max_size=20) | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
PATH = TEXT.filter(lambda text: bool(re.fullmatch(r"\S+", text)))
CALLS = (
    st.builds(lambda path: ToolCall(name="read_file", arguments={"path": path}), PATH)
    | st.builds(
        lambda path, line, text: ToolCall(name="edit_line", arguments={"path": path, "line": line, "text": text}),
        PATH,
        st.integers(0, 999_999),
        TEXT | TEXT.map(lambda text: "    " + text),
    )
    | st.sampled_from([ToolCall(name="run_tests", arguments={}), ToolCall(name="finish", arguments={})])
)
QUICK = settings(max_examples=150)


def specials(renderer: CompactRenderer) -> set[int]:
    return {renderer.tokenizer.token_to_id(token) for token in SPECIALS}


@QUICK
@given(call=CALLS)
def test_a_call_survives_the_way_there_and_back(renderer: CompactRenderer, call: ToolCall) -> None:
    token_ids = renderer.render_call(call)
    assert token_ids[-1] == renderer.end
    assert set(token_ids[:-1]) & specials(renderer) <= {renderer.to}
    assert renderer.parse_call(token_ids) == call
    ToolSet.tiny().find(call)


@QUICK
@given(text=TEXT)
def test_text_never_becomes_a_special_token(renderer: CompactRenderer, text: str) -> None:
    token_ids = renderer.encode(text)
    assert not set(token_ids) & specials(renderer)
    assert renderer.tokenizer.decode(token_ids, skip_special_tokens=False) == text


@QUICK
@given(text=TEXT)
def test_instruction_observation_and_edit_hold_specials_only_where_the_format_has_them(
    renderer: CompactRenderer, text: str
) -> None:
    r = renderer
    prompt, observation = r.prompt(text), r.observation(text)
    assert [token for token in prompt if token in specials(r)] == [r.bos, r.user, r.end, r.call]
    assert [prompt[0], prompt[1], *prompt[-2:]] == [r.bos, r.user, r.end, r.call]
    assert [token for token in observation if token in specials(r)] == [r.out, r.end, r.call]
    assert [observation[0], *observation[-2:]] == [r.out, r.end, r.call]
    edit = r.render_call(ToolCall(name="edit_line", arguments={"path": "f.py", "line": 1, "text": text}))
    assert [token for token in edit if token in specials(r)] == [r.to, r.end]
    assert r.parse_call(edit).arguments["text"] == text


@QUICK
@given(text=TEXT.filter(lambda text: not any(token in text for token in SPECIALS)))
def test_ordinary_text_has_the_tokens_that_the_tokenizer_gives_it(renderer: CompactRenderer, text: str) -> None:
    assert renderer.encode(text) == renderer.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_renderer_leaves_the_tokenizer_as_it_was(renderer: CompactRenderer) -> None:
    assert renderer.tokenizer.encode("<|end|>").ids == [renderer.end]
    assert renderer.encode("<|end|>") != [renderer.end]


WORDS = ["read", "edit", "test", "done", " f.py", " 3", " ", "\n", " 07", " ٣", " -1", " 1234567"]


@settings(max_examples=400)
@given(data=st.data())
def test_token_soup_is_a_call_or_an_invalid_one(renderer: CompactRenderer, data: st.DataObject) -> None:
    r = renderer
    piece = (
        st.integers(0, r.tokenizer.get_vocab_size() - 1).map(lambda token: [token])
        | st.sampled_from(WORDS).map(r.encode)
        | st.sampled_from([[r.to], [r.end]])
    )
    soup = [token for part in data.draw(st.lists(piece, max_size=10)) for token in part]
    soup += data.draw(st.sampled_from([[], [r.end]]))
    try:
        call = r.parse_call(soup)
    except ToolError as error:
        assert error.kind == "InvalidArguments"
        return
    assert soup[-1] == r.end and not set(soup[:-1]) & r.stop
    ToolSet.tiny().find(call)
    assert json.loads(call.json) == {"name": call.name, "arguments": call.arguments}


@pytest.mark.parametrize(
    "text",
    [
        *("", "read", "read ", "read f.py ", " read f.py", "read  f.py", "read f.py g.py", "read f.py\n", "reads f.py"),
        *("test ", "test f.py", "done.", "finish", "run_tests", "Test", "done\n", "edit f.py 3", "edit f.py 3 x = 1"),
    ],
)
def test_a_body_that_is_almost_a_call_is_invalid(renderer: CompactRenderer, text: str) -> None:
    with pytest.raises(ToolError) as caught:
        renderer.parse_call([*renderer.encode(text), renderer.end])
    assert caught.value.kind == "InvalidArguments"


@pytest.mark.parametrize(
    "head", ["edit f.py", "edit f.py -1", "edit f.py ٣", "edit f.py 1234567", "edit 3", "read f.py", ""]
)
def test_a_head_that_is_almost_an_edit_is_invalid(renderer: CompactRenderer, head: str) -> None:
    with pytest.raises(ToolError) as caught:
        renderer.parse_call([*renderer.encode(head), renderer.to, *renderer.encode("x"), renderer.end])
    assert caught.value.kind == "InvalidArguments"


def test_an_edit_names_its_text_once(renderer: CompactRenderer) -> None:
    body = [*renderer.encode("edit f.py 1"), renderer.to, *renderer.encode("x"), renderer.to, *renderer.encode("y")]
    with pytest.raises(ToolError):
        renderer.parse_call([*body, renderer.end])


def test_a_turn_ends_where_the_agent_has_no_business_to_go_on(renderer: CompactRenderer) -> None:
    assert renderer.stop == specials(renderer) - {renderer.to}
    for token in renderer.stop - {renderer.end}:
        with pytest.raises(ToolError):
            renderer.parse_call([*renderer.encode("test"), token])
    with pytest.raises(ToolError):
        renderer.parse_call(renderer.encode("test"))


def test_a_tokenizer_without_the_formats_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the tokenizer lacks the token <\|pad\|>"):
        CompactRenderer(Tokenizer(models.BPE()))


def test_a_tokenizer_that_finds_the_formats_tokens_in_any_text_is_refused(renderer: CompactRenderer) -> None:
    loose = Tokenizer.from_str(renderer.tokenizer.to_str().replace('"special":true', '"special":false'))
    with pytest.raises(ValueError, match=r"<\|pad\|>.* must be special"):
        CompactRenderer(loose)
