"""Regions that follow a trainer over slow lines, in virtual time: bytes, lag, staleness, and what a lost region costs.

    publisher → trainer's store ══ line: latency, rate, outages ══ files of the region's relay → receivers

Publisher, receivers, a relay's files, manifests, deltas, reports and refusals are the real ones, with little weights: each byte
of a file stands for `full_bytes` / (bytes of the little full version). Uploads, lines and swaps take time.
"""

from __future__ import annotations

import heapq
import math
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from composer_nb.trainer.services.relay import FileCache, RelayedStore
from composer_nb.trainer.versions.manifest import PayloadFile, WeightFault
from composer_nb.trainer.versions.publisher import Publisher
from composer_nb.trainer.versions.receiver import Fetched, Receiver
from composer_nb.trainer.versions.store import StoreError
from composer_nb.views import style
from composer_nb.views.style import Picture, key, title

GIB = 2**30
# Little weights, N(0, σ²); a step of this size changes 2 % of them in bfloat16.
SIZE, SIGMA, RATE = 1 << 18, 0.02, 5.7e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Seconds from `begin` to `end` in which a region's line is down. With `lost`, the region is down, and its files are gone."""

    begin: float
    end: float
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region's line to the trainer's store, and its receivers."""

    name: str
    latency_s: float
    bytes_s: float
    receivers: int = 2
    outages: tuple[Outage, ...] = ()


# One beside the trainer, and three behind 40, 10 and 5 Gbit/s.
REGIONS = (
    Region(name="near", latency_s=0.002, bytes_s=12.5e9),
    Region(name="continent", latency_s=0.04, bytes_s=5e9),
    Region(name="overseas", latency_s=0.15, bytes_s=1.25e9),
    Region(name="thin", latency_s=0.08, bytes_s=6.25e8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """A trainer with its regions. The defaults are those that Fireworks and Cursor published: a checkpoint of 1,024 GiB, a full
    version every 25, at most a minute for the swap, steps of 5 to 15 minutes.

    Attributes:
        step_s: Seconds between two versions.
        upload_bytes_s: Bytes a second that the ranks of the trainer upload together.
        poll_s: Seconds between two looks of a region.
        swap_s: Seconds from weights in a region to receivers that run them.
        bound: Versions that a sampled rollout may lag behind the newest.
    """

    regions: tuple[Region, ...] = REGIONS
    versions: int = 50
    step_s: float = 600.0
    full_bytes: float = 1024.0 * GIB
    full_every: int = 25
    upload_bytes_s: float = 6.25e9
    poll_s: float = 10.0
    swap_s: float = 30.0
    bound: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError for regions of one name."""
        names = [region.name for region in self.regions]
        if len(set(names)) < len(names):
            raise ValueError(f"regions must have different names: {', '.join(names)}")

    def with_outage(self, region: str, outage: Outage) -> RegionPlan:
        """Return the plan with an outage of one region."""
        changed = (replace(r, outages=(*r.outages, outage)) if r.name == region else r for r in self.regions)
        return replace(self, regions=tuple(changed))


# Figures of a region, and their headings.
REGION_COLUMNS = {
    "gib": "GiB read", "of_full": "of full versions", "lag_s": "lag, median s", "lag_max_s": "most",
    "behind": "versions behind", "behind_max": "most", "unusable": "time lost",
}  # fmt: skip


EventKind = Literal["published", "running", "refused", "down", "lost"]


@dataclass(frozen=True, slots=True)
class RegionEvent:
    """`down`: the line failed in a copy; `lost`: no receiver runs any more. `read_bytes`: of the region, since the beginning."""

    at: float
    kind: EventKind
    region: str
    version: int
    read_bytes: float = 0.0


