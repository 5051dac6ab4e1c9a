"""The expert who searches: it tests, looks, tries and undoes, and does not repeat itself."""

from __future__ import annotations

import json
from random import Random

import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.expert import TRIES, ScriptedPolicy, searcher
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent, Attempt
from composer_nb.harness.bench import behaviour
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.tasks.miniatures import make_miniatures
from composer_nb.harness.tasks.task import Task


@pytest.fixture(scope="module")
def searched(renderer: CompactRenderer, sandboxes: SandboxExecutor) -> list[Attempt]:
    executor = CachedExecutor(sandboxes)
    tasks = list(make_miniatures("searched", 40, heldout=False, executor=executor, told=0.2))
    agent = Agent(renderer, limits=Limits(turns=16, turn_tokens=200, tokens=4000))
    policy = ScriptedPolicy(renderer, lambda number: searcher(tasks[number], Random(number)))
    done = dict(drive((agent.attempt(task, number) for number, task in enumerate(tasks)), policy, executor))
    return [done[number] for number in range(len(tasks))]


def test_it_finds_the_answer_by_testing(searched: list[Attempt]) -> None:
    solved = sum(done.grade.passed for done in searched)
    assert solved >= 0.9 * len(searched)  # a wrong change may pass the visible tests
    figures = behaviour(searched)
    assert figures["recovery"] > 0.9 and figures["recovery_n"] > 10
    assert figures["tests_after_wrong_edit"] == 1.0 and figures["invalid_call_rate"] == 0.0
    assert figures["reads_before_edit"] == 2.0 and figures["calls_per_turn"] > 1.2


def test_every_try_is_undone_before_the_next_and_none_comes_twice(searched: list[Attempt]) -> None:
    most = 0
    for done in searched:
        calls = [json.loads(turn.call) for turn in done.rollout.turns]
        names = [call["name"] for call in calls]
        edits = [call["arguments"] for call in calls if call["name"] == "substitute"]
        assert names[:3] == ["run_tests", "grep", "read_file"] and names[-1] == "finish"
        tries = names[3:-1]
        assert tries == (["substitute", "run_tests"] + ["undo", "substitute", "run_tests"] * (len(edits) - 1))
        assert len({(edit["line"], edit["old"], edit["new"]) for edit in edits}) == len(edits) <= TRIES
        told = ":" in next(iter(done.task.instruction.split("\n")))
        assert len(edits) == 1 or not told
        most = max(most, len(edits))
    assert most > 3


def test_a_task_that_is_no_single_change_is_refused(task: Task) -> None:
    script = searcher(task.model_copy(update={"metadata": {"function": "g"}}), Random(0))
    next(script)
    with pytest.raises(ValueError, match="not of g"):
        script.send("fail 1/2: f(1) = 2 want 3")
