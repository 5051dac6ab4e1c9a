"""A run directory in `services.store`: for machines that do not see it, and to go on elsewhere when its machine is lost.

    <store>/<run>/run/index.json   the files of the run and their hashes; written last
    <store>/<run>/run/<hash>       the bytes of a file

    RUN ── RunCopy.push ──▶ store ── local_run ──▶ FOLDER/<run>/ of a node (`composer-nb up FOLDER --join`): inputs alone
                                 └── restore ──▶ RUN on another machine

The coordinator pushes before a batch is learned. So a restored run learns the same batches again, and publishes the versions that
others may have fetched.
"""

import os
import re
import socket
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

from composer_nb.harness.files import file_digest, point
from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.cluster import NODE
from composer_nb.trainer.versions.manifest import BLAKE, MissingVersion, PayloadFile, SealedRecord
from composer_nb.trainer.versions.store import VersionStore

CONFIG, DATABASE, INDEX = "weights/start/config.json", "run.db", "index.json"
# What services read besides the weights, which are for the trainer alone.
INPUTS = ("data/tokenizer.json", "data/tune.jsonl", CONFIG)
FOLDERS = ("data", "weights", "rollouts", "figures")


class NotSeen(ValueError):
    """A machine of the cluster does not see the run directory."""


class RunMoved(ValueError):
    """The run goes on elsewhere."""


class RunIndex(SealedRecord):
    """The files of a run by name, and the coordinator that wrote them."""

    writer: str
    files: dict[str, PayloadFile]


def _store_of(run: str, store: str) -> VersionStore:
    return VersionStore(f"{store.rstrip('/')}/{run}/run")


def _index(store: VersionStore) -> RunIndex:
    """Read the index. Raises MissingVersion, DamagedVersion or StoreError."""
    return RunIndex.load(store.read(INDEX), f"{store.url}/{INDEX}")


class RunCopy:
    """The copy of a run directory in a store, for its only coordinator."""

    def __init__(self, run: Path, store: str) -> None:
        self._run, self._store, self._writer = RunDir(run), _store_of(run.name, store), uuid.uuid4().hex
        # Hashes of files by name, size and time of change.
        self._hashes: dict[tuple[str, int, int], str] = {}
        self._begun = False
        # Hashes of files that pushes have written which were then cut off.
        self._written: set[str] = set()

    def push(self) -> None:
        """Bring the copy up to date, once the store does not refuse. Raises RunMoved if another coordinator has written since the
        last call, and StoreError."""
        self._store.patiently(self._push)

    def _push(self) -> None:
        try:
            index = _index(self._store)
        except MissingVersion:
            index = RunIndex(writer=self._writer, files={})
        if self._begun and index.writer != self._writer:
            raise RunMoved(f"{self._run.path.name} goes on elsewhere: another coordinator writes {self._store.url}")
        stored, files = self._written | {file.hash for file in index.files.values()}, dict[str, PayloadFile]()
        database = self._run.path / f"{DATABASE}.part"
        with closing(self._run.connect()) as source, closing(sqlite3.connect(database)) as target:
            source.backup(target)
        for path in [*self._files(), database]:
            name = DATABASE if path == database else path.relative_to(self._run.path).as_posix()
            size, changed = path.stat().st_size, path.stat().st_mtime_ns
            if (name, size, changed) not in self._hashes:
                self._hashes[name, size, changed] = file_digest(path, BLAKE)
            file = files[name] = PayloadFile(bytes=size, hash=self._hashes[name, size, changed])
            if file.hash not in stored:
                self._store.put_file(file.hash, path)
                self._written.add(file.hash)
        database.unlink()
        self._store.write(INDEX, RunIndex(writer=self._writer, files=files).dump())
        self._begun = True
        for hash in stored - {file.hash for file in files.values()}:
            self._store.remove_file(hash)
        self._written.clear()

    def _files(self) -> Iterator[Path]:
        """Yield all files that the run needs besides its database."""
        tops = [self._run.path / folder for folder in FOLDERS]
        for (name,) in self._run.query("SELECT file FROM checkpoint"):
            tops.append(beneath(self._run.path / "checkpoints", name))
        for path in chain(tops, *(top.rglob("*") for top in tops), self._run.path.glob("*.json*")):
            if path.is_file() and ".part" not in path.name:
                yield path


def _fetch(store: VersionStore, folder: Path, accept: Callable[[str], bool]) -> None:
    """Copy the files whose names are accepted into a folder, unless they are there. Raises WeightFault or StoreError."""
    for name, file in _index(store).files.items():
        path = beneath(folder, name)
        if accept(name) and not (path.is_file() and file_digest(path, BLAKE) == file.hash):
            store.copy(file.hash, file.hash, path)


def local_run(run: Path, store: str = "", weights: bool = False) -> Path:
    """Return the run directory, or this node's copy of its inputs from `store`. Services ask before they make files there. Raises
    NotSeen if there is neither."""
    if (run / CONFIG).is_file():
        return run
    node = os.environ.get(NODE, "")
    if not (node and store):
        raise NotSeen(
            f"{socket.gethostname()} does not see {run}: keep --runs on a file system that all nodes of services.address share, "
            "under the same path; or set services.store, and start the nodes with composer-nb up --join"
        )
    folder, source = Path(node, run.name), _store_of(run.name, store)

    def is_input(name: str) -> bool:
        return name in INPUTS or (weights and name.startswith("weights/start/"))

    source.patiently(partial(_fetch, source, folder, is_input))
    return folder


def restore(run: str, runs: Path) -> Path:
    """Bring a run (`services.store`/NAME) back from its store into `runs`, ready to be resumed, and return its directory. A call
    that was cut off goes on. Raises ValueError for a run that is there, WeightFault or StoreError."""
    store, _, name = run.rstrip("/").rpartition("/")
    path, part = beneath(runs, name), beneath(runs, f"{name}.part")
    if path.exists():
        raise ValueError(f"{path} is there: resume it, or give another folder by --runs")
    source = _store_of(name, store)
    source.patiently(partial(_fetch, source, part, lambda file: True))
    part.rename(path)
    point(beneath(runs, re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", name)), path)
    return path
