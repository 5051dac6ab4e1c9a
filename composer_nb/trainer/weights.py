"""Differences between checkpoints in directories: encoded, applied, verified, measured.

Checkpoints are Hugging Face directories, with one file or the shards of an index, or full versions (`payload`). Their tensors are
mapped one after another, so checkpoints of any size need only the memory of a shard.
"""

import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from composer_nb.kernels.delta.codec import bits, encode
from composer_nb.trainer.models.shards import Mapped, read_shards, size_of
from composer_nb.trainer.versions import manifest as manifests
from composer_nb.trainer.versions import payload as payloads
from composer_nb.trainer.versions.receiver import read_version
from composer_nb.trainer.versions.store import VersionStore


def encode_delta(base_dir: str | Path, target_dir: str | Path, out_dir: str | Path) -> manifests.Manifest:
    """Write the delta from one checkpoint to another. Both may be full versions or plain Hugging Face checkpoints, which count as
    version 0 and as the version after the base. Raises ValueError, without a change, if they are not of one model or `out_dir`
    exists (WeightFault for damage), and StoreError if it cannot be written."""
    base, _ = read_full(Path(base_dir), 0)
    target, files = read_full(Path(target_dir), base.version + 1)
    if target.version <= base.version:
        raise manifests.MisplacedVersion(
            f"{target_dir} is version {target.version}, not after {base.version} of {base_dir}"
        )
    try:
        manifests.check_same_form(base.entries, target.entries)
        payloads.side_names(files)
    except ValueError as error:
        raise ValueError(f"{base_dir} and {target_dir}: {error}") from None
    return _write(Path(out_dir), target, base, files)


def apply_delta(base_dir: str | Path, delta_dir: str | Path, out_dir: str | Path) -> manifests.Manifest:
    """Write the full version that a base and a delta give, a tensor at a time and in files like the base's. Raises WeightFault,
    without writing, if either is damaged or the delta has another base; ValueError if `out_dir` exists; StoreError if it cannot
    be written."""
    delta = open_link(Path(delta_dir))
    base, files = read_full(Path(base_dir), delta.manifest.base.version if delta.manifest.base else 0)
    target = delta.manifest.state(payloads.Decoded(base, [delta]))
    groups = [sorted(entry.name for entry in shard) for shard in read_shards(Path(base_dir))]
    return _write(Path(out_dir), target, None, files | payloads.side_files_of([delta]), groups)


def fetch_version(store: str | Path, version: int, out_dir: str | Path) -> manifests.Manifest:
    """Write a version of a store in full, however it is stored there. Raises WeightFault, without writing, for a version that is
    missing or damaged on all routes; ValueError if `out_dir` exists; StoreError if it cannot be read or written."""
    fetched = read_version(VersionStore(store), version)
    return _write(Path(out_dir), fetched.state, None, fetched.files)


def _write(
    out: Path,
    target: manifests.WeightState,
    base: manifests.WeightState | None,
    files: Mapping[str, bytes],
    groups: Sequence[Sequence[str]] | None = None,
) -> manifests.Manifest:
    """Write a version, in full or as a delta against `base`, to a folder that appears only when it is complete. `groups` are the
    tensors of each file."""
    if out.exists():
        raise ValueError(f"{out} is there already; choose another place")
    store, part = VersionStore(out.parent), out.with_name(out.name + ".part")
    store.check_room(0 if base else sum(size_of(entry.torch_form) for entry in target.entries.values()))
    shutil.rmtree(part, ignore_errors=True)
    try:
        written = [payloads.write_part(store, part.name, target, base, groups=groups)]
        needs = None if base is None else manifests.BaseVersion(version=base.version, hash=base.hash)
        manifest = manifests.seal(target.version, needs, written, payloads.write_side(store, part.name, written, files))
        store.write(f"{part.name}/{manifests.MANIFEST}", manifest.dump())
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return manifest


def verify(version_dir: str | Path) -> manifests.Manifest:
    """Check a version directory: its manifest, each file, and each tensor of a full version. Raises WeightFault for a fault."""
    path = Path(version_dir)
    link = open_link(path)
    if extra := sorted({file.name for file in path.iterdir()} - link.manifest.files.keys() - {manifests.MANIFEST}):
        raise manifests.DamagedVersion(f"{path}: {extra[0]} is not in the manifest")
    if link.manifest.base is None:
        deque(payloads.Decoded(None, [link]).values(), 0)
    return link.manifest


def delta_sizes(before: Path, after: Path) -> dict[str, Any]:
    """Return the bytes of `after` in full and of its lossless delta (payloads alone) against `before`, and the share of weights
    whose bits changed. Raises ValueError if the two do not have the same tensors."""
    old, new = (Mapped(read_shards(path)) for path in (before, after))
    try:
        manifests.check_same_form(_forms(old), _forms(new))
    except ValueError as error:
        raise ValueError(f"{before} and {after}: {error}") from None
    full = delta = changed = count = 0
    for name in new:
        a, b = bits(old[name]), bits(new[name])
        full += b.nbytes
        delta += len(encode(a, b, str(new[name].dtype).removeprefix("torch."))[1])
        changed += int(np.count_nonzero(a != b))
        count += b.size
    return {"full_bytes": full, "delta_bytes": delta, "changed_fraction": changed / max(count, 1)}


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, manifests.TensorEntry]:
    """Entries without hashes, for which no byte is read."""
    return {
        name: manifests.TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), hash="")
        for name, tensor in tensors.items()
    }


def open_link(path: Path) -> payloads.Link:
    """Check and map the files of a version directory. Raises WeightFault if it is unusable."""
    if not (path / manifests.MANIFEST).is_file():
        raise manifests.MissingVersion(f"{path}: not a weight version, {manifests.MANIFEST} is missing")
    manifest = manifests.Manifest.load((path / manifests.MANIFEST).read_bytes(), str(path / manifests.MANIFEST))
    return payloads.read_link(VersionStore(path.parent), path.name, manifest, mapped=True)


def read_full(path: Path, number: int) -> tuple[manifests.WeightState, dict[str, bytes]]:
    """Return a checkpoint's weights, mapped and hashed, and its side files. A plain checkpoint counts as version `number`. Raises
    WeightFault, FileNotFoundError or ValueError."""
    if not (path / manifests.MANIFEST).exists():
        return manifests.WeightState.of(number, Mapped(read_shards(path))), side_files(path)
    link = open_link(path)
    m = link.manifest
    if m.base is not None:
        raise manifests.ForeignBase(f"{path} is a delta against version {m.base.version}; apply it to that one first")
    deque(payloads.Decoded(None, [link]).values(), 0)
    return m.state(link.payload), side_files(path)


def side_files(path: Path) -> dict[str, bytes]:
    """Return the files beside the weights of a checkpoint: config.json, the tokenizer."""
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != manifests.MANIFEST]
    return {file.name: file.read_bytes() for file in files if ".safetensors" not in file.name}
