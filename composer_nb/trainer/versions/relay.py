"""A region's own store of weight versions: each file crosses the long line once, however many receivers stand behind it.

A relay copies versions, by the way with the fewest bytes from what its region has, and writes a manifest when every file of that
version has arrived and was checked. To receivers the region's store is a store like any other. What they report, and the notes
of those that could use nothing, go the other way.
"""

from __future__ import annotations

from pathlib import Path

from composer_nb.trainer.versions.manifest import MANIFEST, DamagedVersion, MissingVersion
from composer_nb.trainer.versions.receiver import copy_files, routes
from composer_nb.trainer.versions.store import LEASE, Store, folder


class Relay:
    """One process a region. Receivers there use `region`, and need no line to `origin`."""

    def __init__(self, origin: Store | str | Path, region: str | Path, *, name: str) -> None:
        """`name` goes before the names of the region's receivers in what the origin hears of them."""
        self._origin = origin if isinstance(origin, Store) else Store(origin)
        self._region, self._name = Store(region), name
        self._unusable: set[int] = set()
        self._brought: int | None = None
        self.read_bytes = 0
        """Bytes of payloads and side files over the long line so far."""

    def pull(self) -> int | None:
        """Brings the newest version, with what it builds on, if it is not here yet. Returns its number; None when the origin has
        none. Raises WeightFault for one that cannot be brought, which is not tried again, and asks for a full version;
        StoreError while the line is down: whatever arrived whole stays, and the next call goes on."""
        every = (v for v in reversed(self._origin.folders()) if v not in self._unusable)
        newest = next((v for v in every if self._origin.exists(v)), None)
        if newest in (None, self._brought):
            return newest
        self._region.write(LEASE, self._origin.read(LEASE))
        try:
            if not self._there(newest, self._origin.manifest(newest).hash):
                self._bring(newest)
        except (DamagedVersion, MissingVersion):
            self._unusable.add(newest)
            self._origin.write(f"refused/{self._name}.json", b"{}")
            raise
        self._brought = newest
        return newest

    def _bring(self, version: int) -> None:
        ways = routes(self._origin, version, self._there)
        for number, way in enumerate(ways):
            try:
                for step in way.steps:  # an anchor becomes a full version here
                    where = folder(step.manifest.version)
                    self.read_bytes += copy_files(self._origin, self._region, step, where)
                    self._region.write(f"{where}/{MANIFEST}", step.manifest.dump())
                return
            except (DamagedVersion, MissingVersion):
                if number == len(ways) - 1:
                    raise

    def _there(self, version: int, hash: str) -> bool:
        try:
            return self._region.manifest(version).hash == hash
        except (MissingVersion, DamagedVersion):
            return False

    def forward(self) -> None:
        """Passes on what receivers here report, and asks for a full version where one could use nothing. Raises StoreError."""
        for report in self._region.reports():
            named = report.model_copy(update={"receiver": f"{self._name}.{report.receiver}"})
            self._origin.write(f"receivers/{named.receiver}.json", named.dump())
        for name in self._region.names("refused"):
            self._origin.write(f"refused/{self._name}.{name}", self._region.read(f"refused/{name}"))
            self._region.remove(f"refused/{name}")

    def prune(self, keep: int) -> list[int]:
        """Remove versions of the region as `Store.prune` does."""
        return self._region.prune(keep)
