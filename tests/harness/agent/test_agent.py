"""The loop and its driver: limits, faults, order, and token streams that say exactly what happened."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_nb.harness.agent.chat import CallResult, Said, User, Written
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.rewards import RewardSettings, reward
from composer_nb.harness.rollout import Kind, Rollout
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.errors import SandboxFailure
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.tour.expert import ScriptedPolicy, one

TEST, FINISH, READ = call("run_tests"), call("finish"), call("read_file", path="f.py")
MEND = call("edit_line", path="f.py", line=4, text="if x > k:")
Make = Callable[..., Any]


def run(agent: Agent, task: Task, policy: Any, boxes: Any, count: int = 1) -> list[Attempt]:
    """Return `count` attempts, in order of position."""
    attempts = dict(drive((agent.attempt(task, n) for n in range(count)), policy, boxes))
    assert sorted(attempts) == list(range(count))
    return [attempts[n] for n in range(count)]


def calls(renderer: CompactRenderer, *sequence: ToolCall) -> Callable[[int, int], list[int]]:
    """Return a function that has a Typist make these calls, and then run the tests for ever."""
    token_ids = [renderer.turn(one(tool_call)) for tool_call in sequence]
    last = renderer.turn(one(TEST))
    return lambda rollout, turn: token_ids[turn] if turn < len(token_ids) else last


def check_streams(rollout: Rollout, policy: Any, number: int) -> None:
    """Assert that the segment is what the policy was sent and wrote, token for token, and that its arrays are aligned."""
    [segment] = rollout.segments
    size = rollout.tokens
    streams = segment.token_ids, segment.kind, segment.logprob, segment.policy_version
    assert [(len(x), x.dtype) for x in streams] == [(size, t) for t in (np.int32, np.uint8, np.float32, np.int32)]
    position, sampled_count = 0, 0
    requests = [request for request in policy.requests if request.rollout == number]
    for turn, request in enumerate(requests):
        end = position + len(request.token_ids)
        assert segment.token_ids[position:end].tolist() == list(request.token_ids)
        assert set(segment.kind[position:end]) == {Kind.OBSERVATION if turn else Kind.PROMPT}
        assert not segment.logprob[position:end].any() and set(segment.policy_version[position:end]) == {-1}
        position = end
        while end < size and segment.kind[end] == Kind.TOOL_CALL:
            end += 1
        count = end - position
        assert 0 < count <= request.max_tokens
        assert segment.logprob[position:end].tolist() == [-float(sampled_count + n) for n in range(1, count + 1)]
        assert set(segment.policy_version[position:end]) == {100 + turn}
        position, sampled_count = end, sampled_count + count
    assert position == size and sampled_count == rollout.sampled == int(segment.acted.sum())


def test_a_task_is_solved(agent: Agent, task: Task, typist: Make, sandboxes: SandboxExecutor) -> None:
    policy = typist(calls(agent.renderer, READ, MEND, TEST, FINISH))
    [attempt] = run(agent, task, policy, sandboxes)
    assert attempt.rollout.stop == "finished" and attempt.grade.passed and not attempt.rollout.invalid_calls
    assert [turn.observation for turn in attempt.rollout.turns][1:] == ["ok", "pass 2", ""]
    assert [turn.call for turn in attempt.rollout.turns] == [tool_call.json for tool_call in (READ, MEND, TEST, FINISH)]
    assert (attempt.rollout.turns[2].tests_passed, attempt.rollout.turns[2].tests_run) == (2, 2)
    assert attempt.rollout.files == task.files | task.solution and task.files != attempt.rollout.files
    check_streams(attempt.rollout, policy, 0)


@settings(max_examples=80)
@given(data=st.data())
def test_whatever_is_written_limits_hold_and_everything_is_counted(
    renderer: CompactRenderer, task: Task, typist: Make, boxes: Make, data: st.DataObject
) -> None:
    prompt = len(renderer.read([User(text=task.instruction)]))
    limits = Limits(
        turns=data.draw(st.integers(1, 5), "turns"),
        turn_tokens=data.draw(st.integers(1, 40), "turn_tokens"),
        tokens=prompt + data.draw(st.integers(1, 150), "tokens"),
    )
    good = [renderer.turn(one(tool_call)) for tool_call in (READ, MEND, TEST, FINISH)]
    token = st.integers(0, renderer.tokenizer.get_vocab_size() - 1)
    wild = st.lists(token, min_size=1, max_size=60)
    turns = data.draw(st.lists(st.sampled_from(good) | wild, min_size=5, max_size=5), "turns written")
    policy = typist(lambda rollout, turn: turns[turn])
    [attempt] = run(Agent(renderer, limits=limits), task, policy, boxes("[5, 3]"))
    rollout = attempt.rollout
    check_streams(rollout, policy, 0)
    assert rollout.tokens <= limits.tokens and 1 <= rollout.messages <= limits.turns
    assert all(1 <= request.max_tokens <= limits.turn_tokens for request in policy.requests)
    assert len(policy.requests) == rollout.messages and policy.released == [0]
    assert rollout.invalid_calls == sum(turn.error is not None for turn in rollout.turns)
    if rollout.stop == "finished":
        assert rollout.turns[-1].call == FINISH.json
    elif rollout.stop == "turns":
        assert rollout.messages == limits.turns
    else:
        first = max(index for index, turn in enumerate(rollout.turns) if not turn.beside)
        last = renderer.read([CallResult(id="", text=turn.observation) for turn in rollout.turns[first:]])
        assert rollout.stop == "tokens" and rollout.tokens + len(last) >= limits.tokens


@pytest.mark.parametrize("room", [0, -5])
def test_a_prompt_that_leaves_no_room_is_an_error(
    renderer: CompactRenderer, task: Task, typist: Make, boxes: Make, room: int
) -> None:
    size = len(renderer.read([User(text=task.instruction)]))
    agent = Agent(renderer, limits=Limits(tokens=size + room))
    with pytest.raises(ValueError, match=rf"task keep: its prompt has {size} tokens, and limits\.tokens={size + room}"):
        run(agent, task, typist(calls(renderer)), boxes("1"))


def test_a_fault_in_a_tool_is_nobodys_reward(agent: Agent, task: Task, typist: Make, boxes: Make) -> None:
    poison, sandboxes = MEND.arguments["text"], boxes("1")

    class Faulty:
        def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
            if any(poison in request.files["f.py"] for request in requests):
                raise SandboxFailure("gone")
            answers: list[tuple[CallOutcome, ...]] = sandboxes.run(requests)
            return answers

    mend, test = calls(agent.renderer, MEND, TEST, FINISH), calls(agent.renderer, TEST, FINISH)
    policy = typist(lambda n, turn: (mend if n == 1 else test)(n, turn))
    attempts = run(agent, task, policy, Faulty(), 4)
    assert [attempt.grade.status for attempt in attempts] == ["graded", "infra_error", "graded", "graded"]
    rollout, grade = attempts[1].rollout, attempts[1].grade
    assert rollout.stop == "infrastructure" and len(rollout.turns) == 1 and not grade.passed and not grade.tests
    scored = reward(rollout, grade, RewardSettings(weights={"solved": 1.0, "unfinished": -1.0}))
    assert scored.total is None and not scored.terms
    check_streams(rollout, policy, 1)


@pytest.mark.parametrize("capacity", [1, 3, 10])
@pytest.mark.parametrize("slow", [1, 3])
def test_results_depend_on_neither_capacity_nor_pace(
    agent: Agent, task: Task, typist: Make, sandboxes: SandboxExecutor, capacity: int, slow: int
) -> None:
    lengths = [0, 3, 1, 5, 2, 0, 4]
    scripts = [calls(agent.renderer, *[READ, TEST, READ, MEND, TEST][:n], FINISH) for n in lengths]
    policy = typist(lambda n, turn: scripts[n](n, turn), capacity=capacity, slow=slow)
    attempts = run(agent, task, policy, sandboxes, len(lengths))
    assert [len(attempt.rollout.turns) for attempt in attempts] == [n + 1 for n in lengths]
    assert [attempt.grade.passed for attempt in attempts] == [n >= 4 for n in lengths]
    assert policy.most == min(capacity, len(lengths)) and sorted(policy.released) == list(range(len(lengths)))
    for number, attempt in enumerate(attempts):
        check_streams(attempt.rollout, policy, number)


def test_agents_start_when_there_is_room_and_a_caller_that_stops_early_leaves_nothing_behind(
    agent: Agent, task: Task, typist: Make, boxes: Make
) -> None:
    started: list[int] = []
    earlier = set(threading.enumerate())

    def agents() -> Any:
        for n in range(5):
            started.append(n)
            yield agent.attempt(task, n)

    policy = typist(lambda n, turn: agent.renderer.turn(one(FINISH if n == 0 else READ)), capacity=3)
    results = drive(agents(), policy, boxes("1"))
    assert next(results)[0] == 0
    results.close()
    assert started == [0, 1, 2] == sorted(policy.released)
    for thread in {thread for thread in threading.enumerate() if thread.name == "agent"} - earlier:
        thread.join(20)  # its result may have been taken a moment before its last line
        assert not thread.is_alive()
    assert [a.rollout.stop for a in run(agent, task, policy, boxes("1"), 3)] == ["finished", "turns", "turns"]


def test_a_task_lowers_the_limits_of_the_run_and_never_raises_them(
    renderer: CompactRenderer, sandboxes: SandboxExecutor, task: Task
) -> None:
    agent = Agent(renderer, limits=Limits(turns=3, turn_tokens=200, tokens=4000))

    def turns(**metadata: str) -> Rollout:
        limited = Task(**task.model_dump() | {"metadata": metadata})
        return run(agent, limited, ScriptedPolicy(renderer, lambda number: forever()), sandboxes)[0].rollout

    def forever() -> Any:
        while True:
            yield Said(calls=(Written(id="call_0", call=READ),))

    assert len(turns(max_turns="2").turns) == 2 and len(turns(max_turns="9").turns) == 3
    short = turns(max_tokens=str(turns(max_turns="1").tokens + 1))
    assert short.stop == "tokens" and len(short.turns) == 1
    for wrong in ("0", "-1", "many", "1.5", "²", "9" * 5000):
        with pytest.raises(ValueError, match="metadata.max_turns must be a whole number above 0"):
            turns(max_turns=wrong)
