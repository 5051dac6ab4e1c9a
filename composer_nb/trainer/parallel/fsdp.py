"""A model cut over ranks: FSDP2 (`torch.distributed.fsdp.fully_shard`, arXiv 2304.11277) on meshes of their own for experts and
for everything else, and the experts dealt over ranks (`dispatch`).

A layer's weights are put together when it is called and taken apart after, in both directions; gradients are summed as they
are cut. No sum divides (`set_gradient_divide_factor(1)`): FSDP2 would otherwise take means, and a mean over one of the meshes
is not one over the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.experts import DealtExperts
from composer_nb.trainer.parallel.team import Team


def shard(model: Model, team: Team, compute: torch.dtype | None = None, *, quantised: bool = False) -> Model:
    """`model`, the same on all ranks, cut over them in place. With `compute` (bfloat16) layers compute in that dtype, while
    weights and sums of gradients stay as they are. `quantised`: tokens travel to experts as MXFP8. Raises ValueError for experts
    that cannot be dealt."""
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
