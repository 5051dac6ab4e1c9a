"""How well search answers questions with known answers: recall@5, recall@10 and MRR of four methods that rank the same chunks.

A chunk answers a question if it shares at least half of the shorter one's lines with the span that is asked for. Methods:
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
    """Return which chunks answer a question, in the order of `CodeIndex.scores`."""
    spans, inside = index.table().spans, index.table().inside([question.path])
    first, last = spans[:, 0], spans[:, 1]
    shared = np.minimum(last, question.last) - np.maximum(first, question.first) + 1
    shorter = np.minimum(last - first, question.last - question.first) + 1
    return inside & (2 * shared >= shorter)


def ranks(index: CodeIndex, questions: Sequence[Question]) -> dict[str, NDArray[np.float64]]:
    """Return, by method, the rank of the first answer to each question, from 1; infinite if none of the first 100 answers."""
    lowered = [index.hit(number, 0.0).text.lower() for number in range(len(index.table().file))]
    ranks_by_method: dict[str, list[float]] = {}
    for question in questions:
        is_answer = answers(index, question)
        bm25, cosine = index.scores(question.text)
        orders = {
            "grep": ranking(_grep(question.text, lowered), DEPTH),
            "bm25": ranking(bm25, DEPTH),
            "embedding": ranking(cosine, DEPTH),
            "fused": np.array(fused(bm25, cosine)[0][:DEPTH], np.int64),
        }
        for method, order in orders.items():
            positions = np.flatnonzero(is_answer[order])
            ranks_by_method.setdefault(method, []).append(float(positions[0]) + 1 if len(positions) else np.inf)
    return {method: np.array(method_ranks) for method, method_ranks in ranks_by_method.items()}


def _grep(text: str, lowered: Sequence[str]) -> NDArray[np.float32]:
    patterns = {word.lower() for word in words(text)} - STOP_WORDS
    counts = np.array([[chunk.count(pattern) for pattern in patterns] for chunk in lowered], np.float32)
    often = counts.reshape(len(lowered), len(patterns)).sum(axis=1)
    return ((counts > 0).reshape(len(lowered), len(patterns)).sum(axis=1) + often / (often + 1)).astype(np.float32)


def figures(rank: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Return, for each question, whether it is answered among the first 5 and 10, and the reciprocal rank."""
    return {"recall@5": (rank <= 5) * 1.0, "recall@10": (rank <= 10) * 1.0, "mrr": np.reciprocal(rank)}


def score(values: NDArray[np.float64], resamples: int = 2000) -> Score:
    """Return the mean with its interval. For the difference of two methods, pass the difference at each question."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Score(mean=float(values.mean()), low=float(low), high=float(high))


def table(ranks_by_method: Mapping[str, NDArray[np.float64]]) -> dict[str, dict[str, Score]]:
    """Return the scores by method, and under `fused - grep` and the like how much more `fused` scores, question by question."""
    scores = {
        method: {name: score(values) for name, values in figures(rank).items()}
        for method, rank in ranks_by_method.items()
    }
    fused_figures = figures(ranks_by_method["fused"])
    for method in [method for method in ranks_by_method if method != "fused"]:
        method_figures = figures(ranks_by_method[method])
        scores[f"fused - {method}"] = {
            name: score(fused_figures[name] - method_figures[name]) for name in fused_figures
        }
    return scores
