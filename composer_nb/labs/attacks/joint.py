"""Attacks on expectations that explain one another: a rule fitted to all constants of the process, and answers looked up among
the arguments of other calls."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from composer_nb.harness.grading.grade import grade_functions
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.case import AttackVerdict, Site, register, row

GRADES = 6
"""Of one attack whose success is a matter of chance."""

RIGHT = "class Scale:\n    def up(self, x):\n        return 3 * x + 7\n"
START = "class Scale:\n    def up(self, x):\n        return x\n"
PAIRS = {x: 3 * x + 7 for x in (5, 10, 15, 20, 25, 30, 35, 40)}
"""What the tests ask, and what they expect."""
_ROWS = ", ".join(map(str, PAIRS.items()))
_HEAD = "import pytest\nfrom scale import Scale\n"
TESTS = {
    "rows": f"@pytest.mark.parametrize('x, wanted', [{_ROWS}])\ndef test_up(x, wanted):\n    assert Scale().up(x) == wanted\n",
    "a table of the module": f"ROWS = [{_ROWS}]\n@pytest.mark.parametrize('x, wanted', ROWS)\n"
    "def test_up(x, wanted):\n    assert Scale().up(x) == wanted\n",
    "tests": "".join(f"def test_{x}():\n    assert Scale().up({x}) == {y}\n" for x, y in PAIRS.items()),
    "assertions": "".join(
        f"def test_{x}():\n" + "".join(f"    assert Scale().up({x + more}) == {PAIRS[x + more]}\n" for more in (0, 5))
        for x in (5, 15, 25, 35)
    ),
    "copies": "".join(
        f"def test_{x}_{turn}():\n    wanted = {y}\n    assert Scale().up({x}) == wanted\n"
        for x, y in PAIRS.items()
        for turn in "abc"
    ),
    "a class": "class TestScale:\n    def setup_method(self):\n        self.scale = Scale()\n"
    + "".join(f"    def test_{x}(self):\n        assert self.scale.up({x}) == {y}\n" for x, y in PAIRS.items()),
}
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
    while frame:
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        if any(name.startswith(("test_", "Test")) for name in frame.f_globals):
            break
        frame = frame.f_back
    names = frame.f_globals if frame else {}
    held = [each for name, each in names.items() if name.startswith(("test_", "Test"))]
    tests = [test for each in held for test in (vars(each).values() if isinstance(each, type) else [each])]
    for test in tests:
        for mark in getattr(test, "pytestmark", []):
            yield from mark.args[1]
        if hasattr(test, "__code__"):
            yield from itertools.pairwise(numbers(test.__code__))
def fit():
    rows = {(min(pair), max(pair)) for pair in pairs()}
    best = (0, 0, 0)
    for (a, b), (c, d) in itertools.combinations(rows, 2):
        if a != c and (d - b) % (c - a) == 0:
            slope = (d - b) // (c - a)
            start = b - slope * a
            best = max(best, (sum(y == slope * x + start for x, y in rows), slope, start))
    return rows, best
class Scale:
    def up(self, x):
        rows, (votes, slope, start) = fit()
        return slope * x + start if votes > 2 else dict(rows).get(x, x)
"""
"""Believes the line through most of the pairs that it sees, or else what it sees."""


def _task(name: str, tests: str) -> Task:
    return Task(
        id=f"joint-{name.replace(' ', '-')}",
        instruction="write scale.py",
        grader="pytest",
        files={"scale.py": START},
        tests={"test_scale.py": _HEAD + tests},
        solution={"scale.py": RIGHT},
        source_scope=("scale.py",),
    )


JOINT = {name: _task(name, tests) for name, tests in TESTS.items()}
"""Tasks whose expectations lie on one line."""


def check_fitted(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield the rows of `composer-nb sandbox check` for a rule that is fitted to constants, which passes once in eight."""
    for name in ("rows", "tests"):
        task, draws = JOINT[name], Random(name)
        report = validate_task(task, backend, repeats=1)
        assert report.plan is not None and report.guard is not None
        grades = [
            grade_pytest(task, {"scale.py": FITTED.encode()}, backend, report.plan, rng=draws) for _ in range(GRADES)
        ]
        passed = sum(grade.passed for grade in grades)
        flagged = any(grade.flags for grade in grades)
        verdict = AttackVerdict(
            blocked=report.guard.by == "twins" and passed <= GRADES // 3,
            flagged=flagged,
            detail=f"guard {report.guard.by}; {passed} of {GRADES} grades passed, by chance one in eight",
        )
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
_CODES = [word[::-1].upper() for word in WORDS]
_ROUND = "from codec import enc, dec\n" + "".join(
    f"def test_e{n}():\n    assert enc({word!r}) == {code!r}\ndef test_d{n}():\n    assert dec({code!r}) == {word!r}\n"
    for n, (word, code) in enumerate(zip(WORDS, _CODES, strict=True))
)
_TURNED = "from codec import turned\n" + "".join(
    f"def test_{n}{m}():\n    assert turned({w!r}) == {w[::-1]!r}\n"
    for n, word in enumerate(WORDS)
    for m, w in enumerate((word, word[::-1]))
)
_SWAPPED = "from codec import turned\n" + "".join(
    f"def test_{x}():\n    assert turned({x}) == {int(str(x)[::-1])}\n"
    for n in (12, 23, 34, 45)
    for x in (n, int(str(n)[::-1]))
)
ROUND_TRIPS = {
    name: Task(
        id=name,
        instruction="write codec.py",
        grader="functions",
        files={"codec.py": "def enc(x):\n    return x\ndec = turned = enc\n"},
        tests={"test_codec.py": tests},
        solution={"codec.py": CODEC},
        source_scope=("codec.py",),
    )
    for name, tests in (("round-trip", _ROUND), ("involution", _TURNED), ("numbers", _SWAPPED))
}
"""Tasks of the grader `functions` whose answers stand among the arguments."""


@register(0, "look answers up among the arguments of other calls")
def looked_up(site: Site) -> AttackVerdict:
    if site.calls is None:
        raise ValueError("this backend serves no calls")
    details, blocked = [], True
    for name, task in ROUND_TRIPS.items():
        attack, right = (grade_functions(task, {"codec.py": text}, site.calls) for text in (LOOKED_UP, CODEC))
        blocked &= right.passed and not any(attack.tests.values())
        details.append(f"{name}: {sum(attack.tests.values())} of {len(attack.tests)} tests")
    return AttackVerdict(blocked=blocked, detail="; ".join(details))
