"""Grade what an agent left: run the task's hidden tests on it.

Never where the agent worked: its changes, restricted to the task's source scope, are laid over a pristine copy of the workspace,
which runs in a fresh sandbox. A test without a result is a failure. An infrastructure fault is no result: the grade says
`infra_error`.

`front.grade` asks one of three graders: `functions`, below, whose expected values stay outside the sandbox (`functions.py`);
`pytest` (`pytest_grader.py`); `script` (`script_grader.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from composer_nb.harness.grading.diff import CACHE_FOLDERS
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, Executor
from composer_nb.harness.tasks.functions import parse_test_files, parse_tests, passes, request_tests, separated
from composer_nb.harness.tasks.task import Task

# graded: the tests ran; a missing result is a failure. tampered: something passed tests that no right answer passes, or
# forged results. agent_failed: the agent's code used up a sandbox's memory, ended the runner of its tests, or left more than
# can be carried out. infra_error, invalid_task: the machinery or the task is at fault, so nothing is known of the agent's
# work. ungraded: work on a user's repository, which has no hidden tests.
Status = Literal["graded", "tampered", "agent_failed", "infra_error", "invalid_task", "ungraded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The tests' results. `tests` maps each hidden test's id to passed or not; it is empty if no test could run.

    Attributes:
        flags: Things a person should look at: `outside_scope` (a change that was dropped); of the other graders, also what
            `pytest_grader.py` and `script_grader.py` list.
        calls: Recorded calls that were replayed (grader `pytest`), and how many of them gave another value than the gold
            patch.
        timeouts: Runs of tests, or calls of the grader `functions`, that used up their time limit. They failed. What a busy
            machine delays is none of them (`sandbox/granted.py`).
        rewards: Rewards that the script of the grader `script` wrote, by name.
        output: End of the output of the grader `script`, or why no sandbox could run it. For people, never for agents: it may
            quote hidden tests.
        cost: Seconds: `wall_s` by the host's clock, `tests_s` by the runner's. `repeats`: 1 if the grade was looked up
            (`front.py`). Comparisons of grades ignore it.
    """

    status: Status
    tests: Mapping[str, bool] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    calls: int = 0
    calls_failed: int = 0
    timeouts: int = field(default=0, compare=False)
    rewards: Mapping[str, float] = field(default_factory=dict)
    output: str = field(default="", compare=False)
    cost: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def known(self) -> bool:
        """Return whether it says anything about the agent's work."""
        return self.status in ("graded", "tampered", "agent_failed")

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the tests that did not pass."""
        return tuple(name for name, passed in self.tests.items() if not passed)

    @property
    def passed(self) -> bool:
        return self.status == "graded" and bool(self.tests) and all(self.tests.values()) and not self.calls_failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A rollout with its grade by the hidden tests."""

    task: Task
    rollout: Rollout
    grade: Grade


def grade_functions(task: Task, files: Mapping[str, str], executor: Executor) -> Grade:
    """Grade by function calls. Raises ValueError for a task of another grader."""
    if task.grader != "functions":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, which is no function call")
    changed = {path for path in {*files, *task.files} if files.get(path) != task.files.get(path)}
    changed = {path for path in changed if CACHE_FOLDERS.isdisjoint(path.split("/"))}
    flags = ("outside_scope",) if changed - set(task.source_scope) else ()
    if task.mutants:
        return _grade_written(task, files.get(task.source_scope[0], ""), flags, executor)
    graded = dict(task.files)
    for path in task.source_scope:
        graded.pop(path, None)
        if path in files:
            graded[path] = files[path]
    tests = parse_test_files(task.tests)
    groups = separated(tests)
    try:
        ran = executor.run([request_tests(graded, group, task.call_limits) for group in groups])
    except SandboxFailure as error:
        return Grade(status="infra_error", output=str(error))
    results = {test.id: False for test in tests}
    for group, outcomes in zip(groups, ran, strict=True):
        results |= {test.id: passes(test, outcome) for test, outcome in zip(group, outcomes, strict=False)}
    timeouts = _timeouts([outcome for outcomes in ran for outcome in outcomes])
    return Grade(status="graded", tests=results, flags=flags, timeouts=timeouts)


MOST_WRITTEN = 100  # Tests that an agent may leave in a file.


def _grade_written(task: Task, text: str, flags: tuple[str, ...], executor: Executor) -> Grade:
    """Grade tests that an agent wrote: all pass on the code as it is, and each mutant fails one. They call the function that the
    file's tests called at the start, and these are still there: a call of anything else could tell code by its text."""
    [path] = task.source_scope
    before = parse_tests(path, task.files[path])
    try:
        written = parse_tests(path, text)
    except ValueError:
        written = ()
    calls = [(test.module, test.function, test.arguments, test.expected) for test in written]
    required = {(test.module, test.function, test.arguments, test.expected) for test in before}
    same = {call[:2] for call in calls} == {call[:2] for call in required}
    names = ["passes as it is", *(f"refuses mutant {number}" for number in range(len(task.mutants)))]
    if len(calls) > MOST_WRITTEN or not (required <= {*calls} and same):
        return Grade(status="graded", tests=dict.fromkeys(names, False), flags=flags)
    try:
        limits = task.call_limits
        ran = executor.run([request_tests(task.files | mutant, written, limits) for mutant in ({}, *task.mutants)])
    except SandboxFailure as error:
        return Grade(status="infra_error", output=str(error))
    passed = [all(map(passes, written, outcomes)) and len(outcomes) == len(written) for outcomes in ran]
    results = dict(zip(names, [passed[0], *(not mutant_passed for mutant_passed in passed[1:])], strict=True))
    return Grade(status="graded", tests=results, flags=flags, timeouts=_timeouts(ran[0]))


def _timeouts(outcomes: Sequence[CallOutcome]) -> int:
    return sum(outcome.status == "timeout" for outcome in outcomes)
