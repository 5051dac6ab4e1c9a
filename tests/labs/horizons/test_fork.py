"""Forks of stored rollouts: the past is the stored one to the last token, and the same draws give the same future."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.scripts import turn as turn_
from composer_nb.harness.agent.summary import SummarySettings
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.policy import Request
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.store import pack_attempt
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.labs.horizons.fork import Fork, ablate, first_edit, fork, pool, summary_before, turns_of
from composer_nb.tour.expert import WithoutModel, one
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.rl import to_streams

SIZES = {"vocab_size": 420, "max_position_embeddings": 200}


class Boxes:
    """Sandboxes in which every call returns 2."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        return [(CallOutcome(status="returned", text="2"),) * len(request.arguments) for request in requests]


@pytest.fixture
def agent(tokenizer) -> Agent:
    limits = Limits(turns=8, turn_tokens=9, tokens=200)
    return Agent(CompactRenderer(tokenizer), limits=limits, summary=SummarySettings(trigger=40, tokens=9))


@pytest.fixture
def engine(make_model, agent):
    """`engine(seed)`: a new engine with the same weights."""
    model = make_model(3, **SIZES)
    return lambda seed=5: Engine(model, stop=agent.renderer.stop, slots=4, max_length=200, seed=seed)


@pytest.fixture
def stored(agent, engine, task: Task) -> Attempt:
    """A rollout of several segments that ends in its last turn."""
    [(_, attempt)] = drive([agent.attempt(task, 0)], engine(), Boxes())
    assert len(attempt.rollout.segments) >= 3 and len(turns_of(attempt.rollout)) == 8
    return attempt


def test_the_past_is_the_stored_one_and_the_same_draws_give_the_same_future(stored, agent, engine) -> None:
    for turn, (number, start) in enumerate(turns_of(stored.rollout)):
        forked = fork(stored, turn, agent, engine(), Boxes(), count=3)
        assert forked.exact and forked.turn == turn and len(forked.attempts) == 3
        assert pack_attempt(forked.attempts[0]) == pack_attempt(stored), "the draws of rollout 0"
        for future in forked.attempts[1:]:
            head = future.rollout.segments[number]
            assert np.array_equal(head.token_ids[:start], stored.rollout.segments[number].token_ids[:start])
            assert np.array_equal(head.logprob[:start], stored.rollout.segments[number].logprob[:start])
            assert not any(stream.route_fault() for stream in to_streams(future))
        if turn == 0:
            assert any(pack_attempt(future) != pack_attempt(stored) for future in forked.attempts[1:])


def test_a_hint_is_read_before_the_turn_and_a_message_takes_its_place(stored, agent, engine) -> None:
    renderer = agent.renderer
    number, start = turns_of(stored.rollout)[4]
    hinted = fork(stored, 4, agent, engine(), Boxes(), count=2, hint="read f.py")
    for attempt in hinted.attempts:
        segment = attempt.rollout.segments[number]
        cue, ids = 1, renderer.encoded([renderer.user, "read f.py", renderer.end])
        at = slice(start - cue, start - cue + len(ids))
        assert segment.token_ids[at].tolist() == ids and not segment.acted[at].any()
        assert (
            segment.token_ids[: start - cue].tolist()
            == stored.rollout.segments[number].token_ids[: start - cue].tolist()
        )
    assert not hinted.exact, "the hint stands where the turn began"
    finish = renderer.turn(one(ToolCall(name="finish", arguments={})))
    ended = fork(stored, 4, agent, engine(), Boxes(), count=1, message=finish)
    [attempt] = ended.attempts
    assert ended.exact and attempt.rollout.stop == "finished"
    assert attempt.rollout.segments[-1].token_ids.tolist()[start:] == finish


