"""Many sandboxes, on one host or several: which host may start the next one, when, and how many are made ahead of need.

    create(spec) ─> an idle sandbox of this spec, made ahead
                 └> FleetScheduler.place ─> host ─> backend.create ─> ready | failed
                                         └> nothing: wait, and look again

`FleetScheduler` knows no clock, thread or sandbox: `SandboxFleet` drives it over backends, `labs/fleets.py` in virtual time. What
runs is counted by the live use of its host, not by its limits; what starts, by the most that it may take until the host's next
report. So a host can hold more sandboxes than the sum of their limits allows. See the Composer 2 report, section 6.2.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import resource
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from composer_nb.harness.sandbox.backend import ResidentBackend
from composer_nb.harness.sandbox.contract import Backend, Capabilities, Sandbox, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure

FAILURES, REST_S = 3, 30.0  # starts that fail in a row until a host rests, and for how long
LOOK_S, PATIENCE_S = 0.05, 60.0  # between two looks of a caller that waits, and that it waits at most
WINDOW_S = 60  # for which a burst is remembered
FILES = 4  # open files of this process for a sandbox


class HostUse(NamedTuple):
    """Live use of a host, as shares of 1. `cpu`: of the last ten seconds, those in which something waited for a CPU."""

    memory: float
    disk: float
    cpu: float

    @classmethod
    def now(cls) -> HostUse:
        """Return the use of this machine, and of the disk of temporary files."""
        memory, disk, cpu = psutil.virtual_memory(), os.statvfs(os.environ.get("TMPDIR", "/tmp")), 0.0
        with contextlib.suppress(OSError):  # a kernel without it (Documentation/accounting/psi.rst)
            cpu = float(Path("/proc/pressure/cpu").read_text().split("avg10=")[1].split()[0]) / 100
        return cls(1 - memory.available / memory.total, 1 - disk.f_bavail / max(disk.f_blocks, 1), cpu)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Limits of a host.

    Attributes:
        starts: Sandboxes that start at the same time; one while its CPUs are busier than `cpu`, so that work never stops.
        alive: Sandboxes that exist.
        memory, disk: Shares of the host that may be in use before a start.
        ahead: Idle sandboxes at most, which leave the share `margin` of what may be in use.
    """

    starts: int = 4
    alive: int = 4096
    memory: float = 0.95
    disk: float = 0.99
    cpu: float = 0.9
    ahead: int = 32
    margin: float = 0.1


@dataclass(frozen=True, slots=True)
class Placement:
    """A start that a host was chosen for. `peak` [memory, disk]: shares of the host that it may take."""

    host: int
    peak: NDArray[np.float64]


