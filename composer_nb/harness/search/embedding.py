"""Terms of a text, and a static embedding of them: one vector per term, in NumPy.

An identifier is its parts and itself: `parseHTTPHeader` and `parse_http_header` both become pars, http, head, parsehttpheader.
Words lose their endings. A term's id is 64 bits of its BLAKE2b digest, so an index, its edits and an embedding need no shared
vocabulary.

A text's vector is the mean of its terms' vectors, each times the term's weight, scaled to length 1. A term's own weight (its idf
when training began) is the length of its vector. `scripts/data/retrieval/training.py` trains the embedding. On disk it is a
safetensors file: `vectors` int8[V, W], `scales` float16[V], and one JSON of metadata with the V terms and their provenance.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

SHIPPED = Path(__file__).with_suffix(".safetensors")
WORD = re.compile(r"[^\W\d]\w*|\d+")
_PART = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+|[^\W\d_A-Za-z]+")
# Maximum characters of a word; longer words are data.
_LONGEST = 64
STOP_WORDS = frozenset(
    "a an and any are as at be been but by can do does for from had has have how i if in into is it its of on or our "
    "should so such than that the their them then there these they this those to was we were what when where which "
    "while who will with would you your".split()
)


def stem(word: str) -> str:
    """Return a lower-case English word without its ending: plurals, -ing, -ed, -er, -e. Crude but quick."""
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
    """Return the terms of one identifier or word; none for a stop word."""
    parts = [part.lower() for part in _PART.findall(word[:_LONGEST])]
    if len(parts) == 1:
        return () if parts[0] in STOP_WORDS else (stem(parts[0]),)
    return (*(stem(part) for part in parts if part not in STOP_WORDS), "".join(parts))


def term_id(term: str) -> int:
    return int.from_bytes(blake2b(term.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 18)
def _word_ids(word: str) -> tuple[int, ...]:
    return tuple(map(term_id, split(word)))


def words(text: str) -> list[str]:
    """Return the words and identifiers of a text as they are written."""
    return WORD.findall(text)


def weigh(fields: Iterable[tuple[str, float]]) -> dict[int, float]:
    """Return term id -> weight: the number of occurrences in each (text, factor) times the factor, summed."""
    weights: dict[int, float] = {}
    for text, factor in fields:
        for word, count in Counter(words(text)).items():
            for term in _word_ids(word):
                weights[term] = weights.get(term, 0.0) + factor * count
    return weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """V terms in W dimensions, V at least 1.

    Attributes:
        terms: [V], ascending.
        vectors: [V, W]
    """

    terms: NDArray[np.uint64]
    vectors: NDArray[np.float32]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def encode(
        self, terms: NDArray[np.uint64], weights: NDArray[np.float32], counts: Sequence[int] | NDArray[np.int32]
    ) -> NDArray[np.float32]:
        """Encode C texts as vectors [C, W]. `terms` and `weights` [N] hold the texts in order, with `counts` [C] terms each.

        A weight w counts as log(1 + w). A text without a known term is the zero vector.
        """
        row_of = np.minimum(np.searchsorted(self.terms, terms), len(self.terms) - 1)
        factor = np.where(self.terms[row_of] == terms, np.log1p(weights), 0.0).astype(np.float32)
        ends = np.concatenate([[0], np.cumsum(counts)])
        out = np.zeros((len(counts), self.vectors.shape[1]), np.float32)
        for row, (first, last) in zip(out, pairwise(ends), strict=True):  # all at once would not fit into memory
            row[:] = factor[first:last] @ self.vectors[row_of[first:last]]
        norm = np.linalg.norm(out, axis=1, keepdims=True)
        return np.divide(out, norm, out=out, where=norm > 0)


def load_embedding(path: Path) -> Embedding:
    """Read an embedding. Raises FileNotFoundError, and ValueError for a damaged file."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {})["embedding"])
            vectors, scales = file.get_tensor("vectors"), file.get_tensor("scales")
        names = metadata.pop("terms")
        if not len(names) == len(vectors) == len(scales) or not names:
            raise ValueError(f"{len(names)} terms, {len(vectors)} vectors, {len(scales)} scales")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no embedding; scripts/data/make_retrieval.py makes it") from None
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(
            f"{path}: not an embedding, or damaged ({error}); scripts/data/make_retrieval.py makes it"
        ) from None
    ids = np.array([term_id(name) for name in names], np.uint64)
    order = np.argsort(ids)
    wide = vectors.astype(np.float32) * scales.astype(np.float32)[:, None]
    return Embedding(terms=ids[order], vectors=wide[order], provenance=metadata)


@cache
def shipped() -> Embedding:
    """Return the embedding that comes with the project."""
    return load_embedding(SHIPPED)
