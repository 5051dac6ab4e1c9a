"""The time that the machine grants to a command: wall time, less what its threads waited for a CPU that others used.

A time limit that counts it is the same on a busy machine. A command that computes or sleeps uses it up; a command that the
machine starves does not. Each thread's wait is the kernel's own count (`/proc/TID/schedstat`). Code in the sandbox cannot fake
it: a wait counts only as far as it exceeds the CPU time of all other threads of the sandbox, and the time for which its quota
stopped it. A kernel that leaves no CPU idle while a thread waits makes no such wait on an idle machine.

Errs against the command: waits of threads that live shorter than SAMPLE_S, and of several threads at once, may not count.
"""

import threading
import time
from dataclasses import dataclass, replace

from composer_nb.harness.sandbox.system.cgroups import Cgroup
from composer_nb.harness.sandbox.system.linux import status_of

SAMPLE_S = 0.05
# Maximum wall time of a command, in multiples of its limit. A machine that grants less by then is at fault.
PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class _Moment:
    """Counts of a sandbox in seconds: when they were read, CPU time used, time stopped by its quota, time starved."""

    at: float
    ran: float = 0.0
    throttled: float = 0.0
    starved: float = 0.0


class GrantedTime:
    """Like an event that is set once a command has been granted `limit_s` seconds, or once `stop` is set."""

    def __init__(self, group: Cgroup, limit_s: float, stop: threading.Event | None = None) -> None:
        self.group, self.limit_s, self.stop = group, limit_s, stop
        # Whether the limit is reached.
        self.over = False
        self._began = time.monotonic()
        self._last = _Moment(self._began)
        self._counts = self._read(self._began)
        # Each thread's seconds of running and of waiting when it last slept, and that moment.
        self._threads = {thread: (*pair, self._last) for thread, pair in self._counts.items()}

    @property
    def starved_s(self) -> float:
        return min(self._last.starved, self._last.at - self._began)

    def is_set(self) -> bool:
        now = time.monotonic()
        if not self.over and now - self._last.at >= SAMPLE_S:
            waiting = self._sample(now)
            self.over = now - self._began - max(self.starved_s, waiting) >= self.limit_s
        return self.over or (self.stop is not None and self.stop.is_set())

    def _read(self, now: float) -> dict[str, tuple[float, float]]:
        """Read all counts. A sandbox that has ended has no threads."""
        counts = {}
        try:
            threads = self.group.threads()
            self._last = _Moment(now, self.group.cpu_s(), self.group.throttled_s(), self._last.starved)
        except OSError:
            return {}
        for thread in threads:
            try:
                with open(f"/proc/{thread}/schedstat") as file:
                    ran, waited = file.read().split()[:2]
            except (OSError, ValueError):
                continue
            counts[thread] = int(ran) / 1e9, int(waited) / 1e9
        return counts

    def _sample(self, now: float) -> float:
        """Count waits that have ended. Return how long the sandbox would have been starved if waits that go on counted too."""
        before = self._last
        counts = self._read(now)
        baselines = {thread: self._threads.get(thread, (0.0, 0.0, before)) for thread in counts}
        starved = waiting = before.starved
        asleep = set[str]()
        for thread, (ran, waited) in counts.items():
            ran_before, waited_before, since = baselines[thread]
            used = self._last.ran - since.ran + self._last.throttled - since.throttled
            others = max(0.0, used - (ran - ran_before))
            starved = max(starved, since.starved + waited - waited_before - others)
            if (ran, waited) == self._counts.get(thread):
                if status_of(thread)[:1] == [b"R"]:
                    waiting = max(waiting, since.starved + now - since.at - used)
                else:
                    asleep.add(thread)
        self._counts = counts
        self._last = replace(self._last, starved=starved)
        self._threads = {
            thread: (*counts[thread], self._last) if thread in asleep else baselines[thread] for thread in counts
        }
        return waiting
