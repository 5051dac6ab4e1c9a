"""Changes of tests: what is proposed, that it contradicts the test, and that it lands where it should."""

from __future__ import annotations

import ast
import dis
import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading.mutate import Suite, other_exceptions, others
from composer_nb.harness.grading.plan import Twin, changed_text
from composer_nb.harness.grading.source import constants
from composer_nb.harness.grading.twins import PLACES, VALUES, TwinCandidate, all_candidates, candidates_of


def candidates(path: str, text: str) -> list[TwinCandidate]:
    return candidates_of({path: text})


def apply(text: str, candidate: TwinCandidate) -> str:
    twin = Twin(path="", start=candidate.start, end=candidate.end, text=candidate.text, kind=candidate.kind, keys=())
    return changed_text(text, [twin])


def body(text: str, *, telling: bool = False) -> list[str]:
    """Texts of a test's changes that are or are not telling, without its first line."""
    found = [each for each in candidates("test_a.py", text) if each.telling == telling]
    return [apply(text, candidate).partition("\n")[2].strip() for candidate in found]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("assert f(1) == 7", r"assert f\(1\) == [0-689]"),
        ("assert f(1) == -7", r"assert f\(1\) == -[1-689]"),
        ("assert f(1) == 'Ab c1'", r"assert f\(1\) == '[A-Z][a-z] [a-z][1-9]'"),
        ("assert f(1) == b'a'", r"assert f\(1\) == b'[^a]'"),
        ("assert f(1) == ''", r"assert f\(1\) == '\w+'"),
        ("assert f(1) == [1, (True,)]", r"assert f\(1\) == \[[^1], \(True,\)\]"),
        ("assert f(1) == [3, 1, 2]", r"assert f\(1\) == \[\d, \d, \d\]"),
        ("assert f(1) == 12.25", r"assert f\(1\) == [2-9]\d.\d[1-9]"),
        ("assert f(1) == pytest.approx(0.5, rel=1e-3)", r"assert f\(1\) == pytest.approx\(0.[1-46-9], rel=1e-3\)"),
        ("assert f(1) == pytest.approx(0.5, abs=0.1)", r"assert f\(1\) == pytest.approx\(0.[19], abs=0.1\)"),
        ("assert f(1) == g(2)", r"assert f\(\d\) == g\(\d\)"),
        ("assert f(1) == sorted('ab')", r"assert f\(1\) == sorted\('[a-z]{2}'\)"),
        ("assert 5 == rows[0]", r"assert [0-46-9] == rows\[0\]"),
        ("assert 'a' == open('b').read()", r"assert '[^a]' == open\('b'\).read\(\)"),
        ("assert f('a') in ('a', 'b')", r"assert f\('[^a]'\) in \('a', 'b'\)"),
        ("assert f(1) is None", r"assert f\([^1]\) is None"),
        ("assert f(1) not  in g", r"assert f\([^1]\) not  in g"),
        ("assert 'abc' in f(1)", r"assert '[a-z]{3}' in f\(1\)"),
        ("assert f(1)", r"assert f\([^1]\)"),
        ("assert f(1) or g(1)", r"assert f\(\d\) or g\(\d\)"),
        ("self.assertEqual(f(1), 7)", r"self.assertEqual\(f\(1\), [0-689]\)"),
        ("self.assertTrue(f(1) == 7)", r"self.assertTrue\(f\(1\) == [0-689]\)"),
        ("self.assertIsNone(f(1))", r"self.assertIsNone\(f\([^1]\)\)"),
        ("self.assertIn('abc', f(1))", r"self.assertIn\('[a-z]{3}', f\(1\)\)"),
        ("self.assertAlmostEqual(f(1), 2.5, places=1)", r"self.assertAlmostEqual\(f\(1\), [^2].[1-9], places=1\)"),
    ],
)
def test_one_assertion(line: str, wanted: str) -> None:
    found = body(f"def test_a():\n    {line}\n")
    assert 1 <= len(found) <= 2 * VALUES and len(set(found)) == len(found)
    assert all(re.fullmatch(wanted, each) and each != line for each in found), found


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("assert f(x) == g(y)", "assert ((f(x)) == [g(y)] or [f(x)] == (g(y)))"),
        ("self.assertEqual(x, y.z)", "self.assertTrue((x) == [y.z] or [x] == (y.z))"),
        ("assert f(x) == None", "assert f(x) == [None]"),
        ("assert f(x) == f'{9}'", "assert f(x) == [f'{9}']"),
        ("assert f(x) in ('a', 'b')", "assert f(x) not in ('a', 'b')"),
        ("assert f(x) is None", "assert f(x) is not None"),
        ("assert f(x) not  in g", "assert f(x) in g"),
        ("assert f(x) >= g(y)", "assert f(x) < g(y)"),
        ("assert f(x)", "assert (not (f(x)))"),
        ("assert not f(x)", "assert (f(x))"),
        ("assert 1 < f(x) < 3", "assert (not (1 < f(x) < 3))"),
        ("self.assertTrue(f(x))", "self.assertFalse(f(x))"),
        ("self.assertIn(x, f(y))", "self.assertNotIn(x, f(y))"),
    ],
)
def test_what_has_no_twin_of_its_form_says_so(line: str, wanted: str) -> None:
    text = f"def test_a():\n    {line}\n"
    assert body(text, telling=True) == [wanted]
    assert body(text) == []


