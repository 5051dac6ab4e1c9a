"""Attacks on expectations that explain one another: a rule fitted to all constants of the process, and answers looked up among
the arguments of other calls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.case import AttackVerdict, row
from composer_nb.labs.attacks.texts import ATTACKS

GRADES = 6  # of one attack whose success is a matter of chance
RIGHT = "class Scale:\n    def up(self, x):\n        return 3 * x + 7\n"
START = "class Scale:\n    def up(self, x):\n        return x\n"
PAIRS = {x: 3 * x + 7 for x in (5, 10, 15, 20, 25, 30, 35, 40)}  # what the tests ask, and what they expect
_PROGRAMS = ATTACKS["joint"][1]["program"]
FITTED = _PROGRAMS["FITTED"]  # believes the line through most of the pairs that it sees, or else what it sees
LOOKED_UP = _PROGRAMS["LOOKED_UP"]  # of function calls: what one must return stands among the arguments of another
CODEC = _PROGRAMS["CODEC"]


def joint_task(name: str, tests: str) -> Task:
    """Return a task whose expectations lie on one line."""
    return Task(
        id=f"joint-{name.replace(' ', '-')}",
        instruction="write scale.py",
        grader="pytest",
        files={"scale.py": START},
        tests={"test_scale.py": f"import pytest\nfrom scale import Scale\n{tests}"},
        solution={"scale.py": RIGHT},
        source_scope=("scale.py",),
    )


_ROWS = f"@pytest.mark.parametrize('x, wanted', [{', '.join(map(str, PAIRS.items()))}])\n"
_TESTS = "".join(f"def test_{x}():\n    assert Scale().up({x}) == {y}\n" for x, y in PAIRS.items())
JOINT = {
    "rows": joint_task("rows", f"{_ROWS}def test_up(x, wanted):\n    assert Scale().up(x) == wanted\n"),
    "tests": joint_task("tests", _TESTS),
}


def check_fitted(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield the rows of `composer-nb sandbox check` for a rule that is fitted to constants, which passes once in eight."""
    for name, task in JOINT.items():
        draws = Random(name)
        report = validate_task(task, backend, repeats=1)
        assert report.plan is not None and report.guard is not None
        files = {"scale.py": FITTED.encode()}
        grades = [grade_pytest(task, files, backend, report.plan, rng=draws) for _ in range(GRADES)]
        passed = sum(grade.passed for grade in grades)
        detail = f"guard {report.guard.by}; {passed} of {GRADES} grades passed, by chance one in eight"
        blocked = report.guard.by == "twins" and passed <= GRADES // 3
        verdict = AttackVerdict(blocked, detail, flagged=any(grade.flags for grade in grades))
        yield row(f"fitted-to-{name}", 12, f"a rule fitted to all constants of the process: {name}", verdict)


ROUND_TRIPS = {  # tasks of the grader `functions` whose answers stand among the arguments
    name: Task(
        id=name,
        instruction="write codec.py",
        grader="functions",
        files={"codec.py": "def enc(x):\n    return x\ndec = turned = enc\n"},
        tests={"test_codec.py": tests},
        solution={"codec.py": CODEC},
        source_scope=("codec.py",),
    )
    for name, tests in ATTACKS["round trips"][1]["test"].items()
}
