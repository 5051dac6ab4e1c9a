"""Receivers of weight versions, which reach a version with the fewest bytes and check all data before use.

A version can be reached from available weights by deltas, or from an anchor or a full version and the deltas after it. If the
first route is broken, the next one is tried. For a version that cannot be used at all, the receiver leaves a note that asks the
publisher for a full one.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from composer_nb.trainer.versions.manifest import ForeignBase, Manifest, MisplacedVersion, WeightFault, WeightState
from composer_nb.trainer.versions.payload import Decoded, read_link, side_files_of
from composer_nb.trainer.versions.store import ANCHORS, Note, ReceiverReport, StoreError, VersionStore, anchor, folder

# Number of states kept as bases while acknowledgements are on their way.
HELD = 4


@dataclass(frozen=True, slots=True)
class VersionRule:
    """Version that an engine runs: the newest, if it is above `after`; else `most`, or the newest if that is older."""

    after: float = -1
    most: float = math.inf

    def of(self, newest: int) -> int:
        return newest if newest > self.after else int(min(newest, self.most))


NO_STATES: Mapping[int, WeightState] = {}


@dataclass(frozen=True, slots=True)
class Route:
    """A way to a version: folders with their manifests, and the available version from which they start, if any."""

    steps: tuple[tuple[str, Manifest], ...]
    base: int | None

    @property
    def size(self) -> int:
        """Number of bytes to read."""
        return sum(manifest.size for _, manifest in self.steps)


def routes(store: VersionStore, version: int, have: Callable[[int, str], bool]) -> list[Route]:
    """Return the routes to a version, those with fewer bytes first. `have(version, hash)` tells whether weights are available. If
    there is no route, raises the version's fault: MissingVersion, DamagedVersion, MisplacedVersion or ForeignBase; or
    StoreError."""
    anchors = set(store.folders(ANCHORS))
    ways, deltas, hash = list[Route](), tuple[tuple[str, Manifest], ...](), ""

    def manifest(where: str = "") -> Manifest:
        read = store.manifest(version, where)
        if hash not in ("", read.hash):
            builds = where or f"version {deltas[0][1].version}"
            fault = ForeignBase(f"{store.url}: {builds} builds on other weights than version {version} has")
            fault.at = version  # one of the two is not ours: neither is believed
            raise fault
        return read

    try:
        newest = manifest()
        delta: Manifest | None = newest
        hash = newest.hash
        while True:
            if version in anchors:
                with suppress(WeightFault):  # unfinished or unusable: there are other routes
                    ways.append(Route(((anchor(version), manifest(anchor(version))), *deltas), None))
            delta = delta or manifest()
            deltas, base = ((folder(version), delta), *deltas), delta.base
            if base is None or have(base.version, base.hash):
                ways.append(Route(deltas, base.version if base else None))
                break
            if ways and Route(deltas, None).size >= min(route.size for route in ways):
                break
            version, hash, delta = base.version, base.hash, None
    except WeightFault:
        if not ways:
            raise
    return sorted(ways, key=lambda route: route.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version in memory, decoded and checked, but not yet in use. `files`: side files of what was read, all of them if no base
    was at hand. `read_bytes`: number of bytes read for it."""

    manifest: Manifest
    state: WeightState
    base: WeightState | None
    files: Mapping[str, bytes]
    read_bytes: int

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.state.tensors


def read_version(store: VersionStore, version: int, states: Mapping[int, WeightState] = NO_STATES) -> Fetched:
    """Read a version and its bases, back to one of `states` or to a full version, and check all of them. Nothing is written.
    Raises WeightFault or StoreError."""

    def read(way: Route) -> Fetched:
        base = None if way.base is None else states[way.base]
        links = [read_link(store, where, manifest) for where, manifest in way.steps]
        last = links[-1].manifest
        state, files = last.state(dict(Decoded(base, links))), side_files_of(links)
        return Fetched(manifest=last, state=state, base=base, files=files, read_bytes=way.size)

    ways = routes(store, version, lambda v, hash: v in states and states[v].hash == hash)
    for way in ways[:-1]:
        try:
            return read(way)
        except WeightFault:
            continue
    return read(ways[-1])


class Receiver:
    """Follows a store. Call `fetch` in any thread while an engine runs, and `install` once the engine has loaded the version."""

    def __init__(self, store: str | Path | VersionStore, *, name: str = "receiver") -> None:
        """`name` distinguishes the receivers of a store in their notes and reports."""
        self._store, self._name = store if isinstance(store, VersionStore) else VersionStore(store), name
        self._states: dict[int, WeightState] = {}
        self._refused: set[int] = set()
        self.version = -1

    def newest(self) -> int | None:
        """Return the newest version that was not refused here; None if there is none."""
        versions = (v for v in reversed(self._store.folders()) if v not in self._refused)
        return next((v for v in versions if self._store.exists(v)), None)

    def appeared(self, version: int) -> bool:
        """Return whether a version or a newer one is there. The listing may be old, so it is asked last. Raises StoreError."""
        return self._store.exists(version) or (self.newest() or -1) > version

    def fetch(self, version: int) -> Fetched:
        """Read a version and its bases, back to an available state or to a full version, and check all of them. The running
        weights are not changed. Raises WeightFault, after leaving a note that asks for a full version, or StoreError."""
        try:
            return read_version(self._store, version, self._states)
        except WeightFault as fault:
            self._refused |= {version} if fault.at is None else {version, fault.at}
            note = Note(receiver=self._name, version=version, fault=type(fault).__name__, detail=str(fault))
            try:
                self._store.write(f"refused/{self._name}.json", note.dump())
            except StoreError as error:
                fault.add_note(f"and no full version could be asked for: {error}")
            raise

    def install(self, fetched: Fetched) -> str:
        """Record that the engine now runs `fetched`. Return the hash to acknowledge. Raises MisplacedVersion for a version older
        than the running one."""
        new, base = fetched.state, fetched.base
        if new.version < self.version:
            raise MisplacedVersion(f"version {new.version} cannot follow version {self.version}, which runs already")
        states = self._states | {state.version: state for state in (base, new) if state is not None}
        keep = {*sorted(states)[-HELD:], base.version if base else new.version}
        self._states, self.version = {v: states[v] for v in keep}, new.version
        return new.hash

    def back(self, version: int) -> Mapping[str, Tensor] | None:
        """Forget what is newer than `version`, so that it can run again. Returns its weights if they are at hand."""
        self._states = {number: state for number, state in self._states.items() if number <= version}
        self.version = max(self._states, default=-1)
        return self._states[version].tensors if version in self._states else None

    def report(self) -> None:
        """Write the running version into the store. The publisher treats this as an acknowledgement and keeps the version. It is
        for receivers without another connection to the publisher. Raises StoreError."""
        hash = self._states[self.version].hash if self.version in self._states else ""
        report = ReceiverReport(receiver=self._name, version=self.version, hash=hash)
        self._store.write(f"receivers/{self._name}.json", report.dump())
