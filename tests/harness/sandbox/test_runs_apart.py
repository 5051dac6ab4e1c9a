"""Runs of one grade, which must not tell one another what they see, by locks on files that their sandboxes have in common."""

from __future__ import annotations

import pytest

from composer_nb.harness.grading.box import Boxes, TestJob
from composer_nb.harness.sandbox.contract import Backend

SIGNALS = """\
import fcntl, os, struct, time
PATHS = ["/proc/self/exe"] + ["/proc/self/ns/" + name for name in ("time", "user", "cgroup")]
def f(turn):
    held = []
    for path in PATHS:
        fd = os.open(path, os.O_RDONLY)
        held.append(fd)
        fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, turn, 1, 0))
    for _ in range(40):
        for path in PATHS:
            fd = os.open(path, os.O_RDONLY)
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 - turn, 1, 0)
            if struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK:
                return path
        time.sleep(0.05)
    return "silent"
"""
"""Each run locks a byte of files that sandboxes share, and looks whether the other one's byte is locked."""


@pytest.mark.parametrize("calls", [True, False])
def test_runs_of_one_grade_hear_no_locks(calls: bool, backend: Backend) -> None:
    """Runs with all constants could tell a test that runs alone what they conclude, and replays each other's arguments."""
    files = {"signals.py": SIGNALS.encode()}
    jobs = []
    for turn in (0, 1):
        call = ("signals", "f", f'[{{"list": [{turn}]}}, {{"dict": []}}]')
        test = f"from signals import f\ndef test_f():\n    assert f({turn}) == 'silent'\n"
        hidden = {} if calls else {"test_signals.py": test}
        jobs.append(TestJob(files=files, hidden=hidden, tests=tuple(hidden), calls=((call,),) if calls else ()))
    ran = Boxes(backend=backend).run(jobs)
    if calls:
        assert [each.answers for each in ran] == 2 * [{0: '["returned", "silent", null]'}]
    else:
        assert all(each.result("test_signals.py::test_f#0").passed for each in ran)
