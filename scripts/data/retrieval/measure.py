"""How well search answers questions with known answers: recall@5, recall@10 and MRR of four ways to rank the same chunks.

A chunk answers a question if it shares at least half of the shorter one's lines with the span that is asked for. Ways:
* `grep`: what an agent gets from one case-insensitive pattern of all of the question's words: chunks by how many of the words
  occur in them, then by how often;
* `bm25`, `embedding`: each alone; `fused`: what `CodeIndex.search` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.search.embedding import STOP_WORDS, words
from composer_nb.harness.search.index import CodeIndex, fused, ranking

from .questions import Question

DEPTH = 100
"""An answer further down counts as not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A mean over questions with its 95 % interval (percentile bootstrap over questions)."""

    mean: float
    low: float
    high: float


def answers(index: CodeIndex, question: Question) -> NDArray[np.bool_]:
    """Which chunks answer a question, in the order of `CodeIndex.scores`."""
    spans, inside = index.table().spans, index.table().inside([question.path])
    first, last = spans[:, 0], spans[:, 1]
    shared = np.minimum(last, question.last) - np.maximum(first, question.first) + 1
    shorter = np.minimum(last - first, question.last - question.first) + 1
    return inside & (2 * shared >= shorter)


def ranks(index: CodeIndex, questions: Sequence[Question]) -> dict[str, NDArray[np.float64]]:
    """By way, the rank of the first answer to each question, from 1; infinite where there is none among the first 100."""
    lowered = [index.hit(place, 0.0).text.lower() for place in range(len(index.table().file))]
    found: dict[str, list[float]] = {}
    for question in questions:
        right = answers(index, question)
        bm25, cosine = index.scores(question.text)
        orders = {
            "grep": ranking(_grep(question.text, lowered), DEPTH),
            "bm25": ranking(bm25, DEPTH),
            "embedding": ranking(cosine, DEPTH),
            "fused": np.array(fused(bm25, cosine)[0][:DEPTH], np.int64),
        }
        for way, order in orders.items():
            place = np.flatnonzero(right[order])
            found.setdefault(way, []).append(float(place[0]) + 1 if len(place) else np.inf)
    return {way: np.array(each) for way, each in found.items()}


def _grep(text: str, lowered: Sequence[str]) -> NDArray[np.float32]:
    patterns = {word.lower() for word in words(text)} - STOP_WORDS
    counts = np.array([[chunk.count(pattern) for pattern in patterns] for chunk in lowered], np.float32)
    often = counts.reshape(len(lowered), len(patterns)).sum(axis=1)
    return ((counts > 0).reshape(len(lowered), len(patterns)).sum(axis=1) + often / (often + 1)).astype(np.float32)


def figures(rank: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Of each question: whether it is answered among the first 5 and 10, and the reciprocal rank."""
    return {"recall@5": (rank <= 5) * 1.0, "recall@10": (rank <= 10) * 1.0, "mrr": np.reciprocal(rank)}


def score(values: NDArray[np.float64], resamples: int = 2000) -> Score:
    """The mean with its interval. For differences of two ways, give differences a question."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Score(mean=float(values.mean()), low=float(low), high=float(high))


def table(found: Mapping[str, NDArray[np.float64]]) -> dict[str, dict[str, Score]]:
    """Scores by way, and under `fused - grep` and the like what fused has over each other way, question by question."""
    scores = {way: {name: score(each) for name, each in figures(rank).items()} for way, rank in found.items()}
    own = figures(found["fused"])
    for way in [way for way in found if way != "fused"]:
        theirs = figures(found[way])
        scores[f"fused - {way}"] = {name: score(own[name] - theirs[name]) for name in own}
    return scores
