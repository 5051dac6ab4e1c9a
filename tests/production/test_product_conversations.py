"""A policy behind a server whose clients send whole conversations: what it reads, what it goes on with, what it forgets."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production.conversations import Conversations
from composer_nb.production.wire import RequestBody
from tests.production.conftest import TOOL, Turns


def test_results_are_of_the_calls_whose_ids_they_have(tokenizer: Tokenizer) -> None:
    renderer = QwenRenderer(tokenizer, [TOOL])
    calls = tuple(Written(id=f"call_{n}", call=ToolCall(name="look", arguments={"at": f"f{n}"})) for n in range(2))
    turn, final = renderer.turn(Said(text="", calls=calls)), renderer.turn(Said(text="Done."))
    policy = Turns(turn, final, final)
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
        text = tokenizer.decode(list(policy.requests[1].token_ids), skip_special_tokens=False)
        assert 0 < text.index("of 0") < text.index("of 1")
