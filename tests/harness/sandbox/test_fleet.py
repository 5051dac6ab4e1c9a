"""The scheduler as a pure machine, and the fleet before real and failing backends."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.sandbox import fleet as fleets
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.errors import SandboxFailure
from tests.harness.sandbox.conftest import SMALL
from tests.waiting import wait_until

CALM, FULL = fleets.HostUse(0.1, 0.1, 0.1), fleets.HostUse(0.99, 0.1, 0.1)
PEAK = (0.125, 0.0)


@given(
    limits=st.builds(fleets.FleetLimits, starts=st.integers(1, 5), alive=st.integers(1, 16), memory=st.just(0.9)),
    events=st.lists(
        st.tuples(st.sampled_from(["place", "place", "ready", "fail", "end", "report"]), st.integers(0, 2)),
        min_size=50,
        max_size=200,
    ),
)
def test_no_host_has_more_than_it_may_and_none_is_stuck(
    limits: fleets.FleetLimits, events: list[tuple[str, int]]
) -> None:
    """Compare with a separate count: live use here is 0.125 of memory a sandbox."""
    scheduler, clock, alive, under_way = fleets.FleetScheduler(3, limits), 0.0, [0, 0, 0], []
    for event, host in events:
        if event == "place" and (placement := scheduler.place(clock, PEAK)) is not None:
            under_way.append(placement)
        elif event == "ready" and under_way:
            scheduler.ready(placement := under_way.pop(0))
            alive[placement.host] += 1
        elif event == "fail" and under_way:
            scheduler.failed(under_way.pop(0), clock, blame=host == 0)
        elif event == "end" and alive[host]:
            alive[host] -= 1
        elif event == "report":
            clock += fleets.REST_S / 2
            scheduler.report(host, fleets.HostUse(0.125 * alive[host], 0.0, 0.0), alive[host])
        starting = [sum(p.host == n for p in under_way) for n in range(3)]
        assert starting == scheduler.starting.tolist() and max(starting) <= limits.starts
        assert all(count + begun <= min(limits.alive, 7) for count, begun in zip(alive, starting, strict=True))
    while under_way:
        scheduler.ready(under_way.pop())
    for host in range(3):
        scheduler.report(host, fleets.HostUse(0.0, 0.0, 0.0), 0)
    assert scheduler.place(clock + fleets.REST_S, PEAK) is not None


def test_the_fullest_host_with_room_is_first_and_pressure_is_live() -> None:
    scheduler = fleets.FleetScheduler(3, fleets.FleetLimits(starts=2, memory=0.9))
    for host, memory in enumerate((0.3, 0.6, 0.85)):
        scheduler.report(host, fleets.HostUse(memory, 0.0, 0.0), 9)
    placements = [scheduler.place(0.0, (0.1, 0.0)) for _ in range(5)]
    hosts = [placement and placement.host for placement in placements]
    assert hosts == [1, 1, 0, 0, None], "two start at a time, and the third host has no room"
    scheduler.report(2, fleets.HostUse(0.2, 0.0, 0.99), 9)
    assert [p and p.host for p in (scheduler.place(0.0, (0.1, 0.0)) for _ in range(2))] == [2, None], "busy CPUs: one"
    scheduler.report(2, fleets.HostUse(0.2, 0.995, 0.0), 9)
    assert scheduler.place(0.0, (0.1, 0.0)) is None and "disk" not in scheduler.shortage()
    alone = fleets.FleetScheduler(1, fleets.FleetLimits())
    alone.report(0, FULL, 0)
    assert alone.place(0.0, PEAK) is not None, "where nothing runs, waiting would free nothing"
    assert alone.place(0.0, PEAK) is None


def test_as_many_are_made_ahead_as_came_in_the_busiest_second() -> None:
    demand = fleets.Demand()
    for clock in (0.0, 5.1, 5.2, 5.9, 7.0):
        demand.add(clock)
    assert [demand.ahead(7.0, 99), demand.ahead(7.0, 2), demand.ahead(7.0, 99, start_s=2.5)] == [3, 2, 8]
    assert [demand.ahead(clock, 99) for clock in (64.9, 65.1, 68.1)] == [3, 1, 0], "a minute later"


class Fleet(fleets.SandboxFleet):
    """A fleet whose hosts are as busy as a test says."""

    def __init__(
        self, backends: Sequence[BwrapBackend], limits: fleets.FleetLimits, use: Callable[[int], fleets.HostUse]
    ) -> None:
        super().__init__(backends, limits)
        self.use = use  # type: ignore[method-assign]


@pytest.fixture
def backends() -> Iterator[list[BwrapBackend]]:
    with BwrapBackend() as first, BwrapBackend() as second:
        yield [first, second]


def test_hosts_are_filled_one_after_the_other_from_many_threads(backends: list[BwrapBackend]) -> None:
    def work(number: int) -> bytes:
        with fleet.create(SMALL) as box, box.fork() as copy:
            return copy.exec(["echo", str(number)]).stdout

    limits = fleets.FleetLimits(alive=4, ahead=0)
    with Fleet(backends, limits, lambda host: fleets.HostUse(0.2 - host / 10, 0.1, 0.1)) as fleet:
        boxes = [fleet.create(SMALL) for _ in range(6)]
        assert [backend.alive for backend in backends] == [4, 2]
        for box in boxes:
            box.destroy()
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(work, range(4))] == [b"0\n", b"1\n", b"2\n", b"3\n"]
        assert [backend.alive for backend in backends] == [0, 0]


def test_idle_ones_are_there_before_they_are_asked_for_and_go_when_memory_is_short(
    backends: list[BwrapBackend],
) -> None:
    use = [CALM]
    with Fleet(backends[:1], fleets.FleetLimits(ahead=3), lambda host: use[0]) as fleet:
        with fleet.create(SMALL) as box:
            box.write("f", b"mine")
            wait_until(lambda: backends[0].alive == 2)  # one came in a second, so one is ready for the next
            idle = {*backends[0]._live} - {box.id}
            use[0] = FULL
            with fleet.create(SMALL) as ready:
                assert {ready.id} == idle and ready.entries() == [], "no start, and nothing of another's"
            wait_until(lambda: backends[0].alive == 1)  # none is made ahead on a full machine


def test_a_full_machine_and_a_broken_one_are_errors_that_say_so(
    backends: list[BwrapBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "PATIENCE_S", 0.2)
    with Fleet(backends[:1], fleets.FleetLimits(ahead=0), lambda host: FULL) as fleet, fleet.create(SMALL) as box:
        with pytest.raises(SandboxFailure, match=r"0.2 s, for want of memory \(99%"):
            fleet.create(SMALL)
        box.exec(["truncate", "-s", str(SMALL.disk_bytes - 4096), "hole"])
        box.exec(["bash", "-c", "for n in 1 2 3 4; do echo > f$n; done"])
        packed = box.snapshot()
        box.destroy()
        for _ in range(fleets.FAILURES):  # files that do not fit are not the host's fault
            with pytest.raises(OSError, match="No space"):
                fleet.create(SMALL, packed)

        def fail(spec: object) -> None:
            raise SandboxFailure("no engine")

        monkeypatch.setattr(backends[0], "create", fail)
        for _ in range(fleets.FAILURES):
            with pytest.raises(SandboxFailure, match="^no engine"):
                fleet.create(SMALL)
        with pytest.raises(SandboxFailure, match=r"3 sandboxes in a row did not start, the last because no engine"):
            fleet.create(SMALL)
        assert not np.any(fleet.scheduler.starting)
