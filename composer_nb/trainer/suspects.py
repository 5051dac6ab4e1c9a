"""What nobody declared of an engine, found out from its record: a shift, a temperature, a dtype, …"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from composer_nb.trainer.evidence import RouteChecks
from composer_nb.trainer.frozen import Batch
from composer_nb.trainer.model import Model
from composer_nb.trainer.rungs import differing, with_rung
from composer_nb.trainer.sides import Side, observe, recorded


def suspects(engine: Side, thetas: Sequence[float]) -> list[Side]:
    """The engine with one choice changed, for every change that is tried blindly; its temperature is fitted apart."""
    bf16, theta = torch.bfloat16, engine.model.config.rope_theta
    changes: list[dict[str, Any]] = [{"shift": shift} for shift in (-1, 1)]
    changes += [{"top_p": top_p} for top_p in (0.8, 0.9, 0.95, 0.99)]
    changes += [{"head": dtype} for dtype in (bf16, torch.float16)]
    if engine.forward is None:
        changes += [{"jump": jump} for jump in (-1, 1)]
        changes += [{"rope_theta": other} for other in thetas if other != theta]
        changes += [{"replay": "none"}, {"attention": bf16}]
        n = engine.numerics
        numerics = [replace(n, dtype=bf16), replace(n, router_dtype=bf16)]
        numerics += [replace(n, expert_bits=bits) for bits in (4, 8)]
        changes += [{"numerics": each} for each in numerics]
    tried = [replace(engine, **each) for each in changes]
    return [side for side in tried if side != engine]


def complete(
    known: Side, batch: Batch, tolerance: float, budget: int, thetas: Sequence[float], made: dict[Any, Model]
) -> Side:
    """The engine as known, with choices added one at a time as long as each takes away a third of what is left (root mean square)
    on the part of the batch that is explained worst. Where something stays unexplained only those count that took away nine
    tenths, lest a fault that is not among them passes for one that is."""
    parts = [part for _, part in batch.parts(budget)]
    worst = max(parts, key=lambda part: _left(known, part, made)[0])
    best, (rms, most) = known, _left(known, worst, made)
    path = [(best, rms)]
    while most > tolerance:
        scored = []
        for side in (*suspects(best, thetas), _fitted(best, worst, made)):
            try:
                scored.append((*_left(side, worst, made), side))
            except ValueError:  # positions past the model's last
                continue
        lowest, highest, side = min(scored, key=lambda each: each[0])
        if lowest > rms * 2 / 3:
            break
        best, rms, most = side, lowest, highest
        path.append((best, rms))
    if most > tolerance:
        sure = [after <= before / 10 for (_, before), (_, after) in pairwise(path)]
        best, rms = path[sure.index(False) if False in sure else -1]
    for rung in differing(known, best):
        back = with_rung(best, known, rung)
        if _left(back, worst, made)[0] <= max(rms * 1.2, tolerance / 10):
            best = back
    return _with_router(best, parts, made)


def _with_router(side: Side, parts: Sequence[Batch], made: dict[Any, Model]) -> Side:
    """With the router's arithmetic that the routes and gates on record are of: pinned to these, log-probabilities say nothing of
    it."""
    if side.forward is not None or not all(part.routed for part in parts):
        return side
    n, bf16 = side.numerics, torch.bfloat16
    doubts = _doubts(side, parts, made)
    for numerics in (replace(n, router_dtype=bf16), replace(n, router_bits=8)) if doubts else ():
        if _doubts(other := replace(side, numerics=numerics), parts, made) <= doubts / 10:
            return other
    return side


def _doubts(side: Side, parts: Sequence[Batch], made: dict[Any, Model]) -> int:
    """(token, layer) pairs at which the record is not what the side's routers make of the same inputs."""
    checks = RouteChecks(side.model)
    for part in parts:
        checks.add(part, observe(side, part, made=made).forwarded, 0)
    return sum(len(checks.hits[kind]) for kind in ("route ids", "order", "gate weights"))


def _left(side: Side, part: Batch, made: dict[Any, Model]) -> tuple[float, float]:
    """Root mean square and maximum of the gap."""
    gap = observe(side, part, made=made).logprob_S.numpy() - recorded(part)
    gap = gap[~np.isnan(gap)]
    return (float(np.sqrt((gap**2).mean())), float(np.abs(gap).max())) if len(gap) else (0.0, 0.0)


def _fitted(side: Side, part: Batch, made: dict[Any, Model]) -> Side:
    """With the temperature that brings the median |Δ log p| down furthest, between a quarter and four."""
    raw = observe(replace(side, temperature=1.0, top_p=1.0, shift=0), part, made=made)
    token_S = torch.from_numpy(np.concatenate([row.token_ids[1:][row.acted[1:]] for row in part.rows])).long()
    wanted = torch.from_numpy(recorded(part))

    def apart(temperature: float) -> float:
        logprob_S = (raw.logprob_SV / temperature).log_softmax(-1).gather(1, token_S[:, None])[:, 0]
        return float((logprob_S.double() - wanted).abs().mean())

    grid = np.geomspace(0.25, 4, 25)
    at = int(np.argmin([apart(t) for t in grid]))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    for _ in range(40):  # thirds
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if apart(left) < apart(right) else (left, high)
    exact = (low + high) / 2
    round_ = [round(exact, digits) for digits in (1, 2, 3)]
    near = [t for t in round_ if t and apart(t) <= 1.1 * apart(exact)]
    return replace(side, temperature=float(near[0] if near else exact))
