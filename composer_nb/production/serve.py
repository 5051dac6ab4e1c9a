"""An OpenAI-compatible server: a script behind it, to try clients without a model, or an engine (`conversations.py`).

    uvicorn's limits → Host, Origin, body → queue → a thread for each slot

Covers `POST /v1/chat/completions` and Anthropic's `/v1/messages` with tools, whole or as a stream, `POST /v1/generate` for tokens
in and out, `GET` of `/v1/models`, `/health` and `/metrics`, and, where conversations are recorded, the same below
`/rollouts/NAME`, with `POST /rollouts/NAME/grade`. The forms of requests and answers are in `wire.py`.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from ipaddress import ip_address
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from composer_nb.harness.agent.turns import Script
from composer_nb.harness.environment import Carried
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.production import SLOTS, wire
from composer_nb.production.record import NAME, Verdict

LOG = logging.getLogger("uvicorn.error")
MAX_BODY_BYTES = 16 << 20
# Maximum bytes of a body that is checked in the event loop.
SHORT = 16 << 10
# Connections besides those of the requests that are answered or wait; requests on any more get status 503.
SPARE_CONNECTIONS = 64
# Time for the body of a request to arrive.
ARRIVE_S = 20.0
# Time that a connection stays open after an answer.
KEEP_S = 30
MAX_HEAD_BYTES = 64 << 10
# Time for what is under way when the server is to end.
DRAIN_S = 30.0
# Seconds that a client is asked to wait when the queue is full.
RETRY_S = 1
# A name or an address and a port, with nothing that another parser could take for the end of the name.
_AUTHORITY = re.compile(r"(\[[^\[\]@/?#,\s]+\]|[^\[\]:@/?#,\s]+)(:[0-9]*)?")
PATHS = ("/health", "/metrics", "/v1/models", *wire.DIALECTS)
# Addresses that belong to one rollout, on a server that records.
_NAMED = re.compile(rf"/rollouts/({NAME})(/v1/.*|/grade)")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Answer = TypeVar("Answer")
# Answers a request while its client is there, and may tell parts of the answer as they come. Raises ValueError for a request
# that it does not accept, and TimeIsUp when the client goes away.
Answerer = Callable[[wire.AnyAsked, Callable[[], bool], wire.Told], wire.Answered]


class ThreadServer:
    """Serves an application in a thread while this context is open. `port` 0 is any free port; with `shared`, several servers of
    a machine may listen on one. `options` are those of uvicorn. Raises ValueError for an invalid address, or one in use."""

    def __init__(self, app: Any, host: str, port: int, shared: bool = False, **options: Any) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, reuse_port=shared)
        except (OSError, OverflowError) as error:
            raise ValueError(f"--host {host} --port {port}: {error}; give another one") from None
        config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="serve", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def wait(self) -> None:
        """Wait until the server is closed, or Ctrl-C."""
        while self._thread.is_alive():  # Python 3.11 takes a thread for ended whose `join` was interrupted
            time.sleep(0.1)


class ChatServer(ThreadServer):
    """A context manager that serves while it is open."""

    def __init__(
        self,
        answer: Answerer,
        port: int = 0,
        model: str = "model",
        *,
        host: str = "127.0.0.1",
        shared: bool = False,
        slots: int = SLOTS,
        queue: int = 64,
        key: str = "",
        version: Callable[[], int] | None = None,
        grade: Callable[[str, Verdict], int] | None = None,
        trained: Carried | None = None,
        context: int = 0,
        health: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`port` 0 is any free port; with `shared`, several servers of a machine may listen on one, and each connection goes to
        one of them. `slots` requests are answered at a time and `queue` more wait. Requests bring the `key`, if there is
        one; beyond the loopback one is made. `version`: that of the policy; raises ProviderFailure if it has ended.
        `grade`: takes what is found out about a recorded rollout, and returns the number of its branches. `trained`: what the
        model was trained with; `GET /v1/models` says it, so that an agent offers the same tools within the same limits.
        `context`: maximum tokens of a conversation, which it says too, under vLLM's name.
        `health`: what each of several `replicas` does and where the trial of a version stands (`canary`), for `/health` and
        `/metrics`.

        Raises ValueError for an invalid address, or one in use."""
        self.model, self.host, self.most = model, host, slots + queue
        super().__init__(
            self._serve,
            host,
            port,
            shared,
            interface="asgi3",
            http="h11",
            ws="none",
            loop="asyncio",
            proxy_headers=False,
            server_header=False,
            limit_concurrency=self.most + SPARE_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=KEEP_S,
            timeout_graceful_shutdown=5,
        )
        local = ip_address(self._socket.getsockname()[0]).is_loopback
        self.key = key or ("" if local else secrets.token_urlsafe(24))
        self._version, self._grade, self._counts = version, grade, Counter[str]()
        self._health = health
        self._listed = {"max_model_len": context} if context else dict[str, Any]()
        self._listed |= {"trained_with": asdict(trained)} if trained else {}
        self._answer, self._work, self._draining = answer, set[Future[wire.Answered]](), False
        self._threads = ThreadPoolExecutor(max_workers=slots, thread_name_prefix="answer")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self._socket.getsockname()[1]}/v1"

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        super().__exit__(*error)
        self._threads.shutdown()

    def drain(self) -> None:
        """Refuse new requests, and wait until those under way are answered, but no longer than DRAIN_S."""
        self._draining = True
        wait([*self._work], DRAIN_S)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        request = Request(scope, receive)
        if named := _NAMED.fullmatch(scope["path"]):
            scope["rollout"] = named[1]
            scope["path"] = named[2]
        try:
            reply = await self._reply(request)
        except Exception as error:
            refused = _refused(error)
            headers = {"Connection": "close", **refused.headers}  # since some of the request may not have been read
            reply = JSONResponse(wire.refusal(refused, scope["path"]), refused.status, headers)
            if reply.status_code == 500:
                LOG.exception("a request failed")
        if scope["path"] in PATHS:
            self._counts[f'requests_total{{path="{scope["path"]}",status="{reply.status_code}"}}'] += 1
        await reply(scope, receive, send)

    async def _reply(self, request: Request) -> Response:
        """Answer one HTTP request. Raises Refused for an unknown path or a request that cannot be met, and TimeIsUp while
        the server drains."""
        self._authorize(request.headers, request.scope["server"][0], request.scope["path"])
        body = await _body(request)
        listed = {"id": self.model, "object": "model", "created": 0, "owned_by": "composer_nb"} | self._listed
        match request.method, request.scope["path"]:
            case "GET", "/health":
                if self._draining:
                    raise TimeIsUp
                version: dict[str, Any] = {"policy_version": self._version()} if self._version else {}
                return JSONResponse({"status": "ok"} | version | {**self._health()})
            case "GET", "/metrics":
                return PlainTextResponse(self._metrics())
            case "GET", "/v1/models":
                return JSONResponse({"object": "list", "data": [listed]})
            case "GET", path if path == f"/v1/models/{self.model}":
                return JSONResponse(listed)
            case "POST", path if path in wire.DIALECTS:
                kind, writer = wire.DIALECTS[path]
                parsed = await _aside(body, wire.read_request, body, kind)
                if (model := getattr(parsed, "model", None)) not in (None, self.model):
                    message = f"no model {model!r} here; there is {self.model!r}"
                    raise wire.Refused(message, 404, "model_not_found", "model")
                named = {"rollout": request.scope["rollout"]} if "rollout" in request.scope else {}
                reply = await _aside(body, partial(writer, parsed, self.model, **named))
                if reply.asked.stream:
                    return await self._stream(reply, request)
                return JSONResponse(reply.whole(await self._queued(reply.body, request)))
            case "POST", "/grade" if self._grade and "rollout" in request.scope:
                verdict = wire.read_request(body, Verdict)
                count = await asyncio.to_thread(self._grade, request.scope["rollout"], verdict)
                return JSONResponse({"rollout": request.scope["rollout"], "segments": count})
            case method, path:
                raise wire.Refused(f"nothing at {method} {path}", 404, "not_found")

    def _metrics(self) -> str:
        """Return counts in Prometheus' text format."""
        running = sum(work.running() for work in [*self._work])
        now: dict[str, float] = {"requests_running": running, "requests_queued": len(self._work) - running}
        if self._version:
            now["policy_version"] = self._version()
        health = self._health()
        canary = health.get("canary", {}).items()
        now |= {f"canary_{key}": value for key, value in canary if not isinstance(value, dict)}
        for number, state in enumerate(health.get("replicas", ())):
            now |= {f'replica_{name}{{replica="{number}"}}': value for name, value in state.items() if name != "pid"}
        values, lines = {**self._counts, **now}, list[str]()
        for name in sorted({labelled.partition("{")[0] for labelled in values}):
            lines.append(f"# TYPE composer_nb_{name} {'counter' if name.endswith('_total') else 'gauge'}")
            lines += [f"composer_nb_{key} {values[key]}" for key in sorted(values) if key.partition("{")[0] == name]
        return "\n".join([*lines, ""])

    def _authorize(self, headers: Headers, address: str, path: str) -> None:
        """Raise Refused for requests of foreign web pages, by a name that resolves to this `address` or across origins, for a
        request whose end is ambiguous, and for one without the key; `/health` needs none."""
        host = headers.get("host", "")
        try:
            name = urlsplit(f"//{host}").hostname or "" if _AUTHORITY.fullmatch(host) else ""
        except ValueError:
            name = ""
        if name not in (*LOOPBACK, self.host.lower(), address):
            raise wire.Refused(f"Host {host!r} is not served; give it as --host", 403, "host_not_allowed")
        if any(origin != f"http://{host}" for origin in headers.getlist("origin")):
            raise wire.Refused("requests of other origins are not served", 403, "origin_not_allowed")
        if "content-length" in headers and "transfer-encoding" in headers:
            raise wire.Refused("both Content-Length and Transfer-Encoding", code="invalid_request")
        token = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if self.key and path != "/health" and not hmac.compare_digest(token.encode(), self.key.encode()):
            raise wire.Refused("the key of this server is needed, as a bearer token", 401, "invalid_api_key")

    async def _stream(self, reply: wire.AnswerWriter, request: Request) -> Response:
        """Return a stream, once there is something to send: what fails before is a plain refusal."""
        parts, loop = asyncio.Queue[Any](), asyncio.get_running_loop()

        def told(*part: Any) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        work = asyncio.create_task(self._queued(reply.body, request, told))
        work.add_done_callback(lambda task: parts.put_nowait(None))
        first = await parts.get()
        if first is None and work.exception() is not None:
            raise work.exception() or TimeIsUp

        async def events() -> AsyncIterator[bytes]:
            part = first
            try:
                while part is not None:
                    for chunk in reply.part(*part):
                        yield _event(chunk)
                    part = await parts.get()
                for chunk in reply.rest(work.result()):
                    yield _event(chunk)
            except Exception as error:
                yield _event(wire.refusal(_refused(error), request.scope["path"]))
            finally:
                work.cancel()
            if not isinstance(reply, wire.MessagesReply):
                yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _queued(
        self, body: wire.AnyAsked, request: Request, report: wire.Told = lambda *part: None
    ) -> wire.Answered:
        """Return the answer. Requests wait in order, and a client that goes away leaves the queue."""
        if len(self._work) >= self.most:
            message = f"{self.most} requests are under way or wait; ask again"
            raise wire.Refused(message, 429, "rate_limit_exceeded", **{"Retry-After": str(RETRY_S)})
        if self._draining or self._server.should_exit:
            raise TimeIsUp
        gone = threading.Event()

        def there() -> bool:
            return not gone.is_set() and not self._server.should_exit

        work = self._threads.submit(self._answer, body, there, report)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        answer, left = asyncio.wrap_future(work), asyncio.create_task(_left(request))
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not answer.cancelled():
                answered = answer.result()
                self._counts["tokens_read_total"] += answered.read
                self._counts["tokens_written_total"] += answered.written
                return answered
            raise TimeIsUp
        finally:
            gone.set()
            left.cancel()
            answer.cancel()


