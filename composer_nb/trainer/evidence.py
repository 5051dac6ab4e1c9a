"""What differs by itself, by the evidence of the record and of the residual streams; and where it does so first.

A contribution to the gap is no cause: in bf16 the routes mend most of what began in a product. Routes, their order and gates are
judged by what the engine's own routers make of the engine's own inputs (earlier layers on the routes on record), so that one
foreign expert is not blamed on all the layers above it.

Dimensions: R rows, T tokens of a row, N forwarded tokens, S tokens that the policy wrote, L MoE layers, K experts a token, P
places of the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.trainer.checkpoint import hugging_face_views
from composer_nb.trainer.frozen import Batch, runs
from composer_nb.trainer.model import Model
from composer_nb.trainer.rungs import UNEXPLAINED, text_of
from composer_nb.trainer.sides import Forwarded, Place, Side

TIE = 1e-6
"""Margin of a router up to which a flip is a coin toss of float32."""
GATE, STREAM = 1e-5, 2e-5
"""What counts as rounding of a gate, and of a token's residual stream relative to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The first token concerned. Rows, tokens and layers count from 0; layers are those of the model."""

    row: int
    token: int
    layer: int | None = None
    experts: tuple[int, ...] = ()
    """What the engine used; for a difference within experts those that all their tokens show it of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What differs by itself."""

    rung: str
    text: str
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """How far trainer and engine are apart inside, on the engine's tokens; the trainer on its own routes."""

    places: tuple[Place, ...]
    apart_PN: NDArray[np.float32]
    """‖trainer − engine‖ / ‖engine‖ of the residual stream."""
    lengths: tuple[int, ...]
    """Forwarded tokens of each row."""


def token_causes(batch: Batch) -> Iterator[Cause]:
    """Where the rendering has other tokens, among those written and among those read."""
    for rung, kind in (("tokens", True), ("template", False)):
        hit: list[Where] = []
        for number, (row, made) in enumerate(zip(batch.rows, batch.rendered, strict=False)):
            for (wrote, there), (_, here) in zip(runs(row.acted), runs(made.acted), strict=True):
                recorded_T, own_T = row.token_ids[there], made.token_ids[here]
                if wrote == kind and not np.array_equal(recorded_T, own_T):
                    length = min(len(recorded_T), len(own_T))
                    unlike = recorded_T[:length] != own_T[:length]
                    at = int(unlike.argmax()) if unlike.any() else length
                    hit.append(Where(row=number, token=there.start + at))
                    break
        if hit:
            what = "wrote" if kind else "read"
            yield Cause(
                rung=rung,
                text=f"{len(hit)} of {len(batch.rows)} rows are rendered otherwise where the policy {what}",
                where=hit[0],
            )


def first_displaced(batch: Batch) -> Where | None:
    for number, position in enumerate(batch.positions):
        displaced = position != np.arange(len(position))
        if displaced.any():
            return Where(row=number, token=int(displaced.argmax()))
    return None


def other_weights(one: Model, other: Model) -> list[str]:
    """Tensors, by Hugging Face's names, that are not the same in both models."""
    theirs = hugging_face_views(other)
    return [name for name, view in hugging_face_views(one).items() if not torch.equal(view, theirs[name])]


def unexplained(gap_S: NDArray[np.float64], batch: Batch, tolerance: float, checks: RouteChecks) -> Cause:
    size_S = np.nan_to_num(np.abs(gap_S))
    at = int((size_S > tolerance).argmax())
    counts = np.cumsum([int(row.acted[1:].sum()) for row in batch.rows])
    row = int(np.searchsorted(counts, at, "right"))
    token = np.flatnonzero(batch.rows[row].acted[1:])[at - (int(counts[row - 1]) if row else 0)] + 1
    hint = checks.first_gate
    inside = "" if hint is None else f"; gates first disagree in layer {hint.layer}, row {hint.row}, token {hint.token}"
    return Cause(
        rung=UNEXPLAINED,
        text=f"{int((size_S > tolerance).sum())} of {len(size_S)} tokens are up to {size_S.max():.1e} apart with all rungs the "
        f"engine's: other weights, or arithmetic that was not tried{inside}",
        where=Where(row=row, token=int(token)),
    )


