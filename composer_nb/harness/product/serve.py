"""A script behind an OpenAI-compatible server on the loopback, so that whatever asks such a server can be tried without a model.

Covers `GET /v1/models` and `POST /v1/chat/completions` with tools, one choice, no streaming. Tokens are counted as words.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from composer_nb.harness.chat import Message, Result, Said, User, Written
from composer_nb.harness.openai_policy import spoken
from composer_nb.harness.product.speaker import Script

MAX_BODY_BYTES = 64 << 20


class ScriptServer:
    """A context manager: serves while it is open. `script` is given the conversation, and says the next turn."""

    def __init__(self, script: Script, port: int = 0, model: str = "scripted") -> None:
        """`port` 0: any that is free. Raises ValueError for one that is taken, or is none."""
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(script, model))
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


def messages_of(wire: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation in canonical form, without system texts. Raises ValueError for what is none."""
    messages: list[Message] = []
    for held in wire:
        match held:
            case {"role": "system"}:
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


def _completion(script: Script, model: str, body: Any) -> dict[str, Any]:
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ValueError("no messages")
    if body.get("stream"):
        raise ValueError("stream: not offered here")
    message = wire_of(script(messages_of(body["messages"])))
    read, written = (len(json.dumps(part).split()) for part in (body["messages"], message))
    return {
        "id": "scripted",
        "object": "chat.completion",
        "model": model,
        "choices": [
            {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        ],
        "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
    }


def _handler(script: Script, model: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
            else:
                self._reply(404, {"error": {"message": f"nothing at {self.path}"}})

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            if self.path != "/v1/chat/completions" or not 0 < size <= MAX_BODY_BYTES:
                self.close_connection = True
                self._reply(404 if size <= MAX_BODY_BYTES else 413, {"error": {"message": f"nothing at {self.path}"}})
                return
            self._answer(lambda: _completion(script, model, json.loads(self.rfile.read(size))))

        def _answer(self, work: Callable[[], Any]) -> None:
            try:
                self._reply(200, work())
            except ValueError as error:
                self._reply(400, {"error": {"message": str(error)}})

        def _reply(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    return Handler
