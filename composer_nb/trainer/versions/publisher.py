"""Publish weight versions, from one rank or many, without ever publishing wrong weights.

A delta is encoded against the newest acknowledged version, so every working receiver can decode it. Beside every
`full_every`-th delta, and whenever deltas add up to half a full version, there is an anchor: the same weights in full, for
receivers that join or lag. If nothing is acknowledged, or a receiver asks, the next version is full. Everything is checked before
it is used, so a fault costs bytes and versions, never correctness.

    every rank     hash its whole tensors
    first rank     choose the base that they are encoded against
    every rank     encode and write its files
    first rank     write the manifest that makes them a version; again for an anchor if one is due

A fault on one rank is raised on all and leaves no version behind. A store has one publisher.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from composer_nb.trainer.models.shards import not_finite, require_finite, size_of
from composer_nb.trainer.versions import manifest as manifests
from composer_nb.trainer.versions.payload import side_names, write_part, write_side
from composer_nb.trainer.versions.receiver import HELD
from composer_nb.trainer.versions.store import Published, StoreError, VersionStore, anchor, check_file, folder

T = TypeVar("T")
# Versions under way in the background.
DEPTH = 2


class VersionReused(manifests.WeightFault):
    """A version number that was published with other weights."""


class VersionPlan(manifests.SealedRecord):
    """The plan of a version, for all ranks.

    Attributes:
        where: Folder of the files.
        hash: Hash of all tensors together.
        needs: Versions that may still serve as a base.
        there: The same weights were published under this number: nothing is written.
    """

    version: int
    base: manifests.BaseVersion | None
    where: str
    hash: str
    needs: list[int]
    there: bool = False


class Publisher:
    """Publishes versions; one publisher per store. `owner` is recorded in the ledger. Any thread may acknowledge.

    With a process group (gloo, all ranks, used for nothing else) each rank has a Publisher with its part of the tensors. The
    constructor and `publish` are then collective; the other methods act on the first rank alone.
    """

    def __init__(
        self, url: str | Path, *, owner: str, full_every: int = 25, group: dist.ProcessGroup | None = None
    ) -> None:
        if full_every < 1:
            raise ValueError(f"full_every={full_every} must be at least 1")
        self._group = group
        self._number = 0 if group is None else dist.get_rank(group)
        self._store, self._owner, self._full_every = VersionStore(url), owner, full_every
        self._lock = threading.Lock()
        # This rank's tensors of the versions that may serve as a base.
        self._states: dict[int, manifests.WeightState] = {}
        self._hashes: dict[int, str] = {}
        self._pending: dict[int, str] = {}
        self._baseline: manifests.BaseVersion | None = None
        # Number of chains so far: acknowledging a version of an earlier chain has no effect.
        self._chain = 0
        # Chain of the version under way.
        self._begun = 0
        # Deltas since the last version or anchor in full.
        self._deltas = self._delta_bytes = 0
        self._ledger: dict[int, Published] = {}
        self._form: Mapping[str, manifests.TensorEntry] | None = None
        self.last = self._store.patiently(lambda: self._on_first(self._newest))

    def _newest(self) -> int:
        """Return the newest version, whose form later ones must have; -1 if there is none."""
        newest = max((v for v in self._store.folders() if self._store.exists(v)), default=-1)
        with suppress(manifests.WeightFault):
            self._form = self._store.manifest(newest).tensors
        return newest

    def _on_first(self, act: Callable[[], T]) -> T:
        """Call `act` on the first rank, and return or raise its outcome on all."""
        return cast(T, self._on_all(lambda: None if self._number else act())[0])

    def _on_all(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank, and return all results, or raise the first error, on all."""
        if self._group is None:
            return [act()]
        outcome: T | Exception
        try:
            outcome = act()
        except Exception as error:
            outcome = error
        outcomes: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(outcomes, outcome, group=self._group)
        for result in outcomes:
            if isinstance(result, Exception):
                raise result
        return outcomes

    def publish(
        self,
        version: int,
        tensors: manifests.Weights,
        files: manifests.SideFiles,
        hashed: Callable[[str], None] = lambda hash: None,
    ) -> manifests.Manifest:
        """Publish CPU tensors, under Hugging Face's names, which never change afterwards, with their side files. The tensors may
        be memory-mapped (`shards.Mapped`). Publishing the same weights under the same number again (after a crash) is no error,
        and mends files that were damaged since. An anchor that cannot be written is tried again beside the next version. `hashed`
        gets the hash of all ranks' tensors before anything is written.

        Raises, with the store and the baseline unchanged: ValueError for tensors that are not finite or do not fit earlier
        versions, VersionReused, StoreError.
        """

        def survey() -> Mapping[str, manifests.TensorEntry]:
            require_finite(f"version {version}", not_finite(tensors))
            return manifests.entries_of(tensors)

        surveys = self._on_all(survey)
        plan = self._store.patiently(lambda: self._on_first(lambda: self._begin(version, surveys, files)))
        hashed(plan.hash)
        if plan.there:
            return self._on_first(lambda: self._store.manifest(version))
        entries = surveys[self._number]
        hash = manifests.hash_of(entries)
        self._states[version] = manifests.WeightState(version=version, tensors=tensors, entries=entries, hash=hash)
        manifest = self._store.patiently(lambda: self._write(plan, files))
        anchor_plan = self._on_first(lambda: self._anchor(manifest))
        if anchor_plan is not None:
            with suppress(StoreError):
                self._write(anchor_plan, files)
        return manifest

    def _begin(
        self, version: int, surveys: Sequence[Mapping[str, manifests.TensorEntry]], files: manifests.SideFiles
    ) -> VersionPlan:
        """Decide how a version is written, from the entries of all ranks. Raises like `publish`."""
        entries = {name: entry for survey in surveys for name, entry in survey.items()}
        if len(entries) < sum(map(len, surveys)):
            raise ValueError(f"version {version}: a tensor is held by two writers; each must have its own")
        if "config.json" not in files:
            raise ValueError("files must hold config.json: a full version is a Hugging Face checkpoint")
        side_names(files)
        if self._form is not None:
            manifests.check_same_form(self._form, entries)
        version_hash = manifests.hash_of(entries)
        is_repeated = self._store.exists(version) or version <= self.last
        there = is_repeated and self._intact(version, version_hash)  # otherwise it is written again, in full
        base = None if is_repeated else self._base()
        if base is None and not there:
            self._store.check_room(sum(size_of(entry.torch_form) for entry in entries.values()))
            self._store.remove(folder(version))
        # An acknowledgement may have moved the baseline on meanwhile.
        where, needs = folder(version), self._needs(version, *([base.version] if base else []))
        return VersionPlan(version=version, base=base, where=where, hash=version_hash, needs=needs, there=there)

    def _intact(self, version: int, hash: str) -> bool:
        """Return whether a published version is as it was written. Raises VersionReused if it had another hash, by its manifest
        or, if that is lost or damaged, by the ledger."""
        record = f"ledger/{folder(version)}.json"
        published: manifests.Manifest | Published | None = None
        with suppress(manifests.WeightFault):
            published = Published.load(self._store.read(record), record)
        with suppress(manifests.WeightFault):
            published = self._store.manifest(version)
        if published is None or published.hash != hash:
            raise VersionReused(f"version {version} was other weights; publish as {self.last + 1} or later")
        with suppress(manifests.WeightFault):
            for name, file in self._store.manifest(version).files.items():
                check_file(self._store, f"{folder(version)}/{name}", file)
            return True
        return False

    def _base(self) -> manifests.BaseVersion | None:
        """Return the base of the next version, after reading refusals and reports."""
        refusals = self._store.names("refused")
        with self._lock:
            if refusals:  # before they are removed: the store may then refuse, and all this is done again
                self._end_chain()
        for name in refusals:  # before the answer is written: a later note refers to the answer
            self._store.remove_file(f"refused/{name}")
        for report in self._store.reports():
            with suppress(manifests.ForeignBase):  # ends the chain
                self.acknowledge(report.version, report.hash, report.receiver)
        with self._lock:
            self._begun = self._chain
            return self._baseline

    def _needs(self, *versions: int) -> list[int]:
        """Return `versions`, the base of the next one as of now, and those that may become it."""
        with self._lock:
            return [*versions, *self._pending, *([self._baseline.version] if self._baseline else [])]

    def _anchor(self, manifest: manifests.Manifest) -> VersionPlan | None:
        """Return how to write the version in full beside its delta, if that is due."""
        full_bytes = sum(size_of(entry.torch_form) for entry in manifest.tensors.values())
        if manifest.base is None or (self._deltas < self._full_every and 2 * self._delta_bytes < full_bytes):
            return None
        version, where = manifest.version, anchor(manifest.version)
        return VersionPlan(version=version, base=None, where=where, hash=manifest.hash, needs=self._needs(version))

    def _write(self, plan: VersionPlan, files: manifests.SideFiles) -> manifests.Manifest:
        """Write the files of all ranks and the manifest; after an error, remove them."""

        def write() -> manifests.WriterPart:
            self._states = {v: state for v, state in self._states.items() if v in plan.needs}
            base = None if plan.base is None else self._states[plan.base.version]
            rank = "" if self._group is None else f"rank{self._number:05d}"
            return write_part(self._store, plan.where, self._states[plan.version], base, rank=rank)

        try:
            parts = self._on_all(write)
            return self._on_first(lambda: self._finish(plan, parts, files))
        except BaseException:
            if self._number == 0:
                with suppress(StoreError):
                    self._store.remove(plan.where)
            raise

    def _finish(
        self, plan: VersionPlan, parts: Sequence[manifests.WriterPart], files: manifests.SideFiles
    ) -> manifests.Manifest:
        """Write the manifest of a version or an anchor, and record it as published."""
        if plan.base is not None:  # the others are those of the base
            files = {"config.json": files["config.json"]}
        manifest = manifests.seal(plan.version, plan.base, parts, write_side(self._store, plan.where, parts, files))
        self._store.write(f"{plan.where}/{manifests.MANIFEST}", manifest.dump())
        version, base = plan.version, plan.base.version if plan.base else None
        with self._lock:
            if plan.base is None:
                self._deltas = self._delta_bytes = 0
            else:
                self._deltas, self._delta_bytes = self._deltas + 1, self._delta_bytes + manifest.size
            if plan.where != folder(version):
                self._record(self._ledger[version].model_copy(update={"anchor_bytes": manifest.size}))
                return manifest
            self._hashes[version] = manifest.hash
            self.last, self._form = max(self.last, version), manifest.tensors
            hashes = {name: entry.hash for name, entry in (manifest.files | manifest.tensors).items()}
            content: dict[str, Any] = {"hash": manifest.hash, "bytes": manifest.size, "files": hashes}
            self._record(Published(version=version, base=base, owner=self._owner, acknowledged=[], **content))
            if self._begun == self._chain:  # otherwise it was refused meanwhile
                self._pending[version] = manifest.hash
            if len(self._pending) > HELD:  # keep the oldest, which is the likeliest to be acknowledged next
                del self._pending[sorted(self._pending)[1]]
        return manifest

    def _record(self, line: Published) -> None:
        """Write a line of the ledger. A failure is ignored: who needs the line is a version whose manifest is lost."""
        self._ledger[line.version] = line
        for version in sorted(self._ledger)[: -4 * HELD]:
            del self._ledger[version]
        with suppress(StoreError):
            self._store.write(f"ledger/{folder(line.version)}.json", line.dump())

    def acknowledge(self, version: int, hash: str, receiver: str = "") -> None:
        """Record that a receiver runs `version` with this hash: later deltas may build on it. Late and repeated calls have no
        effect. Raises ForeignBase for a wrong hash; the next version is then full."""
        with self._lock:
            if self._hashes.get(version, hash) != hash:
                self._end_chain()
                raise manifests.ForeignBase(
                    f"a receiver runs {hash[:8]} as version {version}, not {self._hashes[version][:8]}"
                )
            if version in self._pending:
                self._baseline = manifests.BaseVersion(version=version, hash=self._pending[version])
                self._pending = {v: pending for v, pending in self._pending.items() if v > version}
            line = self._ledger.get(version)
            if line is not None and receiver and receiver not in line.acknowledged:
                self._record(line.model_copy(update={"acknowledged": [*line.acknowledged, receiver]}))

    def _end_chain(self) -> None:
        """Encode no later version against an earlier one."""
        self._baseline = None
        self._pending.clear()
        self._chain += 1

    def prune(self, keep: int, since: float = math.inf) -> list[int]:
        """Remove old versions as `VersionStore.prune` does; the baseline and what may become it are kept."""
        return [] if self._number else self._store.prune(keep, self._needs(), since, self.last)


