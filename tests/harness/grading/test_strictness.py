"""What a task may ask for besides its tests, and the tools that it may choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.attempt import Agent, tools_of
from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.grading.check import check_task
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.plan import GradePlan, plan_of, with_plan
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.labs.attacks.patch_target import TARGET
from composer_nb.tour.expert import ScriptedPolicy, one
from composer_nb.trainer.recipe.prepare import own_tasks


def strict(task: Task, **values: Any) -> Task:
    return Task.model_validate(task.model_dump() | values)


@pytest.mark.parametrize(
    "strictness, fails", [("tests", ""), ("twins", ""), ("scope", "no flag"), ("lints", "f.py: no lint")]
)
def test_levels(task: Task, sandboxes: SandboxExecutor, strictness: str, fails: str) -> None:
    """An answer that leaves an unused import behind, and a file outside of the scope."""
    asked = strict(task, strictness=strictness)
    right = task.files | task.solution
    assert grade(asked, right, sandboxes).passed
    [path] = task.solution
    messy = right | {path: f"import os\n{right[path]}", "notes.txt": "x"}
    found = grade(asked, messy, sandboxes)
    assert found.status == "graded" and found.passed == (not fails)
    assert not fails or fails in found.failed
    assert grade(asked, messy | {path: "def f("}, sandboxes).passed is False


def test_tests_alone_are_one_run_without_twins_and_calls(plans: dict[str, GradePlan], backend: Backend) -> None:
    task = with_plan(TARGET, plans[TARGET.id])
    plan = plan_of(strict(task, strictness="tests"))
    assert plan_of(task).twins and not plan.twins and not plan.calls and plan.tests == plan_of(task).tests
    row = check_task(strict(task, strictness="tests"), backend)
    assert row["problem"] == "" and row["guard"]["by"] == "none"


def test_a_directory_keeps_them_and_unknown_words_are_named(task: Task, tmp_path: Path) -> None:
    asked = strict(task, strictness="scope", tools=["read_file", "finish"])
    path = asked.to_harbor(tmp_path / "t")
    assert Task.from_harbor(path) == asked
    plain = task.to_harbor(tmp_path / "plain") / "task.toml"
    assert "strictness" not in plain.read_text() and "tools" not in plain.read_text()
    toml = path / "task.toml"
    toml.write_text(toml.read_text().replace('"scope"', '"very"'))
    with pytest.raises(
        ValueError, match=r"composer_nb\.strictness: Input should be 'tests', 'twins', 'scope' or 'lints'"
    ):
        Task.from_harbor(path)


def test_a_task_chooses_of_the_tools_that_are_there(
    task: Task, renderer: CompactRenderer, sandboxes: SandboxExecutor, tmp_path: Path
) -> None:
    asked = strict(task, tools=["read_file", "finish"])
    calls = [ToolCall(name="read_file", arguments={"path": "f.py"}), ToolCall(name="run_tests", arguments={})]

    def script(rollout: int) -> Any:
        for call in [*calls, ToolCall(name="finish", arguments={})]:
            yield one(call)

    for each, invalid in ((task, 0), (asked, 1)):
        agent = Agent(renderer)
        [(_, done)] = drive([agent.attempt(each, 0)], ScriptedPolicy(renderer, script), sandboxes)
        assert done.rollout.invalid_calls == invalid
    strange = strict(task, tools=["read_file", "shell"])
    with pytest.raises(ValueError, match=r"tools: there is no tool shell; there are grep, read_file,"):
        tools_of(strange, ToolSet.tiny())
    save_tasks([strange], tmp_path / "tasks.jsonl")
    with pytest.raises(ValueError, match="there is no tool shell"):
        own_tasks(EnvSettings(tasks=str(tmp_path / "tasks.jsonl")))
    assert tuple(tools_of(asked, ToolSet.tiny()).tools) == ("read_file", "finish")
