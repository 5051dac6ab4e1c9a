"""Grammars of turns, which restrict a policy to calls that its tools' schemas allow, token by token.

    schemas, format ──▶ a grammar of texts and special tokens ──▶ Grammar.allowed(tokens so far) ──▶ tokens that may follow

A grammar is written in llguidance's dialect of Lark and follows a format's renderer. The renderer parses all allowed texts as
calls with these schemas, except a number beyond a double's range and, in Qwen's format, JSON that contains the end of a
parameter. Optional arguments come in the order of the schema. A recursive schema may fail during the turn.

Reference: llguidance, docs/syntax.md; OpenAI's `tool_choice` and `strict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, write_json
from composer_nb.harness.agent.compact import DONE, CompactRenderer
from composer_nb.harness.agent.kimi import ID, KimiRenderer
from composer_nb.harness.agent.qwen import FUNCTION, PARAMETER, QwenRenderer, kinds, read_value

MOST = 500_000
"""Maximum length of a grammar in characters. Building it takes a second or two, in which a server answers fewer requests."""
_TEXT = "TEXT: /(?s:.+)/\n"
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `write_json` writes it; otherwise white space could continue without end."""
_JOINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames"))
_JOINED |= {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
"""Keys of a schema that constrain several arguments together."""
_SAID = frozenset(("type", "description", "title", "default", "examples", "enum", "const", "deprecated"))
"""Keys of a schema that a grammar of verbatim strings supports."""

Form = tuple[str, tuple[str, ...], int]
"""A grammar as text, the tokens of its chat format, and the token that ends a turn."""


class Grammar:
    """Follows one turn and determines which tokens may come next."""

    def __init__(self, matcher: LLMatcher, form: Form) -> None:
        self._matcher, self.form, self._end, self._known = matcher, form, form[2], 0

    @classmethod
    def of_calls(cls, renderer: ChatRenderer, names: Sequence[str], *, text: bool, several: bool) -> Self:
        """Return the grammar of turns that call these tools of a renderer. `text`: a turn may also begin with a text or consist
        of one. `several`: it may have more than one call. Raises ValueError for a schema that this format does not support."""
        tools = [tool["function"] for tool in renderer.tools if tool["function"]["name"] in names]
        match renderer:
            case CompactRenderer():
                rules = _compact(renderer, tools, text, several)
            case QwenRenderer():
                rules = _qwen(renderer, tools, text, several)
            case KimiRenderer():
                rules = _kimi(tools, text, several)
            case _:
                raise ValueError(f"tools: {type(renderer).__name__} has no grammar")
        written = "".join(rules) + _TEXT
        if len(written) > MOST:
            raise ValueError(f"tools: a grammar of {len(written)} letters; calls can be held to at most {MOST}")
        made = cls.of_form(renderer.tokenizer, (written, renderer.tokens, renderer.end))
        if made.fault:
            raise ValueError(f"tools: {made.fault}")
        return made

    @classmethod
    def of_form(cls, tokenizer: Tokenizer, form: Form) -> Self:
        """Return a grammar from its text, for use in another process."""
        return cls(LLMatcher(_vocabulary(tokenizer, *form[1:]), form[0], log_level=0), form)

    def fresh(self) -> Self:
        """Return the same grammar at the start of a turn."""
        return type(self)(self._matcher.deep_copy(), self.form)

    def follow(self, written: Sequence[int]) -> None:
        """Advance to the end of the turn so far."""
        self._matcher.consume_tokens([*written[self._known :]])
        self._known = len(written)

    def allowed(self, written: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask [V] of the tokens that may follow the turn so far; after a `fault`, only its end."""
        self.follow(written)
        found = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self.fault or not found.any():
            found[:] = np.arange(len(found)) == self._end
        return found.astype(np.bool_)

    @property
    def fault(self) -> str:
        """Reason why the turn violates the grammar; empty if it does not."""
        return self._matcher.get_error().strip().splitlines()[0][:300] if self._matcher.is_error() else ""


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer, tokens: tuple[str, ...], end: int) -> LLTokenizer:
    """Return a vocabulary in which the tokens of a format are not text."""
    told = json.loads(tokenizer.to_str())
    told |= {"padding": None, "truncation": None}
    for added in told["added_tokens"]:
        added["special"] |= added["content"] in tokens
    return LLTokenizer(json.dumps(told), eos_token=end)


def _compact(renderer: CompactRenderer, tools: Sequence[Any], text: bool, several: bool) -> Iterator[str]:
    yield f"start: call{_more('<|call|> call', several)}"
    yield f' | "{DONE}" (<|to|> TEXT)?\n' if text and not renderer.ends else "\n"
    yield f"call: {' | '.join(f'call{n}' for n in range(len(tools)))}\n"
    yield "WORD: /[^\\s\\x1c-\\x1f]+/\nLINE: /[0-9]{1,6}/\n"
    forms = {form.tool: form for form in renderer.words.values()}
    for number, tool in enumerate(tools):
        form, parameters = forms[tool["name"]], _whole(tool.get("parameters") or {})
        parts, schemas = [json.dumps(form.word)], parameters.get("properties") or {}
        for name in form.short:
            if (name == "line" and schemas[name].keys() - _SAID | schemas[name].keys() & {"enum", "const"}) or any(
                len(str(value).split()) != 1 for value in schemas[name].get("enum", ())
            ):
                raise ValueError(f"tools: {name}: this format has a number or a word here, and no other limits")
        for name in (*form.short, *form.long):
            short = name in form.short
            if form.types.get(name) == "string":
                value = _string(parameters, name, "WORD" if short else "TEXT?")
                if value.startswith("("):  # a lexeme: the parser takes no more than 2,000 alternatives
                    value, rule = f"ENUM{number}X{len(parts)}", value
                    yield f"{value}: {rule}\n"
            else:
                value = "LINE" if name == "line" and short else _json(schemas.get(name, {}), parameters)
            parts += ['" "' if short else "<|to|>", value]
        known = {*form.short, *form.long}
        if more := {name: schema for name, schema in schemas.items() if name not in known}:
            rest = {"type": "object", "properties": more, "required": [], "additionalProperties": False}
            parts += [f"(<|to|> {_json(rest, parameters)})?"]
        yield f"call{number}: {' '.join(parts)}\n"


def _qwen(renderer: QwenRenderer, tools: Sequence[Any], text: bool, several: bool) -> Iterator[str]:
    calls = f"call{_more('NEWLINE call', several)}"
    yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
    yield f"call: <tool_call> ({' | '.join(f'call{n}' for n in range(len(tools)))}) </tool_call>\n"
    yield 'value[lazy]: /(?s:.*)<\\/parameter>/\nNEWLINE: "\\n"\n'
    for number, tool in enumerate(tools):
        parameters, parts = _whole(tool.get("parameters") or {}), list[str]()
        required = parameters.get("required") or ()
        known = {**{key: {} for key in required}, **renderer.parameters[tool["name"]].get("properties", {})}
        _named(FUNCTION, f"<function={tool['name']}>", tool["name"])
        for place, (name, schema) in enumerate(known.items()):
            _named(FUNCTION, f"<function={name}>", name)
            rule = f"VALUE{number}X{place}"
            value, rules = _value(schema, parameters, name, rule)
            yield rules
            part = f'{_literal(f"<parameter={name}>{chr(10)}")} {value} "\\n"'
            parts.append(part if name in required else f"({part})?")
        head, close = _literal(f"\n<function={tool['name']}>\n"), _literal("</function>\n")
        yield f"call{number}: {head} {' '.join(parts)} {close}\n"


def _value(schema: Mapping[str, Any], parameters: Mapping[str, Any], name: str, rule: str) -> tuple[str, str]:
    """Return the pattern between the tags of a parameter, including its end, and the rule `rule` if needed. Raises ValueError for
    a schema that is not supported in Qwen's format."""
    literals, others, free, types = list[str](), list[str](), False, kinds(schema)
    for option in schema.get("anyOf") or schema.get("oneOf") or [schema]:
        if "enum" in option or "const" in option:
            for value in option.get("enum", [option.get("const")]):
                text = value if isinstance(value, str) else write_json(value)
                read = PARAMETER.match(f"<parameter=a>\n{text}\n</parameter>\n</function>")
                if read is None or read[2] != text or write_json(read_value(text, types)) != write_json(value):
                    raise ValueError(
                        f"tools: {name}: this format cannot tell {write_json(value)[:80]} from another value"
                    )
                literals.append(_literal(text))
        elif "string" in kinds(option):
            free = True
            _string({"properties": {name: option}}, name, "")
        else:
            others.append(_json(option, parameters))
    if free and (literals or others):  # any text is a string, but text that parses as another type must be of that type
        for option in schema.get("anyOf") or schema["oneOf"]:
            _string({"properties": {name: option}}, name, "")
    if free:
        return "value", ""
    rules = f"{rule}: ({' | '.join(literals)}) {_literal(chr(10) + '</parameter>')}\n" if literals else ""
    spelled = [f"{other} {_literal(chr(10) + '</parameter>')}" for other in others]
    return f"({' | '.join([*spelled, *([rule] if literals else [])])})", rules


def _named(form: re.Pattern[str], text: str, name: str) -> None:
    """Raise ValueError for a name that the format cannot express."""
    if (found := form.fullmatch(text)) is None or found[1] != name:
        raise ValueError(f"tools: {name!r}: this format cannot write such a name")


def _whole(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments. Raises ValueError for constraints beyond those of single arguments."""
    if bad := _JOINED & parameters.keys():
        raise ValueError(f"tools: arguments cannot be held to {', '.join(sorted(bad))}")
    if parameters.get("type", "object") != "object":
        raise ValueError("tools: arguments are an object")
    return parameters


def _kimi(tools: Sequence[Any], text: bool, several: bool) -> Iterator[str]:
    calls = f"<|tool_calls_section_begin|> call{_more('call', several)} <|tool_calls_section_end|>"
    yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
    yield f"call: <|tool_call_begin|> ({' | '.join(f'call{n}' for n in range(len(tools)))}) <|tool_call_end|>\n"
    for number, tool in enumerate(tools):
        _named(ID, f"functions.{tool['name']}:0", tool["name"])
        if (tool.get("parameters") or {}).get("type", "object") != "object":
            raise ValueError("tools: arguments are an object")
        schema = {"additionalProperties": False, "type": "object", **(tool.get("parameters") or {})}
        schema["x-guidance"] = _SPELLING
        head = _literal(f"functions.{tool['name']}:")
        yield f"call{number}: {head} /[0-9]{{1,9}}/ <|tool_call_argument_begin|> %json {json.dumps(schema)}\n"


def _more(what: str, several: bool) -> str:
    return f" ({what})*" if several else ""


def _literal(text: str) -> str:
    return json.dumps(text)


def _string(parameters: Mapping[str, Any], name: str, free: str) -> str:
    """Return the rule of a verbatim string; `free` for any string. Raises ValueError for an unsupported schema."""
    schema = parameters.get("properties", {}).get(name, {})
    if unknown := schema.keys() - _SAID:
        raise ValueError(f"tools: {name}: this format cannot hold a string to {', '.join(sorted(unknown))}")
    known = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return free if known is None else f"({' | '.join(map(_literal, known))})"


def _json(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value, with the definitions of `parameters`."""
    defined = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return f"%json {json.dumps({**schema, **defined, 'x-guidance': _SPELLING})}"