def test_tools_that_answer_otherwise_are_noticed(stored, agent, engine, task: Task) -> None:
    read = agent.renderer.turn(one(ToolCall(name="read_file", arguments={"path": "f.py"})))
    once = fork(stored, 0, agent, engine(), Boxes(), count=1, message=read).attempts[0]
    assert fork(once, 1, agent, engine(), Boxes(), count=1).exact
    moved = replace(once, task=task.model_copy(update={"files": {**task.files, "f.py": "def f(x):\n    return 1\n"}}))
    assert not fork(moved, 1, agent, engine(), Boxes(), count=1).exact


def test_a_future_without_a_grade_says_nothing_of_its_turn(stored) -> None:
    grades = [Grade(status="graded", tests={"t": passed}) for passed in (True, False)]
    futures = tuple(replace(stored, grade=grade) for grade in (*grades, *[Grade(status="infra_error")] * 2))
    assert str(Fork(turn=0, attempts=futures, exact=True)) == "50% (9% to 91%)", "Wilson's of one in two"


def test_futures_of_several_forks_are_one_fork(stored) -> None:
    grades = [Grade(status="graded", tests={"t": passed}) for passed in (True, False, True)]
    first, *others = (replace(stored, grade=grade) for grade in grades)
    forks = [Fork(turn=2, attempts=(first,), exact=True), Fork(turn=2, attempts=tuple(others), exact=False)]
    assert pool(forks[:1]) == forks[0]
    assert pool(forks).outcomes == [True, False, True] and pool(forks).turn == 2 and not pool(forks).exact


def test_the_turn_of_the_first_edit_counts_messages(stored) -> None:
    def rollout(*calls: tuple[str, bool]) -> Rollout:
        turns = [Turn(call=f'{{"name": "{name}"}}', observation="", beside=beside) for name, beside in calls]
        return replace(stored.rollout, turns=tuple(turns))

    calls = [("run_tests", False), ("grep", False), ("undo", True), ("substitute", False), ("substitute", False)]
    assert first_edit(rollout(*calls)) == 2 and first_edit(rollout(*calls[:3])) == 0
    assert first_edit(rollout(*calls[:2], ("substitute", True))) == 1


class Reader(WithoutModel):
    """Reads a file in every turn; its summary has a thought and three lines, one of them twice."""

    def written(self, request: Request) -> list[int]:
        r = self.renderer
        query = r.ask(r.queries["self"])
        if request.token_ids[-len(query) :] == query:
            return r.encoded(["I think", r.to, "f fails\nnice day\nf fails", r.end])
        return r.turn(turn_([ToolCall(name="read_file", arguments={"path": "f.py"})]))


def test_a_summary_is_rolled_out_again_without_each_of_its_lines(tokenizer, task: Task) -> None:
    limits = Limits(turns=4, turn_tokens=20, tokens=300)
    agent = Agent(CompactRenderer(tokenizer), limits=limits, summary=SummarySettings(trigger=40, tokens=60))
    [(_, attempt)] = drive([agent.attempt(task, 0)], Reader(agent.renderer), Boxes())
    turn = next(n for n, (number, _) in enumerate(turns_of(attempt.rollout)) if number == 1)
    position, ids = summary_before(attempt.rollout, turn)
    first = attempt.rollout.segments[0]
    assert ids == first.token_ids[first.messages[-1]].tolist() and position == len(first.messages) - 1 == turn
    forks = ablate(attempt, turn, agent, lambda: Reader(agent.renderer), Boxes(), count=1)
    assert list(forks) == ["", "f fails", "nice day"] and forks[""].exact and not forks["nice day"].exact
    begun = {line: forked.attempts[0].rollout.segments[1] for line, forked in forks.items()}
    texts = {line: tokenizer.decode(s.token_ids[: int(s.acted.argmax())].tolist()) for line, s in begun.items()}
    assert texts["nice day"].count("f fails") == 2 and "nice day" not in texts["nice day"]
    assert texts["f fails"].count("nice day") == 1 and "f fails" not in texts["f fails"]
    assert all("I think" not in text for text in texts.values())
    with pytest.raises(ValueError, match="turn 0: the rollout of task t has no summary before it"):
        fork(attempt, 0, agent, Reader(agent.renderer), Boxes(), summary=ids)
