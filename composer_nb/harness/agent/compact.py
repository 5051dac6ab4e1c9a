"""The compact wire format for tiny models: one special token a role, one line a call.

    <|bos|><|user|>fix f.py: sum of items<|end|><|call|>read f.py<|end|><|out|>1def f(xs):\\n…<|end|><|call|>…

A turn of the agent is the tokens between `<|call|>` and `<|end|>`: a word for the tool; its required numbers and paths, each
after a space; every other required argument after `<|to|>`, texts as they are and the rest as JSON; and what may be left out, if
any of it is given, as one JSON object after a last `<|to|>`. Where no tool ends the rollout, the word `done` with a text does.

Rendering and parsing are inverse to one another on every call whose paths have no white space and whose numbers have at most six
digits; whatever else the model writes parses to a ToolError of kind InvalidArguments. Text is kept exactly; where it spells a
special token, that spelling is text and not the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import (
    Message,
    Result,
    Said,
    Schema,
    User,
    Written,
    invalid,
    read_json,
    token_id,
    write_json,
)
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.harness.tools.toolset import ToolSet

SPECIALS = ("<|pad|>", "<|bos|>", "<|user|>", "<|call|>", "<|out|>", "<|end|>", "<|to|>")
DONE = "done"
_WORDS = {"read_file": "read", "edit_line": "edit", "run_tests": "test", "finish": DONE}
_SHORT = {"integer": r"[0-9]{1,6}", "boolean": "true|false", "string": r"\S+"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How the calls of one tool are written: the names and types of its arguments."""

    name: str
    short: tuple[tuple[str, str], ...]
    long: tuple[tuple[str, str], ...]
    optional: frozenset[str]

    @classmethod
    def of(cls, tool: Schema) -> Shape:
        function = tool["function"]
        given, needed = function["parameters"]["properties"], function["parameters"].get("required", ())
        typed = [(name, given[name].get("type", "object")) for name in needed]
        short = [
            each for each in typed if each[1] in ("integer", "boolean") or re.search(r"(path|file|directory)$", each[0])
        ]
        rest = [each for each in typed if each not in short]
        return cls(function["name"], tuple(short), tuple(rest), frozenset(given) - frozenset(needed))


