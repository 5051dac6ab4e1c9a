"""Search in one workspace: BM25 and embedding similarity over the chunks of its files.

BM25: S. Robertson, H. Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; a term's frequency is its weight
over the chunk's fields (as in BM25F, without a length per field). The scores of both rankings are added (S. Bruch, S. Gai,
A. Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023); `docs/search.md` says why ranks are not.

There is no inverted index: an edit replaces the chunks of one file, and the next query scans the terms of all chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.chunks import FileChunks, chunk_file, text_lines, unfit
from composer_nb.harness.search.embedding import Embedding, shipped, weigh
from composer_nb.harness.search.ignore import read_ignore

K1, B = 1.2, 0.75
# Maximum total size of the indexed files; later ones, in the order of their paths, are left out.
MOST_BYTES = 256 << 20
# Maximum `Ignore.steps` of one update, some 40 s: rules and paths may be chosen to take hours.
MOST_STEPS = 4e9
# Number of top chunks of each ranking that are fused.
_DEPTH = 200
# Weight of a cosine beside BM25 as a share of the query's highest score. Chosen on held-out modules of the standard library.
_DENSE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A chunk that was found. `last_line` is included."""

    path: str
    first_line: int
    last_line: int
    text: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class _IndexedFile:
    """A file of the workspace, its C chunks, and their vectors [C, W]."""

    data: bytes
    chunks: FileChunks
    vectors: NDArray[np.float32]


class ChunkTable:
    """The C chunks of all files in the order of their paths, and their N terms."""

    def __init__(self, files: Mapping[str, _IndexedFile], width: int) -> None:
        self.paths = sorted(files)
        indexed = [files[path] for path in self.paths]
        counts = np.concatenate([np.zeros(0, np.int32), *(file.chunks.counts for file in indexed)])
        sizes = [len(file.chunks.counts) for file in indexed]
        self.file = np.repeat(np.arange(len(indexed)), sizes)  # [C], into `paths`
        self.spans = np.concatenate([np.zeros((0, 2), np.int32), *(file.chunks.spans for file in indexed)])
        self.vectors = np.concatenate([np.zeros((0, width), np.float32), *(file.vectors for file in indexed)])
        self.terms = np.concatenate([np.zeros(0, np.uint64), *(file.chunks.terms for file in indexed)])
        self.weights = np.concatenate([np.zeros(0, np.float32), *(file.chunks.weights for file in indexed)])
        self.chunk = np.repeat(np.arange(len(counts)), counts)  # [N]
        self.length = np.bincount(self.chunk, self.weights, len(counts))  # [C]
        self.low = self.terms.astype(np.uint16)  # [N]: 16 bits of each term, to find candidates by

    def bm25(self, query: Mapping[int, float]) -> NDArray[np.float32]:
        """Return the BM25 score of every chunk, [C], for the terms of a query and their weights."""
        if not query or not len(self.file):
            return np.zeros(len(self.file), np.float32)
        terms = np.array(sorted(query), np.uint64)
        maybe = np.zeros(1 << 16, bool)
        maybe[terms.astype(np.uint16)] = True
        some = np.flatnonzero(maybe[self.low])
        index = np.minimum(np.searchsorted(terms, self.terms[some]), len(terms) - 1)
        same = terms[index] == self.terms[some]
        some, index = some[same], index[same]
        frequency = np.bincount(index, minlength=len(terms))  # a chunk holds a term once
        rarity = np.log1p((len(self.file) - frequency + 0.5) / (frequency + 0.5))
        idf = np.array([query[int(term)] for term in terms]) * rarity
        weight, chunk = self.weights[some], self.chunk[some]
        impact = weight * (K1 + 1) / (weight + K1 * (1 - B + B * self.length[chunk] / self.length.mean()))
        return np.bincount(chunk, idf[index] * impact, len(self.file)).astype(np.float32)

    def inside(self, folders: Sequence[str]) -> NDArray[np.bool_]:
        """Return which chunks are of files in these folders, [C]. A folder may also be a file."""
        files = [any(path == folder or path.startswith(folder + "/") for folder in folders) for path in self.paths]
        return np.array(files, bool)[self.file]


