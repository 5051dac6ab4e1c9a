"""Rollouts over a trigger: what is asked, written and read again; token for token, in every format."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
from tokenizers import AddedToken, Tokenizer

from composer_nb.harness.agent.chat import ChatRenderer, Said, User
from composer_nb.harness.agent.compact import CompactRenderer
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.loop import converse
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.scripts import play, turn
from composer_nb.harness.agent.summary import OPENS, PROMPTED, SummarySettings
from composer_nb.harness.agent.turns import Limits, ScriptTurnPolicy, Spoken
from composer_nb.harness.attempt import Agent, Environment, attempt
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import SEGMENT_STRIDE, first_segment
from composer_nb.harness.rollout import Kind
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.session import HISTORY, Session
from composer_nb.harness.tools.tool_call import call
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.tour.expert import Script, ScriptedPolicy, one

READ, TEST, UNDO, FINISH = call("read_file", path="f.py"), call("run_tests"), call("undo"), call("finish")
LIMITS = Limits(turns=30, turn_tokens=60, tokens=900)
Make = Callable[..., Any]


def tries(*operators: str) -> Script:
    """Read; then try operators, each with a test in the same turn, undone if the test fails; finish."""
    yield one(READ)
    for number, operator in enumerate(operators):
        edit = call("substitute", path="f.py", old="x < k", new=f"x {operator} k")
        yield turn([*[UNDO] * (number > 0), edit, TEST])
    yield one(FINISH)


def long_attempt(
    renderer: CompactRenderer,
    task: Task,
    sandboxes: Any,
    *,
    trigger: int = 260,
    limits: Limits = LIMITS,
    **summary: Any,
) -> Attempt:
    agent = Agent(renderer, limits=limits, summary=SummarySettings(trigger=trigger, **summary))
    policy = ScriptedPolicy(renderer, lambda n: tries("<=", "==", "!=", ">=", ">"), chained=trigger > 0)
    [(_, result)] = drive([agent.attempt(task, 5)], policy, sandboxes)
    return result


def test_a_rollout_over_a_trigger_goes_on_in_segments_and_is_kept(
    renderer: CompactRenderer, task: Task, sandboxes: Any
) -> None:
    result = long_attempt(renderer, task, sandboxes)
    segments = result.rollout.segments
    assert result.grade.passed and result.rollout.stop == "finished" and len(segments) >= 3, "two summaries at least"
    assert [segment.parent for segment in segments] == list(range(-1, len(segments) - 1))
    assert max(len(segment.token_ids) for segment in segments) < LIMITS.tokens < result.rollout.tokens
    for index, segment in enumerate(segments):
        text = renderer.tokenizer.decode(segment.token_ids.tolist(), skip_special_tokens=False)
        assert text.startswith(f"<|bos|><|user|>{task.instruction}") and segment.kind[0] == Kind.PROMPT
        assert (f"{HISTORY}<|end|><|call|>read f.py<|end|>" in text) == (index > 0), "read again after a summary"
        summed = index + 1 < len(segments)
        assert ("<|user|>summary<|end|><|call|>" in text) == summed == bool((segment.kind == Kind.SUMMARY).any())
        if summed:
            summary = renderer.tokenizer.decode(segment.token_ids[segment.kind == Kind.SUMMARY].tolist())
            assert summary.removesuffix("<|end|>") in renderer.tokenizer.decode(segments[index + 1].token_ids.tolist())
            assert "tried x < k > x <= k: fail" in summary and "\nleft: " in summary
            assert segment.reused == segment.messages[-2][-1] > 0.3 * len(segment.token_ids)
    assert result.rollout.messages == sum(len(s.messages) for s in segments) - (len(segments) - 1)
    assert set(result.rollout.files) == set(task.files), "the history is not graded"
    assert pack_attempt(unpack_attempt(pack_attempt(result), task)) == pack_attempt(result)


@pytest.mark.parametrize("kind", ["prompted", "truncate"])
def test_the_baselines_are_values_of_one_setting(
    renderer: CompactRenderer, task: Task, sandboxes: Any, kind: Literal["prompted", "truncate"]
) -> None:
    limits = replace(LIMITS, tokens=4000)
    result = long_attempt(renderer, task, sandboxes, kind=kind, trigger=200, limits=limits)
    segments = result.rollout.segments
    assert result.grade.passed and len(segments) > 2
    if kind == "prompted":
        query = renderer.ask(PROMPTED)
        assert all(" ".join(map(str, query)) in " ".join(map(str, s.token_ids)) for s in segments[:-1])
        return
    prompt = renderer.read([User(text=task.instruction)])
    for before, segment in zip(segments, segments[1:], strict=False):
        ids, first = segment.token_ids.tolist(), segment.messages[0][0]
        assert ids[: len(prompt)] == prompt and not (segment.kind == Kind.SUMMARY).any()
        tail = ids[len(prompt) : int((segment.kind == Kind.PROMPT).sum())]
        assert 0 < len(tail) <= 100 and before.token_ids.tolist()[-len(tail) :] == tail, "the newest turns"
        assert set(segment.kind[len(prompt) + len(tail) : first]) == {Kind.OBSERVATION}


def test_tokens_are_limited_per_segment_and_over_all(renderer: CompactRenderer, task: Task, sandboxes: Any) -> None:
    total_tokens = long_attempt(renderer, task, sandboxes).rollout.tokens
    result = long_attempt(renderer, task, sandboxes, limits=replace(LIMITS, rollout_tokens=total_tokens // 2))
    assert result.rollout.stop == "tokens" and len(result.rollout.segments) > 1
    assert result.rollout.tokens <= total_tokens // 2
    short = long_attempt(renderer, task, sandboxes, limits=replace(LIMITS, tokens=275))
    assert short.rollout.stop == "tokens" and max(len(s.token_ids) for s in short.rollout.segments) <= 275


def test_a_summary_that_is_cut_or_holds_calls_is_used_as_it_is_and_trains(
    renderer: CompactRenderer, task: Task, typist: Make, sandboxes: Any
) -> None:
    agent = Agent(renderer, limits=replace(LIMITS, turns=5), summary=SummarySettings(trigger=60, tokens=7))
    reads = renderer.turn(one(READ))
    wild = [renderer.call, *renderer.encode("no"), renderer.to, *renderer.encode("a note that is too long to be held")]
    policy = typist(lambda rollout, turn: wild if turn == 2 else reads)
    [(_, result)] = drive([agent.attempt(task, 1)], policy, sandboxes)
    first, *rest = result.rollout.segments
    summary_ids = first.token_ids[first.messages[-1]].tolist()
    assert summary_ids == wild[:7] and len(rest) == 2
    thinking = summary_ids.index(renderer.to) + 1
    assert first.kind[first.messages[-1]].tolist() == [Kind.THINKING] * thinking + [Kind.SUMMARY] * (7 - thinking)
    second_text = renderer.tokenizer.decode(rest[0].token_ids.tolist())
    assert renderer.tokenizer.decode(summary_ids[thinking:]).strip() in second_text
    rollouts = [request.rollout for request in policy.requests]
    assert {*rollouts} == {1, 1 + SEGMENT_STRIDE, 1 + 2 * SEGMENT_STRIDE} == {*policy.released}
    assert {first_segment(number) for number in rollouts} == {1}


def test_a_sandbox_that_died_takes_no_turns_with_it_at_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def write(self, path: str, data: bytes) -> None:
            raise SandboxDied("its memory was used up")

    box: Any = Dead()
    monkeypatch.setattr(ScriptTurnPolicy, "condense", lambda *_: Spoken(message=Said(text="so far")))
    script = play([*[turn([call("look")])] * 2, Said(text="Done.")])
    ended = converse("fix it", ScriptTurnPolicy(script), ToolSet(), Session(sandbox=box, root="/workspace"))
    assert ended.stop == "finished" and [entry.said for entry in ended.turns] == ["", "", "Done."]


# Chat models


def chat_renderer(kind: type[ChatRenderer], compact: Tokenizer) -> ChatRenderer:
    tokenizer = Tokenizer.from_str(compact.to_str())
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in kind.tokens])
    return kind(tokenizer, ToolSet.cursor().schemas)


def test_a_chat_model_summarises_in_a_sandbox_and_finds_its_history(
    renderer: CompactRenderer, backend: Backend, task: Task
) -> None:
    from composer_nb.harness.agent.turns import TokenTurnPolicy
    from composer_nb.harness.policy import Completion, Request, Trace

    chat = chat_renderer(QwenRenderer, renderer.tokenizer)
    plan = call("todo_write", merge=False, todos=[{"id": "1", "content": "look", "status": "pending"}])
    plan_ids, search = chat.turn(turn([plan])), chat.turn(turn([call("grep", pattern="todo_write", path=HISTORY)]))
    summary = [*chat.encode(f"so far\n{OPENS}\nI wrote a plan"), chat.end]
    second = [*chat.encode(f"{OPENS}\nI looked"), chat.end]
    turn_ids = [plan_ids, search, summary, search, search, second, chat.turn(Said(text="Done."))]
    prompts: list[list[int]] = []

    def ask(request: Request, until: float) -> Completion:
        ids = turn_ids[len(prompts)]
        prompts.append(list(request.token_ids))
        return Completion(rollout=0, token_ids=ids, logprobs=[-1.0] * len(ids), policy_versions=[3] * len(ids))

    limits = Limits(turns=9, turn_tokens=900, tokens=60_000)
    start = len(chat.read([User(text=task.instruction)], ""))
    turn_policy = TokenTurnPolicy(chat, 0, limits, ask, lambda n: Trace(), "", SummarySettings(trigger=start + 20))
    repository = task.model_copy(update={"grader": "pytest"})
    result = attempt(repository, Environment(backend=backend, tools=ToolSet.cursor(), limits=limits), turn_policy)
    assert result.rollout.stop == "finished" and len(result.rollout.segments) == 3
    resumed = chat.tokenizer.decode(prompts[3], skip_special_tokens=False)
    for part in (task.instruction, "I wrote a plan", "- [pending] look", HISTORY):
        assert part in resumed
    assert result.rollout.turns[1].error
    assert "todo_write" in result.rollout.turns[2].observation, "there is a history by then"
    assert set(result.rollout.files) == set(task.files)
