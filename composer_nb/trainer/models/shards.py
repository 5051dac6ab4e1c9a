"""Safetensors files: one, or the shards of an index. Read a tensor at a time through a memory map, written a tensor at a time.

A file is 8 bytes (length of the header), the header (JSON: dtype, shape and place of each tensor), and the tensors' bytes.
"""

import json
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from composer_nb.harness.untrusted import json_of, single

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Largest file that `transformers` writes.
SHARD_BYTES = 50 * 10**9
# All that a file of ours may hold, by the format's own names: also scales, and weights that are packed into integers.
FORMATS: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in FORMATS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """A tensor's place in a file, its first byte and number of bytes, and its form. `dtype` is the format's own name of it, as in
    `FORMATS`; also of those that are not there."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


# The tensors of one file in the order of their bytes, without a gap.
Shard = tuple[TensorLocation, ...]


def read_shards(path: Path) -> list[Shard]:
    """The shards of the checkpoint in a folder, by name. Raises FileNotFoundError or ValueError that names the file, and the
    tensor where it is one that is there twice, or not where the index says."""
    index = path / INDEX
    if not index.is_file():
        return [read_shard(path / WHOLE)]
    if (path / WHOLE).exists():
        raise ValueError(f"{path}: holds both {WHOLE} and {INDEX}; remove the one that is not meant")
    promised = _read_index(index)
    shards = [read_shard(path / single(name)) for name in sorted(set(promised.values()))]
    files: dict[str, str] = {}
    for entry in (entry for shard in shards for entry in shard):
        if entry.name in files:
            raise ValueError(f"{path}: {entry.name} is in both {files[entry.name]} and {entry.file.name}")
        files[entry.name] = entry.file.name
    for name in sorted(promised.keys() | files.keys()):
        if promised.get(name) != files.get(name):
            where = [places.get(name, "nowhere") for places in (promised, files)]
            raise ValueError(f"{index}: says that {name} is in {where[0]}, but it is in {where[1]}")
    return shards


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = dict(json_of(index.read_text(encoding="utf-8"))["weight_map"].items())
        if not places:
            raise ValueError("it names no tensor")
        for name in places.values():
            single(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: this index is damaged ({error!r}); fetch or write it again") from None
    return places


def read_shard(file: Path) -> Shard:
    """Read the header of a file. Raises FileNotFoundError or ValueError that names it."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: this shard of the checkpoint is missing")
    try:
        safe_open(file, "pt")  # checks that the tensors lie within the file, one after another
        with file.open("rb") as stream:
            length = stream.read(8)
            header = stream.read(*struct.unpack("<Q", length))
        table = json.loads(header, object_pairs_hook=_no_key_twice)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file}: this shard is damaged ({error}); fetch or write it again") from None
    table.pop("__metadata__", None)
    begin = len(length) + len(header)
    entries = []
    for name, form in table.items():
        (first, last), shape = form["data_offsets"], tuple(form["shape"])
        span = {"start": begin + first, "size": last - first}
        entries.append(TensorLocation(name=name, file=file, dtype=form["dtype"], shape=shape, **span))
    return tuple(sorted(entries, key=lambda entry: (entry.start, entry.size)))


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]} is there twice")
    return table


def mapped(entry: TensorLocation) -> Tensor:
    """Return a tensor of a file, whose pages are the system's, to be dropped and read again. What is written into it reaches no
    file."""
    dtype = FORMATS[entry.dtype]
    if entry.size == 0:
        return torch.empty(entry.shape, dtype=dtype)
    pages: np.ndarray = np.memmap(entry.file, np.uint8, "c", entry.start, (entry.size,))
    if entry.start % dtype.itemsize:
        pages = pages.copy()
    return torch.from_numpy(pages).view(dtype).reshape(entry.shape)


class Mapped(Mapping[str, Tensor]):
    """The tensors of shards by name, each mapped when it is asked for and let go of with the last who holds it, so that a walk
    over all of them has one in memory at a time."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        """Raises ValueError that names a tensor of a dtype which is not known."""
        self._entries = {entry.name: entry for shard in shards for entry in shard}
        for entry in self._entries.values():
            if entry.dtype not in FORMATS:
                raise ValueError(f"{entry.file}: {entry.name} is {entry.dtype}; known are {', '.join(FORMATS)}")

    def __getitem__(self, name: str) -> Tensor:
        return mapped(self._entries[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with NaN or infinity; "" if there is none."""
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.is_floating_point() and tensor.dtype.itemsize > 1:
            if not all(bound.isfinite() for bound in tensor.aminmax()):
                return name
    return ""


def require_finite(what: str, *names: str) -> None:
    """Raise ValueError if a tensor of `what` has been named by `not_finite`, here or by another rank."""
    if name := next(filter(None, names), ""):
        raise ValueError(f"{what}: {name} holds NaN or infinity, so training has diverged; nothing is written")


# Writing

Form = tuple[torch.dtype, tuple[int, ...]]


def file_names(count: int) -> list[str]:
    """Return the names of a checkpoint's files."""
    return [WHOLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def split(forms: Mapping[str, Form], most: int) -> list[list[str]]:
    """Group tensors into files, in their order: as many as are at most `most` bytes together, as `transformers` does it;
    one that is larger by itself gets a file of its own. Raises ValueError where `most` is not positive."""
    if most < 1:
        raise ValueError(f"shard_bytes={most} must be at least 1")
    shards: list[list[str]] = []
    filling: list[str] = []
    filled = 0
    for name, form in forms.items():
        size = size_of(form)
        if size > most:
            shards.append([name])
            continue
        if filled + size > most:
            shards.append(filling)
            filling, filled = [], 0
        filling.append(name)
        filled += size
    return [*shards, filling] if filling else shards


def size_of(form: Form) -> int:
    """Bytes."""
    return form[0].itemsize * torch.Size(form[1]).numel()


def header_of(forms: Mapping[str, Form]) -> tuple[bytes, list[str]]:
    """A file's header, with its length before it, and the order of its tensors: wide dtypes first, so that all are aligned, and
    then by name, to the byte as the safetensors library writes them."""
    order = sorted(forms, key=lambda name: (-forms[name][0].itemsize, name))
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        dtype, shape = forms[name]
        end = offset + size_of(forms[name])
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, order


def index_of(files: Mapping[str, Mapping[str, Form]], uncounted: str = "no parameter") -> str:
    """Return the text of the index of `files`: file -> names and forms of its tensors. Tensors whose names end in `uncounted` are
    no parameters."""
    forms = {name: form for tensors in files.values() for name, form in tensors.items()}
    parameters = sum(torch.Size(form[1]).numel() for name, form in forms.items() if not name.endswith(uncounted))
    about = {"total_parameters": parameters, "total_size": sum(map(size_of, forms.values()))}
    places = {name: file for file, tensors in files.items() for name in tensors}
    return json.dumps({"metadata": about, "weight_map": places}, indent=2, sort_keys=True) + "\n"


def write_shard(file: Path, forms: Mapping[str, Form], read: Callable[[str], Tensor]) -> None:
    """Write a file of tensors, each of which `read` returns when it is written."""
    header, order = header_of(forms)
    with file.open("wb") as stream:
        stream.write(header)
        for name in order:
            stream.write(bytes_of(read(name)))
        stream.flush()
        os.fsync(stream.fileno())


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes, as a buffer; no copy where it lies on the CPU without gaps."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
