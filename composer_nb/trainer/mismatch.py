"""Mismatch: how far the engine's log-probability of a token is from the trainer's, and what replaying routes mends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from composer_nb.harness.attempt import Attempt
from composer_nb.harness.reward import Reward
from composer_nb.trainer.model import Model
from composer_nb.trainer.packing import Stream, flatten, microbatches, score
from composer_nb.trainer.rl import Scored, to_stream


@torch.no_grad()
def measure_mismatch(model: Model, attempts: Sequence[Attempt], budget: int = 4096) -> dict[str, Any]:
    """Compares sampled log-probabilities with the trainer's, its own routes (`off`) against the engine's (`on`).

    Per sampled token: p50 and p99 of |Δ log p|, and k3 = mean(r − 1 − log r) with r = trainer / engine. `routes_differ` is
    the share of (token, layer) pairs whose set of experts differs, tokens of a shared beginning counted once.
    """
    streams = [to_stream(Scored(attempt=done, reward=Reward(total=0.0), advantage=0.0)) for done in attempts]
    found: dict[str, Any] = {}
    for name, replay in (("off", False), ("on", True)):
        gaps = []
        for chunk in microbatches(streams, budget):
            batch = flatten(chunk, replay=True)
            logprob_S, _ = score(model, batch, replay=replay)
            gaps.append((logprob_S - batch.sampled_S).numpy())
        gap = np.concatenate(gaps).astype(np.float64)
        found[name] = {
            "logprob_gap_p50": float(np.quantile(np.abs(gap), 0.5)),
            "logprob_gap_p99": float(np.quantile(np.abs(gap), 0.99)),
            "k3": float(np.mean(np.expm1(gap) - gap)),
        }
    return {**found, "tokens": len(gap), "routes_differ": _routes_differ(model, streams, budget)}


def _routes_differ(model: Model, streams: Sequence[Stream], budget: int) -> float:
    """Share of (token, layer) pairs at which the trainer's own set of experts is not the engine's."""
    differ, total = 0, 0
    for chunk in microbatches(streams, budget):
        batch = flatten(chunk, replay=True)
        _, routings = model.trunk(batch.inputs_N, batch.position_N, batch.attend)
        own_NLK = torch.stack([routing.experts_NK for routing in routings], 1).sort(-1).values
        different_NL = (own_NLK != batch.routes_NLK.sort(-1).values).any(-1)
        differ, total = differ + int(different_NL.sum()), total + different_NL.numel()
    return differ / total
