"""The wire format of Kimi K2.

    <|im_system|>tool_declare<|im_middle|>[schemas]<|im_end|><|im_system|>system<|im_middle|>…<|im_end|>
    <|im_user|>user<|im_middle|>…<|im_end|><|im_assistant|>assistant<|im_middle|>text<|tool_calls_section_begin|>
    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"path": "f.py"}<|tool_call_end|>
    <|tool_calls_section_end|><|im_end|><|im_system|>tool<|im_middle|>## Return of functions.NAME:0\\n…<|im_end|>

(without the line breaks). A call's id is `functions.NAME:NUMBER`, numbered over the conversation. The model writes the id, and
the result repeats it. Arguments are one JSON object, so every call can be expressed.

As in Moonshot's guidance, the prefix `functions.` may be missing.
Reference: docs/tool_call_guidance.md of the model, and its chat template.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Piece, Said, Written, read_json, unread, write_json
from composer_nb.harness.agent.grammar import SPELLING, alternatives, check_name
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, invalid

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENT, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ID = re.compile(r"(?:functions\.)?([A-Za-z_][\w.-]*):(\d{1,9})", re.A)


class KimiRenderer(ChatRenderer):
    """Kimi's format; see the module and `ChatRenderer`."""

    tokens = (
        *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
        *(SECTION, SECTION_END, CALL, ARGUMENT, CALL_END),
    )
    allowed = frozenset((SECTION, SECTION_END, CALL, ARGUMENT, CALL_END))
    closing = "<|im_end|>"
    around = ("<|im_middle|>", "<|im_end|>")
    spelled = (SECTION, CALL)

    def _message(self, role: str, name: str, text: str) -> list[Piece]:
        return [self.ids[f"<|im_{role}|>"], name, self.ids["<|im_middle|>"], text, self.ids["<|im_end|>"]]

    def _system(self, system: str) -> list[Piece]:
        declared = json.dumps(list(self.tools), ensure_ascii=False, separators=(",", ":"))
        tools = self._message("system", "tool_declare", declared) if self.tools else []
        return [*tools, *(self._message("system", "system", system) if system else [])]

    def _user(self, text: str) -> list[Piece]:
        return self._message("user", "user", text)

    def _cue(self) -> list[Piece]:
        return [self.ids["<|im_assistant|>"], "assistant", self.ids["<|im_middle|>"]]

    def _after(self) -> list[Piece]:
        return []

    def _results(self, results: Sequence[CallResult]) -> list[Piece]:
        return [
            piece
            for result in results
            for piece in self._message("system", "tool", f"## Return of {result.id}\n{result.text}")
        ]

    def _said(self, turn: Said) -> list[Piece]:
        pieces: list[Piece] = [turn.text]
        for written in turn.calls:
            assert isinstance(written.call, ToolCall)
            arguments = write_json(dict(written.call.arguments))
            pieces += [self.ids[CALL], written.id, self.ids[ARGUMENT], arguments, self.ids[CALL_END]]
        return [turn.text, self.ids[SECTION], *pieces[1:], self.ids[SECTION_END]] if turn.calls else pieces

    def _read(self, pieces: Sequence[Piece]) -> Said:
        """Parse the pieces of a turn: its text, and its calls, with an error for each that cannot be read."""
        text, calls = "", list[Written]()
        names = [self.names.get(piece, "?") if isinstance(piece, int) else "" for piece in pieces]
        inside, at = False, 0
        while at < len(pieces):
            piece, name = pieces[at], names[at]
            if name == "" and not inside:
                text += str(piece)
            elif name in (SECTION, SECTION_END) and inside == (name == SECTION_END):
                inside = not inside
            elif name == CALL and inside:
                stop = next((n for n in range(at, len(names)) if names[n] in (CALL_END, SECTION_END)), len(names))
                ended = stop < len(names) and names[stop] == CALL_END
                calls.append(self._written(pieces[at + 1 : stop], names[at + 1 : stop], ended, len(calls)))
                at = stop if ended else stop - 1
            elif name or str(piece).strip():
                calls.append(unread(len(calls), "tokens of a call where there is none"))
            at += 1
        if inside:
            calls.append(unread(len(calls), "the section of calls has no end"))
        return Said(text=text.strip(), calls=tuple(calls))

    def _call_so_far(self, token_ids: Sequence[int], number: int, written: Written) -> tuple[str, str, str] | None:
        """Return a call with its arguments as the model wrote them, without a last brace if they cannot be read."""
        match self._call_pieces(token_ids, number, CALL):
            case [str(id), mark, str(text), *_] if mark == self.ids[ARGUMENT] and (match := ID.fullmatch(id.strip())):
                if not isinstance(written.call, ToolCall):
                    text = _beginning(text.rstrip("\ufffd")).rstrip().removesuffix("}")
                return (id.strip(), match[1], text) if text else None
        return None

    def _begun_call(self, token_ids: Sequence[int], number: int) -> tuple[str, str, str] | None:
        return self._call_so_far(token_ids, number, unread(number, ""))

    def _rules(self, tools: Sequence[Mapping[str, Any]], text: bool, several: bool) -> Iterator[str]:
        """Yield the grammar's rules for these tools. Raises ValueError for a schema that is no object's."""
        calls = f"<|tool_calls_section_begin|> call{' (call)*' * several} <|tool_calls_section_end|>"
        yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
        yield f"call: <|tool_call_begin|> ({alternatives(len(tools))}) <|tool_call_end|>\n"
        for number, tool in enumerate(tools):
            check_name(ID, f"functions.{tool['name']}:0", tool["name"])
            schema = {"additionalProperties": False, "type": "object", **(tool.get("parameters") or {})}
            if schema["type"] != "object":
                raise ValueError("tools: arguments are an object")
            schema["x-guidance"] = SPELLING
            head = json.dumps(f"functions.{tool['name']}:")
            yield f"call{number}: {head} /[0-9]{{1,9}}/ <|tool_call_argument_begin|> %json {json.dumps(schema)}\n"

    def _written(self, pieces: Sequence[Piece], names: Sequence[str], ended: bool, number: int) -> Written:
        """Parse the pieces of one call; an error, not raised, for one that cannot be read."""
        if not ended or list(names) not in (["", ARGUMENT, ""], ["", ARGUMENT]):
            return unread(number, "a call is an id, arguments and an end")
        call_id = str(pieces[0]).strip()
        match = ID.fullmatch(call_id)
        if match is None:
            return unread(number, f"{call_id[:80]!r} is not the id of a call: functions.NAME:NUMBER")
        try:
            arguments = read_json(str(pieces[2]) if len(pieces) > 2 else "")
        except ToolError as error:
            return Written(id=call_id, call=error)
        if not isinstance(arguments, dict):
            return Written(id=call_id, call=invalid("arguments are one JSON object"))
        return Written(id=call_id, call=ToolCall(name=match[1], arguments=arguments))


def _beginning(text: str) -> str:
    """Return the part of a text with which a JSON object can begin."""

    def wrong(size: int) -> bool:
        with suppress(ValueError):
            return not isinstance(from_json(text[:size], allow_partial=True), dict)
        return bool(text[:size].strip())

    return text if not wrong(len(text)) else text[: bisect_left(range(len(text)), True, key=wrong) - 1]
