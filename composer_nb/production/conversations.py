"""Serve a policy that continues tokens to clients that send the whole conversation with every request.

A request without tools gets those of `form`: none, or in the compact format those of training.

A request that continues one of our answers reads only its new messages, and every token stays as it was sampled. One that goes
on from an earlier answer, since the agent rewrote its history, is a branch: it reads the tokens up to there as they were sampled,
and the rest anew. Any other request is read from its beginning. When room is needed, the policy forgets the conversation that has
been idle longest; while all are in use, a request waits. The policy forgets a conversation at once whose client went away, even
in the middle of a turn. The tokens of conversations that the policy has forgotten stay known, up to KEPT_TOKENS.

A call that cannot be read is sent with its arguments up to there (`turn.py`). If the policy has forgotten the conversation, it is
read as a call with those. A turn whose first call has no name is sent as text; if the client sends that text back, it is read as
the tokens that it spells.

With a `RolloutRecord`, conversations become stored rollouts when they are graded, when there are too many of them, or when the
server closes (`record.py`). Several may be equal up to an answer: of other users, or of one, with equal answers. None of them
is continued then, since nobody can tell which is meant: the request gets a conversation of its own, with a copy of what is
equal.
"""

import hashlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, count
from queue import Empty, SimpleQueue
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, Said, User
from composer_nb.harness.agent.endpoint import Wire
from composer_nb.harness.agent.endpoint import spoken as spoken_by
from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.agent.shared import Answering
from composer_nb.harness.policy import ATTEMPT_STRIDE, Completion, Request, SampledToken, TimeIsUp, Trace
from composer_nb.harness.rollout import Transcript
from composer_nb.production import wire
from composer_nb.production.record import ConversationRow, RolloutRecord, Verdict, user_digest
from composer_nb.production.turn import Continuation, StreamedTurn

LOG = logging.getLogger(__name__)
# Seconds between two checks whether a client is still there.
LOOK_S = 0.1
# Tokens that come within so many seconds are told together: each part of an answer costs as much as reading all of it so far.
GATHER_S = 0.01
# Conversations that stay known; a `RolloutRecord` stores the one that has been idle longest.
KEPT = 256
# Tokens of conversations that stay known without a `RolloutRecord`.
KEPT_TOKENS = 1 << 20
# Maximum entries of `_owners`.
MARKS = 1 << 16
# Makes the chat format of a tokenizer.
Form = Callable[..., ChatRenderer]
# Roles of system texts.
SYSTEM = ("system", "developer")


@dataclass(slots=True, kw_only=True, eq=False)
class _LiveConversation:
    """A conversation, with its tokens as the policy saw them.

    Attributes:
        digest: Of its system text, tools, seed, name and user: where its messages begin.
        drawn_by: Decides the random draws.
        rollout: The policy's name for it; None: the policy does not hold it.
        marks: Digest of its messages up to each of our answers -> tokens up to there.
        unread: Tokens up to an answer with an unreadable call -> ids of all its calls (`Choice.turn`).
    """

    renderer: ChatRenderer
    digest: bytes
    row: ConversationRow
    drawn_by: int = 0
    rollout: int | None = None
    marks: dict[bytes, int] = field(default_factory=dict)
    unread: dict[int, list[str]] = field(default_factory=dict)
    busy: bool = True


