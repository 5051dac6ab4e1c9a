"""Changes of tests: what is proposed, that it contradicts the test, and that it lands where it should."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.grading.mutate import constants, other, other_exceptions
from composer_nb.harness.grading.plan import Twin, changed_text
from composer_nb.harness.grading.reach import all_candidates
from composer_nb.harness.grading.twins import MAX_BODY, Candidate, candidates


def apply(text: str, candidate: Candidate) -> str:
    twin = Twin(path="", start=candidate.start, end=candidate.end, text=candidate.text, kind=candidate.kind, keys=())
    return changed_text(text, [twin])


def changed(text: str) -> list[str]:
    """Texts of a test's changes, without its first line."""
    return [apply(text, candidate).partition("\n")[2].strip() for candidate in candidates("test_a.py", text)]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("assert f(1) == True", r"assert f\(1\) == False"),
        ("assert f(1) == 7", r"assert f\(1\) == (4|5|6|8|9|10)"),
        ("assert 7 == f(1)", r"assert (4|5|6|8|9|10) == f\(1\)"),
        ("assert f(1) == -7", r"assert f\(1\) == -(4|5|6|8|9|10)"),
        ("assert f(1) == 'abc'", r"assert f\(1\) == '([^a]bc|a[^b]c|ab[^c])'"),
        ("assert f(1) == b'a'", r"assert f\(1\) == b'[^a]'"),
        ("assert f(1) == ''", r"assert f\(1\) == ('x'|None)"),
        ("assert f(1) == None", r"assert f\(1\) == (0|1|''|False)"),
        ("assert f(1) == []", r"assert f\(1\) == \[[1-9]\]"),
        ("assert f(1) == {}", r"assert f\(1\) == \{'[abcnkx]': [1-9]\}"),
        ("assert f(1) == [1, (True,)]", r"assert f\(1\) == \[(1, \(False,\)|[^1], \(True,\))\]"),
        ("assert f(1) == {'k': 'v'}", r"assert f\(1\) == \{'k': '[^v]'\}"),
        ("assert f(1) == pytest.approx(0.5, rel=1e-3)", r"assert f\(1\) == pytest.approx\((1.5|2.0|2.5), rel=1e-3\)"),
        ("assert f(1) == g(2)", r"assert \(\(f\(1\)\) == \[g\(2\)\] or \[f\(1\)\] == \(g\(2\)\)\)"),
        ("assert f(1) == self.x", r"assert \(\(f\(1\)\) == \[self.x\] or \[f\(1\)\] == \(self.x\)\)"),
        ("self.assertEqual(x, y.z)", r"self.assertTrue\(\(x\) == \[y.z\] or \[x\] == \(y.z\)\)"),
        ("assert f(1) == sorted('ab')", r"assert f\(1\) == \[sorted\('ab'\)\]"),
        ("assert f(1) == f'{9}'", r"assert f\(1\) == \[f'\{9\}'\]"),
        ("assert 5 == rows[0]", r"assert [1-8] == rows\[0\]"),
        ("assert 'a' == open('b').read()", r"assert '[^a]' == open\('b'\).read\(\)"),
        ("assert f('a') in ('a', 'b')", r"assert f\('a'\) not in \('a', 'b'\)"),
        ("assert f(1) != 3", r"assert f\(1\) == 3"),
        ("assert f(1) is None", r"assert f\(1\) is not None"),
        ("assert f(1) is not None", r"assert f\(1\) is None"),
        ("assert f(1) not  in g", r"assert f\(1\) in g"),
        ("assert f(1) in (1, 2)", r"assert f\(1\) not in \(1, 2\)"),
        ("assert 'abc' in f(1)", r"assert 'abc[a-z]{5,6}' in f\(1\)"),
        ("assert 'a long text' in f(1)", r"assert '(?!a long text).{11}' in f\(1\)"),
        ("assert f(1) < 3", r"assert f\(1\) >= 3"),
        ("assert f(1) >= g(3)", r"assert f\(1\) < g\(3\)"),
        ("assert f(1)", r"assert \(not \(f\(1\)\)\)"),
        ("assert not f(1)", r"assert \(f\(1\)\)"),
        ("assert f(1) or g(1)", r"assert \(not \(f\(1\) or g\(1\)\)\)"),
        ("assert 1 < f(1) < 3", r"assert \(not \(1 < f\(1\) < 3\)\)"),
        ("assert f(1) == 7, 'told'", r"assert f\(1\) == (4|5|6|8|9|10), 'told'"),
        ("self.assertEqual(f(1), 7)", r"self.assertEqual\(f\(1\), (4|5|6|8|9|10)\)"),
        ("self.assertTrue(f(1))", r"self.assertFalse\(f\(1\)\)"),
        ("self.assertTrue(f(1) == 7)", r"self.assertTrue\(f\(1\) == (4|5|6|8|9|10)\)"),
        ("self.assertIsNone(f(1))", r"self.assertIsNotNone\(f\(1\)\)"),
        ("self.assertIn(1, f(1))", r"self.assertNotIn\(1, f\(1\)\)"),
    ],
)
def test_one_assertion(line: str, wanted: str) -> None:
    [found] = changed(f"def test_a():\n    {line}\n")
    assert re.fullmatch(wanted, found), found
    assert found != line


