"""A policy that continues tokens, behind a server whose clients send the whole conversation with every request.

A request that goes on where an answer of ours ended is continued: only what is new is read, and every token stays as it was
sampled. Any other is read from its beginning. Of conversations that nobody asks about, the one that has waited longest makes
room, and one whose client went away is forgotten. A message in which a call can not be read is answered as the text that it is,
without calls; where the client sends that text back, it is read as the tokens that it spells.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.chat import ChatRenderer, Message, Result, Said, User
from composer_nb.harness.policy import Completion, ProviderFailure, Request
from composer_nb.harness.product.serve import Answered, messages_of, wire_of
from composer_nb.harness.product.shared import Shared
from composer_nb.harness.tool_call import ToolError

Wire = Sequence[Mapping[str, Any]]
SYSTEM = ("system", "developer")
"""Roles of what is told before everything."""


@dataclass(slots=True, kw_only=True)
class _Talk:
    """A conversation that the policy holds."""

    rollout: int
    renderer: ChatRenderer
    head: str
    """Its system texts and tools."""
    wire: list[str] = field(default_factory=list)
    """Its messages until and with our last answer."""
    tokens: int = 0
    open: bool = False
    """The last turn was cut off: its end is still to be read."""
    busy: bool = True


class Conversations:
    """Answers requests (`serve.Answerer`), from as many threads as ask."""

    def __init__(self, policy: Shared, tokenizer: Tokenizer, form: type[ChatRenderer], tokens: int) -> None:
        """`tokens`: of one conversation, at most."""
        self.policy, self.tokenizer, self.form, self.tokens = policy, tokenizer, form, tokens
        self._talks: list[_Talk] = []
        self._lock = threading.Lock()
        self._numbers = count()

    def __call__(self, body: Mapping[str, Any], there: Callable[[], bool] = lambda: True) -> Answered:
        wire, tools = body["messages"], body.get("tools") or []
        if not all(isinstance(each, dict) for each in wire):
            raise ValueError("messages: each is an object")
        system = "\n\n".join(_text(each) for each in wire if each.get("role") in SYSTEM)
        spoken = [_plain(each) for each in wire if each.get("role") not in SYSTEM]
        talk, known = self._continued(
            json.dumps([system, tools]), [json.dumps(each, sort_keys=True) for each in spoken]
        )
        try:
            read = self._read(talk, system, spoken, known)
            asked = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
            most = asked[0] if asked else self.tokens
            room = min(most if isinstance(most, int) else 0, self.tokens - talk.tokens - len(read))
            if room < 1:
                raise ValueError(
                    f"{talk.tokens + len(read)} tokens and max_tokens={most}: a conversation has {self.tokens}"
                )
            asked_for = Request(rollout=talk.rollout, token_ids=read, max_tokens=room)
            done = self.policy.ask(asked_for, wanted=there)
            message = _message(talk.renderer, done)
            before, talk.tokens = talk.tokens + len(read), talk.tokens + len(read) + len(done.token_ids)
        except BaseException:
            self._forget(talk)
            raise
        talk.wire = [json.dumps(each, sort_keys=True) for each in (*spoken, _plain(message))]
        talk.open = done.token_ids[-1:] != [talk.renderer.ids[talk.renderer.end]]
        talk.busy = False
        cut = not done.token_ids or done.token_ids[-1] not in talk.renderer.stop
        return Answered(message=message, read=before, written=len(done.token_ids), cut=cut)

    def _continued(self, head: str, wire: Sequence[str]) -> tuple[_Talk, int]:
        """A conversation to go on with, and how many of its messages the policy holds; 0 for a new one."""
        with self._lock:
            for talk in self._talks:
                if (
                    not talk.busy
                    and talk.head == head
                    and len(wire) > len(talk.wire)
                    and talk.wire == wire[: len(talk.wire)]
                ):
                    self._talks.remove(talk)
                    self._talks.append(talk)
                    talk.busy = True
                    return talk, len(talk.wire)
            if len(self._talks) == self.policy.policy.capacity:
                idle = next((talk for talk in self._talks if not talk.busy), None)
                if idle is None:
                    busy = len(self._talks)
                    raise ProviderFailure(f"{busy} conversations are under way; ask again, or serve more with --slots")
                self._talks.remove(idle)
                self.policy.release(idle.rollout)
            try:
                renderer = self.form(self.tokenizer, json.loads(head)[1])
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"tools: not in OpenAI's form: {error!r}") from None
            talk = _Talk(rollout=next(self._numbers), renderer=renderer, head=head)
            self._talks.append(talk)
            return talk, 0

    def _read(self, talk: _Talk, system: str, spoken: Wire, known: int) -> list[int]:
        """Tokens that are new. Raises ValueError for messages that are none, or that end with a turn."""
        before = json.loads(talk.wire[-1]).get("tool_calls", ()) if known else ()
        news = _in_order(messages_of(spoken[known:]), [call["id"] for call in before])
        if not news or not isinstance(news[-1], User | Result):
            raise ValueError("messages: the last one is a user's or a tool's")
        if not known:
            return talk.renderer.render(news, system, spelled=True)
        end = [talk.renderer.ids[talk.renderer.end]] if talk.open else []
        results = [each for each in news if isinstance(each, Result)]
        if len(results) == len(news):
            return end + talk.renderer.results(results)
        if results or len(news) > 1:
            raise ValueError("messages: after a turn come the results of its calls, or one message of a user")
        return end + talk.renderer.following(news[0].text)

    def _forget(self, talk: _Talk) -> None:
        with self._lock:
            self._talks.remove(talk)
            self.policy.release(talk.rollout)


def _in_order(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """Results in the order of the calls that they are of; `ids` are those that wait for one at the beginning. Raises ValueError
    for a call without a result, and a result without a call."""
    found: list[Message] = []
    waiting: dict[str, Result | None] = dict.fromkeys(ids)
    for each in messages:
        if isinstance(each, Result):
            if waiting.get(each.id, each) is not None:
                raise ValueError(f"messages: a result of {each.id!r}, and no call of that id waits for one")
            waiting[each.id] = each
            if all(waiting.values()):
                found += [result for result in waiting.values() if result is not None]
                waiting = {}
            continue
        if waiting:
            break
        found.append(each)
        waiting = dict.fromkeys(written.id for written in each.calls) if isinstance(each, Said) else {}
    if waiting:
        lacking = [name for name, result in waiting.items() if result is None]
        raise ValueError(f"messages: no result of {', '.join(map(repr, lacking))}")
    return found


def _message(renderer: ChatRenderer, done: Completion) -> dict[str, Any]:
    said = renderer.parse(done.token_ids)
    if any(isinstance(written.call, ToolError) for written in said.calls):
        text = [token for token in done.token_ids if token not in renderer.stop]
        return {"role": "assistant", "content": renderer.tokenizer.decode(text, skip_special_tokens=False)}
    return wire_of(said)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """What of a message counts, in one form: clients write the same in several ways."""
    kept = {"role": message.get("role"), "content": _text(message)}
    if message.get("tool_call_id"):
        kept["tool_call_id"] = message["tool_call_id"]
    if message.get("tool_calls"):
        kept["tool_calls"] = message["tool_calls"]
    return kept


def _text(message: Mapping[str, Any]) -> str:
    """A content, which may come in parts. Raises ValueError for one that is no text."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("messages: a content is a text, or parts that are texts")
    whole = "".join(map(str, texts))
    if any("\ud800" <= letter <= "\udfff" for letter in whole):
        raise ValueError("messages: a content holds half of a surrogate pair, which is no character")
    return whole
