"""A frozen batch: rows of tokens as an engine read, wrote and recorded them, in one file that two machines can compare.

Dimensions: R rows, T tokens of a row, W tokens of it that the policy wrote, L layers, K experts a token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.policy import Trace
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.rollout import Segment
from composer_nb.harness.tools import ToolCall

_STREAMS = ("token_ids", "kind", "logprob", "policy_version")
_TRACES = ("routes", "gates", "margins", "route_valid", "checks")


class Rendering(NamedTuple):
    """A row as somebody who has its texts alone would make it."""

    token_ids: NDArray[np.int32]
    acted: NDArray[np.bool_]
    """What the policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """R rows. Raises ValueError for parts that do not belong together."""

    rows: tuple[Segment, ...]
    """As the engine recorded them."""
    positions: tuple[NDArray[np.int64], ...] = ()
    """Where the engine put each token, [T] a row; empty: 0, 1, 2, …"""
    rendered: tuple[Rendering, ...] = ()
    """The rows as the trainer makes them; empty: it takes the engine's tokens as they are."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise ValueError("a batch of no rows: there is nothing to compare")
        for number, row in enumerate(self.rows):
            valid = row.trace.route_valid[: len(row.trace.gates)]
            for name, values, meant in (("logprob", row.logprob, row.acted), ("gates", row.trace.gates, valid)):
                if len(lost := np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1) & meant)):
                    raise ValueError(f"row {number}: {name} of token {lost[0]} is not finite")
        if {len(self.positions), len(self.rendered)} - {0, len(self.rows)}:
            raise ValueError(
                f"{len(self.rows)} rows, {len(self.positions)} of positions, {len(self.rendered)} rendered"
            )
        for number, (row, position) in enumerate(zip(self.rows, self.positions, strict=False)):
            if len(position) != len(row.token_ids):
                raise ValueError(f"row {number}: {len(row.token_ids)} tokens, {len(position)} positions")
        for number, (row, rendering) in enumerate(zip(self.rows, self.rendered, strict=False)):
            recorded, made = runs(row.acted), runs(rendering.acted)
            if [written for written, _ in recorded] != [written for written, _ in made]:
                raise ValueError(f"row {number}: {len(recorded)} runs of read and written tokens, rendered {len(made)}")

    @classmethod
    def of(cls, attempts: Sequence[Attempt], renderer: CompactRenderer | None = None) -> Batch:
        """The segments of attempts; with `renderer` also as their texts are rendered again."""
        rows = tuple(segment for done in attempts for segment in done.rollout.segments)
        rendered = () if renderer is None else tuple(render_again(renderer, done) for done in attempts)
        return cls(rows=rows, rendered=rendered)

    @property
    def routed(self) -> bool:
        """Whether routes and gates are on record."""
        return all(len(row.trace.gates) > 0 for row in self.rows)

    def cut(self, start: int, end: int) -> Batch:
        """Rows `start` to `end`."""
        part = slice(start, end)
        return Batch(rows=self.rows[part], positions=self.positions[part], rendered=self.rendered[part])

    def parts(self, budget: int) -> Iterator[tuple[int, Batch]]:
        """The batch in pieces of about `budget` tokens, with the number of each one's first row."""
        ends = np.cumsum([len(row.token_ids) for row in self.rows])
        start = 0
        while start < len(self.rows):
            before = ends[start - 1] if start else 0
            end = max(start + 1, int(np.searchsorted(ends, before + budget, "right")))
            yield start, self.cut(start, end)
            start = end

    def save(self, file: Path) -> None:
        """One safetensors file, renamed into place."""
        arrays = {name: _joined([getattr(row, name) for row in self.rows]) for name in _STREAMS}
        arrays |= {name: _joined([getattr(row.trace, name) for row in self.rows]) for name in _TRACES}
        arrays["tokens"] = np.array([len(row.token_ids) for row in self.rows])
        if self.positions:
            arrays["positions"] = _joined(self.positions)
        if self.rendered:
            arrays["rendered_tokens"] = np.array([len(made.token_ids) for made in self.rendered])
            arrays["rendered_ids"] = _joined([made.token_ids for made in self.rendered])
            arrays["rendered_acted"] = _joined([made.acted for made in self.rendered])
        part = file.with_name(file.name + ".part")
        save_file(arrays, part)
        os.replace(part, file)

    @classmethod
    def load(cls, file: Path) -> Batch:
        """Raises ValueError that names a damaged file."""
        try:
            arrays = load_file(file)
            lengths = arrays["tokens"].tolist()
            cuts = {name: _cut(arrays[name], lengths) for name in (*_STREAMS, *_TRACES)}
            rows = tuple(
                Segment(**{n: cuts[n][row] for n in _STREAMS}, trace=Trace(**{n: cuts[n][row] for n in _TRACES}))
                for row in range(len(lengths))
            )
            positions = tuple(_cut(arrays["positions"], lengths)) if "positions" in arrays else ()
            rendered: tuple[Rendering, ...] = ()
            if "rendered_tokens" in arrays:
                made = arrays["rendered_tokens"].tolist()
                streams = zip(_cut(arrays["rendered_ids"], made), _cut(arrays["rendered_acted"], made), strict=True)
                rendered = tuple(Rendering(*each) for each in streams)
            return cls(rows=rows, positions=positions, rendered=rendered)
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{file}: no frozen batch, or a damaged one ({error})") from None


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(np.concatenate(parts))