def test_both_parts_of_a_conjunction_are_changed() -> None:
    assert sorted(changed("def test_a():\n    assert f(1) is None and not g(1)\n")) == [
        "assert f(1) is None and (g(1))",
        "assert f(1) is not None and not g(1)",
    ]


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
        found = other_exceptions(node, random.Random(seed))
        assert len(found) == 2 and not unfit & set(found)
    assert other_exceptions(ast.parse("Exception", mode="eval").body, random.Random(0)) == []


def test_expected_exceptions() -> None:
    found = changed("def test_a():\n    with pytest.raises(ValueError, match='x'):\n        f(1)\n")
    assert len(found) == 2 and all("raises(ValueError" not in text and ", match='x')" in text for text in found)


def test_a_variable_is_changed_where_it_gets_its_value() -> None:
    literal, inline = changed("def test_a():\n    want = 'a b'\n    assert f(1) == want\n")
    assert literal.startswith("want = '") and "want = 'a b'" not in literal and literal.endswith("== want")
    assert inline == "want = 'a b'\n    assert f(1) == [want]"
    other, inline = changed("def test_a():\n    want = 5\n    got = f(1)\n    assert want == got\n")
    assert re.fullmatch(r"want = [^5]\n    got = f\(1\)\n    assert want == got", other)
    assert inline == "want = 5\n    got = f(1)\n    assert [want] == got"
    [computed] = changed("def test_a():\n    want = g(2)\n    assert f(1) == want\n")
    assert computed == "want = g(2)\n    assert ((f(1)) == [want] or [f(1)] == (want))"


@pytest.mark.parametrize(
    ("before", "equation", "changed_side"),
    [
        ("for x, want in [(1, 2)]:", "want == f(x)", "[want] == f(x)"),
        ("if x := f(1):", "x == W", "x == [W]"),
        ("with g() as want:", "want == f(1)", "((want) == [f(1)] or [want] == (f(1)))"),
        ("for want in g():", "f(1) == want", "((f(1)) == [want] or [f(1)] == (want))"),
        ("for V in f(1):", "V == W", "V == [W]"),
        ("for _ in [1]:", "V == W", "((V) == [W] or [V] == (W))"),
    ],
)
def test_which_side_is_the_answer(before: str, equation: str, changed_side: str) -> None:
    [found] = changed(f"V = 5\nW = 5\ndef test_a():\n    {before}\n        assert {equation}\n")
    assert found.endswith(f"assert {changed_side}")


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
    rows = [(each.bases[0][-6:], each.row, TABLE[each.start : each.end]) for each in found if each.row is not None]
    assert [(base, row) for base, row, _ in rows] == [
        ("test_a", 0), ("test_a", 1), ("test_a", 2), ("test_c", 0), ("test_c", 1)
    ]  # fmt: skip
    assert [text for _, _, text in rows] == ["1", "2", "1", "ValueError", "KeyError"]
    whole = {each.bases[0][-6:]: each.kind for each in found if each.row is None}
    assert whole == {"test_a": "negation", "test_b": "negation", "test_d": "value"}


def test_no_row_becomes_one_that_the_table_has() -> None:
    """pytest would give both other ids."""
    table = "T = [{}]\n@pytest.mark.parametrize('x, want', T)\ndef test_a(x, want): assert f(x) == want\n"
    text = table.format(", ".join(f"(1, {value})" for value in range(90)))
    rows = {text[each.start : each.end]: each.text for each in candidates("m.py", text) if each.row is not None}
    assert rows and not {row for row in rows.values() if row.isdigit() and int(row) < 90}


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
    assert [(SHARED[each.start : each.end], each.row) for each in rows] == [("2", 0), ("4", 1), ("1", 0), ("3", 1)]
    assert all(each.bases == ("m.py::test_a", "m.py::test_b") for each in rows)
    assert rows[0].changes("m.py::test_b#0") and not rows[0].changes("m.py::test_b#1")


def test_a_table_that_is_read_elsewhere_is_left_alone() -> None:
    text = SHARED + "def test_c():\n    assert len(T) == 2\n"
    assert [each.row for each in candidates("m.py", text)] == [None] * 3


