"""Checkpoints of ranks that share a store, because not all of them see the run directory.

rank ── put_shards ──▶ <store>/<run>/checkpoints/<hash>             its own files
TrainerGroup ── record ──▶ RUN/checkpoints/<name>/shards.json       all ranks' files, which the run's copy takes along
rank ◀── fetch_shard ──                                             only the files that its share is in
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from composer_nb.harness.files import file_digest, replacing
from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.versions.manifest import BLAKE, PayloadFile, SealedRecord
from composer_nb.trainer.versions.store import VersionStore

FOLDER, INDEX = "checkpoints", "shards.json"


class Shards(SealedRecord):
    """The files of a checkpoint in the store, by name."""

    files: dict[str, PayloadFile]


def put_shards(store: VersionStore, folder: Path, rank: int) -> dict[str, PayloadFile]:
    """Move the files that a rank has written for a checkpoint from `folder` to the store. Raises StoreError."""
    paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    files = {path.name: store.patiently(partial(_put, store, path)) for path in paths}
    for path in paths:
        path.unlink()
    return files


def _put(store: VersionStore, path: Path) -> PayloadFile:
    return store.put_file(f"{FOLDER}/{file_digest(path, BLAKE)}", path)


def fetch_shard(store: VersionStore, files: Mapping[str, PayloadFile], folder: Path, name: str) -> None:
    """Copy a file of a checkpoint from the store into `folder`, unless it is there. Raises WeightFault or StoreError."""
    if name not in files:
        return
    path, hash = beneath(folder, name), files[name].hash
    if not (path.is_file() and file_digest(path, BLAKE) == hash):  # a rank that was killed may have left another
        store.patiently(lambda: store.copy(f"{FOLDER}/{hash}", hash, path))


def record(run: RunDir, name: str, files: Mapping[str, PayloadFile]) -> None:
    """Record a checkpoint that is whole in the store."""
    folder = beneath(run.path / "checkpoints", name)
    folder.mkdir(parents=True, exist_ok=True)
    # SQLite syncs the pointer, which must not outlive the file in a power failure.
    with replacing(folder / INDEX, sync=True) as part:
        part.write_bytes(Shards(files={**files}).dump())


def prune(run: RunDir, store: VersionStore) -> None:
    """Remove all files but those of RL's newest checkpoint, while no rank writes one and the run's copy knows it. Raises
    StoreError."""
    pointer = run.pointer("rl")
    needed = {file.hash for file in read(pointer[1]).values()} if pointer else set()
    for hash in store.patiently(lambda: store.names(FOLDER)):
        if hash not in needed:
            store.patiently(partial(store.remove_file, f"{FOLDER}/{hash}"))


def read(folder: Path) -> dict[str, PayloadFile]:
    """Return the files in the store of the checkpoint in `folder`; none if the ranks wrote them there. Raises DamagedVersion."""
    index = folder / INDEX
    return Shards.load(index.read_bytes(), str(index)).files if index.is_file() else {}
