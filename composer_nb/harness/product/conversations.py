"""A policy that continues tokens, behind a server whose clients send the whole conversation with every request.

A request that goes on where an answer of ours ended is continued: only what is new is read, and every token stays as it was
sampled. Any other is read from its beginning. Of conversations that nobody asks about, the one that has waited longest makes
room, and one whose client went away is forgotten. A message in which a call can not be read is answered as the text that it is,
without calls; where the client sends that text back, it is read as the tokens that it spells.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, Message, Result, Said, User
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.policy import ATTEMPT_STRIDE, ProviderFailure, Request
from composer_nb.harness.product.serve import Answered, Asked, Refused, messages_of, wire_of
from composer_nb.harness.tools.tool_call import ToolError

Wire = Sequence[Mapping[str, Any]]
SYSTEM = ("system", "developer")
"""Roles of what is told before everything."""


@dataclass(slots=True, kw_only=True)
class _Talk:
    """A conversation that the policy holds."""

    rollout: int
    renderer: ChatRenderer
    head: str
    """Its system texts, tools and seed."""
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

    def __call__(self, asked: Asked, there: Callable[[], bool] = lambda: True) -> Answered:
        wire = asked.messages
        system = "\n\n".join(_text(each) for each in wire if each.get("role") in SYSTEM)
        spoken = [_plain(each) for each in wire if each.get("role") not in SYSTEM]
        talk, known = self._continued(
            json.dumps([system, asked.tools or [], asked.seed]), [json.dumps(each, sort_keys=True) for each in spoken]
        )
        try:
            read = self._read(talk, system, spoken, known)
            before = talk.tokens + len(read)
            room = min(asked.max_completion_tokens or asked.max_tokens or self.tokens, self.tokens - before)
            if room < 1:
                raise Refused(
                    f"messages: {before} tokens: a conversation has {self.tokens}",
                    code="context_length_exceeded",
                    param="messages",
                )
            request = Request(
                rollout=talk.rollout,
                token_ids=read,
                max_tokens=room,
                temperature=asked.temperature,
                top_p=asked.top_p or 1.0,
            )
            done = self.policy.ask(request, wanted=there)
            message, kept = _message(talk.renderer, done.token_ids, asked)
        except BaseException:
            self._forget(talk)
            raise
        if kept is not None:  # the policy holds more than the client is shown
            self._forget(talk)
        written, ended = done.token_ids[:kept], done.token_ids[-1:]
        talk.wire = [json.dumps(each, sort_keys=True) for each in (*spoken, _plain(message))]
        talk.tokens = before + len(done.token_ids)
        talk.open = ended != [talk.renderer.ids[talk.renderer.end]]
        talk.busy = False
        logprobs = [
            _logprob(self.tokenizer, token, logprob)
            for token, logprob in zip(written, done.logprobs, strict=False)
            if token not in talk.renderer.stop
        ]
        return Answered(
            message=message,
            read=before,
            written=len(written),
            cut=kept is None and not talk.renderer.stop.issuperset(ended or [-1]),
            logprobs=logprobs if asked.logprobs else None,
        )

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
            _, tools, seed = json.loads(head)
            number = next(self._numbers)
            drawn_by = (number if seed is None else seed) % ATTEMPT_STRIDE  # what a rollout draws goes by this alone
            talk = _Talk(
                rollout=number * ATTEMPT_STRIDE + drawn_by, renderer=self.form(self.tokenizer, tools), head=head
            )
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


def _message(renderer: ChatRenderer, token_ids: Sequence[int], asked: Asked) -> tuple[dict[str, Any], int | None]:
    """A turn as an endpoint's message; where a text that stops it was written, what stands before it, and the number of tokens
    until it was written."""

    def text(count: int) -> str:
        plain = [token for token in token_ids[:count] if token not in renderer.stop]
        return renderer.tokenizer.decode(plain, skip_special_tokens=False)

    whole, kept = text(len(token_ids)), None
    found = [(place, len(stop)) for stop in asked.stops if (place := whole.find(stop)) >= 0]
    if found:
        at, length = min(found)
        before, kept = (
            bisect_left(range(len(token_ids)), end, key=lambda count: len(text(count))) for end in (at + 1, at + length)
        )
        whole, token_ids = whole[:at], [*token_ids[: before - 1], renderer.ids[renderer.end]]
    said = renderer.parse(token_ids)
    if any(isinstance(written.call, ToolError) for written in said.calls) or (
        said.calls and asked.tool_choice == "none"
    ):
        return {"role": "assistant", "content": whole}, kept
    return wire_of(said if said.calls or kept is None else replace(said, text=whole.strip())), kept


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    part = "\ufffd" in text  # of a character: its bytes are not known from the text
    return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode()), "top_logprobs": []}


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
