"""Checkpoints that ranks write together and that any number of ranks, on any mesh, can resume from.

Each rank writes its shards (torch.distributed.checkpoint). The metadata describe the sharding, so a reader takes the parts of its
own shards from the files. Saving copies the state and returns; the copy is written while training continues.
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
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

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
"""The types in the metadata of tensors. The metadata of bytes are excluded, because bytes are pickles themselves."""


class _Unpickler(
    pickle._Unpickler
):  # in Python: for the number of an object, the one in C makes a table of that length
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _METADATA:
            raise ValueError(f"its metadata would run {module}.{name}")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """A reader of untrusted checkpoints. Their metadata is a pickle, from which only descriptions of tensors are accepted. It is
    read once: what is used is what was checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ValueError("its metadata describe no checkpoint")
        for entry in metadata.storage_data.values():
            checked(entry.relative_path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save(optimizer: ShardedOptimizer, folder: Path, group: dist.ProcessGroup | None = None) -> Future[Any]:
    """Begin to write a checkpoint, on all ranks. It is complete once the future is done, which raises any error. `group`, a gloo
    group of all ranks (default: the one that all have joined), must not be used for anything else meanwhile."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    begun = dcp.async_save(optimizer.state(), storage_writer=writer, process_group=group)
    assert isinstance(begun, Future)
    return begun


def restore(optimizer: ShardedOptimizer, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Restore a checkpoint, on all ranks. Raises ValueError, which names the folder, if it cannot be read."""
    state = optimizer.state()
    with readable(folder):
        dcp.load(state, storage_reader=Reader(folder), process_group=group)
    optimizer.load(state)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:  # of many kinds: files may be missing, damaged or another model's
        first = str(error).strip().splitlines()[-1:]
        raise ValueError(f"{folder}: not a checkpoint of this model, or a damaged one ({' '.join(first)})") from error
