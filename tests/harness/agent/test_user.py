"""A simulated user: what is answered, how often, and with what knowledge; token for token, in every format and with summaries."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.agent.chat import CallResult, ChatRenderer, Message, Said, User
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.endpoint import Endpoint
from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.agent.loop import system_text
from composer_nb.harness.agent.scripts import play, turn
from composer_nb.harness.agent.summary import SummarySettings
from composer_nb.harness.agent.turns import Limits, ScriptTurnPolicy
from composer_nb.harness.agent.user import LAST, UNKNOWN, SimulatedUser, open_user
from composer_nb.harness.attempt import Agent, Environment, attempt
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import ProviderFailure, Request, TimeIsUp
from composer_nb.harness.rollout import Kind
from composer_nb.harness.sandbox.contract import WORKSPACE
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task, save_tasks
from composer_nb.harness.tools.tool_call import ToolCall, call
from composer_nb.harness.tools.toolset import TINY_NAMES, ToolSet
from composer_nb.tour.expert import ScriptedPolicy, WithoutModel
from composer_nb.trainer.models.tokenizer import train_tokenizer
from tests.harness.json_server import JsonServer

ANSWER = "Those equal to k too."
QUESTION, DONE = Said(text="Shall an item equal to k stay?"), Said(text="Done.")
READ = turn([call("read_file", path="f.py")])
MEND = turn([call("substitute", path="f.py", old="x < k", new="x > k")])
TOOLS = ToolSet.tiny({*TINY_NAMES} - {"finish"})


@pytest.fixture
def open_task(task: Task) -> Task:
    """A task whose request leaves something out."""
    facts = {"equal same": ANSWER, "order sorted": "The order stays."}
    return task.model_copy(update={"metadata": {**task.metadata, "answers": json.dumps(facts)}})


def tried(task: Task, sandboxes: Any, *turns: Said, user: str = "scripted", **facts: str) -> Attempt:
    task = task.model_copy(update={"metadata": {**task.metadata, **facts}})
    environment = Environment(tools=TOOLS, functions=sandboxes, user=open_user(user))
    return attempt(task, environment, ScriptTurnPolicy(play(turns)))


def test_who_asks_is_answered_from_the_facts_and_goes_on(open_task: Task, sandboxes: Any) -> None:
    result = tried(open_task, sandboxes, QUESTION, MEND, Said(text="Is it fine? And whose code is `is?`"), DONE)
    first_question, _, second_question, last = result.rollout.turns
    assert (first_question.said, first_question.call, first_question.observation) == (QUESTION.text, "", ANSWER)
    assert second_question.observation == UNKNOWN and last.observation == ""
    assert result.rollout.stop == "finished" and result.grade.passed
    assert unpack_attempt(pack_attempt(result), result.task).rollout.turns == result.rollout.turns


def test_without_a_user_or_a_question_a_message_ends_the_work(open_task: Task, sandboxes: Any) -> None:
    for first, user in ((QUESTION, ""), (Said(text="Done: `x?`"), "scripted"), (DONE, "scripted")):
        rollout = tried(open_task, sandboxes, first, MEND, user=user).rollout
        assert len(rollout.turns) == 1 and rollout.stop == "finished" and not rollout.turns[0].observation


def test_a_user_answers_so_often_and_says_so(open_task: Task, sandboxes: Any) -> None:
    rollout = tried(open_task, sandboxes, QUESTION, max_answers="2").rollout
    assert [turn.observation for turn in rollout.turns] == [ANSWER, f"{ANSWER} {LAST}", ""]
    assert rollout.stop == "finished"


@pytest.mark.parametrize("facts", ["[]", '{"a": 1}', "x"])
def test_facts_are_texts_by_words(open_task: Task, facts: str) -> None:
    fields = open_task.model_dump()
    with pytest.raises(ValueError, match=r"task keep: metadata\.answers"):
        Task.model_validate(fields | {"metadata": {"answers": facts}})
    with pytest.raises(ValueError, match="max_answers must be a whole number above 0"):
        Task.model_validate(fields | {"metadata": {"max_answers": "0"}})


def test_a_model_as_the_user_knows_the_request_and_the_facts_alone(open_task: Task, sandboxes: Any) -> None:
    replies = iter(["Keep\n them.", None, "x" * 5000])
    message: Callable[[], dict[str, Any]] = lambda: {"message": {"role": "assistant", "content": next(replies)}}  # noqa: E731
    with JsonServer(lambda path, body: {"choices": [message()]}) as server:
        rollout = tried(open_task, sandboxes, QUESTION, user=f"openai:{server.url}/v1#m").rollout
    answers = [turn.observation for turn in rollout.turns]
    assert answers == ["Keep them.", UNKNOWN, f"{'x' * 1000} {LAST}", ""]
    bodies = [body for _, body in server.requests]
    persona = bodies[0]["messages"][0]["content"]
    assert open_task.instruction in persona and ANSWER in persona and UNKNOWN in persona
    transcript = json.dumps(bodies)
    secret = (*open_task.files.values(), *open_task.tests.values(), *open_task.solution.values())
    assert not any(json.dumps(text)[1:-1] in transcript for text in secret)
    assert not any("tools" in body for body in bodies)
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["role"] for message in bodies[2]["messages"]] == roles


def test_a_user_who_does_not_answer_is_no_answer(open_task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(self: Endpoint, *_: Any, until: float, **__: Any) -> Any:
        raise TimeIsUp

    monkeypatch.setattr(Endpoint, "complete", hang)
    user = SimulatedUser(open_task, Endpoint(url="http://x/v1"))
    with pytest.raises(ProviderFailure, match="no answer of the user within 60 s"):
        user(QUESTION.text, time.monotonic() + 1000)
    with pytest.raises(TimeIsUp):  # of the agent
        user(QUESTION.text, time.monotonic() + 1)


class Reciter(WithoutModel):
    """Recites its turns in order, whatever it reads, and a summary wherever one is requested."""

    def __init__(self, renderer: ChatRenderer, turns: Sequence[Said]) -> None:
        super().__init__(renderer)
        self.turns, self.query = iter(turns), renderer.ask(renderer.queries["self"])

    def written(self, request: Request) -> list[int]:
        if list(request.token_ids[-len(self.query) :]) == self.query:
            return self.renderer.encoded(["it was read", self.renderer.end])
        return self.renderer.turn(next(self.turns))


def with_tokens(
    form: str, task: Task, sandboxes: Any, turns: Sequence[Said], **options: Any
) -> tuple[Attempt, ChatRenderer]:
    texts = [text for files in (task.files, task.solution) for text in files.values()] + [ANSWER, QUESTION.text]
    tokenizer = train_tokenizer(texts, 420, () if form == "compact" else FORMATS[form].tokens)
    renderer = FORMATS[form](tokenizer, TOOLS.schemas)
    limits, user = Limits(turns=12, turn_tokens=200, tokens=20_000), open_user("scripted")
    agent = Agent(renderer, TOOLS, limits, user=user, **options)
    [(_, result)] = drive([agent.attempt(task, 0)], Reciter(renderer, turns), sandboxes)
    return result, renderer


def named(form: str, message: Said, number: int) -> Said:
    """Return the turn with the id that the format gives its call."""
    [written] = message.calls
    assert isinstance(written.call, ToolCall)
    name = f"functions.{written.call.name}:{number}" if form == "kimi" else "call_0"
    return Said(calls=(replace(written, id=name),))


@pytest.mark.parametrize("form", FORMATS)
def test_the_tokens_are_those_of_the_conversation_and_the_users_are_never_trained(
    form: str, open_task: Task, sandboxes: Any
) -> None:
    spoken = [named(form, READ, 0), QUESTION, named(form, MEND, 1), DONE]
    result, renderer = with_tokens(form, open_task, sandboxes, spoken)
    [segment], turns = result.rollout.segments, result.rollout.turns
    read_turn, mend_turn = (named(form, message, n) for n, message in enumerate((READ, MEND)))
    talk: list[Message] = [User(text=open_task.instruction)]
    talk += [read_turn, CallResult(id=read_turn.calls[0].id, text=turns[0].observation), QUESTION, User(text=ANSWER)]
    talk += [mend_turn, CallResult(id=mend_turn.calls[0].id, text=turns[2].observation), DONE]
    assert result.grade.passed and segment.token_ids.tolist() == renderer.render(talk)
    acted = [renderer.parse(segment.token_ids[places].tolist()) for places in segment.messages]
    assert [message.text for message in acted] == ["", QUESTION.text, "", DONE.text]
    token_ids, answer = segment.token_ids.tolist(), renderer.encode(ANSWER)
    [start] = [n for n in range(len(token_ids)) if token_ids[n : n + len(answer)] == answer]
    assert set(segment.kind[start : start + len(answer)]) == {Kind.OBSERVATION}
    assert not segment.acted[start : start + len(answer)].any()


def test_a_summary_is_asked_for_after_the_answer(open_task: Task, sandboxes: Any) -> None:
    turns = [READ, QUESTION, MEND, DONE]
    plain, renderer = with_tokens("compact", open_task, sandboxes, turns)
    [segment] = plain.rollout.segments
    question_end = int(segment.messages[1][-1]) + 1  # tokens up to the end of the question
    summary = SummarySettings(trigger=question_end + 1, tokens=60)
    result, _ = with_tokens("compact", open_task, sandboxes, turns, summary=summary)
    first, second = result.rollout.segments
    news = [*renderer.answers([User(text=ANSWER)]), *renderer.ask(renderer.queries["self"])]
    assert result.grade.passed
    assert first.token_ids[: question_end + len(news)].tolist() == [*segment.token_ids[:question_end], *news]
    assert (first.kind[question_end + len(news) :] == Kind.SUMMARY).all()
    assert [len(part.messages) for part in (first, second)] == [3, 2]


def test_a_run_asks_its_user_and_says_so_in_the_system_text(open_task: Task, tmp_path: Path) -> None:
    """`env.user`, as the workers of a run and the plain loop make their agents."""
    save_tasks([open_task], tmp_path / "tasks.jsonl")
    env = EnvSettings(tasks=str(tmp_path / "tasks.jsonl"), renderer="qwen", user="scripted")
    tokenizer = train_tokenizer([open_task.instruction], 420, FORMATS["qwen"].tokens)
    limits = Limits(turns=8, turn_tokens=200, tokens=20_000)
    with Sandboxes() as sandboxes:
        agent, silent = (make_agent(variant, tokenizer, limits, sandboxes) for variant in (env, replace(env, user="")))

        def script(number: int) -> Any:
            yield QUESTION
            yield MEND
            yield DONE

        jobs = [agent.attempt(open_task, 0), silent.attempt(open_task, 1)]
        attempts = dict(drive(jobs, ScriptedPolicy(agent.renderer, script), sandboxes.functions))
    assert attempts[0].grade.passed and not attempts[1].grade.passed
    assert (agent.system, silent.system) == (system_text(WORKSPACE, answered=True), system_text(WORKSPACE))
    assert "the user answers" in agent.system and "answers" not in silent.system
