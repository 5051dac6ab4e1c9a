"""Many sandboxes on one machine: who may start when, and what happens when starting fails.

A `Fleet` is a backend in front of a backend. Starting is what hurts (verl's agents needed a cap on sandboxes that start, not on
those that run; E2B's users a jittered start), so that

* at most `starts` are made at the same time, and at most `most` are alive;
* while the machine is short of memory, disk or CPU, nobody starts; waiting callers look again after a random time;
* after FAILURES failures in a row the fleet rests (a circuit breaker): it refuses at once, then lets one through as a test.

The decisions are a pure machine (`Admission`) that knows no clock and no thread.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from composer_nb.harness.sandbox.contract import (
    Backend,
    Capabilities,
    Sandbox,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
    Snapshot,
    require_positive,
)

FAILURES = 3
"""Starts that fail in a row until the fleet rests."""
REST_S = 30.0
LOOK_S = 0.05
"""Average seconds between two looks of a waiting caller."""

Decision = Literal["start", "wait", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Use of the machine, as shares of 1."""

    memory: float
    """Memory that is not available any more."""
    disk: float
    """Used space of the file system of temporary files."""
    cpu: float
    """Share of the last ten seconds in which some process waited for a CPU; 0 where the kernel does not count that."""

    @classmethod
    def now(cls) -> Pressure:
        memory, disk = psutil.virtual_memory(), os.statvfs(os.environ.get("TMPDIR", "/tmp"))
        return cls(
            memory=1 - memory.available / memory.total, disk=1 - disk.f_bavail / max(disk.f_blocks, 1), cpu=_waiting()
        )


def _waiting(file: Path = Path("/proc/pressure/cpu")) -> float:
    """Return the kernel's pressure stall information (Documentation/accounting/psi.rst)."""
    try:
        words = file.read_text().split()
    except OSError:
        return 0.0
    return float(next(word for word in words if word.startswith("avg10=")).removeprefix("avg10=")) / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLimits:
    """Limits of a fleet. Raises ValueError for a limit that lets nothing start."""

    starts: int = 4
    """Sandboxes that start at the same time."""
    most: int = 256
    """Sandboxes that are alive."""
    memory: float = 0.9
    """Nobody starts while more of the machine's memory is in use than this share; the same for `disk` and `cpu`."""
    disk: float = 0.95
    cpu: float = 0.98

    def __post_init__(self) -> None:
        require_positive(self)

    def short_of(self, pressure: Pressure) -> str:
        """Return what the machine is short of; nothing if it has enough of everything."""
        return " and ".join(name for name, share in asdict(pressure).items() if share > getattr(self, name))


@dataclass(slots=True)
class Admission:
    """Decides who may start. Pure: it is given the time, the machine's state and the results of the starts that it allowed."""

    limits: FleetLimits
    starting: int = 0
    alive: int = 0
    failures: int = 0
    """Failures in a row."""
    rest_until: float = -1.0
    waited_for: Counter[str] = field(default_factory=Counter)
    """Number of looks that found nothing to start, by reason."""

    def ask(self, now: float, pressure: Pressure) -> Decision:
        """Decide whether one more may start now. With "start" it counts as starting, until `started` or `failed`."""
        if self.failures >= FAILURES and (now < self.rest_until or self.starting):
            return "refuse"
        running, reason = self.alive + self.starting, ""
        if self.starting >= self.limits.starts:
            reason = "starts"
        elif running >= self.limits.most:
            reason = "places"
        elif running:  # one at least may always start: or nothing ever ends
            reason = self.limits.short_of(pressure)
        if reason:
            self.waited_for[reason] += 1
            return "wait"
        self.starting += 1
        return "start"

    def started(self) -> None:
        self.starting, self.alive, self.failures = self.starting - 1, self.alive + 1, 0

    def failed(self, now: float) -> None:
        self.starting, self.failures = self.starting - 1, self.failures + 1
        if self.failures >= FAILURES:
            self.rest_until = now + REST_S

    def ended(self) -> None:
        self.alive -= 1


class Fleet(Backend):
    """A backend that starts sandboxes of another one as the machine allows. May be used from many threads."""

    def __init__(
        self,
        backend: Backend,
        limits: FleetLimits | None = None,
        pressure: Callable[[], Pressure] = Pressure.now,
    ) -> None:
        self.backend, self.name = backend, backend.name
        self.admission = Admission(limits or FleetLimits())
        self._pressure = pressure
        self._lock = threading.Lock()
        self._why = ""
        self._closed = False

    def capabilities(self) -> Capabilities:
        return self.backend.capabilities()

    def create(
        self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None, *, patience_s: float = 600.0
    ) -> Sandbox:
        """Wait until a sandbox may start, for `patience_s` at most, and start it.

        Raises SandboxFailure when it does not start, when starting has failed too often, or when its time was up.
        """
        self._wait(time.monotonic() + patience_s)
        try:
            made = self.backend.create(spec, snapshot)
        except (SandboxFailure, SandboxUnavailable) as error:
            with self._lock:
                self.admission.failed(time.monotonic())
                self._why = str(error)
            raise
        except BaseException:  # files that do not fit in, Ctrl-C: the backend is not to blame
            with self._lock:
                self.admission.starting -= 1
            raise
        with self._lock:
            self.admission.started()
        made.backend = self  # forks ask here too
        made.at_end.append(self._ended)
        return made

    def close(self) -> None:
        self._closed = True
        self.backend.close()

    def _wait(self, deadline: float) -> None:
        """Return when one may start."""
        while True:
            pressure, now = self._pressure(), time.monotonic()
            if self._closed:
                raise SandboxFailure("the fleet is closed")
            with self._lock:
                decision = self.admission.ask(now, pressure)
            if decision == "start":
                return
            if decision == "refuse":
                raise SandboxFailure(
                    f"the fleet starts no sandboxes: {FAILURES} starts in a row failed, the last because {self._why}; "
                    f"it is tried again after {REST_S:g} s"
                )
            if now > deadline:
                short = ", ".join(f"{reason} ({count} looks)" for reason, count in self.admission.waited_for.items())
                raise SandboxFailure(f"no sandbox could start in time: the machine was short of {short}")
            time.sleep(random.uniform(0, 2 * LOOK_S))

    def _ended(self) -> None:
        with self._lock:
            self.admission.ended()