def test_a_truth_value_tells_where_the_suite_never_has_the_other() -> None:
    lines = [f"def test_{n}():\n    assert f({n}) == {n > 1}\n" for n in range(5)]
    found = {each.bases[0]: each for each in candidates("test_a.py", "".join(lines)) if each.kind == "value"}
    assert not any(each.telling for each in found.values())
    lonely = candidates("test_a.py", "".join(lines[2:]))
    assert {each.text for each in lonely if each.kind == "value" and each.telling} >= {"False"}


FORMS = """\
import errors
from shop import LostError, Refused, f, g
def test_values():
    assert f("a word") == "Some Words"
    assert f("other") == ["x", 12, 1.5, b"ab", -3]
    assert g(1, 2) == pytest.approx(0.25)
def test_contrasts():
    assert f("this")
    assert not f("that")
    assert g(1, 2) is None and g(3, 4) < 9
def test_errors():
    with pytest.raises(LostError, match="a message"):
        f("unknown")
    with pytest.raises(Refused):
        g(5, 6)
    with pytest.raises(ValueError):
        f("empty")
    with pytest.raises(KeyError):
        g(7, 8)
def test_no_error():
    f("known")
    g(1, 1)
@pytest.mark.parametrize("x, want", [("a", 1), ("b", 2)])
def test_table(x, want):
    assert f(x) == want
"""


def shape(text: str) -> list[object]:
    """A module's bytecode and syntax tree, but for constants and names."""
    tree = ast.parse(text)
    codes, found = [compile(tree, "m", "exec")], list[object]()
    for code in codes:  # grows
        codes += [each for each in code.co_consts if hasattr(each, "co_code")]
        found.append([each.opname for each in dis.get_instructions(code)])
    kinds = [(type(node), type(getattr(node, "value", None))) for node in ast.walk(tree)]
    return [found, kinds]


def test_a_change_keeps_the_form_of_its_test() -> None:
    found = [each for each in candidates("test_a.py", FORMS) if not each.telling]
    assert {each.kind for each in found} == {"value", "exception", "input"}
    assert {each.bases[0].rpartition("::")[2] for each in found} == {
        "test_values", "test_contrasts", "test_errors", "test_table"
    }  # fmt: skip
    wanted = shape(FORMS)
    for each in found:
        assert shape(apply(FORMS, each)) == wanted, each


def test_a_call_that_must_raise_gets_inputs_of_calls_that_must_not() -> None:
    text = "def test_good():\n    f('calm sea', 12)\ndef test_bad():\n    with pytest.raises(E):\n        f('', -1)\n"
    found = [each for each in candidates("test_a.py", text) if each.kind == "input"]
    assert found and all(re.fullmatch(r"f\('[a-z]{4} [a-z]{3}', -1\)", each.text) for each in found)
    assert all(each.weak and not each.telling for each in found), "wrong answers may raise either way"
    unittest = "class TestA:\n    def test_a(self):\n        assert f('calm') == 1\n    def test_b(self):\n"
    unittest += "        self.assertRaises(E, f, 'wild')\n"
    [texts] = [[each.text for each in candidates("test_a.py", unittest) if each.kind == "input"]]
    assert texts and all(re.fullmatch(r"self.assertRaises\(E, f, '[a-z]{4}'\)", each) for each in texts)


