"""The tensors that each rank of a sharded model publishes or saves: whole tensors, under Hugging Face's names.

Experts are published by the rank that computes them: FSDP2 splits their stack between experts, so nothing moves. Every other
weight is gathered and published by one rank, about as many bytes per rank; in a large model these are few beside the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_nb.trainer.learning.ranks import deal
from composer_nb.trainer.models.checkpoint import (
    ROUTER_BIAS,
    CheckpointSource,
    expert_views,
    fill,
    forms,
    hugging_face_views,
    layer_views,
    replaced,
    write_side_files,
)
from composer_nb.trainer.models.companions import read_companions
from composer_nb.trainer.models.shards import (
    INDEX,
    bytes_of,
    file_names,
    header_of,
    index_of,
    not_finite,
    require_finite,
    write_shard,
)
from composer_nb.trainer.models.transformer import Layer, Model, ModelConfig
from composer_nb.trainer.parallel.experts import DealtExperts
from composer_nb.trainer.parallel.fsdp import on_mesh
from composer_nb.trainer.parallel.mesh import MeshSettings
from composer_nb.trainer.parallel.team import Team


@torch.no_grad()
def held(model: Model, team: Team) -> dict[str, Tensor]:
    """Return this rank's share of `checkpoint.published`, as copies on the CPU. Each tensor belongs to one rank. Collective."""
    assert isinstance(model, FSDPModule)
    model.reshard()
    cut = {name: weight for name, weight in model.named_parameters() if ".experts." not in name}
    mine = set(deal({name: weight.numel() for name, weight in cut.items()}, team.world)[team.rank])
    part = Model.planned(model.config)
    for name, weight in cut.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if name in mine:
            _put(part, name, whole)
    for place, layer in model.named_modules():
        if isinstance(layer, Layer) and f"{place}.router" in mine and layer.router_bias is not None:
            part.get_submodule(place).router_bias = layer.router_bias
    views = {name: view for name, view in hugging_face_views(part).items() if not view.is_meta}
    for index, layer in enumerate(model.layers):
        if isinstance(layer.experts, DealtExperts) and team.place["expert_replicate"] == 0:
            views |= _own_experts(layer.experts, team, model.config, f"model.layers.{index}.")
    dtypes = {name: dtype for name, (dtype, _) in forms(views, torch.bfloat16).items()}
    return {name: view.detach().to("cpu", dtypes[name], copy=True).contiguous() for name, view in views.items()}


def save_held(model: Model, team: Team, path: Path) -> None:
    """Write a sharded model as a Hugging Face checkpoint in bfloat16, each rank its own tensors in a file of its own, with the
    model's companions. The folder appears only when it is complete. Collective. Raises ValueError on all ranks, which names the
    tensor, if one is not finite."""
    mine = held(model, team)
    require_finite(str(path), *team.gather(not_finite(mine)))
    writers = [rank for rank, count in enumerate(team.gather(len(mine))) if count]
    files = dict(zip(writers, file_names(len(writers)), strict=True))
    with replaced(path) if team.first else nullcontext(path.with_name(path.name + ".part")) as part:
        team.barrier()  # the folder is there
        if mine:
            header, order = header_of({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in mine.items()})
            write_shard(part / files[team.rank], header, (bytes_of(mine[name]) for name in order))
        sizes = {name: (x.numel() * (not name.endswith(ROUTER_BIAS)), x.nbytes) for name, x in mine.items()}
        held_by = team.gather(sizes)
        if team.first:
            write_side_files(model, part)
            if len(files) > 1:
                parameters, size = np.sum([pair for each in held_by for pair in each.values()], axis=0).tolist()
                text = index_of({files[rank]: held_by[rank] for rank in files}, parameters, size)
                (part / INDEX).write_text(text, encoding="utf-8")
    team.barrier()


@torch.no_grad()
def load_cut(path: Path, team: Team, settings: MeshSettings) -> Model:
    """Load a checkpoint as `fsdp.on_mesh` shards it. Apart from its own part, a rank holds at most one layer without experts, or
    the embedding and output. Raises like `load_pretrained`."""
    source = CheckpointSource.open(path)
    source.require_repeats()
    c, part = source.config, Model.planned(source.config)
    model = on_mesh(Model.planned(c), team, settings)
    model.companions = read_companions(path)
    weights = {name: weight for name, weight in model.named_parameters() if ".experts." not in name}

    def read(views: dict[str, Tensor]) -> None:
        for name, view in views.items():
            if not view.is_meta:
                fill(view, source.weights[name].read(), f"{path}: {name}")

    def read_whole(names: list[str], views: Callable[[], dict[str, Tensor]]) -> None:
        for name in names:
            _put(part, name, torch.empty(weights.pop(name).shape))
        read(views())
        for name in names:
            whole, weight = part.get_parameter(name), model.get_parameter(name)
            assert isinstance(weight, DTensor)
            cut = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.to_local().copy_(cut.to_local())
            _put(part, name, whole.to("meta"))

    for index, (layer, planned) in enumerate(zip(model.layers, part.layers, strict=True)):
        prefix = f"model.layers.{index}."
        if planned.router_bias is not None:
            planned.router_bias = layer.router_bias = torch.zeros(c.num_experts)
        own = [name for name in weights if name.startswith(f"_layers.{index}.")]
        read_whole(own, partial(layer_views, planned, c, prefix))
        planned.router_bias = None
        if isinstance(layer.experts, DealtExperts):
            read(_own_experts(layer.experts, team, c, prefix))
    for ahead, planned_ahead in zip(model.aheads, part.aheads, strict=True):
        planned_ahead.layer.router_bias = ahead.layer.router_bias = torch.zeros(c.num_experts)
    read_whole(list(weights), partial(hugging_face_views, part))
    return model


def _put(model: Model, name: str, weight: Tensor) -> None:
    where, _, last = name.rpartition(".")
    setattr(model.get_submodule(where), last, nn.Parameter(weight, requires_grad=False))


def _own_experts(experts: DealtExperts, team: Team, c: ModelConfig, prefix: str) -> dict[str, Tensor]:
    w_in, w_out = (w.to_local() if isinstance(w, DTensor) else w for w in (experts.w_in, experts.w_out))
    each = -(-experts.dealt // team.mesh.expert_shard)  # as `torch.chunk` cuts
    first = team.place["ep"] * experts.dealt + team.place["expert_shard"] * each
    views: dict[str, Tensor] = {}
    for number in range(len(w_in)):
        views |= expert_views(w_in[number], w_out[number], c, prefix, first + number)
    return views
