"""Router replay: training on the experts that sampling chose (R3, arXiv 2510.11370; Composer 2 technical report, §6.2).

Different rounding in engine and trainer flips experts at near ties. The trainer then scores a token with experts that never acted
on it, which changes its log-probability by far more than rounding does. With replay, the engine's experts override the trainer's
choice. Gates are computed from the trainer's live scores, so that the router learns.

    engine     records routes [T, L, K] of every token that it forwards
    packing    shares prefixes only if their routes are equal, too
    route()    uses the given experts and their live gates
    this file  checks routes before training, and measures the agreement of the two routers

`ReplaySettings` selects the parts to replay.

Training on the routes of other tokens looks normal but is wrong; hence the checks.
"""

from collections.abc import Sequence

import numpy as np
import torch

from composer_nb.kernels.moe.routing import Replay, Routing
from composer_nb.trainer.learning.packing import FULL, ReplaySettings, Stream
from composer_nb.trainer.models.transformer import ModelConfig, stacked


def require_routes(streams: Sequence[Stream], config: ModelConfig, replay: ReplaySettings = FULL) -> None:
    """Raise ValueError, which names the stream, if routes do not belong to its tokens or do not fit the model, or if more are
    missing than `replay` allows."""
    for number, stream in enumerate(streams):
        if fault := stream.route_fault(replay) or _misfit(stream, config, replay):
            raise ValueError(f"stream {number} of {len(streams)} cannot be replayed (replay.level): {fault}")


def _misfit(stream: Stream, c: ModelConfig, replay: ReplaySettings) -> str:
    """Return what does not fit the model; empty if everything fits."""
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
    """Return the choices of `routings` for replay."""
    assert replay.level != "none"
    return Replay(
        experts=stacked([routing.experts_NK for routing in routings], 0, 1),
        gates=stacked([routing.gates_NK for routing in routings], 0, 1) if replay.level == "weights" else None,
        level=replay.level,
        plausible=replay.plausible,
    )


def overlap(routings: Sequence[Routing]) -> dict[str, float]:
    """Count the used experts (`chosen`, over tokens, layers and ranks of choice), those that the router would have chosen itself
    (`agreed`), and the recorded ones rejected as implausible (`implausible`)."""
    agreed = chosen = implausible = 0
    for routing in routings:
        agreed += int((routing.own_NK[:, :, None] == routing.experts_NK[:, None, :]).any(1).sum())
        chosen += routing.experts_NK.numel()
        implausible += 0 if routing.implausible_NK is None else int(routing.implausible_NK.sum())
    return {"agreed": float(agreed), "chosen": float(chosen), "implausible": float(implausible)}


@torch.no_grad()
def routes_differ(routings: Sequence[Routing], routes_NLK: torch.Tensor) -> torch.Tensor:
    """Return a mask [N, L] of the places where the router's own set of experts differs from the given one."""
    own_NLK = stacked([routing.own_NK for routing in routings], *routes_NLK.shape[::2]).to(routes_NLK.device)
    return (own_NLK.sort(-1).values != routes_NLK.sort(-1).values).any(-1)
