"""Publishing weight versions: one publisher, any number of writers and receivers, and no way to wrong weights.

A delta is encoded against the newest acknowledged version, so every receiver that works can decode it. Beside every
`full_every`-th delta, and whenever deltas add up to half a full version, lies an anchor: the same weights in full, for whoever
joins or lags. Where nothing is acknowledged, or anyone asks, the next version is full. Everything is checked before it is
used, so a fault costs bytes and versions, never correctness.

The weights may be spread over ranks. Each holds whole tensors and is a `Writer`: it hashes its tensors (`survey`), the publisher
decides what they are encoded against (`begin`), each writer writes its files (`write`), and the publisher's manifest makes them a
version (`finish`). `Publisher.publish` does all of that for one rank that holds everything.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from composer_nb.trainer.manifest import (
    MANIFEST,
    Base,
    DamagedVersion,
    Entry,
    ForeignBase,
    Manifest,
    MissingVersion,
    Part,
    Record,
    State,
    WeightFault,
    check_same_form,
    hash_of,
    seal,
)
from composer_nb.trainer.payload import SHARD_BYTES, side_names, write_part, write_side
from composer_nb.trainer.receiver import HELD, SecondWriter, check_version
from composer_nb.trainer.shards import size_of
from composer_nb.trainer.store import LEASE, Lease, Published, Store, StoreError, anchor, folder


class VersionReused(WeightFault):
    """A version number that other weights have had."""


class Plan(Record):
    """What all writers of a version must know."""

    version: int
    base: Base | None
    where: str
    """The folder that they write into."""
    hash: str
    """Of all tensors together."""
    needs: list[int]
    """Versions that may still be asked for as a base."""
    there: bool = False
    """The very same weights are there already, under the same number, and can be read: nothing is to be written."""


class Writer:
    """One rank's side: the tensors that it holds, and those of the versions that it may encode them against."""

    def __init__(self, url: str | Path, *, rank: str = "", shard_bytes: int = SHARD_BYTES) -> None:
        """`rank` tells the files of several writers apart, as "rank00002". Raises ValueError for `shard_bytes` below 1."""
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
        self._store, self._rank, self._shard_bytes = Store(url), rank, shard_bytes
        self._held: dict[int, State] = {}

    def survey(self, version: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Entry]:
        """Hashes CPU tensors, under Hugging Face's names, which must not change from now on. They may be mapped from files one by
        one (`shards.Mapped`). Raises ValueError for one that can not be published."""
        state = State.of(version, tensors)
        self._held[version] = state
        return state.entries

    def write(self, plan: Plan) -> Part:
        """Writes this rank's tensors. Raises MissingVersion when this writer does not hold the base, as one that was made again
        does not (`Publisher.refuse`, and begin anew); StoreError."""
        base = None if plan.base is None else self._held.get(plan.base.version)
        if plan.base is not None and base is None:
            raise MissingVersion(f"{self._rank or 'the writer'} does not hold version {plan.base.version}")
        self._held = {v: state for v, state in self._held.items() if v in plan.needs}
        target = self._held[plan.version]
        return write_part(self._store, plan.where, target, base, shard_bytes=self._shard_bytes, rank=self._rank)