class FleetScheduler:
    """Chooses hosts. The fullest that has room is the first choice, so that the others stay empty, for large tasks or to be given
    back. All methods take the time from the caller."""

    def __init__(self, hosts: int, limits: FleetLimits) -> None:
        self.limits = limits
        # By host: live use and what starts or was started since the last report may take [memory, disk]; counts.
        self._live, self._starting_peak, self._unseen_peak = (np.zeros((hosts, 2)) for _ in range(3))
        self._cpu, self._rest_until = np.zeros(hosts), np.full(hosts, -math.inf)
        self._alive, self.starting, self._unseen, self._failures = (np.zeros(hosts, np.int64) for _ in range(4))

    def report(self, host: int, use: HostUse, alive: int) -> None:
        """Note a host's live use, and how many sandboxes it has, without those that are starting."""
        self._live[host], self._cpu[host], self._alive[host] = use[:2], use.cpu, alive
        self._unseen[host], self._unseen_peak[host] = 0, 0.0

    def place(self, now: float, peak: Sequence[float], *, margin: float = 0.0) -> Placement | None:
        """Return where one may start; None if no host has room. It counts as starting until `ready` or `failed`. `peak`: shares
        of memory and disk. `margin`: of them that must stay free. Where nothing runs at all, one may always start."""
        load = self._live + self._starting_peak + self._unseen_peak + np.asarray(peak)
        starts = np.where((self._cpu > self.limits.cpu) | (self._failures >= FAILURES), 1, self.limits.starts)
        count = self._alive + self.starting + self._unseen
        room = (load <= np.array([self.limits.memory, self.limits.disk]) - margin).all(1)
        room |= count.sum() == 0
        fits = room & (self.starting < starts) & (count < self.limits.alive) & (self._rest_until <= now)
        if not fits.any():
            return None
        placement = Placement(self._choose(load.max(1), fits), np.array(peak))
        self.starting[placement.host] += 1
        self._starting_peak[placement.host] += placement.peak
        return placement

    def _choose(self, load: NDArray[np.float64], fits: NDArray[np.bool_]) -> int:
        return int(np.where(fits, load, -1.0).argmax())

    def ready(self, placement: Placement) -> None:
        """Note that a sandbox has started."""
        self._release(placement)
        self._failures[placement.host] = 0
        self._unseen[placement.host] += 1
        self._unseen_peak[placement.host] += placement.peak

    def failed(self, placement: Placement, now: float, *, blame: bool = True) -> None:
        """Note that a sandbox has not started, and whether that was the fault of its host."""
        self._release(placement)
        self._failures[placement.host] += blame
        if blame and self._failures[placement.host] >= FAILURES:
            self._rest_until[placement.host] = now + REST_S

    def _release(self, placement: Placement) -> None:
        self.starting[placement.host] -= 1
        self._starting_peak[placement.host] -= placement.peak

    def resting(self, now: float) -> bool:
        """Return whether all hosts rest after failures."""
        return bool((self._rest_until > now).all())

    def shortage(self) -> str:
        """Return what the emptiest host is short of."""
        load = (self._live + self._starting_peak + self._unseen_peak).min(0)
        limits = {"memory": (load[0], self.limits.memory), "disk": (load[1], self.limits.disk)}
        return ", ".join(f"{name} ({use:.0%} of it is in use)" for name, (use, limit) in limits.items() if use > limit)


@dataclass(slots=True)
class Demand:
    """Requests of one kind, by second. A burst comes again: as many are made ahead as came in the busiest second lately, and as
    come during a start."""

    seconds: Counter[int] = field(default_factory=Counter)

    def add(self, now: float) -> None:
        self.seconds[int(now)] += 1

    def ahead(self, now: float, most: int, start_s: float = 0.0) -> int:
        """Return how many sandboxes should be idle or starting, where a start takes `start_s`."""
        for second in [second for second in self.seconds if second < now - WINDOW_S]:
            del self.seconds[second]
        return min(math.ceil(max(self.seconds.values(), default=0) * max(1.0, start_s)), most)


