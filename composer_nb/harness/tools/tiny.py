"""The four tools of tiny models: read, edit a line, run the visible tests, finish.

They work in any `Place`. In a workspace of plain files, code is executed on copies, in sandboxes that all rollouts share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from composer_nb.harness.sandbox.calls import CallOutcome, Executor
from composer_nb.harness.tasks.functions import FunctionTest, parse_test_files, passes, request_tests
from composer_nb.harness.tools.arguments import CONTROLS, tool
from composer_nb.harness.tools.tool_call import ToolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer of a tool."""

    text: str
    tests_passed: int | None = None
    """Visible tests passed, if the tool ran them."""
    tests_run: int | None = None


class Place(Protocol):
    """The place where these tools work: a `Workspace` or a `session.Session`.

    Raises OSError for a file that cannot be read or written, and ToolError where there are no tests to run."""

    def text(self, path: str) -> str: ...

    def store(self, path: str, text: str) -> None: ...

    def run_visible_tests(self) -> Observation: ...


@dataclass(slots=True, kw_only=True)
class Workspace:
    """The files of one rollout. Code runs on copies of it in fresh sandboxes, so only tools change it."""

    files: dict[str, str]
    visible_tests: Mapping[str, str]
    """The tests at the start: edits of them do not change what `run_tests` runs."""
    sandboxes: Executor

    def text(self, path: str) -> str:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def store(self, path: str, text: str) -> None:
        self.files[path] = text

    def run_visible_tests(self) -> Observation:
        if not self.visible_tests:
            raise ToolError("UnexpectedEnvironment", "no tests here")
        tests = parse_test_files(self.visible_tests)
        [outcomes] = self.sandboxes.run([request_tests(self.files, tests)])
        passed = [passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
        first = "" if all(passed) else describe(tests[place := passed.index(False)], outcomes[place])
        return tested(sum(passed), len(tests), first)


def _text(place: Place, path: str) -> str:
    try:
        return place.text(path)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ToolError("InvalidArguments", f"no file {path}") from None


@tool()
def read_file(place: Place, path: str) -> Observation:
    """Read a file.

    path: relative path
    """
    text = _text(place, path).encode("utf-8", "replace").decode().translate(CONTROLS)
    return Observation(text="\n".join(f"{number}{line}" for number, line in enumerate(_lines(text), 1)))


@tool(mutates=True)
def edit_line(place: Place, path: str, line: int, text: str) -> Observation:
    """Replace one line of a file by another; its indentation is kept.

    path: relative path
    """
    before = _text(place, path)
    lines, text = _lines(before), text.strip()
    if not 1 <= line <= len(lines):
        raise ToolError("InvalidArguments", "no line")
    if "\n" in text or "\r" in text:
        raise ToolError("InvalidArguments", "one line")
    old = lines[line - 1].removesuffix("\r")
    new = old[: len(old) - len(old.lstrip())] + text
    if old == new:
        return Observation(text="same")  # tells the agent at once that this edit changed nothing
    lines[line - 1] = new + "\r" * lines[line - 1].endswith("\r")
    place.store(path, "\n".join(lines) + "\n" * before.endswith("\n"))
    return Observation(text="ok")


def _lines(text: str) -> list[str]:
    """Lines of a file; the newline that ends the last one begins no other."""
    return text.removesuffix("\n").split("\n") if text else []


@tool()
def run_tests(place: Place) -> Observation:
    """Run the visible tests."""
    return place.run_visible_tests()


@tool(ends=True)
def finish(place: Place) -> Observation:
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


TINY = (read_file, edit_line, run_tests, finish)
