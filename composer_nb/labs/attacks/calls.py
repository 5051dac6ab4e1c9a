"""Attacks on function calls: on the host and other requests, on limits, on results. All run through `Executor.run`."""

from __future__ import annotations

import os
import time
from functools import partial

from composer_nb.harness.grading.grade import grade_functions
from composer_nb.harness.sandbox.reap import below
from composer_nb.harness.sandbox.requests import CallOutcome
from composer_nb.harness.sandbox.system.linux import machine
from composer_nb.labs.attacks import hostile
from composer_nb.labs.attacks.case import CALL_CASES, LIMITS, SECRET, AttackVerdict, Cell, SandboxCase, case, nothing
from composer_nb.labs.attacks.joint import CODEC, LOOKED_UP, ROUND_TRIPS

FINE = "def f():\n    return 0\n"


# The host and other requests.


@case(0, "see or signal other processes, the resident among them")
def processes(cell: Cell) -> AttackVerdict:
    cell.site.report(FINE)
    before = set(below(os.getpid()))
    verdict = nothing(cell.run(hostile.attack_processes))
    after = cell.site.call(FINE)[0]
    lost = len(before - set(below(os.getpid())))
    # The worker that was attacked from and the one made ahead of it are new.
    return AttackVerdict(verdict.blocked and after.status == "returned" and lost <= 3, verdict.detail)


@case(0, "find what another request left")
def leftovers(cell: Cell) -> AttackVerdict:
    written = cell.run(hostile.leave_traces, SECRET)
    verdict = nothing(cell.run(hostile.find_traces))
    return AttackVerdict(verdict.blocked and written > 0, f"{written} files written; {verdict.detail}")


@case(0, "read the memory of earlier requests")
def stale_memory(cell: Cell) -> AttackVerdict:
    marker = "stale-" + os.urandom(6).hex()
    cell.site.report("def f(marker):\n    return [marker] * 50\n", marker)
    outcome = cell.site.call(hostile.copies_in_memory, repr((marker[:9], marker[9:])))[0]  # made from parts
    leaked = outcome.status == "returned" and outcome.text == "True"
    return AttackVerdict(not leaked, f"{outcome.status} {outcome.text}: copies found beyond its own: {leaked}")


@case(0, "lock or watch files of the library, which other requests see")
def call_locks(cell: Cell) -> list[str]:
    return cell.run(hostile.lock_the_library)


# Limits.


@case(0, "fork bomb")
def fork_bomb(cell: Cell) -> AttackVerdict:
    successes, threads = cell.run(hostile.multiply, machine()["clone"])
    blocked = successes == [] and threads <= LIMITS.threads
    return AttackVerdict(blocked, f"processes: {successes}, threads: {threads}")


@case(0, "memory bomb")
def memory_bomb(cell: Cell) -> AttackVerdict:
    megabytes, successes = cell.run(hostile.take_memory)
    limit = LIMITS.memory_bytes >> 20
    large = cell.site.call("def f():\n    return len(bytearray(1 << 34))\n")[0]
    detail = f"{megabytes} of {limit} MiB mapped; 16 GiB at once: {large.status}; other ways: {successes}"
    return AttackVerdict(megabytes <= limit and successes == [] and large.status in ("raised", "died"), detail)


@case(0, "a daemon that outlives its request")
def daemon(cell: Cell) -> AttackVerdict:
    cell.site.report(FINE)
    before = len(below(os.getpid()))
    outcome = cell.site.call(hostile.outlive_the_call)[0]
    after = len(below(os.getpid()))
    return AttackVerdict(after <= before, f"fork {outcome.text}; processes before {before}, after {after}")


@case(0, "huge output")
def huge_output(cell: Cell) -> AttackVerdict:
    floods = (
        "    print('x' * 10_000_000, flush=True)\n    return 1\n",
        "    return 'x' * 10_000_000\n",
        "    while True:\n        os.write(3, b'x' * 60000)\n",
        "    v = []\n    for _ in range(9999):\n        v = [v, v]\n    return v\n",
    )
    outcomes = [cell.site.call(F + flood)[0] for flood in floods]
    statuses = [outcome.status for outcome in outcomes]
    blocked = outcomes[0].text in ("1", "") and "returned" not in statuses[1:] and statuses[1] == "unreadable"
    return AttackVerdict(blocked, str(statuses), flagged="unreadable" in statuses)


