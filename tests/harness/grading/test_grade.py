"""Grades of functions, what a task may ask for besides its tests, and grades that are looked up."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent, tools_of
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.grading import front
from composer_nb.harness.grading.check import check_task
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.grading.plan import GradePlan, digest, plan_of, with_plan
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.requests import CallOutcome
from composer_nb.harness.tasks.functions import parse_test_files
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET
from composer_nb.tour import expert
from composer_nb.trainer.recipe.prepare import own_tasks


def test_gold_passes_and_nothing_fails(task: Task, sandboxes: SandboxExecutor) -> None:
    gold = grade(task, task.files | task.solution, sandboxes)
    assert gold.passed and gold.status == "graded" and gold.flags == ()
    assert gold.tests == {f"test_hidden.py::test_{n}": True for n in range(3)}
    untouched = grade(task, task.files, sandboxes)
    assert not untouched.passed and untouched.status == "graded" and set(untouched.tests) == set(gold.tests)


def test_only_the_code_under_test_enters_the_sandbox(task: Task, boxes: Callable[..., Any]) -> None:
    files = task.files | task.solution | {"test_f.py": "evil", "conftest.py": "evil", "test_hidden.py": "evil"}
    sandboxes = boxes(lambda request: ())
    grade_functions(task, files, sandboxes)
    [[request]] = sandboxes.batches
    assert dict(request.files) == task.solution
    assert request.arguments == tuple(test.arguments for test in parse_test_files(task.tests))
    assert "[9]" not in str(request)  # what the first test expects


STATUSES = ["returned", "raised", "timeout", "died", "unreadable", "not_run"]


@settings(max_examples=100)
@given(data=st.data())
def test_a_test_passes_only_if_its_call_returned_the_value(task: Task, boxes: Callable[..., Any], data: st.DataObject):
    tests = parse_test_files(task.tests)
    texts = st.sampled_from([test.expected for test in tests] + ["", "True", "[9 ]", "([9],)"])
    outcome = st.builds(CallOutcome, status=st.sampled_from(STATUSES), text=texts)  # type: ignore[arg-type]
    outcomes = tuple(data.draw(st.lists(outcome, max_size=5)))
    result = grade_functions(task, task.files, boxes(lambda request: outcomes))
    assert list(result.tests) == [test.id for test in tests]
    for index, test in enumerate(tests):
        right = index < len(outcomes) and outcomes[index] == CallOutcome(status="returned", text=test.expected)
        assert result.tests[test.id] is right
    assert result.passed is all(result.tests.values())


# The same tree of the same task is graded once; nothing else is taken for it.

CLEAN = Grade(status="graded", tests={"a": True}, cost={"wall_s": 9.0})


class Counted:
    """Stands in for the grader: counts its calls and returns the given answers."""

    def __init__(self, *answers: Grade) -> None:
        self.answers, self.calls = list(answers), 0

    def __call__(self, *_: Any) -> Grade:
        self.calls += 1
        return self.answers[min(self.calls, len(self.answers)) - 1]


def files(task: Task, **changed: str) -> dict[str, bytes]:
    return {path: text.encode() for path, text in (task.files | changed).items()}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*answers: Grade) -> Counted:
        grader = Counted(*answers)
        monkeypatch.setattr(front, "_known", type(front._known)())
        monkeypatch.setattr(front, "grade_pytest", grader)
        return grader

    return use


def grade_tree(task: Task = TARGET, final_files: Mapping[str, bytes] | None = None, name: str = "bwrap") -> Grade:
    backend: Any = SimpleNamespace(name=name, create=None)
    return grade(task, files(task) if final_files is None else final_files, backend)


def test_the_same_tree_is_graded_once_and_says_so(ask: Any) -> None:
    grader = ask(CLEAN)
    first, second = grade_tree(), grade_tree(final_files=files(TARGET) | {"__pycache__/ledger.pyc": b"never graded"})
    assert grader.calls == 1 and first == second
    assert "repeats" not in first.cost and second.cost["repeats"] == 1 and second.cost["wall_s"] != first.cost["wall_s"]


def test_another_tree_or_task_is_graded_anew(ask: Any) -> None:
    grader, tree = ask(CLEAN), files(TARGET)
    grade_tree()
    for number, arguments in enumerate(
        (
            {"final_files": files(TARGET, **{MODULE: RIGHT})},
            {"final_files": tree | {"util/more.py": b""}},
            {"final_files": {path: data for path, data in tree.items() if path != "util/__init__.py"}},
            {"task": TARGET.model_copy(update={"id": "another"})},
            {"task": TARGET.model_copy(update={"tests": TARGET.tests | {"tests/test_more.py": ""}})},
            {"task": TARGET.model_copy(update={"files": TARGET.files | {"conftest.py": ""}})},
            {"name": "docker"},
        )
    ):
        grade_tree(**arguments)
        assert grader.calls == number + 2, arguments


def test_what_chance_or_the_machine_decided_is_not_remembered(ask: Any) -> None:
    failed = {"tests": {"a": False}}
    for unclean in (
        Grade(status="infra_error"),
        Grade(status="agent_failed", **failed, flags=("ended_early",)),
        Grade(status="tampered", **failed, flags=("twin_passed",)),
        Grade(status="graded", **failed, flags=("inconsistent",)),
    ):
        grader = ask(unclean, CLEAN)
        assert (grade_tree(), grade_tree(), grade_tree()) == (unclean, CLEAN, CLEAN) and grader.calls == 2


def test_a_check_runs_the_tests_again(ask: Any) -> None:
    """`tasks check` compares two runs, and would never find a difference between a run and what was remembered of it."""
    backend: Any = SimpleNamespace(name="bwrap", create=None)
    task = with_plan(TARGET, GradePlan(digest=digest(TARGET), tests={"a": "a"}))
    task = task.model_copy(update={"solution": {MODULE: RIGHT}})
    failed = Grade(status="graded", tests={"a": False})
    grader = ask(CLEAN, failed, failed, failed)
    row = check_task(task, backend)
    assert grader.calls == 4 and row["problem"] == "two runs gave different results: a" and not row["repeatable"]


# What a task may ask for besides its tests, and the tools that it may choose.


def strict(task: Task, **values: Any) -> Task:
    return Task.model_validate(task.model_dump() | values)


@pytest.mark.parametrize(
    "strictness, fails", [("tests", ""), ("twins", ""), ("scope", "no flag"), ("lints", "f.py: no lint")]
)
def test_levels(task: Task, sandboxes: SandboxExecutor, strictness: str, fails: str) -> None:
    """An answer that leaves an unused import behind, and a file outside of the scope."""
    strict_task = strict(task, strictness=strictness)
    right = task.files | task.solution
    assert grade(strict_task, right, sandboxes).passed
    [path] = task.solution
    messy = right | {path: f"import os\n{right[path]}", "notes.txt": "x"}
    result = grade(strict_task, messy, sandboxes)
    assert result.status == "graded" and result.passed == (not fails)
    assert not fails or fails in result.failed
    assert grade(strict_task, messy | {path: "def f("}, sandboxes).passed is False
    feigned = ("import os\nos\n", "import os\nos, 1\n", "def g():\n    global x\n    x = 1\n")
    littered = strict(strict_task, files=task.files | {path: f"import os\n{task.files[path]}"})
    uses = (f"import os\n{use}\n" for use in ("str(os)", "print(os)", "[os for _ in ()]"))
    for target, text in (*((strict_task, text) for text in feigned), *((littered, text) for text in uses)):
        assert grade(target, right | {path: f"{right[path]}\n{text}"}, sandboxes).passed == (strictness != "lints")


def test_tests_alone_are_one_run_without_twins_and_calls(plans: dict[str, GradePlan], backend: Backend) -> None:
    task = with_plan(TARGET, plans[TARGET.id])
    plan = plan_of(strict(task, strictness="tests"))
    assert plan_of(task).twins and not plan.twins and not plan.calls and plan.tests == plan_of(task).tests
    row = check_task(strict(task, strictness="tests"), backend)
    assert row["problem"] == "" and row["guard"]["by"] == "none"


def test_a_task_chooses_of_the_tools_that_are_there(
    task: Task, renderer: CompactRenderer, sandboxes: SandboxExecutor, tmp_path: Path
) -> None:
    restricted = strict(task, tools=["read_file", "finish"])
    calls = [ToolCall(name="read_file", arguments={"path": "f.py"}), ToolCall(name="run_tests", arguments={})]

    def script(rollout: int) -> Any:
        for call in [*calls, ToolCall(name="finish", arguments={})]:
            yield expert.one(call)

    for variant, invalid in ((task, 0), (restricted, 1)):
        agent = Agent(renderer)
        [(_, attempt)] = drive([agent.attempt(variant, 0)], expert.ScriptedPolicy(renderer, script), sandboxes)
        assert attempt.rollout.invalid_calls == invalid
    strange = strict(task, tools=["read_file", "shell"])
    with pytest.raises(ValueError, match=r"tools: there is no tool shell; there are grep, read_file,"):
        tools_of(strange, ToolSet.tiny())
    save_tasks([strange], tmp_path / "tasks.jsonl")
    with pytest.raises(ValueError, match="there is no tool shell"):
        own_tasks(EnvSettings(tasks=str(tmp_path / "tasks.jsonl")))
    assert tuple(tools_of(restricted, ToolSet.tiny()).tools) == ("read_file", "finish")
