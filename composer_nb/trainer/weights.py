"""Weight versions: the lossless delta between two checkpoints, and the self-describing directory that holds a version.

v000012/
  model.safetensors    a full version: with config.json beside it, a Hugging Face checkpoint like any other
  delta.safetensors    or a delta: one uint8 payload for each tensor that changed
  config.json, ...     side files, byte for byte
  manifest.json        written last: a directory without it is no version

The manifest names the version, its base, every tensor's dtype, shape, encoding and hash, the hash of the whole resulting
state, size and hash of every file, and carries a seal over itself. Whatever is read is checked against it before it is used.

Covers one payload file a version, held in memory. Leaves out, for now: shards, and a codec conditioned on the base.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, model_validator
from safetensors import SafetensorError
from torch import Tensor

from composer_nb.trainer.checkpoint import read_tensors
from composer_nb.trainer.codec import CODECS, bits, encode

MANIFEST, FULL, DELTA = "manifest.json", "model.safetensors", "delta.safetensors"
_NAMES = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}


class WeightFault(ValueError):
    """A version that must not be used, or one that must not be published. The message names what is wrong with what."""


class DamagedVersion(WeightFault):
    """Bytes that are not those which were published."""


class MissingVersion(WeightFault):
    """A version, or a file of one, that is not there: never finished, lost, or removed."""


class MisplacedVersion(WeightFault):
    """A version that stands where another one should: renamed, copied, or out of order."""


class ForeignBase(WeightFault):
    """A delta against other weights than the ones at hand."""


# Hashes and the manifest


def digest(data: Any) -> str:
    """BLAKE2b, 160 bits, in hex, of bytes or a contiguous array."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


class Record(BaseModel):
    """A line of canonical JSON that carries its own hash, so that not one bit of it can change unnoticed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def dump(self) -> bytes:
        record = self.model_dump()
        record["seal"] = digest(json.dumps(record, sort_keys=True).encode())
        return json.dumps(record, sort_keys=True).encode() + b"\n"

    @classmethod
    def load(cls, data: bytes, what: str) -> Self:
        """What was dumped. Raises DamagedVersion, naming `what`, when `data` is anything else."""
        try:
            record = json.loads(data)
            del record["seal"]
            loaded = cls.model_validate(record)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            first = str(error).splitlines()[0]
            raise DamagedVersion(f"{what} is not what was written: {first}") from None
        if loaded.dump() != data:
            raise DamagedVersion(f"{what} is not what was written: its seal is broken")
        return loaded


class Entry(Record):
    """A tensor in a manifest: torch's name of its dtype, its shape, the hash of its bytes, the codec's name."""

    dtype: str
    shape: list[int]
    hash: str
    encoding: str = "raw"

    @property
    def form(self) -> tuple[str, list[int]]:
        return self.dtype, self.shape


class Base(Record):
    version: int
    hash: str


class File(Record):
    bytes: int
    hash: str


class Manifest(Record):
    """What a version directory holds and what comes of it."""

    format: Literal["composer-nb-weights-1"] = "composer-nb-weights-1"
    version: int
    base: Base | None
    hash: str
    """`state_hash` of the resulting tensors."""
    tensors: dict[str, Entry]
    files: dict[str, File]
    writer: str = ""
    """Token of the publisher; empty for a directory made by hand."""

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if _hash_of(self.tensors) != self.hash:
            raise ValueError("the hash of all does not fit those of the tensors")
        return self


def state_hash(tensors: Mapping[str, Tensor]) -> str:
    """One hash over names, dtypes, shapes and bytes of all tensors, in whatever order they come."""
    return _hash_of(_entries(tensors))


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    entries = {}
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in _DTYPES or tensor.device.type != "cpu":
            raise ValueError(f"{name}: a {dtype} tensor on {tensor.device} can not be published")
        entries[name] = Entry(dtype=dtype, shape=list(tensor.shape), hash=digest(bits(tensor)))
    return entries


def _hash_of(entries: Mapping[str, Entry]) -> str:
    return digest(json.dumps(sorted((name, e.dtype, e.shape, e.hash) for name, e in entries.items())).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All weights of one version, on the CPU, under Hugging Face's names. The tensors must not change any more."""

    version: int
    tensors: Mapping[str, Tensor]
    entries: Mapping[str, Entry]
    hash: str

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor]) -> State:
        """Hashes `tensors`. Raises ValueError for one that can not be published."""
        entries = _entries(tensors)
        return cls(version=version, tensors=dict(tensors), entries=entries, hash=_hash_of(entries))


