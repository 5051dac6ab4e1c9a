"""A fixed set of files as something to rank: an inverted index with BM25's weights, and a vector a chunk.

BM25: S. Robertson, H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; a term's frequency is its weight
over the chunk's fields (as in BM25F, without a length for each field). Everything that does not depend on other files is worked
out when a segment is made; how rare a term is, is asked of all segments of an index together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.chunks import FileChunks
from composer_nb.harness.search.embedding import Embedding

K1, B = 1.2, 0.75


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """C chunks of F files, T distinct terms, P postings."""

    paths: tuple[str, ...]
    """[F]"""
    file: NDArray[np.int32]
    """[C], into `paths`."""
    spans: NDArray[np.int32]
    """[C, 2]"""
    terms: NDArray[np.uint64]
    """[T], ascending."""
    starts: NDArray[np.int64]
    """[T + 1]: where a term's postings begin."""
    chunk: NDArray[np.int32]
    """[P]"""
    impact: NDArray[np.float32]
    """[P]: BM25 but for the idf."""
    vectors: NDArray[np.float32]
    """[C, W]"""
    mean_length: float
    """Of the chunks that the impacts were worked out for."""

    def __len__(self) -> int:
        return len(self.file)

    def postings(self, term: int) -> slice:
        place = int(np.searchsorted(self.terms, np.uint64(term)))
        if place == len(self.terms) or self.terms[place] != term:
            return slice(0, 0)
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def bm25(self, idf: Mapping[int, float]) -> NDArray[np.float32]:
        """[C], for the terms of a query with how rare they are."""
        scores = np.zeros(len(self), np.float32)
        for term, rare in idf.items():
            some = self.postings(term)
            scores[self.chunk[some]] += np.float32(rare) * self.impact[some]  # a chunk occurs once in a term's postings
        return scores


def make_segment(files: Mapping[str, FileChunks], embedding: Embedding, mean_length: float | None = None) -> Segment:
    """The segment of these files. `mean_length` is another segment's, for one that is searched together with it."""
    found = list(files.values())
    counts = _joined([each.counts for each in found], np.int32)
    terms = _joined([each.terms for each in found], np.uint64)
    weights = _joined([each.weights for each in found], np.float32)
    spans = np.concatenate([np.zeros((0, 2), np.int32), *(each.spans for each in found)])
    chunk = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    length = np.bincount(chunk, weights, len(counts))
    mean = mean_length or float(length.mean() if len(length) else 1.0) or 1.0
    impact = weights * (K1 + 1) / (weights + K1 * (1 - B + B * length[chunk] / mean))
    order = np.argsort(terms, kind="stable")
    distinct, starts = np.unique(terms[order], return_index=True)
    return Segment(
        paths=tuple(files),
        file=np.repeat(np.arange(len(found), dtype=np.int32), [len(each.counts) for each in found]),
        spans=spans,
        terms=distinct,
        starts=np.append(starts, len(terms)),
        chunk=chunk[order],
        impact=impact[order].astype(np.float32),
        vectors=embedding.encode(terms, weights, counts),
        mean_length=mean,
    )


def _joined(parts: Sequence[NDArray[Any]], kind: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, kind), *parts])
