"""Router replay: training on the experts that sampling chose (R3, arXiv 2510.11370; Composer 2 technical report, §6.2).

Rounding that differs between engine and trainer flips experts at near ties. The trainer then scores a token with experts that
never acted on it, and its log-probability is off by far more than by the rounding itself. With replay the engine's experts,
in their order, override the trainer's choice; gates are computed from its live scores, so that the router learns.

    engine     records routes [T, L, K] of every token that it forwards
    packing    shares beginnings only where the routes are equal, too
    route()    takes the experts given and their live gates
    this file  what must hold of the routes before anything is learnt from them, and how far the two routers agree

Replayed routes that belong to other tokens train just as well to look at, and wrongly; hence the refusals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from composer_nb.kernels.moe import Routing
from composer_nb.trainer.model import ModelConfig
from composer_nb.trainer.packing import Stream


def require_routes(streams: Sequence[Stream], config: ModelConfig) -> None:
    """Raises ValueError that names the first stream whose routes are not those of its own tokens in such a model."""
    for number, stream in enumerate(streams):
        if fault := stream.route_fault() or _misfit(stream, config):
            raise ValueError(f"stream {number} of {len(streams)} can not be replayed (rl.replay): {fault}")


def _misfit(stream: Stream, c: ModelConfig) -> str:
    """What does not fit a model; empty when all does."""
    layers, experts = stream.routes.shape[1:]
    if (layers, experts) != (c.num_hidden_layers, c.num_experts_per_tok):
        return (
            f"routes of {layers} layers and {experts} experts a token, the model has {c.num_hidden_layers} and "
            f"{c.num_experts_per_tok}"
        )
    routes = np.sort(stream.routes[:-1], -1)
    if routes.size and routes.max() >= c.num_experts:
        return f"expert {routes.max()} of a model with {c.num_experts}"
    if (routes[..., 1:] == routes[..., :-1]).any():
        return "one expert twice for one token"
    return ""


def overlap(routings: Sequence[Routing]) -> dict[str, float]:
    """How many of the experts that were used (`chosen`, over tokens, layers and places) the router would have chosen itself
    (`agreed`)."""
    agreed = chosen = 0
    for routing in routings:
        own_NK = routing.probs_NE.topk(routing.experts_NK.shape[1], -1).indices
        agreed += int((own_NK[:, :, None] == routing.experts_NK[:, None, :]).any(1).sum())
        chosen += routing.experts_NK.numel()
    return {"agreed": float(agreed), "chosen": float(chosen)}


@torch.no_grad()
def routes_differ(routings: Sequence[Routing], routes_NLK: torch.Tensor) -> torch.Tensor:
    """bool [N, L]: where the router's own set of experts is not the one given."""
    own_NLK = torch.stack([r.probs_NE.topk(r.experts_NK.shape[1], -1).indices for r in routings], 1)
    return (own_NLK.sort(-1).values != routes_NLK.sort(-1).values).any(-1)
