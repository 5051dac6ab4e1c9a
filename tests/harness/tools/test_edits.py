"""Replacing and finding lines, against plain string operations."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer_nb.harness.tools.edits import replace
from composer_nb.harness.tools.tool_call import ToolError

SMALL = st.text(alphabet="ab \n\t\r", max_size=30)
CODE = st.lists(st.sampled_from(["a = 1", "if a:", "    b()", "", "  c", "return a", "\td"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(SMALL, st.text(alphabet="ab \n", min_size=1, max_size=4), st.text(alphabet="abc \n", max_size=4), st.booleans())
def test_an_exact_replacement_is_the_strings_own(text: str, old: str, new: str, every: bool) -> None:
    assume("\r" not in text)
    if old == new or text.count(old) == 0 or (text.count(old) > 1 and not every):
        with pytest.raises(ToolError) as error:
            replace(text, old, new, every)
        assert error.value.kind == "InvalidArguments"
        return
    changed, numbers = replace(text, old, new, every)
    assert changed == text.replace(old, new)
    assert len(numbers) == text.count(old) and numbers[0] == text[: text.index(old)].count("\n") + 1


@settings(max_examples=40, deadline=None)
@given(CODE, st.data())
def test_newlines_stay_what_they_are(code: list[str], data: st.DataObject) -> None:
    text = "\n".join(code) + "\n"
    old = data.draw(st.sampled_from(code))
    assume(old and text.count(old) == 1 and text.count("\n") > 1)
    changed, _ = replace(text, old, "x\ny", False)
    assert replace(text.replace("\n", "\r\n"), old, "x\ny", False)[0] == changed.replace("\n", "\r\n")


def test_who_looks_for_what_is_not_there_is_told_where_it_begins() -> None:
    with pytest.raises(ToolError, match="its first line is line 2"):
        replace("x\n  a\n  b\n", "a\nc", "d", False)


@pytest.mark.parametrize("old", ["x\n" * 200_000 + "y", " x\n" * 1000 + "y", "\n" * 300_000 + "y", "x"])
def test_repetition_costs_no_more_than_length(old: str) -> None:
    """A quadratic search would take hours."""
    text = "x\n" * 300_000
    with pytest.raises(ToolError):
        replace(text, old, "z", False)
