"""Limits of time: what is the program's fault, what is the machine's, and how long a broken machine may keep us."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_nb.harness import box, sandbox
from composer_nb.harness.calls import CallOutcome, CallRequest, Limits, SandboxFailure
from composer_nb.harness.execute import CachedExecutor
from composer_nb.harness.sandbox import BwrapSandboxes, Mode

LOOP = "def f():\n    while True:\n        pass\n"
TIMEOUT = (CallOutcome(status="timeout"),)


def request(source: str) -> CallRequest:
    return CallRequest(files={"f.py": source}, module="f", function="f", arguments=("()",))


class OneShot(BwrapSandboxes):
    """On a machine that forbids nested namespaces: bubblewrap itself forbids them here."""

    def _command(self, mode: Mode) -> list[str]:
        command = super()._command(mode)
        return [command[0], "--unshare-user", "--disable-userns", *command[1:]]


KINDS = pytest.mark.parametrize("kind", [BwrapSandboxes, OneShot], ids=["forked", "one-shot"])


def below(pid: int) -> list[int]:
    """Processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = (entry / "stat").read_text().rpartition(") ")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = list(children.get(pid, []))
    for each in found:
        found += children.get(each, [])
    return found


def starve(pid: int, core: int) -> None:
    """Puts a process behind everything else that wants `core`."""
    for thread in (pid, *(int(name) for name in os.listdir(f"/proc/{pid}/task"))):
        os.sched_setaffinity(thread, {core})
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # where each session is a group of its own, the group counts
        Path(f"/proc/{pid}/autogroup").write_text("19")


@contextlib.contextmanager
def overloaded(boxes: BwrapSandboxes) -> Iterator[None]:
    """A machine on which a worker gets next to no CPU, though it wants it."""
    core, done = min(os.sched_getaffinity(0)), threading.Event()
    program = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True:\n    pass\n"
    busy = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]

    def hold_down() -> None:
        while not done.wait(0.005):
            for pid in below(boxes.pid or -1)[1:]:  # all but the zygote
                with contextlib.suppress(OSError):
                    starve(pid, core)

    holding = threading.Thread(target=hold_down)
    holding.start()
    try:
        yield
    finally:
        done.set()
        holding.join()
        for process in busy:
            process.kill()
            process.wait()


@KINDS
def test_a_program_that_the_machine_starved_is_no_timeout_and_not_remembered(kind: type[BwrapSandboxes]) -> None:
    with kind(Limits(cpu_s=2.0, wall_s=0.2)) as boxes:
        memory = CachedExecutor(boxes)
        with overloaded(boxes), pytest.raises(SandboxFailure, match=r"waited for this machine.*run less beside it"):
            memory.run([request(LOOP)])
        assert memory.executed == 0
    with kind() as boxes:
        assert CachedExecutor(boxes).run([request(LOOP)]) == [TIMEOUT]  # it is a timeout where it gets its time


@KINDS
@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef f():\n    time.sleep(60)\n",
        "import time\ndef f():\n    while True:\n        time.sleep(0.01)\n",
        "import threading\ndef f():\n    l = threading.Lock()\n    l.acquire()\n    l.acquire()\n",
        "import os, signal\ndef f():\n    os.kill(os.getpid(), signal.SIGSTOP)\n    signal.pause()\n",
        "import os\ndef f():\n    os.read(os.pipe()[0], 1)\n",
        "import ctypes, threading, time\nctypes.CDLL(None).prctl(15, b'a) R 1 (R) R ')\ndef f():\n    time.sleep(60)\n",
    ],
    ids=["sleeps", "naps", "waits for a lock", "stops itself", "waits for a pipe", "pretends to run"],
)
def test_a_program_that_sleeps_is_at_fault_itself(kind: type[BwrapSandboxes], source: str) -> None:
    with kind(Limits(wall_s=0.4)) as boxes:
        start = time.monotonic()
        assert boxes.run([request(source)]) == [TIMEOUT]
        assert 0.3 < time.monotonic() - start < 0.4 * box.PATIENCE


