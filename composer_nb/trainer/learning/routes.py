"""Router replay: training on the experts that sampling chose (R3, arXiv 2510.11370; Composer 2 technical report, §6.2).

Rounding that differs between engine and trainer flips experts at near ties. The trainer then scores a token with experts that
never acted on it, and its log-probability is off by far more than by the rounding itself. With replay the engine's experts
override the trainer's choice; gates are computed from its live scores, so that the router learns.

    engine     records routes [T, L, K] of every token that it forwards
    packing    shares beginnings only where the routes are equal, too
    route()    takes the experts given and their live gates
    this file  what must hold of the routes before anything is learnt from them, and how far the two routers agree

What is replayed is said by `replay_settings.ReplaySettings`.

Replayed routes that belong to other tokens train just as well to look at, and wrongly; hence the refusals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from composer_nb.kernels.moe.routing import Replay, Routing
from composer_nb.trainer.learning.packing import Stream
from composer_nb.trainer.learning.replay_settings import FULL, ReplaySettings
from composer_nb.trainer.models.transformer import ModelConfig, stacked


def require_routes(streams: Sequence[Stream], config: ModelConfig, replay: ReplaySettings = FULL) -> None:
    """Raises ValueError that names the first stream whose routes are not those of its own tokens in such a model, or are
    missing for more of them than `replay` allows."""
    for number, stream in enumerate(streams):
        if fault := stream.route_fault(replay) or _misfit(stream, config, replay):
            raise ValueError(f"stream {number} of {len(streams)} cannot be replayed (replay.level): {fault}")


def _misfit(stream: Stream, c: ModelConfig, replay: ReplaySettings) -> str:
    """Return what does not fit the model; empty if everything does."""
    layers, experts = stream.routes.shape[1:]
    if (layers, experts) != (c.moe_layers, c.num_experts_per_tok):
        return (
            f"routes of {layers} layers and {experts} experts a token, the model has {c.moe_layers} and "
            f"{c.num_experts_per_tok}"
        )
    routes = np.sort(stream.routes[stream.route_valid], -1)
    if routes.size and routes.max() >= c.num_experts:
        return f"expert {routes.max()} of a model with {c.num_experts}"
    if (routes[..., 1:] == routes[..., :-1]).any():
        return "one expert twice for one token"
    if replay.level == "weights":
        total = stream.gates[stream.route_valid].sum(-1)
        if not (np.abs(total - c.routed_scaling_factor) < 1e-2 * c.routed_scaling_factor).all():  # NaN is refused, too
            return f"gates of a token that do not add up to {c.routed_scaling_factor:g}"
    return ""


def own_routes(routings: Sequence[Routing], replay: ReplaySettings) -> Replay:
    """Return the choices of `routings`, to be replayed."""
    assert replay.level != "none"
    return Replay(
        experts=stacked([routing.experts_NK for routing in routings], 0, 1),
        gates=stacked([routing.gates_NK for routing in routings], 0, 1) if replay.level == "weights" else None,
        level=replay.level,
        plausible=replay.plausible,
    )


def overlap(routings: Sequence[Routing]) -> dict[str, float]:
    """Count the experts that were used (`chosen`, over tokens, layers and places), those that the router would have chosen itself
    (`agreed`), and how many of those on record were too implausible to be used (`implausible`)."""
    agreed = chosen = implausible = 0
    for routing in routings:
        agreed += int((routing.own_NK[:, :, None] == routing.experts_NK[:, None, :]).any(1).sum())
        chosen += routing.experts_NK.numel()
        implausible += 0 if routing.implausible_NK is None else int(routing.implausible_NK.sum())
    return {"agreed": float(agreed), "chosen": float(chosen), "implausible": float(implausible)}


@torch.no_grad()
def routes_differ(routings: Sequence[Routing], routes_NLK: torch.Tensor) -> torch.Tensor:
    """bool [N, L]: where the router's own set of experts is not the one given."""
    own_NLK = stacked([routing.own_NK for routing in routings], *routes_NLK.shape[::2])
    return (own_NLK.sort(-1).values != routes_NLK.sort(-1).values).any(-1)
