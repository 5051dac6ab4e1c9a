"""The description of a version's weights: a sealed manifest, hashes, and the faults that a version can have.

The manifest names the version, its base, the dtype, shape, encoding and hash of every tensor, the hash of the whole resulting
state, and the size and hash of every file. It carries a seal over itself. All data are checked against it before use. This module
does not read or write files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor

from composer_nb.harness.untrusted import json_of, single
from composer_nb.kernels.delta.codec import bits
from composer_nb.trainer.models.shards import FORMATS, Form

# Tensors by Hugging Face's names.
Weights = Mapping[str, Tensor]
# Files beside the weights of a version, by name.
SideFiles = Mapping[str, bytes]
MANIFEST = "manifest.json"
# The hash of everything: BLAKE2b with 160 bits.
BLAKE = partial(hashlib.blake2b, digest_size=20)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS.values()}


class WeightFault(ValueError):
    """A version must not be used, or must not be published. The message names the fault and its place.

    Attributes:
        at: Another version that must not be used either.
    """

    at: int | None = None


class DamagedVersion(WeightFault):
    """Bytes differ from the published ones."""


class MissingVersion(WeightFault):
    """A version, or one of its files, is missing: never finished, lost, or removed."""


class MisplacedVersion(WeightFault):
    """A version is in the place of another: renamed, copied, or out of order."""


class ForeignBase(WeightFault):
    """A delta is against other weights than the available ones."""


def digest(data: Any) -> str:
    """Return the hash (`BLAKE`), in hex, of bytes or a contiguous array."""
    return BLAKE(data).hexdigest()


class SealedRecord(BaseModel):
    """A line of canonical JSON with its own hash, so that any change of a bit is detected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def dump(self) -> bytes:
        record = self.model_dump()
        record["seal"] = digest(json.dumps(record, sort_keys=True).encode())
        return json.dumps(record, sort_keys=True).encode() + b"\n"

    @classmethod
    def load(cls, data: bytes, what: str) -> Self:
        """Return the dumped record. Raises DamagedVersion, which names `what`, if `data` is anything else."""
        try:
            record = json_of(data)
            del record["seal"]
            loaded = cls.model_validate(record)
        except (ValueError, TypeError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise DamagedVersion(f"{what} is not what was written: {first}") from None
        if loaded.dump() != data:
            raise DamagedVersion(f"{what} is not what was written: its seal is broken")
        return loaded


class TensorEntry(SealedRecord):
    """A tensor in a manifest: torch's name of its dtype, its shape, the hash of its bytes, the name of the codec, and the file
    with its payload, if any."""

    dtype: str
    shape: list[int]
    hash: str
    encoding: str = "raw"
    file: str = ""

    @property
    def form(self) -> tuple[str, list[int]]:
        return self.dtype, self.shape

    @property
    def torch_form(self) -> Form:
        """Return dtype and shape. Raises KeyError for a dtype unknown to this release."""
        return _DTYPES[self.dtype], tuple(self.shape)


class BaseVersion(SealedRecord):
    version: int
    hash: str


class PayloadFile(SealedRecord):
    bytes: int
    hash: str


class WriterPart(SealedRecord):
    """The part of a version by one writer: some of its tensors, and the files that hold them."""

    tensors: dict[str, TensorEntry]
    files: dict[str, PayloadFile]


class Manifest(WriterPart):
    """The contents of a version directory, and the weights that they decode to.

    Attributes:
        hash: `state_hash` of the resulting tensors.
    """

    format: Literal["composer-nb-weights-1"] = "composer-nb-weights-1"
    version: int
    base: BaseVersion | None
    hash: str

    @property
    def size(self) -> int:
        """Number of bytes of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def state(self, tensors: Mapping[str, Tensor]) -> WeightState:
        """Return the state of these tensors, which this manifest describes."""
        return WeightState(version=self.version, tensors=tensors, entries=self.tensors, hash=self.hash)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in {*self.files, *(entry.file for entry in self.tensors.values() if entry.file)}:
            if single(name).casefold() == MANIFEST:
                raise ValueError(f"{name!r} cannot be a file of a version: it is what names them")
        if hash_of(self.tensors) != self.hash:
            raise ValueError("the hash of all does not fit those of the tensors")
        return self


def seal(
    version: int, base: BaseVersion | None, parts: Iterable[WriterPart], files: Mapping[str, PayloadFile]
) -> Manifest:
    """Return the manifest of several writers' parts, with side files."""
    tensors, payload = dict[str, TensorEntry](), dict(files)
    for part in parts:
        tensors |= part.tensors
        payload |= part.files
    return Manifest(version=version, base=base, hash=hash_of(tensors), tensors=tensors, files=payload)


# Weights


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return one hash over the names, dtypes, shapes and bytes of all tensors, independent of their order."""
    return hash_of(entries_of(tensors))


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return the manifest's entries for `tensors`, each read once. Raises ValueError for one that cannot be published."""
    entries = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.device.type != "cpu":
            raise ValueError(f"{name}: a {dtype} tensor on {tensor.device} cannot be published")
        entries[name] = TensorEntry(dtype=dtype, shape=list(tensor.shape), hash=digest(bits(tensor)))
    return entries


def hash_of(entries: Mapping[str, TensorEntry]) -> str:
    """Return `state_hash`, computed from entries of a manifest."""
    return digest(json.dumps(sorted((name, e.dtype, e.shape, e.hash) for name, e in entries.items())).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightState:
    """Weights of one version, on the CPU, under Hugging Face's names, in memory or mapped from files on demand. They must not
    change any more."""

    version: int
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, TensorEntry]
    hash: str

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor]) -> WeightState:
        """Return the state of `tensors`, hashed. Raises ValueError for one that cannot be published."""
        entries = entries_of(tensors)
        return cls(version=version, tensors=tensors, entries=entries, hash=hash_of(entries))


def check_same_form(old: Mapping[str, TensorEntry], new: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError, which names the first such tensor, if two sets of weights do not have the same form."""
    for name in sorted(old.keys() | new.keys()):
        forms = [entries[name].form if name in entries else "missing" for entries in (old, new)]
        if forms[0] != forms[1]:
            raise ValueError(f"they are not versions of one model: {name} is {forms[1]}, was {forms[0]}")
