"""Patches, against git and against texts taken apart by difflib."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.cursor.patch import BEGIN, END, added, parse, updated
from composer_nb.harness.tools import ToolError

TEXT = st.text(alphabet="ab\n", max_size=25)


def git_diff(folder: Path, old: str | None, new: str | None) -> str:
    """What git says of two texts; None is no file."""
    for name, text in (("old", old), ("new", new)):
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_bytes(text.encode())
    names = ["/dev/null" if text is None else name for name, text in (("old", old), ("new", new))]
    command = ["git", "diff", "--no-index", "--no-color", "--", *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.replace("b/new", "b/old")


@settings(max_examples=40, deadline=None)
@given(TEXT, TEXT)
def test_what_git_writes_is_applied_as_git_means_it(
    tmp_path_factory: pytest.TempPathFactory, old: str, new: str
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    patch = git_diff(folder, old, new)
    if old == new:
        assert patch == ""
        return
    [change] = parse(patch, strict=True)
    assert (change.kind, change.path, change.to) == ("update", "old", None)
    assert updated(change, old, strict=True) == new
    assert updated(change, old, strict=False) == new


def test_files_that_come_and_go(tmp_path: Path) -> None:
    [change] = parse(git_diff(tmp_path, None, "a\nb"), strict=True)
    assert (change.kind, added(change)) == ("add", "a\nb")
    [change] = parse(git_diff(tmp_path, "a\nb\n", None), strict=True)
    assert (change.kind, change.path) == ("delete", "old")


def test_a_rename_of_git() -> None:
    text = "diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n"
    [change] = parse(text, strict=True)
    assert (change.path, change.to, updated(change, "a\n", True)) == ("x", "y", "a\n")
    [change] = parse(text + "--- a/x\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", strict=True)
    assert (change.path, change.to, updated(change, "a\n", True)) == ("x", "y", "b\n")


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
    """With lines that are there once, so that there is one place for each hunk."""
    new = list(old)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(new) - 1))
        new[place : place + data.draw(st.integers(0, 1))] = data.draw(st.lists(st.sampled_from("xyz"), max_size=2))
        if len(new) < 2:
            return
    if old == new:
        return
    [change] = parse(begin_patch(old, new, 2), strict=True)
    assert updated(change, "\n".join(old) + "\n", strict=True) == "\n".join(new) + "\n"
    crlf = updated(change, "\r\n".join(old) + "\r\n", strict=True)
    assert crlf == "\r\n".join(new) + "\r\n"


PYTHON = "class A:\n    def f(self):\n        return 1\n\n\nclass B:\n    def f(self):\n        return 1\n"


def begin(*lines: str) -> str:
    return "\n".join([BEGIN, *lines, END])


def test_an_empty_line_of_context_may_come_last() -> None:
    [change] = parse("--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n+a\n \n", strict=True)
    assert updated(change, "\n", True) == "a\n\n"


def test_lines_to_look_for_first_and_the_end_of_a_file() -> None:
    body = ("@@ class B:", "@@     def f(self):", "-        return 1", "+        return 2")
    [change] = parse(begin("*** Update File: a.py", *body), strict=True)
    assert updated(change, PYTHON, True) == PYTHON[: PYTHON.rindex("1")] + "2\n"
    [change] = parse(
        begin("*** Update File: a.py", "@@", "-        return 1", "+        return 3", "*** End of File"), True
    )
    assert updated(change, PYTHON, True) == PYTHON[: PYTHON.rindex("1")] + "3\n"
    [change] = parse(begin("*** Update File: a.py", "@@ class B:", "+    x = 1"), True)
    assert updated(change, PYTHON, True) == PYTHON.replace("class B:\n", "class B:\n    x = 1\n")


def test_several_files_and_a_move() -> None:
    changes = parse(
        begin("*** Add File: n", "+1", "+", "*** Delete File: d", "*** Update File: u", "*** Move to: v", "-a", "+b"),
        True,
    )
    assert [(change.kind, change.path, change.to) for change in changes] == [
        ("add", "n", None), ("delete", "d", None), ("update", "u", "v"),
    ]  # fmt: skip
    assert added(changes[0]) == "1\n\n" and updated(changes[2], "a\n", True) == "b\n"


def test_lenient_takes_what_stands_around_and_wrong_lengths() -> None:
    patch = (
        "apply_patch <<'EOF'\n"
        + begin("*** Update File: a.py", "@@", " class B:", "-  def f(self):", "+  def g(self):")
        + "\nEOF"
    )
    [change] = parse(patch, strict=False)
    assert change.path == "a.py" and len(change.hunks) == 1
    diff = "```diff\n--- a/a.py\n+++ b/a.py\n@@ -1,9 +1,7 @@\n class A:\n-def f(self):\n+def g(self):\n         return 1\n```"
    [change] = parse(diff, strict=False)
    with pytest.raises(ToolError):  # the indentation is not one and the same for all lines
        updated(change, PYTHON, strict=False)
    [change] = parse(diff.replace("def", "    def"), strict=False)
    assert updated(change, PYTHON, strict=False) == PYTHON.replace("def f", "def g", 1)
    for text in (patch, diff):
        with pytest.raises(ToolError):
            parse(text, strict=True)


@pytest.mark.parametrize(
    "patch",
    [
        "", "x", begin(), BEGIN, begin("+a"), begin("*** Update File: a"), begin("*** Add File: a", "b"),
        begin("*** Update File: a", "@@", "x"), begin("*** Add File: a", "+b", "*** Delete File: a"),
        "--- a\n+++ b", "@@ -1 +1 @@\n-a\n+b\n", "--- a/x\n+++ b/x\n@@ -1,3 +1 @@\n-a\n+b\n",
        "--- a\n+++ a\n", "--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n",
        begin(*["*** Update File: a", *["@@ x"] * 600, "+1"]),
        begin("*** Add File: a", "+b").replace("\n+b", "\n+b\n*** End Patch"),
    ],
)  # fmt: skip
def test_what_is_no_patch_is_told_so(patch: str) -> None:
    with pytest.raises(ToolError) as error:
        parse(patch, strict=True)
    assert error.value.kind == "InvalidArguments" and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "told"),
    [(("@@ nowhere", "+x"), "no line 'nowhere'"), (("@@", "-zz", "+x"), "from 'zz', are not there")],
)
def test_old_lines_that_are_not_there(lines: tuple[str, ...], told: str) -> None:
    [change] = parse(begin("*** Update File: a.py", *lines), True)
    with pytest.raises(ToolError, match=told):
        updated(change, PYTHON, True)


@settings(max_examples=40, deadline=None)
@given(
    st.text(alphabet="*@ -+\\ab\n,1", max_size=60),
    st.sampled_from([BEGIN + "\n*** Update File: a\n", "--- a\n+++ a\n", ""]),
)
def test_nothing_but_tool_errors(text: str, head: str) -> None:
    for strict in (True, False):
        try:
            for change in parse(head + text, strict):
                updated(change, "a\nb\n\na\n", strict) if change.kind == "update" else added(change)
        except ToolError as error:
            assert error.kind == "InvalidArguments"