class BackgroundPublisher:
    """A publisher on a thread of its own, in order. A version is published even if an earlier one failed."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        self._under_way: deque[Future[Any]] = deque()

    def publish(self, version: int, tensors: manifests.Weights, files: manifests.SideFiles) -> Future[str]:
        """Queue a version; blocks while `DEPTH` versions are under way. The future is the hash of all ranks' tensors together.
        Raises the error of an earlier version."""
        self._settle(DEPTH - 1)
        hash_future: Future[str] = Future()

        def work() -> None:
            try:
                self._publisher.publish(version, tensors, files, hash_future.set_result)
            except BaseException as error:
                if not hash_future.done():
                    hash_future.set_exception(error)
                raise

        self._under_way.append(self._pool.submit(work))
        return hash_future

    def prune(self, keep: int, since: float) -> None:
        """Queue `Publisher.prune`. What the store does not remove now, a later call does."""

        def work() -> None:
            with suppress(StoreError):
                self._publisher.prune(keep, since=since)

        self._under_way.append(self._pool.submit(work))

    def check(self) -> None:
        """Raise the error of an earlier version."""
        self._settle(DEPTH)

    def stop(self) -> None:
        """Publish nothing more than the version under way."""
        self._pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Wait until everything is published, end the thread, and raise the first error."""
        self._pool.shutdown()
        self._settle(0)

    def _settle(self, max_under_way: int) -> None:
        while self._under_way and (len(self._under_way) > max_under_way or self._under_way[0].done()):
            self._under_way.popleft().result()
