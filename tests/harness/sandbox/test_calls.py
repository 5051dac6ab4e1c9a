"""Function calls: order, freshness, exact outcomes, refusals, limits of time, and what remains after a kill."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer_nb.harness.sandbox import bwrap, calls, contract, host
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxSlow
from composer_nb.harness.sandbox.reap import below, started
from composer_nb.harness.sandbox.requests import CallLimits, CallOutcome, CallRequest, value_text
from tests.harness.starving import hogs
from tests.waiting import wait_until

IDENTITY = "def f(x):\n    return x\n"
LOOP = "def f():\n    while True:\n        pass\n"
ONE = [(CallOutcome(status="returned", text="1"),)]


def request(source: str, *arguments: str, **files: str) -> CallRequest:
    return CallRequest(files={"f.py": source, **files}, module="f", function="f", arguments=arguments or ("()",))


def returned(text: str) -> CallOutcome:
    return CallOutcome(status="returned", text=text)


@pytest.fixture(scope="module")
def executor() -> Iterator[SandboxExecutor]:
    with SandboxExecutor() as sandboxes:
        yield sandboxes


def tree(executor: SandboxExecutor) -> list[int]:
    """Return the processes of its sandbox that are no zombies: bubblewrap, zygote, resident, the worker made ahead."""
    zygote = executor.backend._zygotes.get(False)
    return [] if zygote is None else [zygote.process.pid, *(pid for pid, _ in below(zygote.process.pid))]


# Outcomes.


def test_requests_and_answers_larger_than_any_buffer(executor: SandboxExecutor) -> None:
    """They come in the order of the requests and of their arguments."""
    large = request(IDENTITY, *(f"('{str(n) * 8000}',)" for n in range(10, 50)), **{"big.txt": "x" * 3_000_000})
    small = [request(IDENTITY, f"({n},)", "(0,)") for n in range(90)]
    requests = [large, small[0], large, *small, large]
    answers = [tuple(returned(text[1:-2]) for text in call_request.arguments) for call_request in requests]
    assert executor.run(requests) == answers


@pytest.mark.parametrize(
    ("source", "statuses"),
    [
        ("def f(x):\n    if x == 2:\n        raise KeyError(x)\n    return x\n", ["returned", "KeyError", "returned"]),
        ("def f(x):\n    while x == 2:\n        pass\n    return x\n", ["returned", "timeout", "not_run"]),
        ("import os\ndef f(x):\n    if x == 2:\n        os._exit(0)\n    return x\n", ["returned", "died", "not_run"]),
        ("import ctypes\ndef f(x):\n    ctypes.string_at(0)\n", ["died", "not_run", "not_run"]),
        ("def f(x):\n    return object() if x == 2 else x\n", ["returned", "unreadable", "returned"]),
        ("def f(x):\n    return 'a' * 20000 if x == 2 else x\n", ["returned", "unreadable", "returned"]),
        ("def f(x)\n", ["SyntaxError"] * 3),
        ("import sys; sys.exit(0)", ["SystemExit"] * 3),
        ("x = 1", ["AttributeError"] * 3),
        ("while True:\n    pass\n", ["timeout", "not_run", "not_run"]),
    ],
)
def test_each_failure_has_its_status(executor: SandboxExecutor, source: str, statuses: list[str]) -> None:
    outcomes = executor.run([request(source, "(1,)", "(2,)", "(3,)")])[0]
    assert [outcome.text if outcome.status == "raised" else outcome.status for outcome in outcomes] == statuses


def test_state_is_fresh_between_requests_and_kept_within_one(executor: SandboxExecutor) -> None:
    source = "import math\ncount = []\ndef f():\n    count.append(1)\n    math.e += 1\n"
    source += "    open('n', 'a').write('x')\n    return [len(count), int(math.e), len(open('n').read())]\n"
    outcomes = (returned("[1, 3, 1]"), returned("[2, 4, 2]"))
    assert executor.run([request(source, "()", "()")] * 2) == [outcomes, outcomes]


def test_workspace_modules_win_over_preloaded_ones(executor: SandboxExecutor) -> None:
    files = {"heapq.py": IDENTITY, "pkg/__init__.py": "", "helper.py": "h = 1\n"}
    files["pkg/g.py"] = "import helper\ndef f(x):\n    return helper.h + x\n"
    nested = CallRequest(files=files, module="pkg.g", function="f", arguments=("(1,)",))
    shadow = CallRequest(files=files, module="heapq", function="f", arguments=("(7,)",))
    assert executor.run([nested, shadow]) == [(returned("2"),), (returned("7"),)]


def test_a_workspace_over_the_disk_limit_is_the_codes_fault(executor: SandboxExecutor) -> None:
    big = request(IDENTITY, "(1,)", "(2,)", **{"big.txt": "x" * (executor.limits.disk_bytes + 1)})
    almost = request(IDENTITY, "(1,)", **{"big.txt": "x" * (executor.limits.disk_bytes - 5)})
    clash = request(IDENTITY, "(1,)", **{"a": "", "a/b": ""})
    raised = CallOutcome(status="raised", text="OSError")
    outcomes = executor.run([big, almost, clash, request(IDENTITY, "(1,)")])
    assert outcomes[:2] == [(raised, raised), (raised,)]
    assert outcomes[2][0].status == "raised" and outcomes[3:] == ONE


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LITERALS = st.recursive(
    SIMPLE | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(LITERALS, min_size=1, max_size=8))
def test_identity_returns_exactly_the_repr(executor: SandboxExecutor, values: list[Any]) -> None:
    outcomes = executor.run([request(IDENTITY, *(f"({value!r},)" for value in values))])[0]
    assert outcomes == tuple(returned(repr(value)) for value in values)
    assert [value_text(value) for value in values] == [outcome.text for outcome in outcomes]


def test_bad_requests_are_refused() -> None:
    good: dict[str, Any] = {"files": {"f.py": IDENTITY}, "module": "f", "function": "f", "arguments": ("(1,)",)}
    for name, value, message in (
        ("files", {"../f.py": ""}, "not a plain relative path"),
        ("module", "f;import os", "not a module name"),
        ("function", "f()", "not a function name"),
        ("arguments", ("open('x')",), "not a literal"),
        ("arguments", ("(1)",), "not a tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            CallRequest(**good | {name: value})


def test_limits_are_positive_and_kept() -> None:
    with pytest.raises(ValueError, match=r"CallLimits\.cpu_s=0: must be greater than 0"):
        CallLimits(cpu_s=0)
    source = "def f(n):\n    return len(bytearray(n << 20))\n"
    with SandboxExecutor(CallLimits(memory_bytes=64 << 20, cpu_s=0.5)) as small:
        outcomes = small.run([request(source, "(4,)", "(60,)")])[0]
    assert outcomes == (returned(str(4 << 20)), CallOutcome(status="raised", text="MemoryError"))


def test_host_believes_only_well_formed_reports() -> None:
    limits, ready, nonce = CallLimits(), b"ready 00ff\n", b"00ff "

    def decoded(report: bytes, count: int) -> tuple[CallOutcome, ...]:
        return calls._outcomes("finished", report, count, limits)

    good = nonce + b'["returned", "1"]\n'
    unreadable, not_run = CallOutcome(status="unreadable"), CallOutcome(status="not_run")
    assert decoded(ready + good, 1) == (returned("1"),)
    fields = [["returned", 1], ["passed", "1"], ["returned", "\x1b[31m"], ["raised", "a b"], ["unreadable", "1"]]
    fields.append(["returned", "1" * (limits.output_bytes + 1)])
    odd = [b'["returned", "1"]', nonce + b"[" * 99999, b"\xff\xfe"]  # the first without its nonce
    for line in [*odd, *(nonce + json.dumps(report).encode() for report in fields)]:
        assert decoded(ready + line + b"\n", 2) == (unreadable, not_run), line
        assert decoded(ready + good + line + b"\n", 2) == (returned("1"), unreadable), line
    assert decoded(ready + good + good, 1) == (unreadable,), "one result too many"
    assert decoded(ready + good + b"00ff [", 2)[1].status == "died"


# Processes.


def assert_gone(pids: list[int]) -> None:
    assert len(pids) == 4
    wait_until(lambda: not any(map(started, pids)), 3)


def test_a_killed_sandbox_is_made_again_and_close_leaves_no_process() -> None:
    with SandboxExecutor() as executor:
        for victim in (1, 2, 3):  # the zygote, the resident, the worker made ahead
            os.kill(tree(executor)[victim], signal.SIGKILL)
            assert executor.run([request(IDENTITY, "(1,)"), request(IDENTITY, "(2,)")]) == [*ONE, (returned("2"),)]
        pids = tree(executor)
    assert_gone(pids)
    executor.close()
    with pytest.raises(SandboxFailure, match="closed"):
        executor.run([request(IDENTITY, "(1,)")])


def test_a_killed_host_leaves_no_process() -> None:
    program = """
