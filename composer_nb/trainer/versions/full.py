"""Full versions: checkpoints read as versions, and the version at the end of a chain of deltas."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from composer_nb.trainer.models.shards import (
    Mapped,
    bytes_of,
    file_names,
    header_of,
    read_shards,
    size_of,
    split,
)
from composer_nb.trainer.versions.manifest import (
    MANIFEST,
    ForeignBase,
    Manifest,
    MissingVersion,
    PayloadFile,
    TensorEntry,
    WeightState,
)
from composer_nb.trainer.versions.payload import (
    SHARD_BYTES,
    Link,
    Links,
    check_chain,
    decoded,
    map_link,
    side_files_of,
    write_side,
)
from composer_nb.trainer.versions.store import VersionStore


def apply_chain(
    base: WeightState | None,
    links: Links,
    out: Path,
    groups: Sequence[Sequence[str]] | None = None,
    base_files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write the version at the end of a chain as a full one, a tensor at a time. `groups` are the tensors of its files,
    `base_files` the side files of `base`. Raises like `apply_delta`."""
    check_chain(base, links)
    last = links[-1].manifest
    forms = {name: entry.torch_form for name, entry in last.tensors.items()}
    groups = groups or split(forms, SHARD_BYTES)
    with new_version(out, sum(map(size_of, forms.values()))) as (store, part):
        files, entries = dict[str, PayloadFile](), dict[str, TensorEntry]()
        for file, names in zip(file_names(len(groups)), groups, strict=True):
            header, order = header_of({name: forms[name] for name in names})
            tensors = (bytes_of(tensor) for _, tensor in decoded(base, links, order))
            files[file] = store.put(f"{part}/{file}", chain([header], tensors))
            raw = {"encoding": "raw", "file": file}
            entries |= {name: last.tensors[name].model_copy(update=raw) for name in names}
        draft = Manifest(version=last.version, base=None, hash=last.hash, tensors=entries, files=files)
        side = {**(base_files or {}), **side_files_of(links)}
        manifest = draft.model_copy(update={"files": {**files, **write_side(store, part, [draft], side)}})
        store.write(f"{part}/{MANIFEST}", manifest.dump())
    return manifest


def open_link(path: Path) -> Link:
    """Check and map the files of a version directory. Raises WeightFault if it is unusable."""
    if not (path / MANIFEST).is_file():
        raise MissingVersion(f"{path}: not a weight version, {MANIFEST} is missing")
    return map_link(path, Manifest.load((path / MANIFEST).read_bytes(), str(path / MANIFEST)))


def read_full(path: Path, number: int) -> tuple[WeightState, dict[str, bytes]]:
    """Return a checkpoint's weights, mapped and hashed, and its side files. A plain checkpoint counts as version `number`. Raises
    WeightFault, FileNotFoundError or ValueError."""
    if not (path / MANIFEST).exists():
        return WeightState.of(number, Mapped(read_shards(path))), side_files(path)
    link = open_link(path)
    m = link.manifest
    if m.base is not None:
        raise ForeignBase(f"{path} is a delta against version {m.base.version}; apply it to that one first")
    for _ in decoded(None, [link]):
        pass
    return m.state(link.payload), side_files(path)


def layout(path: Path) -> list[list[str]]:
    """Return the groups of tensors that share a file of a checkpoint."""
    return [sorted(entry.name for entry in shard.entries) for shard in read_shards(path)]


def side_files(path: Path) -> dict[str, bytes]:
    """Return the files beside the weights of a checkpoint: config.json, the tokenizer."""
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.name != MANIFEST]
    return {file.name: file.read_bytes() for file in files if ".safetensors" not in file.name}


@contextmanager
def new_version(path: Path, need: int = 0) -> Iterator[tuple[VersionStore, str]]:
    """Yield a store and a folder in it to fill, which becomes `path` on success and is removed after an error."""
    if path.exists():
        raise ValueError(f"{path} is there already; choose another place")
    store, part = VersionStore(path.parent), path.with_name(path.name + ".part")
    store.check_room(need)
    shutil.rmtree(part, ignore_errors=True)
    try:
        yield store, part.name
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
