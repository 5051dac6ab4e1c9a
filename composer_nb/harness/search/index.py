"""The index of a repository, with the edits of one workspace laid over it, and the search itself.

Two segments: the base, which never changes and which forks share, and an overlay of the files that were edited since, made
again at every edit. Chunks of the base whose file was edited or deleted are hidden. Both rankings (BM25, cosine of embeddings)
run over both segments as one; their scores are added (S. Bruch, S. Gai, A. Ingber, "An Analysis of Fusion Functions for Hybrid
Retrieval", TOIS 2023). `docs/search.md` says why not their ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Self

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.chunks import FileChunks, chunk_file, digest, text_lines, unfit
from composer_nb.harness.search.embedding import Embedding, shipped
from composer_nb.harness.search.ignore import Ignore, read_ignore
from composer_nb.harness.search.languages import language_of
from composer_nb.harness.search.segment import Segment, make_segment
from composer_nb.harness.search.terms import weigh

MOST_BYTES = 256 << 20
"""Of a repository's files that fit; those after, in the order of their paths, are left out and counted."""
_OVERLAY = 128
"""Edited files from which on the base is made again: until then an edit costs milliseconds, this once costs seconds."""
_DEPTH = 200
"""How many of each ranking are fused."""
_DENSE = 0.8
"""What a cosine counts beside BM25 as a share of the query's highest score. Chosen on held-out modules of the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One chunk that was found."""

    path: str
    first_line: int
    last_line: int
    """Included."""
    text: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a repository's files."""

    files: int
    chunks: int
    how: Mapping[str, int]
    """Files by how they were cut (`chunks.How`)."""
    left_out: Mapping[str, int]
    """Files that are not indexed, by reason: `ignored`, `binary`, `too_large`, `minified`, `empty`, `over_budget`."""
    no_grammar: tuple[str, ...] = ()
    """Languages whose files were cut into windows because their grammar is not installed (extra `grammars`)."""
    rules_left_out: int = 0
    """Lines of ignore files that are beyond the bounds, or no patterns."""
    chunked: int = 0
    """Files that were cut for this; the others' chunks were known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Base:
    """What forks share."""

    segment: Segment
    chunks: Mapping[str, FileChunks]
    contents: Mapping[str, bytes]
    ignore: Ignore
    report: Report
    number: Mapping[str, int] = field(default_factory=dict)
    """Of a path in the segment."""


class CodeIndex:
    """The index of one workspace. Paths are relative, with `/` between their parts."""

    def __init__(self, base: _Base, embedding: Embedding) -> None:
        self._embedding = embedding
        self._base = base
        self._edited: dict[str, FileChunks | None] = {}  # None: deleted
        self._contents: dict[str, bytes] = {}  # of those
        self._lay()

    @classmethod
    def build(
        cls,
        files: Mapping[str, bytes],
        embedding: Embedding | None = None,
        known: Mapping[str, FileChunks] | None = None,
    ) -> Self:
        """Indexes a repository. `known` are chunks from before: those of files with the same content are taken over."""
        embedding = embedding or shipped()
        return cls(_base(files, embedding, known or {}), embedding)

    def fork(self) -> CodeIndex:
        """An index with the same content, of which edits do not touch this one. Shares all that is large."""
        other = CodeIndex(self._base, self._embedding)
        other._edited, other._contents = dict(self._edited), dict(self._contents)
        other._hidden, other._overlay = self._hidden, self._overlay
        return other

    @property
    def report(self) -> Report:
        """What became of the files when the base was made."""
        return self._base.report

    @property
    def chunks(self) -> dict[str, FileChunks]:
        """Of all files, for a cache."""
        now: dict[str, FileChunks | None] = {**self._base.chunks, **self._edited}
        return {path: each for path, each in sorted(now.items()) if each is not None}

    @property
    def digest(self) -> str:
        """Of the paths and contents of all indexed files, as hexadecimal."""
        parts = [part for path, each in self.chunks.items() for part in (path.encode(), b"\0", each.digest)]
        return blake2b(b"".join(parts), digest_size=16).hexdigest()

    def edit(self, path: str, data: bytes | None) -> None:
        """A file was written, or deleted (None). A changed ignore file is heeded at the next `sync`."""
        self._take({path: data})

    def sync(self, files: Mapping[str, bytes]) -> int:
        """Brings the index up to the whole workspace `files`, as after a command; how many files had changed."""
        ignore = read_ignore(files)
        now = {path: data for path, data in files.items() if not unfit(data) and not ignore.ignored(path)}
        known = self.chunks
        changed: dict[str, bytes | None] = {path: data for path, data in now.items() if self._content(path) != data}
        changed |= dict.fromkeys(known.keys() - now.keys())
        if ignore.rules != self._base.ignore.rules:
            self._base = replace(self._base, ignore=ignore)
        self._take(changed)
        return len(changed)

    def _content(self, path: str) -> bytes | None:
        if path in self._edited:
            return self._contents.get(path)
        return self._base.contents.get(path)

    def _take(self, changed: Mapping[str, bytes | None]) -> None:
        if len(self._edited.keys() | changed.keys()) > _OVERLAY:
            files = {path: self._content(path) for path in self.chunks} | dict(changed)
            whole = {path: data for path, data in files.items() if data is not None}
            ignore = self._base.ignore
            self._base = _base(whole, self._embedding, self.chunks, ignore)
            self._edited, self._contents = {}, {}
        else:
            for path, data in changed.items():
                self._contents.pop(path, None)
                self._edited[path] = None
                if data is not None and not unfit(data) and not self._base.ignore.ignored(path):
                    self._edited[path] = chunk_file(path, data)
                    self._contents[path] = data
        self._lay()

    def _lay(self) -> None:
        """Makes the overlay and what it hides."""
        base = self._base
        gone = [base.number[path] for path in self._edited if path in base.number]
        self._hidden = np.isin(base.segment.file, gone)
        fresh = {path: each for path, each in self._edited.items() if each is not None}
        self._overlay = make_segment(fresh, self._embedding, base.segment.mean_length)

    def search(self, query: str, directories: Sequence[str] = (), limit: int = 10) -> list[Hit]:
        """The chunks that answer a question best, the best first; only from files in `directories`, if there are some.

        Fewer than `limit` where no more have anything in common with the query. Raises ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit={limit}: at least 1")
        bm25, cosine = self.scores(query, directories)
        order, scores = fused(bm25, cosine)
        return [self.hit(int(place), float(score)) for place, score in zip(order[:limit], scores, strict=False)]

    def scores(self, query: str, directories: Sequence[str] = ()) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """BM25 and cosine of every chunk, the base's and then the overlay's; 0 where it is hidden or elsewhere."""
        segments = (self._base.segment, self._overlay)
        asked = weigh([(query, 1.0)])
        alive = len(segments[0]) - int(self._hidden.sum()) + len(segments[1])
        idf: dict[int, float] = {}
        for term, weight in asked.items():
            held = sum(some.stop - some.start for some in (segment.postings(term) for segment in segments))
            held = min(held, alive)  # hidden chunks are counted until the base is made again
            idf[term] = weight * math.log(1 + (alive - held + 0.5) / (held + 0.5))
        terms, weights = np.array(list(asked), np.uint64), np.array(list(asked.values()), np.float32)
        [vector] = self._embedding.encode(terms, weights, [len(asked)])
        bm25 = np.concatenate([segment.bm25(idf) for segment in segments])
        cosine = np.concatenate([segment.vectors @ vector for segment in segments])
        wrong = np.concatenate([self._hidden, np.zeros(len(segments[1]), bool)])
        if folders := [folder.strip("/").removeprefix("./") for folder in directories if folder.strip("./")]:
            wrong |= np.concatenate([~_inside(segment, folders) for segment in segments])
        bm25[wrong], cosine[wrong] = 0, 0
        return bm25, cosine

    def spans(self, path: str) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """First and last lines [C, 2] of all chunks in the order of `scores`, and which of them are what `path` now holds."""
        segments = (self._base.segment, self._overlay)
        inside = [_inside(segment, [path]) for segment in segments]
        inside[0] &= ~self._hidden
        return np.concatenate([segment.spans for segment in segments]), np.concatenate(inside)

    def texts(self) -> list[str]:
        """The text of every chunk in the order of `scores`, in lower case; empty where it is hidden."""
        hidden = np.append(self._hidden, np.zeros(len(self._overlay), bool))
        return ["" if gone else self.hit(place, 0.0).text.lower() for place, gone in enumerate(hidden)]

    def hit(self, place: int, score: float) -> Hit:
        """The chunk at a place of `scores`."""
        segment = self._base.segment
        if place >= len(segment):
            segment, place = self._overlay, place - len(segment)
        path = segment.paths[segment.file[place]]
        first, last = (int(line) for line in segment.spans[place])
        lines = text_lines(self._content(path) or b"")[first - 1 : last]
        return Hit(path=path, first_line=first, last_line=last, text="\n".join(lines), score=score)