import sys
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.requests import CallRequest
from tests.harness.sandbox.test_calls import tree
executor = SandboxExecutor()
source = "import time\\ndef f():\\n    time.sleep(9)\\n"
print(*tree(executor), flush=True)
executor.run([CallRequest(files={"f.py": source}, module="f", function="f", arguments=("()",))] * 5)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert owner.stdout is not None
    with owner.stdout as lines:
        pids = [int(word) for word in lines.readline().split()]
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert_gone(pids)


# A machine that does not work.


def test_a_slow_start_is_called_slow_and_not_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it, either: the child of a bubblewrap that is ended while it starts would wait for it for ever."""
    before = set(below(os.getpid()))
    for module in (bwrap, contract):
        monkeypatch.setattr(module, "patience", lambda seconds: 1e-6)
    with pytest.raises(SandboxSlow, match="the machine is busy"):
        SandboxExecutor()
    wait_until(lambda: before.issuperset(below(os.getpid())), 20)


def test_a_dead_machine_is_asked_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def silence(channel: object, timeout_s: float) -> bytes:
        raise TimeoutError

    with SandboxExecutor() as executor:
        starts, create = [], executor.backend.create
        monkeypatch.setattr(executor.backend, "create", lambda spec: starts.append(spec) or create(spec))
        complaints = []
        with monkeypatch.context() as mute:
            mute.setattr(host.Channel, "receive", silence)
            for _ in range(9):
                with pytest.raises(SandboxFailure) as failure:
                    executor.run([request(LOOP)] * 9)
                complaints.append(str(failure.value))
        assert len(starts) <= calls.FAILURES * calls.STARTS and "failed twice" in complaints[0]
        assert set(complaints[calls.FAILURES :]) == {complaints[-1]} and "composer-nb doctor" in complaints[-1]
        assert "3 runs in a row failed" in complaints[-1] and "not ready in time" in complaints[-1]
        executor._rest_until = time.monotonic()  # it has rested
        assert executor.run([request(IDENTITY, "(1,)")]) == ONE
        assert executor._failures == 0, "the count begins anew"


# Limits of time.


@contextlib.contextmanager
def overloaded(executor: SandboxExecutor) -> Iterator[None]:
    """Keep the machine busy, so that a worker comes behind everything else."""
    core, stop = min(os.sched_getaffinity(0)), threading.Event()

    def hold_down() -> None:
        while not stop.wait(0.005):
            for pid in tree(executor)[3:]:  # past the resident
                with contextlib.suppress(OSError):
                    for thread in (pid, *(int(name) for name in os.listdir(f"/proc/{pid}/task"))):
                        os.sched_setaffinity(thread, {core})
                        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                    # Where each session is a group of its own, the group counts.
                    Path(f"/proc/{pid}/autogroup").write_text("19")

    holding = threading.Thread(target=hold_down)
    holding.start()
    try:
        with hogs():
            yield
    finally:
        stop.set()
        holding.join()


WORKING_THREAD = (
    "import threading\ndef f():\n    def work():\n        while True:\n            pass\n"
    "    t = threading.Thread(target=work)\n    t.start()\n    t.join()\n"
)


def test_a_program_that_the_machine_starved_is_no_timeout_and_not_remembered() -> None:
    with SandboxExecutor(CallLimits(cpu_s=2.0, wall_s=0.2)) as executor:
        memory = CachedExecutor(executor)
        # The second try begins anew, on a machine so busy that it may not come that far.
        refusal = r"waited for this machine.*run less beside it|not ready in time: the machine is busy"
        with overloaded(executor), pytest.raises(SandboxFailure, match=refusal):
            memory.run([request(WORKING_THREAD)])
        assert not memory._known


SLEEPS = {
    "naps": "import time\ndef f():\n    while True:\n        time.sleep(0.01)\n",
    "waits for a lock": "import threading\ndef f():\n    l = threading.Lock()\n    l.acquire()\n    l.acquire()\n",
    "pretends to run": "import ctypes, time\nctypes.CDLL(None).prctl(15, b'a) R 1 (R) R ')\ndef f():\n    time.sleep(60)\n",
}


def test_a_program_that_sleeps_is_at_fault_itself() -> None:
    with SandboxExecutor(CallLimits(wall_s=0.4)) as executor:
        ended = dict(zip(SLEEPS, executor.run([request(source) for source in SLEEPS.values()]), strict=True))
    assert ended == dict.fromkeys(SLEEPS, (CallOutcome(status="timeout"),))


# The memory in front of the sandboxes: it answers exactly as they would.

STATUSES = ("returned", "returned", "raised", "timeout", "died", "unreadable", "not_run")


def hashed(request: CallRequest) -> tuple[CallOutcome, ...]:
    """Return outcomes that depend on everything in a request, each on all arguments before it, as with code that keeps state."""
    outcomes = []
    state = hashlib.sha256(repr([sorted(request.files.items()), request.module, request.function]).encode())
    for argument in request.arguments:
        state.update(argument.encode())
        digest = state.hexdigest()
        outcomes.append(CallOutcome(status=STATUSES[int(digest[0], 16) % 7], text=digest))  # type: ignore[arg-type]
    return tuple(outcomes)


class Unreliable:
    """Deterministic sandboxes, but for every `every`-th run, which fails."""

    def __init__(self, every: int) -> None:
        self.every, self.runs, self.requests = every, 0, 0

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        self.runs += 1
        if self.every and self.runs % self.every == 0:
            raise SandboxFailure("gone")
        self.requests += len(requests)
        return [hashed(request) for request in requests]


NAMES, TEXTS = ["f.py", "g.py", "test_f.py", "a/b.py"], ["", "x", "\0g.py\0x", "x\0g.py\0", "é\ud800"]
REQUESTS = st.builds(
    CallRequest,
    files=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(TEXTS), max_size=2),
    module=st.sampled_from(["f", "g"]),
    function=st.sampled_from(["f", "g"]),
    arguments=st.lists(st.sampled_from(["()", "(1,)", "(2,)"]), max_size=3).map(tuple),
)


@settings(max_examples=120)
@given(
    batches=st.lists(st.lists(REQUESTS, max_size=5), max_size=6),
    size=st.sampled_from([1, 3, 1000]),
    every=st.integers(0, 3),
)
def test_the_memory_answers_as_the_sandboxes_would(batches: list[list[CallRequest]], size: int, every: int) -> None:
    sandboxes = Unreliable(every)
    memory = CachedExecutor(sandboxes, size=size)
    for batch in batches:
        before = dict(memory._known)
        try:
            answers = memory.run(batch)
        except SandboxFailure:
            assert memory._known == before
            continue
        assert answers == [hashed(request) for request in batch]
        assert len(memory._known) <= size
    if size == 1000 and not every:  # nothing is forgotten, and nothing known is executed again
        asked_for = [request for batch in batches for request in batch]
        distinct = {repr((sorted(r.files.items()), r.module, r.function, r.arguments)) for r in asked_for}
        assert sandboxes.requests == len(distinct) and sandboxes.runs <= len(distinct)


def test_what_is_known_waits_for_no_sandbox_and_what_is_asked_twice_at_once_runs_once() -> None:
    sandboxes, begun, going = Unreliable(0), threading.Event(), threading.Event()

    class Slow:
        def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
            begun.set()
            assert going.wait(20)
            return sandboxes.run(requests)

    memory, cached, fresh = CachedExecutor(Slow()), request(IDENTITY, "(1,)"), request(IDENTITY, "(2,)")
    going.set()
    answers = memory.run([cached])
    for event in (begun, going):
        event.clear()
    with ThreadPoolExecutor(2) as pool:
        twice = [pool.submit(memory.run, [fresh]) for _ in range(2)]
        try:
            assert begun.wait(20)
            assert memory.run([cached]) == answers
        finally:
            going.set()
    assert twice[0].result() == twice[1].result() and sandboxes.requests == 2
