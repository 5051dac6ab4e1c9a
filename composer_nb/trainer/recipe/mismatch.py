"""Mismatch: the gap between the engine's and the trainer's log-probability of a token, and how much route replay reduces it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.harness.grading.grade import Attempt
from composer_nb.trainer.learning import packing
from composer_nb.trainer.learning.routes import require_routes, routes_differ
from composer_nb.trainer.models.transformer import Model, stacked
from composer_nb.trainer.rl import to_streams

Gap = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Engine and trainer on the same S sampled tokens, and their routers on the N tokens forwarded for them. Tokens of a shared
    prefix count once.

    Attributes:
        off_S: log p of the trainer − log p of the engine, with the trainer's own routes
        on_S: the same, with the engine's routes replayed
        flipped_S: mask of sampled tokens predicted where the set of experts differs in some layer
        flips_NL: mask of the pairs where the trainer's own set of experts differs from the engine's
        margins_NL: the trainer's router: probability of the last expert chosen minus that of the next
    """

    off_S: Gap
    on_S: Gap
    flipped_S: NDArray[np.bool_]
    flips_NL: NDArray[np.bool_]
    margins_NL: NDArray[np.float32]


def compare(
    model: Model, attempts: Sequence[Attempt], replay: packing.ReplaySettings = packing.FULL, budget: int = 4096
) -> Comparison:
    """Score attempts twice: with the trainer's own routes, and with the engine's, replayed according to `replay`. Raises
    ValueError for routes that cannot be replayed."""
    return compare_streams(model, [stream for attempt in attempts for stream in to_streams(attempt)], budget, replay)


@torch.no_grad()
def compare_streams(
    model: Model, streams: Sequence[packing.Stream], budget: int = 4096, replay: packing.ReplaySettings = packing.FULL
) -> Comparison:
    """Compare as `compare` does, on the model's device."""
    require_routes(streams, model.config, replay)
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in Comparison.__dataclass_fields__}
    for chunk in packing.microbatches(streams, budget):
        batch: packing.FlatBatch = packing.moved(packing.flatten(chunk, replay), model.embed.device)
        assert batch.recorded is not None, "`replay` is of routes on record"
        hidden_ND, routings = packing.forward(model, batch)
        off_S, _ = packing.target_scores(model, batch, hidden_ND)
        on_S, _ = packing.score(model, batch, batch.recorded)
        differ_NL = routes_differ(routings, batch.recorded.experts)
        tensors = {
            "off_S": (off_S - batch.sampled_S).double(),
            "on_S": (on_S - batch.sampled_S).double(),
            "flipped_S": differ_NL.any(1)[batch.place_U][batch.from_S],
            "flips_NL": differ_NL,
            "margins_NL": stacked([routing.margin_N for routing in routings], len(differ_NL)).float(),
        }
        for name, tensor in tensors.items():
            parts[name].append(tensor.cpu().numpy())
    return Comparison(**{name: np.concatenate(pieces) for name, pieces in parts.items()})


def measure_mismatch(model: Model, attempts: Sequence[Attempt], budget: int = 4096) -> dict[str, Any]:
    """Compare sampled log-probabilities with the trainer's on its own routes (`off`) and on the engine's (`on`).

    The figures are p50 and p99 of |Δ log p| per sampled token, and k3 = mean(r − 1 − log r) with r = trainer / engine. `floor` is
    `on` over the tokens predicted where no route differs, which is due to rounding alone; None if there are none. `routes_differ`
    is the share of (token, layer) pairs whose set of experts differs, with tokens of a shared prefix counted once.
    `tokens_differ` is the share of sampled tokens predicted where a set differs. Raises ValueError for unusable routes.
    """
    return figures(compare(model, attempts, budget=budget))


def figures(comparison: Comparison) -> dict[str, Any]:
    """Return the figures of a comparison, as described in `measure_mismatch`."""
    return {
        "off": gap_figures(comparison.off_S),
        "on": gap_figures(comparison.on_S),
        "floor": None if comparison.flipped_S.all() else gap_figures(comparison.on_S[~comparison.flipped_S]),
        "tokens": len(comparison.off_S),
        "routes_differ": float(comparison.flips_NL.mean()) if comparison.flips_NL.size else 0.0,
        "tokens_differ": float(comparison.flipped_S.mean()),
    }


def gap_figures(gap_S: Gap) -> dict[str, float]:
    """Return p50 and p99 of |Δ log p|, and k3."""
    return {
        "logprob_gap_p50": float(np.quantile(np.abs(gap_S), 0.5)),
        "logprob_gap_p99": float(np.quantile(np.abs(gap_S), 0.99)),
        "k3": float(np.mean(np.expm1(gap_S) - gap_S)),
    }
