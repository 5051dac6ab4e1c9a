"""Text as terms, which is all that search compares.

An identifier is its parts and itself (`parseHTTPHeader` and `parse_http_header` are both pars, http, header,
parsehttpheader), words lose their endings, and a term is known by 64 bits of its BLAKE2b digest. So an index, an edit laid over
it, a cache and an embedding speak of the same terms without a vocabulary that all of them would have to share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

_WORD = re.compile(r"[^\W\d]\w*|\d+")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_A-Za-z]+")
_LONGEST = 64
"""Characters of a word; what is longer is data."""
STOP_WORDS = frozenset(
    "a an and any are as at be been but by can do does for from had has have how i if in into is it its of on or our "
    "should so such than that the their them then there these they this those to was we were what when where which "
    "while who will with would you your".split()
)


def stem(word: str) -> str:
    """A lower-case English word without its ending: plurals, -ing, -ed, -er, -e. Crude, the same everywhere, and quick."""
    if len(word) < 4 or not word.isascii():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed", "er", "or"):
        rest = word.removesuffix(ending)
        if len(rest) >= 3 and rest != word and re.search("[aeiouy]", rest):
            word = rest[:-1] if rest[-1] == rest[-2] and rest[-1] not in "ls" else rest
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


def split(word: str) -> tuple[str, ...]:
    """The terms of one identifier or word; none for a stop word."""
    parts = [part.lower() for part in _PART.findall(word[:_LONGEST])]
    if len(parts) == 1:
        return () if parts[0] in STOP_WORDS else (stem(parts[0]),)
    return (*(stem(part) for part in parts if part not in STOP_WORDS), "".join(parts))


def term_id(term: str) -> int:
    return int.from_bytes(blake2b(term.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 18)
def _word_ids(word: str) -> tuple[int, ...]:
    return tuple(map(term_id, split(word)))


def words(text: str) -> Counter[str]:
    """Words and identifiers as they are written, and how often."""
    return Counter(_WORD.findall(text))


def weigh(fields: Iterable[tuple[str, float]]) -> dict[int, float]:
    """Term ids with weights: how often a term occurs in each (text, factor), times the factor, summed up."""
    weights: dict[int, float] = {}
    for text, factor in fields:
        for word, count in words(text).items():
            for each in _word_ids(word):
                weights[each] = weights.get(each, 0.0) + factor * count
    return weights


def texts(text: str) -> list[str]:
    """The terms of a text in order, for people and for vocabularies."""
    return [term for word in _WORD.findall(text) for term in split(word)]
