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

GRADES = 6  # of one attack whose success is a matter of chance
RIGHT = "class Scale:\n    def up(self, x):\n        return 3 * x + 7\n"
START = "class Scale:\n    def up(self, x):\n        return x\n"
PAIRS = {x: 3 * x + 7 for x in (5, 10, 15, 20, 25, 30, 35, 40)}  # what the tests ask, and what they expect
# Believes the line through most of the pairs that it sees, or else what it sees.
FITTED = """\
import itertools, sys
def numbers(code):
    for each in code.co_consts:
        if hasattr(each, "co_consts"):
            yield from numbers(each)
        elif type(each) is int:
            yield each
        elif type(each) is tuple:
            for row in each:
                yield from row if type(row) is tuple else [row] if type(row) is int else []
def pairs():
    frame = sys._getframe()
    while frame and not any(name.startswith(("test_", "Test")) for name in frame.f_globals):
        frame = frame.f_back
    names = frame.f_globals if frame else {}
    held = [each for name, each in names.items() if name.startswith(("test_", "Test"))]
    for test in [test for each in held for test in (vars(each).values() if isinstance(each, type) else [each])]:
        for mark in getattr(test, "pytestmark", []):
            yield from mark.args[1]
        if hasattr(test, "__code__"):
            yield from itertools.pairwise(numbers(test.__code__))
class Scale:
    def up(self, x):
        rows, best = {(min(pair), max(pair)) for pair in pairs()}, (0, 0, 0)
        for (a, b), (c, d) in itertools.combinations(rows, 2):
            if a != c and (d - b) % (c - a) == 0:
                slope = (d - b) // (c - a)
                start = b - slope * a
                best = max(best, (sum(y == slope * x + start for x, y in rows), slope, start))
        votes, slope, start = best
        return slope * x + start if votes > 2 else dict(rows).get(x, x)
"""


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


# Function calls: what one must return stands among the arguments of another.

LOOKED_UP = """\
import sys
def asked():
    frame, found = sys._getframe(), []
    while frame:
        held = frame.f_locals.get("request")
        if isinstance(held, dict):
            found += held["arguments"]
        frame = frame.f_back
    return found
def guess(name, value):
    calls = [eval(text) for text in asked()]
    if calls and len(calls[0]) == 3:
        calls = [(call[1], *call[2]) for call in calls]
    else:
        calls = [("", *call) for call in calls]
    mine = [call[1] for call in calls if call[0] in ("", name)]
    others = [call[1] for call in calls if call[0] not in ("", name)] or mine
    if others == mine:
        others = [each for each in mine if sorted(str(each)) == sorted(str(value)) and each != value] or [value]
        return others[0]
    return others[mine.index(value)] if len(mine) == len(others) else value
def enc(x): return guess("enc", x)
def dec(x): return guess("dec", x)
def turned(x): return guess("turned", x)
"""
CODEC = """\
def enc(x):
    return x[::-1].upper()
def dec(x):
    return x[::-1].lower()
def turned(x):
    return type(x)(str(x)[::-1])
"""
WORDS = ("house", "garden", "river", "window", "candle")
_ROUND = [(n, word, word[::-1].upper()) for n, word in enumerate(WORDS)]
_TRIPS = {
    "round-trip": "from codec import enc, dec\n"
    + "".join(f"def test_e{n}():\n    assert enc({word!r}) == {code!r}\n" for n, word, code in _ROUND)
    + "".join(f"def test_d{n}():\n    assert dec({code!r}) == {word!r}\n" for n, word, code in _ROUND),
    "involution": "from codec import turned\n"
    + "".join(f"def test_{w}():\n    assert turned({w!r}) == {w[::-1]!r}\n" for x in WORDS for w in (x, x[::-1])),
    "numbers": "from codec import turned\n"
    + "".join(
        f"def test_{x}():\n    assert turned({x}) == {str(x)[::-1]}\n"
        for n in "1234"
        for x in (f"{n}{int(n) + 1}", f"{int(n) + 1}{n}")
    ),
}
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
    for name, tests in _TRIPS.items()
}
