"""Instructions: what is seen, never what is wrong; and what is taken out of the visible tests."""

import ast
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from composer_nb.harness.grading.box import Failure, TestResult
from composer_nb.harness.tasks.making.instructions import without_tests, write, write_feature
from composer_nb.harness.tasks.making.symptoms import Symptom, symptom

TESTS = ast.unparse(
    ast.parse("""\
import unittest
import pytest
from shapes import Stack, chunks, clamp, command

def test_chunks():
    assert chunks([1, 2], 2) == [[1, 2]]

@pytest.mark.parametrize("value, wanted", [(1, 2)])
def test_param(value, wanted):
    assert clamp(value) == wanted

@pytest.mark.parametrize("pattern", [r"\\d"])
def test_pattern(pattern):
    assert command(pattern) == f"<{pattern}>"

def test_pop_after_two_pushes():
    stack = Stack()
    unrelated = 3
    stack.push(1).push(2)
    assert stack.size == 2
    result = stack.pop()
    assert result == 2

def test_refuses():
    with pytest.raises(ValueError):
        chunks([1], 0)

@pytest.fixture
def full():
    return Stack([1, 2])

def test_full(full):
    assert full.size == 2

@pytest.mark.parametrize("full", [Stack()])
def test_size_of_the_empty_one(full):
    assert full.size == 0

class TestStack(unittest.TestCase):
    def made(self):
        return self.first

    def setUp(self):
        self.first = Stack()

    def test_made(self):
        self.assertEqual(self.made().size, 1)

    def test_order(self):
        self.assertEqual(clamp(3), 4)

    def test_most_recent_item_goes_first(self):
        self.check(clamp)
""")
)


def symptom_of(
    name: str,
    needle: str,
    why: str = "AssertionError",
    message: str = "",
    values: dict[str, str] | None = None,
    compared: Sequence[str] = (),
) -> Symptom | None:
    line = next(number for number, text in enumerate(TESTS.split("\n"), 1) if needle in text)
    failure = Failure(line=line, message=message, values=values or {}, compared=tuple(compared))
    return symptom(f"tests/test_core.py::{name}#0", TESTS + "\n", TestResult(outcome="failed", why=why), failure)


LINES = "from shapes import Stack\nstack = Stack()\nstack.push(1).push(2)\nresult = stack.pop()"


@pytest.mark.parametrize(
    ("report", "facts"),
    [
        (symptom_of("test_chunks", "assert chunks", compared=["==", "[[1], [2]]", "[[1, 2]]"]),
         {"call": "chunks([1, 2], 2)", "expected": "[[1, 2]]", "actual": "[[1], [2]]"}),
        (symptom_of("test_param", "clamp(value)", values={"value": " 1", "wanted": "2"}, compared=["==", "5", "2"]),
         {"call": "clamp(1)", "expected": "2", "actual": "5", "code": ""}),
        (symptom_of("test_chunks", "assert chunks", "TypeError", "/box/run0/a.py: no\x1b[1m such thing" + "x" * 300),
         {"call": "chunks([1, 2], 2)", "exception": "TypeError", "expected": "[[1, 2]]", "actual": ""}),
        (symptom_of("test_pop_after_two_pushes", "result ==", values={"result": "1"}, compared=["==", "1", "2"]),
         {"code": f"{LINES}\nassert result == 2", "call": "result", "expected": "2", "actual": "1"}),
        (symptom_of("test_pop_after_two_pushes", "result = ", "IndexError", "empty"),
         {"code": LINES, "exception": "IndexError", "message": "empty"}),
        (symptom_of("test_refuses", "pytest.raises(", "Failed", "DID NOT RAISE <class 'ValueError'>"),
         {"call": "chunks([1], 0)", "missing": "ValueError"}),
        (symptom_of("test_refuses", "chunks([1], 0)", "TypeError", "no"),
         {"call": "chunks([1], 0)", "exception": "TypeError", "missing": "ValueError"}),
        (symptom_of("TestStack::test_order", "clamp(3)", message="3 != 4"),
         {"call": "clamp(3)", "expected": "4", "actual": "3"}),
        (symptom_of("test_full", "full.size", values={"full": "[]"}, compared=["==", "'test_full.<locals>.x'", "2"]),
         {"code": "from shapes import Stack\n@pytest.fixture\ndef full():\n    return Stack([1, 2])\n"
                  "assert full.size == 2", "actual": "'x'", "setup": ()}),
    ],
)  # fmt: skip
def test_what_is_seen_of_a_failure(report: Symptom, facts: dict[str, Any]) -> None:
    assert {name: getattr(report, name) for name in facts} == facts
    assert len(report.message) <= 160 and "\x1b" not in report.message and "/box" not in report.message
    for text in (write([report], 4, str(seed)) for seed in range(20)):
        assert "test_" not in text and "{" not in text
        assert (report.code or report.call) in text
        assert all(part in text for part in (report.actual, report.exception, report.message, report.missing))


def test_a_failure_that_nothing_explains_or_reproduces_tells_nothing() -> None:
    assert symptom_of("TestStack::test_most_recent_item_goes_first", "self.check", "KeyError", "'a' at 0x7f12") is None
    assert symptom_of("TestStack::test_made", "self.made()", compared=["==", "0", "1"]) is None
    assert symptom_of("test_size_of_the_empty_one", "full.size == 0", compared=["==", "1", "0"]) is None
    assert symptom_of("test_gone", "assert chunks") is None
    values = {"value": "{[1]}", "wanted": "2"}  # a set with an object that looks like a list
    assert symptom_of("test_param", "clamp(value)", values=values, compared=["==", "5", "2"]) is None


def test_a_value_with_a_backslash_in_an_f_string_ends_nothing() -> None:
    """Before Python 3.12 it cannot be written there, so the failure does not tell."""
    report = symptom_of("test_pattern", "command(", values={"pattern": r"'\\d'"}, compared=["==", "1", "'<>'"])
    full = Symptom(call=r"command('\\d')", expected="'<>'", actual="1")
    assert report == (full if sys.version_info >= (3, 12) else None)


@pytest.mark.parametrize(
    ("documented", "examples", "styles"),
    [
        ("The word that occurs most often, None where there is none.", 0, 4),
        ("Words.", 0, 0),  # nothing says what it is
        ("Words.", 3, 4),
    ],
)
def test_a_feature_is_asked_for_by_its_signature_documentation_and_examples(
    documented: str, examples: int, styles: int
):
    text = f'def f(x):\n    """{documented}"""\n    return range(0, x)\n'
    symptoms = [Symptom(call=f"f({n})", expected=str(n), exception="NotImplementedError") for n in range(examples)]
    texts = {write_feature("a.py", "f", text, str(seed), symptoms) for seed in range(30)} - {""}
    assert len(texts) == styles
    assert all(request.count("should give") == min(examples, 2) and "range(0" not in request for request in texts)


def test_failing_tests_are_taken_out_of_a_module(files: dict[str, str]) -> None:
    text = files["tests/test_core.py"]
    remaining = without_tests(text, ["t.py::test_clamp#1", "t.py::TestStack::test_size#0", "t.py::nowhere#0"])
    assert "def test_clamp(" not in remaining and "parametrize" not in remaining and "def test_size" not in remaining
    assert "def test_clamp_range(" in remaining and "def test_order" in remaining
    empty = without_tests(text, [f"t.py::TestStack::{name}#0" for name in ("test_order", "test_size", "test_empty")])
    [stack] = [node for node in ast.parse(empty).body if isinstance(node, ast.ClassDef)]
    assert all(isinstance(statement, ast.Pass) for statement in stack.body)
