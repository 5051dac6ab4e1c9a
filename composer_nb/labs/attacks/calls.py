"""Attacks on function calls: on the host and other requests, on limits, on results. All run through `Executor.run`."""

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
from composer_nb.labs.attacks.texts import ATTACKS

TEXTS = ATTACKS["programs of calls"][1]
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
    outcomes = [cell.site.call(flood)[0] for flood in TEXTS["flood"].values()]
    statuses = [outcome.status for outcome in outcomes]
    blocked = outcomes[0].text in ("1", "") and "returned" not in statuses[1:] and statuses[1] == "unreadable"
    return AttackVerdict(blocked, str(statuses), flagged="unreadable" in statuses)


# Results.


@case(0, "forge result lines on every descriptor")
def forged_lines(cell: Cell) -> AttackVerdict:
    statuses = [outcome.status for outcome in cell.site.call(TEXTS["program"]["forged lines"], "()", "()")]
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


ENDINGS = {
    "timeout": CallOutcome(status="timeout"),
    "died": CallOutcome(status="died"),
    "raised": CallOutcome(status="raised", text="SystemExit"),
}


def _ends(source: str, expected: CallOutcome, cell: Cell) -> AttackVerdict:
    """Blocked when the outcomes are the expected ones and the next request is answered."""
    began = time.monotonic()
    outcomes = cell.site.call(source, "()", "()")
    texts = [f"{outcome.status} {outcome.text}".strip() for outcome in outcomes]
    second = expected if expected.status == "raised" else CallOutcome(status="not_run")
    blocked = outcomes == (expected, second) and cell.site.report(FINE) == 0
    detail = f"{texts} after {time.monotonic() - began:.2f} s"
    return AttackVerdict(blocked, detail, flagged=expected.status != "raised")


for _ending, _programs in ATTACKS["programs without a result"][1].items():
    for _name, _source in _programs.items():
        _id, _, _title = _name.partition(" ")
        CALL_CASES.append(SandboxCase(_id, 0, _title, partial(_ends, _source, ENDINGS[_ending])))