def deal(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Which tensors each of `ranks` writers holds, so that none has much more to write than another: the largest first, each to
    the one with the least. `sizes` are bytes by name; their order does not matter. Raises ValueError for less than one rank."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return shares


class Publisher:
    """Makes versions. One a store: `owner` holds the lease until `close`; the same owner may take it up again after a crash
    (its former self is then refused), another one only with `takeover`. Any thread may acknowledge while one publishes."""

    def __init__(
        self,
        url: str | Path,
        *,
        owner: str,
        full_every: int = 25,
        takeover: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Raises SecondWriter when the store is another owner's, StoreError when it can not be written."""
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1")
        self._writer = Writer(url, shard_bytes=shard_bytes)
        self._store, self._owner, self._full_every = Store(url), owner, full_every
        self._publishing, self._lock = threading.Lock(), threading.Lock()
        self._hashes: dict[int, str] = {}
        self._pending: dict[int, str] = {}
        self._baseline: Base | None = None
        self._chain = 0
        """Counts chains: an acknowledgement of a version before the present one moves nothing."""
        self._begun = 0
        """The chain that the version under way belongs to."""
        self._deltas = self._delta_bytes = 0
        """Since the last version that is there in full."""
        self._ledger: dict[int, Published] = {}
        self._unwritten: set[int] = set()
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

    # A version

    def publish(self, version: int, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> Manifest:
        """Publishes CPU tensors, under Hugging Face's names and never changed afterwards, with their side files. The same
        weights under the same number again (a step done over after a crash) are no error, and mend what was damaged. An anchor
        that can not be written is tried again beside the next version.

        Raises, with the store and the baseline as they were: ValueError for tensors that do not fit the versions before,
        VersionReused, SecondWriter, StoreError.
        """
        with self._publishing:
            plan = self.begin(version, [self._writer.survey(version, tensors)], files)
            if plan.there:
                return self._store.manifest(version)
            manifest = self._carry_out(plan, files)
            due = self.anchor(manifest)
            if due is not None:
                with suppress(StoreError):
                    self._carry_out(due, files)
            return manifest

    def _carry_out(self, plan: Plan, files: Mapping[str, bytes]) -> Manifest:
        try:
            return self.finish(plan, [self._writer.write(plan)], files)
        except BaseException:
            self.abandon(plan)
            raise

    def begin(self, version: int, surveys: Sequence[Mapping[str, Entry]], files: Mapping[str, bytes]) -> Plan:
        """Decides how a version is written, from what its writers found, before any of them writes. Raises as `publish`."""
        entries = {name: entry for survey in surveys for name, entry in survey.items()}
        if len(entries) < sum(map(len, surveys)):
            raise ValueError(f"version {version}: a tensor is held by two writers; each must have its own")
        if "config.json" not in files:
            raise ValueError("files must hold config.json: a full version is a Hugging Face checkpoint")
        side_names(files)
        if self._form is not None:
            check_same_form(self._form, entries)
        self._check_lease()
        self._write_ledger()
        hash = hash_of(entries)
        there = version <= self.last and self._again(version, hash)
        base = None if version <= self.last else self._base()
        if base is None and not there:
            self._store.check_room(sum(size_of(entry.torch_form) for entry in entries.values()))
        return Plan(
            version=version, base=base, where=folder(version), hash=hash, needs=self._needs(version), there=there
        )

    def _again(self, version: int, hash: str) -> bool:
        """Whether a version that was published before can be read. One that can not is written anew, in full."""
        try:
            known = self._store.manifest(version).hash
        except MissingVersion:
            known = ""
        if known != hash:
            raise VersionReused(f"version {version} was other weights; publish as {self.last + 1} or later")
        try:
            check_version(self._store, version)
        except WeightFault:
            return False
        return True

    def _base(self) -> Base | None:
        """What the next version is encoded against."""
        asked = self._store.names("refused")
        for name in asked:  # before the answer is written: a note that comes after it is about it
            self._store.remove(f"refused/{name}")
        for report in self._store.reports():
            with suppress(ForeignBase):  # which ends the chain
                self.acknowledge(report.version, report.hash, report.receiver)
        with self._lock:
            if asked:
                self._end_chain()
            self._begun = self._chain
            return self._baseline

    def _needs(self, version: int) -> list[int]:
        with self._lock:
            return [version, *self._pending, *([self._baseline.version] if self._baseline else [])]

    def _end_chain(self) -> None:
        """Nothing that is published from now on builds on anything before."""
        self._baseline = None
        self._pending.clear()
        self._chain += 1

    def finish(self, plan: Plan, parts: Sequence[Part], files: Mapping[str, bytes]) -> Manifest:
        """Makes a version of what was written. Raises ValueError when a part is missing or there twice; SecondWriter,
        StoreError."""
        side = write_side(self._store, plan.where, parts, files)
        manifest = seal(plan.version, plan.base, parts, side, self._lease.token)
        if manifest.hash != plan.hash:
            raise ValueError(f"version {plan.version}: the parts are not all of the tensors that were surveyed")
        self._check_lease()
        name = f"{plan.where}/{MANIFEST}"
        if not self._store.create(name, manifest.dump()):
            self._check_lease()  # still ours: what is there is by a writer that lost the store, and nobody takes it
            self._store.write(name, manifest.dump())
        if plan.version > self.last or plan.where != folder(plan.version):
            self._commit(plan, manifest)
        return manifest

    def abandon(self, plan: Plan) -> None:
        """Removes what was written of a version that does not come to be."""
        with suppress(StoreError):
            if plan.where not in (folder(v) for v in self._hashes) and not self._store.exists(plan.version):
                self._store.remove(plan.where)

    def _commit(self, plan: Plan, manifest: Manifest) -> None:
        version = plan.version
        with self._lock:
            if plan.base is None:
                self._deltas = self._delta_bytes = 0
            else:
                self._deltas, self._delta_bytes = self._deltas + 1, self._delta_bytes + manifest.size
            if plan.where == folder(version):
                self._enter(manifest)
            else:
                self._note(version, anchor_bytes=manifest.size)
        self._write_ledger()

    def _enter(self, manifest: Manifest) -> None:
        version = manifest.version
        self._hashes[version] = manifest.hash
        self.last, self._form = version, manifest.tensors
        self._ledger[version] = Published(
            version=version,
            base=None if manifest.base is None else manifest.base.version,
            hash=manifest.hash,
            bytes=manifest.size,
            owner=self._owner,
            acknowledged=[],
            files={name: file.hash for name, file in manifest.files.items()},
        )
        self._unwritten.add(version)
        if self._begun == self._chain:  # otherwise it was refused while it was written
            self._pending[version] = manifest.hash
        if len(self._pending) > HELD:  # the oldest stays: it is the likeliest to be acknowledged next
            del self._pending[sorted(self._pending)[1]]

    def anchor(self, manifest: Manifest) -> Plan | None:
        """How the version that was just made is written in full beside its delta, when that is due."""
        whole = sum(size_of(entry.torch_form) for entry in manifest.tensors.values())
        if manifest.base is None or (self._deltas < self._full_every and 2 * self._delta_bytes < whole):
            return None
        version = manifest.version
        where, needs = anchor(version), self._needs(version)
        return Plan(version=version, base=None, where=where, hash=manifest.hash, needs=needs)

    # What receivers say

    def acknowledge(self, version: int, hash: str, receiver: str = "") -> None:
        """A receiver runs `version` and found `hash` for it: later deltas may build on it. Late and repeated ones change
        nothing. Raises ForeignBase when the hash is not that version's; the next version is then full."""
        with self._lock:
            if self._hashes.get(version, hash) != hash:
                self._end_chain()
                raise ForeignBase(f"a receiver runs {hash[:8]} as version {version}, not {self._hashes[version][:8]}")
            if version in self._pending:
                self._baseline = Base(version=version, hash=self._pending[version])
                self._pending = {v: known for v, known in self._pending.items() if v > version}
            line = self._ledger.get(version)
            if line is not None and receiver and receiver not in line.acknowledged:
                self._note(version, acknowledged=[*line.acknowledged, receiver])

    def refuse(self) -> None:
        """A receiver could not use a version: the next one is full."""
        with self._lock:
            self._end_chain()

    def _note(self, version: int, **change: object) -> None:
        if version in self._ledger:
            self._ledger[version] = self._ledger[version].model_copy(update=change)
            self._unwritten.add(version)

    def _write_ledger(self) -> None:
        """Lines that can not be written now are written with later ones: nothing depends on them."""
        with suppress(StoreError):
            while self._unwritten:
                version = min(self._unwritten)
                self._store.write(f"ledger/{folder(version)}.json", self._ledger[version].dump())
                self._unwritten.discard(version)
        for version in sorted(self._ledger)[: -4 * HELD]:
            if version not in self._unwritten:
                del self._ledger[version]

    # Retention

    def prune(self, keep: int, pins: Iterable[int] = (), since: float = math.inf) -> list[int]:
        """Removes all but the newest `keep` versions, those from `since` on, `pins`, the baseline, what receivers report to run
        or to want (unless they lag by more than 2 · `keep` versions), and what any of these is decoded from. Returns the numbers
        removed: none while a manifest that decides can not be read."""
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1")
        with self._publishing:
            self._check_lease()
            every = [v for v in self._store.folders() if v <= self.last]
            there = [v for v in every if self._store.exists(v)]
            in_use = {version for r in self._store.reports() for version in (r.version, r.wants)}
            with self._lock:
                needed = {*there[-keep:], *(v for v in there if v >= since), *pins, *self._pending}
                needed |= {self._baseline.version} if self._baseline else set()
            needed |= {v for v in in_use if v in there[-2 * keep :]}
            try:
                kept, anchored = self._reach(needed & set(there))
            except WeightFault:
                return []
            for version in set(self._store.anchors()) - anchored:
                self._store.remove(anchor(version))
            gone = [v for v in every if v not in kept]
            for version in gone:
                self._store.remove(folder(version))
            return gone

    def _reach(self, needed: Iterable[int]) -> tuple[set[int], set[int]]:
        """Versions, and anchors, from which all that is needed is decoded; the newest anchor always."""
        anchors = [v for v in self._store.anchors() if self._store.exists(v, anchor(v))]
        kept, anchored = set(needed), set(anchors[-1:])
        for version in sorted(needed):
            while version not in anchors and (base := self._store.manifest(version).base) is not None:
                version = base.version
                kept.add(version)
            anchored |= {version} & set(anchors)
        return kept, anchored

    def close(self) -> None:
        """Gives the lease back, if it is still this publisher's; its versions stay good."""
        with self._publishing:
            self._check_lease()
            self._write_ledger()
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
