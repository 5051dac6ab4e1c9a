"""The loop and its driver: limits, faults, order, and token streams that say exactly what happened."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import CallResult, Said, Written
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import Seat, drive
from composer_nb.harness.agent.loop import system_text
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent, limits_of
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Request, Trace
from composer_nb.harness.rewards import RewardSettings, reward
from composer_nb.harness.rollout import Kind, Rollout, Segment
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.tour.expert import ScriptedPolicy, expert, one

TEST = ToolCall(name="run_tests", arguments={})
FINISH = ToolCall(name="finish", arguments={})
READ = ToolCall(name="read_file", arguments={"path": "f.py"})
MEND = ToolCall(name="edit_line", arguments={"path": "f.py", "line": 4, "text": "if x > k:"})
Make = Callable[..., Any]


def run(agent: Agent, task: Task, policy: Any, boxes: Any, count: int = 1) -> list[Attempt]:
    """`count` attempts, in order of position."""
    done = dict(drive((agent.attempt(task, n) for n in range(count)), policy, boxes))
    assert sorted(done) == list(range(count))
    return [done[n] for n in range(count)]


def calls(renderer: CompactRenderer, *sequence: ToolCall) -> Callable[[int, int], list[int]]:
    """What a Typist writes to make these calls, and tests for ever after."""
    written = [renderer.turn(one(call)) for call in sequence]
    last = renderer.turn(one(TEST))
    return lambda rollout, turn: written[turn] if turn < len(written) else last


def check_streams(rollout: Rollout, policy: Any, number: int) -> None:
    """The segment is what the policy was sent and wrote, token for token, and its arrays are aligned."""
    [segment] = rollout.segments
    size = rollout.tokens
    assert {len(x) for x in (segment.token_ids, segment.kind, segment.logprob, segment.policy_version)} == {size}
    assert [x.dtype for x in (segment.token_ids, segment.kind, segment.logprob, segment.policy_version)] == [
        *(np.int32, np.uint8, np.float32, np.int32)
    ]
    place, written = 0, 0
    asked = [request for request in policy.asked if request.rollout == number]
    for turn, request in enumerate(asked):
        end = place + len(request.token_ids)
        assert segment.token_ids[place:end].tolist() == list(request.token_ids)
        assert set(segment.kind[place:end]) == {Kind.OBSERVATION if turn else Kind.PROMPT}
        assert not segment.logprob[place:end].any() and set(segment.policy_version[place:end]) == {-1}
        place = end
        while end < size and segment.kind[end] == Kind.TOOL_CALL:
            end += 1
        count = end - place
        assert 0 < count <= request.max_tokens
        assert segment.logprob[place:end].tolist() == [-float(written + n) for n in range(1, count + 1)]
        assert set(segment.policy_version[place:end]) == {100 + turn}
        place, written = end, written + count
    assert place == size and written == rollout.sampled == int(segment.acted.sum())


def test_a_task_is_solved(agent: Agent, task: Task, typist: Make, sandboxes: SandboxExecutor) -> None:
    policy = typist(calls(agent.renderer, READ, MEND, TEST, FINISH))
    [done] = run(agent, task, policy, sandboxes)
    assert done.rollout.stop == "finished" and done.grade.passed and not done.rollout.invalid_calls
    assert [turn.observation for turn in done.rollout.turns][1:] == ["ok", "pass 2", ""]
    assert [turn.call for turn in done.rollout.turns] == [call.json for call in (READ, MEND, TEST, FINISH)]
    assert (done.rollout.turns[2].tests_passed, done.rollout.turns[2].tests_run) == (2, 2)
    assert done.rollout.files == task.files | task.solution and task.files != done.rollout.files
    check_streams(done.rollout, policy, 0)


def test_rollouts_of_a_group_share_nothing_but_the_task(
    agent: Agent, task: Task, typist: Make, sandboxes: SandboxExecutor
) -> None:
    mend = calls(agent.renderer, MEND, FINISH)
    spoil = calls(agent.renderer, FINISH)
    done = run(agent, task, typist(lambda n, turn: (mend if n % 2 else spoil)(n, turn)), sandboxes, 4)
    assert [each.grade.passed for each in done] == [False, True, False, True]


@settings(max_examples=80)
@given(data=st.data())
def test_whatever_is_written_limits_hold_and_everything_is_counted(
    renderer: CompactRenderer, task: Task, typist: Make, boxes: Make, data: st.DataObject
) -> None:
    prompt = len(renderer.prompt(task.instruction))
    limits = Limits(
        turns=data.draw(st.integers(1, 5), "turns"),
        turn_tokens=data.draw(st.integers(1, 40), "turn_tokens"),
        tokens=prompt + data.draw(st.integers(1, 150), "tokens"),
    )
    good = [renderer.turn(one(call)) for call in (READ, MEND, TEST, FINISH)]
    token = st.integers(0, renderer.tokenizer.get_vocab_size() - 1)
    wild = st.lists(token, min_size=1, max_size=60)
    turns = data.draw(st.lists(st.sampled_from(good) | wild, min_size=5, max_size=5), "turns written")
    policy = typist(lambda rollout, turn: turns[turn])
    [done] = run(Agent(renderer, limits=limits), task, policy, boxes("[5, 3]"))
    rollout = done.rollout
    check_streams(rollout, policy, 0)
    assert rollout.tokens <= limits.tokens and 1 <= rollout.messages <= limits.turns
    assert all(1 <= request.max_tokens <= limits.turn_tokens for request in policy.asked)
    assert len(policy.asked) == rollout.messages and policy.released == [0]
    assert rollout.invalid_calls == sum(turn.error is not None for turn in rollout.turns)
    if rollout.stop == "finished":
        assert rollout.turns[-1].call == FINISH.json
    elif rollout.stop == "turns":
        assert rollout.messages == limits.turns
    else:
        first = max(place for place, turn in enumerate(rollout.turns) if not turn.beside)
        last = renderer.results([CallResult(id="", text=turn.observation) for turn in rollout.turns[first:]])
        assert rollout.stop == "tokens" and rollout.tokens + len(last) >= limits.tokens


def test_garbage_for_ever_is_answered_and_ends(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    garbage = [agent.renderer.user] * 3
    endless = agent.renderer.encode("x" * 300)
    [first, second, third] = run(
        agent, task, typist(lambda rollout, turn: [garbage, endless, []][rollout]), boxes("1"), 3
    )
    assert [turn.call for turn in first.rollout.turns] == [
        "<|user|>"
    ] * 6  # cut at the token that has no business there
    for done in (first, second):
        assert done.rollout.stop == "turns" and done.rollout.invalid_calls == 6
        assert {turn.observation for turn in done.rollout.turns} == {"error: bad call"}
        assert {turn.error for turn in done.rollout.turns} == {"InvalidArguments"}
        assert done.grade.status == "graded" and not done.grade.passed
    assert second.rollout.sampled == 6 * agent.limits.turn_tokens
    assert third.rollout.sampled == 0 and third.rollout.invalid_calls == 6


def test_an_invalid_call_lowers_a_reward_that_weighs_it(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    bad = ToolCall(name="read_file", arguments={"path": "no.py"})
    sequences = [(READ, FINISH), (bad, FINISH), (bad, bad, FINISH)]
    scripts = [calls(agent.renderer, *sequence) for sequence in sequences]
    done = run(agent, task, typist(lambda n, turn: scripts[n](n, turn)), boxes("1"), 3)
    weights = RewardSettings(weights={"solved": 1.0, "invalid_calls": -0.5})
    totals = [reward(each.rollout, each.grade, weights).total for each in done]
    assert totals == [0.0, -0.5 / 2, -0.5 * 2 / 3]


def test_an_environment_without_tests_is_no_fault_of_the_agent(
    agent: Agent, task: Task, typist: Make, boxes: Make
) -> None:
    bare = task.model_copy(update={"files": {"f.py": task.files["f.py"]}})
    [done] = run(agent, bare, typist(calls(agent.renderer, TEST, FINISH)), boxes("1"))
    assert done.rollout.turns[0].error == "UnexpectedEnvironment" and done.rollout.invalid_calls == 0


def test_the_last_turn_may_finish(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    [done] = run(agent, task, typist(calls(agent.renderer, *[READ] * 5, FINISH)), boxes("1"))
    assert done.rollout.stop == "finished" and len(done.rollout.turns) == agent.limits.turns


def test_time_runs_out(
    renderer: CompactRenderer, task: Task, typist: Make, boxes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 1000, 4))
    monkeypatch.setattr(Seat, "clock", lambda seat: float(next(times)))
    agent = Agent(renderer, limits=Limits(seconds=10.0, turns=50, tokens=5000))
    [done] = run(agent, task, typist(calls(renderer)), boxes("1"))
    assert done.rollout.stop == "time" and len(done.rollout.turns) == 3
    assert done.grade.status == "graded"


@pytest.mark.parametrize("name", ["turns", "turn_tokens", "tokens", "seconds"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_limit_is_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"limits\.{name}=.*: must be "):
        Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("room", [0, -5])
def test_a_prompt_that_leaves_no_room_is_an_error(
    renderer: CompactRenderer, task: Task, typist: Make, boxes: Make, room: int
) -> None:
    size = len(renderer.prompt(task.instruction))
    agent = Agent(renderer, limits=Limits(tokens=size + room))
    with pytest.raises(ValueError, match=rf"task keep: its prompt has {size} tokens, and limits\.tokens={size + room}"):
        run(agent, task, typist(calls(renderer)), boxes("1"))


def test_a_policy_that_writes_more_than_it_may_is_a_bug(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    policy = typist(lambda rollout, turn: agent.renderer.encode("x" * 300))
    wild = policy._complete
    policy._complete = lambda request: wild(Request(rollout=request.rollout, token_ids=[], max_tokens=1000))
    with pytest.raises(AssertionError):
        run(agent, task, policy, boxes("1"))
    assert policy.released == [0]


class Faulty:
    """Sandboxes that fail on the calls and for the sources named."""

    def __init__(self, boxes: Any, fails: Callable[[int, Sequence[CallRequest]], bool]) -> None:
        self.boxes, self.fails, self.count = boxes, fails, 0

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        self.count += 1
        if self.fails(self.count, requests):
            raise SandboxFailure("gone")
        result: list[tuple[CallOutcome, ...]] = self.boxes.run(requests)
        return result


def test_a_fault_in_a_tool_is_nobodys_reward(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    policy = typist(calls(agent.renderer, READ, TEST, FINISH))
    [done] = run(agent, task, policy, Faulty(boxes("1"), lambda count, requests: True))
    assert done.rollout.stop == "infrastructure" and len(done.rollout.turns) == 1
    assert done.grade.status == "infra_error" and not done.grade.passed and not done.grade.tests
    scored = reward(done.rollout, done.grade, RewardSettings(weights={"solved": 1.0, "unfinished": -1.0}))
    assert scored.total is None and not scored.terms
    check_streams(done.rollout, policy, 0)


def test_a_fault_in_grading_is_nobodys_reward(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    [done] = run(agent, task, typist(calls(agent.renderer, FINISH)), Faulty(boxes("1"), lambda count, requests: True))
    assert done.rollout.stop == "finished" and done.grade.status == "infra_error"
    assert reward(done.rollout, done.grade, RewardSettings()).total is None


def test_a_fault_that_passes_is_not_seen(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    """One failed batch of several is tried again request by request."""
    flaky = Faulty(boxes("1"), lambda count, requests: count == 1)
    done = run(agent, task, typist(calls(agent.renderer, TEST, FINISH)), flaky, 3)
    assert [each.grade.status for each in done] == ["graded"] * 3
    assert [each.rollout.stop for each in done] == ["finished"] * 3


def test_a_fault_hits_only_those_that_it_concerns(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    poison = MEND.arguments["text"]
    mend, test = calls(agent.renderer, MEND, TEST, FINISH), calls(agent.renderer, TEST, FINISH)
    faulty = Faulty(boxes("1"), lambda count, requests: any(poison in r.files["f.py"] for r in requests))
    done = run(agent, task, typist(lambda n, turn: (mend if n == 1 else test)(n, turn)), faulty, 4)
    assert [each.grade.status for each in done] == ["graded", "infra_error", "graded", "graded"]


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("slow", [1, 3])
def test_results_depend_on_neither_capacity_nor_pace(
    agent: Agent, task: Task, typist: Make, sandboxes: SandboxExecutor, capacity: int, slow: int
) -> None:
    lengths = [0, 3, 1, 5, 2, 0, 4]
    scripts = [calls(agent.renderer, *[READ, TEST, READ, MEND, TEST][:n], FINISH) for n in lengths]
    policy = typist(lambda n, turn: scripts[n](n, turn), capacity=capacity, slow=slow)
    done = run(agent, task, policy, sandboxes, len(lengths))
    assert [len(each.rollout.turns) for each in done] == [n + 1 for n in lengths]
    assert [each.grade.passed for each in done] == [n >= 4 for n in lengths]
    assert policy.most == min(capacity, len(lengths)) and sorted(policy.released) == list(range(len(lengths)))
    for number, each in enumerate(done):
        check_streams(each.rollout, policy, number)


def test_executions_of_a_round_share_a_batch(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    inside = boxes("1")
    run(agent, task, typist(calls(agent.renderer, TEST, FINISH)), inside, 4)
    assert [len(batch) for batch in inside.batches] == [4, 4]


def test_agents_are_started_only_when_there_is_room(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    started: list[int] = []

    def agents() -> Any:
        for n in range(6):
            started.append(n)
            yield agent.attempt(task, n)

    policy = typist(calls(agent.renderer, FINISH), capacity=2)
    results = drive(agents(), policy, boxes("1"))
    next(results)
    assert len(started) < 6
    results.close()


def test_a_caller_that_stops_early_leaves_nothing_behind(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    policy = typist(lambda n, turn: agent.renderer.turn(one(FINISH if n == 0 else READ)), capacity=3)
    runs = [agent.attempt(task, n) for n in range(5)]
    results = drive(runs, policy, boxes("1"))
    assert next(results)[0] == 0
    results.close()
    assert sorted(policy.released) == [0, 1, 2]  # 3 and 4 were never started
    assert not [thread for thread in threading.enumerate() if thread.name == "agent"]
    assert [each.rollout.stop for each in run(agent, task, policy, boxes("1"), 3)] == ["finished", "turns", "turns"]


def test_an_error_in_one_agent_closes_the_others(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    policy = typist(calls(agent.renderer, READ))
    long = task.model_copy(update={"instruction": "x" * 5000})
    runs = [agent.attempt(each, n) for n, each in enumerate([task, task, long])]
    with pytest.raises(ValueError, match=r"limits\.tokens"):
        list(drive(runs, policy, boxes("1")))
    assert sorted(policy.released) == [0, 1]


def test_a_policy_without_room_is_an_error(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    with pytest.raises(ValueError, match="holds 0 rollouts at a time"):
        run(agent, task, typist(calls(agent.renderer), capacity=0), boxes("1"))


def test_no_agents_are_no_results(typist: Make, boxes: Make, renderer: CompactRenderer) -> None:
    assert list(drive([], typist(calls(renderer)), boxes("1"))) == []


def test_streams_that_are_not_aligned_are_refused() -> None:
    def segment(**change: Any) -> Segment:
        ids = np.zeros(3, np.int32)
        arrays = {"token_ids": ids, "kind": ids, "logprob": ids, "policy_version": ids}
        return Segment(**arrays | change)  # type: ignore[arg-type]

    segment(trace=Trace(route_valid=np.ones(3, np.bool_)))
    for change in (
        {"kind": np.zeros(2, np.uint8)},
        {"logprob": np.zeros(4, np.float32)},
        {"policy_version": np.zeros(0, np.int32)},
        {"trace": Trace(route_valid=np.ones(2, np.bool_))},
    ):
        with pytest.raises(ValueError, match="streams of"):
            segment(**change)


def test_what_the_agent_wrote_is_trainable() -> None:
    kinds = np.array(list(Kind), np.uint8)
    blank = np.zeros(len(kinds), np.int32)
    segment = Segment(token_ids=blank, kind=kinds, logprob=blank.astype(np.float32), policy_version=blank)
    acted = {Kind.THINKING, Kind.TOOL_CALL, Kind.FINAL_MESSAGE, Kind.SUMMARY}
    assert {Kind(kind) for kind in kinds[segment.acted]} == acted


@pytest.mark.parametrize("rate", [0.0, 0.6])
def test_demonstrations_are_token_for_token_what_was_said(
    renderer: CompactRenderer, task: Task, sandboxes: SandboxExecutor, rate: float
) -> None:
    agent = Agent(renderer, limits=Limits(turns=20, turn_tokens=64, tokens=2000))
    policy = ScriptedPolicy(renderer, lambda n: expert(task, Random(n), rate))
    for done in run(agent, task, policy, sandboxes, 12):
        [segment] = done.rollout.segments
        expected = renderer.prompt(task.instruction)
        for place, turn in enumerate(done.rollout.turns):
            assert turn.error is None
            arguments = json.loads(turn.call)
            expected += renderer.turn(one(ToolCall(name=arguments["name"], arguments=arguments["arguments"])))
            if place + 1 < len(done.rollout.turns):
                expected += renderer.observation(turn.observation)
        assert segment.token_ids.tolist() == expected
        assert done.rollout.stop == "finished"


def test_a_task_lowers_the_limits_of_the_run_and_never_raises_them(
    renderer: CompactRenderer, sandboxes: SandboxExecutor, task: Task
) -> None:
    agent = Agent(renderer, limits=Limits(turns=3, turn_tokens=200, tokens=4000))

    def turns(**own: str) -> Rollout:
        held = Task(**task.model_dump() | {"metadata": own})
        return run(agent, held, ScriptedPolicy(renderer, lambda number: forever()), sandboxes)[0].rollout

    def forever() -> Any:
        while True:
            yield Said(calls=(Written(id="call_0", call=READ),))

    assert len(turns(max_turns="2").turns) == 2 and len(turns(max_turns="9").turns) == 3
    short = turns(max_tokens=str(turns(max_turns="1").tokens + 1))
    assert short.stop == "tokens" and len(short.turns) == 1
    for wrong in ("0", "-1", "many", "1.5", "²", "9" * 5000):
        with pytest.raises(ValueError, match="metadata.max_turns must be a whole number above 0"):
            turns(max_turns=wrong)


def test_limits_of_a_task_survive_harbor(task: Task, tmp_path: Path) -> None:
    held = task.model_copy(update={"metadata": {"max_turns": "2"}})
    path = held.to_harbor(tmp_path / "held")
    assert limits_of(Task.from_harbor(path), Limits()).turns == 2
    text = (path / "task.toml").read_text()
    (path / "task.toml").write_text(text.replace('= "2"', '= "two"'))
    with pytest.raises(ValueError, match="max_turns must be a whole number above 0, not 'two'"):
        Task.from_harbor(path)


def test_the_system_text_is_true_in_training_in_evaluation_and_for_a_user() -> None:
    """One sandbox serves its calls in sequence; a user may answer a message without a call, and a task does not."""
    text = system_text("/repository")
    assert "/repository" in text and "parallel" not in text and "cannot answer" not in text
