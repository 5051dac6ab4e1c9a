"""The wire format of Qwen3-Coder.

    <|im_start|>system\\n…# Tools…<|im_end|>\\n<|im_start|>user\\n…<|im_end|>\\n<|im_start|>assistant\\ntext\\n\\n
    <tool_call>\\n<function=NAME>\\n<parameter=path>\\nf.py\\n</parameter>\\n</function>\\n</tool_call>
    <|im_end|>\\n<|im_start|>user\\n<tool_response>\\n…\\n</tool_response>\\n

Only `<tool_call>` and the like are tokens, also in the system message; functions and parameters are text. Values are parsed by
their schema: strings verbatim, other values as JSON (and Python's True, False and None, which the model's template writes). If a
schema admits strings and other types, a text that parses as another type has that type; otherwise it is a string.

A value ends at the first `</parameter>` that is followed by a parameter or the function's end. A value that cannot be expressed,
such as a string that contains such an end, raises ValueError when it is rendered. Parsing is lenient: line breaks around a value
may be missing.

The sentences that introduce the tools are this project's; tags and layout are the model's.
Reference: the model's chat template and tool parser; llama.cpp #15162 for its limits.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Piece, Said, Written, read_json, unread, write_json
from composer_nb.harness.agent.grammar import alternatives, arguments_schema, check_name, json_rule, string_rule
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, invalid

START, END, CALL, CALL_END = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"
FUNCTION = re.compile(r"\s*<function=([^\n<>]+)>\n?")
PARAMETER = re.compile(
    r"\s*<parameter=([^\n<>]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^\n<>]+>|</function>))", re.S
)
_FUNCTION_END = re.compile(r"\s*</function>\s*\Z")
_BEGUN = re.compile(r"\s*<parameter=([^\n<>]+)>\n?(.*)", re.S)
_CLOSING = "\n</parameter>"
# The end of a parameter, as far as it is written.
_CLOSED = re.compile(r"\n?</parameter>\s*(?:<[^\n<>]*)?\Z")
_WORDS = {"True": "true", "False": "false", "None": "null"}
KINDS = frozenset(("string", "integer", "number", "boolean", "array", "object", "null"))
HOW = f"""

To use a tool, write after anything else that you have to say:

{CALL}
<function=tool_name>
<parameter=parameter_name>
value
</parameter>
</function>
{CALL_END}

