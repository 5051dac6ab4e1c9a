"""Grammars of turns: they hold a policy to calls that its tools' schemas allow, token by token.

    schemas, format ──▶ a grammar of texts and special tokens ──▶ Grammar.allowed(tokens so far) ──▶ tokens that may follow

A grammar is written in llguidance's dialect of Lark. It follows what a format's renderer writes, and whatever it allows the
renderer parses as calls with these schemas (but for a number beyond a double's range). Optional arguments come in the order of
the schema.

Reference: llguidance, docs/syntax.md; OpenAI's `tool_choice` and `strict`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer
from composer_nb.harness.agent.compact import DONE, CompactRenderer
from composer_nb.harness.agent.kimi import KimiRenderer
from composer_nb.harness.agent.qwen import QwenRenderer, kinds

_TEXT = "TEXT: /(?s:.+)/\n"
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `write_json` writes it: otherwise white space could go on for ever."""
_SAID = frozenset(("type", "description", "title", "default", "examples", "enum", "const"))
"""Keys of a schema that a string which stands as it is can follow."""


class Grammar:
    """Follows one turn, and says which tokens may come next."""

    def __init__(self, matcher: LLMatcher, end: int) -> None:
        self._matcher, self._end, self._known = matcher, end, 0

    @classmethod
    def of_calls(cls, renderer: ChatRenderer, names: Sequence[str], *, text: bool, several: bool) -> Self:
        """Return the grammar of turns that call these tools of a renderer. `text`: a turn may also begin with, or be, a text.
        `several`: it may have more than one call. Raises ValueError for a schema that cannot be followed in this format."""
        tools = [tool["function"] for tool in renderer.tools if tool["function"]["name"] in names]
        match renderer:
            case CompactRenderer():
                rules = _compact(renderer, tools, text, several)
            case QwenRenderer():
                rules = _qwen(tools, text, several)
            case KimiRenderer():
                rules = _kimi(tools, text, several)
            case _:
                raise ValueError(f"tools: {type(renderer).__name__} has no grammar")
        vocabulary = _vocabulary(renderer.tokenizer, renderer.tokens, renderer.end)
        made = cls(LLMatcher(vocabulary, "".join(rules) + _TEXT, log_level=0), renderer.end)
        if made.fault:
            raise ValueError(f"tools: {made.fault}")
        return made

    def fresh(self) -> Self:
        """Return the same grammar for another turn that has not begun."""
        return type(self)(self._matcher.deep_copy(), self._end)

    def allowed(self, written: Sequence[int]) -> NDArray[np.bool_]:
        """Return [V] which tokens may follow those of the turn so far; after a `fault`, its end."""
        self._matcher.consume_tokens([*written[self._known :]])
        self._known = len(written)
        found = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self.fault or not found.any():
            found[:] = np.arange(len(found)) == self._end
        return found.astype(np.bool_)

    @property
    def fault(self) -> str:
        """Why the turn cannot be followed; empty if it can."""
        return self._matcher.get_error().strip().splitlines()[0][:300] if self._matcher.is_error() else ""


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer, tokens: tuple[str, ...], end: int) -> LLTokenizer:
    """Return a vocabulary in which the tokens of a format are no texts."""
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
        form, parameters = forms[tool["name"]], tool.get("parameters") or {}
        parts = [json.dumps(form.word)]
        for name in form.short:
            value = _string(parameters, name, "WORD") if form.types[name] == "string" else _json(parameters, name)
            parts += ['" "', "LINE" if name == "line" else value]
        for name in form.long:
            value = _string(parameters, name, "TEXT?") if form.types.get(name) == "string" else _json(parameters, name)
            parts += ["<|to|>", value]
        known, properties = {*form.short, *form.long}, parameters.get("properties") or {}
        if more := {name: schema for name, schema in properties.items() if name not in known}:
            rest = {"type": "object", "properties": more, "required": [], "additionalProperties": False}
            parts += [f"(<|to|> {_json({**parameters, 'properties': {'rest': rest}}, 'rest')})?"]
        yield f"call{number}: {' '.join(parts)}\n"


def _qwen(tools: Sequence[Any], text: bool, several: bool) -> Iterator[str]:
    calls = f"call{_more('NEWLINE call', several)}"
    yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
    yield f"call: <tool_call> ({' | '.join(f'call{n}' for n in range(len(tools)))}) </tool_call>\n"
    yield 'value[lazy]: /(?s:.*)<\\/parameter>/\nNEWLINE: "\\n"\n'
    for number, tool in enumerate(tools):
        parameters, parts = tool.get("parameters") or {}, list[str]()
        for name, schema in (parameters.get("properties") or {}).items():
            head, close = _literal(f"<parameter={name}>\n"), _literal("\n</parameter>")
            if "string" in kinds(schema):
                spelled = _string(parameters, name, "")
                value = f"{spelled} {close}" if spelled else "value"
            else:
                value = f"{_json(parameters, name)} {close}"
            part = f'{head} {value} "\\n"'
            parts.append(part if name in parameters.get("required", ()) else f"({part})?")
        head, close = _literal(f"\n<function={tool['name']}>\n"), _literal("</function>\n")
        yield f"call{number}: {head} {' '.join(parts)} {close}\n"


def _kimi(tools: Sequence[Any], text: bool, several: bool) -> Iterator[str]:
    calls = f"<|tool_calls_section_begin|> call{_more('call', several)} <|tool_calls_section_end|>"
    yield f"start: TEXT? {calls} | TEXT\n" if text else f"start: {calls}\n"
    yield f"call: <|tool_call_begin|> ({' | '.join(f'call{n}' for n in range(len(tools)))}) <|tool_call_end|>\n"
    for number, tool in enumerate(tools):
        schema = {"additionalProperties": False, "type": "object", **(tool.get("parameters") or {})}
        schema["x-guidance"] = _SPELLING
        head = _literal(f"functions.{tool['name']}:")
        yield f"call{number}: {head} /[0-9]{{1,9}}/ <|tool_call_argument_begin|> %json {json.dumps(schema)}\n"


def _more(what: str, several: bool) -> str:
    return f" ({what})*" if several else ""


def _literal(text: str) -> str:
    return json.dumps(text)


def _string(parameters: Mapping[str, Any], name: str, free: str) -> str:
    """Return the rule of a string that stands as it is; `free` for any. Raises ValueError for a schema that it cannot follow."""
    schema = parameters.get("properties", {}).get(name, {})
    if unknown := schema.keys() - _SAID:
        raise ValueError(f"tools: {name}: this format cannot hold a string to {', '.join(sorted(unknown))}")
    known = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return free if known is None else f"({' | '.join(map(_literal, known))})"


def _json(parameters: Mapping[str, Any], name: str) -> str:
    """Return the rule of a value that stands as JSON."""
    defined = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return f"%json {json.dumps({**parameters.get('properties', {}).get(name, {}), **defined, 'x-guidance': _SPELLING})}"