class SandboxFleet(Backend):
    """Sandboxes of one backend for each host, as these allow. May be used from several threads.

    Sandboxes are made ahead on `bwrap` alone, and not for grades or function calls: these begin with what they are to run, and an
    image's pages are touched before each start.
    """

    def __init__(self, backends: Sequence[ResidentBackend], limits: FleetLimits = FleetLimits()) -> None:
        self.backends, self.name, self.limits = backends, backends[0].name, limits
        self.egress = backends[0].egress
        self.scheduler = FleetScheduler(len(backends), limits)
        self._lock, self._wake = threading.RLock(), threading.Event()
        self._idle: dict[SandboxSpec, deque[Sandbox]] = {}
        self._demands: dict[SandboxSpec, Demand] = {}
        self._maker: threading.Thread | None = None
        self._closed, self._why = False, ""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        need = FILES * limits.alive * len(backends) + 1000
        if soft < need:
            raised = need if hard == resource.RLIM_INFINITY else min(need, hard)
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))

    def use(self, host: int) -> HostUse:
        """Return the live use of a host. The backends of one process are all on this machine."""
        return HostUse.now()

    def capabilities(self) -> Capabilities:
        return self.backends[0].capabilities()

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        """See `contract.Backend`; wait until a sandbox may start. Raises SandboxFailure after PATIENCE_S, with what the hosts are
        short of, or at once where all hosts rest after failures."""
        spec = spec or SandboxSpec()
        sandbox = self._idle_one(spec) or self._start(spec)
        try:
            sandbox.backend = self  # forks come here too
            if snapshot is not None:
                sandbox.restore(snapshot)
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake.set()
        if self._maker is not None:
            self._maker.join()
        for backend in self.backends:
            backend.close()

    def _idle_one(self, spec: SandboxSpec) -> Sandbox | None:
        """Return an idle sandbox, if there is one, and remember the request."""
        if self.name != "bwrap" or spec.basic or spec.calls is not None:
            return None
        with self._lock:
            idle = self._idle.setdefault(spec, deque())
            self._demands.setdefault(spec, Demand()).add(time.monotonic())
            if self._maker is None and not self._closed:
                self._maker = threading.Thread(target=self._make_ahead, name="fleet", daemon=True)
                self._maker.start()
        self._wake.set()
        while idle:
            with contextlib.suppress(IndexError, SandboxFailure, SandboxDied):  # another thread's, or it has ended
                sandbox = idle.popleft()
                sandbox.stats()
                return sandbox
        return None

    def _start(self, spec: SandboxSpec) -> Sandbox:
        until = time.monotonic() + PATIENCE_S
        while (placement := self._place(spec)) is None:
            if self.scheduler.resting(time.monotonic()):
                raise SandboxFailure(
                    f"{FAILURES} sandboxes in a row did not start, the last because {self._why}; "
                    f"the next is tried after {REST_S:g} s (`composer-nb doctor` tells whether they work)"
                )
            if time.monotonic() > until:
                short = self.scheduler.shortage() or "room for more than are alive"
                raise SandboxFailure(f"no sandbox could start within {PATIENCE_S:g} s, for want of {short}")
            self._drop_idle()
            time.sleep(random.uniform(0, 2 * LOOK_S))
        return self._make(placement, spec)

    def _place(self, spec: SandboxSpec, margin: float = 0.0) -> Placement | None:
        memory = psutil.virtual_memory().total
        peak = spec.memory_bytes / memory, 0.0  # workspaces live in memory
        with self._lock:
            if self._closed:
                raise SandboxFailure("this fleet is closed")
            for host, backend in enumerate(self.backends):
                self.scheduler.report(host, self.use(host), backend.alive)
            return self.scheduler.place(time.monotonic(), peak, margin=margin)

    def _make(self, placement: Placement, spec: SandboxSpec) -> Sandbox:
        blame, sandbox = False, None
        try:
            sandbox = self.backends[placement.host].create(spec)
            return sandbox
        except SandboxFailure as error:
            blame, self._why = True, str(error)
            raise
        finally:
            with self._lock:
                if sandbox is None:
                    self.scheduler.failed(placement, time.monotonic(), blame=blame)
                else:
                    self.scheduler.ready(placement)

    def _drop_idle(self, spec: SandboxSpec | None = None) -> None:
        """Destroy an idle sandbox, of any spec or of this one, so that another may start."""
        for kind in [spec] if spec else list(self._idle):
            with contextlib.suppress(IndexError):
                self._idle[kind].popleft().destroy()
                return

    def _make_ahead(self) -> None:
        """Keep as many idle sandboxes of each spec as `Demand` says, while hosts have room to spare."""
        while not self._closed:
            for spec, demand in list(self._demands.items()):
                target = demand.ahead(time.monotonic(), self.limits.ahead)
                while len(self._idle[spec]) > target:
                    self._drop_idle(spec)
                with contextlib.suppress(SandboxFailure):  # the next request meets it, or the fleet is closed
                    while len(self._idle[spec]) < target and (placement := self._place(spec, self.limits.margin)):
                        self._idle[spec].append(self._make(placement, spec))
            self._wake.clear()
            self._wake.wait(1.0)
