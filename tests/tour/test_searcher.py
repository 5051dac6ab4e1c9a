"""The expert who searches: it tests, looks, tries and undoes, and does not repeat itself."""

import json
from functools import partial
from random import Random

import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.bench import behaviour
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.sandbox.calls import CachedExecutor, SandboxExecutor
from composer_nb.harness.search.embedding import split, words
from composer_nb.harness.tasks.task import Task
from composer_nb.tour.environment import Tour
from composer_nb.tour.expert import TRIES, ScriptedPolicy, blind, searcher, searches
from composer_nb.tour.miniatures import make_miniatures
from composer_nb.tour.paraphrases import PARAPHRASES


@pytest.fixture(scope="module")
def searched(renderer: CompactRenderer, sandboxes: SandboxExecutor) -> list[Attempt]:
    executor = CachedExecutor(sandboxes)
    tasks = list(make_miniatures("searched", 40, heldout=False, executor=executor, described=0.2))
    agent = Agent(renderer, limits=Limits(turns=16, turn_tokens=200, tokens=4000))
    policy = ScriptedPolicy(renderer, lambda number: searcher(tasks[number], Random(number)))
    attempts = dict(drive((agent.attempt(task, number) for number, task in enumerate(tasks)), policy, executor))
    return [attempts[number] for number in range(len(tasks))]


def test_it_tests_looks_tries_and_undoes(searched: list[Attempt]) -> None:
    # A wrong change may pass the visible tests.
    assert sum(attempt.grade.passed for attempt in searched) >= 0.9 * len(searched)
    figures = behaviour(searched)
    assert figures["recovery"] > 0.9 and figures["recovery_n"] > 10
    assert figures["tests_after_wrong_edit"] == 1.0 and figures["invalid_call_rate"] == 0.0
    counts = []
    for attempt in searched:
        calls = [json.loads(turn.call) for turn in attempt.rollout.turns]
        names = [call["name"] for call in calls]
        edits = [call["arguments"] for call in calls if call["name"] == "substitute"]
        tries = ["substitute", "run_tests"] + ["undo", "substitute", "run_tests"] * (len(edits) - 1)
        assert names == ["run_tests", "grep", "read_file", *tries, "finish"]
        assert len({(edit["old"], edit["new"]) for edit in edits}) == len(edits) <= TRIES
        assert len(edits) == 1 or ":" not in attempt.task.instruction.split("\n")[0]
        counts.append(len(edits))
    assert max(counts) > 3


def test_it_searches_with_the_products_tools_too(renderer: CompactRenderer) -> None:
    """In a sandbox of each rollout, by running pytest; with fewer tools it cannot, and the expert shows what it knows."""
    assert searches(["grep", "read_file", "write"]) is None
    settings = EnvSettings(tools="grep,read_file,search_replace,run_terminal_cmd")
    limits = Limits(turns=20, turn_tokens=1000, tokens=16000)
    with Sandboxes() as sandboxes:
        tasks = list(make_miniatures("product", 2, heldout=False, executor=sandboxes.functions, described=0.0))
        agent = make_agent(settings, renderer.tokenizer, limits, sandboxes)
        demonstrations = list(Tour().demonstrations(tasks, agent, sandboxes, 0, 0.0))
    assert len(demonstrations) == 2
    assert all(attempt.grade.passed and attempt.rollout.stop == "finished" for attempt in demonstrations)
    for attempt in demonstrations:
        names = [json.loads(turn.call)["name"] for turn in attempt.rollout.turns if turn.call]
        tries = names[3:]
        rounds = (len(tries) - 2) // 3
        checkouts = [turn for turn in attempt.rollout.turns if "git checkout -q -- " in turn.call]
        assert len(checkouts) == rounds and not any(turn.error for turn in checkouts)
        assert names[:3] == ["run_terminal_cmd", "grep", "read_file"]
        cycle = ["run_terminal_cmd", "search_replace", "run_terminal_cmd"]
        assert tries == ["search_replace", "run_terminal_cmd"] + cycle * rounds


def test_a_blind_search_does_not_know_the_answer(renderer: CompactRenderer, sandboxes: SandboxExecutor) -> None:
    """It plays the same without a solution, tries nothing twice, and solves less than who knows where to stop."""
    executor = CachedExecutor(sandboxes)
    tasks = list(make_miniatures("searched", 20, heldout=False, executor=executor))
    agent = Agent(renderer, limits=Limits(turns=16, turn_tokens=200, tokens=4000))

    def played(policy_tasks: list[Task]) -> list[Attempt]:
        policy = ScriptedPolicy(renderer, lambda number: blind(policy_tasks[number], Random(number)))
        return [
            played_attempt
            for _, played_attempt in sorted(drive((agent.attempt(t, n) for n, t in enumerate(tasks)), policy, executor))
        ]

    attempts = played(tasks)
    blank = [task.model_copy(update={"solution": {}, "metadata": {}}) for task in tasks]
    assert [attempt.rollout.turns for attempt in played(blank)] == [attempt.rollout.turns for attempt in attempts]
    for attempt in attempts:
        tried = [turn.call for turn in attempt.rollout.turns if "substitute" in turn.call]
        assert len(set(tried)) == len(tried) and not any(turn.observation == "tried" for turn in attempt.rollout.turns)
        assert attempt.rollout.stop == ("turns" if len(tried) == 13 else "finished")
    assert 0.3 < sum(attempt.grade.passed for attempt in attempts) / len(attempts) < 1


def test_a_paraphrase_is_sought_by_meaning_or_by_reading_on(renderer: CompactRenderer) -> None:
    """No word of it is in the code, and no test can be run; the right edit is accepted, and no other answer."""
    terms = lambda texts: {term for text in texts for word in words(text) for term in split(word)}  # noqa: E731
    assert not terms(PARAPHRASES) & terms(PARAPHRASES.values())
    limits, calls = Limits(turns=80, turn_tokens=1000, tokens=60000), dict[bool, list[int]]()
    with Sandboxes() as sandboxes:
        make = partial(make_miniatures, heldout=True, executor=sandboxes.functions, kinds=("paraphrase",))
        tasks = [*make("sought", 4, described=0.0), *make("named", 4, described=1.0)]
        for by_meaning in (True, False):
            tools = "codebase_search," * by_meaning + "grep,list_dir,read_file,search_replace"
            agent = make_agent(EnvSettings(tools=tools), renderer.tokenizer, limits, sandboxes)
            played = {attempt.task.id: attempt for attempt in Tour().demonstrations(tasks, agent, sandboxes, 0, 0.0)}
            assert all(attempt.grade.passed and not attempt.rollout.invalid_calls for attempt in played.values())
            calls[by_meaning] = [played[task.id].rollout.calls for task in tasks]
        for task in tasks:
            assert not terms([task.instruction.partition(":")[0]]) & terms(task.files) or task in tasks[4:]
            assert not any(grade(task, files, sandboxes.functions).passed for files in (task.files, {}))
    assert calls[True][4:] == calls[False][4:] == [3] * 4, "the code's own words are found at once"
    assert sum(calls[True][:4]) < sum(calls[False][:4])
