"""The compact wire format for tiny models: one special token per role, one line per call.

    <|bos|><|user|>fix f.py: sum of items<|end|><|call|>read f.py<|end|><|out|>1def f(xs):\\n…<|end|><|call|>…

A turn of the agent is the tokens between `<|call|>` and `<|end|>`. It has one call, or several separated by `<|call|>`. A call is
a word, then each short required argument after a space, then each other required argument after the token `<|to|>`. The given
optional arguments are one JSON object after a last `<|to|>`. Numbers, Booleans, and strings without white space whose name ends
in path, file or directory are short; a `line` has at most six digits. Strings are written verbatim, other values as JSON. The
word is the tool's name, or a shorter one for the tools of tiny models:

    edit f.py 3<|to|>return x        search_replace f.py<|to|>old<|to|>new<|to|>{"replace_all": true}

A summary is requested by `<|user|>summary<|end|><|call|>`; in the answering turn, thinking ends at the last `<|to|>`.

Without a tool `finish`, a turn of text ends a conversation: `done`, or `done<|to|>I fixed it.` Tools and system texts are not
shown, because a model knows its tools and its purpose from training. So a system text is left out. It is neither refused nor put
before the user's text, where no model was trained to find it. Text that a model must read belongs in a user's message.

Rendering and parsing are inverse to each other; a turn that cannot be expressed raises ValueError. Any other output of the model
parses to a ToolError of kind InvalidArguments. Text is kept exactly: a special token that is spelled in a text remains text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Piece, Said, Written, read_json, write_json
from composer_nb.harness.agent.grammar import VERBATIM, alternatives, arguments_schema, json_rule, string_rule
from composer_nb.harness.agent.summary import QUERIES
from composer_nb.harness.rollout import Kind
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, invalid
from composer_nb.harness.tools.toolset import ToolSet

SPECIALS = ("<|pad|>", "<|bos|>", "<|user|>", "<|call|>", "<|out|>", "<|end|>", "<|to|>")
TO, DONE = "<|to|>", "done"
# Word of a tool, by its name and required arguments.
_WORDS = {
    "read_file path": "read",
    "edit_line path line text": "edit",
    "substitute path old new": "sub",
    "run_tests": "test",
    "finish": DONE,
}
_ZEROS = re.compile("^0+(?=[0-9])")


class _Form(NamedTuple):
    """The written form of a tool's calls.

    Attributes:
        types: Types of all arguments, including optional ones.
    """

    tool: str
    word: str
    short: tuple[str, ...]
    long: tuple[str, ...]
    head: re.Pattern[str]
    types: Mapping[str, Any]

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> _Form:
        """Return the form of a tool. Raises ValueError if its calls cannot be written."""
        tool, parameters, short, long = function["name"], function.get("parameters") or {}, list[str](), list[str]()
        try:
            [word] = tool.split()
            types = {name: schema.get("type") for name, schema in (parameters.get("properties") or {}).items()}
            required = list(dict.fromkeys(parameters.get("required") or ()))
            for name in required:
                path = types.get(name) == "string" and name.endswith(("path", "file", "directory"))
                (short if path or types.get(name) in ("integer", "number", "boolean") else long).append(name)
            word = _WORDS.get(" ".join([word, *required]), word)
            head = re.escape(word) + "".join(" ([0-9]{1,6})" if name == "line" else r" (\S+)" for name in short)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"tools: {tool!r}: a name without white space and a JSON schema are needed") from None
        return cls(tool, word, tuple(short), tuple(long), re.compile(head), types)

    def write(self, arguments: Mapping[str, Any], to: int) -> list[Piece]:
        """Return a call as pieces. Raises ValueError for arguments that JSON cannot express."""
        names = (*self.short, *self.long)
        # Missing arguments are found by parsing the turn.
        values = [(arguments.get(name), self.types.get(name)) for name in names]
        texts = [str(value) if kind == "string" else write_json(value) for value, kind in values]
        more = {name: value for name, value in arguments.items() if name not in names}
        texts += [write_json(more)] if more else []
        pieces: list[Piece] = [" ".join([self.word, *texts[: len(self.short)]])]
        for text in texts[len(self.short) :]:
            pieces += [to, text]
        return pieces

    def value(self, name: str, text: str) -> Any:
        """Parse an argument. Raises ToolError for text that is not a JSON value."""
        return text if self.types.get(name) == "string" else read_json(_ZEROS.sub("", text))

    def read(self, head: str, texts: Sequence[str]) -> ToolCall:
        """Parse a call. Raises ToolError for anything else."""
        names, extra, match = (*self.short, *self.long), len(texts) - len(self.long), self.head.fullmatch(head)
        if not match or extra not in (0, int(not self.types.keys() <= {*names})):
            raise invalid("bad call")
        pairs = zip(names, (*match.groups(), *texts), strict=False)
        arguments = {name: self.value(name, text) for name, text in pairs}
        more = read_json(texts[-1]) if extra else {}
        if not isinstance(more, dict) or arguments.keys() & more:
            raise invalid("bad call")
        return ToolCall(name=self.tool, arguments=arguments | more)


class CompactRenderer(ChatRenderer):
    """The compact format; see the module and `ChatRenderer`. The default of `tools` is the tools of tiny models."""

    tokens = SPECIALS
    allowed = frozenset((TO, "<|call|>"))
    closing = "<|end|>"
    around = ("<|out|>", "<|end|>")
    queries = MappingProxyType({**QUERIES, "self": "summary"})

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Raise ValueError also for tools whose calls would look alike or cannot be written."""
        super().__init__(tokenizer, ToolSet.tiny().schemas if tools is None else tools)
        self.pad, self.bos, self.user, self.call, self.out, self.end, self.to = (self.ids[token] for token in SPECIALS)
        if not all(added.special for n, added in tokenizer.get_added_tokens_decoder().items() if n in self.names):
            raise ValueError(f"the tokens {', '.join(SPECIALS)} must be special")
        forms = [_Form.of(tool["function"]) for tool in self.tools]
        self.ends = any(form.word == DONE != form.tool for form in forms)
        self._tools, self.words = {form.tool: form for form in forms}, {form.word: form for form in forms}
        if len(self.words.keys() | {DONE}) < len(forms) + (not self.ends):
            raise ValueError(f"tools: two turns would begin with the same word: {', '.join([DONE, *self.words])}")
        self.spelled = ("",) if self.ends else (TO,)  # where a tool ends conversations, a text alone is no turn

    def parse(self, token_ids: Sequence[int]) -> Said:
        """Parse a turn: its calls, or an error for each unreadable one; without a tool that ends conversations, also a text."""
        cuts = [position for position, token in enumerate(token_ids) if token == self.call]
        parts = [list(token_ids[a + 1 : b]) for a, b in zip([-1, *cuts], [*cuts, len(token_ids)], strict=True)]
        ended = parts[-1][-1:] == [self.end]
        read = [self._part(part, part if n < len(cuts) else part[:-1], ended) for n, part in enumerate(parts)]
        if len(read) == 1 and not read[0].calls:
            return read[0]
        calls = [part.calls[0].call if part.calls else invalid("bad call") for part in read]
        texts = [part.calls[0].text if part.calls else DONE for part in read]
        return Said(calls=tuple(Written(id=f"call_{n}", call=c, text=texts[n]) for n, c in enumerate(calls)))

    def kinds(self, token_ids: Sequence[int]) -> list[Kind]:
        """Return the kind of each token of a turn."""
        return [Kind.TOOL_CALL if self.ends or self.parse(token_ids).calls else Kind.FINAL_MESSAGE] * len(token_ids)

    def _thought(self, token_ids: Sequence[int]) -> int:
        # The last token is never thinking: it distinguishes a summary from a turn.
        return max((position + 1 for position, token in enumerate(token_ids[:-1]) if token == self.to), default=0)

    def unknown_call(self, turn: Said) -> tuple[str, str, str] | None:
        name = turn.calls[0].text.partition(" ")[0].removesuffix("<|end|>") if turn.calls else ""
        return (turn.calls[0].id, name, "{") if name.isidentifier() and name != DONE else None

    def _parse_so_far(self, token_ids: Sequence[int]) -> Sequence[Written]:
        calls = self.parse(token_ids).calls
        if self.call in token_ids and self.end not in token_ids:
            last = len(token_ids) - 1 - [*token_ids][::-1].index(self.call)  # what stands before it is complete
            whole = self.parse([*token_ids[:last], self.end]).calls
            calls = (*whole, *calls[len(whole) :])
        return calls

    def _begun_call(self, token_ids: Sequence[int], number: int) -> tuple[str, str, str] | None:
        """Return a call with its arguments so far, once its first line has ended."""
        texts = [""]
        for piece in self._call_pieces([self.call, *token_ids], number, "<|call|>"):  # its cue begins a call
            if piece == self.to:
                texts.append("")
            elif isinstance(piece, str):
                texts[-1] += piece
        form = self.words.get(texts[0].partition(" ")[0])
        if len(texts) < 2 or form is None or (head := form.head.fullmatch(texts[0])) is None:
            return None
        names, arguments, last = (*form.short, *form.long), dict[str, Any](), None
        values = [*head.groups(), *texts[1:-1]]
        with suppress(ToolError):
            for name, text in zip(names, values, strict=False):
                arguments[name] = form.value(name, text)
            if len(values) < len(names) and form.types.get(names[len(values)]) == "string":
                last = names[len(values)], texts[-1].rstrip("\ufffd")
        return f"call_{number}", form.tool, self.begun_json(arguments, last)

    def _rules(self, tools: Sequence[Mapping[str, Any]], text: bool, several: bool) -> Iterator[str]:
        """Yield the grammar's rules for these tools. Raises ValueError for a schema that the format cannot express."""
        yield "start: call" + " (<|call|> call)*" * several
        yield f' | "{DONE}" (<|to|> TEXT)?\n' if text and not self.ends else "\n"
        yield f"call: {alternatives(len(tools))}\n"
        yield "WORD: /[^\\s\\x1c-\\x1f]+/\nLINE: /[0-9]{1,6}/\n"
        for number, tool in enumerate(tools):
            form, parameters = self._tools[tool["name"]], arguments_schema(tool)
            parts, schemas = [json.dumps(form.word)], parameters.get("properties") or {}
            for name in (*form.short, *form.long):
                schema, short = schemas.get(name, {}), name in form.short
                limited = schema.keys() - VERBATIM or schema.keys() & {"enum", "const"}
                spaced = any(len(str(value).split()) != 1 for value in schema.get("enum", ()))
                if short and (spaced or (name == "line" and limited)):
                    raise ValueError(f"tools: {name}: this format has a number or a word here, and no other limits")
                if form.types.get(name) == "string":
                    value = string_rule(schema, name, "WORD" if short else "TEXT?")
                    if value.startswith("("):  # a lexeme: the parser takes no more than 2,000 alternatives
                        value, rule = f"ENUM{number}X{len(parts)}", value
                        yield f"{value}: {rule}\n"
                else:
                    value = "LINE" if name == "line" and short else json_rule(schema, parameters)
                parts += ['" "' if short else "<|to|>", value]
            if more := {name: schema for name, schema in schemas.items() if name not in (*form.short, *form.long)}:
                rest = {"type": "object", "properties": more, "required": [], "additionalProperties": False}
                parts += [f"(<|to|> {json_rule(rest, parameters)})?"]
            yield f"call{number}: {' '.join(parts)}\n"

    def _system(self, system: str) -> list[Piece]:
        return [self.bos]

    def _user(self, text: str) -> list[Piece]:
        return [self.user, text, self.end]

    def _cue(self) -> list[Piece]:
        return [self.call]

    def _after(self) -> list[Piece]:
        return []

    def _results(self, results: Sequence[CallResult]) -> list[Piece]:
        return [piece for result in results for piece in (self.out, result.text, self.end)]

    def _said(self, turn: Said) -> list[Piece]:
        if not turn.calls:
            return [DONE, self.to, turn.text] if turn.text else [DONE]
        pieces: list[Piece] = []
        for call in (written.call for written in turn.calls):
            if not isinstance(call, ToolCall) or call.name not in self._tools:
                raise ValueError(f"messages: the format has calls of {', '.join(self._tools)} alone")
            pieces += [self.call, *self._tools[call.name].write(call.arguments, self.to)]
        return pieces[1:]

    def _part(self, part: Sequence[int], body: Sequence[int], ended: bool) -> Said:
        """Return the call that is written as `part`, or the error of parsing it."""
        try:
            return self._read(self.pieces(body if ended else [self.pad]))
        except ToolError as error:
            text = self.tokenizer.decode(list(part), skip_special_tokens=False)
            return Said(calls=(Written(id="call_0", call=error, text=text),))

    def _read(self, pieces: Sequence[Piece]) -> Said:
        parts = [""]
        for piece in pieces:
            if isinstance(piece, str):
                parts[-1] += piece
            elif piece == self.to:
                parts.append("")
            else:
                raise invalid("bad call")
        head, *texts = parts
        if head == DONE and not self.ends and len(texts) < 2:
            return Said(text="".join(texts).strip())
        if (word := head.partition(" ")[0]) not in self.words:
            raise invalid("bad call")
        return Said(calls=(Written(id="call_0", call=self.words[word].read(head, texts)),))
