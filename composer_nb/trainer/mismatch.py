"""Mismatch: how far the engine's log-probability of a token is from the trainer's, and what replaying routes mends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.reward import Reward
from composer_nb.kernels.moe import Routing
from composer_nb.trainer.model import Model
from composer_nb.trainer.packing import flatten, microbatches, score
from composer_nb.trainer.rl import Scored, to_stream
from composer_nb.trainer.routes import require_routes, routes_differ

Gap = NDArray[np.float64]


@torch.no_grad()
def measure_mismatch(model: Model, attempts: Sequence[Attempt], budget: int = 4096) -> dict[str, Any]:
    """Compares sampled log-probabilities with the trainer's, its own routes (`off`) against the engine's (`on`).

    Per sampled token: p50 and p99 of |Δ log p|, and k3 = mean(r − 1 − log r) with r = trainer / engine. `floor` is `on` of the
    tokens that were predicted where no route differs (None when there is none): what rounding alone leaves. `routes_differ` is
    the share of (token, layer) pairs whose set of experts differs, tokens of a shared beginning counted once; `tokens_differ`
    that of sampled tokens that were predicted where one does. Raises ValueError for routes that can not be replayed.
    """
    streams = [to_stream(Scored(attempt=done, reward=Reward(total=0.0), advantage=0.0)) for done in attempts]
    require_routes(streams, model.config)
    gaps: dict[str, list[Gap]] = {"off": [], "on": []}
    differ: list[NDArray[np.bool_]] = []
    pairs: list[NDArray[np.bool_]] = []
    for chunk in microbatches(streams, budget):
        batch = flatten(chunk, replay=True)
        assert batch.routes_NLK is not None
        seen: list[Routing] = []
        off_S, _ = score(model, batch, replay=False, seen=seen)
        on_S, _ = score(model, batch, replay=True)
        for name, logprob_S in (("off", off_S), ("on", on_S)):
            gaps[name].append((logprob_S - batch.sampled_S).double().numpy())
        differ_NL = routes_differ(seen, batch.routes_NLK)
        differ.append(differ_NL.any(1)[batch.place_U][batch.from_S].numpy())
        pairs.append(differ_NL.numpy().reshape(-1))
    off, on, differ_S = np.concatenate(gaps["off"]), np.concatenate(gaps["on"]), np.concatenate(differ)
    return {
        "off": _figures(off),
        "on": _figures(on),
        "floor": None if differ_S.all() else _figures(on[~differ_S]),
        "tokens": len(off),
        "routes_differ": float(np.concatenate(pairs).mean()),
        "tokens_differ": float(differ_S.mean()),
    }


def _figures(gap: Gap) -> dict[str, float]:
    return {
        "logprob_gap_p50": float(np.quantile(np.abs(gap), 0.5)),
        "logprob_gap_p99": float(np.quantile(np.abs(gap), 0.99)),
        "k3": float(np.mean(np.expm1(gap) - gap)),
    }
