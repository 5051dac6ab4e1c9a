"""An endpoint as a policy, against a real server on loopback: what is asked, what comes back, what fails and for whom."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from composer_nb.harness.agent import Agent, Limits, drive
from composer_nb.harness.openai_policy import Endpoint, OpenAIPolicy, spoken
from composer_nb.harness.policy import Completion, ProviderFailure, Request
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.task import Task
from composer_nb.harness.tools import ToolCall, ToolError, ToolSet

Answer = dict[str, Any] | tuple[int, str] | tuple[int, str, dict[str, str]] | float | None
SCHEMAS = [tool.schema for tool in ToolSet.tiny().tools.values()]


class Server:
    """Answers each request by `answer(body, number)`: a message, a (status, text[, headers]), seconds to wait, or None."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.heads: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any], int], Answer] = lambda body, number: (500, "")
        told = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *what: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}), {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told.asked.append(body)
                told.heads.append(dict(self.headers))
                answer = told.answer(body, len(told.asked) - 1)
                if answer is None:
                    self.close_connection = True
                elif isinstance(answer, float):
                    time.sleep(answer)
                elif isinstance(answer, tuple):
                    status, text, *more = answer
                    self.reply(status, text, more[0] if more else {})
                else:
                    self.reply(200, json.dumps({"choices": [{"message": answer}]}), {})

            def reply(self, status: int, text: str, heads: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(text.encode())), **heads}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def endpoint(server: Server, **change: Any) -> Endpoint:
    return Endpoint(**{"url": server.url, "model": "m", "timeout_s": 5.0, "retries": 2, "wait_s": 0.01, **change})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def ask(server: Server, renderer: CompactRenderer, text: str = "go", **change: Any) -> Completion | ProviderFailure:
    with OpenAIPolicy(endpoint(server, **change), renderer, SCHEMAS) as policy:
        policy.submit(Request(rollout=7, token_ids=renderer.prompt(text), max_tokens=100))
        [done] = policy.step()
        assert policy.step() == []
        policy.release(7)
        return done


def test_the_agent_loop_runs_against_an_endpoint(
    server: Server, renderer: CompactRenderer, task: Task, boxes: Any
) -> None:
    replies = [call("read_file", path="f.py"), call("edit_line", path="f.py", line=4, text="if x > k:"), call("finish")]
    server.answer = lambda body, number: replies[sum(m["role"] == "assistant" for m in body["messages"])]
    agent = Agent(renderer, limits=Limits(turns=6, turn_tokens=400, tokens=4000))
    with OpenAIPolicy(endpoint(server), renderer, SCHEMAS, capacity=3) as policy:
        found = dict(drive((agent.run(task, n, policy.release) for n in range(4)), policy, boxes("7")))
    assert len(found) == 4
    for rollout in found.values():
        assert rollout.stop == "finished" and "x > k" in rollout.files["f.py"] and rollout.invalid_calls == 0
        assert rollout.turns[1].observation == "ok"
        assert not rollout.segments[0].logprob.any() and set(rollout.segments[0].policy_version) == {-1}
    first, last = server.asked[0], max(server.asked, key=lambda body: len(body["messages"]))
    assert first["messages"] == [{"role": "user", "content": task.instruction}] and first["tools"] == SCHEMAS
    assert first["model"] == "m" and first["parallel_tool_calls"] is False
    assert [m["role"] for m in last["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]
    assert last["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": found[0].turns[0].observation}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "I would read f.py"},
        {"content": "read f.py"},
        {"content": None, "tool_calls": [{"id": "a"}]},
        {"content": None, "tool_calls": ["x"]},
        {"content": None, "tool_calls": {"function": 3}},
        {"tool_calls": [{"id": "a", "function": {"name": "read_file", "arguments": "{"}}]},
        {"tool_calls": [{"id": "a", "function": {"name": "read_file", "arguments": '{"path": "a b"}'}}]},
        {"tool_calls": [{"id": "a", "function": {"name": "read_file", "arguments": "{}"}}]},
        {"tool_calls": [{"id": "a", "function": {"name": "remove", "arguments": "{}"}}]},
        {"tool_calls": [*call("finish")["tool_calls"], *call("finish")["tool_calls"]]},
    ],
)
def test_what_is_no_single_call_is_an_invalid_one(message: Any, server: Server, renderer: CompactRenderer) -> None:
    server.answer = lambda body, number: message
    done = ask(server, renderer)
    assert isinstance(done, Completion) and done.rollout == 7
    with pytest.raises(ToolError) as caught:
        renderer.parse_call(done.token_ids)
    assert caught.value.kind == "InvalidArguments"


