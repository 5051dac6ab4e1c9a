"""A model sharded over ranks: FSDP2 (`torch.distributed.fsdp.fully_shard`, arXiv 2304.11277) on separate meshes for experts and
for all other weights, and the experts dealt over ranks (`dispatch`).

A layer's weights are gathered when it is called and resharded afterwards, forward and backward; gradients are reduce-scattered.
No sum is divided (`set_gradient_divide_factor(1)`), because FSDP2's means over one mesh would not be means over the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.experts import DealtExperts
from composer_nb.trainer.parallel.mesh import MeshSettings
from composer_nb.trainer.parallel.team import Team


def on_mesh(model: Model, team: Team, settings: MeshSettings) -> Model:
    """Move `model`, which is the same on all ranks, to the ranks' device, and shard it with the formats of `settings`. The shards
    of a planned model are uninitialised. See `shard`."""
    compute = torch.bfloat16 if settings.compute == "bfloat16" else None
    planned = model.embed.is_meta
    model = shard(model if planned else model.to(team.device), team, compute, quantised=settings.dispatch == "mxfp8")
    return model.to_empty(device=team.device) if planned else model


def shard(model: Model, team: Team, compute: torch.dtype | None = None, *, quantised: bool = False) -> Model:
    """Shard `model`, which is the same on all ranks, in place. With `compute` (bfloat16), layers compute in that dtype, while the
    dtype of weights and of sums of gradients does not change. `quantised`: send tokens to experts as MXFP8. Raises ValueError if
    the experts cannot be dealt evenly."""
    team.mesh.require_experts(model.config.num_experts)
    dtype = model.embed.dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=dtype if compute else None)

    def cut(module: nn.Module, mesh: Any) -> None:
        fully_shard(module, mesh=mesh, mp_policy=policy)

    for layer in model.layers:
        if not layer.dense:
            experts = DealtExperts(layer, team.experts["ep"], quantised)
            cut(experts, team.cut_experts)
            layer.experts = experts
        cut(layer, team.dense)
    cut(model, team.dense)
    register_fsdp_forward_method(model, "trunk")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model