class RouteChecks:
    """Whether the routes on record are what the engine's routers make of the engine's own inputs."""

    def __init__(self, model: Model) -> None:
        self.dense = model.config.first_k_dense_replace
        self.pairs = 0
        self.hits: dict[str, list[Where]] = {"missing": [], "route ids": [], "order": [], "gate weights": []}
        self.gates: list[NDArray[np.float32]] = []

    def add(self, part: Batch, top: Forwarded, start: int) -> None:
        at = 0
        for number, row in enumerate(part.rows):
            cut = slice(at, at := at + len(row.token_ids) - 1)
            self._row(
                row.trace,
                [x[cut].numpy() for x in (top.own_NLK, top.experts_NLK, top.live_NLK, top.margin_NL)],
                start + number,
            )

    def _row(self, trace: Any, live: Sequence[NDArray[Any]], number: int) -> None:
        own_TLK, used_TLK, gates_TLK, margin_TL = live
        routes, gates, valid = (x[:-1] for x in (trace.routes, trace.gates, trace.route_valid))
        routes = routes.astype(np.int64)
        self.pairs += routes.shape[0] * routes.shape[1]
        self._note("missing", ~np.repeat(valid[:, None], routes.shape[1], 1), routes, number)
        there = valid[:, None] & ~(margin_TL <= TIE)
        other = (np.sort(routes, -1) != np.sort(own_TLK, -1)).any(-1)
        self._note("route ids", other & there, routes, number)
        place = _place_of(used_TLK, routes)
        expected = np.take_along_axis(gates_TLK, place, -1)
        # Falling gates are the order of choice, but where the choice has a bias; there the router's own order is the judge.
        turned = (routes != own_TLK).any(-1) & ~other
        near = (
            np.abs(np.diff(np.take_along_axis(gates_TLK, _place_of(used_TLK, own_TLK), -1), axis=-1)).min(
                -1, initial=np.inf
            )
            <= TIE
        )
        self._note("order", turned & ~near & valid[:, None], routes, number)
        off = np.abs(gates - expected).max(-1) > GATE
        off &= valid[:, None] & (np.sort(routes, -1) == np.sort(used_TLK, -1)).all(-1)
        self._note("gate weights", off, routes, number)
        if off.any():
            self.gates.append(gates[off].ravel())

    def _note(self, kind: str, hit_TL: NDArray[np.bool_], routes: NDArray[np.int64], number: int) -> None:
        for token, layer in np.argwhere(hit_TL).tolist():
            experts = tuple(routes[token, layer].tolist())
            self.hits[kind].append(Where(row=number, token=token, layer=layer + self.dense, experts=experts))

    @property
    def first_gate(self) -> Where | None:
        return _lowest(self.hits["gate weights"])

    def causes(self) -> Iterator[Cause]:
        texts = {
            "missing": ("route ids", "have no route on record"),
            "route ids": ("route ids", "have experts on record that the engine's router would not choose"),
            "order": ("order", "have their experts in another order than the engine's router"),
            "gate weights": ("gate weights", "have gates on record that are not the engine's router's"),
        }
        for kind, (rung, text) in texts.items():
            hits = self.hits[kind]
            if kind == "order":  # what an expert that did not act made of later inputs is no fault of theirs
                hits = [hit for hit in hits if not any(_before(foreign, hit) for foreign in self.hits["route ids"])]
            if hits:
                more = self._rounding() if kind == "gate weights" else ""
                yield Cause(
                    rung=rung,
                    text=f"{len(hits)} of {self.pairs} (token, layer) pairs {text}{more}",
                    where=_lowest(hits),
                )

    def _rounding(self) -> str:
        gates = torch.from_numpy(np.concatenate(self.gates))
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(gates.to(dtype).float(), gates):
                return f"; all of them are numbers of {text_of(dtype)}"
        return ""


