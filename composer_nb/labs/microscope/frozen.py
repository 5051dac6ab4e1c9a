"""A frozen batch: rows of tokens as an engine read, wrote and recorded them.

Dimensions: R rows, T tokens of a row, W tokens of a row that the policy wrote, S of all rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_nb.harness.agent.chat import Result
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.rollout import Segment, Turn
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.trainer.learning.data import within


class Rendering(NamedTuple):
    """A row as a trainer builds it that receives texts instead of tokens."""

    token_ids: NDArray[np.int32]
    acted: NDArray[np.bool_]
    """Tokens that the policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """R rows. Raises ValueError for parts that do not belong together."""

    rows: tuple[Segment, ...]
    """The engine's record."""
    rendered: tuple[Rendering, ...] = ()
    """The rows as the trainer renders them; empty: it takes the engine's tokens as they are."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a batch of no rows: there is nothing to compare")
        for number, row in enumerate(self.rows):
            valid = row.trace.route_valid[: len(row.trace.gates)]
            for name, values, used in (("logprob", row.logprob, row.acted), ("gates", row.trace.gates, valid)):
                if len(bad := np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1) & used)):
                    raise ValueError(f"row {number}: {name} of token {bad[0]} is not finite")
        if len(self.rendered) not in (0, len(self.rows)):
            raise ValueError(f"{len(self.rows)} rows, {len(self.rendered)} rendered")
        for number, (row, rendering) in enumerate(zip(self.rows, self.rendered, strict=False)):
            recorded, made = runs(row.acted), runs(rendering.acted)
            if [written for written, _ in recorded] != [written for written, _ in made]:
                raise ValueError(f"row {number}: {len(recorded)} runs of read and written tokens, rendered {len(made)}")

    @classmethod
    def of(cls, attempts: Sequence[Attempt], renderer: CompactRenderer | None = None) -> Batch:
        """Take the segments of attempts; with `renderer` also render their texts again."""
        rows = tuple(segment for done in attempts for segment in done.rollout.segments)
        rendered = () if renderer is None else tuple(render_again(renderer, done) for done in attempts)
        return cls(rows=rows, rendered=rendered)

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

    def parts(self, budget: int) -> Iterator[Batch]:
        """Yield the batch in pieces of about `budget` tokens."""
        start = 0
        for rows in within(budget, self.rows):
            yield Batch(rows=tuple(rows), rendered=self.rendered[start : start + len(rows)])
            start += len(rows)


def runs(acted: NDArray[np.bool_]) -> list[tuple[bool, slice]]:
    """Return the stretches of tokens that were written (True) and read, in order."""
    edges = [0, *(np.flatnonzero(acted[1:] != acted[:-1]) + 1).tolist(), len(acted)] if len(acted) else []
    return [(bool(acted[start]), slice(start, end)) for start, end in pairwise(edges)]


def render_again(renderer: CompactRenderer, done: Attempt) -> Rendering:
    """Render the texts of a rollout, as a trainer does that gets messages instead of tokens."""
    ids = list(renderer.prompt(done.task.instruction))
    acted = [False] * len(ids)
    messages: list[list[Turn]] = []
    for turn in done.rollout.turns:
        if turn.beside:
            messages[-1].append(turn)
        else:
            messages.append([turn])
    for number, turns in enumerate(messages):
        *before, last = [_call_ids(renderer, turn.call) for turn in turns]
        written = [
            token for part in before for token in (*(t for t in part if t != renderer.end), renderer.call)
        ] + last
        results = [Result(id="", text=turn.observation) for turn in turns]
        read = [] if number == len(messages) - 1 else renderer.results(results)
        ids += [*written, *read]
        acted += [True] * len(written) + [False] * len(read)
    return Rendering(np.array(ids, np.int32), np.array(acted, np.bool_))


def _call_ids(renderer: CompactRenderer, call: str) -> list[int]:
    """Return the tokens of a call in OpenAI's form, or of the raw text if it is not one."""
    try:
        found = json.loads(call)
        return renderer.render_call(ToolCall(name=found["name"], arguments=found["arguments"]))
    except (ValueError, TypeError, KeyError):
        return list(renderer.tokenizer.encode(call, add_special_tokens=False).ids)


class Row(NamedTuple):
    """One row as a program reads it."""

    token_ids: NDArray[np.int32]
    at_W: NDArray[np.int64]
    """Place of each token that the policy wrote by the engine's record; -1: this program has no such token."""


def row_of(batch: Batch, number: int, *, written: bool, read: bool) -> Row:
    """Return row `number` with written and read tokens each from the record (True) or as the trainer renders them."""
    row = batch.rows[number]
    if batch.rendered and not (written and read):
        return _mixed(row, batch.rendered[number], written, read)
    return Row(row.token_ids, batch.written[number])


def _mixed(row: Segment, made: Rendering, written: bool, read: bool) -> Row:
    """Take each run from the record or from the rendering. Equal tokens of a written run correspond (longest common blocks)."""
    ids: list[NDArray[np.int32]] = []
    at = [np.zeros(0, np.int64)]
    length = 0
    for (wrote, there), (_, here) in zip(runs(row.acted), runs(made.acted), strict=True):
        recorded, own = row.token_ids[there], made.token_ids[here]
        taken = recorded if (written if wrote else read) else own
        if wrote:
            found = np.full(len(recorded), -1)
            blocks = SequenceMatcher(None, recorded.tolist(), taken.tolist(), autojunk=False).get_matching_blocks()
            for block in blocks:
                found[block.a : block.a + block.size] = length + np.arange(block.b, block.b + block.size)
            at.append(found[1:] if there.start == 0 else found)
        ids.append(taken)
        length += len(taken)
    return Row(np.concatenate(ids), np.concatenate(at))
