"""Near duplicates: texts whose sets of five-token shingles overlap, found by MinHash (Broder 1997) in the library `datasketch`.

The index only proposes pairs. Each pair is compared before a text is dropped, so the threshold applies to the exact Jaccard
similarity. A pair above it is missed with a probability of at most 1 %.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

SHINGLE = 5
_PERMUTATIONS = 128
_MISSED = 0.01
"""Maximum probability that no band of the index finds a pair at the threshold."""
_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokens(text: str) -> list[str]:
    """Return the words and signs of a text without white space, so that layout does not count."""
    return _TOKEN.findall(text)


def shingles(text: str) -> NDArray[np.uint32]:
    """Return the sorted hashes of all runs of `SHINGLE` tokens; for a shorter text, the hash of all its tokens."""
    words = tokens(text)
    runs = zip(*(words[at:] for at in range(SHINGLE)), strict=False) if len(words) > SHINGLE else [tuple(words)]
    return np.unique(np.array([crc32(" ".join(run).encode()) for run in runs], np.uint32))


def jaccard(one: NDArray[np.uint32], other: NDArray[np.uint32]) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays without repeats."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / (len(one) + len(other) - both)


def near_duplicates(texts: Sequence[str], similar: float, seed: int) -> dict[int, int]:
    """Return the places of texts to drop, each with the place of an earlier, kept text whose Jaccard similarity is at least
    `similar` (0.05 to 1). `seed` draws the permutations."""
    from datasketch import MinHash, MinHashLSH

    rows = max(r for r in range(1, _PERMUTATIONS) if (1 - similar**r) ** (_PERMUTATIONS // r) < _MISSED)
    index = MinHashLSH(params=(_PERMUTATIONS // rows, rows), num_perm=_PERMUTATIONS)
    empty = MinHash(num_perm=_PERMUTATIONS, seed=seed + 1, hashfunc=int, scheme="affine32")
    kept: dict[int, NDArray[np.uint32]] = {}
    dropped: dict[int, int] = {}
    for place, text in enumerate(texts):
        mine, sketch = shingles(text), empty.copy()
        sketch.update_batch(mine)
        near = (other for other in sorted(index.query(sketch)) if jaccard(mine, kept[other]) >= similar)
        if (found := next(near, None)) is not None:
            dropped[place] = found
        else:
            kept[place] = mine
            index.insert(place, sketch)
    return dropped
