"""A place for weight versions on any fsspec store: whole files, version folders, the lease.

<store>/writer.json           the lease: whose versions count, and since which number
<store>/v000012/              versions (`weights`); what has a manifest exists, what has none never did
<store>/refused/<name>.json   a receiver that could not use a version: the next one is full
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from composer_nb.trainer.weights import MANIFEST, Manifest, MisplacedVersion, MissingVersion, Record, WeightFault

LEASE = "writer.json"


class StoreError(OSError):
    """The store can not be read or written."""


class Lease(Record):
    """Who may publish: versions from `since` on count only with this token. No owner: given back."""

    owner: str | None
    token: str
    since: int


class Note(Record):
    """What a receiver could not use, and why."""

    receiver: str
    version: int
    fault: str
    detail: str


class Store:
    """Whole files under one root. What is written is there completely or not at all."""

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        self._fs, self._root = url_to_fs(self.url, use_listings_cache=False)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            raise
        except OSError as error:
            raise StoreError(f"{self.url}: {what}: {error}") from None

    def read(self, name: str) -> bytes:
        """Raises MissingVersion or StoreError."""
        with self._doing(f"{name} can not be read"):
            try:
                data: bytes = self._fs.cat_file(f"{self._root}/{name}")
                return data
            except FileNotFoundError:
                raise MissingVersion(f"{self.url}/{name} is missing: never finished, lost, or removed") from None

    def write(self, name: str, data: bytes) -> None:
        """Raises StoreError."""
        self._write(name, data, new=False)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file where there is none; False, and nothing changed, where there is one. Raises StoreError."""
        try:
            self._write(name, data, new=True)
        except FileExistsError:
            return False
        return True

    def _write(self, name: str, data: bytes, *, new: bool) -> None:
        path = f"{self._root}/{name}"
        with self._doing(f"{name} can not be written (make room, or set another store)"):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if not isinstance(self._fs, LocalFileSystem):  # object stores put a file as a whole
                self._fs.pipe_file(path, data, mode="create" if new else "overwrite")
                return
            part = f"{path}.{uuid.uuid4().hex[:8]}.part"
            try:
                self._fs.pipe_file(part, data)
                os.link(part, path) if new else os.replace(part, path)
            finally:
                Path(part).unlink(missing_ok=True)

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder; none when it is not there. Raises StoreError."""
        with self._doing("can not be listed"):
            try:
                found = self._fs.ls(f"{self._root}/{folder}".rstrip("/"), detail=False)
            except FileNotFoundError:
                return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all in it; its manifest first, so that no half of a version is ever seen. Raises
        StoreError."""
        path = f"{self._root}/{name}"
        with self._doing(f"{name} can not be removed"):
            if self._fs.exists(f"{path}/{MANIFEST}"):
                self._fs.rm_file(f"{path}/{MANIFEST}")
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    # Versions

    def folders(self) -> list[int]:
        """Numbers of all version folders, ascending, those without a manifest among them."""
        return sorted(int(name[1:]) for name in self.names() if re.fullmatch(r"v\d{6,}", name))

    def exists(self, version: int) -> bool:
        return bool(self._fs.exists(f"{self._root}/{folder(version)}/{MANIFEST}"))

    def manifest(self, version: int) -> Manifest:
        """Raises MissingVersion, DamagedVersion, MisplacedVersion or StoreError."""
        name = f"{folder(version)}/{MANIFEST}"
        manifest = Manifest.load(self.read(name), f"{self.url}/{name}")
        if manifest.version != version:
            raise MisplacedVersion(f"{self.url}/{folder(version)} holds version {manifest.version}")
        if manifest.base is not None and manifest.base.version >= version:
            raise MisplacedVersion(f"{self.url}/{folder(version)} is a delta against a later version")
        return manifest

    def lease(self) -> Lease:
        """Raises MissingVersion, DamagedVersion or StoreError."""
        return Lease.load(self.read(LEASE), f"{self.url}/{LEASE}")


def folder(version: int) -> str:
    return f"v{version:06d}"


def log(url: str | Path) -> list[dict[str, Any]]:
    """A row a version, ascending: number, base (None for a full one), bytes, hash; or the fault that it has."""
    store, rows = Store(url), []
    for version in store.folders():
        try:
            m = store.manifest(version)
            rows.append({"version": version, "base": m.base and m.base.version, "bytes": m.size, "hash": m.hash})
        except WeightFault as fault:
            rows.append({"version": version, "fault": type(fault).__name__, "detail": str(fault)})
    return rows
