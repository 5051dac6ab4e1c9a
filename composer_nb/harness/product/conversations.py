"""Serve a policy that continues tokens to clients that send the whole conversation with every request.

A request without tools gets those of `form`: none, or in the compact format those of training.

A request that continues one of our answers reads only its new messages, and every token stays as it was sampled. Any other
request is read from its beginning. When room is needed, the conversation that has been idle longest is dropped; while all are in
use, a request waits. A conversation whose client went away is dropped at once, also in the middle of a turn. A message with a
call that cannot be read is sent as text, without calls; if the client sends that text back, it is read as the tokens that it
spells.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, Message, Result, Said, User
from composer_nb.harness.agent.shared import LOOK_S, Shared
from composer_nb.harness.policy import ATTEMPT_STRIDE, Request, TimeIsUp
from composer_nb.harness.product.serve import Answered, Asked, Refused, messages_of, wire_of
from composer_nb.harness.tools.tool_call import ToolError

Wire = Sequence[Mapping[str, Any]]
SYSTEM = ("system", "developer")
"""Roles of system texts."""


@dataclass(slots=True, kw_only=True)
class _Talk:
    """A conversation that the policy holds."""

    rollout: int
    renderer: ChatRenderer
    head: str
    """Its system text, tools and seed, as JSON."""
    wire: list[str] = field(default_factory=list)
    """Its messages, up to our last answer, as JSON."""
    tokens: int = 0
    open: bool = False
    """The last turn was cut off, so its end must be read before the next."""
    busy: bool = True


class Conversations:
    """Answers requests (`serve.Answerer`). Thread-safe."""

    def __init__(self, policy: Shared, tokenizer: Tokenizer, form: Callable[..., ChatRenderer], tokens: int) -> None:
        """`tokens`: maximum of one conversation."""
        self.policy, self.tokenizer, self.form, self.tokens = policy, tokenizer, form, tokens
        self._talks: list[_Talk] = []
        self._door = threading.Lock()
        """Held by the request that waits for room: those behind it do not overtake it."""
        self._room = threading.Condition()
        self._numbers = count()

    def __call__(self, asked: Asked, there: Callable[[], bool] = lambda: True) -> Answered:
        wire = asked.messages
        system = "\n\n".join(_text(each) for each in wire if each.get("role") in SYSTEM)
        spoken = [_plain(each) for each in wire if each.get("role") not in SYSTEM]
        wire_now = [json.dumps(each, sort_keys=True) for each in spoken]
        talk, known = self._continued(system, asked, wire_now, there)
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
        talk.wire = [*wire_now, json.dumps(_plain(message), sort_keys=True)]
        talk.tokens = before + len(done.token_ids)
        talk.open = ended != [talk.renderer.end]
        with self._room:
            talk.busy = False
            self._room.notify_all()
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

    def _continued(
        self, system: str, asked: Asked, wire: Sequence[str], there: Callable[[], bool]
    ) -> tuple[_Talk, int]:
        """Return the conversation of a request, and how many of its messages the policy holds; 0 for a new one. Waits while all
        that the policy can hold are in use. Raises TimeIsUp when the client goes away."""
        head = json.dumps([system, asked.tools or [], asked.seed])
        with self._door, self._room:
            while sum(talk.busy for talk in self._talks) >= self.policy.policy.capacity:
                if not there():
                    raise TimeIsUp
                self._room.wait(LOOK_S)
            for talk in self._talks:
                held = len(talk.wire)
                if not talk.busy and talk.head == head and len(wire) > held and talk.wire == wire[:held]:
                    self._talks.remove(talk)
                    self._talks.append(talk)
                    talk.busy = True
                    return talk, held
            if len(self._talks) == self.policy.policy.capacity:
                idle = next(talk for talk in self._talks if not talk.busy)
                self._talks.remove(idle)
                self.policy.release(idle.rollout)
            number = next(self._numbers)
            drawn_by = (number if asked.seed is None else asked.seed) % ATTEMPT_STRIDE  # decides the random draws
            renderer = self.form(self.tokenizer, asked.tools) if asked.tools else self.form(self.tokenizer)
            talk = _Talk(rollout=number * ATTEMPT_STRIDE + drawn_by, renderer=renderer, head=head)
            self._talks.append(talk)
            return talk, 0

    def _read(self, talk: _Talk, system: str, spoken: Wire, known: int) -> list[int]:
        """Return the new tokens. Raises ValueError for invalid messages, or if the last one is a turn of the agent."""
        before = json.loads(talk.wire[-1]).get("tool_calls", ()) if known else ()
        news = _in_order(messages_of(spoken[known:]), [call["id"] for call in before])
        if not news or not isinstance(news[-1], User | Result):
            raise ValueError("messages: the last one is a user's or a tool's")
        if not known:
            return talk.renderer.render(news, system, spelled=True)
        end = [talk.renderer.end] if talk.open else []
        results = [each for each in news if isinstance(each, Result)]
        if len(results) == len(news):
            return end + talk.renderer.results(results)
        if results or len(news) > 1:
            raise ValueError("messages: after a turn come the results of its calls, or one message of a user")
        return end + talk.renderer.following(news[0].text)

    def _forget(self, talk: _Talk) -> None:
        with self._room:
            self._talks.remove(talk)
            self.policy.release(talk.rollout)
            self._room.notify_all()


def _in_order(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """Return messages with the results in the order of their calls. `ids`: calls that wait for a result at the beginning. Raises
    ValueError for a call without a result, and a result without a call."""
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
    """Return a turn as an endpoint's message. If it holds a stop text, the message ends before it, and the number of tokens up to
    the stop text is returned too."""

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
        whole, token_ids = whole[:at], [*token_ids[: before - 1], renderer.end]
    said = renderer.parse(token_ids)
    if any(isinstance(written.call, ToolError) for written in said.calls) or (
        said.calls and asked.tool_choice == "none"
    ):
        return {"role": "assistant", "content": whole}, kept
    return wire_of(said if said.calls or kept is None else renderer.parse(renderer.spell(whole))), kept


def _logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    part = "\ufffd" in text  # a token of part of a character: the text does not tell its bytes
    return {"token": text, "logprob": logprob, "bytes": None if part else list(text.encode()), "top_logprobs": []}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in one form, since clients write the same in several ways."""
    calls = {name: message[name] for name in ("tool_call_id", "tool_calls") if message.get(name)}
    return {"role": message.get("role"), "content": _text(message), **calls}


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message, which may come in parts. Raises ValueError if it is not text."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("messages: a content must be text, or parts that are texts")
    whole = "".join(map(str, texts))
    if any("\ud800" <= letter <= "\udfff" for letter in whole):
        raise ValueError("messages: a content holds half of a surrogate pair, which is not a character")
    return whole
