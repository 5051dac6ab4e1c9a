"""Publish weight versions, from one rank or many, without ever publishing wrong weights.

A delta is encoded against the newest acknowledged version, so every working receiver can decode it. Beside every
`full_every`-th delta, and whenever deltas add up to half a full version, there is an anchor: the same weights in full, for
receivers that join or lag. If nothing is acknowledged, or a receiver asks, the next version is full. Everything is checked before
it is used, so a fault costs bytes and versions, never correctness.

    every rank     survey: hash its whole tensors
    first rank     begin: choose the base that they are encoded against
    every rank     write: encode and write its files
    first rank     finish: write the manifest that makes them a version; again for an anchor if one is due

A fault on one rank is raised on all and leaves no version behind.
"""

from __future__ import annotations

import math
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from composer_nb.trainer.models.shards import not_finite, require_finite, size_of
from composer_nb.trainer.versions.manifest import (
    MANIFEST,
    BaseVersion,
    DamagedVersion,
    ForeignBase,
    Manifest,
    MissingVersion,
    SealedRecord,
    SideFiles,
    TensorEntry,
    WeightFault,
    Weights,
    WeightState,
    WriterPart,
    check_same_form,
    hash_of,
    seal,
)
from composer_nb.trainer.versions.payload import SHARD_BYTES, side_names, write_part, write_side
from composer_nb.trainer.versions.receiver import HELD, SecondWriter, check_version
from composer_nb.trainer.versions.store import (
    LEASE,
    Published,
    PublisherLease,
    StoreError,
    VersionStore,
    anchor,
    folder,
)

T = TypeVar("T")
Group = dist.ProcessGroup


class VersionReused(WeightFault):
    """A version number that was published with other weights."""


class VersionPlan(SealedRecord):
    """The plan of a version, for all its writers."""

    version: int
    base: BaseVersion | None
    where: str
    """Folder of the files."""
    hash: str
    """Hash of all tensors together."""
    needs: list[int]
    """Versions that may still serve as a base."""
    there: bool = False
    """The same weights exist under this number and are readable: nothing is written."""


class Writer:
    """One rank's tensors, and those of the versions that may serve as their base."""

    def __init__(self, url: str | Path, *, rank: str = "", shard_bytes: int = SHARD_BYTES) -> None:
        """`rank` distinguishes the files of several writers, as "rank00002"."""
        self._store, self._rank, self._shard_bytes = VersionStore(url), rank, shard_bytes
        self._states: dict[int, WeightState] = {}

    def survey(self, version: int, tensors: Weights) -> Mapping[str, TensorEntry]:
        """Hash CPU tensors, under Hugging Face's names, which must not change from now on. They may be memory-mapped
        (`shards.Mapped`). Raises ValueError for one that cannot be published, as it is not finite."""
        require_finite(f"version {version}", not_finite(tensors))
        state = self._states[version] = WeightState.of(version, tensors)
        return state.entries

    def write(self, plan: VersionPlan) -> WriterPart:
        """Write this rank's tensors. Raises MissingVersion if this writer lacks the base, as after a restart (call
        `Publisher.refuse` and begin again); StoreError."""
        base = None if plan.base is None else self._states.get(plan.base.version)
        if plan.base is not None and base is None:
            raise MissingVersion(f"{self._rank or 'the writer'} does not hold version {plan.base.version}")
        self._states = {v: state for v, state in self._states.items() if v in plan.needs}
        target = self._states[plan.version]
        return write_part(self._store, plan.where, target, base, shard_bytes=self._shard_bytes, rank=self._rank)


class _PublishingRanks:
    """The ranks that publish together: those of a process group, or one alone."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.number = 0 if group is None else dist.get_rank(group)

    def on_first(self, act: Callable[[], T]) -> T:
        """Call `act` on the first rank, and return or raise its outcome on all."""
        if self._group is None:
            return act()
        outcome = [_outcome(act) if self.number == 0 else None]
        dist.broadcast_object_list(outcome, group_src=0, group=self._group)
        return _value(outcome[0])

    def on_all(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank, and return all results, or raise the first error, on all."""
        if self._group is None:
            return [act()]
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, _outcome(act), group=self._group)
        return [_value(one) for one in outcomes]


