"""The server as OpenAI's own client sees it, and as hostile, slow and impatient ones do."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from composer_nb.harness.agent.chat import Message, Said, Written
from composer_nb.harness.agent.qwen import QwenRenderer
from composer_nb.harness.tools.tool_call import ToolCall
from composer_nb.production import serve
from composer_nb.production.serve import ChatServer, ScriptServer
from composer_nb.production.wire import Answered, Choice, Generate, RequestBody, Told
from tests.production.conftest import ASKED, TOOL, playing
from tests.waiting import PATIENCE_S, wait_until


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "model", "messages": ASKED, **options})


def script(messages: Sequence[Message]) -> Said:
    return Said(text="Done.")


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptServer]:
    with ScriptServer(script) as server:
        yield server


# -- OpenAI's client -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [("one two three", ["three", "two"], "one"), ("one two", ["four"], "one two"), ("grün und blau", "ün", "gr")],
)
def test_stop_text_is_not_shown(text: str, stop: str | list[str], expected: str, tokenizer: Tokenizer) -> None:
    turn = QwenRenderer(tokenizer).turn(Said(text=text))
    with playing(QwenRenderer, tokenizer, turn, turn[:-1], turn) as (site, policy):
        completion = site.chat(stop=stop)
        assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (expected, "stop")
        # What stopped it stays between the policy and the server: the next request is read from its beginning.
        messages = [*ASKED, {"role": "assistant", "content": expected}, {"role": "user", "content": "go on"}]
        is_stopped = expected != text
        assert bool(policy.released) is is_stopped and (completion.usage.completion_tokens < len(turn)) is is_stopped
        late = site.chat(stop=stop, max_tokens=len(turn) - 1)
        assert late.choices[0].finish_reason == ("stop" if is_stopped else "length")
        site.chat(messages=messages)
        assert ("fix f" in tokenizer.decode(list(policy.requests[2].token_ids))) is is_stopped


def test_calls_are_made_as_the_client_chooses(tokenizer: Tokenizer) -> None:
    calls = tuple(Written(id=f"call_{n}", call=ToolCall(name="look", arguments={"at": f"f{n}"})) for n in range(2))
    turn = QwenRenderer(tokenizer, [TOOL]).turn(Said(calls=calls))
    with playing(QwenRenderer, tokenizer, *[turn] * 3) as (site, _):

        def choice_of(**options: Any) -> Any:
            return site.chat(tools=[TOOL], **options).choices[0]

        assert [call.function.arguments for call in choice_of().message.tool_calls] == ['{"at": "f0"}', '{"at": "f1"}']
        assert len(choice_of(parallel_tool_calls=False).message.tool_calls) == 1
        silent = choice_of(tool_choice="none")
        assert silent.message.tool_calls is None and silent.finish_reason == "stop" and "f1" in silent.message.content


LIMITED = {"type": "object", "properties": {"at": {"type": "string", "pattern": "a"}}}
STRICT = {"type": "function", "function": {"name": "look", "strict": True, "parameters": LIMITED}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto", "tools": [STRICT]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"seed": "7"}, "seed"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": 5}}}]}, "tools"),
    ({"messages": [*ASKED, {"role": "assistant", "content": "y"}]}, "messages"),
]


def test_what_is_not_honoured_is_refused_by_name(tokenizer: Tokenizer) -> None:
    rows = [(options, param, "invalid_value") for options, param in REFUSED]
    rows.append(({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"))
    rows.append(({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "context_length_exceeded"))
    with playing(QwenRenderer, tokenizer) as (site, policy):
        for options, param, code in rows:
            with pytest.raises(openai.BadRequestError) as refused:
                site.chat(**options)
            error = refused.value
            assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
            assert str(error.body["message"]).startswith(param)
        assert not policy.requests


def test_what_changes_nothing_is_accepted(tokenizer: Tokenizer) -> None:
    turn = QwenRenderer(tokenizer).turn(Said(text="Done."))
    usual: dict[str, Any] = {"n": 1, "response_format": {"type": "text"}, "frequency_penalty": 0}
    usual["presence_penalty"] = 0.0
    with playing(QwenRenderer, tokenizer, turn) as (site, _):
        usual |= {"service_tier": "auto", "prompt_cache_key": "k", "modalities": ["text"], "safety_identifier": "s"}
        usual |= {"logit_bias": {}, "store": False, "user": "me", "metadata": {"a": "b"}, "tool_choice": "auto"}
        assert site.chat(**usual, tools=[TOOL], stop=[], top_logprobs=0).choices[0].message.content == "Done."


def test_messages_in_anthropics_form(scripted: ScriptServer) -> None:
    cached = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    # What Claude Code sends beside messages and tools; of its edits of the context, those that nothing here needs.
    code = {
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "xhigh"},
        "speed": "fast",
    }
    clear: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
    edits = {"context_management": {"edits": [clear]}, "diagnostics": {"previous_message_id": None}}
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "…", "signature": "s"}, *cached]}
    turns = [
        {"role": "user", "content": "x"},
        thought,
        {"role": "system", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    rows: list[tuple[Any, dict[str, Any], int, str]] = [
        (cached, {"system": "y"}, 200, "Done."),
        (cached, code | edits | {"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 200, "Done."),
        ("", {"messages": turns}, 200, "Done."),
        (
            "x",
            {"context_management": {"edits": [clear | {"type": "compact_20260112"}]}},
            400,
            "context_management.edits.0.type",
        ),
        ("x", {"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format"),
        ("x", {"mcp_servers": []}, 400, "mcp_servers: this server does not support it"),
        ([{"type": "image", "source": {}}], {}, 400, "a content must be text, or parts that are texts"),
        ("x", {"rollout": "../x"}, 400, "rollout: String should match pattern"),
        ("x", {"top_k": 0}, 400, "top_k: Input should be greater than or equal to 1"),
    ]
    for content, more, status, text in rows:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 9, **more}
        answer = httpx.post(f"{scripted.url}/messages", json=body)
        assert answer.status_code == status and text in answer.text


def test_another_model_is_not_found(scripted: ScriptServer) -> None:
    with openai.OpenAI(base_url=scripted.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as refused:
            chat(client, model="gpt-5")
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        for options in ({"stop": "x"}, {"logprobs": True}, {"tool_choice": "none"}):
            with pytest.raises(openai.BadRequestError, match="a script does not support it"):
                chat(client, model="scripted", **options)
        with pytest.raises(openai.NotFoundError, match="nothing at POST /v1/embeddings"):
            client.embeddings.create(model="scripted", input="x")


def test_a_fault_of_the_servers_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(messages: Sequence[Message]) -> Said:
        raise RuntimeError("lost")

    with ScriptServer(broken) as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="lost") as failed:
            chat(client, model="scripted")
        assert (failed.value.code, failed.value.type) == ("internal_error", "server_error")
    assert "lost" in caplog.text


# -- the queue -----------------------------------------------------------------------------------------------


class Held:
    """Answers once it is allowed to, and records which requests it began and which clients went away."""

    def __init__(self) -> None:
        self.may, self.begun, self.gone = threading.Event(), list[str](), list[str]()

    def __call__(self, body: RequestBody | Generate, connected: Callable[[], bool], report: Told) -> Answered:
        assert isinstance(body, RequestBody)
        [message] = body.messages
        self.begun.append(message["content"])
        while not self.may.wait(0.02):
            if not connected():
                self.gone.append(message["content"])
                raise serve.TimeIsUp
        reply = {"role": "assistant", "content": message["content"]}
        return Answered(choices=[Choice(message=reply, written=1)], read=1)


def post(server: ChatServer, text: str) -> socket.socket:
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    return send(server, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def send(server: ChatServer, *data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server._socket.getsockname()[1]), timeout=PATIENCE_S)
    client.sendall(b"".join(data))
    return client


def status(client: socket.socket) -> int:
    return int(client.makefile("rb").readline().split()[1])


def test_requests_wait_in_order_and_too_many_are_told_when_to_ask_again() -> None:
    answer = Held()
    with ChatServer(answer, slots=1, queue=2) as server:
        clients = [post(server, "a")]
        wait_until(lambda: answer.begun == ["a"])
        for number, text in enumerate("bc", 2):
            clients.append(post(server, text))
            wait_until(lambda number=number: len(server._work) == number)
        with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as refused:
                chat(client)
        assert refused.value.response.headers["retry-after"] == "1" and refused.value.code == "rate_limit_exceeded"
        clients.pop(1).close()  # whoever goes away leaves the queue
        wait_until(lambda: len(server._work) == 2)
        clients.append(post(server, "d"))
        wait_until(lambda: len(server._work) == 3)
        answer.may.set()
        assert [status(connection) for connection in clients] == [200] * 3 and answer.begun == ["a", "c", "d"]


def test_the_end_of_the_server_ends_what_it_does_and_what_waits() -> None:
    answer = Held()
    with ChatServer(answer, slots=1) as server:
        clients = [post(server, "a")]
        wait_until(lambda: answer.begun == ["a"])
        clients.append(post(server, "b"))
        wait_until(lambda: len(server._work) == 2)
    assert answer.gone == ["a"] == answer.begun
    assert [status(connection) for connection in clients] == [503, 503]


# -- hostile and slow clients --------------------------------------------------------------------------------


def answers(client: socket.socket) -> list[int]:
    """Return the statuses of all answers until the server ends the connection."""
    received = b""
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:  # it did not read all of it
        pass
    client.close()
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


BODY = json.dumps({"messages": ASKED}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"
CLOSE = b"Connection: close\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n"
LOCAL = b"Host: localhost\r\n"
TEXT = b'"messages": [{"role": "user", "content": "x"}]'


def post_request(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n" % len(body) + CLOSE + body


UNLIKE_OURS: dict[str, tuple[bytes, int]] = {
    "another host's address": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + LOCAL + CLOSE, 404),
    **{
        f"the host {host!r}": (GET + b"Host: " + host + b"\r\n" + CLOSE, 403)
        for host in (b"evil.example@localhost", b"localhost:80:80", b"localhost, evil.example", b"0x7f.1", b"")
    },
    "a tunnel": (b"CONNECT evil.example:80 HTTP/1.1\r\n" + LOCAL + CLOSE, 404),
    "a header of 200 kB": (GET + LOCAL + b"X: " + b"a" * 200_000 + b"\r\n" + CLOSE, 400),
    "an extension with a line": (
        POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + b'2;a="\n"\r\n{}\r\n0\r\n\r\n', 400
    ),
    "a length of 5,000 digits": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n" + CLOSE, 400),
    "a body that is packed": (POST + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n" + CLOSE + b"\x1f\x8b", 400),
    **{
        f"{number} as {name}": (post_request(b'{%s, "%s": %s}' % (TEXT, name.encode(), number)), 400)
        for name in ("temperature", "top_p", "frequency_penalty")
        for number in (b"NaN", b"Infinity", b"-Infinity", b"1e999")
    },
    "a seed of 5,000 digits": (post_request(b'{%s, "seed": %s}' % (TEXT, b"9" * 5000)), 400),
    "a deep body": (post_request(b'{"messages": ' + b"[" * 100_000), 400),
    "half a pair": (post_request(b'{"messages": [{"role": "\\ud800"}]}'), 400),
}  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "refused"),
    [
        (POST + LENGTH + b"Content-Length: %d\r\n\r\n" % (len(BODY) + len(HIDDEN)) + BODY + HIDDEN, 400),
        (POST + LENGTH + CHUNKED % len(BODY) + BODY + b"\r\n0\r\n\r\n" + HIDDEN, 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + HIDDEN, 400),
        (POST + b"Host: evil.example\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN, 400),
        (b"GET /health HTTP/1.1\r\n\r\n" + HIDDEN, 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n" + HIDDEN, 403),
        (POST + b"Content-Length: %d\r\n\r\n" % (17 << 20), 413),
        (POST + CHUNKED % (serve.MAX_BODY_BYTES + 1) + b" " * (serve.MAX_BODY_BYTES + 1), 413),
        *(pytest.param(*case, id=name) for name, case in UNLIKE_OURS.items()),
    ],
)
def test_one_refusal_and_the_connection_ends(request_: bytes, refused: int, scripted: ScriptServer) -> None:
    assert answers(send(scripted, request_)) == [refused]


@pytest.mark.parametrize("host", ["LOCALHOST:80", "[::1]:8000"])
def test_the_names_of_the_loopback_and_the_same_origin_are_served(host: str, scripted: ScriptServer) -> None:
    head = f"GET /health HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nConnection: close\r\n\r\n"
    assert answers(send(scripted, head.encode())) == [200]


def test_the_server_listens_on_the_loopback_unless_it_is_told_another_address() -> None:
    with ScriptServer(script) as server:
        assert server._socket.getsockname()[0] == "127.0.0.1"
    with ScriptServer(script, host="127.0.0.2") as server:
        port = server._socket.getsockname()[1]
        client = socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S)
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.2:%d\r\nConnection: close\r\n\r\n" % port)
        assert answers(client) == [200]
    with ScriptServer(script, host="0.0.0.0") as server:
        client = socket.create_connection(("127.0.0.3", server._socket.getsockname()[1]), timeout=PATIENCE_S)
        health_check = HIDDEN.replace(b"localhost", b"127.0.0.3").replace(b"/v1/models", b"/health")
        client.sendall(health_check + b"GET / HTTP/1.1\r\nHost: 127.0.0.4\r\n\r\n")
        assert answers(client) == [200, 403]
    with pytest.raises(ValueError, match="--host nowhere.invalid"):
        ScriptServer(script, host="nowhere.invalid")


def test_beyond_the_loopback_or_with_a_key_a_request_must_bring_it() -> None:
    for options in ({"key": "secret"}, {"host": "0.0.0.0"}):
        with ScriptServer(script, **options) as server:
            url = f"http://127.0.0.1:{server._socket.getsockname()[1]}/v1"
            for key in (server.key, "wrong"):
                with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
                    if key == server.key:
                        assert chat(client, model="scripted").choices[0].message.content == "Done."
                    else:
                        with pytest.raises(openai.AuthenticationError) as refused:
                            client.models.list()
                        assert refused.value.code == "invalid_api_key"
                    assert client.get("/../health", cast_to=dict[str, str]) == {"status": "ok"}
    with ScriptServer(script) as server:
        assert server.key == ""


@pytest.mark.parametrize("head", [b"Content-Length: 99\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_serve_body_deadline(head: bytes, scripted: ScriptServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "ARRIVE_S", 0.2)
    assert answers(send(scripted, POST + head)) == [408]


def test_serve_connection_limit() -> None:
    """Slow clients take no thread, and only so many connections."""
    with ScriptServer(script, slots=2, queue=1) as server:
        threads = threading.active_count()
        clients = [send(server, b"GET /health HTTP/1.1\r\n") for _ in range(3 + serve.SPARE_CONNECTIONS)]
        connections = server._server.server_state.connections
        wait_until(lambda: len(connections) == len(clients))
        assert threading.active_count() <= threads
        assert answers(send(server, POST + LENGTH + b"Connection: close\r\n\r\n" + BODY)) == [503]
        for client in clients:
            client.close()
        wait_until(lambda: not connections)
        assert answers(send(server, HIDDEN.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == [200]


def test_tools_too_large_to_be_checked_are_refused(scripted: ScriptServer) -> None:
    def ask(count: int, size: int) -> httpx.Response:
        schema = {"type": "object", "properties": {f"a{number}": {} for number in range(size)}}
        body = {"messages": ASKED, "max_tokens": 5, "tools": [{"name": "f", "input_schema": schema}] * count}
        return httpx.post(f"{scripted.url}/messages", json=body, timeout=PATIENCE_S)

    assert ask(30, 500).status_code == 200
    for count, size in ((1, 20_000), (300, 500)):
        refused = ask(count, size)
        assert refused.status_code == 400 and "131072 bytes each and 1048576 in all" in refused.text
