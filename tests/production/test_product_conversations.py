"""A policy behind a server whose clients send whole conversations: what it reads, what it goes on with, what it forgets."""

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Said, Written
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production import conversations
from composer_nb.production.conversations import Conversations
from composer_nb.production.record import RolloutRecord, Verdict, served
from composer_nb.production.wire import PromptTooLong, Refused, RequestBody
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


def test_a_full_disk_loses_no_conversation_and_no_room(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be stored when there are too many conversations, or at the end, stays known; all others are stored."""
    monkeypatch.setattr(conversations, "KEPT", 1)
    record, names = RolloutRecord(tmp_path, tokenizer), "abcd"
    keep, refused = record.keep, set(names)

    def keep_with_room(name: str, rows: Any) -> None:
        if name in refused:
            raise OSError(errno.ENOSPC, "no room", name)
        keep(name, rows)

    monkeypatch.setattr(record, "keep", keep_with_room)
    final = QwenRenderer(tokenizer, []).turn(Said(text="Done."))
    with Shared(Turns(*[final] * len(names))) as shared:
        talk = Conversations(shared, tokenizer, QwenRenderer, 3000, record)
        for name in names:
            talk(RequestBody(messages=[{"role": "user", "content": "fix f"}], rollout=name))
        assert "no room" in caplog.text and not served(tmp_path)
        refused -= {*"acd"}
        with pytest.raises(OSError, match="no room"):
            talk.close()
        assert sorted(served(tmp_path)) == [*"acd"]
        refused.clear()
        talk.close()
    assert sorted(served(tmp_path)) == [*names]


def test_verdicts_that_come_at_once_all_count(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RolloutRecord(tmp_path, tokenizer)
    keep = record.keep

    def keep_slowly(name: str, rows: Any) -> None:
        time.sleep(0.2)
        keep(name, rows)

    monkeypatch.setattr(record, "keep", keep_slowly)
    with Shared(Turns(QwenRenderer(tokenizer, []).turn(Said(text="Done.")))) as shared, ThreadPoolExecutor(4) as users:
        talk = Conversations(shared, tokenizer, QwenRenderer, 3000, record)
        talk(RequestBody(messages=[{"role": "user", "content": "fix f"}], rollout="a"))
        assert [*users.map(lambda reward: talk.grade("a", Verdict(reward=reward)), [0.5, 0.5, 0.5, 0.5])] == [1] * 4
    assert served(tmp_path)["a"].grade.rewards == {"reward": 0.5}


def test_a_request_of_many_messages_is_looked_up_once_and_not_in_every_conversation(tokenizer: Tokenizer) -> None:
    """Others wait while it is looked up: half a million messages fit into a body."""
    lookups = 0

    class Counting(dict[bytes, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal lookups
            lookups += 1
            return super().__contains__(key)

    user: dict[str, Any] = {"role": "user", "content": "fix f"}
    with Shared(Turns(QwenRenderer(tokenizer, []).turn(Said(text="Done.")))) as shared:
        talk = Conversations(shared, tokenizer, QwenRenderer, 3000)
        talk(RequestBody(messages=[user]))
        [conversation] = talk._talks
        conversation.marks = Counting(conversation.marks)
        with pytest.raises(PromptTooLong):
            talk(RequestBody(messages=[user, {"role": "assistant", "content": "x"}] * 500 + [user]))
    assert lookups < 10


def test_a_name_stays_one_users_when_the_server_is_started_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turn = QwenRenderer(tokenizer, []).turn(Said(text="Done."))
    for start in range(3):
        with Shared(Turns(turn)) as shared:
            talk = Conversations(shared, tokenizer, QwenRenderer, 3000, RolloutRecord(tmp_path, tokenizer))
            for user in ("bob", "ann") if start else ("ann", "bob"):
                request = RequestBody(messages=[{"role": "user", "content": "fix f"}], rollout="mine", user=user)
                if user == "ann":
                    talk(request)
                    continue
                with pytest.raises(Refused, match="mine is another user's") as refusal:
                    talk(request)
                assert refusal.value.status == 409
            assert talk.grade("mine", Verdict(reward=1.0)) == start + 1