def _outcome(act: Callable[[], Any]) -> Any:
    """Return what `act` returns or raises."""
    try:
        return act()
    except Exception as error:
        return error


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Publisher:
    """Publishes versions; one publisher per store. `owner` holds the lease until `close`. The same owner may take it again
    after a crash (its former publisher is then refused), another owner only with `takeover`. Any thread may acknowledge.

    With a process group (gloo, all ranks, used for nothing else) each rank has a Publisher with its part of the tensors. The
    constructor and `publish` are then collective; the other methods act on the first rank alone.
    """

    def __init__(
        self, url: str | Path, *, owner: str, full_every: int = 25, takeover: bool = False, group: Group | None = None
    ) -> None:
        """Raise SecondWriter if another owner holds the store, and StoreError if it cannot be written."""
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1")
        self._ranks = _PublishingRanks(group)
        self._writer = Writer(url, rank="" if group is None else f"rank{self._ranks.number:05d}")
        self._store, self._owner, self._full_every = VersionStore(url), owner, full_every
        self._publishing, self._lock = threading.Lock(), threading.Lock()
        self._hashes: dict[int, str] = {}
        self._pending: dict[int, str] = {}
        self._baseline: BaseVersion | None = None
        self._chain = 0
        """Number of chains so far: acknowledging a version of an earlier chain has no effect."""
        self._begun = 0
        """Chain of the version under way."""
        self._deltas = self._delta_bytes = 0
        """Deltas since the last version or anchor in full."""
        self._ledger: dict[int, Published] = {}
        self._unwritten: set[int] = set()
        self._form: Mapping[str, TensorEntry] | None = None
        self.last = -1
        self._ranks.on_first(lambda: self._take(takeover))

    def _take(self, takeover: bool) -> None:
        self.last = max((v for v in self._store.folders() if self._store.exists(v)), default=-1)
        with suppress(WeightFault):
            self._form = self._store.manifest(self.last).tensors
        try:
            old = self._store.lease()
        except (MissingVersion, DamagedVersion):
            old = PublisherLease(owner=None, token="", since=0)
        if old.owner not in (None, self._owner) and not takeover:
            raise SecondWriter(f"{self._store.url} is written by {old.owner!r}; stop it, or set takeover")
        self.last = max(self.last, old.since - 1)
        self._lease = PublisherLease(owner=self._owner, token=uuid.uuid4().hex, since=self.last + 1)
        self._store.write(LEASE, self._lease.dump())

    def _check_lease(self) -> None:
        try:
            found = self._store.lease()
        except (MissingVersion, DamagedVersion):  # another writer's lease would be whole
            self._store.write(LEASE, self._lease.dump())
            return
        if found != self._lease:
            raise SecondWriter(f"{self._store.url} is now written by {found.owner!r}; this publisher lost it")

    # A version

    def publish(
        self, version: int, tensors: Weights, files: SideFiles, hashed: Callable[[str], None] = lambda hash: None
    ) -> Manifest:
        """Publish CPU tensors, under Hugging Face's names, which never change afterwards, with their side files. Publishing
        the same weights under the same number again (after a crash) is no error and repairs damage. An anchor that cannot be
        written is tried again beside the next version. `hashed` gets the hash of all ranks' tensors before anything is written.

        Raises, with the store and the baseline unchanged: ValueError for tensors that do not fit earlier versions,
        VersionReused, SecondWriter, StoreError.
        """
        with self._publishing:
            surveys = self._ranks.on_all(lambda: self._writer.survey(version, tensors))
            plan = self._ranks.on_first(lambda: self.begin(version, surveys, files))
            hashed(plan.hash)
            if plan.there:
                return self._ranks.on_first(lambda: self._store.manifest(version))
            manifest = self._write(plan, files)
            due = self._ranks.on_first(lambda: self.anchor(manifest))
            if due is not None:
                with suppress(StoreError):
                    self._write(due, files)
            return manifest

    def _write(self, plan: VersionPlan, files: SideFiles) -> Manifest:
        try:
            parts = self._ranks.on_all(lambda: self._writer.write(plan))
            return self._ranks.on_first(lambda: self.finish(plan, parts, files))
        except BaseException:
            if self._ranks.number == 0:
                self.abandon(plan)
            raise

    def begin(self, version: int, surveys: Sequence[Mapping[str, TensorEntry]], files: SideFiles) -> VersionPlan:
        """Decide how a version is written, from the surveys of its writers. Raises like `publish`."""
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
        needs = self._needs(version)
        return VersionPlan(version=version, base=base, where=folder(version), hash=hash, needs=needs, there=there)

    def _again(self, version: int, hash: str) -> bool:
        """Return whether a version that was published before is readable. Otherwise it is written again, in full."""
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

    def _base(self) -> BaseVersion | None:
        """Return the base of the next version, after reading refusals and reports."""
        asked = self._store.names("refused")
        for name in asked:  # before the answer is written: a later note refers to the answer
            self._store.remove(f"refused/{name}")
        for report in self._store.reports():
            with suppress(ForeignBase):  # ends the chain
                self.acknowledge(report.version, report.hash, report.receiver)
        with self._lock:
            if asked:
                self._end_chain()
            self._begun = self._chain
            return self._baseline

    def _needs(self, *versions: int) -> list[int]:
        """Return `versions`, the base of the next one, and those that may become it."""
        with self._lock:
            return [*versions, *self._pending, *([self._baseline.version] if self._baseline else [])]

    def _end_chain(self) -> None:
        """Encode no later version against an earlier one."""
        self._baseline = None
        self._pending.clear()
        self._chain += 1

    def finish(self, plan: VersionPlan, parts: Sequence[WriterPart], files: SideFiles) -> Manifest:
        """Write the manifest of a version. Raises ValueError for a missing or duplicate part; SecondWriter, StoreError."""
        if plan.base is not None:  # the others are those of the base
            files = {"config.json": files["config.json"]}
        side = write_side(self._store, plan.where, parts, files)
        manifest = seal(plan.version, plan.base, parts, side, self._lease.token)
        if manifest.hash != plan.hash:
            raise ValueError(f"version {plan.version}: the parts are not all of the tensors that were surveyed")
        self._check_lease()
        name = f"{plan.where}/{MANIFEST}"
        if not self._store.create(name, manifest.dump()):
            self._check_lease()  # still ours: the existing one is by a writer that lost the store, and no receiver accepts it
            self._store.write(name, manifest.dump())
        if plan.version > self.last or plan.where != folder(plan.version):
            self._commit(plan, manifest)
        return manifest

    def abandon(self, plan: VersionPlan) -> None:
        """Remove the files of a failed version, unless another writer owns the folder by now."""
        with suppress(StoreError, SecondWriter):
            self._check_lease()
            if not self._store.exists(plan.version, plan.where):
                self._store.remove(plan.where)

    def _commit(self, plan: VersionPlan, manifest: Manifest) -> None:
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
        if self._begun == self._chain:  # otherwise it was refused meanwhile
            self._pending[version] = manifest.hash
        if len(self._pending) > HELD:  # keep the oldest, which is the likeliest to be acknowledged next
            del self._pending[sorted(self._pending)[1]]

    def anchor(self, manifest: Manifest) -> VersionPlan | None:
        """Return how to write the version in full beside its delta, if that is due."""
        whole = sum(size_of(entry.torch_form) for entry in manifest.tensors.values())
        if manifest.base is None or (self._deltas < self._full_every and 2 * self._delta_bytes < whole):
            return None
        version = manifest.version
        where, needs = anchor(version), self._needs(version)
        return VersionPlan(version=version, base=None, where=where, hash=manifest.hash, needs=needs)

    # Acknowledgements

    def acknowledge(self, version: int, hash: str, receiver: str = "") -> None:
        """Record that a receiver runs `version` with this hash: later deltas may build on it. Late and repeated calls have no
        effect. Raises ForeignBase for a wrong hash; the next version is then full."""
        with self._lock:
            if self._hashes.get(version, hash) != hash:
                self._end_chain()
                raise ForeignBase(f"a receiver runs {hash[:8]} as version {version}, not {self._hashes[version][:8]}")
            if version in self._pending:
                self._baseline = BaseVersion(version=version, hash=self._pending[version])
                self._pending = {v: known for v, known in self._pending.items() if v > version}
            line = self._ledger.get(version)
            if line is not None and receiver and receiver not in line.acknowledged:
                self._note(version, acknowledged=[*line.acknowledged, receiver])

    def refuse(self) -> None:
        """Record that a receiver could not use a version: the next one is full."""
        with self._lock:
            self._end_chain()

    def _note(self, version: int, **change: object) -> None:
        if version in self._ledger:
            self._ledger[version] = self._ledger[version].model_copy(update=change)
            self._unwritten.add(version)

    def _write_ledger(self) -> None:
        """Write pending lines; lines that fail are written later, as nothing depends on them."""
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
        """Remove old versions as `VersionStore.prune` does; the baseline, what may become it, and `pins` are kept."""
        if self._ranks.number:
            return []
        with self._publishing:
            self._check_lease()
            return self._store.prune(keep, {*pins, *self._needs()}, since, self.last)

    def close(self) -> None:
        """Return the lease, if this publisher still holds it; its versions stay valid."""
        if self._ranks.number:
            return
        with self._publishing:
            self._check_lease()
            self._write_ledger()
            self._store.write(LEASE, self._lease.model_copy(update={"owner": None}).dump())


