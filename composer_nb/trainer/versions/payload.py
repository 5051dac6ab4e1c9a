"""The files of a weight version: written shard by shard, read and decoded tensor by tensor, and checked before use.

v000012/
  model.safetensors    a full version: with config.json beside it, a Hugging Face checkpoint like any other
  delta.safetensors    or a delta: one uint8 payload for each tensor that changed
  config.json, ...     side files, byte for byte
  manifest.json        written last: a directory without it is no version

With more than 256 MiB of weights, or more than one writer, the payload is several files
(`delta-00001-of-00003.safetensors`, `delta-rank00002-…`), and a full version has an index beside them, also of one rank.

While a version is written, one tensor of a full version, or the payloads of one shard of a delta, are in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from composer_nb.harness.untrusted import beneath, is_plain
from composer_nb.kernels.delta.codec import CODECS, Bits, bits, encode
from composer_nb.trainer.models.shards import INDEX, Mapped, Shard, bytes_of, header_of, index_of, read_shard, split
from composer_nb.trainer.versions import manifest as manifests
from composer_nb.trainer.versions.store import VersionStore, check_file

# Maximum bytes of weights in a file of a version, unless one tensor is larger: 256 MiB.
SHARD_BYTES = 1 << 28
FULL, DELTA, _SUFFIX = "model", "delta", ".safetensors"


# Writing


def write_part(
    store: VersionStore,
    where: str,
    target: manifests.WeightState,
    base: manifests.WeightState | None,
    rank: str = "",
    groups: Sequence[Sequence[str]] | None = None,
) -> manifests.WriterPart:
    """Write tensors into a version's folder, in full or as a delta against `base`. `rank` distinguishes the files of several
    writers; `groups` are the tensors of each file. Raises StoreError, and, before writing, ValueError if the two are not of one
    model."""
    if base is not None:
        manifests.check_same_form(base.entries, target.entries)
    forms = {name: entry.torch_form for name, entry in target.entries.items()}
    groups = groups or split(forms, SHARD_BYTES)
    entries, files = dict[str, manifests.TensorEntry](), dict[str, manifests.PayloadFile]()
    for number, names in enumerate(groups, 1):
        file = _file_name(FULL if base is None else DELTA, rank, number, len(groups))
        if base is None:
            header, order = header_of({name: forms[name] for name in names})
            pieces: Iterator[Any] = (bytes_of(target.tensors[name]) for name in order)
            entries |= {name: _as(target.entries[name], "raw", file) for name in names}
        else:
            coded = {name: _encoded(base, target, name) for name in names}
            entries |= {name: _as(target.entries[name], codec, file) for name, (codec, _) in coded.items()}
            payload = {name: data for name, (_, data) in coded.items() if data}
            if not payload:
                continue
            header, order = header_of({name: (torch.uint8, (len(data),)) for name, data in payload.items()})
            pieces = (payload[name] for name in order)
        files[file] = store.put(f"{where}/{file}", chain([header], pieces))
    return manifests.WriterPart(tensors=entries, files=files)


def _encoded(base: manifests.WeightState, target: manifests.WeightState, name: str) -> tuple[str, bytes]:
    entry = target.entries[name]
    if base.entries[name].hash == entry.hash:
        return "same", b""
    return encode(bits(base.tensors[name]), bits(target.tensors[name]), entry.dtype)


def _as(entry: manifests.TensorEntry, encoding: str, file: str) -> manifests.TensorEntry:
    return entry.model_copy(update={"encoding": encoding, "file": "" if encoding == "same" else file})


def _file_name(kind: str, rank: str, number: int, of: int) -> str:
    return f"{kind}{f'-{rank}' if rank else ''}{f'-{number:05d}-of-{of:05d}' if rank or of > 1 else ''}{_SUFFIX}"


def side_names(files: Mapping[str, bytes]) -> None:
    """Raise ValueError for an invalid name of a side file."""
    for name in files:
        if not is_plain(name) or "/" in name or name.casefold() == manifests.MANIFEST or _SUFFIX in name:
            raise ValueError(f"{name!r} cannot be a side file of a version")


def write_side(
    store: VersionStore, where: str, parts: Sequence[manifests.WriterPart], files: Mapping[str, bytes]
) -> dict[str, manifests.PayloadFile]:
    """Write side files, and the index of a full version that is not one `model.safetensors`. Raises StoreError."""
    tensors = {name: entry for part in parts for name, entry in part.tensors.items()}
    side, places = dict(files), dict[str, dict[str, manifests.Form]]()
    for name, entry in tensors.items():
        places.setdefault(entry.file, {})[name] = entry.torch_form
    if places.keys() - {f"{FULL}{_SUFFIX}"} and all(file.startswith(FULL) for file in places):
        side[INDEX] = index_of(places).encode()
    return {name: store.put(f"{where}/{name}", [data]) for name, data in side.items()}


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A version with its checked payload and its side files `files`: one step on the way to the weights of another version."""

    manifest: manifests.Manifest
    payload: Mapping[str, Tensor]
    files: Mapping[str, bytes]
    what: str


