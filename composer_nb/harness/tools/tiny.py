"""The tools of tiny models: search, read, edit a line or a part of a file, undo, run the visible tests, finish.

They work in any `ToolTarget`. In a workspace of plain files, code is executed on copies, in sandboxes that all rollouts share.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from composer_nb.harness.sandbox.contract import CallLimits
from composer_nb.harness.sandbox.requests import CallOutcome, Executor
from composer_nb.harness.syntax import lints
from composer_nb.harness.tasks.functions import FunctionTest, parse_test_files, passes, request_tests
from composer_nb.harness.tools.arguments import CONTROLS, tool
from composer_nb.harness.tools.tool_call import ToolError, invalid

HISTORY = ".composer_nb/history.txt"
"""File of a workspace with the whole conversation before the last summary. Grading ignores it."""
FOUND = 8
"""Lines that a search shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer of a tool."""

    text: str
    tests_passed: int | None = None
    """Visible tests passed, if the tool ran them."""
    tests_run: int | None = None


@dataclass(slots=True)
class Edits:
    """The line edits of an agent: what `undo` restores, and what the tests have refused."""

    before: dict[str, str] = field(default_factory=dict)
    """Texts of the edited files at the start."""
    now: dict[str, str] = field(default_factory=dict)
    refused: set[frozenset[tuple[str, str]]] = field(default_factory=set)
    """Edited texts that failed the visible tests."""


class ToolTarget(Protocol):
    """The place where these tools work: a `Workspace` or a `session.Session`.

    Raises OSError for a file that cannot be read or written, and ToolError where there are no tests to run."""

    edits: Edits

    def text(self, path: str) -> str: ...

    def store(self, path: str, text: str) -> None: ...

    def run_visible_tests(self) -> Observation: ...

    def find(self, text: str) -> list[tuple[str, int, str]]:
        """Return path, number and text of each line that holds `text`."""
        ...


@dataclass(slots=True, kw_only=True)
class Workspace:
    """The files of one rollout. Code runs on copies of it in fresh sandboxes, so only tools change it."""

    files: dict[str, str]
    visible_tests: Mapping[str, str]
    """The tests at the start: edits of them do not change what `run_tests` runs."""
    sandboxes: Executor
    own_tests: frozenset[str] = frozenset()
    """Test files that the agent is asked to write: they are run as they are."""
    limits: CallLimits | None = None
    """Limits of calls that the task states."""
    edits: Edits = field(default_factory=Edits)
    history: str = ""
    left: Callable[[], float] = lambda: math.inf
    """Seconds that are left of the rollout's time, after which a call of a tool of the user's own is given up."""
    stop: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        """End a call of a tool of the user's own. For another thread."""
        self.stop.set()

    def remember(self, text: str) -> str:
        """Keep the conversation as a file beside those that are graded. Returns its path."""
        self.history = text
        return HISTORY

    def text(self, path: str) -> str:
        if path == HISTORY and self.history:
            return self.history
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def store(self, path: str, text: str) -> None:
        self.files[path] = text

    def find(self, text: str) -> list[tuple[str, int, str]]:
        lines = ((path, n, line) for path in sorted(self.files) for n, line in enumerate(_lines(self.files[path]), 1))
        own = [found for found in lines if text in found[2] and found[0] not in self.visible_tests]
        return own + remembered(self.history, text)

    def run_visible_tests(self) -> Observation:
        if not self.visible_tests:
            raise ToolError("UnexpectedEnvironment", "no tests here")
        own_tests = {path: self.files[path] for path in self.own_tests if path in self.files}
        try:
            tests = parse_test_files({**self.visible_tests, **own_tests})
        except ValueError as error:
            raise ToolError("UnexpectedEnvironment", str(error)[:110]) from None
        [outcomes] = self.sandboxes.run([request_tests(self.files, tests, self.limits)])
        passed = [passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
        first = "" if all(passed) else describe(tests[index := passed.index(False)], outcomes[index])
        return tested(sum(passed), len(tests), first)


def _text(place: ToolTarget, path: str) -> str:
    try:
        return place.text(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise invalid(f"no file {path}") from None


@tool()
def read_file(place: ToolTarget, path: str) -> Observation:
    """Read a file.

    path: relative path
    """
    text = _text(place, path).encode("utf-8", "replace").decode().translate(CONTROLS)
    return Observation(text="\n".join(f"{number}{line}" for number, line in enumerate(_lines(text), 1)))


@tool(mutates=True)
def edit_line(workspace: ToolTarget, path: str, line: int, text: str) -> Observation:
    """Replace one line of a file by another; its indentation is kept.

    path: relative path
    """
    text = text.strip()
    if "\n" in text or "\r" in text:
        raise invalid("one line")
    before = _text(workspace, path)
    lines = _lines(before)
    if not 1 <= line <= len(lines):
        raise invalid("no line")
    old = lines[line - 1]
    lines[line - 1] = old[: len(old) - len(old.lstrip("\ufeff").lstrip())] + text + "\r" * old.endswith("\r")
    return _change(workspace, path, before, "\n".join(lines) + "\n" * before.endswith("\n"))


@tool(mutates=True)
def substitute(place: ToolTarget, path: str, old: str, new: str) -> Observation:
    """Replace a text that occurs once in a file.

    path: relative path
    """
    before = _text(place, path)
    if not old or (count := before.count(old)) != 1:
        raise invalid(f"{count if old else 0} matches")
    return _change(place, path, before, before.replace(old, new))


def _change(place: ToolTarget, path: str, before: str, after: str) -> Observation:
    if before == after:
        return Observation(text="same")  # tells the agent at once that this edit changed nothing
    edits = place.edits
    if frozenset((edits.now | {path: after}).items()) in edits.refused:
        return Observation(text="tried")
    place.store(path, after)
    edits.before.setdefault(path, before)
    edits.now[path] = after
    return Observation(text="ok")


@tool(mutates=True)
def undo(place: ToolTarget) -> Observation:
    """Undo all edits."""
    edits = place.edits
    for path, text in edits.before.items():
        place.store(path, text)
    answer = "ok" if edits.now else "same"
    edits.now.clear()
    return Observation(text=answer)


@tool()
def grep(place: ToolTarget, pattern: str) -> Observation:
    """Find the lines that hold a text, tests left out.

    pattern: plain text
    """
    if not pattern or any(character in pattern for character in "\0\n\r"):
        raise invalid("one line")
    found = place.find(pattern)[:FOUND]
    return Observation(text="\n".join(f"{path}:{number}{line}" for path, number, line in found) or "none")


@tool()
def read_lints(place: ToolTarget) -> Observation:
    """Find names that are unused or do not exist, tests left out."""
    texts: dict[str, list[str]] = {}
    for path, _, line in place.find(""):
        texts.setdefault(path, []).append(line)
    found = [f"{path}: {each}" for path, lines in texts.items() for each in lints("\n".join(lines))][:FOUND]
    return Observation(text="\n".join(found) or "none")


def _lines(text: str) -> list[str]:
    """Lines of a file; the newline that ends the last one begins no other."""
    return text.removesuffix("\n").split("\n") if text else []


def remembered(history: str, text: str) -> list[tuple[str, int, str]]:
    """Return the lines of the history that hold `text`, as `find` does."""
    return [(HISTORY, number, line) for number, line in enumerate(_lines(history), 1) if text in line]


@tool()
def run_tests(place: ToolTarget) -> Observation:
    """Run the visible tests."""
    seen = place.run_visible_tests()
    if place.edits.now and seen.tests_passed != seen.tests_run:
        place.edits.refused.add(frozenset(place.edits.now.items()))
    return seen


@tool(ends=True)
def finish(place: ToolTarget) -> Observation:
    """Finish; the files are graded."""
    return Observation(text="")


def tested(passed: int, run: int, first: str) -> Observation:
    """Return what the agent sees of its tests. `first`: one line about the first that failed."""
    text = f"pass {run}" if passed == run else f"fail {run - passed}/{run}: {first}"[:110]
    return Observation(text=text, tests_passed=passed, tests_run=run)


def describe(test: FunctionTest, outcome: CallOutcome) -> str:
    """Return one line for the agent: the call, its outcome, the expected value."""
    got = outcome.text if outcome.status in ("returned", "raised") else outcome.status
    return wanted(f"{test.function}({test.arguments[1:-1].removesuffix(',')})", got, test.expected)


def wanted(call: str, got: str, want: str) -> str:
    return f"{_compact(call)} = {_compact(got)[:24]} want {_compact(want)[:24]}"


_STRING_OR_SPACE = re.compile(r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?| """)


def _compact(text: str) -> str:
    """`text` without the spaces between its parts; those inside strings stay."""
    return _STRING_OR_SPACE.sub(lambda part: "" if part[0] == " " else part[0], text)


TINY = (grep, read_file, read_lints, edit_line, substitute, undo, run_tests, finish)
