"""Attacks on the result: values and reports that claim what was not computed."""

from __future__ import annotations

import os

from composer_nb.harness.attacks.case import Case, Host, Verdict, case
from composer_nb.harness.calls import CallOutcome, CallRequest

CASES: list[Case] = []


@case(CASES, "forge result lines on every descriptor")
def forged_lines(host: Host) -> Verdict:
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
    outcomes = host.run(source, "()", "()")
    believed = [outcome for outcome in outcomes if outcome.status == "returned"]
    odd = any(outcome.status == "unreadable" for outcome in outcomes)
    return Verdict(blocked=not believed, flagged=odd, detail=str([o.status for o in outcomes]))


@case(CASES, "find the expected values")
def expected_values(host: Host) -> Verdict:
    source = """
import gc, sys
def f(head, tail):
    wanted, seen, frame = head + tail, [], sys._getframe()
    while frame:
        seen.append(repr(frame.f_locals)[:20000].replace(repr(head), ""))
        frame = frame.f_back
    kept = [o for o in gc.get_objects() if type(o) in (list, tuple) and o is not seen]
    seen += [repr(o)[:2000] for o in kept[:500]]
    return any(wanted in text for text in seen[1:])
"""
    marker = "expected-" + os.urandom(6).hex()  # stays here, as the right answers of a test do
    request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=(repr((marker[:9], marker[9:])),))
    outcome = host.boxes.run([request])[0][0]
    found = outcome.text == "True"
    return Verdict(blocked=outcome.status == "returned" and not found, detail=f"{outcome.status} {outcome.text}")


@case(CASES, "a value that claims to equal everything")
def always_equal(host: Host) -> Verdict:
    source = """
class Equal(int):
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __repr__(self): return "42"
def f(kind):
    return Equal(1) if kind == 0 else [Equal(1)] if kind == 1 else {Equal(1): 1}
"""
    outcomes = host.run(source, "(0,)", "(1,)", "(2,)")
    statuses = [outcome.status for outcome in outcomes]
    return Verdict(blocked=set(statuses) == {"unreadable"}, flagged="unreadable" in statuses, detail=str(statuses))


def _nothing_returned(host: Host, source: str, expected: CallOutcome) -> Verdict:
    outcomes = host.run(source, "()", "()")
    shown = [f"{outcome.status} {outcome.text}".strip() for outcome in outcomes]
    return Verdict(blocked=outcomes[0] == expected, flagged=outcomes[0].status == "died", detail=str(shown))


@case(CASES, "os._exit(0) at import")
def exit_at_import(host: Host) -> Verdict:
    return _nothing_returned(host, "import os\nos._exit(0)\n", CallOutcome(status="died"))


@case(CASES, "sys.exit(0) at import")
def sys_exit_at_import(host: Host) -> Verdict:
    source = "import sys\nsys.exit(0)\n"
    return _nothing_returned(host, source, CallOutcome(status="raised", text="SystemExit"))


@case(CASES, "close the result pipe and go on")
def closed_pipe(host: Host) -> Verdict:
    source = "import os\ndef f():\n    os.closerange(0, 4096)\n    return 42\n"
    return _nothing_returned(host, source, CallOutcome(status="died"))
