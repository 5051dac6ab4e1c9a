"""A policy behind a server whose clients send whole conversations: what it reads, what it goes on with, what it forgets."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Said, User, Written
from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.conversations import Conversations
from composer_nb.production.serve import ChatServer
from composer_nb.production.wire import RequestBody
from tests.production.conftest import TOOL, Turns


def test_a_conversation_goes_on_in_the_cache_and_another_makes_room(tokenizer: Tokenizer) -> None:
    renderer = QwenRenderer(tokenizer, [TOOL])
    call = Said(text="I look.", calls=(Written(id="call_0", call=ToolCall(name="look", arguments={"at": "f"})),))
    done, broken = renderer.turn(Said(text="Done.")), [*renderer.encode("<tool_call>{"), renderer.end]
    policy = Turns(renderer.turn(call), done, done, broken, done, done)
    start: list[dict[str, Any]] = [{"role": "system", "content": "You fix."}, {"role": "user", "content": "fix f"}]
    with Shared(policy) as shared, ChatServer(Conversations(shared, tokenizer, QwenRenderer, 3000)) as server:
        endpoint = Endpoint(url=server.url, model=next(iter(Endpoint(url=server.url).models())), retries=0)
        first = endpoint.complete(start, [TOOL], 400)
        assert policy.asked[0].token_ids == renderer.render([User(text="fix f")], "You fix.")
        [made] = first.message["tool_calls"]
        assert made["function"] == {"name": "look", "arguments": '{"at": "f"}'}
        assert first.message["content"] == "I look."
        assert (first.read, first.written) == (len(policy.asked[0].token_ids), len(renderer.turn(call)))
        talk = [*start, first.message, {"role": "tool", "tool_call_id": made["id"], "content": "1|x"}]
        second = endpoint.complete(talk, [TOOL], 400)
        assert second.message["content"] == "Done." and policy.asked[1].rollout == policy.asked[0].rollout
        text = renderer.tokenizer.decode(list(policy.asked[1].token_ids), skip_special_tokens=False)
        assert "1|x" in text and "fix f" not in text
        assert second.read == first.read + first.written + len(policy.asked[1].token_ids)
        more = [*talk, second.message, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
        endpoint.complete(more, [TOOL], 400)
        assert policy.asked[2].rollout == policy.asked[0].rollout
        assert policy.asked[2].token_ids == renderer.render([User(text="and?")], after=True)
        # A call that can not be read is a text; another conversation with other tools is another rollout.
        assert endpoint.complete(start, [], 400).message == {"role": "assistant", "content": "<tool_call>{"}
        assert policy.asked[3].rollout != policy.asked[0].rollout and not policy.released
        # What was changed is read from its beginning, and the one that has waited longest goes.
        endpoint.complete([*talk[:-1], {**talk[-1], "content": "2|y"}], [TOOL], 400)
        assert policy.released == [policy.asked[0].rollout]
        assert len(policy.asked[4].token_ids) > len(policy.asked[0].token_ids)


def test_results_are_of_the_calls_whose_ids_they_have(tokenizer: Tokenizer) -> None:
    renderer = QwenRenderer(tokenizer, [TOOL])
    calls = tuple(Written(id=f"call_{n}", call=ToolCall(name="look", arguments={"at": f"f{n}"})) for n in range(2))
    turn, done = renderer.turn(Said(text="", calls=calls)), renderer.turn(Said(text="Done."))
    policy = Turns(turn, done, done)
    start: list[dict[str, Any]] = [{"role": "user", "content": "fix f"}]
    with Shared(policy) as shared:
        talk = Conversations(shared, tokenizer, QwenRenderer, 3000)
        first = talk(RequestBody(messages=start, tools=[TOOL])).choices[0].message
        a, b = ({"role": "tool", "tool_call_id": f"call_{n}", "content": f"of {n}"} for n in range(2))
        for wrong, why in (
            ([a], "no result of 'call_1'"),
            ([a, a], "no call of that id waits"),
            ([a, {**b, "tool_call_id": "x"}], "a result of 'x'"),
            ([{"role": "user", "content": "and?"}], "no result of 'call_0', 'call_1'"),
        ):
            with pytest.raises(ValueError, match=why):
                talk(RequestBody(messages=[*start, first, *wrong], tools=[TOOL]))
        talk(RequestBody(messages=[*start, first, b, a], tools=[TOOL]))  # read anew, since the refusals forgot it
        text = tokenizer.decode(list(policy.asked[1].token_ids), skip_special_tokens=False)
        assert 0 < text.index("of 0") < text.index("of 1")
