"""Time limits that count what the machine grants: a starved command is not a slow one, and no command can starve itself."""

import os
import time
from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox import contract
from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxSlow
from tests.harness.starving import hogs, starve

COMPUTES = "import time\nwhile time.process_time() < {}: pass"
CROWD = """
import os, threading, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
for _ in range(8):
    if os.fork() == 0:
        while True: pass
os.nice(9)
while True: pass
"""
"""Processes on one core that keep one another waiting."""
WAVES = """
import os, time
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
while True:
    pids = []
    for _ in range(8):
        pid = os.fork()
        if pid == 0:
            end = time.monotonic() + 0.03
            while time.monotonic() < end: pass
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    time.sleep(0.03)
"""
"""Short-lived processes that keep one another waiting, and then nothing, in turns."""
HELPED = """
import os, time
first, *_, last = sorted(os.sched_getaffinity(0))
if os.fork() == 0:
    os.sched_setaffinity(0, [last])
    while True:
        end = time.process_time() + 0.001
        while time.process_time() < end: pass
        time.sleep(0.02)
os.sched_setaffinity(0, [first])
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
while True: pass
"""
"""A process of the lowest priority, whose group's share of the machine a little work on another core takes away."""
OWN_DOING = {"sleeps": "import time\ntime.sleep(60)", "crowd": CROWD, "waves": WAVES}


@pytest.fixture
def box(backend: Backend) -> Iterator[Sandbox]:
    if not backend.capabilities().enforced["cpus"]:
        pytest.skip("no control groups here: time limits count wall time")
    with backend.create(SandboxSpec(cpus=1.0)) as sandbox:
        yield sandbox


def python(box: Sandbox, text: str, timeout_s: float) -> tuple[bool, float, float]:
    """Return whether a program timed out, and the seconds of wall time and of CPU time that it took."""
    started_at, cpu_before = time.monotonic(), box.stats().cpu_s or 0.0
    result = box.exec(["python3", "-c", text], timeout_s=timeout_s, granted=True)
    return result.timed_out, time.monotonic() - started_at, (box.stats().cpu_s or 0.0) - cpu_before


def test_a_starved_command_is_not_slow(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 60.0)
    starve(box, 0.4)
    with hogs():
        late, wall_s, cpu_s = python(box, COMPUTES.format(1.2), 1.5)
    assert not late and wall_s > 1.5 and cpu_s > 1.2


def test_a_command_that_gets_no_cpu_is_the_machines_fault(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "PATIENCE", 2.0)
    starve(box, 0.02)
    with hogs(), pytest.raises(SandboxSlow, match=r"with 1 s waited for a CPU [\d.]+ of 2 s"):
        python(box, COMPUTES.format(0.9), 1.0)
    assert box.exec(["true"]).exit_code == 0


@pytest.mark.parametrize("text", OWN_DOING.values(), ids=OWN_DOING)
def test_a_commands_own_doing_times_out(text: str, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine too: its processes use no more CPU time than the limit, however they keep one another waiting."""
    monkeypatch.setattr(contract, "PATIENCE", 60.0)
    late, wall_s, cpu_s = python(box, text, 1.0)
    assert late and wall_s >= 1.0 and cpu_s < 1.4


def test_a_command_cannot_give_its_share_away(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look starved if it could ask for a lower priority or a busy core, and its grade would be thrown away."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setattr(contract, "PATIENCE", 7.0)
    starve(box, 0.5)
    with hogs():
        late, _, _ = python(box, HELPED, 1.0)
    assert late
