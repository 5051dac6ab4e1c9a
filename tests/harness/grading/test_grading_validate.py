"""Validation of tasks: gold 1, nothing 0, repeats agree, twins that were seen to fail."""

import re
from collections.abc import Callable

import pytest

from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task

Make = Callable[..., Task]


def ids(plan: GradePlan | None) -> list[str]:
    assert plan is not None
    return [name.rpartition("::")[2] for name in plan.tests.values()]


def test_what_a_validation_says(make_task: Make, backend: Backend) -> None:
    tests = """\
import pytest
from f import f
def test_changed(): assert f(1) == 2
def test_steady(): assert f is not None
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert f(1) == 3
def check(x): assert f(x) == x + 1
def test_uncovered(): check(1)
"""
    validation = validate_task(make_task({"test_f.py": tests}), backend)
    assert validation.valid and validation.problems == ()
    assert not validation.trainable, "one that an answer has to mend has no twin"
    plain = tests.replace("check(1)", "assert f(3) == 4")
    covered = validate_task(make_task({"test_f.py": plain}), backend)
    assert not covered.trainable, "two twins and two calls are too few"
    assert covered.guard is not None and (covered.guard.strong, covered.guard.telling) == (2, 2)
    more = "def test_more(): assert f(40) == 41\n"
    assert validate_task(make_task({"test_f.py": plain + more}), backend).trainable
    assert ids(validation.plan) == ["test_changed", "test_steady", "test_uncovered"]
    assert validation.left_out == ("test_f.py::test_skipped", "test_f.py::test_expected")
    assert validation.fail_to_pass == ("test_f.py::test_changed", "test_f.py::test_uncovered")
    assert validation.plan is not None and validation.coverage == pytest.approx(1 / 3)
    assert validation.plan.covered == {"test_f.py::test_changed#0"}


def test_a_flaky_test_is_left_out(make_task: Make, backend: Backend) -> None:
    """The test depends on the order of a set of texts, which another hash seed changes."""
    flaky = "def test_flaky(): assert list({'a', 'b', 'c', 'd', 'e', 'f', 'g'}).index('a') % 2 == 0\n"
    tests = "from f import f\ndef test_a(): assert f(1) == 2\n" + flaky
    validation = validate_task(make_task({"test_f.py": tests}), backend, repeats=6)
    assert validation.flaky == ("test_f.py::test_flaky",) and ids(validation.plan) == ["test_a"] and validation.valid


def test_a_test_that_never_ran_did_not_pass(make_task: Make, backend: Backend) -> None:
    """A table that comes from the code under test: whoever changes it runs one row twice, in another's place."""
    right = "KINDS = ['plain', 'turned']\ndef f(x, kind): return x if kind == 'plain' else x[::-1]\n"
    faulty = right.replace("[::-1]", "")
    tests = """\
import pytest
from f import KINDS, f
@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind): assert f("ab", kind) == {"plain": "ab", "turned": "ba"}[kind]
"""
    task = make_task({"test_f.py": tests}, {"f.py": faulty}, {"f.py": right})
    validation = validate_task(task, backend)
    assert validation.fail_to_pass == ("test_f.py::test_kind[turned]",)
    for kinds, passed in (("['plain', 'plain']", False), ("['plain']", False), ("['plain', 'turned']", True)):
        files = {"f.py": (right if passed else faulty + f"KINDS = {kinds}\n").encode()}
        assert grade_pytest(task, files, backend, validation.plan).passed == passed


