"""AdamW over what a rank holds of each weight: element by element the same as `FlatAdamW` over all of them.

Masters and moments are cut as the weights are. Only the gradient's norm needs the other ranks: the squares of what each holds are
added up, over either mesh, with what several ranks hold counted once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from composer_nb.trainer.model import Model
from composer_nb.trainer.ranks import Ranks
from composer_nb.trainer.team import Team

KINDS = ("master", "exp_avg", "exp_avg_sq")
"""What there is of each weight in a state."""


class ShardedAdamW:
    """`FlatAdamW` for a model that `sharding.shard` has cut."""

    def __init__(
        self, model: Model, team: Team, *, weight_decay: float = 0.0, published: torch.dtype | None = None
    ) -> None:
        self._model, self._team, self.published = model, team, published
        self.weights: dict[str, DTensor] = {name: _cut(weight) for name, weight in model.named_parameters()}
        locals_ = {name: weight.to_local().detach() for name, weight in self.weights.items()}
        self.masters = {name: nn.Parameter(x.clone() if published else x) for name, x in locals_.items()}
        self._adam = torch.optim.AdamW(
            list(self.masters.values()), lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        )
        self._publish()

    def zero_(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def sum_(self, ranks: Ranks) -> None:
        """FSDP2 has summed the gradients as it cut them."""

    def norm(self) -> float:
        """Of the whole gradient."""
        total = torch.zeros((), dtype=torch.float64, device=self._team.device)
        for weight in self.weights.values():
            if (gradient := weight.grad) is not None:
                assert isinstance(gradient, DTensor)
                own = torch.linalg.vector_norm(gradient.to_local(), dtype=torch.float64)
                total += own.square() / _copies(weight)
        return math.sqrt(float(self._team.sum_(total)))

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> float:
        """As `FlatAdamW.step`."""
        norm = self.norm()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient's norm is {norm}: training has diverged; lower lr")
        for name, weight in self.weights.items():
            gradient = weight.grad
            own = torch.zeros_like(self.masters[name]) if gradient is None else gradient.to_local()
            self.masters[name].grad = own.mul_(clip / norm) if norm > clip else own
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        self._publish()
        return norm

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs: what this rank holds, as DTensors that share memory with it. Names are those of
        the model in one piece."""
        found: dict[str, Any] = {}
        for name, weight in self.weights.items():
            parts = {"master": self.masters[name].detach(), **self._moments(self.masters[name])}
            found["step"] = parts["step"]
            found |= {f"{kind}.{_plain(name)}": _like(weight, parts[kind]) for kind in KINDS}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up where `state`, of the same mesh or another, was taken: `checkpoint` writes and reads it."""
        for name, master in self.masters.items():
            parts = {"master": master, **self._moments(master)}
            parts["step"].copy_(state["step"])
            for kind in KINDS:
                parts[kind].copy_(state[f"{kind}.{_plain(name)}"].to_local())
        self._publish()

    def _moments(self, master: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's, which it makes at its first step only."""
        found: dict[str, Tensor] = self._adam.state[master]
        if not found:
            found |= {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return found

    @torch.no_grad()
    def _publish(self) -> None:
        assert isinstance(self._model, FSDPModule)
        self._model.reshard()  # after a pass without gradients the root's weights are still put together, of what was
        if self.published is not None:
            for name, master in self.masters.items():
                self.weights[name].to_local().copy_(master.to(self.published))


def _plain(name: str) -> str:
    return name.replace(".experts.", ".")


def _cut(weight: nn.Parameter) -> DTensor:
    assert isinstance(weight, DTensor), "the model is cut over ranks first"
    return weight


def _copies(weight: DTensor) -> int:
    """How many ranks hold the same part."""
    sizes = weight.device_mesh.shape
    return math.prod(size for size, way in zip(sizes, weight.placements, strict=True) if isinstance(way, Replicate))


def _like(weight: DTensor, own: Tensor) -> DTensor:
    return DTensor.from_local(
        own, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