def _cut(values: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """One piece a row; a stream that no row has stays empty. Raises ValueError for a length that does not fit."""
    if len(values) == 0:
        return [values for _ in lengths]
    if len(values) != sum(lengths):
        raise ValueError(f"{len(values)} values for {sum(lengths)} tokens")
    return [values[start:end] for start, end in pairwise(np.cumsum([0, *lengths]).tolist())]


def runs(acted: NDArray[np.bool_]) -> list[tuple[bool, slice]]:
    """Stretches of tokens that were written (True) and read, in order."""
    edges = [0, *(np.flatnonzero(acted[1:] != acted[:-1]) + 1).tolist(), len(acted)] if len(acted) else []
    return [(bool(acted[start]), slice(start, end)) for start, end in pairwise(edges)]


def render_again(renderer: CompactRenderer, done: Attempt) -> Rendering:
    """The tokens that the texts of a rollout make: those of a trainer that gets messages instead of tokens."""
    ids, acted = _read(renderer.prompt(done.task.instruction))
    for number, turn in enumerate(done.rollout.turns):
        written = _written(renderer, turn.call)
        news = [] if number == len(done.rollout.turns) - 1 else renderer.observation(turn.observation)
        ids += [*written, *news]
        acted += [True] * len(written) + [False] * len(news)
    return Rendering(np.array(ids, np.int32), np.array(acted, np.bool_))


def _read(ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    return list(ids), [False] * len(ids)


def _written(renderer: CompactRenderer, call: str) -> list[int]:
    """Of a call in OpenAI's form, or of the text as it was written where that was none."""
    try:
        found = json.loads(call)
        return renderer.render_call(ToolCall(name=found["name"], arguments=found["arguments"]))
    except (ValueError, TypeError, KeyError):
        return list(renderer.tokenizer.encode(call, add_special_tokens=False).ids)


class Row(NamedTuple):
    """One row as a side reads it."""

    token_ids: NDArray[np.int32]
    position: NDArray[np.int64]
    at_W: NDArray[np.int64]
    """Where each token stands that the policy wrote by the engine's record; -1: this side has no such token."""


def row_of(
    batch: Batch, number: int, *, written: bool = True, read: bool = True, placed: bool = True, jump: int = 0
) -> Row:
    """Row `number` with what the policy wrote, what it read, and positions as on record, or else as the trainer makes them; from
    the first written token on everything stands `jump` places further."""
    row = batch.rows[number]
    ids, acted = row.token_ids, row.acted
    at_W = np.flatnonzero(acted[1:]) + 1
    if batch.rendered and not (written and read):
        ids, acted, at_W = _mixed(row, batch.rendered[number], written, read)
    position = np.arange(len(ids))
    if placed and batch.positions and len(ids) == len(row.token_ids):
        position = batch.positions[number].copy()
    if jump and acted.any():
        position[int(acted.argmax()) :] += jump
    return Row(ids, position, at_W)


def _mixed(
    row: Segment, made: Rendering, written: bool, read: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """Run by run from the record or from the rendering; equal tokens of a written run correspond (the longest common blocks)."""
    ids: list[NDArray[np.int32]] = []
    acted: list[NDArray[np.bool_]] = []
    at: list[NDArray[np.int64]] = []
    length = 0
    for (wrote, there), (_, here) in zip(runs(row.acted), runs(made.acted), strict=True):
        recorded, own = row.token_ids[there], made.token_ids[here]
        taken = recorded if (written if wrote else read) else own
        if wrote:
            found = np.full(len(recorded), -1)
            blocks = SequenceMatcher(None, recorded.tolist(), taken.tolist(), autojunk=False).get_matching_blocks()
            for block in blocks:
                found[block.a : block.a + block.size] = length + np.arange(block.b, block.b + block.size)
            at.append(found[1:] if there.start == 0 else found)  # nothing predicts the first token of a row
        ids.append(taken)
        acted.append(np.full(len(taken), wrote))
        length += len(taken)
    return np.concatenate(ids), np.concatenate(acted), np.concatenate(at or [np.zeros(0, np.int64)])
