"""Tests as plain functions: what is written is what is read, and nothing else is accepted."""

import ast
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.sandbox.requests import CallRequest, value_text
from composer_nb.harness.tasks.functions import literal, parse_tests, render_tests

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["it's", '"', "'\"\\", "a\nb", "inf", "nan", "information", "\x00", "\u2028", "<|end|>"])
    | st.binary(max_size=6)
)
VALUES = st.recursive(
    SCALARS | st.sets(st.integers() | st.text(max_size=4), max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
CASES = st.lists(st.tuples(st.lists(VALUES, max_size=3).map(tuple), VALUES), min_size=1, max_size=4)
GOOD = "from f import f\n\n\ndef test_0():\n    assert f([3, 1], 4) == 7\n"


@settings(max_examples=100)
@given(cases=CASES)
def test_rendered_cases_are_parsed_to_the_same_values(cases: list[tuple[tuple[Any, ...], Any]]) -> None:
    tests = parse_tests("test_f.py", render_tests("pkg.mod", "g", cases))
    assert [test.id for test in tests] == [f"test_f.py::test_{n}" for n in range(len(cases))]
    assert {(test.module, test.function) for test in tests} == {("pkg.mod", "g")}
    for test, (arguments, expected) in zip(tests, cases, strict=True):
        assert value_text(ast.literal_eval(test.arguments)) == value_text(arguments)
        assert test.expected == value_text(expected)
    CallRequest(files={}, module="pkg.mod", function="g", arguments=tuple(test.arguments for test in tests))


def test_a_set_has_one_text_whatever_the_order_of_its_hashes() -> None:
    source = "from f import f\n\n\ndef test_0():\n    assert f({'b', 'a', 'c'}) == {3, 20, 1}\n"
    [test] = parse_tests("t.py", source)
    assert (test.arguments, test.expected) == ("({'a', 'b', 'c'},)", "{1, 20, 3}")


def test_a_value_without_a_literal_is_refused_but_infinity_may_be_wanted() -> None:
    for value in (float("inf"), float("nan"), [1, (float("inf"),)], object(), 1j, [...]):
        for write in (
            literal,
            lambda v: render_tests("f", "f", [((v,), 1)]),
            lambda v: render_tests("f", "f", [((), v)]),
        ):
            with pytest.raises(ValueError, match="no literal|not plain data"):
                write(value)
    assert parse_tests("t.py", GOOD.replace("7", "1e999"))[0].expected == "inf"
    with pytest.raises(ValueError, match=r"t\.py:4: test_0: arguments and value must be literals"):
        parse_tests("t.py", GOOD.replace("4)", "1e999)"))


def body(text: str) -> str:
    return "from f import f\n\n\n" + text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (body("class T:\n    pass\n"), r"t\.py:4: only imports and functions named test"),
        ("import f\n", r"t\.py:1: only imports"),
        (body("@skip\ndef test_a():\n    assert f(1) == 1\n"), "no decorators and no parameters"),
        (body("def test_a():\n    assert f(1) == 1\n    assert f(2) == 2\n"), "needs one line"),
        (body("def test_a():\n    assert 1 == f(1)\n"), "needs one line"),
        (body("def test_a():\n    assert f.g(1) == 1\n"), "call an imported function by its plain name"),
        ("from f import *\n\n\ndef test_a():\n    assert f(1) == 1\n", "call an imported function by its plain name"),
        (body("def test_a():\n    assert f({[]: 1}) == 1\n"), "must be literals"),
        (body("def test_a():\n    assert f(1) == 1\n\n\ndef test_a():\n    assert f(2) == 2\n"), "share a name"),
        ("from f import test_a\n\n\ndef test_a():\n    assert test_a(1) == 1\n", "share a name"),
        ("def test_a(:\n", r"t\.py:1: not Python"),
        ("x = '\0'\n", r"t\.py.*: not Python"),
        ("x = " + "(" * 300 + ")" * 300 + "\n", "not Python"),
        ("x = " + "9" * 5000 + "\n", r"t\.py.*: "),
    ],
)
def test_anything_else_is_refused(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests("t.py", source)
