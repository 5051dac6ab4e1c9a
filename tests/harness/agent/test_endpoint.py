"""An endpoint, against a real server on loopback: what is asked, what comes back, what fails and for whom."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from composer_nb.harness.agent.endpoint import ContextExceeded, Endpoint, EndpointTurnPolicy, _pause
from composer_nb.harness.agent.turns import Limits
from composer_nb.harness.attempt import Environment, attempt
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.tools.toolset import ToolSet
from tests.harness.json_server import JsonServer
from tests.harness.stubborn import FAULTS, chat_reply, stubborn

Answer = dict[str, Any] | tuple[int, str] | tuple[int, str, dict[str, str]] | None
TINY = ToolSet.tiny()


class Server(JsonServer):
    """Answers each request by `message(body, number)`: a message of the model, or as `JsonServer`."""

    def __init__(self) -> None:
        self.message: Callable[[dict[str, Any], int], Answer] = lambda body, number: None
        super().__init__(self._reply)
        self.url += "/v1"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body in self.requests]

    def _reply(self, path: str, body: dict[str, Any]) -> Any:
        message = self.message(body, len(self.requests) - 1)
        return {"choices": [{"message": message}]} if isinstance(message, dict) else message


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def endpoint(server: Server, **change: Any) -> Endpoint:
    return Endpoint(**{"url": server.url, "model": "m", "timeout_s": 5.0, "retries": 2, "wait_s": 0.01, **change})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    tool_call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [tool_call]}


def ask(server: Server, **change: Any) -> dict[str, Any]:
    return endpoint(server, **change).complete([{"role": "user", "content": "go"}], [], 100).message


def run(server: Server, task: Task, boxes: Any, **change: Any) -> Rollout:
    limits = Limits(turns=6, turn_tokens=400, tokens=4000)
    turn_policy = EndpointTurnPolicy(endpoint(server, **change), "", TINY.schemas, limits, parallel=False)
    return attempt(task, Environment(tools=TINY, limits=limits, functions=boxes("7")), turn_policy).rollout


def test_the_agent_loop_runs_against_an_endpoint(server: Server, task: Task, boxes: Any) -> None:
    replies = [call("read_file", path="f.py"), call("edit_line", path="f.py", line=4, text="if x > k:"), call("finish")]
    server.message = lambda body, number: replies[sum(m["role"] == "assistant" for m in body["messages"])]
    rollout = run(server, task, boxes)
    assert rollout.stop == "finished" and "x > k" in rollout.files["f.py"] and rollout.invalid_calls == 0
    assert rollout.turns[1].observation == "ok" and not len(rollout.segments[0].token_ids)
    first, _, last = server.bodies
    assert first["messages"] == [{"role": "user", "content": task.instruction}] and first["tools"] == TINY.schemas
    assert first["model"] == "m" and first["parallel_tool_calls"] is False
    assert [m["role"] for m in last["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]
    assert last["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": rollout.turns[0].observation}


@pytest.mark.parametrize(
    "calls",
    [
        *(["x"], {"function": 3}),
        [{"id": "a", "function": {"name": "read_file", "arguments": "{"}}],
        [{"id": "a", "function": {"name": "edit_line", "arguments": '{"path": "f.py", "line": "1", "text": ""}'}}],
        [{"id": "a", "function": {"name": "remove", "arguments": "{}"}}],
    ],
)
def test_a_malformed_call_is_an_invalid_one(calls: Any, server: Server, task: Task, boxes: Any) -> None:
    server.message = lambda body, number: call("finish") if number else {"content": None, "tool_calls": calls}
    rollout = run(server, task, boxes)
    assert [turn.error for turn in rollout.turns] == ["InvalidArguments", None] and rollout.stop == "finished"
    assert rollout.turns[0].observation.startswith("error: ")


@pytest.mark.parametrize("failure", [(503, "busy"), (429, "slow down", {"Retry-After": "0"}), None])
def test_what_passes_is_tried_again(failure: Answer, server: Server) -> None:
    server.message = lambda body, number: failure if number < 2 else {"content": "yes"}
    assert ask(server)["content"] == "yes" and len(server.bodies) == 3


@pytest.mark.parametrize(
    ("answer", "tries", "message"),
    [
        ((503, "busy"), 3, "status 503: busy"),
        ((429, '{"error": {"message": "slow", "code": "rate_limit"}}'), 3, r"429 \(rate_limit\): slow$"),
        ((429, '{"error": {"message": "pay", "code": "insufficient_quota"}}'), 1, r"429 \(insufficient_quota\): pay$"),
        ((404, '{"error": {"message": "no m", "code": "model_not_found"}}'), 1, r"404 \(model_not_found\): no m$"),
        ((400, '{"error": {"message": "odd", "code": null}}'), 1, "status 400: odd$"),
        ((401, "no key"), 1, "status 401: no key"),
        ((302, "", {"Location": "http://127.0.0.1:1/"}), 1, "status 302"),
        ((200, '{"choices": [{"mess'), 3, "no JSON"),
        ((200, '{"choices": [{"message": 3}]}'), 1, "without a message"),
        (None, 3, "RemoteProtocolError"),
    ],
)
def test_what_fails_for_good_is_a_failure_of_the_provider(
    answer: Answer, tries: int, message: str, server: Server
) -> None:
    server.message = lambda body, number: answer
    with pytest.raises(ProviderFailure, match=message):
        ask(server)
    assert len(server.bodies) == tries


def test_a_key_is_sent_without_white_space_and_shown_in_no_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.message = lambda body, number: {"content": "yes"}
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\r\n")
    assert ask(server)["content"] == "yes"
    for key in ("sk-sec\nret", "sk-s\u00e9cret"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with pytest.raises(ProviderFailure, match="^OPENAI_API_KEY: holds a character") as error:
            ask(server)
        assert "sk-" not in str(error.value) and len(server.bodies) == 1


@pytest.mark.parametrize(
    ("least", "most", "retry_headers"),
    [
        (4, 8, (None, "1", "soon", "-5", "Thu, 01 Jan 1970 00:00:00 GMT", "9" * 5000)),
        (30, 30, ("30",)),
        (60, 60, ("999", "Fri, 31 Dec 2100 00:00:00 GMT", "9" * 400)),
    ],
)
def test_a_try_waits_longer_each_time_and_at_least_as_long_as_it_is_asked_to(
    least: float, most: float, retry_headers: tuple[str | None, ...]
) -> None:
    for retry_after in retry_headers:
        pauses = {_pause(retry_after, 4.0) for _ in range(50)}
        assert least <= min(pauses) <= max(pauses) <= most and len(pauses) == (1 if least == most else 50)


TOO_LONG = [
    ("This model's maximum context length is 4,097 tokens. However, your messages resulted in 5000 tokens (4900 in the messages, "
     "100 in the functions).", 4097, 5000),
    ("This model's maximum context length is 4096 tokens. However, you requested 9192 tokens (1000 in the messages, 8192 in the "
     "completion).", 4096, 1000),
    ("'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is 4096 tokens and your "
     "request has 1000 input tokens (8192 > 4096 - 1000).", 4096, 1000),
    ("You passed 541 input tokens and requested 64 output tokens. However, the model's context length is only 512 tokens, "
     "resulting in a maximum input length of 448 tokens.", 512, 541),
    ("Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 5000 tokens: "
     "1000 tokens from the input messages and 4000 tokens for the completion.", 4096, 1000),
    ("The input (541 tokens) is longer than the model's context length (512 tokens).", 512, 541),
    ("request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it", 4096, 5000),
    ("prompt is too long: 5000 tokens > 4096 maximum", 4096, 5000),
    ("input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease input length", 200000, 188240),
    ("the maximum context length was exceeded", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("message", "context", "token_count"), TOO_LONG)
def test_an_error_names_the_context_and_the_tokens_that_were_read(
    message: str, context: int, token_count: int, server: Server
) -> None:
    server.message = lambda body, number: (400, json.dumps({"error": {"message": message, "code": 400}}))
    with pytest.raises(ContextExceeded) as error:
        ask(server)
    assert (error.value.context, error.value.read) == (context, token_count) and len(server.bodies) == 1


def too_long(context: int, token_count: int) -> tuple[int, str]:
    message = f"This model's maximum context length is {context} tokens. However, your messages resulted in {token_count} tokens."
    return 400, json.dumps({"error": {"message": message, "code": "context_length_exceeded"}})


def test_a_full_context_ends_an_attempt_that_counts(server: Server, task: Task, boxes: Any) -> None:
    server.message = lambda body, number: too_long(500, 541) if number else call("read_file", path="f.py")
    rollout = run(server, task, boxes)
    assert rollout.stop == "tokens" and [turn.error for turn in rollout.turns] == [None]
    server.message = lambda body, number: too_long(500, 541)
    assert run(server, task, boxes).stop == "tokens", "as for a prompt without room from the folder"
    server.message = lambda body, number: (400, json.dumps({"error": {"message": "exceeds the context size"}}))
    assert run(server, task, boxes).stop == "infrastructure", "perhaps the answer that was asked for is too long"


def test_an_answer_is_asked_for_that_fits_the_context_which_an_error_names(
    server: Server, task: Task, boxes: Any
) -> None:
    server.message = lambda body, number: too_long(500, 300) if body["max_tokens"] > 200 else call("finish")
    assert run(server, task, boxes).stop == "finished"
    assert [body["max_tokens"] for body in server.bodies] == [400, 200]


# Requests end in time, whatever their server does.


@pytest.mark.parametrize("fault", FAULTS)
def test_no_server_outlasts_a_request(fault: str) -> None:
    with stubborn(fault) as server:
        client = Endpoint(url=server.url, model="m")
        with pytest.raises((TimeIsUp, ProviderFailure)):  # a request that goes on never gets here
            client.complete([{"role": "user", "content": "x"}], [], 10, until=time.monotonic() + 0.4)
        while server.open:  # likewise, where the connection stays open
            time.sleep(0.05)


def test_an_answer_in_time_is_one_and_the_connection_is_used_again() -> None:
    with stubborn("silent", chat_reply("one"), chat_reply("two")) as server:
        client = Endpoint(url=server.url, model="m")
        for text in ("one", "two"):
            completion = client.complete([], [], 10, until=time.monotonic() + 3600)
            assert completion.message["content"] == text and server.open == 1
        time.sleep(0.3)
        assert server.open == 1