class _RegionSite(RelayedStore):
    """A region at work: the trainer's store as it reads it, and its receivers. What its relay lacks takes the line's time, and
    fails while the line is down."""

    def __init__(self, url: str, region: Region) -> None:
        super().__init__(url)
        self.region, self.scale, self.now, self.read_bytes = region, 1.0, 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin with new receivers, and a relay without files."""
        self._folder = tempfile.TemporaryDirectory()
        self._files = FileCache(Path(self._folder.name))
        names = (f"{self.region.name}{number}" for number in range(self.region.receivers))
        self.receivers = [Receiver(self, name=name) for name in names]

    def _send(self, size: float) -> None:
        begin, end = self.now, self.now + self.region.latency_s + size / self.region.bytes_s
        for outage in self.region.outages:
            if outage.begin < end and outage.end > begin:
                sent = (outage.begin - begin - self.region.latency_s) * self.region.bytes_s
                self.read_bytes += min(max(sent, 0.0), size)
                self.now = max(begin, outage.begin)
                raise StoreError(f"{self.region.name}: the line is down")
        self.now, self.read_bytes = end, self.read_bytes + size

    def read(self, name: str) -> bytes:
        data = super().read(name)
        self._send(len(data))
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        data = super().read(name)
        self._send(len(data) * self.scale)
        yield data

    def _relayed(self, name: str, file: PayloadFile) -> bytes:
        with self._files.open(self, name, file.hash) as content:
            return content.read()

    def write(self, name: str, data: bytes) -> None:
        self._send(len(data))
        super().write(name, data)

    def fetch(self, version: int) -> list[Fetched]:
        """Have all receivers fetch a version at the same time. Raises WeightFault or StoreError."""
        begin, ends, fetched = self.now, list[float](), list[Fetched]()
        for receiver in self.receivers:
            self.now = begin
            fetched.append(receiver.fetch(version))
            ends.append(self.now)
        self.now = max(ends)
        return fetched

    def run(self, versions: Sequence[Fetched]) -> None:
        """Have all receivers run a version, and tell the trainer's store if the line allows it."""
        for receiver, fetched in zip(self.receivers, versions, strict=True):
            receiver.install(fetched)
            with suppress(StoreError):  # with a later version
                receiver.report()


class RegionCourse:
    """The simulation: a queue of actions in virtual time, and the events so far."""

    def __init__(self, plan: RegionPlan) -> None:
        self.plan, self.events = plan, list[RegionEvent]()
        self._queue, self._order = list[tuple[float, int, Callable[[float], None]]](), count()
        origin = f"memory://regions/{uuid.uuid4().hex}"
        self._publisher = Publisher(origin, owner="trainer", full_every=plan.full_every)
        self._sites = [_RegionSite(origin, region) for region in plan.regions]
        self._random = torch.Generator().manual_seed(0)
        self._masters = SIGMA * torch.randn(SIZE, generator=self._random)
        self._uploaded_at = 0.0

    def _later(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (at, next(self._order), act))

    def run(self) -> list[RegionEvent]:
        """Return what happens until the last version's step is over, in order of time."""
        for version in range(self.plan.versions):
            self._later(version * self.plan.step_s, partial(self._publish, version=version))
        for site in self._sites:
            self._later(0.0, partial(self._look, site=site))
            for outage in site.region.outages:
                if outage.lost:
                    self._later(outage.begin, partial(self._lose, site=site))
        while self._queue[0][0] < self.plan.versions * self.plan.step_s:
            at, _, act = heapq.heappop(self._queue)
            act(at)
        return sorted(self.events, key=lambda event: event.at)

    def _publish(self, at: float, version: int) -> None:
        self._masters -= RATE * torch.randn(SIZE, generator=self._random)
        tensors: dict[str, Tensor] = {"weights": self._masters.bfloat16()}
        manifest = self._publisher.publish(version, tensors, {"config.json": b"{}"})
        if version == 0:
            for site in self._sites:
                site.scale = self.plan.full_bytes / manifest.size
        if version and version % self.plan.full_every == 0:
            self._publisher.prune(2 * self.plan.full_every)
        self._uploaded_at = at + manifest.size * self._sites[0].scale / self.plan.upload_bytes_s
        self.events.append(RegionEvent(at, "published", "", version))

    def _look(self, at: float, site: _RegionSite) -> None:
        """Let a region fetch what is new and uploaded: the store as it is now, until its line has brought it."""
        receivers, site.now = site.receivers, at
        version, before = receivers[0].newest(), receivers[0].version
        try:
            if version is not None and version > before and at >= self._uploaded_at:
                run = partial(self._run, site=site, receivers=receivers, versions=site.fetch(version))
                site.now += self.plan.swap_s
                self._later(site.now, run)
        except (StoreError, WeightFault) as error:
            kind: EventKind = "down" if isinstance(error, StoreError) else "refused"
            self.events.append(RegionEvent(site.now, kind, site.region.name, before, site.read_bytes))
        self._later(site.now + self.plan.poll_s, partial(self._look, site=site))

    def _run(self, at: float, site: _RegionSite, receivers: Sequence[Receiver], versions: Sequence[Fetched]) -> None:
        if site.receivers is receivers:  # otherwise it was lost meanwhile
            site.now = at
            site.run(versions)
            version = versions[0].manifest.version
            self.events.append(RegionEvent(at, "running", site.region.name, version, site.read_bytes))

    def _lose(self, at: float, site: _RegionSite) -> None:
        site.begin()
        self.events.append(RegionEvent(at, "lost", site.region.name, -1, site.read_bytes))