def test_a_method_is_changed_in_all_classes_that_inherit_it() -> None:
    first = "class TestA:\n    def test_x(self):\n        assert f(1)\n    def test_y(self):\n        assert f(2)\n"
    second = "import a.test_a\nclass TestC(TestB):\n    pass\nclass TestB(a.test_a.TestA):\n"
    second += "    def test_y(self):\n        assert f(3)\n"
    x, y, other = all_candidates({"a/test_a.py": first, "a/test_b.py": second, "aid.py": "class TestD(TestA): pass\n"})
    places = ("a/test_a.py::TestA", "a/test_b.py::TestC", "a/test_b.py::TestB", "aid.py::TestD")
    assert x.bases == tuple(f"{place}::test_x" for place in places)
    assert "a/test_b.py::TestB::test_y" not in y.bases and "a/test_b.py::TestC::test_y" in y.bases
    assert other.bases == ("a/test_b.py::TestB::test_y", "a/test_b.py::TestC::test_y")


def test_a_test_is_changed_in_all_that_call_it() -> None:
    first = "def test_a(x=1):\n    assert f(x)\ndef test_b():\n    test_a(2)\n"
    first += "class TestC:\n    def test_c(self):\n        test_b()\n"
    found = all_candidates({"test_a.py": first, "test_b.py": "import test_a\ndef test_d():\n    test_a.test_a(3)\n"})
    assert [each.bases for each in found] == [
        ("test_a.py::test_a", "test_a.py::test_b", "test_b.py::test_d", "test_a.py::TestC::test_c")
    ]


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
    assert bases == ["d/test_a.py::TestA::test_in_a", "d/test_a.py::Cases::test_b", "d/test_a.py::test_c"]


def test_one_test_has_so_many_changes_at_most() -> None:
    text = "def test_a():\n" + "".join(f"    assert f({n}) == {n}\n" for n in range(20))
    assert len(candidates("test_a.py", text)) == MAX_BODY


def test_places_are_right_beside_letters_of_several_bytes() -> None:
    text = 'é = "ü😀"\n\ndef test_ä():\n    "ß"\n    assert f("ö😀", ñ) == "€5"; assert g() == 1\n'
    for candidate in candidates("test_a.py", text):
        assert text[candidate.start : candidate.end] in ('"€5"', "1")
        assert ast.dump(ast.parse(apply(text, candidate))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("ends", ["\r\n", "\r"])
def test_other_line_ends(ends: str) -> None:
    text = 'X = "a"\n\ndef test_a():\n    assert f(1) == 2\n'
    [found], [plain] = candidates("test_a.py", text.replace("\n", ends)), candidates("test_a.py", text)
    assert found.start == plain.start and text[found.start : found.end] == "2"
    assert candidates("test_a.py", "\f" + text) == []


def test_exceptions_of_the_project_become_others_of_the_project() -> None:
    text = (
        "from shop import LostError, Refused, rest\ndef test_a():\n    with pytest.raises(LostError):\n        f(1)\n"
    )
    text += "def test_b():\n    with pytest.raises(Refused):\n        f(2)\n"
    assert [each.text for each in candidates("test_a.py", text)] == ["Refused", "LostError"]
    builtin = [each.text for each in candidates("test_a.py", text.replace("(Refused)", "(ValueError)"))]
    assert not {"LostError", "Refused"} & set(builtin) and len(builtin) == 4, "one of Python's becomes one of Python's"


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
        if (new := other(node, random.Random(seed))) is not None:
            assert ast.literal_eval(new) != ast.literal_eval(node)
    for candidate in candidates("test_a.py", text):
        [test] = ast.parse(apply(text, candidate)).body
        assert isinstance(test, ast.FunctionDef) and isinstance(test.body[0], ast.Assert)
        condition = test.body[0].test
        assert isinstance(condition, ast.Compare) and candidate.kind == "value"
        assert ast.literal_eval(condition.comparators[0]) != value


@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_changes_do_not_touch_anything_else(values: list[Any]) -> None:
    text = "".join(f"def test_{n}():\n    assert f() == {value!r}\n" for n, value in enumerate(values))
    if "\f" in text:
        return
    found = candidates("test_a.py", text)
    assert {base for candidate in found for base in candidate.bases} == {
        f"test_a.py::test_{n}" for n in range(len(values))
    }
    before, after = ast.parse(text).body, ast.parse(apply(text, found[0])).body
    assert [ast.dump(one) == ast.dump(two) for one, two in zip(before, after, strict=True)] == [
        n > 0 for n in range(len(values))
    ]
