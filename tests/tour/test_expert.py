"""The scripted expert and the policy that plays scripts."""

import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.harness.agent import scripts
from composer_nb.harness.agent.chat import Said
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.tour.expert import Script, ScriptedPolicy, expert, one
from composer_nb.tour.repairs import make_tasks

READ = ToolCall(name="read_file", arguments={"path": "f.py"})
Play = Callable[[float], list[Attempt]]


@pytest.fixture(scope="module")
def play(sandboxes: SandboxExecutor, renderer: CompactRenderer) -> Play:
    """Return `play(rate)`, which has the expert attempt 40 generated tasks without tight limits."""
    executor = CachedExecutor(sandboxes)
    tasks = list(make_tasks("expert", 40, heldout=False, executor=executor))
    agent = Agent(renderer, limits=Limits(turns=30, turn_tokens=200, tokens=5000))

    def run(rate: float) -> list[Attempt]:
        policy = ScriptedPolicy(renderer, lambda n: expert(tasks[n], Random(f"expert {n}"), rate))
        attempts = dict(drive((agent.attempt(task, n) for n, task in enumerate(tasks)), policy, executor))
        return [attempts[n] for n in range(len(tasks))]

    return run


def names(attempt: Attempt) -> list[str]:
    return [json.loads(turn.call)["name"] for turn in attempt.rollout.turns]


def test_an_expert_mends_everything_and_with_mistakes_most(play: Play) -> None:
    attempts = play(0.0)
    assert all(attempt.grade.passed and attempt.rollout.stop == "finished" for attempt in attempts)
    assert {tuple(names(attempt)) for attempt in attempts} == {
        ("read_file", "edit_line", "finish"),
        ("read_file", "edit_line", "run_tests", "finish"),
    }
    attempts = play(0.7)
    assert all(attempt.rollout.stop == "finished" and not attempt.rollout.invalid_calls for attempt in attempts)
    assert len(Counter(names(attempt).count("edit_line") for attempt in attempts)) > 2
    assert len(attempts) / 3 < sum(attempt.grade.passed for attempt in attempts) < len(attempts)


def test_scripts_are_sent_answers_and_must_not_end_first(agent: Agent, task: Task, boxes: Callable[..., Any]) -> None:
    observations: list[str] = []

    def script(n: int) -> Script:
        observations.append((yield one(READ)))
        observations.append((yield one(ToolCall(name="read_file", arguments={"path": "no.py"}))))

    policy = ScriptedPolicy(agent.renderer, script)
    with pytest.raises(ValueError, match="the script of rollout 0 ended before its agent"):
        list(drive([agent.attempt(task, 0)], policy, boxes("1")))
    assert observations[0].startswith("1def f(xs, k):\n2") and observations[1] == "error: no file no.py"


# What an expert with an agent's tools looks at, and edits that give the solution one by one.

LINES = st.lists(st.sampled_from(["a\n", "b\n", "  a\n", "\n", "c\n"]), max_size=12).map("".join)


def edits(before: str, after: str) -> list[ToolCall]:
    task = Task(
        id="t",
        instruction="i",
        grader="pytest",
        files={"f.py": before},
        tests={"test_f.py": "def test_0(): pass\n"},
        solution={"f.py": after},
        source_scope=("f.py",),
    )
    script, talk = scripts.expert(task), list[Said]()
    while not talk or talk[-1].calls:
        talk.append(script(talk))
    return [written.call for message in talk for written in message.calls if isinstance(written.call, ToolCall)]


@given(before=LINES, after=LINES)
def test_each_edit_is_of_one_place_and_all_give_the_solution(before: str, after: str) -> None:
    text = before
    for call in edits(before, after):
        arguments = call.arguments
        if call.name == "search_replace":
            assert text.count(arguments["old_string"]) == 1
            text = text.replace(arguments["old_string"], arguments["new_string"])
        elif call.name == "write":
            text = arguments["contents"]
    assert text == after
