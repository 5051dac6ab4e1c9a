"""A store of weight versions on any fsspec file system: whole files, version folders, the ledger.

<store>/v000012/               versions (`payload`); only a folder with a manifest is a version
<store>/anchors/v000012/       the same weights in full, beside a delta, for new receivers
<store>/ledger/v000012.json    record of a published version and its receivers; kept when the version is pruned
<store>/receivers/<name>.json  the version that a receiver runs
<store>/refused/<name>.json    a receiver that could not use a version: the next one is full
"""

import math
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from composer_nb.harness.files import file_digest, replacing
from composer_nb.harness.untrusted import UnsafeName, beneath, checked
from composer_nb.trainer.versions import manifest as manifests
from composer_nb.trainer.versions.manifest import DamagedVersion, MisplacedVersion, MissingVersion, WeightFault

R = TypeVar("R", bound=manifests.SealedRecord)
T = TypeVar("T")
ANCHORS = "anchors"
# Number of bytes in memory while a file is copied or hashed.
CHUNK = 1 << 24
# Seconds between the calls of something that an object store refuses: two minutes in all.
WAITS_S = (1, 2, 4, 8, 15, 30, 30, 30)


class StoreError(OSError):
    """The store cannot be read or written."""


class Note(manifests.SealedRecord):
    """A version that a receiver could not use, and why."""

    receiver: str
    version: int
    fault: str
    detail: str


class ReceiverReport(manifests.SealedRecord):
    """The version that a receiver runs, with the hash that it computed; −1 and "" before the first."""

    receiver: str
    version: int
    hash: str


class Published(manifests.SealedRecord):
    """A line of the ledger.

    Attributes:
        bytes: Size of the delta, or of a full version.
        anchor_bytes: Size of the same weights in full beside the delta; 0 if there are none.
        files: Hash of each file, and of each tensor.
        acknowledged: Receivers that ran it, in the order of their reports.
    """

    version: int
    base: int | None
    hash: str
    bytes: int
    anchor_bytes: int = 0
    owner: str
    files: dict[str, str]
    acknowledged: list[str]


