"""Weight versions through a store: one publisher, any number of receivers, and no way to wrong weights.

A delta is encoded against the newest acknowledged version, so every receiver that works can decode it. A chain starts with
a full version and is never longer than `full_every`; where nothing of the chain is acknowledged, or anyone asks, the next
version is full. Everything is checked before it is used, so a fault costs bytes and versions, never correctness.

Covers whole versions in memory. Leaves out, for now: shards, region caches.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from composer_nb.trainer.store import LEASE, Lease, Note, Store, StoreError, folder
from composer_nb.trainer.weights import (
    MANIFEST,
    DamagedVersion,
    Entry,
    ForeignBase,
    Manifest,
    MisplacedVersion,
    MissingVersion,
    State,
    WeightFault,
    check_same_form,
    pack,
    unpack,
)

_HELD = 4
"""States a publisher or receiver keeps as bases while acknowledgements are on their way."""


class SecondWriter(WeightFault):
    """Someone else publishes into this store, or did so after losing it."""


class VersionReused(WeightFault):
    """A version number that other weights have had."""


class Publisher:
    """Writes versions. One a store: `owner` holds the lease until `close`; the same owner may take it up again after a crash
    (its former self is then refused), another one only with `takeover`. Any thread may acknowledge while one publishes."""

    def __init__(self, url: str | Path, *, owner: str, full_every: int = 25, takeover: bool = False) -> None:
        """Raises SecondWriter when the store is another owner's, StoreError when it can not be written."""
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1")
        self._store, self._owner, self._full_every = Store(url), owner, full_every
        self._publishing, self._lock = threading.Lock(), threading.Lock()
        self._hashes: dict[int, str] = {}
        self._pending: dict[int, State] = {}
        self._baseline: State | None = None
        self._since_full = self._chain = 0
        self._form: Mapping[str, Entry] | None = None
        self.last = max((v for v in self._store.folders() if self._store.exists(v)), default=-1)
        with suppress(WeightFault):
            self._form = self._store.manifest(self.last).tensors
        self._take(takeover)

    def _take(self, takeover: bool) -> None:
        try:
            old = self._store.lease()
        except (MissingVersion, DamagedVersion):
            old = Lease(owner=None, token="", since=0)
        if old.owner not in (None, self._owner) and not takeover:
            raise SecondWriter(f"{self._store.url} is written by {old.owner!r}; stop it, or set takeover")
        self.last = max(self.last, old.since - 1)
        self._lease = Lease(owner=self._owner, token=uuid.uuid4().hex, since=self.last + 1)
        self._store.write(LEASE, self._lease.dump())

    def _check_lease(self) -> None:
        try:
            held = self._store.lease()
        except (MissingVersion, DamagedVersion):  # another writer's would be whole
            self._store.write(LEASE, self._lease.dump())
            return
        if held != self._lease:
            raise SecondWriter(f"{self._store.url} is now written by {held.owner!r}; this publisher lost it")

    def publish(self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> Manifest:
        """Publishes CPU tensors, under Hugging Face's names and never changed afterwards, with their side files. The same
        weights under the same number again (a step done over after a crash) are no error, and mend what was damaged.

        Raises, with the store and the baseline as they were: ValueError for tensors that do not fit the versions before,
        VersionReused, SecondWriter, StoreError.
        """
        with self._publishing:
            target = State.of(version, tensors)
            if "config.json" not in files:
                raise ValueError("files must hold config.json: a full version is a Hugging Face checkpoint")
            if self._form is not None:
                check_same_form(self._form, target.entries)
            self._check_lease()
            if version <= self.last:
                return self._again(target, files)
            base, chain = self._base()
            manifest, everything = pack(target, base, files, self._lease.token)
            self._write(manifest, everything)
            self._commit(target, base, chain)
            return manifest

    def _again(self, target: State, files: Mapping[str, bytes]) -> Manifest:
        """A version that is there already. Where it can not be read any more it is written anew, in full."""
        try:
            manifest = self._store.manifest(target.version)
        except MissingVersion:
            manifest = None
        if manifest is None or manifest.hash != target.hash:
            raise VersionReused(f"version {target.version} was other weights; publish as {self.last + 1} or later")
        try:
            Receiver(self._store.url, name="publisher").fetch(target.version)
        except WeightFault:
            manifest, everything = pack(target, None, files, self._lease.token)
            self._write(manifest, everything)
        return manifest

    def _base(self) -> tuple[State | None, int]:
        """What the next version is encoded against, and the number of the chain that it belongs to."""
        asked = self._store.names("refused")
        for name in asked:  # before the answer is written: a note that comes after it is about it
            self._store.remove(f"refused/{name}")
        with self._lock:
            if asked or self._since_full >= self._full_every:
                self._end_chain()
            return self._baseline, self._chain

    def _end_chain(self) -> None:
        """Nothing that is published from now on builds on anything before."""
        self._baseline = None
        self._pending.clear()
        self._chain += 1

    def _write(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        where = folder(manifest.version)
        for name, data in files.items():
            self._store.write(f"{where}/{name}", data)
        self._check_lease()
        if not self._store.create(f"{where}/{MANIFEST}", manifest.dump()):
            self._check_lease()  # still ours: what is there is by a writer that lost the store, and nobody takes it
            self._store.write(f"{where}/{MANIFEST}", manifest.dump())

    def _commit(self, target: State, base: State | None, chain: int) -> None:
        with self._lock:
            self._since_full = 1 if base is None else self._since_full + 1
            self._hashes[target.version] = target.hash
            self.last, self._form = target.version, target.entries
            if chain == self._chain:  # otherwise it was refused while it was written
                self._pending[target.version] = target
            if len(self._pending) > _HELD:  # the oldest stays: it is the likeliest to be acknowledged next
                del self._pending[sorted(self._pending)[1]]

    def acknowledge(self, version: int, hash: str) -> None:
        """A receiver runs `version` and found `hash` for it: later deltas may build on it. Late and repeated ones change
        nothing. Raises ForeignBase when the hash is not that version's; the next version is then full."""
        with self._lock:
            if self._hashes.get(version, hash) != hash:
                self._end_chain()
                raise ForeignBase(f"a receiver runs {hash[:8]} as version {version}, not {self._hashes[version][:8]}")
            if version in self._pending:
                self._baseline = self._pending[version]
                self._pending = {v: state for v, state in self._pending.items() if v > version}

    def refuse(self) -> None:
        """A receiver could not use a version: the next one is full."""
        with self._lock:
            self._end_chain()

    def prune(self, keep: int, pins: Iterable[int] = (), since: float = math.inf) -> list[int]:
        """Removes all but the newest `keep` versions, those from `since` on, `pins`, the baseline, and what any of these is
        decoded from. Returns the numbers removed: none while a manifest that decides can not be read."""
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        with self._publishing:
            self._check_lease()
            every = [v for v in self._store.folders() if v <= self.last]
            there = [v for v in every if self._store.exists(v)]
            with self._lock:
                needed = {*there[-keep:], *(v for v in there if v >= since), *pins, *self._pending} & set(there)
                needed |= {self._baseline.version} if self._baseline else set()
            try:
                for version in sorted(needed):
                    while (base := self._store.manifest(version).base) is not None:
                        needed.add(version := base.version)
            except WeightFault:
                return []
            gone = [v for v in every if v not in needed]
            for version in gone:
                self._store.remove(folder(version))
            return gone

    def close(self) -> None:
        """Gives the lease back, if it is still this publisher's; its versions stay good."""
        with self._publishing:
            self._check_lease()
            self._store.write(LEASE, self._lease.model_copy(update={"owner": None}).dump())


class BackgroundPublisher:
    """A publisher on a thread of its own. Versions are published in order; a later one also where an earlier one failed."""

    def __init__(self, publisher: Publisher, *, depth: int = 2) -> None:
        """At most `depth` versions are on their way; with one more `publish` waits."""
        self._publisher, self._depth = publisher, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: deque[Future[Manifest]] = deque()

    def publish(self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
        """Hands a version over. Raises what went wrong with an earlier one instead."""
        self._settle(self._depth - 1)
        self._under_way.append(self._pool.submit(self._publisher.publish, version, tensors, files))

    def close(self) -> None:
        """Waits until all is published, ends the thread, and raises what first went wrong."""
        self._pool.shutdown()
        self._settle(0)

    def _settle(self, most: int) -> None:
        while self._under_way and (len(self._under_way) > most or self._under_way[0].done()):
            self._under_way.popleft().result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version in memory, decoded and checked; nothing runs it yet. `read_bytes`: what was read to get it."""

    manifest: Manifest
    state: State
    base: State | None
    files: Mapping[str, bytes]
    read_bytes: int

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.tensors


class Receiver:
    """Follows a store. `fetch` in any thread while an engine runs; `install` when the engine has loaded it."""

    def __init__(self, url: str | Path, *, name: str = "receiver") -> None:
        """`name` tells receivers of one store apart in their notes."""
        self._store, self._name = Store(url), name
        self._held: dict[int, State] = {}
        self._refused: set[int] = set()
        self.version = -1

    def newest(self) -> int | None:
        """The newest version that was not refused here; None when there is none."""
        every = (v for v in reversed(self._store.folders()) if v not in self._refused)
        return next((v for v in every if self._store.exists(v)), None)

    def fetch(self, version: int) -> Fetched:
        """Reads a version and what it builds on, back to a state at hand or to a full version, and checks all of it. What
        runs is not touched. Raises WeightFault after leaving a note that asks for a full version; StoreError."""
        try:
            return self._fetch(version)
        except WeightFault as fault:
            self._refused.add(version)
            note = Note(receiver=self._name, version=version, fault=type(fault).__name__, detail=str(fault))
            try:
                self._store.write(f"refused/{self._name}.json", note.dump())
            except StoreError as error:
                fault.add_note(f"and no full version could be asked for: {error}")
            raise

    def _fetch(self, version: int) -> Fetched:
        chain, state = self._chain(version)
        before, read = state, 0
        for manifest in reversed(chain):
            where = folder(manifest.version)
            files = {name: self._store.read(f"{where}/{name}") for name in manifest.files}
            before, state = state, unpack(manifest, files, state, f"{self._store.url}/{where}")
            read += manifest.size
        assert state is not None, "a chain has a last link"
        return Fetched(manifest=chain[0], state=state, base=before, files=files, read_bytes=read)

    def _chain(self, version: int) -> tuple[list[Manifest], State | None]:
        """Manifests from `version` back to what is next to a state at hand (also returned), or to a full version."""
        lease, held, chain = self._store.lease(), self._held, list[Manifest]()
        wanted: str | None = None
        while True:
            manifest = self._store.manifest(version)
            if version >= lease.since and manifest.writer != lease.token:
                raise SecondWriter(f"{self._store.url}: version {version} is by a writer that had lost the store")
            if wanted not in (None, manifest.hash):
                self._refused.add(version)  # one of the two is not ours: neither is believed
                raise ForeignBase(
                    f"{self._store.url}: version {chain[-1].version} builds on other weights than version {version} has"
                )
            chain.append(manifest)
            if manifest.base is None:
                return chain, None
            version, wanted = manifest.base.version, manifest.base.hash
            if version in held and held[version].hash == wanted:
                return chain, held[version]

    def install(self, fetched: Fetched) -> str:
        """Notes that the engine now runs `fetched`. Returns the hash to acknowledge. Raises MisplacedVersion for a version
        older than the one that runs."""
        new, base = fetched.state, fetched.base
        if new.version < self.version:
            raise MisplacedVersion(f"version {new.version} can not follow version {self.version}, which runs already")
        states = self._held | {state.version: state for state in (base, new) if state is not None}
        keep = {*sorted(states)[-_HELD:], base.version if base else new.version}
        self._held, self.version = {v: states[v] for v in keep}, new.version
        return new.hash
