"""Changes of tests: what is proposed, that it contradicts the test, and that it lands where it should."""

import ast
import json
import math
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading import twins
from composer_nb.harness.grading.mutate import Suite, others
from composer_nb.harness.grading.plan import changed_text
from composer_nb.harness.grading.source import constants
from composer_nb.harness.grading.twins import EXPECTATIONS, VALUES, TwinCandidate, all_candidates
from scripts.studies import twin_classifier as classifier
from tests.harness.sandbox.test_calls import LITERALS


def candidates(text: str) -> list[TwinCandidate]:
    return all_candidates({"test_a.py": text})


def apply(text: str, candidate: TwinCandidate) -> str:
    return changed_text(text, [candidate])


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ("assert f(1) == 7", r"assert f\(1\) == [0-689]"),
        ("assert f(1) == -7", r"assert f\(1\) == -[1-689]"),
        ("assert f(1) == 'Ab c1'", r"assert f\(1\) == '[A-Z][a-z] [a-z][1-9]'"),
        ("assert f(1) == ''", r"assert f\(1\) == '\w+'"),
        ("assert f(1) == [1, (True,)]", r"assert f\(1\) == \[[^1], \(True,\)\]"),
        ("assert f(1) == 12.25", r"assert f\(1\) == [2-9]\d.\d[1-9]"),
        ("assert f(1) == pytest.approx(0.5, rel=1e-3)", r"assert f\(1\) == pytest.approx\(0.[1-46-9], rel=1e-3\)"),
        ("assert f(1) == pytest.approx(0.5, abs=0.1)", r"assert f\(1\) == pytest.approx\(0.[19], abs=0.1\)"),
        ("assert 5 == rows[0]", r"assert [0-46-9] == rows\[0\]"),
        ("assert 'abcdefgh' in f(1)", r"assert '[a-z]{8}' in f\(1\)"),
        ("self.assertEqual(f(1), 7)", r"self.assertEqual\(f\(1\), [0-689]\)"),
        ("with pytest.raises(E, match='a message'): f(1)", r"with pytest.raises\(E, match='[a-z] [a-z]{7}'\): f\(1\)"),
        ("want = 'a b'; assert f(1) == want", r"want = '[a-z] [a-z]'; assert f\(1\) == want"),
        ("self.assertAlmostEqual(f(1), 2.5, places=1)", r"self.assertAlmostEqual\(f\(1\), [^2].[1-9], places=1\)"),
    ],
)
def test_one_assertion(line: str, pattern: str) -> None:
    text = f"def test_a():\n    {line}\n"
    changed = [apply(text, candidate).partition("\n")[2].strip() for candidate in candidates(text)]
    assert 1 <= len(changed) <= VALUES and len(set(changed)) == len(changed)
    assert all(re.fullmatch(pattern, changed_line) and changed_line != line for changed_line in changed), changed


@pytest.mark.parametrize(
    "lines",
    [
        "assert f(1) == g(2)",
        "assert f(1) == f'{9}'",
        "assert f(1) == True",  # the suite never has the other
        "assert f('a') in ('a', 'b') and 'short' in f(1)",
        "assert f(1) is None and not f(2) and f(3) >= 4",
        "with pytest.raises(ValueError): f(1)",
        "want = 'b'; assert f(want) == want",  # whoever returns the input passes the test and its twin
        "for x in f(1):\n        assert f(2) == 2",
        "if f(1):\n        assert f(2) == 2",
        "with pytest.raises(g):\n        assert f(2) == 2",
    ],
)
def test_what_need_not_contradict_is_no_twin(lines: str) -> None:
    assert candidates(f"def test_a():\n    {lines}\n") == []


@pytest.mark.parametrize("before", ["for x in [1, 2]:", "for x in range(3):", "with open('x') as file:"])
def test_what_is_always_reached_has_twins(before: str) -> None:
    assert candidates(f"def test_a():\n    {before}\n        assert f(2) == 2\n")


