"""The four tools of tiny models: read, edit a line, run the visible tests, finish.

They work in the sandbox of a session, or on files as data, whose code is executed on copies in sandboxes that all rollouts share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from composer_nb.harness.sandbox.calls import CallOutcome, Executor
from composer_nb.harness.tasks.functions import FunctionTest, parse_test_files, passes, request_tests
from composer_nb.harness.tools.arguments import tool
from composer_nb.harness.tools.session import Session, clean
from composer_nb.harness.tools.tool_call import ToolError

TESTS_S = 60.0
"""Time limit of the tests of a workspace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The answer of a tool."""

    text: str
    tests_passed: int | None = None
    """Visible tests passed, if the tool ran them."""
    tests_run: int | None = None


@dataclass(slots=True, kw_only=True)
class Workspace:
    """The files of one rollout. Code runs on copies of it in fresh sandboxes, so only tools change it."""

    files: dict[str, str]
    visible_tests: Mapping[str, str]
    """The tests at the start: edits of them do not change what `run_tests` runs."""
    sandboxes: Executor

    def text(self, path: str) -> str:
        if path not in self.files:
            raise ToolError("InvalidArguments", f"no file {path}")
        return self.files[path]

    def store(self, path: str, text: str) -> None:
        self.files[path] = text

    def test(self) -> Observation:
        """Run the visible tests. Raises SandboxFailure."""
        if not self.visible_tests:
            raise ToolError("UnexpectedEnvironment", "no tests here")
        tests = parse_test_files(self.visible_tests)
        [outcomes] = self.sandboxes.run([request_tests(self.files, tests)])
        passed = [passes(test, outcome) for test, outcome in zip(tests, outcomes, strict=True)]
        if all(passed):
            return tested(len(tests), len(tests))
        place = passed.index(False)
        return tested(sum(passed), len(tests), describe(tests[place], outcomes[place]))


def tested(passed: int, count: int, first: str = "") -> Observation:
    """Return what a run of tests is answered with. `first`: the first failure."""
    text = f"pass {count}" if passed == count else f"fail {count - passed}/{count}: {first}"[:110]
    return Observation(text=text, tests_passed=passed, tests_run=count)


def run_pytest(session: Session) -> Observation:
    """Run the tests of a workspace in its sandbox. Raises ToolError."""
    words = ["python3", "-m", "pytest", "-q", "--tb=no", "-rfE", "--no-header", "-p", "no:cacheprovider", "--color=no"]
    done = session.run(words, timeout_s=TESTS_S, env=session.environment)
    output = clean(done.stdout)
    if done.timed_out:
        raise ToolError("Timeout", f"the tests took more than {TESTS_S:g} s")
    last = output.strip().rpartition("\n")[2]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|error)", last)}
    if not (run := sum(counts.values())):
        raise ToolError("UnexpectedEnvironment", last[:110] or "no tests here")
    first = re.search(r"^(?:FAILED|ERROR) (.*)", output, re.M)
    return tested(counts.get("passed", 0), run, first[1] if first else "")


@tool()
def read_file(workspace: Workspace | Session, path: str) -> Observation:
    """Read a file.

    path: relative path
    """
    lines = _lines(workspace.text(path))
    return Observation(text="\n".join(f"{number}{line}" for number, line in enumerate(lines, 1)))


@tool(mutates=True)
def edit_line(workspace: Workspace | Session, path: str, line: int, text: str) -> Observation:
    """Replace one line of a file by another; its indentation is kept.

    path: relative path
    """
    before = workspace.text(path)
    lines, text = _lines(before), text.strip()
    place = line - 1
    if not 0 <= place < len(lines):
        raise ToolError("InvalidArguments", "no line")
    if "\n" in text or "\r" in text:
        raise ToolError("InvalidArguments", "one line")
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    if lines[place] == indent + text:
        return Observation(text="same")  # tells the agent at once that this edit changed nothing
    lines[place] = indent + text
    workspace.store(path, "\n".join(lines) + "\n" * before.endswith("\n"))
    return Observation(text="ok")


def _lines(text: str) -> list[str]:
    """Lines of a file; the newline that ends the last one begins no other."""
    return text.removesuffix("\n").split("\n") if text else []


@tool()
def run_tests(workspace: Workspace | Session) -> Observation:
    """Run the visible tests."""
    return workspace.test() if isinstance(workspace, Workspace) else run_pytest(workspace)


@tool(ends=True)
def finish(workspace: Workspace | Session) -> Observation:
    """Finish; the files are graded."""
    return Observation(text="")


def describe(test: FunctionTest, outcome: CallOutcome) -> str:
    """Return one line for the agent: the call, its outcome, the expected value."""
    call = f"{test.function}({_compact(test.arguments[1:-1].removesuffix(','))})"
    got = _compact(outcome.text)[:24] if outcome.status in ("returned", "raised") else outcome.status
    return f"{call} = {got} want {_compact(test.expected)[:24]}"


_STRING_OR_SPACE = re.compile(r"""'(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?| """)


def _compact(text: str) -> str:
    """`text` without the spaces between its parts; those inside strings stay."""
    return _STRING_OR_SPACE.sub(lambda part: "" if part[0] == " " else part[0], text)


TINY = (read_file, edit_line, run_tests, finish)
