"""A frozen batch: rows of tokens as an engine read, wrote and recorded them.

Dimensions: R rows, T tokens of a row, W tokens of a row that the policy wrote, S of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rollout import Segment
from composer_nb.trainer.learning.data import within


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBatch:
    """R rows. Raises ValueError for parts that do not belong together."""

    rows: tuple[Segment, ...]
    """The engine's record."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a batch of no rows: there is nothing to compare")
        for number, row in enumerate(self.rows):
            valid = row.trace.route_valid[: len(row.trace.gates)]
            for name, values, used in (("logprob", row.logprob, row.acted), ("gates", row.trace.gates, valid)):
                if len(bad := np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1) & used)):
                    raise ValueError(f"row {number}: {name} of token {bad[0]} is not finite")

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> FrozenBatch:
        """Take the segments of attempts."""
        return cls(rows=tuple(segment for done in attempts for segment in done.rollout.segments))

    @property
    def routed(self) -> bool:
        """True if routes and gates are on record."""
        return all(len(row.trace.gates) > 0 for row in self.rows)

    @property
    def lengths(self) -> list[int]:
        """Forwarded tokens of each row: all but the last."""
        return [len(row.token_ids) - 1 for row in self.rows]

    @property
    def written(self) -> list[NDArray[np.int64]]:
        """Places [W] of the tokens that the policy wrote, by row. Nothing predicts the first token of a row."""
        return [np.flatnonzero(row.acted[1:]) + 1 for row in self.rows]

    def of_written(self, stream: str) -> NDArray[Any]:
        """Return [S] a stream of the rows at the written tokens."""
        parts = zip(self.rows, self.written, strict=True)
        return np.concatenate([getattr(row, stream)[at_W] for row, at_W in parts])

    def spread(self, values_S: NDArray[np.floating[Any]]) -> list[NDArray[Any]]:
        """Return the values [T] of each row at the written tokens, 0 at the others."""
        rows = [np.zeros(len(row.token_ids), values_S.dtype) for row in self.rows]
        ends = np.cumsum([len(at_W) for at_W in self.written])
        for row, at_W, part in zip(rows, self.written, np.split(values_S, ends[:-1]), strict=True):
            row[at_W] = part
        return rows

    def parts(self, budget: int) -> Iterator[FrozenBatch]:
        """Yield the batch in pieces of about `budget` tokens."""
        for rows in within(budget, self.rows):
            yield FrozenBatch(rows=tuple(rows))
