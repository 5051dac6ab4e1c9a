"""How many environments start and live: on this machine, and in virtual time on a cluster that the same scheduler fills.

`live_at_once` makes idle sandboxes through a `SandboxFleet` until all are alive or the machine is full. `simulate_fleet` draws
environments with a peak at their start and a lower, growing use afterwards; hosts report their live use every second.
"""

import contextlib
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.fleet import Demand, FleetLimits, FleetScheduler, HostUse, Placement, SandboxFleet

IDLE = SandboxSpec(memory_bytes=128 << 20, disk_bytes=16 << 20)
THREADS = 4
GIB = 2**30


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def live_at_once(count: int, max_bytes: float, report: Callable[[int], object] = lambda alive: None) -> dict[str, Any]:
    """Make `count` sandboxes here, with idle workspaces, and see that all of them answer while all are alive. Stops making more
    when the machine has `max_bytes` less memory, or when the fleet finds no room. Returns the figures, with the processes and
    their memory for each, to which the kernel's for its namespaces and mounts comes."""
    before, lock, others = psutil.virtual_memory().available, threading.Lock(), {*_children()}
    boxes, stopped, start_ms = list[Sandbox](), list[str](), list[float]()
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(SandboxFleet([open_backend("bwrap")], FleetLimits(alive=count + 1, ahead=0)))

        def make(number: int) -> None:
            if not stopped and before - psutil.virtual_memory().available > max_bytes:
                stopped.append(f"the limit of {max_bytes / GIB:g} GiB is reached")
            if stopped:
                return
            begin = time.perf_counter()
            try:
                box = fleet.create(IDLE)
            except SandboxFailure as error:
                stopped.append(str(error))
                return
            with lock:
                boxes.append(box)
                start_ms.append(1000 * (time.perf_counter() - begin))
                if len(boxes) % 100 == 0:
                    report(len(boxes))

        begin = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(make, range(count)))
        seconds = time.perf_counter() - begin
        processes = [process.memory_full_info().pss for process in _children() if process not in others]
        answer_ms = list[float]()
        for box in boxes:
            begin = time.perf_counter()
            box.stats()
            answer_ms.append(1000 * (time.perf_counter() - begin))
        commands = sum(box.exec(["true"]).exit_code == 0 for box in boxes[:: max(1, len(boxes) // 50)])
    return {
        "alive": len(answer_ms),
        "stopped": stopped[0] if stopped else "",
        "starts_s": len(boxes) / seconds,
        "start_ms_p50": float(np.quantile(start_ms or [math.nan], 0.5)),
        "start_ms_p99": float(np.quantile(start_ms or [math.nan], 0.99)),
        "answer_ms_p50": float(np.quantile(answer_ms or [math.nan], 0.5)),
        "commands": commands,
        "processes": len(processes),
        "mib_each": sum(processes) / max(len(boxes), 1) / 2**20,
    }


class SpreadScheduler(FleetScheduler):
    """The same, but the emptiest host is the first choice: what bin-packing is compared with."""

    def _choose(self, load: NDArray[np.float64], fits: NDArray[np.bool_]) -> int:
        return int(np.where(fits, load, math.inf).argmin())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLoad:
    """A cluster and what comes to it: a burst, then a steady stream. Sizes are assumptions about virtual machines.

    Attributes:
        burst: Environments that are requested at once.
        life_s: Seconds that one lives on average; after the burst, as many come in that time as `steady` times the burst.
        start_s: Seconds of a start, in which it uses a CPU and `peak_bytes`.
        memory_bytes, disk_bytes: Use afterwards, on average; memory is log-normal and at most the peak, which is the limit.
        cpus: CPUs that one uses afterwards.
    """

    hosts: int = 320
    host_cpus: int = 64
    host_memory: float = 512.0 * GIB
    host_disk: float = 4096.0 * GIB
    burst: int = 100_000
    steady: float = 0.2
    life_s: float = 300.0
    start_s: float = 2.0
    peak_bytes: float = 3.0 * GIB
    memory_bytes: float = 1.0 * GIB
    disk_bytes: float = 4.0 * GIB
    cpus: float = 0.1
    seconds: float = 3000.0
    report_s: float = 1.0


class _SimulatedCluster:
    """Hosts in virtual time, filled by a scheduler."""

    def __init__(self, load: ClusterLoad, scheduler: FleetScheduler) -> None:
        self.load, self.scheduler, self.random = load, scheduler, np.random.default_rng(0)
        self.now, self._order = 0.0, count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        # Use of each host [memory, disk, cpu], and its sandboxes.
        self.use, self.alive = np.zeros((load.hosts, 3)), np.zeros(load.hosts, np.int64)
        self._sizes = np.array([load.host_memory, load.host_disk, load.host_cpus])
        self._peak = np.array([load.peak_bytes, load.disk_bytes, 1.0]) / self._sizes
        self._demand, self._starting = Demand(), 0
        self._waiting, self._idle = deque[float](), deque[tuple[int, NDArray[np.float64]]]()
        self.waits, self.memory_most, self.alive_most, self.all_alive_s = list[float](), 0.0, 0, math.nan
        self.hosts_in_use: list[tuple[float, int, float]] = []

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), act))

    def run(self) -> None:
        self._report()
        self._arrive(self.load.burst)
        self.later(self.load.life_s, self._stream)
        while self._queue and self._queue[0][0] <= self.load.seconds:
            self.now, _, act = heapq.heappop(self._queue)
            act()

    def _arrive(self, number: int) -> None:
        self._waiting.extend([self.now] * number)
        self._demand.seconds[int(self.now)] += number
        self._serve()

    def _stream(self) -> None:
        self._arrive(1)
        rate = self.load.burst * self.load.steady / self.load.life_s
        self.later(self.random.exponential(1 / rate), self._stream)

    def _serve(self) -> None:
        """Give idle environments to what waits, and start as many as are missing, those ahead of need where room is to spare."""
        load, limits = self.load, self.scheduler.limits
        while self._waiting and self._idle:
            since, (host, use) = self._waiting.popleft(), self._idle.popleft()
            self.waits.append(self.now - since)
            # Nothing of the burst ends before its stream begins: all of it is alive at once.
            rest = max(0.0, load.life_s - self.now) if since == 0.0 else 0.0
            life = rest + self.random.exponential(load.life_s)
            self.later(life, partial(self._end, host, use))
        ahead = self._demand.ahead(self.now, limits.ahead, load.start_s) - len(self._idle)
        while (missing := len(self._waiting) + max(ahead, 0) - self._starting) > 0:
            margin = limits.margin if missing <= ahead else 0.0
            placement = self.scheduler.place(self.now, self._peak[:2].tolist(), margin=margin)
            if placement is None:
                return
            self._starting += 1
            self.use[placement.host] += self._peak
            # CPUs are shared by what starts and runs.
            seconds = load.start_s * max(1.0, self.use[placement.host, 2])
            self.later(seconds, partial(self._ready, placement))

    def _ready(self, placement: Placement) -> None:
        load, host = self.load, placement.host
        size = min(load.memory_bytes * self.random.lognormal(-0.32, 0.8), load.peak_bytes)
        steady = np.array([size, load.disk_bytes, load.cpus]) / self._sizes
        self.use[host] += steady - self._peak
        self.alive[host] += 1
        self._starting -= 1
        self.scheduler.ready(placement)
        self._idle.append((host, steady))
        if self.alive.sum() > self.alive_most:
            self.alive_most, self.all_alive_s = int(self.alive.sum()), self.now
        self._serve()

    def _end(self, host: int, steady: NDArray[np.float64]) -> None:
        self.use[host] -= steady
        self.alive[host] -= 1

    def _report(self) -> None:
        self.memory_most = max(self.memory_most, float(self.use[:, 0].max()))
        starting = self.scheduler.starting
        for host in range(self.load.hosts):
            # The starting ones are counted by the scheduler at their peak.
            memory, disk, cpu = self.use[host] - starting[host] * self._peak * (1, 1, 0)
            self.scheduler.report(host, HostUse(memory, disk, cpu), int(self.alive[host]))
        self.hosts_in_use.append((self.now, int((self.use[:, 0] > 1e-9).sum()), float(self.use[:, 0].sum())))
        self._serve()
        self.later(self.load.report_s, self._report)


