"""Grammars of turns, which restrict a policy to calls that its tools' schemas allow, token by token.

    schemas, format ──▶ a grammar of texts and special tokens ──▶ Grammar.allowed(tokens so far) ──▶ tokens that may follow

A grammar is written in llguidance's dialect of Lark, by a format's renderer (`ChatRenderer.grammar`). The renderer parses all
allowed texts as calls with these schemas, except a number beyond a double's range and, in Qwen's format, JSON that contains the
end of a parameter. Optional arguments come in the order of the schema. A recursive schema may fail during the turn.

Reference: llguidance, docs/syntax.md; OpenAI's `tool_choice` and `strict`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

# Maximum length of a grammar in characters. Building it takes a second or two, in which a server answers fewer requests.
MOST = 500_000
# JSON as `write_json` writes it; otherwise white space could continue without end.
SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JOINED = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames"))
_JOINED |= {"minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"}
"""Keys of a schema that constrain several arguments together."""
# Keys of a schema that a grammar of verbatim strings supports.
VERBATIM = frozenset(("type", "description", "title", "default", "examples", "enum", "const", "deprecated"))
_TEXT = "TEXT: /(?s:.+)/\n"

# A grammar as text, the tokens of its chat format, and the token that ends a turn.
Form = tuple[str, tuple[str, ...], int]


class Grammar:
    """Follows one turn and determines which tokens may come next."""

    def __init__(self, matcher: Any, form: Form) -> None:
        self._matcher, self.form, self._size = matcher, form, 0

    @classmethod
    def of_rules(cls, tokenizer: Tokenizer, rules: str, tokens: tuple[str, ...], end: int) -> Self:
        """Return a grammar from the rules of a format. Raises ValueError for rules that are too long or not supported."""
        if len(rules) > MOST:
            raise ValueError(f"tools: a grammar of {len(rules)} letters; calls can be held to at most {MOST}")
        grammar = cls.of_form(tokenizer, (rules + _TEXT, tokens, end))
        if grammar.fault:
            raise ValueError(f"tools: {grammar.fault}")
        return grammar

    @classmethod
    def of_form(cls, tokenizer: Tokenizer, form: Form) -> Self:
        """Return a grammar from its text, for use in another process."""
        from llguidance import LLMatcher

        return cls(LLMatcher(_vocabulary(tokenizer, *form[1:]), form[0], log_level=0), form)

    def fresh(self) -> Self:
        """Return the same grammar at the start of a turn."""
        return type(self)(self._matcher.deep_copy(), self.form)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance to the end of the turn so far."""
        self._matcher.consume_tokens([*token_ids[self._size :]])
        self._size = len(token_ids)

    def allowed(self, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask [V] of the tokens that may follow the turn so far; after a `fault`, only its end."""
        self.follow(token_ids)
        mask = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self.fault or not mask.any():
            mask[:] = np.arange(len(mask)) == self.form[2]
        return mask.astype(np.bool_)

    @property
    def fault(self) -> str:
        """Reason why the turn violates the grammar; empty if it does not."""
        return self._matcher.get_error().strip().splitlines()[0][:300] if self._matcher.is_error() else ""


@lru_cache(maxsize=2)
def _vocabulary(tokenizer: Tokenizer, tokens: tuple[str, ...], end: int) -> Any:
    """Return a vocabulary in which the tokens of a format are not text."""
    from llguidance import LLTokenizer

    state = json.loads(tokenizer.to_str()) | {"padding": None, "truncation": None}
    for added in state["added_tokens"]:
        added["special"] |= added["content"] in tokens
    return LLTokenizer(json.dumps(state), eos_token=end)


def alternatives(count: int) -> str:
    """Return the alternatives call0, call1, … of the tools' rules."""
    return " | ".join(f"call{n}" for n in range(count))


def check_name(form: re.Pattern[str], text: str, name: str) -> None:
    """Raise ValueError for a name that the format cannot express."""
    if (match := form.fullmatch(text)) is None or match[1] != name:
        raise ValueError(f"tools: {name!r}: this format cannot write such a name")


def arguments_schema(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a tool's arguments. Raises ValueError for constraints beyond those of single arguments."""
    parameters: Mapping[str, Any] = tool.get("parameters") or {}
    if joined := _JOINED & parameters.keys():
        raise ValueError(f"tools: arguments cannot be held to {', '.join(sorted(joined))}")
    if parameters.get("type", "object") != "object":
        raise ValueError("tools: arguments are an object")
    return parameters


def string_rule(schema: Mapping[str, Any], name: str, free: str) -> str:
    """Return the rule of a verbatim string; `free` for any string. Raises ValueError for an unsupported schema."""
    if unknown := schema.keys() - VERBATIM:
        raise ValueError(f"tools: {name}: this format cannot hold a string to {', '.join(sorted(unknown))}")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return free if values is None else f"({' | '.join(map(json.dumps, values))})"


def json_rule(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """Return the rule of a JSON value, with the definitions of `parameters`."""
    defined = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return f"%json {json.dumps({**schema, **defined, 'x-guidance': SPELLING})}"
