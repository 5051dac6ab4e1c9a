"""AdamW and Muon over a rank's shards of the weights, with the same updates as `FlatOptimizer` on whole weights.

Masters and moments are sharded like the weights. AdamW works element by element. Muon needs whole matrices: those of experts are
whole on their rank. Other matrices are gathered from the ranks' parts; every rank orthogonalizes them and keeps its part. (All
ranks repeat this arithmetic, on the few weights outside the experts.)

For the gradient's norm, the squares of all ranks' parts are summed, and parts on several ranks count once.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from composer_nb.trainer.learning import optimizer as optimizers
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.team import Team

# Tensors of the state of each weight that AdamW updates.
KINDS = ("master", "exp_avg", "exp_avg_sq")


class ShardedOptimizer(optimizers.Optimizer):
    """The optimizer of a model sharded by `fsdp.shard`."""

    def __init__(
        self,
        model: Model,
        team: Team,
        settings: optimizers.OptimizerSettings,
        *,
        weight_decay: float = 0.0,
        published: torch.dtype | None = None,
    ) -> None:
        assert isinstance(model, FSDPModule)
        model.reshard()  # if its loss was measured before
        self._model, self._team, self.published = model, team, published
        self._settings, self._decay = settings, weight_decay
        self.weights = {name: weight for name, weight in model.named_parameters() if isinstance(weight, DTensor)}
        locals_ = {name: weight.to_local().detach() for name, weight in self.weights.items()}
        self.masters = {name: nn.Parameter(x.clone() if published else x) for name, x in locals_.items()}
        muon = settings.name == "muon"
        self._momentum = {
            name: torch.zeros_like(master)
            for name, master in self.masters.items()
            if muon and optimizers.matrices(name, torch.empty(self.weights[name].shape, device="meta"), model.config)
        }
        rest = [master for name, master in self.masters.items() if name not in self._momentum]
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=optimizers.BETAS, weight_decay=weight_decay, fused=True)
        self._publish()

    def zero_(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def sum_(self, ranks: Ranks) -> None:
        """Do nothing: FSDP2 has already summed the gradients."""

    def _clip(self, clip: float) -> float:
        """Give the masters this rank's part of the gradients, scaled to a norm of at most `clip`. Return the norm over all
        ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._team.device)
        for weight in self.weights.values():
            if (gradient := weight.grad) is not None:
                assert isinstance(gradient, DTensor)
                shard = torch.linalg.vector_norm(gradient.to_local(), dtype=torch.float64)
                copies = zip(weight.device_mesh.shape, weight.placements, strict=True)  # ranks that hold the same part
                total += shard.square() / math.prod(size for size, kind in copies if isinstance(kind, Replicate))
        norm = math.sqrt(float(self._team.sum_(total)))
        for name, weight in self.weights.items():
            gradient = weight.grad
            assert gradient is None or isinstance(gradient, DTensor)
            shard = torch.zeros_like(self.masters[name]) if gradient is None else gradient.to_local()
            self.masters[name].grad = shard.mul_(clip / norm) if norm > clip else shard
        return norm

    def _updates(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the masters of Muon's matrices, and this rank's part of their orthogonalised updates."""
        c = self._model.config
        for name, momentum in self._momentum.items():
            weight, gradient = self.weights[name], self.masters[name].grad
            assert gradient is not None
            ahead = optimizers.look_ahead(momentum, gradient, self._settings)
            whole = ahead if ".experts." in name else _like(weight, ahead).full_tensor()
            update = torch.empty_like(whole)
            for target, matrix in zip(
                optimizers.matrices(name, update, c), optimizers.matrices(name, whole, c), strict=True
            ):
                target.copy_(optimizers.orthogonal(matrix, self._settings))
            if ".experts." not in name:
                mesh, placements = weight.device_mesh, weight.placements
                update = distribute_tensor(update, mesh, placements, src_data_rank=None).to_local()
            yield self.masters[name], update

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as DTensors that share memory with this rank's parts. Names are those of the
        unsharded model."""
        tensors: dict[str, Any] = {"step": torch.zeros(())}
        for name, weight in self.weights.items():
            parts = self._parts(name)
            tensors["step"] = parts.pop("step", tensors["step"])
            tensors |= {f"{kind}.{_plain(name)}": _like(weight, part) for kind, part in parts.items()}
        return tensors

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore `state`, from the same mesh or another, as read by `checkpoint.restore`."""
        for name in self.weights:
            for kind, part in self._parts(name).items():
                part.copy_(state["step"] if kind == "step" else state[f"{kind}.{_plain(name)}"].to_local())
        self._publish()

    def _parts(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a weight. AdamW creates its moments, and its count of steps, at the first step only."""
        master = self.masters[name]
        if name in self._momentum:
            return {"master": master.detach(), "momentum": self._momentum[name]}
        moments = self._adam.state[master]
        if not moments:
            moments |= {"step": master.new_zeros(())} | {k: torch.zeros_like(master) for k in KINDS[1:]}
        return {"master": master.detach(), **moments}

    @torch.no_grad()
    def _publish(self) -> None:
        assert isinstance(self._model, FSDPModule)
        self._model.reshard()  # after a pass without gradients, the root's weights are still gathered, with old values
        if self.published is not None:
            for name, master in self.masters.items():
                self.weights[name].to_local().copy_(master.to(self.published))


def _plain(name: str) -> str:
    return name.replace(".experts.", ".")


def _like(weight: DTensor, shard: Tensor) -> DTensor:
    whole: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(shard, weight.device_mesh, weight.placements, run_check=False, **whole)
