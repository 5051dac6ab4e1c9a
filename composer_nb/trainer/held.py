"""What each rank publishes of a model that is cut over ranks: whole tensors, under Hugging Face's names.

Experts are published by the rank that computes them: FSDP2 cuts their stack between experts, so nothing has to be moved. Every
other weight is put together and published by one rank, each with about as many bytes; beside the experts of a large model
these are few.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_nb.trainer.dispatch import DealtExperts
from composer_nb.trainer.hf_names import ROUTER_BIAS, hugging_face_views, swiglu_views
from composer_nb.trainer.model import Model
from composer_nb.trainer.team import Team
from composer_nb.trainer.version_store import deal


@torch.no_grad()
def held(model: Model, team: Team, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """This rank's share of `checkpoint.published`: copies on the CPU. Each tensor is one rank's. A call of all ranks."""
    assert isinstance(model, FSDPModule)
    model.reshard()
    cut = {name: weight for name, weight in model.named_parameters() if ".experts." not in name}
    mine = set(deal({name: weight.numel() for name, weight in cut.items()}, team.world)[team.rank])
    part = Model.planned(model.config)
    for name, weight in cut.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if name in mine:
            _put(part, name, whole)
    for index, layer in enumerate(model.layers):
        if f"_layers.{index}.router" in mine and layer.router_bias is not None:
            part.layers[index].router_bias = layer.router_bias
    views = {name: view for name, view in hugging_face_views(part).items() if not view.is_meta}
    for index, layer in enumerate(model.layers):
        if isinstance(layer.experts, DealtExperts) and team.place["expert_replicate"] == 0:
            views |= _own_experts(layer.experts, team, f"model.layers.{index}.mlp.experts.")
    return {
        name: view.detach().to("cpu", torch.float32 if name.endswith(ROUTER_BIAS) else dtype, copy=True).contiguous()
        for name, view in views.items()
    }


def _put(model: Model, name: str, weight: Tensor) -> None:
    where, _, last = name.rpartition(".")
    setattr(model.get_submodule(where), last, nn.Parameter(weight, requires_grad=False))


def _own_experts(experts: DealtExperts, team: Team, prefix: str) -> dict[str, Tensor]:
    w_in, w_out = (w.to_local() if isinstance(w, DTensor) else w for w in (experts.w_in, experts.w_out))
    each = -(-experts.dealt // team.mesh.expert_shard)  # as `torch.chunk` cuts
    first = team.place["ep"] * experts.dealt + team.place["expert_shard"] * each
    views: dict[str, Tensor] = {}
    for number in range(len(w_in)):
        views |= swiglu_views(w_in[number], w_out[number], f"{prefix}{first + number}.")
    return views
