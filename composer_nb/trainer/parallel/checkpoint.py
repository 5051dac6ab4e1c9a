"""Checkpoints that ranks write together and that any number of ranks, on any mesh, can go on from.

Each rank writes what it holds (torch.distributed.checkpoint); how the weights were cut is in the metadata, so a reader takes from
the files whatever it holds itself. Saving copies the state and returns; the copy is written while training goes on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from composer_nb.harness.untrusted import checked
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer

_FORMS = "Metadata TensorStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
_METADATA = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _FORMS.split()),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name in ("Size", "float32", "float64", "bfloat16", "int64")),
}
"""The types in the metadata of tensors. Metadata of bytes are not among it: those are pickles themselves."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA:
            raise ValueError(f"its metadata would run {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """A reader of checkpoints that anybody may have written: their metadata is a pickle, of which only tensors are believed."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            found = _Unpickler(file).load()
        for place in found.storage_data.values():
            checked(place.relative_path)
        return super().read_metadata(*args, **kwargs)


def save(optimizer: ShardedOptimizer, folder: Path, group: dist.ProcessGroup) -> Future[Any]:
    """Begins to write a checkpoint, on all ranks. It is complete when the future is done, which raises what went wrong. `group`,
    of gloo and of all ranks, must not be used for anything else meanwhile."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    begun = dcp.async_save(optimizer.state(), storage_writer=writer, process_group=group)
    assert isinstance(begun, Future)
    return begun


def restore(optimizer: ShardedOptimizer, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Takes up where a checkpoint was taken, on all ranks. Raises ValueError that names the folder when it cannot be read."""
    state = optimizer.state()
    with readable(folder):
        dcp.load(state, storage_reader=Reader(folder), process_group=group)
    optimizer.load(state)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (
        Exception,
        CheckpointException,
    ) as error:  # of many kinds, for files that are missing, damaged or of another model
        first = str(error).strip().splitlines()[-1:]
        raise ValueError(f"{folder}: not a checkpoint of this model, or a damaged one ({' '.join(first)})") from error
