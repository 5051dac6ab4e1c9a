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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, Message, Result, Said, User
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.policy import ATTEMPT_STRIDE, Completion, Drawn, Request, TimeIsUp, Trace
from composer_nb.harness.product.turn import Turn
from composer_nb.harness.product.wire import Answered, Asked, Generate, Refused, Told, messages_of

LOOK_S = 0.1
"""Seconds between two checks whether a client is still there."""
GATHER_S = 0.01
"""Tokens that come within so many seconds are told together: each part of an answer costs as much as reading all of it so far."""
Wire = Sequence[Mapping[str, Any]]
SYSTEM = ("system", "developer")
"""Roles of system texts."""


@dataclass(slots=True, kw_only=True)
class _Talk:
    """A conversation that the policy holds."""

    rollout: int = -1
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

    def __call__(
        self, asked: Asked | Generate, there: Callable[[], bool] = lambda: True, told: Told = lambda *part: None
    ) -> Answered:
        if isinstance(asked, Generate):
            return self._generate(asked, there)
        wire = asked.messages
        system = "\n\n".join(_text(each) for each in wire if each.get("role") in SYSTEM)
        spoken = [_plain(each) for each in wire if each.get("role") not in SYSTEM]
        wire_now = [json.dumps(each, sort_keys=True) for each in spoken]
        renderer = self.form(self.tokenizer, asked.tools) if asked.tools else self.form(self.tokenizer)
        new = _Talk(renderer=renderer, head=json.dumps([system, asked.tools or [], asked.seed]))
        held = self._held(new, asked.n or 1, asked.seed, wire_now, there)
        most, work = asked.max_completion_tokens or asked.max_tokens, list[tuple[Request, Turn]]()
        drawn = {"temperature": asked.temperature, "top_p": asked.top_p or 1.0, "top": asked.top_logprobs or 0}
        try:
            for number, (talk, known) in enumerate(held):
                request = self._request(talk, self._read(talk, system, spoken, known), most, "messages", drawn)
                work.append((request, Turn(talk.renderer, asked, partial(told, number))))
            self._run(work, there)
            choices = [turn.choice() for _, turn in work]
        except BaseException:
            for talk, _ in held:
                self._forget(talk)
            raise
        before = held[0][0].tokens + len(work[0][0].token_ids)
        for (talk, _), (request, turn), (choice, whole) in zip(held, work, choices, strict=True):
            if not whole:  # the policy holds more than the client is shown
                self._forget(talk)
                continue
            talk.wire = [*wire_now, json.dumps(_plain(choice.message), sort_keys=True)]
            talk.tokens += len(request.token_ids) + len(turn.drawn)
            talk.open = turn.token_ids[-1:] != [talk.renderer.end]
            with self._room:
                talk.busy = False
                self._room.notify_all()
        return Answered(choices=[choice for choice, _ in choices], read=before)

    def _generate(self, asked: Generate, there: Callable[[], bool]) -> Answered:
        """Continue tokens, in conversations that nothing goes on with."""
        ids, given, vocabulary = asked.prompt_token_ids, asked.sampling_params, self.tokenizer.get_vocab_size()
        if max(ids) >= vocabulary:
            raise Refused(f"prompt_token_ids: {max(ids)} is not below {vocabulary}", param="prompt_token_ids")
        renderer, drawn = self.form(self.tokenizer), given.model_dump(include={"temperature", "top_p"})
        held = self._held(_Talk(renderer=renderer, head=""), given.n, given.seed, [], there)
        drawn["top"] = given.logprobs or 0
        try:
            turns = [Turn(renderer, Asked(messages=[{}]), lambda *part: None) for _ in held]
            requests = [self._request(talk, ids, given.max_tokens, "prompt_token_ids", drawn) for talk, _ in held]
            self._run([*zip(requests, turns, strict=True)], there)
        finally:
            traces = [self._forget(talk) for talk, _ in held]
        routes = [trace.routes if asked.return_routed_experts else None for trace in traces]
        choices = [turn.tokens(given.logprobs is not None, of) for turn, of in zip(turns, routes, strict=True)]
        return Answered(choices=choices, read=len(ids))

    def _request(
        self, talk: _Talk, read: Sequence[int], wanted: int | None, param: str, drawn: Mapping[str, Any]
    ) -> Request:
        """Return what the policy is asked. Raises Refused if a conversation has no room for an answer."""
        before = talk.tokens + len(read)
        if before >= self.tokens:
            message = f"{param}: {before} tokens: a conversation has {self.tokens}"
            raise Refused(message, code="context_length_exceeded", param=param)
        room = min(wanted or self.tokens, self.tokens - before)
        return Request(rollout=talk.rollout, token_ids=read, max_tokens=room, **drawn)

    def _run(self, work: Sequence[tuple[Request, Turn]], there: Callable[[], bool]) -> None:
        """Have turns written side by side. Raises TimeIsUp when the client goes away."""
        news: SimpleQueue[tuple[int, Drawn | Future[Completion]]] = SimpleQueue()
        puts = [partial(_put, news, number) for number in range(len(work))]
        requests = [replace(request, heard=put) for (request, _), put in zip(work, puts, strict=True)]
        for answer, put in zip(self.policy.start(*requests), puts, strict=True):
            answer.add_done_callback(put)
        open_turns = dict(enumerate(turn for _, turn in work))
        while open_turns:
            if not there():
                raise TimeIsUp
            with suppress(Empty):
                number, what = news.get(timeout=LOOK_S)
                heard = [(number, what), *(news.get() for _ in range(news.qsize()))]
                for number, what in heard:
                    if number in open_turns and open_turns[number].hear(what):
                        del open_turns[number]
                for number in {number for number, _ in heard} & open_turns.keys():
                    if open_turns[number].tell():
                        del open_turns[number]
                        self.policy.release(work[number][0].rollout)
            if open_turns:
                time.sleep(GATHER_S)

    def _held(
        self, new: _Talk, count: int, seed: int | None, wire: Sequence[str], there: Callable[[], bool]
    ) -> list[tuple[_Talk, int]]:
        """Return a conversation for each choice of a request, and how many of its messages the policy holds; 0 for a `new` one.
        Waits while too many are in use. Raises TimeIsUp when the client goes away."""
        most = self.policy.policy.capacity
        if count > most:
            raise Refused(f"n: {count} choices, and {most} conversations are held at a time", param="n")
        with self._door, self._room:
            while sum(talk.busy for talk in self._talks) + count > most:
                if not there():
                    raise TimeIsUp
                self._room.wait(LOOK_S)
            return [self._one(new, seed, place, wire) for place in range(count)]

    def _one(self, new: _Talk, seed: int | None, place: int, wire: Sequence[str]) -> tuple[_Talk, int]:
        for talk in self._talks:
            held = len(talk.wire)
            if not talk.busy and talk.head == new.head and len(wire) > held and talk.wire == wire[:held]:
                self._talks.remove(talk)
                self._talks.append(talk)
                talk.busy = True
                return talk, held
        if len(self._talks) == self.policy.policy.capacity:
            idle = next(talk for talk in self._talks if not talk.busy)
            self._talks.remove(idle)
            self.policy.release(idle.rollout)
        number = next(self._numbers)
        drawn_by = (number if seed is None else seed + (place << 32)) % ATTEMPT_STRIDE  # decides the random draws
        talk = replace(new, rollout=number * ATTEMPT_STRIDE + drawn_by)
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

    def _forget(self, talk: _Talk) -> Trace:
        with self._room:
            self._talks.remove(talk)
            trace = self.policy.release(talk.rollout)
            self._room.notify_all()
            return trace


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


def _put(news: SimpleQueue[Any], number: int, what: Drawn | Future[Completion]) -> None:
    news.put((number, what))


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
