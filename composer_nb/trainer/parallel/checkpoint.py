"""Checkpoints that ranks write together: the state of training, and weights as a Hugging Face folder.

State (`save`, `restore`): each rank writes its shards (torch.distributed.checkpoint). The metadata describe the sharding, so any
number of ranks, on any mesh, can resume. Saving copies the state and returns; the copy is written while training continues.

Weights (`save_sharded`, `load_sharded`): whole tensors, under Hugging Face's names. Experts are written by the rank that computes
them: FSDP2 splits their stack between experts, so nothing moves. Every other weight is gathered and written by one rank, about as
many bytes per rank; in a large model these are few beside the experts.
"""

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from composer_nb.harness.untrusted import checked
from composer_nb.trainer.learning.ranks import deal
from composer_nb.trainer.models import checkpoint
from composer_nb.trainer.models.companions import read_companions
from composer_nb.trainer.models.shards import file_names, not_finite, require_finite, write_shard
from composer_nb.trainer.models.transformer import Layer, Model, ModelConfig
from composer_nb.trainer.parallel.fsdp import DealtExperts, on_mesh
from composer_nb.trainer.parallel.mesh import MeshSettings
from composer_nb.trainer.parallel.team import Team

_FORMS = "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
# The types in the metadata of tensors. The metadata of bytes are excluded, because bytes are pickles themselves.
_METADATA = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _FORMS.split()),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name in ("Size", "float32", "float64", "bfloat16", "int64")),
}


# In Python: for the number of an object, the unpickler in C makes a table of that length.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA:
            raise ValueError(f"its metadata would run {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """A reader of untrusted checkpoints. Their metadata is a pickle, from which only descriptions of tensors are accepted. It is
    read once: what is used is what was checked. `fetch` is called with the name of each file before it is read."""

    def __init__(self, folder: Path, fetch: Callable[[str], None] = lambda name: None) -> None:
        super().__init__(folder)
        self._fetch = fetch

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            self._fetch(name)
        return super().read_data(plan, planner)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self._fetch(".metadata")
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError("its metadata describe no checkpoint")
        for entry in metadata.storage_data.values():
            checked(entry.relative_path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> Future[Any]:
    """Begin to write a checkpoint, on all ranks. It is complete once the future is done, which raises any error. `state` has the
    shards of a `ShardedOptimizer`, and tensors that are the same on all ranks. `group`, a gloo group of all ranks (default: the
    one that all have joined), must not be used for anything else meanwhile."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    begun = dcp.async_save(state, storage_writer=writer, process_group=group)
    assert isinstance(begun, Future)
    return begun


def restore(
    state: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup | None = None,
    fetch: Callable[[str], None] = lambda name: None,
) -> None:
    """Read a checkpoint into the tensors of `state`, on all ranks; `fetch`: see `Reader`. Raises ValueError, which names the
    folder, if that fails."""
    with readable(folder):
        dcp.load(state, storage_reader=Reader(folder, fetch), process_group=group)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of many kinds: files may be missing, damaged or another model's
        first = str(error).strip().splitlines()[-1:]
        raise ValueError(f"{folder}: not a checkpoint of this model, or a damaged one ({' '.join(first)})") from error


# Weights


@torch.no_grad()
def published_share(model: Model, team: Team) -> dict[str, Tensor]:
    """Return this rank's share of `models.checkpoint.published`, as copies on the CPU. Each tensor belongs to one rank.
    Collective."""
    assert isinstance(model, FSDPModule)
    model.reshard()
    weights = {name: weight for name, weight in model.named_parameters() if ".experts." not in name}
    own_names = set(deal({name: weight.numel() for name, weight in weights.items()}, team.world)[team.rank])
    part = Model.planned(model.config)
    for name, weight in weights.items():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if name in own_names:
            _put(part, name, whole)
    for module_name, layer in model.named_modules():
        if isinstance(layer, Layer) and f"{module_name}.router" in own_names and layer.router_bias is not None:
            part.get_submodule(module_name).router_bias = layer.router_bias
    views = {name: view for name, view in checkpoint.hugging_face_views(part).items() if not view.is_meta}
    for index, layer in enumerate(model.layers):
        if isinstance(layer.experts, DealtExperts) and team.place["expert_replicate"] == 0:
            views |= _own_experts(layer.experts, team, model.config, f"model.layers.{index}.")
    return checkpoint.copied(views)


def save_sharded(model: Model, team: Team, path: Path) -> None:
    """Write a sharded model as a Hugging Face checkpoint in bfloat16, each rank its own tensors in a file of its own, with the
    model's companions. The folder appears only when it is complete. Collective. Raises ValueError on all ranks, which names the
    tensor, if one is not finite."""
    share = published_share(model, team)
    require_finite(str(path), *team.gather(not_finite(share)))
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in share.items()}
    forms_of_ranks = team.gather(forms)
    writers = [rank for rank, of_rank in enumerate(forms_of_ranks) if of_rank]
    files = dict(zip(writers, file_names(len(writers)), strict=True))
    with checkpoint.replaced(path) if team.first else nullcontext(path.with_name(path.name + ".part")) as part:
        team.barrier()  # the folder is there
        if share:
            write_shard(part / files[team.rank], forms, share.__getitem__)
        team.barrier()
        if team.first:
            checkpoint.write_side_files(model, part, {file: forms_of_ranks[rank] for rank, file in files.items()})
    team.barrier()