def test_a_turn_is_cut_where_it_has_to_be(server: Server, renderer: CompactRenderer) -> None:
    server.answer = lambda body, number: call("edit_line", path="f.py", line=1, text="x" * 500)
    done = ask(server, renderer)
    assert isinstance(done, Completion) and len(done.token_ids) == 100 == len(done.logprobs)


def test_several_calls_are_all_answered(server: Server, renderer: CompactRenderer) -> None:
    server.answer = lambda body, number: {
        "tool_calls": [{"id": i, "function": {"name": "finish", "arguments": ""}} for i in "ab"]
    }
    with OpenAIPolicy(endpoint(server), renderer, SCHEMAS) as policy:
        for token_ids in (renderer.prompt("go"), renderer.observation("error: bad call")):
            policy.submit(Request(rollout=1, token_ids=token_ids, max_tokens=100))
            policy.step()
    assert [m.get("tool_call_id") for m in server.asked[1]["messages"]] == [None, None, "a", "b"]


@pytest.mark.parametrize("failure", [(503, "busy"), (429, "slow down", {"Retry-After": "0"}), None])
def test_what_passes_is_tried_again(failure: Answer, server: Server, renderer: CompactRenderer) -> None:
    server.answer = lambda body, number: failure if number < 2 else call("finish")
    done = ask(server, renderer)
    assert isinstance(done, Completion) and len(server.asked) == 3
    assert renderer.parse_call(done.token_ids) == ToolCall(name="finish", arguments={})


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        ((503, "busy"), 3, "status 503: busy"),
        ((401, "no key"), 1, "status 401: no key"),
        ((400, "too long"), 1, "status 400"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), 1, "status 302"),
        ((200, "<html>"), 3, "no JSON"),
        ((200, '{"choices": [{"mess'), 3, "no JSON"),
        ((200, "[]"), 1, "without a message"),
        ((200, '{"choices": []}'), 1, "without a message"),
        ((200, '{"choices": [{"message": 3}]}'), 1, "message is int"),
        (None, 3, "ProtocolError|RemoteDisconnected"),
    ],
)
def test_what_fails_for_good_is_a_failure_of_the_provider(
    answer: Answer, tries: int, message: str, server: Server, renderer: CompactRenderer
) -> None:
    server.answer = lambda body, number: answer
    done = ask(server, renderer)
    assert isinstance(done, ProviderFailure) and done.rollout == 7
    assert len(server.asked) == tries
    with pytest.raises(ProviderFailure, match=message):
        raise done


def test_a_server_that_does_not_answer_is_given_up(server: Server, renderer: CompactRenderer) -> None:
    server.answer = lambda body, number: 2.0
    begin = time.monotonic()
    done = ask(server, renderer, timeout_s=0.2, retries=1)
    assert isinstance(done, ProviderFailure) and time.monotonic() - begin < 1.9
    server.http.server_close()
    assert isinstance(ask(server, renderer, retries=0, url="http://127.0.0.1:1/v1"), ProviderFailure)


def test_a_failure_is_one_rollouts_alone_and_no_fault_of_the_agents(
    server: Server, renderer: CompactRenderer, task: Task, boxes: Any
) -> None:
    server.answer = lambda body, number: (500, "") if number == 0 else call("finish")
    agent = Agent(renderer, limits=Limits(turns=6, turn_tokens=400, tokens=4000))
    with OpenAIPolicy(endpoint(server, retries=0), renderer, SCHEMAS, capacity=1) as policy:
        found = dict(drive((agent.run(task, n, policy.release) for n in range(3)), policy, boxes("7")))
    assert [found[n].stop for n in range(3)] == ["infrastructure", "finished", "finished"]


def test_the_key_goes_along_and_the_models_are_asked_for(
    server: Server, renderer: CompactRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    server.answer = lambda body, number: call("finish")
    ask(server, renderer)
    assert server.heads[0]["Authorization"] == "Bearer k" and "k" not in repr(endpoint(server))[:5]
    assert endpoint(server).models() == ["first", "second"]


@pytest.mark.parametrize("url", ["", "x", "ftp://x/v1", "http://", "http://user:pw@x/v1", "http://x/v1?a=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="give an address such as openai:http"):
        Endpoint(url=url)


def test_a_reply_is_sent_back_in_the_canonical_form() -> None:
    said, calls = spoken({"content": 3, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]})
    wanted = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert said == {"role": "assistant", "content": "", "tool_calls": [wanted]}
    assert calls == [ToolCall(name="f", arguments={"a": 1})]
