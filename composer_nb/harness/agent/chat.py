"""Conversations with tools as token ids: the common part of the wire formats of chat models.

The canonical form is a system text with tool schemas (OpenAI's), user texts, turns of text and calls, and results that name their
call. A renderer writes each of these as *pieces*, special tokens and plain texts, and encodes every piece by itself. So rendering
turn by turn gives the same ids as rendering at once: a sampled turn stays as sampled, and the next message begins at a special
token, where a cache can continue. Text is encoded without special or added tokens and without normalization, so text that spells
a token stays text, byte for byte.

A turn is parsed from ids, so that a spelled token is never taken for a real one. An invalid call becomes a ToolError of kind
InvalidArguments in its place: no output of a model is dropped. A call that a format cannot express is found by parsing the
rendered turn, and raises ValueError.
"""

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, Self

from tokenizers import Tokenizer

from composer_nb.harness.agent.grammar import Grammar
from composer_nb.harness.agent.summary import OPENS, QUERIES
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, invalid

Schema = Mapping[str, Any]
Piece = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One call of a turn: its id as the model wrote it, and the call or the error of parsing it.

    Attributes:
        text: The original text of a call that cannot be parsed, if it is kept.
    """

    id: str
    call: ToolCall | ToolError
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A turn of the agent.

    Attributes:
        text: Text outside the calls, without surrounding white space.
    """

    text: str = ""
    calls: tuple[Written, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The result of a call. Results of one turn are in the order of its calls."""

    id: str
    text: str


Message = User | Said | CallResult
Talk = Sequence[Message]


class ChatRenderer(ABC):
    """Renders conversations as token ids, and parses turns from them.

    Raises ValueError for a tokenizer that lacks a token of the format, or always finds one in plain text.

    Attributes:
        tokens: Special tokens of the format.
        allowed: Special tokens that may occur in a turn before its end.
        closing: Special token that ends a turn.
        around: Special tokens before and after the result of a call.
        spelled: Spelled beginnings of a call. A text with one of them is a failed call.
        queries: Text that requests a summary, by kind of summary.
    """

    tokens: tuple[str, ...]
    allowed: frozenset[str]
    closing: str
    around: tuple[str, str]
    spelled: tuple[str, ...]
    queries: Mapping[str, str] = QUERIES

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Schema] = ()) -> None:
        self.tokenizer, self.tools = tokenizer, tuple(tools)
        numbers = {token: tokenizer.token_to_id(token) for token in self.tokens}
        if missing := [token for token, number in numbers.items() if number is None]:
            raise ValueError(f"the tokenizer lacks {missing[0]}; composer-nb convert MODEL DIR --format NAME adds it")
        self.ids = {token: number for token, number in numbers.items() if number is not None}
        self.end = self.ids[self.closing]
        self.names = {number: token for token, number in self.ids.items()}
        added = tokenizer.get_added_tokens_decoder()
        # Tokens that are not text. Added tokens that are not special, such as `<think>`, encode text.
        self.special = frozenset(self.names) | {number for number, token in added.items() if token.special}
        self._plain = _without_added_tokens(tokenizer)
        if plain_tokens := [token for token in self.tokens if self.ids[token] in self.encode(token)]:
            raise ValueError(f"the tokenizer finds {', '.join(plain_tokens)} in plain text: they must be added tokens")
        # JSON Schema of a tool's arguments, by name of the tool.
        self.parameters = {tool["function"]["name"]: dict(tool["function"].get("parameters", {})) for tool in tools}

    def offering(self, tools: Sequence[Schema]) -> Self:
        """Return this format with other tools."""
        return type(self)(self.tokenizer, tools)

    @property
    def stop(self) -> frozenset[int]:
        """Tokens that end a turn: the end token, and every special token that an agent must not write."""
        return frozenset(number for number in self.special if self.names.get(number) not in self.allowed)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, none of them special. Raises ValueError for a lone surrogate."""
        text.encode()
        # Unlike `encode`, this lets other threads run, so that a long text of one request does not stop a server.
        return list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def render(self, messages: Talk, system: str = "", *, spelled: bool = False, after: bool = False) -> list[int]:
        """Render a whole conversation, up to the cue for the next turn if its last message is not a turn. `after`: render
        messages that follow a turn, without the start of a conversation.

        `spelled`: if a turn has no calls and its text spells one, render the spelled tokens, since it was an unreadable call.
        Raises ValueError for a turn that the format cannot express.
        """
        token_ids = [] if after else self.open(system)
        for turn, same in groupby(messages, lambda message: isinstance(message, Said)):
            if not turn:
                token_ids += self.encoded([*(self._after() if after else ()), *self._news(same), *self._cue()])
            for number, message in enumerate(same):
                assert isinstance(message, Said)
                token_ids += self.encoded([*self._after(), *self._cue()]) if number or after else []
                missed = spelled and not message.calls and any(mark in message.text for mark in self.spelled)
                token_ids += self.spell(message.text) if missed else self.turn(message)
            after = turn
        return token_ids

    def read(self, news: Sequence[User | CallResult], system: str = "") -> list[int]:
        """Render the input of the next turn: the start of a conversation, or the results of the calls before."""
        return self.render(news, system, after=any(isinstance(message, CallResult) for message in news))

    def open(self, system: str = "") -> list[int]:
        """Render the start of a conversation: system text and tools."""
        return self.encoded(self._system(system))

    def ask(self, text: str) -> list[int]:
        """Render a user's text and the cue for a turn."""
        return self.encoded([*self._user(text), *self._cue()])

    def _news(self, messages: Iterable[Message]) -> Iterator[Piece]:
        """Yield the pieces between two turns."""
        for kind, same in groupby(messages, type):
            if kind is CallResult:
                yield from self._results([item for item in same if isinstance(item, CallResult)])
            else:
                for item in same:
                    yield from self._user(item.text)

    def answers(self, news: Sequence[User | CallResult]) -> list[int]:
        """Render what answered a turn and is followed by a user's text (`ask`), not by a turn."""
        return self.encoded([*self._after(), *self._news(news)])

    def summary(self, token_ids: Sequence[int]) -> tuple[str, list[Kind]]:
        """Return the summary in a turn that answers a query for one, and the kind of each token: thinking, then summary."""
        thinking = self._thought(token_ids)
        text = self.tokenizer.decode([token for token in token_ids[thinking:] if token not in self.special])
        return text.strip(), [Kind.THINKING] * thinking + [Kind.SUMMARY] * (len(token_ids) - thinking)

    def _thought(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens before a summary: all up to the mark, or none without a mark."""

        def told(count: int) -> bool:
            return OPENS in self.tokenizer.decode(list(token_ids[:count]), skip_special_tokens=False)

        return bisect_left(range(len(token_ids)), True, key=told) if told(len(token_ids) - 1) else 0

    def turn(self, turn: Said) -> list[int]:
        """Render a turn, including its last token. Raises ValueError for a turn that the format cannot express."""
        if bad := [written.id for written in turn.calls if isinstance(written.call, ToolError)]:
            raise ValueError(f"the call {bad[0]} is invalid: keep a turn with it as the tokens it was written in")
        token_ids = self.encoded([*self._said(turn), self.end])
        if _plainly(read := self.parse(token_ids)) != _plainly(turn):
            raise ValueError(f"the format cannot express this turn: {turn!r} would be parsed as {read!r}"[:1000])
        return token_ids

    def spell(self, text: str) -> list[int]:
        """Render a turn from text in which the allowed tokens are spelled."""
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.allowed)))})", text)
        return self.encoded([*(self.ids[part] if part in self.allowed else part for part in parts), self.end])

    def parse(self, token_ids: Sequence[int]) -> Said:
        """Parse a sampled turn, with its last token unless it was cut."""
        *body, last = token_ids or [-1]
        ended = last == self.end
        pieces = self.pieces(body if last in self.stop or last < 0 else [*body, last])
        turn = self._read(pieces)
        calls = list(turn.calls)
        if any(mark in turn.text for mark in self.spelled):
            calls.append(unread(len(calls), "a call that is spelled out in the text"))
        if not ended:
            calls.append(unread(len(calls), "the turn was cut off, or ended by a wrong token"))
        return Said(text=turn.text, calls=tuple(calls))

    def kinds(self, token_ids: Sequence[int]) -> list[Kind]:
        """Return the kind of each token of a turn: thinking, then tool call; final message if it has no call."""
        calls = [position for position, token in enumerate(token_ids) if self.names.get(token) in self.allowed]
        if not calls:
            return [Kind.FINAL_MESSAGE] * len(token_ids)
        return [Kind.THINKING] * calls[0] + [Kind.TOOL_CALL] * (len(token_ids) - calls[0])

    def encoded(self, pieces: Iterable[Piece]) -> list[int]:
        """Return the ids of pieces; adjacent texts are encoded as one."""
        token_ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            else:
                token_ids += [*(self.encode(text) if text else []), piece]
                text = ""
        return token_ids + (self.encode(text) if text else [])

    def pieces(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces of ids: the inverse of `encoded`. Special tokens of other formats stay tokens too."""
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

    def grammar(self, names: Sequence[str], *, text: bool, several: bool) -> Grammar:
        """Return the grammar of turns that call these tools. `text`: a turn may also begin with a text or consist of one.
        `several`: it may have more than one call. Raises ValueError for a schema that this format does not support."""
        tools = [tool["function"] for tool in self.tools if tool["function"]["name"] in names]
        return Grammar.of_rules(self.tokenizer, "".join(self._rules(tools, text, several)), self.tokens, self.end)

    def calls_so_far(self, token_ids: Sequence[int]) -> list[tuple[str, str, str]]:
        """Return id, name and JSON of each call of a turn that need not have ended: all up to the first that cannot be read, of
        which the JSON is what is certain of it, if its name is."""
        calls: list[tuple[str, str, str]] = []
        for number, written in enumerate(self._parse_so_far(token_ids)):
            parts = self._call_so_far(token_ids, number, written)
            calls += [parts] if parts else []
            if parts is None or isinstance(written.call, ToolError):
                break
        return calls

    def unknown_call(self, turn: Said) -> tuple[str, str, str] | None:
        """Return the call of a tool that was not offered, where `calls_so_far` cannot tell its name."""
        return None

    def _parse_so_far(self, token_ids: Sequence[int]) -> Sequence[Written]:
        return self.parse(token_ids).calls

    def _call_so_far(self, token_ids: Sequence[int], number: int, written: Written) -> tuple[str, str, str] | None:
        if isinstance(written.call, ToolCall):
            return written.id, written.call.name, json.dumps(dict(written.call.arguments))
        return self._begun_call(token_ids, number)

    def _call_pieces(self, token_ids: Sequence[int], number: int, opening: str) -> list[Piece]:
        """Return the pieces between the token that begins a call and that of the next one."""
        starts = [position for position, token in enumerate(token_ids) if token == self.ids[opening]]
        [start, end] = [*starts, *[len(token_ids)] * (number + 2)][number : number + 2]
        return self.pieces(token_ids[start + 1 : end])

    @staticmethod
    def begun_json(members: Mapping[str, Any], last: tuple[str, str] | None) -> str:
        """Return the beginning of a JSON object, up to within the text of its last member."""
        text = json.dumps(dict(members))[:-1]
        if last is None:
            return text
        return f"{text}{', ' if members else ''}{json.dumps(last[0])}: {json.dumps(last[1])[:-1]}"

    @abstractmethod
    def _begun_call(self, token_ids: Sequence[int], number: int) -> tuple[str, str, str] | None:
        """Return id, name and the beginning of the JSON of a call that cannot be read; None without a name. It only grows."""

    @abstractmethod
    def _rules(self, tools: Sequence[Schema], text: bool, several: bool) -> Iterator[str]:
        """Yield the grammar of turns that call these tools, in which `TEXT` is any text."""

    @abstractmethod
    def _system(self, system: str) -> list[Piece]: ...

    @abstractmethod
    def _user(self, text: str) -> list[Piece]: ...

    @abstractmethod
    def _cue(self) -> list[Piece]: ...

    @abstractmethod
    def _after(self) -> list[Piece]:
        """Return the pieces between the last token of a turn and the next message."""

    @abstractmethod
    def _results(self, results: Sequence[CallResult]) -> list[Piece]: ...

    @abstractmethod
    def _said(self, turn: Said) -> list[Piece]: ...

    @abstractmethod
    def _read(self, pieces: Sequence[Piece]) -> Said: ...


def unread(number: int, why: str) -> Written:
    """Return the call of this number in a turn, which cannot be read."""
    return Written(id=f"call_{number}", call=invalid(why))


def _plainly(turn: Said) -> list[Any]:
    """Return a form in which turns can be compared; 1, 1.0 and True differ."""
    calls = [written.call for written in turn.calls]
    return [turn.text, *(isinstance(c, ToolCall) and (c.name, write_json(sorted(c.arguments.items()))) for c in calls)]


def read_json(text: str) -> Any:
    """Parse a JSON value. Raises ToolError for other text, including NaN, repeated names and lone surrogates."""
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise invalid(f"not JSON: {str(error)[:100]}") from None
    return value


def write_json(value: Any) -> str:
    """Return a value as JSON. Raises ValueError for a value that JSON cannot express."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not a value of JSON: {error}") from None
    return text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is repeated")
    return dict(pairs)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


@lru_cache(maxsize=16)  # the library leaks a few kilobytes per copy, and a server makes a renderer for each request
def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that finds no added token in a text, special or not, and does not normalize."""
    state = json.loads(tokenizer.to_str()) | {"added_tokens": [], "normalizer": None, "post_processor": None}
    return Tokenizer.from_str(json.dumps(state | {"truncation": None, "padding": None}))
