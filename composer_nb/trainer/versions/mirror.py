"""A region's own store of weight versions: each file crosses the long line once, however many receivers read it there.

    trainer's store ── pull ──> region's store ── fetch ──> receivers
                    <─ forward ─ reports, refusals

To receivers a region's store is a store like any other. A mirror copies versions on the route with the fewest bytes from what its
region has, checks each file, and writes a manifest when all files of that version are there. It makes no anchors: a receiver that
joins reads the region's last full version and the deltas after it.
"""

from contextlib import suppress
from pathlib import Path

from composer_nb.trainer.versions.manifest import MANIFEST, DamagedVersion, Manifest, WeightFault
from composer_nb.trainer.versions.receiver import Receiver, routes
from composer_nb.trainer.versions.store import VersionStore, check_file, folder


class Mirror(Receiver):
    """One process of a region. Receivers there use the store `region`, and need no line to `origin`."""

    def __init__(self, origin: str | Path | VersionStore, region: str | Path, *, name: str) -> None:
        """`name` goes before the names of the region's receivers in their reports to the origin."""
        super().__init__(origin, name=name)
        self._region = VersionStore(region)

    def pull(self) -> int | None:
        """Copy the newest version, with what it builds on, unless it is in the region. Return its number; None if there is none.
        Raises WeightFault for one that cannot be copied, after asking for a full version, and StoreError while the line is down:
        complete files stay, and the next call goes on."""
        newest = self.newest()
        if newest is not None and newest != self.version:
            self._try(newest, lambda: self._copy(newest))
            self.version = newest
        return newest

    def _copy(self, version: int) -> None:
        ways = routes(self._store, version, self._has)
        for way in ways:
            try:
                for where, manifest in way.steps:
                    self._copy_files(where, manifest)
                return
            except WeightFault:
                if way is ways[-1]:
                    raise

    def _copy_files(self, where: str, manifest: Manifest) -> None:
        """Copy a version, or an anchor, which is a full version in the region. Raises DamagedVersion, which names the file."""
        release = folder(manifest.version)
        for name, file in manifest.files.items():
            path = f"{release}/{name}"
            with suppress(WeightFault):  # complete since an earlier call
                check_file(self._region, path, file)
                continue
            if self._region.put(path, self._store.chunks(f"{where}/{name}")) != file:
                self._region.remove(path)
                raise DamagedVersion(f"{self._store.url}/{where}/{name} did not arrive as it was published")
        self._region.write(f"{release}/{MANIFEST}", manifest.dump())

    def _has(self, version: int, hash: str) -> bool:
        try:
            return self._region.manifest(version).hash == hash
        except WeightFault:
            return False

    def forward(self) -> None:
        """Write the reports of the region's receivers into the origin, and their notes that ask for a full version. Raises
        StoreError."""
        for report in self._region.reports():
            renamed = report.model_copy(update={"receiver": f"{self._name}.{report.receiver}"})
            self._store.write(f"receivers/{renamed.receiver}.json", renamed.dump())
        for name in self._region.names("refused"):
            self._store.write(f"refused/{self._name}.{name}", self._region.read(f"refused/{name}"))
            self._region.remove(f"refused/{name}")
