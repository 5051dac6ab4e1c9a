"""A small language to select rows: of a table of runs, or rollouts of a run.

    advantage < -.5 and edited a test          a number, and a flag
    not solved and calls >= 12
    /assert .* == None/                        a regular expression, in the text of a rollout
    rl.lr = 3e-5 and seed != 0                 a setting
    parse_day                                  words, in upper or lower case

Clauses are joined by `and`; `not` before one turns it round. There is no `or`.
"""

import operator
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

# Maximum number of names that an error lists.
MOST_NAMES = 30
_CLAUSE = re.compile(
    r"\s*(?P<no>not\s+)?(?:/(?P<pattern>(?:\\.|[^/\\])+)/|(?P<words>(?:(?!\s+and(?:\s|$)).)+))\s*(?:and\s+|$)", re.I
)
_COMPARISON = re.compile(r"(?P<name>[\w@.]+)\s*(?P<sign><=|>=|!=|==?|<|>)\s*(?P<value>.+)")
_WORDS_AFTER_PATTERN = re.compile(r"/(\\.|[^/\\])+/\s")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.I)
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne},
}
Flags = Mapping[str, Callable[[Any], bool]]
# Tells whether a row, and the value behind it, fit.
Selector = Callable[[Mapping[str, Any], Any], bool]


def selector(
    query: str, names: frozenset[str] | set[str], text_of: Callable[[Any], str], flags: Flags | None = None
) -> Selector:
    """Return what tells whether a row fits `query`. `names` are those of a row's values, `text_of` gives the text behind it to
    search in, `flags` are tests of it by their words.

    Raises ValueError for a name that no row has, an order by what is no number, and a pattern that is no regular expression."""
    clauses: list[tuple[bool, Selector]] = []
    position, text = 0, query.strip().replace("−", "-")
    while position < len(text):
        match = _CLAUSE.match(text, position)
        if match is None or _WORDS_AFTER_PATTERN.match(match["words"] or ""):
            raise ValueError(f"{text[position:]!r}: put `and` between clauses, as: advantage < -.5 and not solved")
        clause = _clause(match["pattern"], (match["words"] or "").strip(), names, text_of, flags or {})
        clauses.append((match["no"] is None, clause))
        position = match.end()
    return lambda row, value: all(test(row, value) == is_meant for is_meant, test in clauses)


def _clause(
    pattern: str | None, words: str, names: frozenset[str] | set[str], text_of: Callable[[Any], str], flags: Flags
) -> Selector:
    if pattern is not None:
        try:
            search = re.compile(pattern, re.MULTILINE).search
        except re.error as error:
            raise ValueError(f"/{pattern}/ is no regular expression: {error}") from None
        return lambda row, value: search(text_of(value)) is not None
    if words.lower() in flags:
        test = flags[words.lower()]
        return lambda row, value: test(value)
    parts = re.split(r"\s+or\s+", words, flags=re.I)
    if len(parts) > 1 and any(part.lower() in flags or _COMPARISON.fullmatch(part) for part in parts):
        raise ValueError(f"{words}: there is no `or`; search for one after the other")
    if (match := _COMPARISON.fullmatch(words)) is None:
        return lambda row, value: words.lower() in text_of(value).lower()
    name, sign, limit = match["name"], match["sign"], match["value"]
    if name not in names:
        near = get_close_matches(name, names) if len(names) > MOST_NAMES else sorted(names)
        raise ValueError(f"{name}: no such value; there are {', '.join(near) or len(names)}")
    if sign[0] in "<>" and not _NUMBER.fullmatch(limit):
        raise ValueError(f"{words}: {limit!r} is no number")
    return lambda row, value: _compares(row.get(name), sign, limit)


def _compares(value: Any, sign: str, text: str) -> bool:
    """Compare numbers as numbers, and anything else by its text, where `true` is `yes`."""
    try:
        return value is not None and _SIGNS[sign](float(value), float(text))
    except (TypeError, ValueError):
        texts = [{"true": "yes", "false": "no"}.get(word, word) for word in (str(value).lower(), text.lower())]
        return sign[0] in "=!" and _SIGNS[sign](*texts)
