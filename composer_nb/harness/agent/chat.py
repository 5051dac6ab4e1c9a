"""Conversations with tools as token ids: what the wire formats of chat models share.

Canonical form: a system text with tool schemas (OpenAI's), user texts, turns of text and calls, results that name their call. A
renderer writes each of these as *pieces*, special tokens and plain texts, and every piece is encoded by itself. So rendering turn
by turn gives the ids of rendering at once, by construction: a turn that was sampled stays as it was sampled, and what follows it
begins at a special token, where a cache can go on. Text is encoded without any special or added token and without normalisation:
what spells one stays text, byte for byte.

A turn is read from ids, so that a spelled token is never taken for a true one. What is no call becomes a ToolError of kind
InvalidArguments in the place where a call would be: nothing that a model wrote is dropped. A call that a format can not say is
found by reading back what was written, and is a ValueError.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError

Schema = Mapping[str, Any]
Piece = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One call of a turn: its id as the model wrote it, and the call, or why it cannot be read."""

    id: str
    call: ToolCall | ToolError
    text: str = ""
    """The call as written, where it cannot be read and is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn of the agent."""

    text: str = ""
    """Everything that it wrote outside of calls, without white space around it."""
    calls: tuple[Written, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer to a call. Results of one turn stand in the order of its calls."""

    id: str
    text: str


Message = User | Said | Result


class ChatRenderer(ABC):
    """Turns conversations into token ids and turns back out of them.

    Raises ValueError for a tokenizer that lacks a token of the format, or finds one in plain text whatever it is told.
    """

    tokens: tuple[str, ...]
    """Special tokens of the format."""
    allowed: frozenset[str]
    """Those that a turn may have before its end."""
    end: str
    """The one that ends a turn."""
    spelled: tuple[str, ...]
    """What begins a call: where it stands in a text, letter by letter, a call was meant and missed."""

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Schema] = ()) -> None:
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        self.ids = {token: token_id(tokenizer, token) for token in self.tokens}
        self.names = {number: token for token, number in self.ids.items()}
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(self.names) | {number for number, token in added.items() if token.special}
        """Tokens that are no text. What is added to a vocabulary and not special, as `<think>`, is a way to write a text."""
        self._plain = _without_added_tokens(tokenizer)
        if found := [token for token in self.tokens if self.ids[token] in self.encode(token)]:
            raise ValueError(f"the tokenizer finds {', '.join(found)} in plain text: these tokens must be added tokens")
        self.parameters = {tool["function"]["name"]: dict(tool["function"].get("parameters", {})) for tool in tools}
        """Name of a tool -> JSON Schema of its arguments."""

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end a turn: the one for it, and every special one that an agent has no business to write, of the format and
        of others."""
        return frozenset(number for number in self.special if self.names.get(number) not in self.allowed)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, none of them special."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def render(self, messages: Sequence[Message], system: str = "", *, spelled: bool = False) -> list[int]:
        """A whole conversation, up to the cue for the next turn, if its last message is not a turn.

        `spelled`: a turn without calls whose text spells one is written in the tokens that it spells, as whoever wrote it did: a
        call that nobody could read. Raises ValueError for a turn that the format can not say.
        """
        token_ids = self.open(system)
        results: list[Result] = []
        said = False
        for message in messages:
            if isinstance(message, Result):
                results.append(message)
                continue
            if results:
                token_ids += self.results(results)
                results = []
            elif said:
                token_ids += self.encoded(self._after())
            said = isinstance(message, Said)
            if not isinstance(message, Said):
                token_ids += self.user(message.text)
            elif spelled and not message.calls and any(mark in message.text for mark in self.spelled):
                token_ids += self._unread(message.text)
            else:
                token_ids += self.turn(message)
        return token_ids + (self.results(results) if results else [])

    def read(self, news: Sequence[User | Result], system: str = "") -> list[int]:
        """Render what a policy reads before its next turn: the start of a conversation, or the results of its calls."""
        users = [message.text for message in news if isinstance(message, User)]
        if users:
            return [*self.open(system), *self.user(*users)]
        return self.results([message for message in news if isinstance(message, Result)])

    def open(self, system: str = "") -> list[int]:
        """What stands before everything: system text and tools."""
        return self.encoded(self._system(system))

    def user(self, text: str) -> list[int]:
        """What a user says, and the cue for a turn."""
        return self.encoded([*self._user(text), *self._cue()])

    def following(self, text: str) -> list[int]:
        """What follows the last token of a turn without calls: what a user says to it, and the cue for the next turn."""
        return self.encoded([*self._after(), *self._user(text), *self._cue()])

    def results(self, results: Sequence[Result]) -> list[int]:
        """What follows the last token of a turn with calls: their results, and the cue for the next turn."""
        return self.encoded([*self._after(), *self._results(results), *self._cue()])

    def turn(self, said: Said) -> list[int]:
        """A turn as an agent would have written it, its last token included. Raises ValueError for one that can not be said."""
        if bad := [written.id for written in said.calls if isinstance(written.call, ToolError)]:
            raise ValueError(f"the call {bad[0]} is invalid: a turn with it is kept as the tokens it was written in")
        token_ids = self.encoded([*self._said(said), self.ids[self.end]])
        if _plainly(read := self.parse(token_ids)) != _plainly(said):
            raise ValueError(f"the format can not say this turn: {said!r} would be read as {read!r}"[:1000])
        return token_ids

    def _unread(self, text: str) -> list[int]:
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.allowed)))})", text)
        return self.encoded([*(self.ids[part] if part in self.allowed else part for part in parts), self.ids[self.end]])

    def parse(self, token_ids: Sequence[int]) -> Said:
        """A turn as it was sampled, its last token included, if it was not cut."""
        *body, last = token_ids or [-1]
        ended = last == self.ids[self.end]
        pieces = self._pieces(body if last in self.stop or last < 0 else [*body, last])
        said = self._read(pieces)
        calls = list(said.calls)
        if any(mark in said.text for mark in self.spelled):
            calls.append(Written(id=f"call_{len(calls)}", call=invalid("a call that is spelled out in the text")))
        if not ended:
            calls.append(
                Written(id=f"call_{len(calls)}", call=invalid("the turn was cut off, or ended by a wrong token"))
            )
        return Said(text=said.text, calls=tuple(calls))

    def kinds(self, token_ids: Sequence[int]) -> list[Kind]:
        """What each token of a turn is: before its first call thinking, from there on of calls; all final message without one."""
        calls = [place for place, token in enumerate(token_ids) if self.names.get(token) in self.allowed]
        if not calls:
            return [Kind.FINAL_MESSAGE] * len(token_ids)
        return [Kind.THINKING] * calls[0] + [Kind.TOOL_CALL] * (len(token_ids) - calls[0])

    def encoded(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of pieces; texts beside one another are encoded as one."""
        token_ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            else:
                token_ids += [*(self.encode(text) if text else []), piece]
                text = ""
        return token_ids + (self.encode(text) if text else [])

    def _pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """The other way round. Special tokens that are not the format's stay tokens too."""
        pieces: list[Piece] = []
        plain: list[int] = []
        for token in [*token_ids, -1]:
            if token in self.special or token < 0:
                if plain:
                    pieces.append(self.tokenizer.decode(plain, skip_special_tokens=False))
                plain = []
                pieces += [token] if token >= 0 else []
            else:
                plain.append(token)
        return pieces

    @abstractmethod
    def _system(self, system: str) -> list[Piece]: ...

    @abstractmethod
    def _user(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def _cue(self) -> list[Piece]: ...

    @abstractmethod
    def _after(self) -> list[Piece]:
        """What stands between the last token of a turn and the next message."""

    @abstractmethod
    def _results(self, results: Sequence[Result]) -> list[Piece]: ...

    @abstractmethod
    def _said(self, said: Said) -> list[Piece]: ...

    @abstractmethod
    def _read(self, pieces: Sequence[Piece]) -> Said: ...


def _plainly(said: Said) -> list[Any]:
    """What two turns are compared by: 1, 1.0 and True are three values."""
    calls = [written.call for written in said.calls]
    return [said.text, *((c.name, write_json(dict(c.arguments))) if isinstance(c, ToolCall) else None for c in calls)]


def invalid(message: str) -> ToolError:
    return ToolError("InvalidArguments", message)


def read_json(text: str) -> Any:
    """A JSON value. Raises ToolError for anything else, for NaN, names that stand twice, half characters."""
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"not JSON: {str(error)[:100]}") from None
    return value


def write_json(value: Any) -> str:
    """Raises ValueError for what JSON can not say."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a value of JSON: {error}") from None
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name stands twice")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer lacks the token {token} of this format")
    return int(found)


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy that finds no added token in a text, special or not, and takes text as it is."""
    held = json.loads(tokenizer.to_str()) | {"added_tokens": [], "normalizer": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(held | {"truncation": None, "padding": None}))