def staleness(events: Sequence[RegionEvent], region: str, until: float) -> list[tuple[float, float, float]]:
    """Return spans of time (begin, end, versions behind the newest; infinity while nothing runs) of a region."""
    newest, running, spans = -1.0, -math.inf, list[tuple[float, float, float]]()
    relevant = [event for event in events if event.kind == "published" or event.region == region]
    for event, following in pairwise([*relevant, RegionEvent(until, "published", "", -1)]):
        if event.kind == "published":
            newest = event.version
        elif event.kind in ("running", "lost"):
            running = event.version if event.kind == "running" else -math.inf
        spans.append((event.at, following.at, newest - running))
    return spans


def region_figures(plan: RegionPlan, events: Sequence[RegionEvent]) -> dict[str, dict[str, float]]:
    """Return figures by region, from when it first runs a version.

    These are GiB read, their share of what full versions alone would take, the median and the longest seconds from a version's
    publication to receivers that run it or a newer one, versions behind on average and at most (while anything runs), and the
    share of the time in which nothing runs that may be sampled from: no version, or one older than the bound. Raises ValueError
    for a plan that ends before a region runs its second version.
    """
    until, published = plan.versions * plan.step_s, {e.version: e.at for e in events if e.kind == "published"}
    figures = dict[str, dict[str, float]]()
    for region in plan.regions:
        runs = [event for event in events if event.kind == "running" and event.region == region.name]
        if not runs or runs[-1].version < 1:
            raise ValueError(f"--versions {plan.versions}: {region.name} has not come to its second; publish more")
        reads = [event.read_bytes for event in events if event.region == region.name]
        lags = [
            next(run.at for run in runs if run.version >= version and run.at >= at) - at
            for version, at in published.items()
            if version <= runs[-1].version
        ]
        spans = [span for span in staleness(events, region.name, until) if span[0] >= runs[0].at]
        times = torch.tensor([end - begin for begin, end, _ in spans])
        behind = torch.tensor([versions for _, _, versions in spans])
        serves = behind.isfinite()
        figures[region.name] = {
            "gib": reads[-1] / GIB,
            "of_full": reads[-1] / (plan.full_bytes * len(published)),
            "lag_s": float(torch.tensor(lags[1:]).median()),
            "lag_max_s": max(lags[1:]),
            "behind": float((times * behind)[serves].sum() / times[serves].sum()),
            "behind_max": float(behind[serves].max()),
            "unusable": float(times[behind > plan.bound].sum() / times.sum()),
        }
    return figures


def outage_study(plan: RegionPlan, region: str, begin: float, seconds: float) -> dict[str, Any]:
    """Compare a plan with the same one when a region's line is down for a while, and when the region is lost and comes back
    empty. Returns (plan, events, figures) by what happens."""
    end = begin + seconds
    plans = {
        "no outage": plan,
        f"{region}'s line down": plan.with_outage(region, Outage(begin=begin, end=end)),
        f"{region} lost": plan.with_outage(region, Outage(begin=begin, end=end, lost=True)),
    }
    courses = {name: (changed, RegionCourse(changed).run()) for name, changed in plans.items()}
    return {name: (plan, events, region_figures(plan, events)) for name, (plan, events) in courses.items()}


def draw(study: Mapping[str, Any]) -> Picture:
    """Draw versions behind (above) and bytes read (below) over time, a column per course of `outage_study`; gaps are times in
    which a region runs nothing, grey is what full versions alone would take."""
    picture = Picture(4.6 * len(study), 4.8)
    axes = picture.panels(2, len(study), sharex=True, sharey="row")
    for column, (name, (plan, events, _)) in enumerate(study.items()):
        stale, traffic = axes[column], axes[len(study) + column]
        hours = plan.versions * plan.step_s / 3600
        for region, color in zip(plan.regions, style.COLORS, strict=False):
            spans = staleness(events, region.name, hours * 3600)
            behind = [versions if versions < math.inf else math.nan for _, _, versions in spans]
            stale.step([begin / 3600 for begin, _, _ in spans], behind, where="post", color=color)
            reads = [(event.at / 3600, event.read_bytes / GIB) for event in events if event.region == region.name]
            traffic.step(*zip(*reads, strict=True), where="post", color=color, label=region.name)
        published = [(event.at / 3600, event.version + 1) for event in events if event.kind == "published"]
        full = [number * plan.full_bytes / GIB for _, number in published]
        traffic.plot([at for at, _ in published], full, color=style.GREY, label="in full")
        traffic.set_yscale("log")
        title(stale, name, "", "versions behind")
        title(traffic, "", "hours", "GiB read")
    key(axes[len(study)])
    return picture