@pytest.mark.parametrize(
    ("tests", "options", "problem"),
    [
        ("def test_a(): assert f(1) == 3\n", {}, r"the gold patch fails test_f.py::test_a \(AssertionError\)"),
        ("def test_a(): pass\n", {}, "all tests pass without a change"),
        ("@pytest.mark.skip\ndef test_a(): pass\n", {}, "the gold patch passes no test"),
        ("def test_a(): os._exit(0)\n", {}, "the gold patch: ended_early"),
        (
            "def test_a(): pass\n",
            {"files": {"f.py": "", "conftest.py": "print 1\n"}},
            r"conftest\.py cannot be rewritten",
        ),
        ("def test_a(): assert f(1) == 2\n", {"metadata": {"pytest.ids": '["a.py::b"]'}}, "no test a.py::b"),
        ("def test_a(): assert f(1) == 2\n", {"solution": {"f.py": "def f(x): return 0\n"}}, "the gold patch fails"),
    ],
)
def test_what_makes_a_task_invalid(
    make_task: Make, backend: Backend, tests: str, options: dict[str, dict[str, str]], problem: str
) -> None:
    text = "import os\nimport pytest\nfrom f import f\n" + tests
    validation = validate_task(make_task({"test_f.py": text}, **options), backend, repeats=2)
    assert not validation.valid and not validation.trainable
    assert any(re.match(problem, reported) for reported in validation.problems), validation.problems


def test_changes_that_prove_nothing_are_not_kept(make_task: Make, backend: Backend) -> None:
    """One that the gold patch passes, ones that break the test itself, and one whose test fails elsewhere too."""
    tests = """\
import pytest
from f import f
def test_same(): assert f(1) == 2 * (1 or 7)
def test_breaks(): assert f(len([1])) == {"a": 2}["a"]
@pytest.mark.parametrize("x, want", [(1, 2), (2, 3), (3, 4)])
def test_row(x, want): assert f(x) == want
@pytest.mark.parametrize("x", [1, 2])
def test_round(x): assert f(x) - 1 == x
class TestMany:
    @pytest.fixture(params=[0, 0], autouse=True)
    def twice(self): pass
    @pytest.mark.parametrize("x, want", [(1, 2), (2, 3)])
    def test_row(self, x, want): assert f(x) == want
"""
    validation = validate_task(make_task({"test_f.py": tests}), backend)
    assert validation.valid and validation.plan is not None, validation.problems
    assert {f"test_f.py::test_row#{n}" for n in range(3)} <= validation.plan.covered
    assert not any("TestMany" in key for key in validation.plan.covered)
    for _ in range(3):
        gold = {"f.py": b"def f(x):\n    return x + 1\n"}
        assert grade_pytest(make_task({"test_f.py": tests}), gold, backend, validation.plan).passed


def test_twins_that_disturb_other_tests_are_given_up_alone(make_task: Make, backend: Backend) -> None:
    """One test needs what another leaves behind at its end, which its twin does not reach."""
    tests = """\
from f import f
LEFT = []
def test_first():
    assert f(1) == 2
    LEFT.append(1)
def test_second(): assert LEFT and f(2) == 3
"""
    third = "from f import f\ndef test_third(): assert f(3) == 4\n"
    validation = validate_task(make_task({"test_f.py": tests, "test_g.py": third}), backend)
    assert validation.valid and validation.plan is not None, validation.problems
    keys = {key for twin in validation.plan.twins for key in twin.keys}
    assert keys == {"test_f.py::test_second#0", "test_g.py::test_third#0"}
    assert len(validation.plan.tests) == 3


def test_rows_that_look_alike_keep_their_twins(make_task: Make, backend: Backend) -> None:
    """pytest numbers rows that look alike: a changed one takes the number from another, or gives it one."""
    tests = """\
import pytest
from f import f
@pytest.mark.parametrize("x, want", [(1, 2), (1, 2), (1, 2), (2, 3), (2, 3)])
def test_next(x, want): assert f(x) == want
@pytest.mark.parametrize("word, want", [("a", "b"), ("a", "b"), ("b", "c"), ("c", "d")])
def test_letter(word, want): assert chr(f(ord(word))) == want
"""
    validation = validate_task(make_task({"test_f.py": tests}), backend)
    assert validation.valid and validation.plan is not None, validation.problems
    assert validation.coverage == 1.0
    gold = {"f.py": b"def f(x):\n    return x + 1\n"}
    for _ in range(4):
        grade = grade_pytest(make_task({"test_f.py": tests}), gold, backend, validation.plan)
        assert grade.passed and not grade.flags, "also where a twin gives another row a number"
