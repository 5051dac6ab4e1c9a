"""Patches, against texts compared by difflib."""

import difflib
import time
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from composer_nb.harness.tools.edits import replace
from composer_nb.harness.tools.patch import BEGIN, END, added, parse, updated
from composer_nb.harness.tools.tool_call import ToolError


def begin_patch(old: Sequence[str], new: Sequence[str], context: int) -> str:
    lines = [BEGIN, "*** Update File: f"]
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        lines.append("@@")
        for kind, a, b, c, d in group:
            lines += [f" {line}" for line in old[a:b]] if kind == "equal" else [f"-{line}" for line in old[a:b]]
            lines += [] if kind == "equal" else [f"+{line}" for line in new[c:d]]
    return "\n".join([*lines, END])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 60).map(str), unique=True, min_size=2, max_size=40), st.data())
def test_begin_patch_makes_the_new_text(old: list[str], data: st.DataObject) -> None:
    """Each line occurs once, so that each hunk fits in one place."""
    new = list(old)
    for _ in range(data.draw(st.integers(1, 5))):
        start = data.draw(st.integers(0, len(new) - 1))
        new[start : start + data.draw(st.integers(0, 1))] = data.draw(st.lists(st.sampled_from("xyz"), max_size=2))
        if len(new) < 2:
            return
    if old == new:
        return
    [change] = parse(begin_patch(old, new, 2))
    assert updated(change, "\n".join(old) + "\n") == "\n".join(new) + "\n"
    crlf = updated(change, "\r\n".join(old) + "\r\n")
    assert crlf == "\r\n".join(new) + "\r\n"


PYTHON = "class A:\n    def f(self):\n        return 1\n\n\nclass B:\n    def f(self):\n        return 1\n"


def begin(*lines: str) -> str:
    return "\n".join([BEGIN, *lines, END])


def test_lines_to_look_for_first_and_the_end_of_a_file() -> None:
    body = ("@@ class B:", "@@     def f(self):", "-        return 1", "+        return 2")
    [change] = parse(begin("*** Update File: a.py", *body))
    assert updated(change, PYTHON) == PYTHON[: PYTHON.rindex("1")] + "2\n"
    [change] = parse(begin("*** Update File: a.py", "@@", "-        return 1", "+        return 3", "*** End of File"))
    assert updated(change, PYTHON) == PYTHON[: PYTHON.rindex("1")] + "3\n"
    [change] = parse(begin("*** Update File: a.py", "@@ class B:", "+    x = 1"))
    assert updated(change, PYTHON) == PYTHON.replace("class B:\n", "class B:\n    x = 1\n")


def test_several_files_and_a_move() -> None:
    files = ("*** Add File: n", "+1", "+", "*** Delete File: d", "*** Update File: u", "*** Move to: v", "-a", "+b")
    changes = parse(begin(*files))
    facts = [(change.kind, change.path, change.to) for change in changes]
    assert facts == [("add", "n", None), ("delete", "d", None), ("update", "u", "v")]
    assert added(changes[0]) == "1\n\n" and updated(changes[2], "a\n") == "b\n"


@pytest.mark.parametrize(
    "patch",
    [
        "", "x", begin(), BEGIN, begin("+a"), begin("*** Update File: a"), begin("*** Add File: a", "b"),
        begin("*** Update File: a", "@@", "x"), begin("*** Add File: a", "+b", "*** Delete File: a"),
        begin(*["*** Update File: a", *["@@ x"] * 600, "+1"]),
        begin("*** Add File: a", "+b").replace("\n+b", "\n+b\n*** End Patch"),
    ],
)  # fmt: skip
def test_what_is_no_patch_is_told_so(patch: str) -> None:
    with pytest.raises(ToolError) as error:
        parse(patch)
    assert error.value.kind == "InvalidArguments" and "\n" not in str(error.value)


@settings(max_examples=40, deadline=None)
@given(
    st.text(alphabet="*@ -+\\ab\n,1", max_size=60),
    st.sampled_from([BEGIN + "\n*** Update File: a\n", BEGIN + "\n", ""]),
)
def test_nothing_but_tool_errors(text: str, head: str) -> None:
    try:
        for change in parse(head + text):
            updated(change, "a\nb\n\na\n") if change.kind == "update" else added(change)
    except ToolError as error:
        assert error.kind == "InvalidArguments"


# Replacing and finding lines, against plain string operations.

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


@pytest.mark.parametrize("old", ["x\n" * 200_000 + "y", " x\n" * 1000 + "y", "\n" * 300_000 + "y", "x"])
def test_repetition_costs_no_more_than_length(old: str) -> None:
    """A quadratic search would take hours."""
    text = "x\n" * 300_000
    with pytest.raises(ToolError):
        replace(text, old, "z", False)


def test_a_replacement_of_very_many_places_neither_fills_the_memory_nor_takes_long() -> None:
    with pytest.raises(ToolError, match="more than 2097152 characters"):
        replace("a" * (1 << 20), "a", "b" * 100_000, True)
    began = time.process_time()
    changed, numbers = replace("a\n" * (1 << 19), "a", "b", True)
    assert (changed[:4], numbers[0], numbers[-1]) == ("b\nb\n", 1, 1 << 19)
    assert time.process_time() - began < 5


def test_a_patch_of_many_hunks_for_very_many_lines_is_refused() -> None:
    """Each hunk searches the file anew: 500 would take 40 s in two million lines."""
    hunks = "\n".join(["@@\n \n+x"] * 500)
    [change] = parse(f"{BEGIN}\n*** Update File: f\n{hunks}\n{END}")
    assert updated(change, "\n" * 1000).count("x") == 500
    with pytest.raises(ToolError, match="too many hunks for a file of 2097152 lines"):
        updated(change, "\n" * (1 << 21))