A value may have several lines. Give all required parameters. Several calls may follow one another."""


class QwenRenderer(ChatRenderer):
    """Qwen's format; see the module and `ChatRenderer`. The id of a call is its index in the turn: `call_0`, …"""

    tokens = (START, END, CALL, CALL_END, RESPONSE, RESPONSE_END)
    allowed = frozenset((CALL, CALL_END))
    closing = END
    around = (RESPONSE, RESPONSE_END)
    spelled = (CALL, CALL_END, "<function=")

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tokenizer, tools)
        self.parameters = {name: _resolved(parameters) for name, parameters in self.parameters.items()}

    def _message(self, role: str, *pieces: Piece) -> list[Piece]:
        return [self.ids[START], f"{role}\n", *pieces, self.ids[END], "\n"]

    def _system(self, system: str) -> list[Piece]:
        if not self.tools:
            return self._message("system", system) if system else []
        tools = "\n".join(_declared(tool["function"]) for tool in self.tools)
        before, (call, after) = HOW.split(CALL)[0], HOW.split(CALL)[1].split(CALL_END)
        head = f"{system}\n\n# Tools\n\n<tools>\n{tools}\n</tools>{before}"
        return self._message("system", head, self.ids[CALL], call, self.ids[CALL_END], after)

    def _user(self, text: str) -> list[Piece]:
        return self._message("user", text)

    def _cue(self) -> list[Piece]:
        return [self.ids[START], "assistant\n"]

    def _after(self) -> list[Piece]:
        return ["\n"]

    def _results(self, results: Sequence[CallResult]) -> list[Piece]:
        pieces = [p for r in results for p in (self.ids[RESPONSE], f"\n{r.text}\n", self.ids[RESPONSE_END], "\n")]
        return self._message("user", *pieces)

    def _said(self, turn: Said) -> list[Piece]:
        pieces: list[Piece] = [turn.text + "\n\n" if turn.text and turn.calls else turn.text]
        for number, written in enumerate(turn.calls):
            assert isinstance(written.call, ToolCall)
            arguments = written.call.arguments.items()
            values = "".join(f"<parameter={name}>\n{_spelled(value)}\n</parameter>\n" for name, value in arguments)
            body = f"\n<function={written.call.name}>\n{values}</function>\n"
            pieces += ["\n" if number else "", self.ids[CALL], body, self.ids[CALL_END]]
        return pieces

    def _read(self, pieces: Sequence[Piece]) -> Said:
        """Parse the pieces of a turn: its text, and its calls, with an error for each that cannot be read."""
        text, calls, at = "", list[Written](), 0
        while at < len(pieces):
            piece = pieces[at]
            if isinstance(piece, str):
                text += piece
            elif piece == self.ids[CALL]:
                stop = next((n for n in range(at + 1, len(pieces)) if isinstance(pieces[n], int)), len(pieces))
                closed = stop < len(pieces) and pieces[stop] == self.ids[CALL_END]
                body = "".join(map(str, pieces[at + 1 : stop]))
                calls.append(Written(id=f"call_{len(calls)}", call=self._call(body, closed)))
                at = stop if closed else stop - 1
            else:
                calls.append(unread(len(calls), "a token of a call where there is none"))
            at += 1
        return Said(text=text.strip(), calls=tuple(calls))

    def _begun_call(self, token_ids: Sequence[int], number: int) -> tuple[str, str, str] | None:
        """Return a call with its arguments so far. A string comes as it is written, any other value at its end."""
        [piece, *_] = [*self._call_pieces(token_ids, number, CALL), ""]
        body = piece.rstrip("\ufffd") if isinstance(piece, str) else ""
        if (head := FUNCTION.match(body)) is None:
            return None
        schemas = self.parameters.get(head[1], {}).get("properties", {})
        arguments, at, last = dict[str, Any](), head.end(), None
        with suppress(ToolError):
            while (match := PARAMETER.match(body, at)) and match[1] not in arguments:
                arguments[match[1]] = read_value(match[2], kinds(schemas.get(match[1], {"type": "string"})))
                at = match.end()
            begun = _BEGUN.match(body, at)
            if begun and begun[1] not in arguments and kinds(schemas.get(begun[1], {"type": "string"})) == {"string"}:
                if (value := _CLOSED.sub("", begun[2])) == begun[2]:  # a part of its end is no part of the value
                    ends = (tag[:size] for size in range(len(_CLOSING), 0, -1) for tag in (_CLOSING, _CLOSING[1:]))
                    value = value.removesuffix(next((end for end in ends if value.endswith(end)), ""))
                last = begun[1], value
        return f"call_{number}", head[1], self.begun_json(arguments, last)

    def _rules(self, tools: Sequence[Mapping[str, Any]], text: bool, several: bool) -> Iterator[str]:
        """Yield the grammar's rules for these tools. Raises ValueError for a schema that the format cannot express."""
        calls = f"call{' (NEWLINE call)*' * several}"
        yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
        yield f"call: <tool_call> ({alternatives(len(tools))}) </tool_call>\n"
        yield 'value[lazy]: /(?s:.*)<\\/parameter>/\nNEWLINE: "\\n"\n'
        for number, tool in enumerate(tools):
            parameters, parts = arguments_schema(tool), list[str]()
            required = parameters.get("required") or ()
            schemas = {**{key: {} for key in required}, **self.parameters[tool["name"]].get("properties", {})}
            check_name(FUNCTION, f"<function={tool['name']}>", tool["name"])
            for index, (name, schema) in enumerate(schemas.items()):
                check_name(FUNCTION, f"<function={name}>", name)
                value, rule = _value_rule(schema, parameters, name, f"VALUE{number}X{index}")
                yield rule
                part = f'{json.dumps(f"<parameter={name}>{chr(10)}")} {value} "\\n"'
                parts.append(part if name in required else f"({part})?")
            head, close = json.dumps(f"\n<function={tool['name']}>\n"), json.dumps("</function>\n")
            yield f"call{number}: {head} {' '.join(parts)} {close}\n"

    def _call(self, body: str, closed: bool) -> ToolCall | ToolError:
        """Parse the text between the marks of a call; an error, not raised, for one that cannot be read."""
        head = FUNCTION.match(body)
        if not closed or head is None:
            return invalid(f"a call is {CALL}, <function=NAME>, its parameters, </function>, {CALL_END}")
        schemas: Mapping[str, Any] = self.parameters.get(head[1], {}).get("properties", {})
        arguments: dict[str, Any] = {}
        at = head.end()
        while match := PARAMETER.match(body, at):
            name, value = match[1], match[2]
            if name in arguments:
                return invalid(f"the parameter {name[:80]} is repeated")
            try:
                arguments[name] = read_value(value, kinds(schemas.get(name, {"type": "string"})))
            except ToolError as error:
                return invalid(f"{name[:80]}: {error}")
            at = match.end()
        if not _FUNCTION_END.match(body, at):
            return invalid("a parameter is <parameter=NAME>, its value, </parameter>; after the last comes </function>")
        return ToolCall(name=head[1], arguments=arguments)