def _place_of(used_TLK: NDArray[np.int64], wanted_TLK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each wanted expert stands among those used; 0 where it does not."""
    return (used_TLK[:, :, None, :] == wanted_TLK[:, :, :, None]).argmax(-1)


def _before(one: Where, other: Where) -> bool:
    """Whether what happens at `one` can be seen at `other`: in a higher layer, at the same token or a later one of the row."""
    assert one.token is not None and other.token is not None
    return one.row == other.row and other.token >= one.token and (other.layer or 0) > (one.layer or 0)


def _lowest(hits: Sequence[Where]) -> Where | None:
    return min(hits, key=lambda where: (where.layer or 0, where.row, where.token), default=None)


class Inside:
    """Residual streams and routes of two sides on the same tokens, part by part."""

    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()
        self.apart: list[NDArray[np.float32]] = []
        self.lengths: list[int] = []
        self.flip: Where | None = None
        self.experts: list[NDArray[np.int64]] = []
        self.dense = 0

    def add(self, below: Forwarded, top: Forwarded, start: int, part: Batch, engine: Side) -> None:
        lengths = [len(row.token_ids) - 1 for row in part.rows]
        self.dense = engine.model.config.first_k_dense_replace
        self.lengths += lengths
        self.experts.append(top.experts_NLK.numpy())
        self._flips(below, top, start, lengths)
        if top.streams:
            self.places = tuple(top.streams)
            lists = [(below.streams[place], top.streams[place]) for place in self.places]
            self.apart.append(
                np.stack([((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).numpy() for a, b in lists])
            )

    def _flips(self, below: Forwarded, top: Forwarded, start: int, lengths: Sequence[int]) -> None:
        unlike_NL = (below.own_NLK.sort(-1).values != top.experts_NLK.sort(-1).values).any(-1).numpy()
        hits = []
        for layer in np.flatnonzero(unlike_NL.any(0))[:1].tolist():
            row, token = _row_token(int(unlike_NL[:, layer].argmax()), lengths)
            experts = tuple(top.experts_NLK[int(unlike_NL[:, layer].argmax()), layer].tolist())
            hits.append(Where(row=start + row, token=token, layer=layer + self.dense, experts=experts))
        self.flip = _lowest([*hits, *([self.flip] if self.flip else [])])

    def streams(self) -> Streams | None:
        if not self.apart:
            return None
        return Streams(places=self.places, apart_PN=np.concatenate(self.apart, 1), lengths=tuple(self.lengths))

    def first(self) -> tuple[Where | None, str]:
        """The lowest place at which any token differs, and the first token there."""
        found = self.streams()
        if found is None:
            return None, ""
        unlike_PN = found.apart_PN > STREAM
        for place, (layer, part) in enumerate(found.places):
            if unlike_PN[place].any():
                row, token = _row_token(int(unlike_PN[place].argmax()), self.lengths)
                experts = self._guilty(unlike_PN[place], layer) if part == "experts" and layer >= self.dense else ()
                return Where(row=row, token=token, layer=layer, experts=experts), part
        return None, ""

    def _guilty(self, unlike_N: NDArray[np.bool_], layer: int) -> tuple[int, ...]:
        """Experts of the layer all of whose tokens differ."""
        used_NK = np.concatenate(self.experts)[:, layer - self.dense]
        return tuple(e for e in np.unique(used_NK).tolist() if unlike_N[(used_NK == e).any(-1)].all())


def _row_token(place: int, lengths: Sequence[int]) -> tuple[int, int]:
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, place, "right"))
    return row, place - (int(ends[row - 1]) if row else 0)