class BackgroundPublisher:
    """A publisher on a thread of its own, in order. A version is published even if an earlier one failed."""

    def __init__(self, publisher: Publisher, *, depth: int = 2) -> None:
        """`publish` blocks while `depth` versions are under way."""
        self._publisher, self._depth = publisher, depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: deque[Future[Any]] = deque()

    def publish(self, version: int, tensors: Weights, files: SideFiles) -> Future[str]:
        """Queue a version. The future is the hash of all ranks' tensors together. Raises the error of an earlier version."""
        self._settle(self._depth - 1)
        hash: Future[str] = Future()
        self._under_way.append(self._pool.submit(self._publish, version, tensors, files, hash))
        return hash

    def _publish(self, version: int, tensors: Weights, files: SideFiles, hash: Future[str]) -> None:
        try:
            self._publisher.publish(version, tensors, files, hash.set_result)
        except BaseException as error:
            if not hash.done():
                hash.set_exception(error)
            raise

    def prune(self, keep: int, since: float) -> None:
        """Queue `Publisher.prune`."""
        self._under_way.append(self._pool.submit(self._publisher.prune, keep, since=since))

    def close(self) -> None:
        """Wait until everything is published, end the thread, and raise the first error."""
        self._pool.shutdown()
        self._settle(0)

    def _settle(self, most: int) -> None:
        while self._under_way and (len(self._under_way) > most or self._under_way[0].done()):
            self._under_way.popleft().result()