def check_same_form(old: Mapping[str, Entry], new: Mapping[str, Entry]) -> None:
    """Raises ValueError that names the first tensor by which two sets of weights are not versions of one model."""
    for name in sorted(old.keys() | new.keys()):
        forms = [entries[name].form if name in entries else "missing" for entries in (old, new)]
        if forms[0] != forms[1]:
            raise ValueError(f"they are not versions of one model: {name} is {forms[1]}, was {forms[0]}")


# A version as files, and back


def pack(
    target: State, base: State | None, files: Mapping[str, bytes], writer: str = ""
) -> tuple[Manifest, dict[str, bytes]]:
    """A version's manifest and its other files: in full, or as a delta against `base`. Raises ValueError when the two are
    not of one model, or a side file's name is not a plain one."""
    for name in files:
        if Path(name).name != name or name in (MANIFEST, FULL, DELTA, ""):
            raise ValueError(f"{name!r} can not be a side file of a version")
    entries = {name: entry.model_copy(update={"encoding": "raw"}) for name, entry in target.entries.items()}
    if base is None:
        tensors = {name: tensor.contiguous() for name, tensor in target.tensors.items()}
        payload = {FULL: safetensors.torch.save(tensors, metadata={"format": "pt"})}
    else:
        check_same_form(base.entries, target.entries)
        parts = {}
        for name, entry in entries.items():
            encoding, data = encode(bits(base.tensors[name]), bits(target.tensors[name]), entry.dtype)
            entries[name] = entry.model_copy(update={"encoding": encoding})
            if data:
                parts[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        payload = {DELTA: safetensors.torch.save(parts)}
    everything = {**payload, **files}
    manifest = Manifest(
        version=target.version,
        base=None if base is None else Base(version=base.version, hash=base.hash),
        hash=target.hash,
        tensors=entries,
        files={name: File(bytes=len(data), hash=digest(data)) for name, data in everything.items()},
        writer=writer,
    )
    return manifest, everything


def unpack(manifest: Manifest, files: Mapping[str, bytes], base: State | None, what: str) -> State:
    """The weights of a version. Raises MissingVersion or DamagedVersion for its files, ForeignBase for a base that is not
    the delta's; `what` is named in all of them."""
    payload = check_files(manifest, files, what)
    needs, tensors = manifest.base, {}
    if needs is not None and (base is None or (base.version, base.hash) != (needs.version, needs.hash)):
        having = "nothing" if base is None else f"version {base.version} ({base.hash[:8]})"
        raise ForeignBase(f"{what}: a delta against version {needs.version} ({needs.hash[:8]}), applied to {having}")
    for name, entry in manifest.tensors.items():
        tensor = payload[name] if needs is None or base is None else _decode(name, entry, base, payload, what)
        if (tensor.dtype, list(tensor.shape)) != (_DTYPES.get(entry.dtype), entry.shape):
            raise DamagedVersion(
                f"{what}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the manifest has {entry.form}"
            )
        known = base.entries[name].hash if base is not None and entry.encoding == "same" else digest(bits(tensor))
        if known != entry.hash:
            raise DamagedVersion(f"{what}: {name} is not what was published")
        tensors[name] = tensor
    return State(version=manifest.version, tensors=tensors, entries=manifest.tensors, hash=manifest.hash)


def check_files(manifest: Manifest, files: Mapping[str, bytes], what: str) -> dict[str, Tensor]:
    """Checks every file of a version and the names in its payload. Returns the payload's tensors."""
    for name, file in manifest.files.items():
        if name not in files:
            raise MissingVersion(f"{what}/{name} is missing")
        if (len(files[name]), digest(files[name])) != (file.bytes, file.hash):
            raise DamagedVersion(f"{what}/{name} ({len(files[name])} bytes of {file.bytes}) is not what was published")
    name = FULL if manifest.base is None else DELTA
    try:
        payload = safetensors.torch.load(files[name] if name in manifest.files else b"")
    except SafetensorError as error:
        raise DamagedVersion(f"{what}: {name} is not in safetensors format ({error})") from None
    if payload.keys() != {tensor for tensor, entry in manifest.tensors.items() if entry.encoding != "same"}:
        raise DamagedVersion(f"{what}: {name} holds other tensors than the manifest")
    return payload


def _decode(name: str, entry: Entry, base: State, payload: Mapping[str, Tensor], what: str) -> Tensor:
    if name not in base.tensors or base.entries[name].form != entry.form:
        raise DamagedVersion(f"{what}: {name} has another dtype or shape than in its base")
    if entry.encoding not in CODECS:
        raise DamagedVersion(f"{what}: {name} is encoded as {entry.encoding!r}, which this release can not read")
    data = payload[name].numpy().tobytes() if name in payload else b""
    try:
        decoded = CODECS[entry.encoding].decode(bits(base.tensors[name]), data, entry.dtype)
    except ValueError as error:
        raise DamagedVersion(f"{what}: {name}: {error}") from None
    return torch.from_numpy(decoded.view(np.uint8)).view(_DTYPES[entry.dtype]).reshape(entry.shape)


# Directories


def encode_delta(base_dir: str | Path, target_dir: str | Path, out_dir: str | Path) -> Manifest:
    """Writes what turns one checkpoint into another. Both may be full versions or plain Hugging Face checkpoints, which
    count as version 0 and as the one after the base. Raises ValueError (WeightFault for what is damaged) and changes nothing
    when they are not of one model or `out_dir` is there already."""
    base, _ = _read_full(Path(base_dir), 0)
    target, files = _read_full(Path(target_dir), base.version + 1)
    if target.version <= base.version:
        raise MisplacedVersion(f"{target_dir} is version {target.version}, not after {base.version} of {base_dir}")
    try:
        manifest, everything = pack(target, base, files)
    except ValueError as error:
        raise ValueError(f"{base_dir} and {target_dir}: {error}") from None
    _write(Path(out_dir), manifest, everything)
    return manifest


def apply_delta(base_dir: str | Path, delta_dir: str | Path, out_dir: str | Path) -> Manifest:
    """Writes the full version that a delta makes of its base. Raises WeightFault, and writes nothing, when either is damaged
    or the delta is another base's; ValueError when `out_dir` is there already."""
    manifest, files = _read(Path(delta_dir))
    base, _ = _read_full(Path(base_dir), manifest.base.version if manifest.base else 0)
    state = unpack(manifest, files, base, str(delta_dir))
    side = {name: files[name] for name in manifest.files if name not in (FULL, DELTA)}
    full, everything = pack(state, None, side)
    _write(Path(out_dir), full, everything)
    return full


def verify(version_dir: str | Path) -> Manifest:
    """Checks a version directory: its manifest, each file, and in a full version each tensor. Raises WeightFault."""
    manifest, files = _read(Path(version_dir))
    if extra := sorted(files.keys() - manifest.files.keys()):
        raise DamagedVersion(f"{version_dir}: {extra[0]} is not in the manifest")
    if manifest.base is None:
        unpack(manifest, files, None, str(version_dir))
    else:
        check_files(manifest, files, str(version_dir))
    return manifest


def side_files(path: Path) -> dict[str, bytes]:
    """What lies in a checkpoint beside its weights: config.json, the tokenizer."""
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != MANIFEST]
    return {file.name: file.read_bytes() for file in files if ".safetensors" not in file.name}


