"""Conversations of unmodified agents, recorded: token for token what the engine sampled, in the store and the terms of RL."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from composer_nb.harness.grading.grade import Attempt
from composer_nb.harness.policy import Request
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.rollout import Segment
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.harness.tools.toolset import ToolSet
from composer_nb.harness.tools.workspace import Workspace
from composer_nb.production.policies import open_engine
from composer_nb.production.record import served
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.loss import LossSettings
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import score_groups, streams_of
from composer_nb.views import rollout as view
from tests.production.conftest import Site, serving

EXAMPLE = Path(__file__).parents[2] / "data/example"
POLICY = EXAMPLE / "weights" / "final"
TOKENS = 512


@contextmanager
def recording(run: Path, slots: int = 4) -> Iterator[Site]:
    with open_engine(POLICY, slots=slots, tokens=TOKENS) as engine, serving(engine, run) as site:
        yield site


@pytest.fixture(scope="module")
def task() -> Task:
    return load_tasks(EXAMPLE / "data" / "heldout.jsonl")[0]


class ByOpenAI:
    """An agent that knows OpenAI's API and the tools of a workspace, and nothing of the server."""

    def __init__(self, url: str) -> None:
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        self.talk: list[Any] = []

    def ask(self, text: str) -> None:
        self.talk.append({"role": "user", "content": text})

    def turn(self, tools: list[Any]) -> list[tuple[str, ToolCall]]:
        completion: Any = self.client.chat.completions.create(model="model", messages=self.talk, tools=tools, seed=3)
        message = completion.choices[0].message
        self.talk.append(message.model_dump(exclude_none=True))
        tool_calls = message.tool_calls or []
        return [(c.id, ToolCall(name=c.function.name, arguments=json.loads(c.function.arguments))) for c in tool_calls]

    def hear(self, replies: Sequence[tuple[str, str]]) -> None:
        self.talk += [{"role": "tool", "tool_call_id": name, "content": text} for name, text in replies]