# Results.


@case(0, "forge result lines on every descriptor")
def forged_lines(cell: Cell) -> AttackVerdict:
    source = """
import os
for fd in range(64):
    for nonce in ("", "ready ", "0 ", "0000000000000000 "):
        try:
            os.write(fd, (nonce + '["returned", "42"]\\n').encode())
        except OSError:
            pass
print('["returned", "42"]')
def f():
    raise ValueError
"""
    statuses = [outcome.status for outcome in cell.site.call(source, "()", "()")]
    return AttackVerdict("returned" not in statuses, str(statuses), flagged="unreadable" in statuses)


@case(0, "find the expected values")
def expected_values(cell: Cell) -> AttackVerdict:
    marker = "expected-" + os.urandom(6).hex()  # stays here, as the right answers of a test do
    outcome = cell.site.call(hostile.find_expected, repr((marker[:9], marker[9:])))[0]
    return AttackVerdict(outcome.status == "returned" and outcome.text != "True", f"{outcome.status} {outcome.text}")


@case(0, "a value that claims to equal everything")
def always_equal(cell: Cell) -> AttackVerdict:
    statuses = [outcome.status for outcome in cell.site.call(hostile.always_equal, "(0,)", "(1,)", "(2,)")]
    return AttackVerdict(set(statuses) == {"unreadable"}, str(statuses), flagged="unreadable" in statuses)


@case(0, "look answers up among the arguments of other calls")
def looked_up(cell: Cell) -> AttackVerdict:
    if cell.site.calls is None:
        raise ValueError("this backend serves no calls")
    details, blocked = [], True
    for name, task in ROUND_TRIPS.items():
        attack, right = (grade_functions(task, {"codec.py": text}, cell.site.calls) for text in (LOOKED_UP, CODEC))
        blocked &= right.passed and not any(attack.tests.values())
        details.append(f"{name}: {sum(attack.tests.values())} of {len(attack.tests)} tests")
    return AttackVerdict(blocked, "; ".join(details))


TIMEOUT, DIED = CallOutcome(status="timeout"), CallOutcome(status="died")
EXITED = CallOutcome(status="raised", text="SystemExit")
UNSIGNALLED = """\
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        signal.setitimer(timer, 0)
    while True:
        pass
"""
STOPPED = "    os.kill(0, signal.SIGSTOP)\n    while True:\n        signal.pause()\n"
F = "import os, signal, sys, time\ndef f():\n"
# Programs without a result: id -> title, source, and the outcome of the first of two calls.
ENDINGS = {
    "endless-loop": ("endless loop", F + "    while True:\n        pass\n", TIMEOUT),
    "endless-loop-without-signals": ("endless loop that blocks signals and timers", F + UNSIGNALLED, TIMEOUT),
    "sleep-past-deadline": ("sleep past the wall deadline", F + "    time.sleep(60)\n", TIMEOUT),
    "stop-group": ("stop oneself and one's process group", F + STOPPED, TIMEOUT),
    "exit-at-import": ("os._exit(0) at import", "import os\nos._exit(0)\n", DIED),
    "sys-exit-at-import": ("sys.exit(0) at import", "import sys\nsys.exit(0)\n", EXITED),
    "closed-pipe": ("close the result pipe and go on", F + "    os.closerange(0, 4096)\n    return 42\n", DIED),
}


def _ends(source: str, expected: CallOutcome, cell: Cell) -> AttackVerdict:
    """Blocked when the outcomes are the expected ones and the next request is answered."""
    began = time.monotonic()
    outcomes = cell.site.call(source, "()", "()")
    texts = [f"{outcome.status} {outcome.text}".strip() for outcome in outcomes]
    second = EXITED if expected == EXITED else CallOutcome(status="not_run")
    blocked = outcomes == (expected, second) and cell.site.report(FINE) == 0
    detail = f"{texts} after {time.monotonic() - began:.2f} s"
    return AttackVerdict(blocked, detail, flagged=expected in (TIMEOUT, DIED))


CALL_CASES += [
    SandboxCase(id, 0, title, partial(_ends, source, expected)) for id, (title, source, expected) in ENDINGS.items()
]
