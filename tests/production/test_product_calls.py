"""Calls while they are written: what is shown of them only grows, in every format, and a stream adds up to the whole answer."""

import json
from collections.abc import Sequence
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Said, User, Written
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.conversations import Conversations
from composer_nb.production.wire import RequestBody, arguments_of
from tests.production.conftest import ASKED, Turns, byte_tokenizer, playing

PROPERTIES = {name: {"type": kind} for name, kind in (("path", "string"), ("text", "string"), ("line", "integer"))}
PROPERTIES |= {"all": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["path", "text"]}
TOOL = {"type": "function", "function": {"name": "put", "parameters": SCHEMA}}


KINDS: tuple[type[ChatRenderer], ...] = (QwenRenderer, KimiRenderer, CompactRenderer)
FORMATS = {kind.__name__: kind(byte_tokenizer(kind.tokens), [TOOL]) for kind in KINDS}
PUT = "<tool_call>\n<function=put>\n<parameter=path>\nf.py\n</parameter>\n<parameter=text>\n"
PUT_END = "\n</parameter>\n</function>\n</tool_call>"
SECTION = "<|tool_calls_section_begin|><|tool_call_begin|>functions.put:0<|tool_call_argument_begin|>"
SECTION_END = "<|tool_call_end|><|tool_calls_section_end|>"
KIMI_NEXT = '<|tool_call_end|><|tool_call_begin|>functions.put:1<|tool_call_argument_begin|>{"path": "g"}'
WRITTEN = [
    ("QwenRenderer", f"I put.\n\n{PUT}größer \U0001f600\n\n{PUT_END}\n{PUT}2{PUT_END}"),
    ("QwenRenderer", f"{PUT}a</parameter>b</parameter>\n<c{PUT_END} and text after it"),
    ("QwenRenderer", f"{PUT}x\n</parameter>\n<parameter=line>\nmany\n</parameter>\n</function>\n</tool_call>"),
    ("QwenRenderer", f"{PUT}x\n</parameter>\n<parameter=path>\nagain{PUT_END}"),
    ("QwenRenderer", f"I try.\n<tool_call>\nput(1){PUT_END}{PUT}x{PUT_END}"),
    ("QwenRenderer", f"I write <function= and {PUT}x{PUT_END}"),
    ("KimiRenderer", f'I put.{SECTION}{{"path": "f.py",  "text": "gr\\u00f6ßer }}"}}\n{KIMI_NEXT}{SECTION_END}'),
    ("KimiRenderer", f'{SECTION}{{"path": {{"a": 1}}}}{SECTION_END}'),
    ("KimiRenderer", f'{SECTION}{{"path": "f", "path": "g"}}{SECTION_END}'),
    ("KimiRenderer", f"{SECTION}nothing{SECTION_END}"),
    ("KimiRenderer", f'{SECTION.replace("functions.put:0", "put the")}{{"path": "f"}}{SECTION_END}'),
    ("CompactRenderer", 'put f.py<|to|>two\nlines<|to|>{"all": true, "line": 3}'),
    ("CompactRenderer", "put f.py<|to|>x<|call|>put g.py<|to|>y"),
    ("CompactRenderer", "put f.py<|to|>x<|call|>babble<|call|>put g.py<|to|>y"),
    ("CompactRenderer", "done<|to|>All is well."),
    ("CompactRenderer", "babble"),
]