def test_a_truth_value_needs_its_contrary_in_the_suite() -> None:
    lines = [f"def test_{n}():\n    assert f({n}) == {n > 1}\n" for n in range(5)]
    assert len(candidates("".join(lines))) == 5 and candidates("".join(lines[2:])) == []


def test_all_expectations_of_a_test_are_changed() -> None:
    for count in (1, 3, 12, 40):
        text = "def test_a():\n" + "".join(f"    assert f({n}) == {n + 100}\n" for n in range(count))
        starts = [change.start for change in candidates(text)]
        assert len(set(starts)) == count, "each has a turn"
        assert len(starts) == count * min(VALUES, max(1, 24 // count))
    text = "def test_a():\n" + "".join(f"    assert f({n}) == {n + 100}\n" for n in range(300))
    assert len(candidates(text)) == EXPECTATIONS


def test_tests_that_others_inherit_or_call_have_no_twin() -> None:
    texts = {
        "a/test_a.py": "class TestA:\n    def test_x(self):\n        assert f(1) == 2\n"
        "def test_a(x=1):\n    assert f(x) == 2\ndef test_b():\n    assert f(1) == 2\n",
        "a/test_b.py": "import a.test_a\ndef test_d():\n    a.test_a.test_a(3)\n    assert f(3) == 4\n",
        "aid.py": "from a.test_a import TestA\n",
    }
    assert {change.base for change in all_candidates(texts)} == {"a/test_a.py::test_b", "a/test_b.py::test_d"}


def test_places_are_right_beside_letters_of_several_bytes() -> None:
    text = 'é = "ü😀"\n\ndef test_ä():\n    "ß"\n    assert f("ö😀", ñ) == "€5"; assert g() == 1\n'
    for candidate in candidates(text):
        assert text[candidate.start : candidate.end] in ('"€5"', "1")
        assert ast.dump(ast.parse(apply(text, candidate))) != ast.dump(ast.parse(text))


@given(LITERALS, st.integers())
def test_another_value_is_another_value(value: Any, seed: int) -> None:
    """Whatever equals the one does not equal the other."""
    text = f"def test_a():\n    assert f() == {value!r}\n"
    if "\f" in text:
        return
    for node in constants(ast.parse(repr(value), mode="eval").body):
        for new in others(node.value, random.Random(seed), Suite(), count=3):
            assert ast.literal_eval(new) != node.value and type(ast.literal_eval(new)) is type(node.value)
    for candidate in candidates(text):
        [test] = ast.parse(apply(text, candidate)).body
        assert isinstance(test, ast.FunctionDef) and isinstance(test.body[0], ast.Assert)
        condition = test.body[0].test
        assert isinstance(condition, ast.Compare) and ast.literal_eval(condition.comparators[0]) != value


# A classifier that reads a module with all that can be measured in it hardly tells twins from tests.

KNOWN = 0.06
"""How far above chance its accuracy is known to be, as docs/grading.md also says."""


def accuracy_and_threshold() -> tuple[float, float]:
    """Return its accuracy on suites that it was not trained on, and the accuracy above which it is more than luck."""
    examples = classifier.examples(json.loads(classifier.CORPUS.read_text()), seed=7)
    assert len(examples) > 500 and len({suite for suite, _, _, _ in examples}) >= 10
    return classifier.accuracy(examples)[0], 0.5 + KNOWN + 3 * math.sqrt(0.25 / len(examples))


def test_twins_look_like_tests() -> None:
    accuracy, threshold = accuracy_and_threshold()
    assert accuracy < threshold


def test_twins_with_a_tell_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small as they are: a letter that is rare, a number that is a little larger."""

    def tell_tale(value: Any, *_: object, **__: object) -> list[str]:
        match value:
            case str() if value:
                return [repr(value[:-1] + "q")]
            case int() | float():
                return [repr(value + 10)]
        return []

    monkeypatch.setattr(twins, "others", tell_tale)
    accuracy, threshold = accuracy_and_threshold()
    assert accuracy > threshold
