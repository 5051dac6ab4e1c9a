"""Admission as a pure machine, and the fleet in front of real and of failing backends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import Capabilities, Sandbox, SandboxFailure, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.fleet import FAILURES, REST_S, Admission, Fleet, FleetLimits, Pressure, _waiting
from tests.harness.sandbox.conftest import SMALL

CALM, FULL = Pressure(memory=0.1, disk=0.1, cpu=0.1), Pressure(memory=0.99, disk=0.1, cpu=0.1)


@given(
    limits=st.builds(FleetLimits, starts=st.integers(1, 5), most=st.integers(1, 8)),
    events=st.lists(st.tuples(st.sampled_from(["ask", "ok", "fail", "end", "later"]), st.booleans()), max_size=200),
)
def test_never_more_than_allowed_and_never_stuck(limits: FleetLimits, events: list[tuple[str, bool]]) -> None:
    admission, now = Admission(limits), 0.0
    for event, calm in events:
        if event == "ask":
            before = admission.starting
            decision = admission.ask(now, CALM if calm else FULL)
            assert (admission.starting == before + 1) == (decision == "start")
            if decision == "start" and not calm:
                assert before + admission.alive == 0  # on a full machine, one at a time
        elif event == "ok" and admission.starting:
            admission.started()
        elif event == "fail" and admission.starting:
            admission.failed(now)
        elif event == "end" and admission.alive:
            admission.ended()
        elif event == "later":
            now += REST_S / 2
        assert 0 <= admission.starting <= limits.starts
        assert 0 <= admission.alive and admission.alive + admission.starting <= limits.most
    while admission.starting:
        admission.started()
    while admission.alive:
        admission.ended()
    assert admission.ask(now + REST_S, FULL) == "start"


def test_after_failures_in_a_row_it_rests_and_then_tries_one() -> None:
    admission = Admission(FleetLimits(starts=3))
    for _ in range(FAILURES):
        assert admission.ask(0.0, CALM) == "start"
        admission.failed(0.0)
    assert admission.ask(REST_S - 1, CALM) == "refuse"
    assert admission.ask(REST_S, CALM) == "start"
    assert admission.ask(REST_S, CALM) == "refuse"  # until it is known what became of that one
    admission.started()
    assert admission.ask(REST_S, CALM) == "start"


def test_what_the_kernel_says_of_waiting(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "cpu"
    file.write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    assert _waiting(file) == 0.125 and _waiting(tmp_path / "none") == 0.0


def test_limits_that_let_nothing_start_are_refused() -> None:
    with pytest.raises(ValueError, match="FleetLimits.most"):
        FleetLimits(most=0)


class Broken:
    """A backend that makes nothing."""

    name = "broken"

    def capabilities(self) -> Capabilities:
        raise NotImplementedError

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        raise SandboxFailure("no engine")

    def close(self) -> None: ...


def test_a_broken_backend_is_left_alone() -> None:
    with Fleet(Broken(), pressure=lambda: CALM) as fleet:
        for _ in range(FAILURES):
            with pytest.raises(SandboxFailure, match="^no engine"):
                fleet.create()
        with pytest.raises(SandboxFailure, match=r"3 starts in a row failed, the last because no engine.*30 s"):
            fleet.create()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet(BwrapBackend(), FleetLimits(starts=2, most=4), pressure=lambda: CALM) as made:
        yield made


def test_places_are_given_back(fleet: Fleet) -> None:
    held = [fleet.create(SMALL) for _ in range(4)]
    with pytest.raises(SandboxFailure, match="short of places"):
        fleet.create(SMALL, patience_s=0.1)
    held[0].destroy()
    held[0].destroy()
    assert fleet.admission.alive == 3
    with held[1].fork() as fourth:
        assert fourth.exec(["true"]).exit_code == 0 and fleet.admission.alive == 4
    assert fleet.admission.alive == 3


def test_many_threads_share_few_places(fleet: Fleet) -> None:
    most, done = 0, []

    def work() -> None:
        nonlocal most
        with fleet.create(SMALL) as box:
            most = max(most, fleet.admission.alive)
            done.append(box.exec(["echo", "x"]).stdout)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [b"x\n"] * 16 and most <= 4 and fleet.admission.alive == 0


def test_files_that_do_not_fit_are_not_the_backends_fault(fleet: Fleet) -> None:
    with fleet.create(SMALL) as box:
        box.exec(["truncate", "-s", str(SMALL.disk_bytes - 4096), "hole"])
        box.exec(["bash", "-c", "for n in 1 2 3 4; do echo > f$n; done"])
        for _ in range(FAILURES + 1):
            with pytest.raises(OSError, match="No space"):
                box.fork()
    fleet.create(SMALL).destroy()
    assert fleet.admission.starting == fleet.admission.alive == 0


def test_a_full_machine_is_waited_for() -> None:
    pressure = [FULL]
    with Fleet(BwrapBackend(), pressure=lambda: pressure[0]) as fleet:
        first = fleet.create(SMALL)  # where nothing runs, waiting would free nothing
        with pytest.raises(SandboxFailure, match="short of memory"):
            fleet.create(SMALL, patience_s=0.2)
        pressure[0] = CALM
        fleet.create(SMALL).destroy()
        first.destroy()
