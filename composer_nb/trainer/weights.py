"""Differences between checkpoints in directories: encoded, applied, verified, measured.

Checkpoints are Hugging Face directories, with one file or the shards of an index, or full versions (`payload`). Their tensors are
mapped one after another, so checkpoints of any size need only the memory of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from composer_nb.kernels.delta.codec import bits, encode
from composer_nb.trainer.models.shards import Mapped, read_shards
from composer_nb.trainer.versions.full import apply_chain, layout, new_version, open_link, read_full
from composer_nb.trainer.versions.manifest import (
    MANIFEST,
    BaseVersion,
    DamagedVersion,
    Manifest,
    MisplacedVersion,
    TensorEntry,
    check_same_form,
    seal,
)
from composer_nb.trainer.versions.payload import decoded, side_names, write_part, write_side


def encode_delta(base_dir: str | Path, target_dir: str | Path, out_dir: str | Path) -> Manifest:
    """Write the delta from one checkpoint to another. Both may be full versions or plain Hugging Face checkpoints, which count as
    version 0 and as the version after the base. Raises ValueError, without a change, if they are not of one model or `out_dir`
    exists (WeightFault for damage), and StoreError if it cannot be written."""
    base, _ = read_full(Path(base_dir), 0)
    target, files = read_full(Path(target_dir), base.version + 1)
    if target.version <= base.version:
        raise MisplacedVersion(f"{target_dir} is version {target.version}, not after {base.version} of {base_dir}")
    try:
        check_same_form(base.entries, target.entries)
        side_names(files)
    except ValueError as error:
        raise ValueError(f"{base_dir} and {target_dir}: {error}") from None
    with new_version(Path(out_dir)) as (store, part):
        written = write_part(store, part, target, base)
        side = write_side(store, part, [written], files)
        manifest = seal(target.version, BaseVersion(version=base.version, hash=base.hash), [written], side)
        store.write(f"{part}/{MANIFEST}", manifest.dump())
    return manifest


def apply_delta(base_dir: str | Path, delta_dir: str | Path, out_dir: str | Path) -> Manifest:
    """Write the full version that a base and a delta give. Raises WeightFault, without writing, if either is damaged or the delta
    has another base; ValueError if `out_dir` exists; StoreError if it cannot be written."""
    delta = open_link(Path(delta_dir))
    base, files = read_full(Path(base_dir), delta.manifest.base.version if delta.manifest.base else 0)
    return apply_chain(base, [delta], Path(out_dir), layout(Path(base_dir)), files)


def verify(version_dir: str | Path) -> Manifest:
    """Check a version directory: its manifest, each file, and each tensor of a full version. Raises WeightFault for a fault."""
    path = Path(version_dir)
    link = open_link(path)
    if extra := sorted({file.name for file in path.iterdir()} - link.manifest.files.keys() - {MANIFEST}):
        raise DamagedVersion(f"{path}: {extra[0]} is not in the manifest")
    if link.manifest.base is None:
        for _ in decoded(None, [link]):
            pass
    return link.manifest


def delta_sizes(before: Path, after: Path) -> dict[str, Any]:
    """Return the bytes of `after` in full and of its lossless delta (payloads alone) against `before`, and the share of weights
    whose bits changed. Raises ValueError if the two do not have the same tensors."""
    old, new = (Mapped(read_shards(path)) for path in (before, after))
    try:
        check_same_form(_forms(old), _forms(new))
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


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Entries without hashes, for which no byte is read."""
    return {
        name: TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), hash="")
        for name, tensor in tensors.items()
    }