def check(renderer: ChatRenderer, ids: Sequence[int]) -> None:
    """Assert that what is shown only grows with each token, and that JSON is complete where the parser has a call."""
    before: list[tuple[str, str, str]] = []
    for end in range(1, len(ids) + 1):
        current = renderer.calls_so_far(ids[:end])
        for old, new in zip(before, current, strict=False):
            assert new[:2] == old[:2] and new[2].startswith(old[2])
        assert len(current) >= len(before) and all(arguments for _, _, arguments in current)
        ended = isinstance(renderer, CompactRenderer) and ids[-1] == renderer.end
        complete = list(ids[:end]).count(renderer.call) if isinstance(renderer, CompactRenderer) and ended else 0
        parsed_calls = (*renderer.parse(ids).calls[:complete], *renderer.parse(ids[:end]).calls[complete:])
        for (id, name, arguments), parsed_call in zip(current, parsed_calls, strict=False):
            if isinstance(call := parsed_call.call, ToolCall):
                assert (id, name, json.loads(arguments)) == (parsed_call.id, call.name, call.arguments)
            else:
                assert arguments_of(arguments) is not None and not is_complete(arguments)
        before = current


def is_complete(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(("name", "text"), WRITTEN)
def test_what_is_shown_of_calls_only_grows(name: str, text: str) -> None:
    renderer = FORMATS[name]
    check(renderer, renderer.spell(text))
    prefix = renderer.spell(text)[:-4]
    check(renderer, [*prefix, renderer.end])


PARTS = st.sampled_from(
    ["</parameter>", "\n", "<parameter=text>", "<parameter=line>", "</function>", "<", "é", "x", '"', "\\", "{", "}", " ",
     "<tool_call>", "</tool_call>", "<function=put>", "<|to|>", "<|call|>", '{"path":', "put f", SECTION, SECTION_END, "12"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(PARTS, max_size=12))
def test_whatever_a_model_writes(name: str, parts: list[str]) -> None:
    begin = {"QwenRenderer": PUT, "KimiRenderer": SECTION + '{"path": "', "CompactRenderer": "put f.py<|to|>"}[name]
    check(FORMATS[name], FORMATS[name].spell(begin + "".join(parts)))


def test_the_arguments_of_a_call_come_before_it_ends() -> None:
    call = ToolCall(name="put", arguments={"path": "f.py", "text": "x" * 50})
    for renderer in FORMATS.values():
        id = "functions.put:0" if isinstance(renderer, KimiRenderer) else "call_0"
        ids = renderer.turn(Said(calls=(Written(id=id, call=call),)))
        sizes = [sum(len(partial[2]) for partial in renderer.calls_so_far(ids[:end])) for end in range(len(ids))]
        grown = [after - before for before, after in zip(sizes, sizes[1:], strict=False) if after > before]
        assert len(grown) >= 50 and max(grown) < 40, "letter by letter, whatever stands between two values"


# -- Over HTTP -----------------------------------------------------------------------------------------------


def merged(parts: Sequence[Any]) -> tuple[str, list[tuple[str, str, str]], str]:
    """Return the text, the calls and the finish reason that the parts of a stream add up to."""
    calls: dict[int, list[str]] = {}
    for call in (call for part in parts for call in part.delta.tool_calls or ()):
        calls.setdefault(call.index, [call.id, call.function.name, ""])[2] += call.function.arguments
    text = "".join(part.delta.content or "" for part in parts)
    return text, [(id, name, args) for id, name, args in (calls[n] for n in sorted(calls))], parts[-1].finish_reason


@pytest.mark.parametrize("cut", [0, 25])
@pytest.mark.parametrize(("name", "text"), WRITTEN[::3])
def test_a_stream_adds_up_to_the_whole_answer_for_both_clients(name: str, text: str, cut: int) -> None:
    renderer = FORMATS[name]
    turn = renderer.spell(text)[: -cut or None]
    if len(turn) < 5:
        turn = renderer.spell(text)
    options: dict[str, Any] = {"model": "model", "messages": ASKED, "max_tokens": len(turn)}
    tools: Any = [{"name": "put", "input_schema": SCHEMA}]
    with (
        playing(type(renderer), renderer.tokenizer, *[turn] * 4) as (site, policy),
        anthropic.Anthropic(base_url=site.url[:-3], api_key="none", max_retries=0) as anthropic_client,
    ):
        policy.pause_s = 0.001
        full_choice = site.chat(**options, tools=[TOOL]).choices[0]
        parts = [chunk.choices[0] for chunk in site.chat(**options, tools=[TOOL], stream=True)]
        message = anthropic_client.messages.create(**options, tools=tools)
        with anthropic_client.messages.stream(**options, tools=tools) as stream:
            streamed = stream.get_final_message()
    calls = [(call.id, call.function.name, call.function.arguments) for call in full_choice.message.tool_calls or ()]
    assert merged(parts) == (full_choice.message.content, calls, full_choice.finish_reason)
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    assert [block.model_dump(exclude_none=True) for block in streamed.content] == blocks
    assert streamed.stop_reason == message.stop_reason
    uses = [(block["id"], block["name"]) for block in blocks if block["type"] == "tool_use"]
    assert uses == [call[:2] for call in calls]
    assert "".join(block.get("text", "") for block in blocks) == full_choice.message.content
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    assert message.stop_reason == reasons[full_choice.finish_reason]


@pytest.mark.parametrize("stop", ["f1", "\n<tool_call>", "put>", "</parameter>\n"])
def test_a_stop_text_ends_a_stream_as_it_ends_the_whole_answer(stop: str) -> None:
    renderer = FORMATS["QwenRenderer"]
    turn = renderer.spell(f"I put.{PUT}f0{PUT_END}\n{PUT}f1{PUT_END}")
    with playing(QwenRenderer, renderer.tokenizer, turn, turn) as (site, policy):
        policy.pause_s = 0.001
        full_choice = site.chat(tools=[TOOL], stop=stop).choices[0]
        parts = [chunk.choices[0] for chunk in site.chat(tools=[TOOL], stop=stop, stream=True)]
    calls = [(call.id, call.function.name, call.function.arguments) for call in full_choice.message.tool_calls or ()]
    assert merged(parts) == (full_choice.message.content, calls, full_choice.finish_reason)
    partial = '{"path": "f.py", "text": "'
    ends: dict[str, list[str]] = {"f1": [partial + 'f0"}', partial], "\n<tool_call>": [partial + 'f0"}'], "put>": []}
    assert [arguments for _, _, arguments in calls] == ends.get(stop, ['{"path": "f.py'])


def test_a_conversation_goes_on_after_a_call_that_was_cut_off() -> None:
    """In the cache, with the tokens as they were sampled, and the result after them as in training (`TokenTurnPolicy`); and read
    anew by a server that has never seen it."""
    renderer = FORMATS["QwenRenderer"]
    partial_turn, final_turn = renderer.spell(f"I put.\n\n{PUT}half of a te")[:-1], renderer.turn(Said(text="Done."))
    with Shared(Turns(partial_turn, final_turn, final_turn)) as shared:
        policy = shared.policy
        assert isinstance(policy, Turns)
        body = RequestBody(messages=ASKED, tools=[TOOL], max_tokens=len(partial_turn))
        conversations = Conversations(shared, renderer.tokenizer, QwenRenderer, 3000)
        first = conversations(body).choices[0]
        assert first.cut and json.loads(first.message["tool_calls"][0]["function"]["arguments"] + '"}')
        more = [*ASKED, first.message, {"role": "tool", "tool_call_id": "call_0", "content": "not JSON"}]
        for talk in (conversations, Conversations(shared, renderer.tokenizer, QwenRenderer, 3000)):
            talk(RequestBody(messages=more, tools=[TOOL]))
    prompt, continuation, anew = ([*request.token_ids] for request in policy.requests)
    assert prompt == renderer.render([User(text="fix f")])
    assert continuation == renderer.read([CallResult(id="call_0", text="not JSON")])
    text = renderer.tokenizer.decode(anew, skip_special_tokens=False)
    assert "f.py\n</parameter>\n</function>" in text and "not JSON" in text and anew[: len(prompt)] == prompt