class CompactRenderer:
    """Renders instructions, calls and observations as token ids, and parses calls from them.

    Raises ValueError for a tokenizer that lacks a token of the format, or that always finds one in plain text.
    """

    tokens = SPECIALS

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Schema] | None = None) -> None:
        """`tools`: in OpenAI's form; by default those of tiny models."""
        self.tokenizer = tokenizer
        self.tools = tuple(ToolSet.tiny().schemas if tools is None else tools)
        shapes = [Shape.of(tool) for tool in self.tools]
        self.shapes = {_WORDS.get(shape.name, shape.name): shape for shape in shapes}
        self.pad, self.bos, self.user, self.call, self.out, self.end, self.to = (
            token_id(tokenizer, token) for token in SPECIALS
        )
        self.stop = frozenset((self.pad, self.bos, self.user, self.call, self.out, self.end))
        """Tokens that end the agent's turn: `<|end|>`, and every token that the agent must not write."""
        self._plain = Tokenizer.from_str(tokenizer.to_str())  # a copy: the caller's keeps finding special tokens
        self._plain.encode_special_tokens = True
        if found := {token for token in SPECIALS if tokenizer.token_to_id(token) in self.encode(token)}:
            raise ValueError(
                f"the tokenizer finds {', '.join(sorted(found))} in plain text: these tokens must be special"
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, none of them special: a spelled special token is encoded as characters."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def read(self, news: Sequence[User | Result], system: str = "") -> list[int]:
        """Render what a policy reads before its next turn. The format has one call a turn, and no system text."""
        [message] = news
        return self.prompt(message.text) if isinstance(message, User) else self.observation(message.text)

    def parse(self, token_ids: Sequence[int]) -> Said:
        """Read a turn: one call, or why it cannot be read; or a text without a call, which ends the rollout."""
        written = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        call: ToolCall | ToolError | str
        try:
            call = self._parsed(token_ids)
        except ToolError as error:
            call = error
        return (
            Said(text=call) if isinstance(call, str) else Said(calls=(Written(id="call_0", call=call, text=written),))
        )

    def turn(self, said: Said) -> list[int]:
        """Render a turn, its last token included. Raises ValueError for one that the format cannot express."""
        match said.calls:
            case []:
                body = [*self.encode(DONE), *([self.to, *self.encode(said.text)] if said.text else []), self.end]
            case [Written(call=ToolCall() as call)] if not said.text:
                body = self.render_call(call)
            case _:
                raise ValueError(f"the compact format has one call a turn, without a text: {said!r}"[:1000])
        read = self.parse(body)
        if _plainly(read) != _plainly(said):
            raise ValueError(f"the compact format cannot express this turn: {said!r} would be read as {read!r}"[:1000])
        return body

    def kinds(self, token_ids: Sequence[int]) -> list[Kind]:
        """Return the kind of each token of a turn."""
        return [Kind.TOOL_CALL] * len(token_ids)

    @property
    def last(self) -> int:
        """The token that ends a turn."""
        return self.end

    def render(self, messages: Sequence[Message], system: str = "", *, spelled: bool = False) -> list[int]:
        """Render a whole conversation; there is no system text. `spelled`: keep a turn without a call as it is written: it may be
        a call that could not be read. Raises ValueError for a turn that the format cannot express."""
        token_ids = [self.bos]
        for message in messages:
            match message:
                case User():
                    token_ids += self.following(message.text)
                case Result():
                    token_ids += self.observation(message.text)
                case Said() if spelled and not message.calls:
                    token_ids += [*self.encode(message.text), self.end]
                case Said():
                    token_ids += self.turn(message)
        return token_ids

    def results(self, results: Sequence[Result]) -> list[int]:
        """Render the result of a turn's call. Raises ValueError for several."""
        if len(results) != 1:
            raise ValueError("the compact format has one call a turn")
        return self.observation(results[0].text)

    def following(self, text: str) -> list[int]:
        """Render a user's text, and the cue for a turn."""
        return [self.user, *self.encode(text), self.end, self.call]

    def prompt(self, instruction: str) -> list[int]:
        return [self.bos, *self.following(instruction)]

    def observation(self, text: str) -> list[int]:
        """Render what follows the agent's `<|end|>`: the answer of the tool, and the cue for the next call."""
        return [self.out, *self.encode(text), self.end, self.call]

    def render_call(self, call: ToolCall) -> list[int]:
        """Render a call, `<|end|>` included. Raises ValueError for a tool or argument that is not there."""
        word = _WORDS.get(call.name, call.name)
        if (shape := self.shapes.get(word)) is None:
            raise ValueError(f"the compact format has no tool {call.name!r} here")
        rest = dict(call.arguments)
        if missing := [name for name, _ in (*shape.short, *shape.long) if name not in rest]:
            raise ValueError(f"{call.name}: {missing[0]} is missing")
        head = " ".join([word, *(_written(rest.pop(name), kind) for name, kind in shape.short)])
        parts = [_written(rest.pop(name), kind) for name, kind in shape.long]
        parts += [write_json(rest)] if rest else []
        return [*self.encode(head), *(token for part in parts for token in (self.to, *self.encode(part))), self.end]

    def parse_call(self, token_ids: Sequence[int]) -> ToolCall:
        """Parse a call, its final token included. Raises ToolError (InvalidArguments) for anything else."""
        if isinstance(read := self._parsed(token_ids), str):
            raise invalid("bad call")
        return read

    def _parsed(self, token_ids: Sequence[int]) -> ToolCall | str:
        *body, last = token_ids or [self.pad]
        if last != self.end:
            raise invalid("bad call")
        pieces: list[list[int]] = [[]]
        for token in body:
            if token == self.to:
                pieces.append([])
            else:
                pieces[-1].append(token)
        head, *parts = [self._text(piece) for piece in pieces]
        word, *short = head.split(" ")
        if word == DONE and not short and DONE not in self.shapes and len(parts) < 2:
            return "".join(parts)
        shape = self.shapes.get(word)
        if (
            shape is None
            or len(short) != len(shape.short)
            or len(parts) - len(shape.long) not in (0, bool(shape.optional))
        ):
            raise invalid("bad call")
        if not all(re.fullmatch(_SHORT[kind], text) for (_, kind), text in zip(shape.short, short, strict=True)):
            raise invalid("bad call")
        named = zip((*shape.short, *shape.long), (*short, *parts), strict=False)
        arguments = {name: _read(text, kind) for (name, kind), text in named}
        more = read_json(parts[-1]) if len(parts) > len(shape.long) else {}
        if not isinstance(more, dict) or not more.keys() <= shape.optional:
            raise invalid("bad call")
        return ToolCall(name=shape.name, arguments=arguments | more)

    def _text(self, token_ids: Sequence[int]) -> str:
        if any(token in self.stop for token in token_ids):
            raise invalid("bad call")
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)


def _plainly(said: Said) -> list[str]:
    return [said.text, *(each.call.json if isinstance(each.call, ToolCall) else "" for each in said.calls)]


def _written(value: Any, kind: str) -> str:
    """Return an argument as it is written."""
    return value if kind == "string" and isinstance(value, str) else write_json(value)


def _read(text: str, kind: str) -> Any:
    """Return an argument from its text. Raises ToolError."""
    return text if kind == "string" else read_json(text) if kind != "integer" else int(text)
