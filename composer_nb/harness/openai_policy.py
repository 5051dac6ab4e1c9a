"""Any OpenAI-compatible endpoint as a Policy: text in, calls out. For evaluation: it tells no log-probabilities to train on, no
versions and no routes.

A rollout becomes a conversation: the prompt is the user's message, each observation the answer to the call before it. The reply's
call is written in the agent's own format, so that the loop reads it like any other; a reply that is no single, well-formed call
becomes a turn that can not be read, and counts as invalid.

Requests are tried again (connection, timeout, 408, 409, 429, 5xx, an answer that is cut short or no JSON) after a growing wait
with jitter, or when the server says, within a minute. What fails for good is a ProviderFailure of that rollout alone. A rollout
has `seconds`, all its turns together: whatever the server does, no longer is waited for it, and it fails in the same way. The key
is OPENAI_API_KEY's.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import urllib3

from composer_nb.harness.chat import read_json
from composer_nb.harness.deadline import TimeIsUp, exchange, open_pool
from composer_nb.harness.policy import Completion, ProviderFailure, Request, Trace
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.tools import ToolCall, ToolError

MAX_REPLY_BYTES = 16 << 20
AGAIN = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 60
LISTED_S = 30.0
"""Within which an endpoint says which models it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an endpoint answered a conversation."""

    message: dict[str, Any]
    read: int
    """Tokens of the conversation until then, as it counts them; 0 where it does not."""
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where chat completions are asked for. Raises ValueError for what is no such address."""

    url: str
    """Up to and without `/chat/completions`, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """Empty: the first that the server lists."""
    timeout_s: float = 300.0
    """Of one try, between two pieces of its answer."""
    retries: int = 5
    wait_s: float = 0.5
    """Before the second try, doubled before each further one; up to as much again is added by chance."""
    temperature: float = 1.0
    _pool: urllib3.PoolManager = field(default_factory=open_pool, repr=False, compare=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ValueError(f"openai:{self.url}: give an address such as openai:http://127.0.0.1:8000/v1")

    def models(self, within_s: float = LISTED_S) -> list[str]:
        """Names of the models there. Raises ProviderFailure."""
        try:
            return [str(entry["id"]) for entry in self._ask("GET", "models", time.monotonic() + within_s)["data"]]
        except (KeyError, TypeError) as error:
            raise ProviderFailure(f"{self.url}/models: no list of models: {error!r}") from None
        except TimeIsUp:
            raise ProviderFailure(f"{self.url}/models: no answer within {within_s:g} s") from None

    def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any],
        max_tokens: int,
        parallel: bool = False,
        until: float = math.inf,
    ) -> Answer:
        """What answers a conversation; `parallel`: several calls may be in it; `until`: on the clock `time.monotonic`. Raises
        ProviderFailure, and TimeIsUp where that time passes while it is waited for."""
        body = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
        }
        if tools:
            body |= {"tools": list(tools), "parallel_tool_calls": parallel}
        told = self._ask("POST", "chat/completions", until, body)
        try:
            message = told["choices"][0]["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise ProviderFailure(f"{self.url}: an answer without a message: {error!r}") from None
        if not isinstance(message, dict):
            raise ProviderFailure(f"{self.url}: an answer whose message is {type(message).__name__}")
        usage = told.get("usage")
        counts = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
        read, written = (min(count, 1 << 40) if isinstance(count, int) and count > 0 else 0 for count in counts)
        return Answer(message=message, read=read, written=written)

    def _ask(self, method: str, path: str, until: float, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        where = f"{self.url.rstrip('/')}/{path}"
        sent = None if body is None else json.dumps(body).encode()
        for tried in range(self.retries + 1):
            asked = None
            try:
                answer = exchange(
                    self._pool,
                    method,
                    where,
                    until=until,
                    silence_s=self.timeout_s,
                    most=MAX_REPLY_BYTES + 1,
                    body=sent,
                    headers=headers,
                )
                if answer.status == 200:
                    return _json(where, answer.data)
                failed = f"status {answer.status}: {answer.data[:300].decode('utf-8', 'replace')}"
                asked = answer.headers.get("Retry-After")
                if answer.status not in AGAIN:
                    break
            except (ValueError, RecursionError) as error:
                failed = f"no JSON: {str(error)[:200]}"
            except (urllib3.exceptions.HTTPError, OSError) as error:
                failed = f"{type(error).__name__}: {str(error)[:300]}"
            pause = _pause(asked, self.wait_s * 2**tried)
            if tried == self.retries or time.monotonic() + pause >= until:
                break
            time.sleep(pause)
        raise ProviderFailure(f"{where}: {failed}")


def _json(where: str, data: bytes) -> Any:
    """Raises ValueError or RecursionError for what is none, such as an answer that was cut short."""
    if len(data) > MAX_REPLY_BYTES:
        raise ProviderFailure(f"{where}: longer than {MAX_REPLY_BYTES} bytes")
    return json.loads(data)


def _pause(asked: str | None, usual: float) -> float:
    """Seconds until the next try: what the server asked for, where that can be read, else the usual with jitter."""
    with suppress(urllib3.exceptions.InvalidHeader, OverflowError):
        if asked is not None:
            return min(LONGEST_WAIT_S, urllib3.Retry().parse_retry_after(asked))
    return min(LONGEST_WAIT_S, usual * (1 + random.random()))


class OpenAIPolicy:
    """A Policy that asks an endpoint, one request a rollout at a time. A context manager, which waits for what is under way."""

    def __init__(
        self,
        endpoint: Endpoint,
        renderer: CompactRenderer,
        tools: Sequence[Any],
        capacity: int = 8,
        seconds: float = math.inf,
    ) -> None:
        """`tools`: schemas in OpenAI's form."""
        self.endpoint, self.renderer, self.tools, self.seconds = endpoint, renderer, list(tools), seconds
        self.capacity = capacity
        self._threads = ThreadPoolExecutor(max_workers=capacity, thread_name_prefix="openai")
        self._talks: dict[int, list[dict[str, Any]]] = {}
        self._until: dict[int, float] = {}
        self._asked: dict[Future[Answer], Request] = {}

    def __enter__(self) -> OpenAIPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def submit(self, request: Request) -> None:
        talk = self._talks.setdefault(request.rollout, [])
        text = self.renderer.text(request.token_ids)
        calls = talk[-1].get("tool_calls") if talk else None
        talk += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls or ()]
        talk += [] if calls else [{"role": "user", "content": text}]
        until = self._until.setdefault(request.rollout, time.monotonic() + self.seconds)
        asked = self._threads.submit(
            self.endpoint.complete, list(talk), self.tools, request.max_tokens, parallel=False, until=until
        )
        self._asked[asked] = request

    def step(self) -> list[Completion | ProviderFailure]:
        if not self._asked:
            return []
        done, _ = wait(self._asked, return_when=FIRST_COMPLETED)
        return [self._completed(asked) for asked in sorted(done, key=lambda asked: self._asked[asked].rollout)]

    def release(self, rollout: int) -> Trace:
        self._talks.pop(rollout, None)
        self._until.pop(rollout, None)
        for asked in [asked for asked, request in self._asked.items() if request.rollout == rollout]:
            asked.cancel()
            del self._asked[asked]
        return Trace()

    def _completed(self, asked: Future[Answer]) -> Completion | ProviderFailure:
        request = self._asked.pop(asked)
        try:
            message = asked.result().message
        except (ProviderFailure, TimeIsUp) as error:
            late = f"{self.endpoint.url}: no answer within the {self.seconds:g} s of a rollout"
            failure = error if isinstance(error, ProviderFailure) else ProviderFailure(late)
            failure.rollout = request.rollout
            return failure
        said, calls = spoken(message)
        self._talks[request.rollout].append(said)
        token_ids = self._written(said, calls)[: request.max_tokens]
        return Completion(
            rollout=request.rollout,
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            policy_versions=[-1] * len(token_ids),
        )

    def _written(self, said: Mapping[str, Any], calls: Sequence[ToolCall | ToolError]) -> list[int]:
        """The turn in the agent's format; what that can not say is written so that it reads as invalid."""
        if len(calls) == 1 and isinstance(calls[0], ToolCall):
            try:
                token_ids = self.renderer.render_call(calls[0])
                if self.renderer.parse_call(token_ids) == calls[0]:
                    return token_ids
            except (KeyError, ToolError, ValueError):
                pass
        text = json.dumps(said.get("tool_calls") or said["content"])  # in quotes: never a call of the format
        return [*self.renderer.encode(text), self.renderer.end]


def spoken(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[ToolCall | ToolError]]:
    """A reply as it is sent back with the next request, and its calls; of each that is malformed, why."""
    content = message.get("content")
    said: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else ""}
    calls: list[ToolCall | ToolError] = []
    kept: list[dict[str, Any]] = []
    listed = message.get("tool_calls") or []
    for number, call in enumerate(listed if isinstance(listed, list) else [listed]):
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        name, arguments = str(function.get("name", "")), function.get("arguments", "")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        name_of_call = str(call.get("id") or f"call_{number}") if isinstance(call, dict) else f"call_{number}"
        kept.append({"id": name_of_call, "type": "function", "function": {"name": name, "arguments": text}})
        calls.append(_call(name, text))
    return said | ({"tool_calls": kept} if kept else {}), calls


def _call(name: str, arguments: str) -> ToolCall | ToolError:
    try:
        held = read_json(arguments or "{}")
    except ToolError as error:
        return error
    if not name or not isinstance(held, dict):
        return ToolError("InvalidArguments", "a call has a name, and one JSON object of arguments")
    return ToolCall(name=name, arguments=held)