class VersionStore:
    """Whole files under one root. A file is written completely or not at all."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)
        self._local = isinstance(self._fs, LocalFileSystem)

    def _at(self, name: str) -> str:
        """Return the path of a file or folder. Raises StoreError for a name that leads out of the store."""
        try:
            if self._local:
                beneath(Path(self._root), name)
            return f"{self._root}/{checked(name)}"
        except UnsafeName as error:
            raise StoreError(f"{self.url}: {error}") from None

    def patiently(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, called again after each StoreError of an object store. The number of calls is fixed, so that
        ranks which share their errors stay together."""
        for wait_s in () if self._local else WAITS_S:
            with suppress(StoreError):
                return act()
            time.sleep(wait_s)
        return act()

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Libraries of object stores have errors of their own, such as botocore's for a connection that is refused.
            is_own = self._local or type(error).__module__.partition(".")[0] in ("builtins", "composer_nb")
            if is_own and not isinstance(error, OSError):
                raise
            raise StoreError(f"{self.url}: {what}: {error}") from None

    @contextmanager
    def _reading(self, name: str) -> Iterator[str]:
        """Yield the path of a file to read."""
        with self._doing(f"{name} cannot be read"):
            try:
                yield self._at(name)
            except FileNotFoundError:
                raise MissingVersion(f"{self.url}/{name} is missing: never finished, lost, or removed") from None

    def read(self, name: str) -> bytes:
        """Return a file's bytes. Raises MissingVersion or StoreError."""
        with self._reading(name) as path:
            return bytes(self._fs.cat_file(path))

    def read_file(self, name: str, file: manifests.PayloadFile) -> bytes:
        """Return a file's bytes. Raises DamagedVersion if they are not `file`, MissingVersion or StoreError."""
        data = self.read(name)
        if (len(data), manifests.digest(data)) != (file.bytes, file.hash):
            raise DamagedVersion(f"{self.url}/{name} ({len(data)} bytes of {file.bytes}) is not what was published")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes piece by piece. Raises MissingVersion or StoreError."""
        with self._reading(name) as path, self._fs.open(path, "rb") as stream:
            while data := stream.read(CHUNK):
                yield data

    def copy(self, name: str, hash: str, path: Path) -> None:
        """Copy a file to `path` on this machine. Raises DamagedVersion if it has another hash, MissingVersion or StoreError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            with part.open("wb") as draft:
                draft.writelines(self.chunks(name))
            if file_digest(part, manifests.BLAKE) != hash:
                raise DamagedVersion(f"{self.url}/{name} is not what was published")

    def write(self, name: str, data: bytes) -> None:
        """Write a file. Raises StoreError."""
        self.put(name, [data])

    def put(self, name: str, pieces: Iterable[Any]) -> manifests.PayloadFile:
        """Write a file piece by piece. Each piece may be freed once the next is requested. Raises StoreError."""
        path, byte_count, hasher = self._at(name), 0, manifests.BLAKE()
        with self._placing(path) as part:
            with self._fs.open(part, "wb") as stream:
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    for begin in range(0, len(view), CHUNK):
                        stream.write(view[begin : begin + CHUNK])
                    hasher.update(view)
                    byte_count += len(view)
                if self._local:  # what is reported afterwards survives a power failure
                    stream.flush()
                    os.fsync(stream.fileno())
            if part != path:
                os.replace(part, path)
        return manifests.PayloadFile(bytes=byte_count, hash=hasher.hexdigest())

    def put_file(self, name: str, path: Path) -> manifests.PayloadFile:
        """Write a file of this machine. Raises StoreError."""
        with path.open("rb") as content:
            return self.put(name, iter(partial(content.read, CHUNK), b""))

    @contextmanager
    def _placing(self, path: str) -> Iterator[str]:
        """Yield the path to write to: beside the place if it can be renamed, otherwise the place itself."""
        name = path.removeprefix(f"{self._root}/")
        with self._doing(f"{name} cannot be written (make room, or set another store)"):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if not self._local:
                yield path
                return
            part = f"{path}.{uuid.uuid4().hex[:8]}.part"
            try:
                yield part
            finally:
                Path(part).unlink(missing_ok=True)

    def check_room(self, need: int) -> None:
        """Raise StoreError if the store is known to lack room for `need` bytes. For object stores this is unknown."""
        if not self._local:
            return
        existing = next(path for path in (Path(self._root), *Path(self._root).parents) if path.exists())
        if (free := shutil.disk_usage(existing).free) < need:
            raise StoreError(f"{self.url}: {need:,} bytes are needed and {free:,} free; make room, or another store")

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder; none if it does not exist. Raises StoreError."""
        with self._doing("cannot be listed"):
            try:
                paths = self._fs.ls(self._at(folder) if folder else self._root, detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def remove_file(self, name: str) -> None:
        """Remove a file, if it is there. Raises StoreError."""
        with self._doing(f"{name} cannot be removed"), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove(self, name: str) -> None:
        """Remove a folder with its contents. The manifest is removed first, so that no partial version is visible.
        Raises StoreError."""
        path = self._at(name)
        with self._doing(f"{name} cannot be removed"):
            with suppress(FileNotFoundError, NotADirectoryError):
                self._fs.rm_file(f"{path}/{manifests.MANIFEST}")
            with suppress(FileNotFoundError):
                self._fs.rm(path, recursive=True)

    # Versions

    def folders(self, inside: str = "") -> list[int]:
        """Return the numbers of all version folders, or of anchors (`inside` ANCHORS), ascending, complete or not."""
        return sorted(int(name[1:]) for name in self.names(inside) if re.fullmatch(r"v\d{6,}", name))

    def exists(self, version: int, where: str = "") -> bool:
        """Return whether a version, or its anchor in `where`, was finished. Raises StoreError."""
        with self._doing("cannot be read"), suppress(FileNotFoundError):
            # `exists` of fsspec takes any error for a no.
            return bool(self._fs.info(self._at(f"{where or folder(version)}/{manifests.MANIFEST}")))
        return False

    def manifest(self, version: int, where: str = "") -> manifests.Manifest:
        """Read the manifest of a version, or of its anchor in `where`. Raises WeightFault or StoreError."""
        location = where or folder(version)
        name = f"{location}/{manifests.MANIFEST}"
        manifest = manifests.Manifest.load(self.read(name), f"{self.url}/{name}")
        if manifest.version != version:
            raise MisplacedVersion(f"{self.url}/{location} holds version {manifest.version}")
        if manifest.base is not None and (where or manifest.base.version >= version):
            raise MisplacedVersion(f"{self.url}/{location} is a delta against version {manifest.base.version}")
        return manifest

    def prune(
        self, keep: int, needed: Collection[int] = (), since: float = math.inf, last: float = math.inf
    ) -> list[int]:
        """Remove versions up to `last`, and anchors, and return the versions' numbers. Kept are the newest `keep`, those from
        `since` on, `needed`, what receivers report to run (unless they lag by more than 2 · `keep` versions), and all
        bases of these. Removes nothing while a manifest on which this depends is unreadable. Raises StoreError."""
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        folders = [v for v in self.folders() if v <= last]
        complete = [v for v in sorted({*folders, *needed}) if self.exists(v)]  # the listing may be old
        needed_versions = {*complete[-keep:], *(v for v in complete if v >= since), *needed}
        needed_versions |= {report.version for report in self.reports()} & set(complete[-2 * keep :])
        anchor_folders = self.folders(ANCHORS)
        anchors = [v for v in anchor_folders if self.exists(v, anchor(v))]
        retained, anchors_kept = needed_versions & set(complete), set(anchors[-1:])
        try:
            for version in sorted(retained):
                while version not in anchors and (base := self.manifest(version).base) is not None:
                    version = base.version
                    retained.add(version)
                anchors_kept |= {version} & set(anchors)
        except WeightFault:
            return []
        for version in set(anchor_folders) - anchors_kept:
            self.remove(anchor(version))
        removed = [v for v in folders if v not in retained]
        for version in removed:
            self.remove(folder(version))
        return removed

    def ledger(self) -> list[Published]:
        """Return all versions ever published here, ascending, without damaged lines. Raises StoreError."""
        return sorted(self._records("ledger", Published), key=lambda line: line.version)

    def reports(self) -> list[ReceiverReport]:
        """Return the reports of receivers, by name; those that are damaged or just vanished are left out. Raises StoreError."""
        return list(self._records("receivers", ReceiverReport))

    def _records(self, folder: str, kind: type[R]) -> Iterator[R]:
        for name in sorted(self.names(folder)):
            with suppress(WeightFault):
                yield kind.load(self.read(f"{folder}/{name}"), name)


def folder(version: int) -> str:
    return f"v{version:06d}"


def anchor(version: int) -> str:
    return f"{ANCHORS}/{folder(version)}"


def log(url: str | Path) -> list[dict[str, Any]]:
    """Return a row per version, ascending: number, base (None for a full one), bytes, hash, bytes of its anchor, receivers that
    acknowledged it, and whether it still exists; or its fault."""
    store, rows = VersionStore(url), dict[int, dict[str, Any]]()
    for line in store.ledger():
        rows[line.version] = {**line.model_dump(exclude={"files"}), "there": False}
    for version in store.folders():
        try:
            manifest = store.manifest(version)
        except WeightFault as fault:
            rows[version] = {"version": version, "fault": type(fault).__name__, "detail": str(fault)}
            continue
        row = rows.setdefault(version, {"version": version, "owner": "", "anchor_bytes": 0, "acknowledged": []})
        base = manifest.base and manifest.base.version
        row |= {"base": base, "bytes": manifest.size, "hash": manifest.hash, "there": True}
    return [rows[version] for version in sorted(rows)]


def stored_bytes(url: str | Path) -> dict[str, float]:
    """Return the number of full versions and of deltas that were ever published, with their mean bytes."""
    rows = [row for row in log(url) if "bytes" in row]
    totals: dict[str, float] = {}
    for name, is_full in (("full", True), ("delta", False)):
        sizes = [row["bytes"] for row in rows if (row["base"] is None) == is_full]
        totals |= {name: len(sizes)} | ({f"{name}_bytes": sum(sizes) / len(sizes)} if sizes else {})
    return totals


def check_file(store: VersionStore, name: str, file: manifests.PayloadFile) -> None:
    """Check a file, reading it piece by piece. Raises DamagedVersion or MissingVersion, which names it, or StoreError."""
    byte_count, hasher = 0, manifests.BLAKE()
    for piece in store.chunks(name):
        hasher.update(piece)
        byte_count += len(piece)
    if (byte_count, hasher.hexdigest()) != (file.bytes, file.hash):
        raise DamagedVersion(f"{store.url}/{name} ({byte_count} bytes of {file.bytes}) is not what was published")