def test_naps_beside_a_starving_thread_are_not_sleep() -> None:
    """What its threads do together counts: the first waits for the second, which wants to run."""
    source = "import threading\ndef f():\n    def work():\n        while True:\n            pass\n"
    source += "    t = threading.Thread(target=work)\n    t.start()\n    t.join()\n"
    with BwrapSandboxes(Limits(cpu_s=2.0, wall_s=0.2)) as boxes:
        with overloaded(boxes), pytest.raises(SandboxFailure, match="waited for this machine"):
            boxes.run([request(source)])


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("import os\ndef f():\n    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n", "PermissionError"),
        ("import os\ndef f():\n    os.sched_setaffinity(0, {0})\n", "PermissionError"),
        ("import os\ndef f():\n    os.nice(19)\n", "PermissionError"),
    ],
)
def test_a_program_can_not_starve_itself_to_dodge_its_verdict(source: str, refused: str) -> None:
    with BwrapSandboxes() as boxes:
        assert boxes.run([request(source)]) == [(CallOutcome(status="raised", text=refused),)]


def test_nor_wait_for_a_child_in_the_kernel() -> None:
    """A parent of vfork waits as if for a disk; threads must not be made that way."""
    source = "import ctypes\ndef f(clone):\n    libc = ctypes.CDLL(None, use_errno=True)\n"
    source += "    flags = 0x00010000 | 0x00000800 | 0x00000100 | 0x00004000\n"
    source += "    return [libc.syscall(clone, flags, 0, 0, 0, 0), ctypes.get_errno()]\n"
    number = box.machine()["clone"]
    call = CallRequest(files={"f.py": source}, module="f", function="f", arguments=(f"({number},)",))
    with BwrapSandboxes() as boxes:
        assert boxes.run([call]) == [(CallOutcome(status="returned", text="[-1, 1]"),)]


class Mute(BwrapSandboxes):
    """Its box says nothing, once `mute` has been set."""

    mute = False

    def _command(self, mode: Mode) -> list[str]:
        return ["/bin/sh", "-c", "cat > /dev/null"] if self.mute else super()._command(mode)


def alone(boxes: BwrapSandboxes, count: int) -> list[str]:
    """What a batch of `count` requests comes to that fails and is then tried request by request."""
    complaints = []
    for batch in [[request(LOOP)] * count, *[[request(LOOP)]] * count]:
        try:
            boxes.run(batch)
        except SandboxFailure as failure:
            complaints.append(str(failure))
    return complaints


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """The host waits 0.2 s for an answer; gives seconds since then."""
    monkeypatch.setattr(box, "SETUP_S", 0.1)
    monkeypatch.setattr(sandbox, "HOST_GRACE_S", 0.05)
    start = time.monotonic()
    return lambda: time.monotonic() - start


def test_a_dead_zygote_costs_a_batch_a_bounded_time(impatient: Callable[[], float]) -> None:
    with Mute(Limits(wall_s=0.01)) as boxes:
        boxes._stop()
        boxes.mute = True
        complaints = alone(boxes, 50)
        assert len(complaints) == 51
        assert "failed twice" in complaints[0]
        assert set(complaints[sandbox.FAILURES_IN_A_ROW :]) == {complaints[-1]}
        assert "3 runs in a row failed" in complaints[-1] and "no answer in time" in complaints[-1]
        assert "composer-nb doctor" in complaints[-1]
    assert impatient() < 5


def test_sandboxes_that_rested_are_tried_again(impatient: Callable[[], float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "REST_S", 0.3)
    with Mute(Limits(wall_s=0.01)) as boxes:
        boxes._stop()
        boxes.mute = True
        assert len(alone(boxes, 4)) == 5
        boxes.mute = False
        with pytest.raises(SandboxFailure, match="3 runs in a row failed"):
            boxes.run([request("def f():\n    return 1\n")])
        time.sleep(0.35)
        one = [(CallOutcome(status="returned", text="1"),)]
        assert boxes.run([request("def f():\n    return 1\n")]) == one
        boxes._stop()
        boxes.mute = True
        with pytest.raises(SandboxFailure, match="failed twice"):  # the count begins anew
            boxes.run([request(LOOP)])


def test_a_bad_request_does_not_stop_the_good_ones() -> None:
    """Failures count only in a row."""

    class Picky(BwrapSandboxes):
        def _attempt(self, requests, answers):  # type: ignore[no-untyped-def]
            if any("bad" in each.files["f.py"] for each in requests):
                raise sandbox.NoAnswer("it broke")
            super()._attempt(requests, answers)

    good, bad = request("def f():\n    return 1\n"), request("bad = 1\n")
    with Picky() as boxes:
        for _ in range(5):
            with pytest.raises(SandboxFailure, match="failed twice: it broke"):
                boxes.run([bad])
            assert boxes.run([good]) == [(CallOutcome(status="returned", text="1"),)]
