"""Evidence of causes in the record and in the residual streams, and the first place where it shows.

What a cause takes off the gap does not prove it: in bf16, replaying routes mends most of a gap that began in a product. So
routes, their order and gates are checked against the engine's own routers on the engine's own inputs (earlier layers on the
recorded routes). One foreign expert is then not blamed on all the layers above it.

Dimensions: T tokens of a row, N forwarded tokens, S tokens that the policy wrote, L MoE layers, K experts a token, P places of
the residual stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.labs.microscope.frozen import FrozenBatch
from composer_nb.labs.microscope.numerics import Forwarded, Place
from composer_nb.trainer.models.checkpoint import hugging_face_views
from composer_nb.trainer.models.transformer import Model

UNEXPLAINED = "unexplained"
TIE = 1e-6
"""Router margin up to which a flip is float32 rounding."""
GATE, STREAM = 1e-5, 2e-5
"""Rounding of a gate, and of a token's residual stream relative to its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The first token concerned. Rows, tokens and layers count from 0; layers are those of the model."""

    row: int
    token: int
    layer: int | None = None
    experts: tuple[int, ...] = ()
    """The engine's experts; for a difference within experts those all of whose tokens differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that differs by itself."""

    cause: str
    text: str
    where: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Distance between trainer and engine inside the model, on the engine's tokens; the trainer on its own routes."""

    places: tuple[Place, ...]
    apart_PN: NDArray[np.float32]
    """‖trainer − engine‖ / ‖engine‖ of the residual stream."""
    lengths: tuple[int, ...]
    """Forwarded tokens of each row."""


def other_weights(one: Model, other: Model) -> list[str]:
    """Return the Hugging Face names of tensors that differ."""
    theirs = hugging_face_views(other)
    return [name for name, view in hugging_face_views(one).items() if not torch.equal(view, theirs[name])]


def unexplained(gap_S: NDArray[np.float64], batch: FrozenBatch, tolerance: float, gate: Where | None) -> Finding:
    """Describe a gap that is left with all causes the engine's; `gate` is where recorded gates first disagree."""
    size_S = np.abs(gap_S)
    row_S = np.repeat(np.arange(len(batch.rows)), [len(at_W) for at_W in batch.written])
    at = int((size_S > tolerance).argmax())
    inside = "" if gate is None else f"; gates first disagree in layer {gate.layer}, row {gate.row}, token {gate.token}"
    return Finding(
        cause=UNEXPLAINED,
        text=f"{int((size_S > tolerance).sum())} of {len(size_S)} tokens are up to {size_S.max():.1e} apart with all causes the "
        f"engine's: other weights, or arithmetic that was not declared{inside}",
        where=Where(row=int(row_S[at]), token=int(np.concatenate(batch.written)[at])),
    )


# Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteChecks:
    """(token, layer) pairs at which recorded routes are not what the engine's routers make of the engine's inputs."""

    pairs: int
    hits: dict[str, list[Where]]
    """Places by kind: missing, route ids, order, gate weights."""
    gates: NDArray[np.float32]
    """Recorded gates that differ."""

    @property
    def first_gate(self) -> Where | None:
        return _lowest(self.hits["gate weights"])

    def findings(self) -> Iterator[Finding]:
        texts = {
            "missing": ("route ids", "have no route on record"),
            "route ids": ("route ids", "have experts on record that the engine's router would not choose"),
            "order": ("order", "have their experts in another order than the engine's router"),
            "gate weights": ("gate weights", "have gates on record that are not the engine's router's"),
        }
        for kind, (cause, text) in texts.items():
            hits = self.hits[kind]
            if kind == "order":  # a foreign expert changes later inputs, and with them their order
                hits = [hit for hit in hits if not any(_before(foreign, hit) for foreign in self.hits["route ids"])]
            if hits:
                text = f"{len(hits)} of {self.pairs} (token, layer) pairs {text}"
                text += self._rounding() if kind == "gate weights" else ""
                yield Finding(cause=cause, text=text, where=_lowest(hits))

    def _rounding(self) -> str:
        gates = torch.from_numpy(self.gates)
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(gates.to(dtype).float(), gates):
                return f"; all of them are numbers of {str(dtype).removeprefix('torch.')}"
        return ""