class CodeIndex:
    """The index of one workspace. Paths are relative, with `/` between their parts."""

    def __init__(self, embedding: Embedding | None = None) -> None:
        self._embedding = embedding or shipped()
        self._files: dict[str, _IndexedFile] = {}
        # Files that are not searched -> why; not those that are empty or that git ignores, which no search shows.
        self.left_out: dict[str, str] = {}
        self._ignore = read_ignore({})
        self._table: ChunkTable | None = None

    @classmethod
    def build(cls, files: Mapping[str, bytes], embedding: Embedding | None = None) -> Self:
        """Index a repository."""
        index = cls(embedding)
        index.sync(files)
        return index

    def fork(self) -> CodeIndex:
        """Return an index with the same content, whose edits do not affect this one. Shares everything large."""
        other = CodeIndex(self._embedding)
        other._files, other._ignore, other.left_out = dict(self._files), self._ignore, dict(self.left_out)
        other._table = self.table()
        return other

    def edit(self, path: str, data: bytes | None) -> None:
        """Update one file that was written or (None) deleted. A changed ignore file takes effect at the next `sync`."""
        self._files.pop(path, None)
        self.left_out.pop(path, None)
        self._ignore.steps = MOST_STEPS
        if data is not None and self._is_fit(path, data, MOST_BYTES):
            self._files[path] = self._cut(path, data)
        self._table = None

    def sync(self, files: Mapping[str, bytes]) -> None:
        """Update the index to the whole workspace `files`. Raises OSError beyond MOST_STEPS."""
        before = self._files
        self._ignore, self._files, self._table = read_ignore(files), {}, None
        self._ignore.steps = MOST_STEPS
        self.left_out = {}
        room = MOST_BYTES
        for path, data in sorted(files.items()):
            if self._is_fit(path, data, room):
                room -= len(data)
                earlier = before.get(path)
                self._files[path] = earlier if earlier and earlier.data == data else self._cut(path, data)

    def _is_fit(self, path: str, data: bytes, room: int) -> bool:
        """Return whether to index a file; if not, record why in `left_out`."""
        why = unfit(data) or (f"beyond {MOST_BYTES >> 20} MiB in all" if len(data) > room else "")
        ignored = self._ignore.ignored(path)
        if why and data and not ignored:
            self.left_out[path] = why
        return not (why or ignored)

    def _cut(self, path: str, data: bytes) -> _IndexedFile:
        chunks = chunk_file(path, data)
        return _IndexedFile(data, chunks, self._embedding.encode(chunks.terms, chunks.weights, chunks.counts))

    def table(self) -> ChunkTable:
        """Return all chunks in the order of `scores`."""
        if self._table is None:
            self._table = ChunkTable(self._files, self._embedding.vectors.shape[1])
        return self._table

    def search(self, query: str, directories: Sequence[str] = (), limit: int = 10) -> list[Hit]:
        """Return the chunks that best answer a question, best first; if `directories` are given, only from files in them.

        Returns fewer than `limit` chunks if no more have anything in common with the query. Raises ValueError for a limit
        below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit}: at least 1")
        places, scores = fused(*self.scores(query, directories))
        return [self.hit(position, score) for position, score in zip(places[:limit], scores, strict=False)]

    def scores(self, query: str, directories: Sequence[str] = ()) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return BM25 and cosine of every chunk, [C] each; 0 for chunks outside of `directories`."""
        table, weights_of = self.table(), weigh([(query, 1.0)])
        terms, weights = np.array(list(weights_of), np.uint64), np.array(list(weights_of.values()), np.float32)
        [vector] = self._embedding.encode(terms, weights, [len(weights_of)])
        bm25, cosine = table.bm25(weights_of), table.vectors @ vector
        if folders := [folder.strip("/").removeprefix("./") for folder in directories if folder.strip("./")]:
            outside = ~table.inside(folders)
            bm25[outside], cosine[outside] = 0, 0
        return bm25, cosine

    def hit(self, position: int, score: float) -> Hit:
        """Return the chunk at a place of `scores`."""
        table = self.table()
        path = table.paths[table.file[position]]
        first, last = (int(line) for line in table.spans[position])
        lines = text_lines(self._files[path].data)[first - 1 : last]
        return Hit(path=path, first_line=first, last_line=last, text="\n".join(lines), score=score)


def ranking(scores: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
    """Return the places of the `depth` highest scores above 0, highest first; among equals the first place comes first."""
    some = np.flatnonzero(scores > 0)
    if len(some) > depth:
        least = np.partition(scores[some], len(some) - depth)[len(some) - depth]
        some = some[scores[some] >= least]
    return some[np.argsort(-scores[some], kind="stable")][:depth]


def fused(bm25: NDArray[np.float32], cosine: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """Return the places of the best chunks by the weighted sum of both scores, highest first, and those sums."""
    places = np.union1d(ranking(bm25, _DEPTH), ranking(cosine, _DEPTH))
    highest = max(float(bm25.max(initial=0)), 1e-6)
    totals = bm25[places] / highest + _DENSE * np.maximum(cosine[places], 0)
    order = np.argsort(-totals, kind="stable")
    return places[order].tolist(), totals[order].tolist()