@torch.no_grad()
def load_sharded(path: Path, team: Team, settings: MeshSettings) -> Model:
    """Load a checkpoint as `fsdp.on_mesh` shards it. Apart from its own part, a rank holds at most one layer without experts, or
    the embedding and output. Raises like `load_pretrained`."""
    source = checkpoint.CheckpointSource.open(path)
    source.require_repeats()
    c, part = source.config, Model.planned(source.config)
    model = on_mesh(Model.planned(c), team, settings)
    model.companions = read_companions(path)
    weights = [name for name, _ in model.named_parameters() if ".experts." not in name]
    for layer, planned in zip(model.decoder_layers, part.decoder_layers, strict=True):
        if planned.router_bias is not None:
            planned.router_bias = layer.router_bias = torch.zeros(c.num_experts)

    def read_whole(names: list[str], views: Callable[[], dict[str, Tensor]]) -> None:
        """Read weights of the model from their tensors, and keep this rank's part of each."""
        for name in names:
            _put(part, name, torch.empty(model.get_parameter(name).shape))
        source.read({name: view for name, view in views().items() if not view.is_meta})
        for name in names:
            whole, weight = part.get_parameter(name), model.get_parameter(name)
            assert isinstance(weight, DTensor)
            cut = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.to_local().copy_(cut.to_local())
            _put(part, name, whole.to("meta"))

    for index, (layer, planned) in enumerate(zip(model.layers, part.layers, strict=True)):
        prefix = f"model.layers.{index}."
        names = [name for name in weights if name.startswith(f"_layers.{index}.")]
        read_whole(names, partial(checkpoint.layer_views, planned, c, prefix))
        planned.router_bias = None  # it is read
        if isinstance(layer.experts, DealtExperts):
            source.read(_own_experts(layer.experts, team, c, prefix))
    names = [name for name in weights if not name.startswith("_layers.")]
    read_whole(names, partial(checkpoint.hugging_face_views, part))
    return model


def _put(model: Model, name: str, weight: Tensor) -> None:
    where, _, last = name.rpartition(".")
    setattr(model.get_submodule(where), last, nn.Parameter(weight, requires_grad=False))


def _own_experts(experts: DealtExperts, team: Team, c: ModelConfig, prefix: str) -> dict[str, Tensor]:
    w_in, w_out = (w.to_local() if isinstance(w, DTensor) else w for w in (experts.w_in, experts.w_out))
    per_rank = -(-experts.dealt // team.mesh.expert_shard)  # as `torch.chunk` cuts
    first = team.place["ep"] * experts.dealt + team.place["expert_shard"] * per_rank
    views: dict[str, Tensor] = {}
    for number in range(len(w_in)):
        views |= checkpoint.expert_views(w_in[number], w_out[number], c, prefix, first + number)
    return views
