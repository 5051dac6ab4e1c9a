"""Regions that follow a trainer over slow lines, in virtual time: the real publisher, relays and receivers, with tiny weights.

What a file weighs is the world's to say (a full version's terabyte, a delta's two hundredths of it), and so is how long a line
takes for it, when the line is down, and which bytes arrive damaged. Versions, manifests, acknowledgements and refusals are real.
A pull sees the trainer's store as it was when the pull began. One seed, one course of events.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from fsspec.implementations.memory import MemoryFileSystem
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.trainer.manifest import WeightFault
from composer_nb.trainer.receiver import Receiver
from composer_nb.trainer.relay import Relay
from composer_nb.trainer.store import Store, StoreError, ready
from composer_nb.trainer.version_store import Publisher

_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A line to the trainer's store: seconds an exchange, bytes a second, and when it is down (from, to)."""

    name: str
    latency_s: float
    bytes_s: float
    outages: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What happens, and what things weigh."""

    regions: Sequence[Region]
    versions: int = 30
    step_s: float = 60.0
    """Between two versions."""
    full_bytes: float = 1.0e12
    delta_bytes: float = 2.0e10
    """Of a delta over one version; over several a little less than so many times that."""
    poll_s: float = 10.0
    """A relay looks for news so often, and the trainer whether regions are ready."""
    swap_s: float = 10.0
    """From weights that lie in a region to engines that run them."""
    damaged: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """(region, version) -> how many times in a row its payload arrives with a byte flipped. Once is mended by asking again."""
    full_every: int = 25
    only_full: bool = False
    """For comparison: no deltas."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Happened:
    """Published, running, ready (in all regions), refused, or down (a line, while something was on it)."""

    at: float
    kind: Literal["published", "running", "ready", "refused", "down"]
    region: str
    version: int
    read_bytes: float = 0.0
    """By this region, since the beginning."""


class _Line(Store):
    """The trainer's store from a region: every file takes the time that its virtual size takes."""

    def __init__(self, url: str, region: Region, world: World) -> None:
        super().__init__(url)
        self._region, self._world = region, world
        self._damage = dict(world.damaged)
        self.now = self.read_bytes = 0.0

    def read(self, name: str) -> bytes:
        data = super().read(name)
        self._take(float(len(data)))
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        data = super().read(name)
        version = int(name.split("/")[-2][1:])
        self._take(self._weight(name, version, len(data)))
        key = (self._region.name, version)
        if name.endswith(".safetensors") and self._damage.get(key, 0) > 0:
            self._damage[key] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        yield data

    def _weight(self, name: str, version: int, real: int) -> float:
        if not name.endswith(".safetensors"):
            return float(real)
        manifest = self.manifest(version, "/".join(name.split("/")[:-1]) if name.startswith("anchors") else "")
        if manifest.base is None:
            return self._world.full_bytes
        gap = version - manifest.base.version
        spread = 0.9 + 0.2 * Random(f"{self._world.seed} {version}").random()
        return self._world.delta_bytes * gap**0.8 * spread

    def manifest(self, version: int, where: str = "") -> Any:
        return Store.manifest(Store(self.url), version, where)

    def _take(self, size: float) -> None:
        begin, end = self.now, self.now + self._region.latency_s + size / self._region.bytes_s
        for down, up in sorted(self._region.outages):
            if down < end and up > begin:
                got = max(0.0, down - begin - self._region.latency_s) * self._region.bytes_s
                self.read_bytes += min(size, got)
                self.now = max(begin, down) + self._region.latency_s
                raise StoreError(f"{self._region.name}: the line is down")
        self.now, self.read_bytes = end, self.read_bytes + size


class _Site:
    """A region at work."""

    def __init__(self, root: str, region: Region, world: World) -> None:
        self.line = _Line(f"{root}/origin", region, world)
        self.relay = Relay(self.line, f"{root}/{region.name}", name=region.name)
        self.engine = Receiver(f"{root}/{region.name}", name="engine")

    def pull(self, now: float) -> tuple[str, int]:
        """What came of a look at the trainer's store: ("news" | "none" | "refused" | "down", version)."""
        self.line.now = now
        try:
            newest = self.relay.pull()
        except StoreError:
            return "down", -1
        except WeightFault:
            return "refused", max(Store(self.line.url).folders())
        return ("news", newest) if newest is not None and newest > self.engine.version else ("none", -1)

    def run(self, version: int) -> None:
        self.engine.install(self.engine.fetch(version))
        self.engine.report()
        try:
            self.relay.forward()
        except StoreError:
            pass  # heard of with the next version