def simulate_fleet(load: ClusterLoad, kind: type[FleetScheduler], ahead: int) -> dict[str, float]:
    """Return the figures of a burst and of the stream after it, with at most `ahead` environments made ahead of need.

    These are environments alive at most and after how many seconds, starts a second, waits; the largest share of a host's memory
    that was ever in use; hosts that live use, and reserved limits, would need at that time at least; hosts in use at the end, and
    the fewest that would do.
    """
    limits = FleetLimits(starts=load.host_cpus // 4, alive=1 << 20, memory=0.9, ahead=ahead)
    begin, cluster = time.perf_counter(), _SimulatedCluster(load, kind(load.hosts, limits))
    cluster.run()
    _, hosts, share = cluster.hosts_in_use[-1]
    burst = np.array(cluster.waits[: load.burst])
    needed = max(total for _, _, total in cluster.hosts_in_use)
    return {
        "alive": cluster.alive_most,
        "seconds": cluster.all_alive_s,
        "starts_s": load.burst / float(burst.max()),
        "wait_s_p50": float(np.median(burst)),
        "stream_wait_s_p99": float(np.quantile(cluster.waits[load.burst :] or [math.nan], 0.99)),
        "host_memory_most": cluster.memory_most,
        "hosts_by_use": math.ceil(needed / limits.memory),
        "hosts_by_limits": math.ceil(cluster.alive_most / (load.host_memory // load.peak_bytes)),
        "hosts_at_end": hosts,
        "hosts_at_end_least": math.ceil(share / limits.memory),
        "decisions_s": len(cluster.waits) / (time.perf_counter() - begin),
    }