def _read(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    if not (path / MANIFEST).is_file():
        raise MissingVersion(f"{path}: not a weight version, {MANIFEST} is missing")
    files = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
    return Manifest.load(files.pop(MANIFEST), str(path / MANIFEST)), files


def _read_full(path: Path, number: int) -> tuple[State, dict[str, bytes]]:
    if not (path / MANIFEST).exists():
        return State.of(number, read_tensors(path)), side_files(path)
    manifest, files = _read(path)
    if manifest.base is not None:
        raise ForeignBase(f"{path} is a delta against version {manifest.base.version}; apply it to that one first")
    return unpack(manifest, files, None, str(path)), side_files(path)


def _write(path: Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    if path.exists():
        raise ValueError(f"{path} is there already; choose another place")
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, data in {**files, MANIFEST: manifest.dump()}.items():
        (part / name).write_bytes(data)
    os.replace(part, path)


def delta_sizes(before: Path, after: Path) -> dict[str, Any]:
    """Bytes of `after` in full, and of its lossless delta (payloads alone) against `before`; the share of weights whose bits
    changed. Raises ValueError when the two do not hold the same tensors."""
    old, new = (State.of(number, read_tensors(path)) for number, path in enumerate((before, after)))
    try:
        check_same_form(old.entries, new.entries)
    except ValueError as error:
        raise ValueError(f"{before} and {after}: {error}") from None
    full = delta = changed = count = 0
    for name, entry in new.entries.items():
        a, b = bits(old.tensors[name]), bits(new.tensors[name])
        full += b.nbytes
        delta += len(encode(a, b, entry.dtype)[1])
        changed += int(np.count_nonzero(a != b))
        count += b.size
    return {"full_bytes": full, "delta_bytes": delta, "changed_fraction": changed / max(count, 1)}