def read_link(store: VersionStore, where: str, manifest: manifests.Manifest, *, mapped: bool = False) -> Link:
    """Read a version into memory, or check it piece by piece and map its tensors on demand (`mapped`, of a directory). Raises
    MissingVersion, DamagedVersion or StoreError, which name the file."""
    shards, payload, side, what = list[Shard](), dict[str, Tensor](), dict[str, bytes](), f"{store.url}/{where}"
    for name, file in manifest.files.items():
        try:
            if mapped and name.endswith(_SUFFIX):
                check_file(store, f"{where}/{name}", file)
                shards.append(read_shard(beneath(Path(what), name)))
                continue
            data = store.read_file(f"{where}/{name}", file)
            if name.endswith(_SUFFIX):
                payload |= safetensors.torch.load(data)
            else:
                side[name] = data
        except manifests.WeightFault:
            raise
        except (SafetensorError, ValueError) as error:
            raise manifests.DamagedVersion(f"{what}/{name} is not in safetensors format ({error})") from None
    tensors = Mapped(shards) if mapped else payload
    if tensors.keys() != {tensor for tensor, entry in manifest.tensors.items() if entry.encoding != "same"}:
        raise manifests.DamagedVersion(f"{what}: its files hold other tensors than the manifest")
    return Link(manifest=manifest, payload=tensors, files=side, what=what)


def side_files_of(links: Sequence[Link]) -> dict[str, bytes]:
    """Return the side files at the end of a chain; deltas hold only those that may differ from their base's."""
    return {name: data for link in links for name, data in link.files.items() if name != INDEX}


def _check_chain(base: manifests.WeightState | None, links: Sequence[Link]) -> None:
    """Raise ForeignBase if a delta is not against the version before it, and DamagedVersion if forms differ along the chain."""
    having = None if base is None else manifests.BaseVersion(version=base.version, hash=base.hash)
    entries = None if base is None else base.entries
    for link in links:
        needs, m = link.manifest.base, link.manifest
        if needs is not None:
            if having != needs:
                at_hand = "nothing" if having is None else f"version {having.version} ({having.hash[:8]})"
                raise manifests.ForeignBase(
                    f"{link.what}: a delta against version {needs.version} ({needs.hash[:8]}), applied to {at_hand}"
                )
            try:
                manifests.check_same_form(entries or {}, m.tensors)
            except ValueError as error:
                raise manifests.DamagedVersion(f"{link.what}: {error}") from None
        having, entries = manifests.BaseVersion(version=m.version, hash=m.hash), m.tensors


class Decoded(Mapping[str, Tensor]):
    """The weights of the last of `links`, each decoded when it is asked for and checked against its manifest. Raises ForeignBase
    or DamagedVersion: at once for the chain (`_check_chain`), later for a tensor, which it names."""

    def __init__(self, base: manifests.WeightState | None, links: Sequence[Link]) -> None:
        _check_chain(base, links)
        self._base, self._links, self._entries = base, links, links[-1].manifest.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        base, links, entry = self._base, self._links, self._entries[name]
        try:
            form = entry.torch_form
        except KeyError:
            raise _damaged(links[-1], name, f"is {entry.dtype}, unknown to this release") from None
        tensor = _resolved(name, form, base, links)
        untouched = base is not None and all(link.manifest.tensors[name].encoding == "same" for link in links)
        actual = base.entries[name].hash if base is not None and untouched else manifests.digest(bits(tensor))
        if actual != entry.hash:
            raise _damaged(links[-1], name, "is not what was published")
        return tensor


def _resolved(name: str, form: manifests.Form, base: manifests.WeightState | None, links: Sequence[Link]) -> Tensor:
    """Return a tensor after the versions of `links`, from that of the base, if any. Raises DamagedVersion for a payload that does
    not fit."""
    tensor = None if base is None else base.tensors[name]
    current_bits: Bits | None = None if tensor is None else bits(tensor)
    for link in links:
        entry = link.manifest.tensors[name]
        if entry.encoding == "same":
            continue
        payload = link.payload[name]
        if link.manifest.base is None:
            if (payload.dtype, tuple(payload.shape)) != form:
                actual = f"is {payload.dtype} {tuple(payload.shape)}, the manifest has {entry.form}"
                raise _damaged(link, name, actual)
            tensor, current_bits = payload, bits(payload)
            continue
        if entry.encoding not in CODECS:
            raise _damaged(link, name, f"is encoded as {entry.encoding!r}, unknown to this release")
        if current_bits is None or payload.dtype != torch.uint8:
            raise _damaged(link, name, "has no weights to begin with, or a payload that is none")
        try:
            current_bits = CODECS[entry.encoding].decode(current_bits, payload.numpy().tobytes(), entry.dtype)
        except ValueError as error:
            raise _damaged(link, name, f"is not what was published ({error})") from None
        tensor = torch.from_numpy(current_bits.view(np.uint8)).view(form[0]).reshape(form[1])
    if tensor is None:
        raise _damaged(links[-1], name, "is unchanged, but there is nothing before it")
    return tensor


def _damaged(link: Link, name: str, problem: str) -> manifests.DamagedVersion:
    return manifests.DamagedVersion(f"{link.what}: {name} {problem}")