def ranking(scores: NDArray[np.float32], depth: int) -> NDArray[np.int64]:
    """Places of the `depth` highest scores above 0, the highest first; of equals the first one."""
    some = np.flatnonzero(scores > 0)
    if len(some) > depth:
        least = np.partition(scores[some], len(some) - depth)[len(some) - depth]
        some = some[scores[some] >= least]
    return some[np.argsort(-scores[some], kind="stable")][:depth]


def fused(bm25: NDArray[np.float32], cosine: NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """Places of the best chunks by either score, by the weighted sum of both, the highest first, and those sums."""
    places = np.union1d(ranking(bm25, _DEPTH), ranking(cosine, _DEPTH))
    highest = max(float(bm25.max(initial=0)), 1e-6)
    totals = bm25[places] / highest + _DENSE * np.maximum(cosine[places], 0)
    order = np.argsort(-totals, kind="stable")
    return places[order].tolist(), totals[order].tolist()


def _inside(segment: Segment, folders: Sequence[str]) -> NDArray[np.bool_]:
    files = [any(path == folder or path.startswith(folder + "/") for folder in folders) for path in segment.paths]
    return np.array(files, bool)[segment.file]


def _base(
    files: Mapping[str, bytes], embedding: Embedding, known: Mapping[str, FileChunks], ignore: Ignore | None = None
) -> _Base:
    ignore = ignore or read_ignore(files)
    left_out: Counter[str] = Counter()
    chunks: dict[str, FileChunks] = {}
    budget, fresh = MOST_BYTES, 0
    for path, data in sorted(files.items()):
        why = "ignored" if ignore.ignored(path) else unfit(data)
        if why is None and len(data) > budget:
            why = "over_budget"
        if why is not None:
            left_out[why] += 1
            continue
        budget -= len(data)
        before = known.get(path)
        if before is None or before.digest != digest(data):
            before, fresh = chunk_file(path, data), fresh + 1
        chunks[path] = before
    lacking = {language_of(path) or "" for path, each in chunks.items() if each.how == "no_grammar"}
    report = Report(
        files=len(chunks),
        chunks=sum(len(each.spans) for each in chunks.values()),
        how=dict(Counter(each.how for each in chunks.values())),
        left_out=dict(left_out),
        no_grammar=tuple(sorted(lacking)),
        rules_left_out=ignore.left_out,
        chunked=fresh,
    )
    return _Base(
        segment=make_segment(chunks, embedding),
        chunks=chunks,
        contents={path: files[path] for path in chunks},
        ignore=ignore,
        report=report,
        number={path: number for number, path in enumerate(chunks)},
    )
