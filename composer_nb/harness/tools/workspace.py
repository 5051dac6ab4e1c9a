"""A workspace in memory: code runs on copies of it, in sandboxes that all rollouts share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from composer_nb.harness.sandbox.contract import CallLimits, Sandbox
from composer_nb.harness.sandbox.requests import CallOutcome, Executor
from composer_nb.harness.tasks.functions import FunctionTest, parse_test_files, passes, request_tests
from composer_nb.harness.tools.session import HISTORY, Observation, Session, file_lines, mismatch, remembered, tested
from composer_nb.harness.tools.tool_call import ToolError


@dataclass(slots=True, kw_only=True)
class Workspace(Session):
    """A session whose files are in memory. Code runs on copies of it in fresh sandboxes, so only tools change it.

    Attributes:
        sandbox: None: tools that need one are not offered.
        visible_tests: The tests at the start: edits of them do not change what `run_tests` runs.
        own_tests: Test files that the agent is asked to write: they are run as they are.
        limits: Limits of calls that the task states.
    """

    concurrent: ClassVar[bool] = False
    sandbox: Sandbox = field(init=False, repr=False)
    root: str = ""

    files: dict[str, str]
    visible_tests: Mapping[str, str]
    sandboxes: Executor
    own_tests: frozenset[str] = frozenset()
    limits: CallLimits | None = None

    def remember(self, text: str) -> str:
        """Keep the conversation as a file beside those that are graded. Returns its path."""
        self.history = text
        return HISTORY

    def fit(self, text: str, name: str) -> str:
        return text

    def text(self, path: str) -> str:
        if path == HISTORY and self.history:
            return self.history
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def store(self, path: str, text: str) -> None:
        self.files[path] = text

    def find(self, text: str) -> list[tuple[str, int, str]]:
        files = [(path, content) for path, content in sorted(self.files.items()) if path not in self.visible_tests]
        lines = ((path, n, line) for path, content in files for n, line in enumerate(file_lines(content), 1))
        return [line for line in lines if text in line[2]] + remembered(self.history, text)

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


def describe(test: FunctionTest, outcome: CallOutcome) -> str:
    """Return one line for the agent: the call, its outcome, the expected value."""
    got = outcome.text if outcome.status in ("returned", "raised") else outcome.status
    return mismatch(f"{test.function}({test.arguments[1:-1].removesuffix(',')})", got, test.expected)
