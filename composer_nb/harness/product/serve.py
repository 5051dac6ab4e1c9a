"""An OpenAI-compatible server on the loopback: a script behind it, so that whatever asks such a server can be tried without a
model, or an engine (`conversations.py`).

Covers `GET /v1/models` and `POST /v1/chat/completions` with tools and one choice. A stream is the whole answer in one piece.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from composer_nb.harness.chat import Message, Result, Said, User, Written
from composer_nb.harness.deadline import TimeIsUp
from composer_nb.harness.openai_policy import spoken
from composer_nb.harness.policy import ProviderFailure
from composer_nb.harness.product.speaker import Script

MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A turn on the wire, and how many tokens were read and written for it."""

    message: Mapping[str, Any]
    read: int
    written: int
    cut: bool = False
    """Whether it has no end, as it was to have no more tokens."""


Answerer = Callable[[Mapping[str, Any], Callable[[], bool]], Answered]
"""Answers the body of a request, a JSON object with a list of messages, as long as its client is there. Raises ValueError for
what it does not take, and TimeIsUp where the client went."""


class ChatServer:
    """A context manager: serves while it is open."""

    def __init__(self, answer: Answerer, port: int = 0, model: str = "model") -> None:
        """`port` 0: any that is free. Raises ValueError for one that is taken, or is none."""
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(answer, model))
        except (OSError, OverflowError) as error:
            raise ValueError(f"--port {port}: {error}; give another one, or 0 for any that is free") from None
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="serve", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def wait(self) -> None:
        """Until the server is closed, or Ctrl-C."""
        self._thread.join()


class ScriptServer(ChatServer):
    """Plays a script, which is given the conversation and says the next turn. Tokens are counted as words."""

    def __init__(self, script: Script, port: int = 0, model: str = "scripted") -> None:
        def answer(body: Mapping[str, Any], there: Callable[[], bool]) -> Answered:
            message = wire_of(script(messages_of(body["messages"])))
            read, written = (len(json.dumps(part).split()) for part in (body["messages"], message))
            return Answered(message=message, read=read, written=written)

        super().__init__(answer, port, model)


def messages_of(wire: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation in canonical form, without system texts. Raises ValueError for what is none."""
    messages: list[Message] = []
    for held in wire:
        match held:
            case {"role": "system" | "developer"}:
                pass
            case {"role": "user", "content": str(text)}:
                messages.append(User(text=text))
            case {"role": "tool", "tool_call_id": str(name), "content": str(text)}:
                messages.append(Result(id=name, text=text))
            case {"role": "assistant"}:
                said, calls = spoken(held)
                ids = [call["id"] for call in said.get("tool_calls", ())]
                written = tuple(Written(id=name, call=call) for name, call in zip(ids, calls, strict=True))
                messages.append(Said(text=said["content"], calls=written))
            case _:
                raise ValueError(f"no message: {json.dumps(held)[:200]}")
    return messages


def wire_of(said: Said) -> dict[str, Any]:
    """A turn as an endpoint's message."""
    calls = [
        {
            "id": written.id,
            "type": "function",
            "function": {"name": written.call.name, "arguments": json.dumps(dict(written.call.arguments))},
        }
        for written in said.calls
        if not isinstance(written.call, Exception)
    ]
    return {"role": "assistant", "content": said.text} | ({"tool_calls": calls} if calls else {})


def _completion(answer: Answerer, model: str, body: Any, there: Callable[[], bool]) -> dict[str, Any]:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
        raise ValueError("no messages")
    if body.get("n") not in (None, 1):
        raise ValueError("n: there is one choice")
    done = answer(body, there)
    reason = "tool_calls" if "tool_calls" in done.message else "length" if done.cut else "stop"
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": dict(done.message), "finish_reason": reason}],
        "usage": {
            "prompt_tokens": done.read,
            "completion_tokens": done.written,
            "total_tokens": done.read + done.written,
        },
    }


def _streamed(whole: Mapping[str, Any]) -> bytes:
    """An answer as a stream of one piece, and its end."""
    [choice] = whole["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(delta["tool_calls"])]
    head = {**whole, "object": "chat.completion.chunk"}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    parts = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, {**head, "choices": [last]}]
    return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"


def _there(client: socket.socket) -> bool:
    """Whether whoever asked has not closed the connection."""
    try:
        ready, _, _ = select.select([client], [], [], 0)
        return not ready or client.recv(1, socket.MSG_PEEK) != b""
    except (OSError, ValueError):
        return False


def _handler(answer: Answerer, model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
            else:
                self._reply(404, {"error": {"message": f"nothing at {self.path}"}})

        def do_POST(self) -> None:
            told = self.headers.get("Content-Length") or "0"
            size = int(told) if told.isdecimal() else 0
            if self.path != "/v1/chat/completions" or not 0 < size <= MAX_BODY_BYTES:
                self.close_connection = True
                self._reply(404 if size <= MAX_BODY_BYTES else 413, {"error": {"message": f"nothing at {self.path}"}})
                return
            try:
                body = json.loads(self.rfile.read(size))
                whole = _completion(answer, model, body, lambda: _there(self.connection))
            except (ValueError, RecursionError) as error:
                self._reply(400, {"error": {"message": str(error)}})
            except TimeIsUp:
                self.close_connection = True
            except ProviderFailure as error:
                self._reply(503, {"error": {"message": str(error)}})
            except Exception as error:
                self._reply(500, {"error": {"message": f"the server failed at this request: {error!r}"}})
                raise
            else:
                if body.get("stream"):
                    self._send(200, "text/event-stream", _streamed(whole))
                else:
                    self._reply(200, whole)

        def _reply(self, status: int, body: Any) -> None:
            self._send(status, "application/json", json.dumps(body).encode())

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler
