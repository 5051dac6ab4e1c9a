"""Differences between checkpoints: encoded, applied, verified, counted. Directories in, directories out.

Checkpoints are Hugging Face directories, one file or shards of an index, or full versions (`payload`). Their tensors are mapped
one after another, so checkpoints of any size pass through in the memory of a shard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from composer_nb.trainer.codec import bits, encode
from composer_nb.trainer.manifest import (
    MANIFEST,
    Base,
    DamagedVersion,
    Entry,
    File,
    ForeignBase,
    Manifest,
    MisplacedVersion,
    MissingVersion,
    State,
    check_same_form,
    seal,
)
from composer_nb.trainer.payload import (
    SHARD_BYTES,
    Link,
    check_chain,
    decoded,
    map_link,
    side_names,
    write_part,
    write_side,
)
from composer_nb.trainer.shards import INDEX, Mapped, bytes_of, header_of, read_shards, size_of, split
from composer_nb.trainer.store import Store


def encode_delta(
    base_dir: str | Path, target_dir: str | Path, out_dir: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> Manifest:
    """Writes what turns one checkpoint into another. Both may be full versions or plain Hugging Face checkpoints, which
    count as version 0 and as the one after the base. Raises ValueError (WeightFault for what is damaged) and changes nothing
    when they are not of one model or `out_dir` is there already; StoreError when it can not be written."""
    base, _ = read_full(Path(base_dir), 0)
    target, files = read_full(Path(target_dir), base.version + 1)
    if target.version <= base.version:
        raise MisplacedVersion(f"{target_dir} is version {target.version}, not after {base.version} of {base_dir}")
    try:
        check_same_form(base.entries, target.entries)
        side_names(files)
    except ValueError as error:
        raise ValueError(f"{base_dir} and {target_dir}: {error}") from None
    with _new(Path(out_dir)) as (store, part):
        made = write_part(store, part, target, base, shard_bytes=shard_bytes)
        side = write_side(store, part, [made], files)
        manifest = seal(target.version, Base(version=base.version, hash=base.hash), [made], side)
        store.write(f"{part}/{MANIFEST}", manifest.dump())
    return manifest


def apply_delta(base_dir: str | Path, delta_dir: str | Path, out_dir: str | Path) -> Manifest:
    """Writes the full version that a delta makes of its base. Raises WeightFault, and writes nothing, when either is damaged
    or the delta is another base's; ValueError when `out_dir` is there already; StoreError when it can not be written."""
    delta = open_link(Path(delta_dir))
    base, _ = read_full(Path(base_dir), delta.manifest.base.version if delta.manifest.base else 0)
    return apply_chain(base, [delta], Path(out_dir), layout(Path(base_dir)))


def apply_chain(
    base: State | None, links: Sequence[Link], out: Path, groups: Sequence[Sequence[str]] | None = None
) -> Manifest:
    """Writes the version at the end of a chain as a full one, a tensor at a time; `groups` are the tensors of its files. Raises
    as `apply_delta`."""
    check_chain(base, links)
    last = links[-1].manifest
    forms = {name: entry.torch_form for name, entry in last.tensors.items()}
    groups = groups or split(forms, SHARD_BYTES)
    with _new(out, sum(map(size_of, forms.values()))) as (store, part):
        files, entries = dict[str, File](), dict[str, Entry]()
        for number, names in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
            header, order = header_of({name: forms[name] for name in names})
            tensors = decoded(base, links, order)
            files[file] = store.put(f"{part}/{file}", _pieces(header, tensors))
            raw = {"encoding": "raw", "file": file}
            entries |= {name: last.tensors[name].model_copy(update=raw) for name in names}
        made = Manifest(version=last.version, base=None, hash=last.hash, tensors=entries, files=files)
        side = {name: data for name, data in links[-1].files.items() if name != INDEX}
        manifest = made.model_copy(update={"files": {**files, **write_side(store, part, [made], side)}})
        store.write(f"{part}/{MANIFEST}", manifest.dump())
    return manifest


def _pieces(header: bytes, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Any]:
    yield header
    for _, tensor in tensors:
        yield bytes_of(tensor)


def verify(version_dir: str | Path) -> Manifest:
    """Checks a version directory: its manifest, each file, and in a full version each tensor. Raises WeightFault."""
    path = Path(version_dir)
    link = open_link(path)
    if extra := sorted({file.name for file in path.iterdir()} - link.manifest.files.keys() - {MANIFEST}):
        raise DamagedVersion(f"{path}: {extra[0]} is not in the manifest")
    if link.manifest.base is None:
        for _ in decoded(None, [link]):
            pass
    return link.manifest


def open_link(path: Path) -> Link:
    """A version directory with its files checked and mapped. Raises WeightFault."""
    if not (path / MANIFEST).is_file():
        raise MissingVersion(f"{path}: not a weight version, {MANIFEST} is missing")
    return map_link(path, Manifest.load((path / MANIFEST).read_bytes(), str(path / MANIFEST)))


def read_full(path: Path, number: int) -> tuple[State, dict[str, bytes]]:
    """A checkpoint's weights, mapped and hashed, and its side files. A plain one counts as version `number`. Raises WeightFault,
    FileNotFoundError or ValueError."""
    if not (path / MANIFEST).exists():
        return State.of(number, Mapped(read_shards(path))), side_files(path)
    link = open_link(path)
    m = link.manifest
    if m.base is not None:
        raise ForeignBase(f"{path} is a delta against version {m.base.version}; apply it to that one first")
    for _ in decoded(None, [link]):
        pass
    return State(version=m.version, tensors=link.payload, entries=m.tensors, hash=m.hash), side_files(path)


def layout(path: Path) -> list[list[str]]:
    """Which tensors lie together in the files of a checkpoint."""
    return [sorted(entry.name for entry in shard.entries) for shard in read_shards(path)]


def side_files(path: Path) -> dict[str, bytes]:
    """What lies in a checkpoint beside its weights: config.json, the tokenizer."""
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != MANIFEST]
    return {file.name: file.read_bytes() for file in files if ".safetensors" not in file.name}


@contextmanager
def _new(path: Path, need: int = 0) -> Iterator[tuple[Store, str]]:
    """A store and a folder in it to fill, which becomes `path` when it is complete and vanishes when it is not."""
    if path.exists():
        raise ValueError(f"{path} is there already; choose another place")
    store, part = Store(path.parent), path.with_name(path.name + ".part")
    store.check_room(need)
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield store, part.name
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def delta_sizes(before: Path, after: Path) -> dict[str, Any]:
    """Bytes of `after` in full, and of its lossless delta (payloads alone) against `before`; the share of weights whose bits
    changed. Raises ValueError when the two do not hold the same tensors."""
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


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Entries without hashes, for which no byte is read."""
    return {
        name: Entry(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape), hash="")
        for name, tensor in tensors.items()
    }