class ByAnthropic(ByOpenAI):
    """The same agent, with Anthropic's API and streams."""

    def __init__(self, url: str) -> None:
        self.anthropic = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
        self.talk = []

    def turn(self, tools: list[Any]) -> list[tuple[str, ToolCall]]:
        definitions: Any = [
            {"name": f["name"], "description": f.get("description", ""), "input_schema": f["parameters"]}
            for f in (tool["function"] for tool in tools)
        ]
        options: Any = {"messages": self.talk, "tools": definitions}
        with self.anthropic.messages.stream(model="model", max_tokens=64, **options) as stream:
            message = stream.get_final_message()
        self.talk.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        assert message.usage.input_tokens
        assert message.content[-1].type != "tool_use" or message.stop_reason == "tool_use"
        return [(b.id, ToolCall(name=b.name, arguments=dict(b.input))) for b in message.content if b.type == "tool_use"]

    def hear(self, replies: Sequence[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in replies]
        self.talk.append({"role": "user", "content": blocks})


def work(agent: ByOpenAI, task: Task, turns: int = 12) -> dict[str, str]:
    """Have an agent work on a repository, and return its files at the end."""
    tools = ToolSet.tiny()
    with SandboxExecutor() as functions:
        workspace = Workspace(files=dict(task.files), visible_tests=task.visible_tests, sandboxes=functions)
        agent.ask(task.instruction)
        for _ in range(turns):
            calls = agent.turn(tools.schemas)
            if not calls:
                agent.ask("write a call")
                continue
            replies = tools.run(workspace, [call for _, call in calls])
            agent.hear([(name, reply.text) for (name, _), reply in zip(calls, replies, strict=False)])
            if any(reply.ends for reply in replies):
                break
        return dict(workspace.files)


def scored_again(segment: Segment) -> list[float]:
    """Return the log-probability of each token that the agent wrote, by an engine that reads everything before it anew."""
    model = load_pretrained(POLICY)
    engine = Engine(model, stop=frozenset(), slots=1, max_length=TOKENS)
    ids, logprobs = segment.token_ids.tolist(), []
    for position in np.flatnonzero(segment.acted).tolist():
        tokens: list[Any] = []
        vocabulary_size = model.config.vocab_size
        request = Request(rollout=0, token_ids=ids[:position], max_tokens=1, top=vocabulary_size)
        engine.generate([replace(request, on_token=tokens.append)])
        engine.release(0)
        logprobs.append(dict(tokens[0].top)[ids[position]])
    return logprobs


@pytest.mark.parametrize("kind", [ByOpenAI, ByAnthropic])
def test_an_unmodified_agent_is_recorded_token_for_token(kind: type[ByOpenAI], task: Task, tmp_path: Path) -> None:
    with recording(tmp_path / "run") as server:
        files = work(kind(server.rollout("one")), task)
        changed = {path: text for path, text in files.items() if task.files.get(path) != text}
        reply = server.grade("one", tests={"a": True}, reward=0.5, task=task.id, files=changed)
        assert reply == {"rollout": "one", "segments": 1, "status": 200}
        assert server.grade("two")["status"] == 404
    attempt = served(tmp_path / "run")["one"]
    [segment] = attempt.rollout.segments
    assert attempt.task.id == task.id and attempt.grade.passed and attempt.rollout.files == changed
    assert len(attempt.rollout.turns) > 2 and any(turn.observation for turn in attempt.rollout.turns)
    assert segment.acted.sum() > 20 and (segment.policy_version[segment.acted] == 0).all()
    assert segment.trace.route_valid[:-1].all() and segment.trace.routes.any()
    np.testing.assert_allclose(segment.logprob[segment.acted], scored_again(segment), rtol=0, atol=1e-6)
    rewards = RewardSettings(weights={"given": 2.0, "solved": 1.0})
    copy = Attempt(task=attempt.task, rollout=attempt.rollout, grade=attempt.grade)
    [[scored, _]] = score_groups([[attempt, copy]], rewards, LossSettings())
    assert scored.reward.terms == {"given": 1.0, "solved": 1.0}
    assert not streams_of([[scored]], LossSettings()), "rollouts that are equally good teach nothing"
    [row] = view.served(RunDir(tmp_path / "run"))
    assert "prompt ·" in view.read(row).text


def test_a_rewritten_history_is_a_branch_and_no_token_trains_twice(tmp_path: Path) -> None:
    tools, user = ToolSet.tiny().schemas, {"role": "user", "content": "fix the tests"}
    with recording(tmp_path / "run", slots=1) as server:
        talk: list[Any] = [user]
        for _ in range(3):
            choice = server.chat(messages=talk, tools=tools, seed=1).choices[0]
            calls = choice.message.tool_calls or []
            talk.append(choice.message.model_dump(exclude_none=True))
            talk += [{"role": "tool", "tool_call_id": c.id, "content": "fail 1/2"} for c in calls] or [user]
        another = [{"role": "user", "content": "another"}]
        server.chat(messages=another, tools=tools)  # takes the only slot: the first is read again
        server.chat(messages=talk, tools=tools, seed=1)
        first = next(n for n, message in enumerate(talk) if n > 1 and message["role"] == "assistant")
        rewritten = [*talk[: first + 1], {**talk[first + 1], "content": "short"}]
        server.chat(messages=rewritten, tools=tools, seed=1)
        name = choice.model_extra["rollout"]
        assert server.grade(name, reward=1.0)["segments"] == 2
    attempt = served(tmp_path / "run")[name]
    long, short = attempt.rollout.segments
    assert (long.parent, short.parent) == (-1, 0) and attempt.grade.rewards == {"reward": 1.0}
    assert len(view.served(RunDir(tmp_path / "run"))) == 2
    same = int(np.flatnonzero(short.acted)[0])
    shared = next(n for n, (a, b) in enumerate(zip(long.token_ids, short.token_ids, strict=False)) if a != b)
    assert 0 < shared <= same and long.acted[:shared].any() and not short.acted[:same].any()
    for segment in (long, short):
        assert segment.trace.route_valid[:-1].all()
        np.testing.assert_allclose(segment.logprob[segment.acted], scored_again(segment), rtol=0, atol=1e-6)


def test_a_rollout_is_stored_whatever_records_of_it_were_lost(tmp_path: Path) -> None:
    """The records of a turn that a stop text ends stay; those of a replica that died are missing, and no others."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    with recording(tmp_path / "run", slots=8) as server:
        for name in ("stopped", "died"):
            for said in ("fix f", "fix g"):
                talk, body = [{"role": "user", "content": said}], {"rollout": name}
                drawn = server.chat(messages=talk, logprobs=True, extra_body={"rollout": "plain"}, **options)
                stop = drawn.choices[0].logprobs.content[0].token if (name, said) == ("stopped", "fix f") else None
                server.chat(messages=talk, stop=stop, extra_body=body, **options)
        first = next(known for known in server.answer._talks if known.row.name == "died")
        assert first.rollout is not None
        server.answer.policy.release(first.rollout)  # as if its process had died
        assert [server.grade(name, reward=1.0)["segments"] for name in ("stopped", "died")] == [2, 2]
    attempts = served(tmp_path / "run")
    for name, complete in (("stopped", [True, True]), ("died", [False, True])):
        valid = [segment.trace.route_valid for segment in attempts[name].rollout.segments]
        assert [bool(mask[:-1].all()) for mask in valid] == complete and not any(mask[-1] for mask in valid)


def test_users_who_began_alike_have_a_rollout_each(tmp_path: Path) -> None:
    """What a user says after equal answers is stored in no other user's rollout and judged by no other user's verdict."""
    tools, start = ToolSet.tiny().schemas, {"role": "user", "content": "fix the tests"}
    conversations: dict[str, list[Any]] = {"ann": [start], "bob": [start], "eve": [start]}
    names: dict[str, list[str]] = {user: [] for user in conversations}
    with recording(tmp_path / "run") as server:

        def turn(user: str) -> None:
            choice = server.chat(messages=conversations[user], tools=tools, temperature=0, max_tokens=30).choices[0]
            conversations[user].append(choice.message.model_dump(exclude_none=True))
            calls = choice.message.tool_calls or []
            secret = {"role": "tool", "content": f"secret of {user}"}
            conversations[user] += [{**secret, "tool_call_id": call.id} for call in calls]
            names[user].append(choice.model_extra["rollout"])

        for user in ("ann", "bob", "eve"):
            turn(user)
        assert conversations["ann"][1] == conversations["bob"][1]
        assert server.grade(names["eve"][0], reward=0.0)["segments"] == 1  # stored, and no longer known to the server
        for _ in range(2):
            for user in ("ann", "bob", "eve"):
                turn(user)
        assert server.grade(names["bob"][-1], reward=-1.0)["segments"] == 1
        last_names = {name for user in conversations for name in names[user][-2:]}
        assert len(last_names) == 3, "each goes on in a rollout of its own"
    attempts = served(tmp_path / "run")
    observations = {
        name: {turn.observation for turn in attempt.rollout.turns if turn.observation}
        for name, attempt in attempts.items()
    }
    for user in conversations:
        assert observations[names[user][-1]] == {f"secret of {user}"}
        assert user == "bob" or attempts[names[user][-1]].grade.rewards.get("reward") != -1.0
    assert all(len(texts) <= 1 for texts in observations.values())
    [segment] = attempts[names["bob"][-1]].rollout.segments
    assert len(attempts[names["bob"][-1]].rollout.turns) == 3, "the equal beginning is part of it"
    np.testing.assert_allclose(segment.logprob[segment.acted], scored_again(segment), rtol=0, atol=1e-6)


def test_no_recorded_conversation_is_lost_however_often_the_server_is_told_to_end(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("composer-nb"))
    command = [program, "serve", "--model", str(POLICY), "--port", "0"]
    with subprocess.Popen([*command, "--record", str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        url = process.stdout.readline().strip().removesuffix("/v1")
        body = {"messages": [{"role": "user", "content": "fix f"}], "max_tokens": 5}
        for name in "abc":
            httpx.post(f"{url}/rollouts/{name}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        signal_number = signal.SIGHUP  # a terminal that is closed
        while process.poll() is None:
            process.send_signal(signal_number)
            signal_number = signal.SIGTERM
            time.sleep(0.05)
    assert [*served(tmp_path)] == [*"abc"]