def _value_rule(schema: Mapping[str, Any], parameters: Mapping[str, Any], name: str, rule: str) -> tuple[str, str]:
    """Return the pattern between the tags of a parameter, including its end, and the rule `rule` if needed. Raises ValueError for
    a schema that is not supported in Qwen's format."""
    literals, json_rules, is_any_text, types = list[str](), list[str](), False, kinds(schema)
    options = schema.get("anyOf") or schema.get("oneOf") or [schema]
    for option in options:
        if "enum" in option or "const" in option:
            for value in option.get("enum", [option.get("const")]):
                text = value if isinstance(value, str) else write_json(value)
                match = PARAMETER.match(f"<parameter=a>\n{text}\n</parameter>\n</function>")
                if match is None or match[2] != text or write_json(read_value(text, types)) != write_json(value):
                    raise ValueError(f"tools: {name}: this format cannot tell {write_json(value)[:80]} from others")
                literals.append(json.dumps(text))
        elif "string" in kinds(option):
            is_any_text = True
            string_rule(option, name, "")
        else:
            json_rules.append(json_rule(option, parameters))
    if is_any_text:  # any text is a string, but text that parses as another type must be of that type
        for option in options if literals or json_rules else ():
            string_rule(option, name, "")
        return "value", ""
    end = json.dumps("\n</parameter>")
    branches = [f"{other} {end}" for other in json_rules] + [rule] * bool(literals)
    return f"({' | '.join(branches)})", f"{rule}: ({' | '.join(literals)}) {end}\n" if literals else ""


def _resolved(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of arguments with references resolved in the schemas of parameters and their combinations."""

    def found(schema: Any) -> dict[str, Any]:
        for _ in range(9):  # a reference may lead to itself
            [only, *more] = schema.get("allOf", [schema]) if isinstance(schema, Mapping) else [{}]
            named = str(only.get("$ref", "")).split("/") if not more and isinstance(only, Mapping) else []
            target = parameters.get(named[1], {}).get(named[2]) if len(named) == 3 else None
            if target is None:
                return {**schema} if isinstance(schema, Mapping) else {}
            schema = target
        return {}

    schemas = {name: found(schema) for name, schema in (parameters.get("properties") or {}).items()}
    for schema in schemas.values():
        schema |= {key: [*map(found, schema[key])] for key in ("anyOf", "oneOf") if key in schema}
    return {**parameters, "properties": schemas} if schemas else {**parameters}


def kinds(schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema admits, from its `type`, `anyOf`, `oneOf`, `enum` or `const`; all types without one."""
    if not isinstance(schema, Mapping):
        return KINDS
    if "type" in schema:
        named = schema["type"]
        return frozenset([named] if isinstance(named, str) else named) & KINDS
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return frozenset(kind for option in schema[key] for kind in kinds(option))
    if "enum" in schema or "const" in schema:
        return frozenset(_kind(value) for value in schema.get("enum", [schema.get("const")]))
    return KINDS


def read_value(text: str, types: frozenset[str]) -> Any:
    """Parse the value of a parameter by the `kinds` of its schema. Raises ToolError for a value of another type."""
    if types == {"string"}:
        return text
    try:
        value = read_json(_WORDS.get(text.strip(), text))
        kind = _kind(value)
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return value
    except ToolError:
        pass
    if "string" in types:
        return text
    raise invalid(f"not of type {' or '.join(sorted(types))}")


def _kind(value: Any) -> str:
    for kind, types in (("boolean", bool), ("string", str), ("integer", int), ("number", float), ("array", list)):
        if isinstance(value, types):
            return kind
    return "null" if value is None else "object"


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else write_json(value)


def _declared(function: Mapping[str, Any]) -> str:
    """Return a tool's schema in the model's form: tags for name, description and parameters, JSON for everything else. A schema
    of names and types alone (`ToolSet.brief`) has a short form, specific to this project, with one line per parameter."""
    schema = function.get("parameters", {})
    parts = [f"<function>\n<name>{function['name']}</name>"]
    if function.get("description"):
        parts.append(f"<description>{function['description'].strip()}</description>")
    declared = schema.get("properties", {}).items()
    properties = {name: details if isinstance(details, Mapping) else {} for name, details in declared}
    if schema.keys() == {"type", "properties"} and all(details.keys() == {"type"} for details in properties.values()):
        lines = [f"{name}: {details['type']}" for name, details in properties.items()]
        return "\n".join([*parts, *lines, "</function>"])
    parts.append("<parameters>")
    for name, details in properties.items():
        parts.append(f"<parameter>\n<name>{name}</name>")
        parts += [f"<{key}>{_spelled(value)}</{key}>" for key, value in details.items()]
        parts.append("</parameter>")
    rest = {key: value for key, value in schema.items() if key not in ("type", "properties")}
    parts += [f"<{key}>{write_json(value)}</{key}>" for key, value in rest.items()]
    return "\n".join([*parts, "</parameters>\n</function>"])
