"""Replacing and finding lines, against plain string operations."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer_nb.harness.tools.edits import Lines, matches, replace
from composer_nb.harness.tools.tool_call import ToolError

SMALL = st.text(alphabet="ab \n\t\r", max_size=30)
CODE = st.lists(st.sampled_from(["a = 1", "if a:", "    b()", "", "  c", "return a", "\td"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(SMALL)
def test_lines_are_the_text(text: str) -> None:
    document = Lines.of(text)
    assert document.with_plain(document.plain) == text
    assert document.plain == (text.replace("\r\n", "\n") if document.returns else text)


@settings(max_examples=40, deadline=None)
@given(SMALL, st.text(alphabet="ab \n", min_size=1, max_size=4), st.text(alphabet="abc \n", max_size=4), st.booleans())
def test_an_exact_replacement_is_the_strings_own(text: str, old: str, new: str, every: bool) -> None:
    assume("\r" not in text)
    if old == new or text.count(old) == 0 or (text.count(old) > 1 and not every):
        with pytest.raises(ToolError) as error:
            replace(text, old, new, every, strict=True)
        assert error.value.kind == "InvalidArguments"
        return
    changed, numbers = replace(text, old, new, every, strict=True)
    assert changed == text.replace(old, new)
    assert len(numbers) == text.count(old) and numbers[0] == text[: text.index(old)].count("\n") + 1
    assert replace(text, old, new, every, strict=False) == (changed, numbers)


@settings(max_examples=40, deadline=None)
@given(CODE, st.data())
def test_newlines_stay_what_they_are(code: list[str], data: st.DataObject) -> None:
    text = "\n".join(code) + "\n"
    old = data.draw(st.sampled_from(code))
    assume(old and text.count(old) == 1 and text.count("\n") > 1)
    changed, _ = replace(text, old, "x\ny", False, strict=True)
    assert replace(text.replace("\n", "\r\n"), old, "x\ny", False, strict=True)[0] == changed.replace("\n", "\r\n")


@settings(max_examples=40, deadline=None)
@given(CODE, st.sampled_from(["    ", "\t", "  "]), st.data())
def test_lenient_finds_lines_under_another_indentation(code: list[str], indent: str, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(code) - 1))
    piece = code[first : data.draw(st.integers(first + 1, len(code)))]
    assume(piece[0].strip() and piece[-1].strip())
    text = "begin\n" + textwrap.indent("\n".join(code), indent) + "\nend\n"
    deep = textwrap.indent("\n".join(piece), indent)
    assume(len(matches(text.split("\n"), deep.split("\n"), 0, True)) == 1 and "\n".join(piece) not in text)
    found = matches(text.split("\n"), piece, 0, False)
    assume(len(found) == 1)
    changed, _ = replace(text, "\n".join(piece), "new:\n    line\n\nend", False, strict=False)
    want = textwrap.indent("new:\n    line\n\nend", indent)
    before, _, after = text.partition(deep + "\n")
    assert changed == f"{before}{want}\n{after}"
    with pytest.raises(ToolError):
        replace(text, "\n".join(piece), "x", False, strict=True)


@pytest.mark.parametrize(
    ("text", "old", "new", "result"),
    [
        ("a  \nb\n", "a\nb\n", "c\n", "c\n"),  # white space at the ends of lines
        ("  a\n  b\n", "    a\n    b", "    c\n      d", "  c\n    d\n"),  # too deep
        ("x\n  a\n\n  b\n", "a\n\nb", "c", "x\n  c\n"),  # an empty line is no indentation
        ("  a\ny\n", "\ta\n", "", "y\n"),
    ],
)
def test_lenient_by_hand(text: str, old: str, new: str, result: str) -> None:
    if old != "\ta\n":
        assert replace(text, old, new, False, strict=False)[0] == result
    else:  # a tab is not two spaces: nobody knows what was meant by it
        with pytest.raises(ToolError):
            replace(text, old, new, False, strict=False)


def test_lenient_is_unique_too() -> None:
    with pytest.raises(ToolError, match="2 times"):
        replace("  a\n  b\nx\n    a\n    b\n", "a\nb\n", "c\n", False, strict=False)
    assert replace("  a\n  b\nx\n    a\n    b\n", "a\nb\n", "c\n", True, strict=False)[0] == "  c\nx\n    c\n"


def test_who_looks_for_what_is_not_there_is_told_where_it_begins() -> None:
    with pytest.raises(ToolError, match="its first line is line 2"):
        replace("x\n  a\n  b\n", "a\nc", "d", False, strict=True)


@pytest.mark.parametrize("old", ["x\n" * 200_000 + "y", " x\n" * 1000 + "y", "\n" * 300_000 + "y", "x"])
def test_repetition_costs_no_more_than_length(old: str) -> None:
    """A quadratic search would take hours."""
    text = "x\n" * 300_000
    with pytest.raises(ToolError):
        replace(text, old, "z", False, strict=False)