def simulate(world: World) -> list[Happened]:
    """Everything that happened, in order of time. Raises ValueError for two regions of one name."""
    names = [region.name for region in world.regions]
    if len(set(names)) < len(names):
        raise ValueError(f"regions must have names of their own: {names}")
    root = f"memory://simulated-{uuid.uuid4().hex}"
    try:
        return sorted(_course(world, root, names), key=lambda one: one.at)
    finally:
        MemoryFileSystem().rm(root, recursive=True)


def _course(world: World, root: str, names: Sequence[str]) -> list[Happened]:
    origin = f"{root}/origin"
    publisher = Publisher(origin, owner="trainer", full_every=world.full_every)
    sites = {region.name: _Site(root, region, world) for region in world.regions}
    found, order = list[Happened](), 0
    queue: list[tuple[float, int, str, str, int]] = []

    def later(at: float, what: str, site: str = "", version: int = -1) -> None:
        nonlocal order
        order += 1
        heapq.heappush(queue, (at, order, what, site, version))

    for version in range(world.versions):
        later(version * world.step_s, "publish", version=version)
    for name in names:
        later(0.1, "pull", name)
    later(world.poll_s, "look")
    ready_at, end = -1, (world.versions + 3) * world.step_s
    while queue and queue[0][0] <= end:
        at, _, what, name, version = heapq.heappop(queue)
        if what == "publish":
            if world.only_full:
                publisher.refuse()
            publisher.publish(version, _weights(version, world.seed), {"config.json": b"{}"})
            found.append(Happened(at, "published", "", version))
        elif what == "pull":
            site = sites[name]
            came, version = site.pull(at)
            if came in ("down", "refused"):
                found.append(Happened(site.line.now, came, name, version, site.line.read_bytes))  # type: ignore[arg-type]
            if came == "news":
                later(site.line.now + world.swap_s, "run", name, version)
            later(max(site.line.now, at) + world.poll_s, "pull", name)
        elif what == "run":
            site = sites[name]
            site.line.now = at
            site.run(version)
            found.append(Happened(at, "running", name, version, site.line.read_bytes))
        else:
            newest = publisher.last
            if newest > ready_at and all(ready(origin, newest, [f"{one}.engine" for one in names]).values()):
                found.append(Happened(at, "ready", "", newest))
                ready_at = newest
            later(at + world.poll_s, "look")
    return found


def _weights(version: int, seed: int) -> dict[str, Tensor]:
    weights = torch.linspace(-1, 1, _ROWS)
    weights[version % _ROWS] += 1 + seed
    weights[0] = version
    return {"w": weights.bfloat16()}


def staleness(found: Sequence[Happened], region: str, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Versions between the newest that was published and the one that a region runs, at each of `times`; those before it ran any
    are NaN."""
    published, runs = (np.full(len(times), np.nan) for _ in range(2))
    for one in found:
        if one.kind == "published":
            published[times >= one.at] = one.version
        if one.kind == "running" and one.region == region:
            runs[times >= one.at] = one.version
    return published - runs


def traffic(found: Sequence[Happened], region: str, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bytes that a region had read by each of `times`, as far as it had told by then."""
    read = np.zeros(len(times))
    for one in found:
        if one.region == region:
            read[times >= one.at] = one.read_bytes
    return read


def four_regions(**change: Any) -> World:
    """One beside the trainer, one a continent away, one behind a thin line, one whose line fails for ten minutes."""
    regions = (
        Region(name="near", latency_s=0.002, bytes_s=4.0e10),
        Region(name="overseas", latency_s=0.15, bytes_s=5.0e9),
        Region(name="thin", latency_s=0.08, bytes_s=2.0e9),
        Region(name="unsteady", latency_s=0.1, bytes_s=4.0e9, outages=((605.0, 1205.0), (1510.0, 1530.0))),
    )
    return World(regions=regions, **{"damaged": {("overseas", 12): 1, ("near", 20): 2}, **change})
