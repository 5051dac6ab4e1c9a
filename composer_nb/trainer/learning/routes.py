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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from composer_nb.harness.plain import Share, require_ranges
from composer_nb.kernels.moe.routing import Replay, Routing
from composer_nb.trainer.models.transformer import ModelConfig, stacked

if TYPE_CHECKING:
    from composer_nb.trainer.learning.packing import Stream

ReplayLevel = Literal["none", "ids", "ids+order", "weights"]
Source = Literal["engine", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The part of the recorded routes that the trainer's forward pass uses."""

    level: ReplayLevel = "none"
    """none: nothing. ids: the set of experts. ids+order: also their order, in which their results are summed. weights: also their
    gates; the router then learns nothing from the replayed tokens."""
    source: Source = "engine"
    """engine: the routes of sampling (R3). trainer: the routes of the trainer's own forward pass before the first optimizer step
    on a batch (R2), which fixes the experts over its minibatches; streams then need no routes."""
    plausible: Share = 0.0
    """Replayed experts whose live score is below this times the lowest score of the router's own choice are replaced by its own
    candidates. 0 replays all experts; 1 replays almost none that the router would not choose, if the score alone decides (a bias
    or limits of groups, as in DeepSeek-V3, are ignored here)."""
    missing: Share = 0.0
    """Share of a rollout's forwarded tokens that may lack routes; these use the trainer's own experts."""

    def __post_init__(self) -> None:
        require_ranges(self, "replay")
        if self.level == "none" and (self.source != "engine" or self.plausible or self.missing):
            raise ValueError(
                "replay.level is none, so the other replay settings would do nothing: set it, as to 'ids+order'"
            )
        if self.source == "trainer" and self.missing:
            raise ValueError("replay.missing is of routes on record, and replay.source=trainer makes its own")

    @property
    def on(self) -> bool:
        return self.level != "none"

    @property
    def recorded(self) -> bool:
        """Whether streams must contain their routes."""
        return self.on and self.source == "engine"


NO_REPLAY = ReplaySettings()
FULL = ReplaySettings(level="ids+order")
"""R3: recorded experts and their order, with live gates."""


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
