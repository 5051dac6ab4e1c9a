"""The loop, attempts and their grades, in real sandboxes: what each kind of turn policy leaves behind."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Message, Said, Written
from composer_nb.harness.agent.driver import drive
from composer_nb.harness.agent.endpoint import Endpoint, EndpointTurnPolicy
from composer_nb.harness.agent.loop import LIMITS, converse
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.agent.scripts import expert, play, turn
from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.agent.turns import Limits, ScriptTurnPolicy, TokenTurnPolicy
from composer_nb.harness.attempt import Environment, attempt
from composer_nb.harness.environment import EnvSettings, Sandboxes, make_agent
from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Completion
from composer_nb.harness.rollout import Kind
from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.store import pack_attempt, unpack_attempt
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.terms.registry import TERMS
from composer_nb.harness.tools.arguments import Arguments
from composer_nb.harness.tools.search import Indexes
from composer_nb.harness.tools.tool_call import Tool, ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.production.bench import attempt_all, figures
from composer_nb.production.serve import ScriptServer
from composer_nb.tour.expert import Script, ScriptedPolicy, step_by_step
from composer_nb.tour.expert import expert as line_expert
from composer_nb.trainer.models.tokenizer import train_tokenizer
from tests.harness.stubborn import FAULTS, chat_reply, stubborn
from tests.production.conftest import DATES, Turns

EDIT = {"name": "write", "file_path": "dates2.py", "contents": "x\n"}
READ = ToolCall(name="read_file", arguments={"target_file": "dates.py"})


@pytest.fixture
def environment() -> Iterator[Environment]:
    with BwrapBackend() as backend:
        yield Environment(backend=backend, tools=ToolSet.cursor(search=Indexes()))


def shell(command: str, **more: object) -> ToolCall:
    return ToolCall(name="run_terminal_cmd", arguments={"command": command, "is_background": False, **more})


def test_an_endpoint_does_what_the_script_behind_it_does(environment: Environment, task: Task) -> None:
    with ScriptServer(expert(task)) as server:
        endpoint = Endpoint(url=server.url, model="scripted")
        remote = attempt(task, environment, EndpointTurnPolicy(endpoint, "system", environment.tools.schemas, LIMITS))
    local = attempt(task, environment, ScriptTurnPolicy(expert(task)))
    assert remote.grade.passed
    assert min(remote.rollout.counted) > 0 and remote.rollout.tokens == sum(remote.rollout.counted)
    plain = [[dataclasses.replace(turn, seconds=0.0) for turn in attempt.rollout.turns] for attempt in (remote, local)]
    assert plain[0] == plain[1] and remote.grade == local.grade


def test_tokens_are_kept_as_they_were_read_and_written(
    environment: Environment, task: Task, tokenizer: Tokenizer
) -> None:
    renderer = QwenRenderer(tokenizer, environment.tools.schemas)
    turns = [
        renderer.turn(Said(text="I look.", calls=(Written(id="call_0", call=READ), Written(id="call_1", call=READ)))),
        [*renderer.encode("<function=read_file> spelled out"), renderer.end],
        renderer.turn(Said(text="It is well.")),
    ]
    policy = Turns(*turns)
    policy.version = 7
    with Shared(policy) as shared:
        result = attempt(task, environment, TokenTurnPolicy(renderer, 5, LIMITS, shared.ask, shared.release, "system"))
    [segment] = result.rollout.segments
    assert policy.released == [5] and result.rollout.stop == "finished" and result.rollout.invalid_calls == 1
    pairs = zip(policy.requests, turns, strict=True)
    token_ids = [token for request, turn_ids in pairs for token in [*request.token_ids, *turn_ids]]
    assert segment.token_ids.tolist() == token_ids
    assert segment.token_ids[segment.acted].tolist() == [token for turn_ids in turns for token in turn_ids]
    assert set(segment.policy_version[segment.acted]) == {7} and set(segment.policy_version[~segment.acted]) == {-1}
    kinds = [Kind(kind) for kind, before in zip(segment.kind, [-1, *segment.kind[:-1]], strict=True) if kind != before]
    assert kinds == [
        Kind.PROMPT, Kind.THINKING, Kind.TOOL_CALL, Kind.OBSERVATION, Kind.FINAL_MESSAGE, Kind.OBSERVATION, Kind.FINAL_MESSAGE,
    ]  # fmt: skip


def test_ctrl_c_ends_it_and_keeps_what_was_done(environment: Environment) -> None:
    def script(talk: Sequence[Message]) -> Said:
        if len(talk) > 2:
            raise KeyboardInterrupt
        return turn([READ])

    with environment.backend.create() as box:
        conversation = converse("x", ScriptTurnPolicy(script), environment.tools, environment.tools.open(box))
    assert conversation.stop == "interrupted" and len(conversation.turns) == 1


def test_a_call_on_a_file_that_is_not_there_is_no_invalid_one(environment: Environment, task: Task) -> None:
    """The rollout, the rate of the bench, the reward and what the agent reads agree on that."""
    missing = [ToolCall(name=name, arguments={"target_file": "none.py"}) for name in ("read_file", "delete_file")]
    wrong = ToolCall(name="read_file", arguments={"file": 1})
    result = attempt(task, environment, ScriptTurnPolicy(play([turn([*missing, wrong]), Said(text="")])))
    assert [turn.error for turn in result.rollout.turns[:3]] == ["UnexpectedEnvironment"] * 2 + ["InvalidArguments"]
    assert all("error (UnexpectedEnvironment): " in turn.observation for turn in result.rollout.turns[:2])
    assert figures([result])["invalid_call_rate"] == TERMS["invalid_calls"](result.rollout, result.grade) == 1 / 3


def test_changes_too_large_to_keep_are_the_agents_failure(environment: Environment, task: Task) -> None:
    fill = shell("head -c 20000000 /dev/zero > zeros; chmod 000 dates.py")
    result = attempt(task, environment, ScriptTurnPolicy(play([turn([fill]), Said(text="")])))
    assert result.grade.status == "agent_failed" and len(pack_attempt(result)) < 1 << 20
    noisy = shell("head -c 9000000 /dev/urandom > noise")
    result = attempt(task, environment, ScriptTurnPolicy(play([turn([noisy]), Said(text="")])))
    assert len(result.rollout.files) == 4
    assert unpack_attempt(pack_attempt(result), task).rollout.files == result.rollout.files


def test_a_fault_of_what_reports_turns_is_not_the_agents(environment: Environment, task: Task) -> None:
    def report(event: object) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        attempt(task, environment, ScriptTurnPolicy(play([Said(text="")])), report)


def test_the_limit_of_time_ends_calls_that_run(environment: Environment, backend: Backend) -> None:
    with backend.create() as box:
        limits = dataclasses.replace(LIMITS, seconds=1.0)
        script = play([turn([shell("sleep 3000")] * 5)])
        conversation = converse("x", ScriptTurnPolicy(script), environment.tools, environment.tools.open(box), limits)
    assert conversation.stop == "time" and {turn.error for turn in conversation.turns} == {"UserAborted"}


@pytest.mark.parametrize("fault", list(FAULTS)[:2])
def test_no_model_server_outlasts_the_limit_of_time(environment: Environment, task: Task, fault: str) -> None:
    """Work until then is graded; where no answer ever came, nothing is known of the agent."""
    limits = dataclasses.replace(LIMITS, seconds=3.0)
    for turns, stop, status in (([], "infrastructure", "infra_error"), ([chat_reply("", **EDIT)], "time", "graded")):
        with stubborn(fault, *turns) as server:
            turn_policy = EndpointTurnPolicy(Endpoint(url=server.url, model="m"), "", environment.tools.schemas, limits)
            result = attempt(task, dataclasses.replace(environment, limits=limits), turn_policy)
        if result.rollout.stop == "infrastructure" and turns:  # it failed for good before, as by too long an answer
            assert fault == "a stream for ever"
            continue
        assert (result.rollout.stop, result.grade.status) == (stop, status) and result.rollout.calls == len(turns)
        assert ("dates2.py" in result.rollout.files) == bool(turns)


def test_an_engine_that_does_not_end_its_turn_is_not_waited_for(
    environment: Environment, task: Task, tokenizer: Tokenizer
) -> None:
    class Endless(Turns):
        def step(self) -> list[Completion]:
            time.sleep(0.01)
            return []

    limits, renderer = dataclasses.replace(LIMITS, seconds=0.5), QwenRenderer(tokenizer, environment.tools.schemas)
    policy = Endless()
    with Shared(policy) as shared:
        turn_policy = TokenTurnPolicy(renderer, 4, limits, shared.ask, shared.release, "s")
        result = attempt(task, dataclasses.replace(environment, limits=limits), turn_policy)
        [request] = policy.requests
        assert result.rollout.stop == "time" and policy.released == [4]
        assert result.rollout.segments[0].token_ids.tolist() == list(request.token_ids)


def test_a_sandbox_out_of_memory_is_answered_with_errors_and_fails_the_agent(
    environment: Environment, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object) -> str:
        raise SandboxDied("its memory was used up")

    monkeypatch.setattr("composer_nb.harness.attempt.carry_back", died)
    grow = Tool(name="grow", description="", arguments=Arguments, run=died)
    full = dataclasses.replace(environment, tools=ToolSet(tools={"grow": grow}))
    call = ToolCall(name="grow", arguments={})
    result = attempt(task, full, ScriptTurnPolicy(play([turn([call]), turn([call]), Said(text="")])))
    assert [turn.error for turn in result.rollout.turns] == ["UnexpectedEnvironment"] * 2 + [None]
    assert (result.rollout.stop, result.grade.status) == ("finished", "agent_failed")


def test_what_was_killed_goes_on(environment: Environment, task: Task, tmp_path: Path) -> None:
    tasks = [task.model_copy(update={"id": f"t{n}"}) for n in range(3)]
    cast: list[str] = []

    def turn_policy(task: Task, rollout: int) -> ScriptTurnPolicy:
        cast.append(f"{task.id} {rollout}")
        if len(cast) == 4:
            raise KeyError("killed")
        return ScriptTurnPolicy(expert(task))

    with pytest.raises(KeyError):
        list(attempt_all(tasks, 2, environment, turn_policy, tmp_path, workers=1))
    finished = len(list(tmp_path.iterdir()))
    assert 3 <= finished < 6
    cast[:] = [""] * 4
    reopened = Environment(backend=BwrapBackend(), tools=environment.tools)
    with reopened.backend:
        attempts = [result for _, result in attempt_all(tasks, 2, reopened, turn_policy, tmp_path, workers=1)]
    assert len(attempts) == 6 and len(cast) == 4 + 6 - finished and all(result.grade.passed for result in attempts)


# What a run samples is what the product does


@pytest.fixture(scope="module")
def compact() -> Tokenizer:
    return train_tokenizer([DATES, "read_file search_replace run_terminal_cmd dates.py"], 400)


def trained_in(env: EnvSettings, compact: Tokenizer, task: Task, make: Callable[[Task], Script]) -> Attempt:
    """Return an attempt as the stages and services of a run make it, by a policy that plays a script."""
    with Sandboxes(env) as sandboxes:
        agent = make_agent(env, compact, Limits(turns=20, turn_tokens=400, tokens=6000), sandboxes)
        policy = ScriptedPolicy(agent.renderer, lambda rollout: make(task))
        [(_, result)] = drive([agent.attempt(task, 3)], policy, sandboxes)
        assert "functions" not in vars(sandboxes), "these need bubblewrap, which a host with Docker alone may lack"
    return result


@pytest.mark.parametrize("tools", ["cursor", "tiny"])
def test_a_rollout_of_a_run_has_the_products_sandbox_and_grade(
    environment: Environment, task: Task, compact: Tokenizer, tools: Literal["tiny", "cursor"]
) -> None:
    env = EnvSettings(tasks="given", tools=tools)
    plays: dict[str, Callable[[Task], Script]] = {
        "cursor": lambda task: step_by_step(expert(task)),
        "tiny": lambda task: line_expert(task, Random(0), 0.0),
    }
    trained = trained_in(env, compact, task, plays[tools])
    assert trained.grade.passed and trained.rollout.stop == "finished" and not trained.rollout.invalid_calls
    [segment] = trained.rollout.segments
    assert len(segment.token_ids) == trained.rollout.tokens and segment.acted.sum() == trained.rollout.sampled
    if tools == "cursor":
        product = attempt(task, environment, ScriptTurnPolicy(expert(task)))
        for field in ("call", "observation"):
            ours, theirs = ([getattr(turn, field) for turn in result.rollout.turns] for result in (trained, product))
            assert ours == theirs
        assert trained.rollout.files["dates.py"] == product.rollout.files["dates.py"] == task.solution["dates.py"]