def check_routes(batch: FrozenBatch, engine: Forwarded, sparse: Sequence[int]) -> RouteChecks:
    """Compare the recorded routes with those of the engine's routers; `sparse` are the indices of the layers with experts."""
    routes, gates, valid = (
        np.concatenate([getattr(row.trace, name)[:-1] for row in batch.rows])
        for name in ("routes", "gates", "route_valid")
    )
    own, used, live, margin = (
        x.numpy() for x in (engine.own_NLK, engine.experts_NLK, engine.live_NLK, engine.margin_NL)
    )
    routes, valid_NL = routes.astype(np.int64), np.broadcast_to(valid[:, None], margin.shape)
    other = (np.sort(routes, -1) != np.sort(own, -1)).any(-1)
    # Falling gates are the order of choice unless the choice has a bias; then the router's own order decides.
    turned = (routes != own).any(-1) & ~other
    steps = np.abs(np.diff(np.take_along_axis(live, _place_of(used, own), -1), axis=-1)).min(-1, initial=np.inf)
    off = np.abs(gates - np.take_along_axis(live, _place_of(used, routes), -1)).max(-1) > GATE
    off &= valid_NL & (np.sort(routes, -1) == np.sort(used, -1)).all(-1)
    kinds = {
        "missing": ~valid_NL,
        "route ids": other & valid_NL & ~(margin <= TIE),
        "order": turned & valid_NL & ~(steps <= TIE),
        "gate weights": off,
    }
    hits = {
        kind: [_where(batch.lengths, n, layer, routes, sparse) for n, layer in np.argwhere(hit).tolist()]
        for kind, hit in kinds.items()
    }
    return RouteChecks(pairs=margin.size, hits=hits, gates=gates[off].ravel())


def _place_of(used_NLK: NDArray[np.int64], wanted_NLK: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each wanted expert among those used; 0 where it is not among them."""
    return (used_NLK[:, :, None, :] == wanted_NLK[:, :, :, None]).argmax(-1)


def _where(lengths: Sequence[int], n: int, layer: int, routes_NLK: NDArray[np.int64], sparse: Sequence[int]) -> Where:
    row, token = _row_token(n, lengths)
    return Where(row=row, token=token, layer=sparse[layer], experts=tuple(routes_NLK[n, layer].tolist()))


def _row_token(n: int, lengths: Sequence[int]) -> tuple[int, int]:
    ends = np.cumsum([0, *lengths])
    row = int(np.searchsorted(ends, n, "right")) - 1
    return row, n - int(ends[row])


def _before(one: Where, other: Where) -> bool:
    """Return whether `other` sees what happens at `one`: a higher layer, the same token or a later one of the row."""
    return one.row == other.row and other.token >= one.token and (other.layer or 0) > (one.layer or 0)


def _lowest(hits: Sequence[Where]) -> Where | None:
    return min(hits, key=lambda where: (where.layer or 0, where.row, where.token), default=None)


# Residual streams


def streams_apart(trainer: Forwarded, engine: Forwarded, batch: FrozenBatch) -> Streams:
    """Compare residual streams place by place."""
    pairs = [(trainer.streams[place], stream) for place, stream in engine.streams.items()]
    apart = [((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30)).numpy() for a, b in pairs]
    return Streams(places=tuple(engine.streams), apart_PN=np.stack(apart), lengths=tuple(batch.lengths))


def first_apart(streams: Streams, engine: Forwarded, sparse: Sequence[int]) -> tuple[Where | None, str]:
    """Return the lowest place at which any token differs, with the first token there, and the half of the layer."""
    for place_N, (layer, part) in zip(streams.apart_PN, streams.places, strict=True):
        unlike_N = place_N > STREAM
        if unlike_N.any():
            row, token = _row_token(int(unlike_N.argmax()), streams.lengths)
            experts: tuple[int, ...] = ()
            if part == "experts" and layer in sparse:
                used_NK = engine.experts_NLK.numpy()[:, sparse.index(layer)]
                experts = tuple(e for e in np.unique(used_NK).tolist() if unlike_N[(used_NK == e).any(-1)].all())
            return Where(row=row, token=token, layer=layer, experts=experts), part
    return None, ""