def test_all_expectations_of_a_test_are_changed() -> None:
    for count in (1, 3, 12, 40):
        text = "def test_a():\n" + "".join(f"    assert f({n}) == {n + 100}\n" for n in range(count))
        found = [each.start for each in candidates("test_a.py", text)]
        assert len(set(found)) == count, "each has a turn"
        assert len(found) == count * min(VALUES, max(1, 24 // count))
    text = "def test_a():\n" + "".join(f"    assert f({n}) == {n + 100}\n" for n in range(300))
    assert len(candidates("test_a.py", text)) == PLACES


@pytest.mark.parametrize(
    ("wanted", "unfit"),
    [
        ("ValueError", {"ValueError"}),
        ("LookupError", {"KeyError", "IndexError"}),
        ("UnicodeDecodeError", {"ValueError"}),
        ("(TypeError, KeyError)", {"TypeError", "KeyError"}),
        ("ArithmeticError", {"ZeroDivisionError"}),
        ("NotImplementedError", {"RuntimeError"}),
        ("errors.Own", set()),
    ],
)
def test_other_exceptions_are_no_kin(wanted: str, unfit: set[str]) -> None:
    node = ast.parse(wanted, mode="eval").body
    for seed in range(30):
        found = other_exceptions(node, random.Random(seed), Counter())
        assert len(found) == 2 and not unfit & {name for name, _ in found} and all(tells for _, tells in found)
    assert other_exceptions(ast.parse("Exception", mode="eval").body, random.Random(0), Counter()) == []


def test_exceptions_that_the_suite_expects_do_not_tell() -> None:
    expected = Counter(["ValueError", "KeyError", "LookupError", "errors.Own", "(OSError, TypeError)", "LostError"])
    for wanted, found in (
        ("KeyError", {"ValueError", "LostError"}),
        ("LostError", {"ValueError", "KeyError", "LookupError"}),
        ("errors.Other", {"errors.Own"}),
        ("(KeyError, ValueError)", {"(OSError, TypeError)"}),
    ):
        node = ast.parse(wanted, mode="eval").body
        drawn = [each for seed in range(30) for each in other_exceptions(node, random.Random(seed), expected)]
        assert set(drawn) == {(name, False) for name in found}


def test_a_variable_is_changed_where_it_gets_its_value() -> None:
    text = "def test_a():\n    want = 'a b'\n    assert f(1) == want\n"
    assert all(re.fullmatch(r"want = '[a-z] [a-z]'\n    assert f\(1\) == want", each) for each in body(text))
    assert body(text) and body(text, telling=True) == ["want = 'a b'\n    assert f(1) == [want]"]
    text = "def test_a():\n    want = 5\n    got = f(1)\n    assert want == got\n"
    assert all(re.fullmatch(r"want = [^5]\n    got = f\(1\)\n    assert want == got", each) for each in body(text))
    assert body(text) and body(text, telling=True) == ["want = 5\n    got = f(1)\n    assert [want] == got"]
    [computed] = body("def test_a():\n    want = g(2)\n    assert f(1) == want\n", telling=True)
    assert computed == "want = g(2)\n    assert ((f(1)) == [want] or [f(1)] == (want))"


@pytest.mark.parametrize(
    ("before", "equation", "changed_side"),
    [
        ("for x, want in [(1, 2)]:", "want == f(x)", "[want] == f(x)"),
        ("if x := f(1):", "x == W", "x == [W]"),
        ("with g() as want:", "want == f(y)", "((want) == [f(y)] or [want] == (f(y)))"),
        ("for want in g():", "f(y) == want", "((f(y)) == [want] or [f(y)] == (want))"),
        ("for V in f(1):", "V == W", "V == [W]"),
        ("for _ in [1]:", "V == W", "((V) == [W] or [V] == (W))"),
    ],
)
def test_which_side_is_the_answer(before: str, equation: str, changed_side: str) -> None:
    text = f"V = 5\nW = 5\ndef test_a():\n    {before}\n        assert {equation}\n"
    [found] = [apply(text, each) for each in candidates("test_a.py", text) if each.telling]
    assert found.strip().endswith(f"assert {changed_side}")


TABLE = """\
import pytest
CASES = [("a", 1), pytest.param("b", 2, id="two"), ("c", 1 + 1)]
@pytest.mark.parametrize("x, want", CASES)
def test_a(x, want):
    assert f(x) == want
@pytest.mark.parametrize("x", [1, 2])
def test_b(x):
    assert f(x)
@pytest.mark.parametrize(("x", "error"), [(1, ValueError), (2, KeyError)])
def test_c(x, error):
    with pytest.raises(error):
        f(x)
@pytest.mark.parametrize("x", [1])
@pytest.mark.parametrize("want", [1])
def test_d(x, want):
    assert f(x) == want
"""


def test_rows_of_a_table() -> None:
    found = candidates("test_a.py", TABLE)
    rows = [
        (each.bases[0][-6:], each.row, TABLE[each.start : each.end], each.kind)
        for each in found
        if each.row is not None
    ]
    assert list(dict.fromkeys(rows)) == [
        ("test_a", 0, "1", "value"), ("test_a", 1, "2", "value"), ("test_a", 2, "1", "value"),
        ("test_b", 0, "1", "input"), ("test_b", 1, "2", "input"),
        ("test_c", 0, "1", "input"), ("test_c", 0, "ValueError", "exception"),
        ("test_c", 1, "2", "input"), ("test_c", 1, "KeyError", "exception"),
    ]  # fmt: skip
    whole = {(each.bases[0][-6:], each.kind, each.telling) for each in found if each.row is None}
    assert whole == {("test_a", "negation", True), ("test_b", "negation", True), ("test_d", "value", True)}


SHARED = """\
T = [(1, 2), (3, 4)]
@pytest.mark.parametrize("x, want", T)
def test_a(x, want):
    assert f(x) == want
@pytest.mark.parametrize("want, x", T)
def test_b(want, x):
    assert g(x) == want
"""


def test_a_shared_table_changes_all_tests_that_it_is_for() -> None:
    rows = [each for each in candidates("m.py", SHARED) if each.row is not None]
    places = [(SHARED[each.start : each.end], each.row) for each in rows]
    assert list(dict.fromkeys(places)) == [("2", 0), ("4", 1), ("1", 0), ("3", 1)]
    assert all(each.bases == ("m.py::test_a", "m.py::test_b") for each in rows)
    assert rows[0].changes("m.py::test_b#0") and not rows[0].changes("m.py::test_b#1")


def test_a_method_is_changed_in_all_classes_that_inherit_it() -> None:
    first = "class TestA:\n    def test_x(self):\n        assert f(1)\n    def test_y(self):\n        assert f(2)\n"
    second = "import a.test_a\nclass TestC(TestB):\n    pass\nclass TestB(a.test_a.TestA):\n"
    second += "    def test_y(self):\n        assert f(3)\n"
    found = all_candidates({"a/test_a.py": first, "a/test_b.py": second, "aid.py": "class TestD(TestA): pass\n"})
    x, y, other = [each for each in found if each.telling]
    places = ("a/test_a.py::TestA", "a/test_b.py::TestC", "a/test_b.py::TestB", "aid.py::TestD")
    assert x.bases == tuple(f"{place}::test_x" for place in places)
    assert "a/test_b.py::TestB::test_y" not in y.bases and "a/test_b.py::TestC::test_y" in y.bases
    assert other.bases == ("a/test_b.py::TestB::test_y", "a/test_b.py::TestC::test_y")


def test_a_test_is_changed_in_all_that_call_it() -> None:
    first = "def test_a(x=1):\n    assert f(x)\ndef test_b():\n    test_a(2)\n"
    first += "class TestC:\n    def test_c(self):\n        test_b()\n"
    found = all_candidates({"test_a.py": first, "test_b.py": "import test_a\ndef test_d():\n    test_a.test_a(3)\n"})
    assert {each.bases for each in found} == {
        ("test_a.py::test_a", "test_a.py::test_b", "test_b.py::test_d", "test_a.py::TestC::test_c")
    }


@pytest.mark.parametrize(
    ("before", "weak"),
    [
        ("for x in f(1):", True),
        ("for x in [1, 2]:", False),
        ("for x in W:", False),
        ("while f(1):", True),
        ("if f(1):", True),
        ("with suppress(KeyError):", True),
        ("with pytest.raises(g):", True),
        ("with open('x') as file:", False),
        ("def inner():", True),
    ],
)
def test_what_may_not_be_reached_proves_nothing(before: str, weak: bool) -> None:
    text = f"W = [1]\ndef test_a():\n    {before}\n        assert f(2) == 2\n    assert f(3) == 3\n"
    found = {text[each.start : each.end]: each.weak for each in candidates("test_a.py", text)}
    assert found["2"] == weak and not found["3"]


@pytest.mark.parametrize(
    ("condition", "weak"), [("f(x) == want", False), ("f(want) == want", True), ("f(x) == want and want", True)]
)
def test_a_value_that_is_also_an_input_proves_nothing(condition: str, weak: bool) -> None:
    """Whoever returns the input passes the test and its twin."""
    table = f"@pytest.mark.parametrize('x, want', [('a', 'b')])\ndef test_a(x, want):\n    assert {condition}\n"
    variable = f"def test_a(x):\n    want = 'b'\n    assert {condition}\n"
    for text in (table, variable):
        found = [each for each in candidates("test_a.py", text) if each.kind == "value"]
        assert found and {each.weak for each in found} == {weak}


def test_a_value_that_is_an_input_of_another_test_of_its_table_proves_nothing() -> None:
    text = SHARED.replace("g(x) == want", "g(want) == want")
    found = [each for each in candidates("test_a.py", text) if each.row is not None and each.kind == "value"]
    assert {SHARED[each.start : each.end] for each in found if each.weak} == {"1", "3"}


def test_only_what_pytest_collects_is_changed() -> None:
    text = """\
def helper():
    assert f(1) == 2
class Helper:
    def test_a(self):
        assert f(1) == 2
class TestA:
    def check(self):
        assert f(1) == 2
    def test_in_a(self):
        assert f(1) == 2
class Cases(unittest.TestCase):
    def test_b(self):
        self.assertEqual(f(1), 2)
async def test_c():
    assert f(1) == 2
"""
    bases = [base for each in candidates("d/test_a.py", text) for base in each.bases]
    assert list(dict.fromkeys(bases)) == [
        "d/test_a.py::TestA::test_in_a",
        "d/test_a.py::Cases::test_b",
        "d/test_a.py::test_c",
    ]


def test_places_are_right_beside_letters_of_several_bytes() -> None:
    text = 'é = "ü😀"\n\ndef test_ä():\n    "ß"\n    assert f("ö😀", ñ) == "€5"; assert g() == 1\n'
    for candidate in candidates("test_a.py", text):
        assert text[candidate.start : candidate.end] in ('"€5"', "1")
        assert ast.dump(ast.parse(apply(text, candidate))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_other_line_ends(ends: str) -> None:
    text = 'X = "a"\n\ndef test_a():\n    assert f(1) == 2\n'
    found, plain = candidates("test_a.py", text.replace("\n", ends)), candidates("test_a.py", text)
    assert {each.start for each in found} == {each.start for each in plain} == {text.index("2")}
    assert candidates("test_a.py", "\f" + text) == []


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(PLAIN, st.integers())
def test_another_value_is_another_value(value: Any, seed: int) -> None:
    """Whatever equals the one does not equal the other."""
    text = f"def test_a():\n    assert f() == {value!r}\n"
    if "\f" in text:
        return
    for node in constants(ast.parse(repr(value), mode="eval").body):
        for new in others(node.value, random.Random(seed), Suite(), count=3):
            assert ast.literal_eval(new) != node.value and type(ast.literal_eval(new)) is type(node.value)
    found = candidates("test_a.py", text)
    assert found
    for candidate in found:
        [test] = ast.parse(apply(text, candidate)).body
        assert isinstance(test, ast.FunctionDef) and isinstance(test.body[0], ast.Assert)
        condition = test.body[0].test
        assert isinstance(condition, ast.Compare) and candidate.kind == "value"
        assert ast.literal_eval(condition.comparators[0]) != value