class ScriptServer(ChatServer):
    """Plays a script, which maps a conversation to its next turn. Temperature, top_p, seed and token limits have no effect. Words
    are counted as tokens."""

    def __init__(self, script: Script, port: int = 0, model: str = "scripted", **options: Any) -> None:
        def answer(body: wire.AnyAsked, there: Callable[[], bool], report: wire.Told) -> wire.Answered:
            if not isinstance(body, wire.RequestBody):
                raise wire.Refused("a script has no tokens", 404, "not_found")
            for name in ("stop", "logprobs", "tool_choice"):
                if getattr(body, name) not in (None, False, "auto"):
                    raise wire.Refused(
                        f"{name}: a script does not support it", code="unsupported_parameter", param=name
                    )
            message = wire.wire_of(script(wire.messages_of(body.messages)))
            read, written = (len(json.dumps(part).split()) for part in (body.messages, message))
            return wire.Answered(choices=[wire.Choice(message=message, written=written)], read=read)

        super().__init__(answer, port, model, **options)


async def _body(request: Request) -> bytes:
    """Return the whole body. Raises Refused for one that is too long or too slow."""
    body, size, parts = bytearray(), int(request.headers.get("content-length", 0)), request.stream()
    try:
        async with asyncio.timeout(ARRIVE_S):
            while size <= MAX_BODY_BYTES and (part := await anext(parts, None)) is not None:
                body += part
                size = max(size, len(body))
    except TimeoutError:
        raise wire.Refused(f"the body did not arrive within {ARRIVE_S:g} s", 408, "request_timeout") from None
    if size > MAX_BODY_BYTES:
        raise wire.Refused(f"a body has at most {MAX_BODY_BYTES} bytes", 413, "request_too_large")
    return bytes(body)


async def _aside(body: bytes, check: Callable[..., Answer], *args: Any) -> Answer:
    """Return what `check` makes of a body; a long one is checked beside the event loop, in which others are answered."""
    return check(*args) if len(body) < SHORT else await asyncio.to_thread(check, *args)


def _event(chunk: Mapping[str, Any]) -> bytes:
    """Return a part of a stream; Anthropic's have a name."""
    named = f"event: {chunk['type']}\n" if isinstance(chunk.get("type"), str) else ""
    return f"{named}data: {json.dumps(chunk)}\n\n".encode()


async def _left(request: Request) -> None:
    """Return when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(error: Exception) -> wire.Refused:
    """Return an error as a refusal. The message of a ValueError begins with the parameter that it is about."""
    match error:
        case wire.Refused():
            return error
        case ValueError():
            name = str(error).partition(":")[0]
            return wire.Refused(str(error), param=name if name in wire.RequestBody.model_fields else None)
        case ProviderFailure() | TimeIsUp() | ClientDisconnect():
            return wire.Refused(str(error) or "the server is closing", 503, "unavailable")
        case _:
            return wire.Refused(f"the server failed at this request: {error!r}", 500, "internal_error")