class Conversations:
    """Answers requests (`serve.Answerer`). Thread-safe."""

    def __init__(
        self,
        policy: Answering,
        tokenizer: Tokenizer,
        form: Form,
        tokens: int,
        record: RolloutRecord | None = None,
        temperature: float = 1.0,
    ) -> None:
        """`tokens`: maximum of one conversation."""
        self.policy, self.tokenizer, self.form, self.tokens, self.record = policy, tokenizer, form, tokens, record
        # Temperature of requests that set none.
        self.temperature = temperature
        # No longer text fits into a conversation.
        self._letters = tokens * max(map(len, tokenizer.get_vocab()))
        # Known ones, the one that has been idle longest first.
        self._talks: list[_LiveConversation] = []
        # Digest of the messages up to an answer -> name of the rollout; empty if there are several.
        self._owners: dict[bytes, str] = {}
        # Name of a rollout -> digest of its user, where both were told.
        self._users: dict[str, str] = {}
        # Held by the request that waits for room: those behind it do not overtake it.
        self._door = threading.Lock()
        self._room = threading.Condition()
        # Held while a rollout is stored or graded: a verdict waits for what is on its way to the disk.
        self._storing = threading.RLock()
        self._numbers, self._seeds = count(-1, -1), count()  # numbers that no rollout of RL has

    def __call__(
        self, body: wire.AnyAsked, alive: Callable[[], bool] = lambda: True, report: wire.Told = lambda *part: None
    ) -> wire.Answered:
        """Answer a request; `alive` says whether its client still waits, `report` takes the parts of a streamed answer.

        Raises Refused for a request that cannot be met, and TimeIsUp when the client goes away."""
        if not isinstance(body, wire.RequestBody):
            return self._generate(body, alive, report)
        if body.rollout and not self.record:
            raise wire.Refused("rollout: this server records nothing; start it with --record RUN", param="rollout")
        if body.rollout and body.user and not self._owned(body.rollout, user_digest(body.user)):
            problem = f"rollout: {body.rollout} is another user's; choose another name"
            raise wire.Refused(problem, 409, "conflict", "rollout")
        system = "\n\n".join(wire.text_of(message) for message in body.messages if message.get("role") in SYSTEM)
        spoken = [_plain(message) for message in body.messages if message.get("role") not in SYSTEM]
        renderer = self.form(self.tokenizer, body.tools) if body.tools else self.form(self.tokenizer)
        grammar = _grammar(body, renderer)
        first = _digest(b"", [system, body.tools or [], body.seed, body.rollout, body.user])
        digests = [*accumulate(spoken, _digest, initial=first)]
        instruction = next((message["content"] for message in spoken if message["role"] == "user"), "")
        row = ConversationRow(name=body.rollout or "", instruction=instruction, user=body.user or "")
        new = _LiveConversation(renderer=renderer, digest=digests[0], row=row)
        talks = self._held(new, body.n or 1, body.seed, digests, alive)
        max_tokens, sampling = body.max_completion_tokens or body.max_tokens, _drawn(body, body.top_logprobs)
        work, grammars = list[tuple[Request, StreamedTurn]](), list[Grammar | None]()
        try:
            reads = [self._read(talk, system, spoken, prefix) for talk, prefix in talks]
            for index, ((talk, _), (read, _)) in enumerate(zip(talks, reads, strict=True)):
                grammars.append(grammar and grammar.fresh())
                held_to = {"allowed": grammars[-1] and grammars[-1].allowed}
                request = self._request(talk, read, max_tokens, "messages", sampling | held_to)
                work.append((request, StreamedTurn(talk.renderer, body, partial(report, index))))
            prompt_tokens = len(talks[0][0].row.transcript.token_ids) + len(reads[0][0])
            records = self._run(work, alive)
            if faults := [grammar.fault for grammar in grammars if grammar and grammar.fault]:
                raise wire.Refused(f"tools: a call could not be held to its schema: {faults[0]}", param="tools")
            choices = [turn.choice() for _, turn in work]
        except BaseException:
            for talk, _ in talks:
                self._end(talk, drop=True)
            raise
        answers, own_sampling = [], _own_distribution(sampling, self.temperature, bool(grammar))
        rows = zip(talks, reads, work, choices, strict=True)
        for (talk, _), (read, news), (request, turn), (choice, is_whole) in rows:
            talk.row.add(read, news, turn.completion, talk.renderer, own_sampling)
            if self.record and request.rollout in records:
                talk.row.traced(records[request.rollout])
            if is_whole:  # otherwise the policy holds more than the client is shown
                self._mark(talk, _digest(digests[-1], _plain(choice.message)), choice)
            self._end(talk, drop=not is_whole, wrote=True)
            answers.append(replace(choice, rollout=talk.row.name if self.record else ""))
        return wire.Answered(choices=answers, read=prompt_tokens)

    def _owned(self, name: str, user: str) -> bool:
        """Return whether a rollout is this user's, who may be the first to name it, also before the server was started."""
        if name not in self._users and self.record and (owner := self.record.owner(name)):
            self._users[name] = owner
        return self._users.setdefault(name, user) == user

    def _mark(self, talk: _LiveConversation, digest: bytes, choice: wire.Choice) -> None:
        """Record the length of a conversation, and the digest of its messages."""
        with self._room:
            talk.marks[digest] = at = len(talk.row.transcript.token_ids)
            if choice.turn:
                talk.unread[at] = [call["id"] for call in choice.turn["calls"]]
            if self.record and self._owners.setdefault(digest, talk.row.name) != talk.row.name:
                self._owners[digest] = ""
            if len(self._owners) > MARKS:
                del self._owners[next(iter(self._owners))]

    def grade(self, name: str, verdict: Verdict) -> int:
        """Store a rollout with its grade, or grade one that is stored. Return the number of its branches.

        Raises Refused for an unknown rollout, and one that is being continued."""
        if self.record is None:
            raise wire.Refused("this server records nothing; start it with --record RUN", 404, "not_found")
        with self._storing:
            self._store(name)
            try:
                return self.record.grade(name, verdict)
            except KeyError:
                raise wire.Refused(f"no rollout {name!r} was recorded here", 404, "not_found") from None

    def close(self) -> None:
        """Store all conversations that were not stored yet. Raises the error of one that could not be, after all others."""
        errors = list[Exception]()
        for name in dict.fromkeys(talk.row.name for talk in self._talks) if self.record else ():
            try:
                self._store(name)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _store(self, name: str) -> None:
        """Store a conversation with its branches, and know it no longer. After an error, it stays known."""
        with self._storing:
            with self._room:
                talks = [talk for talk in self._talks if talk.row.name == name]
                if any(talk.busy for talk in talks):
                    raise wire.Refused(f"rollout {name}: a request is under way", 409, "conflict")
                for talk in talks:
                    self._forget(talk)
                    self._talks.remove(talk)
                self._room.notify_all()
            if self.record and talks:
                try:
                    self.record.keep(name, [talk.row for talk in talks])
                except BaseException:
                    with self._room:
                        self._talks += talks
                    raise

    def _generate(
        self, body: wire.Generate | wire.Complete, alive: Callable[[], bool], report: wire.Told
    ) -> wire.Answered:
        """Continue tokens, in conversations that nothing goes on with."""
        renderer, vocabulary, turn_type = self.form(self.tokenizer), self.tokenizer.get_vocab_size(), StreamedTurn
        parameters: wire.Complete | wire.Sampling
        if isinstance(body, wire.Complete):
            param, parameters, turn_body, turn_type = "prompt", body, body.asked, Continuation
            text = body.prompt if isinstance(body.prompt, str) else ""
            self._fits(len(text), param)
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids if text else [*body.prompt]
        else:
            param, parameters, turn_body = "prompt_token_ids", body.sampling_params, wire.RequestBody(messages=[{}])
            ids = body.prompt_token_ids
        if not ids or max(ids) >= vocabulary:
            raise wire.Refused(f"{param}: at least one token, and none above {vocabulary - 1}", param=param)
        new = _LiveConversation(renderer=renderer, digest=b"", row=ConversationRow(name="", user=turn_body.user or ""))
        conversations = self._held(new, parameters.n or 1, parameters.seed, [b""], alive)
        sampling = _drawn(parameters, parameters.logprobs)
        try:
            turns = [turn_type(renderer, turn_body, partial(report, index)) for index in range(len(conversations))]
            requests = [self._request(talk, ids, parameters.max_tokens, param, sampling) for talk, _ in conversations]
            self._run([*zip(requests, turns, strict=True)], alive)
        finally:
            traces = [self._end(talk, drop=True) for talk, _ in conversations]
        if isinstance(body, wire.Complete):
            return wire.Answered(choices=[turn.choice()[0] for turn in turns], read=len(ids))
        routes = [trace.routes if body.return_routed_experts else None for trace in traces]
        choices = [turn.tokens(parameters.logprobs is not None, of) for turn, of in zip(turns, routes, strict=True)]
        return wire.Answered(choices=choices, read=len(ids))

    def _request(
        self, talk: _LiveConversation, read: list[int], limit: int | None, param: str, sampling: dict[str, Any]
    ) -> Request:
        """Return what the policy is asked. Raises Refused if a conversation has no room for an answer."""
        tokens = talk.row.transcript.token_ids
        if (prompt_tokens := len(tokens) + len(read)) >= self.tokens:
            raise wire.PromptTooLong(self.tokens, prompt_tokens, param)
        room_tokens, restarts = min(limit or self.tokens, self.tokens - prompt_tokens), talk.rollout is None
        if restarts:
            talk.rollout = next(self._numbers) * ATTEMPT_STRIDE + talk.drawn_by
        assert talk.rollout is not None
        names: dict[str, Any] = {"rollout": talk.rollout, "user": talk.row.user or talk.row.name}
        token_ids = [*(tokens if restarts else ()), *read]
        return Request(**names, token_ids=token_ids, max_tokens=room_tokens, priority=0, **sampling)

    def _run(self, work: Sequence[tuple[Request, StreamedTurn]], alive: Callable[[], bool]) -> dict[int, Trace]:
        """Have turns written side by side. Return the policy's records of the rollouts that a stop text ended, which it has
        forgotten. Raises TimeIsUp when the client goes away."""
        records = dict[int, Trace]()
        news: SimpleQueue[tuple[int, SampledToken | Future[Completion]]] = SimpleQueue()
        puts = [lambda event, index=index: news.put((index, event)) for index in range(len(work))]
        requests = [replace(request, on_token=put) for (request, _), put in zip(work, puts, strict=True)]
        for answer, put in zip(self.policy.start(*requests), puts, strict=True):
            answer.add_done_callback(put)
        open_turns = dict(enumerate(turn for _, turn in work))
        while open_turns:
            if not alive():
                raise TimeIsUp
            with suppress(Empty):
                index, piece = news.get(timeout=LOOK_S)
                events = [(index, piece), *(news.get() for _ in range(news.qsize()))]
                for index, piece in events:
                    if index in open_turns and open_turns[index].hear(piece):
                        del open_turns[index]
                for index in {index for index, _ in events} & open_turns.keys():
                    if open_turns[index].tell():
                        del open_turns[index]
                        rollout = work[index][0].rollout
                        records[rollout] = self.policy.release(rollout)
            if open_turns:
                time.sleep(GATHER_S)
        return records

    def _held(
        self, new: _LiveConversation, count: int, seed: int | None, digests: Sequence[bytes], alive: Callable[[], bool]
    ) -> list[tuple[_LiveConversation, int]]:
        """Return a conversation for each choice of a request, and how many of its messages are known; 0 for a `new` one.

        Waits while too many are in use. Raises Refused for more choices than the policy holds, and TimeIsUp when the client goes
        away."""
        capacity = self.policy.capacity
        if count > capacity:
            raise wire.Refused(f"n: {count} choices, and {capacity} conversations are held at a time", param="n")
        with self._door, self._room:
            while sum(talk.busy for talk in self._talks) + count > capacity:
                if not alive():
                    raise TimeIsUp
                self._room.wait(LOOK_S)
            talks = [self._claim(new, seed, index, digests) for index in range(count)]
            idle = [talk for talk in self._talks if not talk.busy and talk.rollout is not None]
            used_slots = sum(talk.busy or talk.rollout is not None for talk in self._talks)
            for talk in idle[: max(used_slots - capacity, 0)]:
                self._forget(talk)
            forgotten = [talk for talk in self._talks if not talk.busy and talk.rollout is None]
            kept_tokens = sum(len(talk.row.transcript.token_ids) for talk in forgotten)
            while not self.record and forgotten and (len(self._talks) > KEPT or kept_tokens > KEPT_TOKENS):
                kept_tokens -= len(forgotten[0].row.transcript.token_ids)
                self._talks.remove(forgotten.pop(0))
        if self.record and len(self._talks) > KEPT:
            try:
                self._store(next(talk.row.name for talk in self._talks if not talk.busy))
            except (StopIteration, wire.Refused):
                pass
            except Exception as error:  # such as a full disk, of any of the libraries: it is stored later
                LOG.error("a rollout could not be stored: %s", error)
        return talks

    def _claim(
        self, new: _LiveConversation, seed: int | None, index: int, digests: Sequence[bytes]
    ) -> tuple[_LiveConversation, int]:
        """Return a conversation that is in use from now on, and how many of its messages are known: an idle one that ends at the
        longest known prefix of `digests`, a branch of one that goes on, or else one made from `new`."""
        drawn_by = (next(self._seeds) if seed is None else seed + (index << 32)) % ATTEMPT_STRIDE
        name = new.row.name or f"c{uuid.uuid4().hex}"
        row = replace(new.row, name=name, number=self._next(name), transcript=Transcript(), turns=[])
        marks = {digest for talk in self._talks for digest in talk.marks}
        for prefix in (end for end in range(len(digests) - 2, 0, -1) if digests[end] in marks):
            holders = [talk for talk in reversed(self._talks) if digests[prefix] in talk.marks]
            unextended = [talk for talk in holders if talk.marks[digests[prefix]] == len(talk.row.transcript.token_ids)]
            talk = next((talk for talk in unextended if not talk.busy), holders[-1])
            length = talk.marks[digests[prefix]]
            if self.record and not self._owners.get(digests[prefix]):
                row = talk.row.copy(length, row)
            elif talk in unextended and not talk.busy:
                self._talks.remove(talk)
                self._talks.append(talk)
                talk.busy = True
                return talk, prefix
            else:
                row = talk.row.branch(length, self._next(talk.row.name))
            unread = {length: talk.unread[length]} if length in talk.unread else {}
            break
        else:
            prefix, unread = 0, {}
        self._talks.append(replace(new, row=row, drawn_by=drawn_by, marks={}, unread=unread))
        return self._talks[-1], prefix

    def _next(self, name: str) -> int:
        """Return the number of the next branch of a rollout."""
        return max((talk.row.number for talk in self._talks if talk.row.name == name), default=-1) + 1

    def _read(
        self, talk: _LiveConversation, system: str, spoken: Wire, prefix: int
    ) -> tuple[list[int], Sequence[Message]]:
        """Return the new tokens and messages. Raises ValueError for invalid messages, or if the last one is a turn of the
        agent."""
        before = [call["id"] for call in spoken[prefix - 1].get("tool_calls", ())] if prefix else []
        call_ids = talk.unread.get(len(talk.row.transcript.token_ids), before)
        answered = {message["tool_call_id"] for message in spoken[prefix:] if "tool_call_id" in message}
        news = _in_order(wire.messages_of(spoken[prefix:]), call_ids if {*call_ids} <= answered else before)
        if not news or not isinstance(news[-1], User | CallResult):
            raise ValueError("messages: the last one is a user's or a tool's")
        self._fits(sum(len(message.text) for message in news), "messages")
        if not prefix:
            return talk.renderer.render(news, system, spelled=True), news
        cut = talk.row.transcript.token_ids[-1] != talk.renderer.end
        end = [talk.renderer.end] if cut and isinstance(news[0], User) else []  # results follow as in `TokenTurnPolicy`
        return end + talk.renderer.render(news, spelled=True, after=True), news

    def _fits(self, letters: int, param: str) -> None:
        """Raise Refused for a text that is too long for any conversation, before the time for its tokens is spent."""
        if letters > self._letters:
            raise wire.PromptTooLong(self.tokens, -(-letters * self.tokens // self._letters), param)

    def _end(self, talk: _LiveConversation, drop: bool, wrote: bool = False) -> Trace:
        """Let others use the room of a conversation. `drop`: the policy forgets it. `wrote`: this request got its answer. Returns
        the records of what is forgotten."""
        with self._room:
            trace = self._forget(talk) if drop else Trace()
            if drop and not talk.marks and not (wrote and self.record):
                self._talks.remove(talk)
            talk.busy = False
            self._room.notify_all()
            return trace

    def _forget(self, talk: _LiveConversation) -> Trace:
        """Have the policy forget a conversation."""
        if talk.rollout is None:
            return Trace()
        trace = self.policy.release(talk.rollout)
        talk.rollout = None
        if self.record:
            talk.row.traced(trace)
        return trace


def _grammar(body: wire.RequestBody, renderer: ChatRenderer) -> Grammar | None:
    """Return what a turn is held to: calls of all tools if one must be called or one is `strict`, of one tool if it must be.
    Raises Refused for a tool that is not there, and for schemas that this format cannot be held to."""
    functions = {tool["function"]["name"]: tool["function"] for tool in renderer.tools}
    strict = any(function.get("strict") for function in functions.values())
    if not body.must_call and (body.tool_choice == "none" or not strict):
        return None
    names = [body.tool] if body.tool else [*functions]
    if not names or not functions.keys() >= {*names}:
        raise wire.Refused(f"tool_choice: {body.tool or 'required'}: there is no such tool", param="tool_choice")
    several = body.parallel_tool_calls is not False and not body.tool
    try:
        return renderer.grammar(names, text=not body.must_call, several=several)
    except ValueError as error:
        raise wire.Refused(str(error), param="tools") from None


def _in_order(messages: Sequence[Message], ids: Sequence[str]) -> list[Message]:
    """Return messages with the results in the order of their calls. `ids`: calls that wait for a result at the beginning. Raises
    ValueError for a call without a result, and a result without a call."""
    ordered: list[Message] = []
    waiting: dict[str, CallResult | None] = dict.fromkeys(ids)
    for message in (*messages, None):
        if isinstance(message, CallResult):
            if waiting.get(message.id, message) is not None:
                raise ValueError(f"messages: a result of {message.id!r}, and no call of that id waits for one")
            waiting[message.id] = message
        elif lacking := [name for name, result in waiting.items() if result is None]:
            raise ValueError(f"messages: no result of {', '.join(map(repr, lacking))}")
        else:
            ordered += filter(None, (*waiting.values(), message))
            waiting = dict.fromkeys(written.id for written in message.calls) if isinstance(message, Said) else {}
    return ordered


def _drawn(parameters: wire.RequestBody | wire.Complete | wire.Sampling, top: int | None) -> dict[str, Any]:
    """Return how a request wants tokens to be drawn, and how many of the most probable ones it wants to see."""
    limits = {"top_k": parameters.top_k or 0, "min_p": parameters.min_p or 0.0}
    return {"top": top or 0, "temperature": parameters.temperature, "top_p": parameters.top_p or 1.0, **limits}


def _own_distribution(sampling: Mapping[str, Any], temperature: float, constrained: bool) -> str:
    """Describe how tokens were sampled; empty for the policy's own distribution, which a learner can compute."""
    settings = {**sampling, "temperature": temperature if sampling["temperature"] is None else sampling["temperature"]}
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    parts = [f"{name}={settings[name]:g}" for name, value in usual.items() if settings[name] != value]
    return ", ".join(parts + ["held to the schemas of tools"] * constrained)


def _digest(before: bytes, what: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(what, sort_keys=True).encode()).digest()


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in one form, since clients write the same in several ways. Raises ValueError for an invalid one."""
    if message.get("function_call"):
        raise ValueError("messages: function_call: give the call as tool_calls")
    calls = {"tool_call_id": message["tool_call_id"]} if message.get("tool_call_id") else {}
    if message.get("tool_calls"):
        calls["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": wire.arguments_of(call["function"]["arguments"])}}
            for call in spoken_by(message)[0].get("tool_calls", [])
        ]
    return {"role": message.get("role"), "content": wire.text_of(message), **calls}
