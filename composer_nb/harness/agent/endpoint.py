"""A client of OpenAI-compatible endpoints for chat completions.

Failed requests (connection, timeout, 408, 409, 429, 5xx, an answer that is cut short or not JSON) are retried after a growing
wait with jitter, not before the server's Retry-After, and never more than a minute later. An account without funds is not
retried. A permanent failure is a ProviderFailure of that rollout alone. The key is read from OPENAI_API_KEY.
"""

import asyncio
import json
import math
import os
import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import httpx

from composer_nb.harness.agent.chat import CallResult, Said, Schema, Written, read_json
from composer_nb.harness.agent.turns import Limits, News, Spoken, TokenlessTurnPolicy
from composer_nb.harness.policy import ProviderFailure, TimeIsUp
from composer_nb.harness.tools.tool_call import ToolCall, ToolError, invalid

# Messages in OpenAI's form.
Wire = Sequence[Mapping[str, Any]]
MAX_REPLY_BYTES = 16 << 20
AGAIN = (408, 409, 429, 500, 502, 503, 504)
# Codes of errors that are never retried, whatever their status.
FINAL = ("insufficient_quota", "billing_hard_limit_reached", "billing_not_active")
LONGEST_WAIT_S = 60
# Time limit for the list of an endpoint's models.
LISTED_S = 30.0
CONNECT_S = 10.0
# Keys of the context length in a list of models: vLLM, SGLang and `composer-nb serve`; OpenRouter; Groq.
CONTEXT = ("max_model_len", "context_length", "context_window")
# Errors about a conversation that is too long: OpenAI, vLLM, SGLang, llama.cpp, Anthropic.
_TOO_LONG = re.compile(
    "context_length_exceeded|exceed_context_size|maximum context length|model's context length|context size|context limit|"
    "prompt is too long|max_tokens.*too large",
    re.IGNORECASE,
)
_CONTEXT = re.compile(
    r"context length(?: is| of)?(?: only)? \(?(\d+)|context size \((\d+)|limit: [^>]*> (\d+)|> (\d+) maximum"
)
_INPUT = re.compile(
    r"\((\d+) (?:in|from) |(\d+) (?:tokens from the )?input|resulted in (\d+)|[Ii]nput \((\d+)|request \((\d+)|"
    r"limit: (\d+) \+|long: (\d+)"
)


_STARTING = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all requests, in its own thread: a caller, such as a notebook, may run a loop itself."""
    with _STARTING:  # a client's connections belong to one loop, and the first requests may come from several threads
        return _started_loop()


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="endpoint", daemon=True).start()
    return loop


def _client() -> httpx.AsyncClient:
    # No proxy and no .netrc: the key goes to the address that was given.
    return httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None))


async def _exchange(
    client: httpx.AsyncClient, method: str, url: str, until: float, silence_s: float, **options: Any
) -> tuple[int, httpx.Headers, bytes]:
    """Make one request and return status, headers and at most about MAX_REPLY_BYTES of the answer.

    `until`: a time of `time.monotonic`, or infinite; it holds even if the server keeps sending single bytes. `silence_s`: the
    longest pause between two pieces of the answer. Raises TimeIsUp or httpx.HTTPError.
    """
    timeout = httpx.Timeout(silence_s, connect=min(CONNECT_S, silence_s), pool=None)
    left_s, reply = until - time.monotonic(), b""
    if left_s <= 0:
        raise TimeIsUp
    deadline = asyncio.timeout(None if left_s == math.inf else left_s)
    try:
        async with deadline, client.stream(method, url, timeout=timeout, **options) as answer:
            async for received in answer.aiter_raw():
                reply += received
                if len(reply) > MAX_REPLY_BYTES:
                    break
    except TimeoutError:
        raise TimeIsUp from None
    return answer.status_code, answer.headers, reply


def context_of(entry: Mapping[str, Any]) -> int:
    """Return the context length in tokens that a server lists for a model; 0 if it lists none."""
    return next((entry[key] for key in CONTEXT if isinstance(entry.get(key), int) and entry[key] > 0), 0)


class ContextExceeded(ProviderFailure):
    """A conversation, with the answer that it asked for, does not fit into the context of an endpoint's model. `context` and
    `read`: maximum tokens of a conversation, and those that this one has without an answer, as the error names them, or 0."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.context, self.read = (_number(form, message) for form in (_CONTEXT, _INPUT))


def _number(form: re.Pattern[str], text: str) -> int:
    match = form.search(text.replace(",", ""))
    return int(next(filter(None, match.groups()))) if match else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of an endpoint, with its counts of tokens read and written, or 0 without counts.

    Attributes:
        cut: Whether a token limit cut it off.
        turn: Text and calls of a turn with an unreadable call, each with its error, from `composer-nb serve` (`Choice.turn`).
    """

    message: dict[str, Any]
    read: int
    written: int
    cut: bool = False
    turn: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The address of an endpoint. Raises ValueError for a malformed URL.

    Attributes:
        url: Address before `/chat/completions`, such as http://127.0.0.1:8000/v1.
        timeout_s: Longest pause within one answer.
        wait_s: Wait before the second try, doubled before each further one; random jitter adds up to the same again.
        context: Maximum tokens of a conversation, if the server names it, else 0.
    """

    url: str
    model: str = ""
    timeout_s: float = 300.0
    retries: int = 5
    wait_s: float = 0.5
    temperature: float = 1.0
    context: int = 0
    _client: httpx.AsyncClient = field(default_factory=_client, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            parts = httpx.URL(self.url)
        except httpx.InvalidURL:
            parts = httpx.URL("")
        if parts.scheme not in ("http", "https") or not parts.host or parts.userinfo or parts.query:
            raise ValueError(f"openai:{self.url}: give an address such as openai:http://127.0.0.1:8000/v1")

    def models(self, within_s: float = LISTED_S) -> dict[str, Mapping[str, Any]]:
        """Return the endpoint's entry for each of its models, by name. Raises ProviderFailure if the request fails."""
        try:
            return {str(entry["id"]): entry for entry in self.ask("GET", "models", time.monotonic() + within_s)["data"]}
        except (KeyError, TypeError) as error:
            raise ProviderFailure(f"{self.url}/models: not a list of models: {error!r}") from None
        except TimeIsUp:
            raise ProviderFailure(f"{self.url}/models: no answer within {within_s:g} s") from None

    def complete(
        self,
        messages: Wire,
        tools: Sequence[Any],
        max_tokens: int,
        parallel: bool = False,
        until: float = math.inf,
        seed: int | None = None,
    ) -> Answer:
        """Return the answer to a conversation. `tools`: schemas in OpenAI's form. `max_tokens`: maximum tokens of the answer.
        `parallel`: allow several calls in it. `until`: a time of `time.monotonic`.

        Raises ProviderFailure if the request fails, its subclass ContextExceeded if conversation and answer do not fit into the
        model's context, and TimeIsUp if that time passes first."""
        body = {"model": self.model, "messages": [*messages], "max_tokens": max_tokens, "temperature": self.temperature}
        body |= {} if seed is None else {"seed": seed}
        if tools:
            body |= {"tools": list(tools), "parallel_tool_calls": parallel}
        match self.ask("POST", "chat/completions", until, body):
            case {"choices": [{"message": dict(message), **choice}, *_], **more}:
                usage = more.get("usage")
            case answer:
                raise ProviderFailure(f"{self.url}: an answer without a message: {str(answer)[:200]}")
        counts = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
        read_tokens, written_tokens = (min(n, 1 << 40) if isinstance(n, int) and n > 0 else 0 for n in counts)
        cut, turn = choice.get("finish_reason") == "length", choice.get("turn")
        turn = turn if isinstance(turn, dict) else None
        return Answer(message=message, read=read_tokens, written=written_tokens, cut=cut, turn=turn)

    def ask(self, method: str, path: str, until: float, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer; failed requests are repeated up to `retries` times.

        Raises TimeIsUp at `until`, ContextExceeded if the conversation is too long, and ProviderFailure for other failures."""
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):  # the error of the library would show the key
            raise ProviderFailure("OPENAI_API_KEY: holds a character that an HTTP header must not have")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        address = f"{self.url.rstrip('/')}/{path}"
        content = None if body is None else json.dumps(body).encode()
        for try_index in range(self.retries + 1):
            retry_after = None
            request = _exchange(self._client, method, address, until, self.timeout_s, content=content, headers=headers)
            pending = asyncio.run_coroutine_threadsafe(request, _loop())
            try:
                status, reply_headers, reply = pending.result()
                if len(reply) > MAX_REPLY_BYTES:
                    raise ProviderFailure(f"{address}: longer than {MAX_REPLY_BYTES} bytes")
                if status == 200:
                    return json.loads(reply)
                code, message = _error(reply)
                failure = f"status {status}{f' ({code})' if code else ''}: {message}"
                retry_after = reply_headers.get("Retry-After")
                if status in (400, 413) and _TOO_LONG.search(failure):
                    raise ContextExceeded(f"{address}: {failure}")
                if status not in AGAIN or code in FINAL:
                    break
            except (ValueError, RecursionError) as error:  # such as an answer that was cut short
                failure = f"no JSON: {str(error)[:200]}"
            except (httpx.HTTPError, OSError) as error:
                failure = f"{type(error).__name__}: {str(error)[:300]}"
            finally:
                pending.cancel()
            pause_s = _pause(retry_after, self.wait_s * 2**try_index)
            if try_index == self.retries or time.monotonic() + pause_s >= until:
                break
            time.sleep(pause_s)
        raise ProviderFailure(f"{address}: {failure}")


def _error(data: bytes) -> tuple[str, str]:
    """Return the code and the message of an error; an empty code and the whole text if it is not in OpenAI's form."""
    with suppress(ValueError, RecursionError):
        match json.loads(data):
            case {"error": {"message": str(message), **more}}:
                return str(more.get("code") or more.get("type") or ""), message[:600]
    return "", data[:300].decode("utf-8", "replace")


def _pause(retry_after: str | None, usual_s: float) -> float:
    """Return the seconds until the next try: the usual wait with jitter, and at least the server's, if that is readable.

    The wait grows and varies in either case, so that many clients with the same Retry-After do not all return at once."""
    least_s: float = 0
    with suppress(ValueError, OverflowError):
        if retry_after is not None and retry_after.strip().isdecimal():
            least_s = int(retry_after)
        elif retry_after is not None:
            least_s = parsedate_to_datetime(retry_after).timestamp() - time.time()
    return min(LONGEST_WAIT_S, max(least_s, usual_s * (1 + random.random())))


class EndpointTurnPolicy(TokenlessTurnPolicy):
    """Takes turns from an OpenAI-compatible endpoint, for evaluation and use: it returns no tokens to train on.

    It ends where a `TokenTurnPolicy` of the same model ends: at the smaller of its limit of tokens and the context of the
    endpoint. A turn that was cut, or whose call cannot be read, is an invalid call."""

    def __init__(
        self,
        endpoint: Endpoint,
        system: str,
        tools: Sequence[Schema],
        limits: Limits,
        parallel: bool = True,
        seed: int | None = None,
    ) -> None:
        """`tools`: schemas in OpenAI's form. `parallel`: allow several calls per turn. `seed`: sent with every request."""
        self.endpoint, self.tools, self.limits, self.parallel, self.seed = endpoint, tools, limits, parallel, seed
        self._talk: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        # Maximum tokens of the conversation.
        self._most = min(limits.tokens, limits.rollout_tokens, endpoint.context or limits.tokens)

    def say(self, news: News, until: float) -> Spoken | None:
        """Take a turn; None if the limits or the model's context leave no room for one.

        Raises ProviderFailure, also if no answer has ever come in time, and TimeIsUp after the first answer."""
        for message in news:
            call = {"tool_call_id": message.id} if isinstance(message, CallResult) and message.id else {}
            self._talk.append({"role": "tool" if call else "user", **call, "content": message.text})
        has_answered = any(message["role"] == "assistant" for message in self._talk)
        try:
            answer = self._answer(until)
        except ContextExceeded:
            if has_answered:
                return None
            raise  # the requested length of the answer may be at fault
        except TimeIsUp:
            if has_answered:
                raise
            # No answer ever came: this is the endpoint's fault, not the agent's.
            raise ProviderFailure(f"{self.endpoint.url}: not one answer within {self.limits.seconds:g} s") from None
        if answer is None:
            return None
        turn, calls = spoken(answer.message)
        self._talk.append(turn)
        if answer.turn:
            return Spoken(message=_unreadable(answer.turn), read=answer.read, written=answer.written)
        ids = [call["id"] for call in turn.get("tool_calls", ())]
        if answer.cut and not calls:
            ids, calls = [""], [invalid("the turn was cut off")]
        written_calls = tuple(Written(id=name, call=call) for name, call in zip(ids, calls, strict=True))
        text = turn["content"].strip()
        return Spoken(message=Said(text=text, calls=written_calls), read=answer.read, written=answer.written)

    def _answer(self, until: float) -> Answer | None:
        """Return the next answer; None if the limits of tokens leave no room.

        Raises ContextExceeded if the endpoint's error does not say how much room is left, or contradicts it; also like
        `Endpoint.complete`."""
        room_tokens = min(self.limits.turn_tokens, self._most)
        for _ in range(3):
            if room_tokens < 1:
                break
            try:
                answer = self.endpoint.complete(self._talk, self.tools, room_tokens, self.parallel, until, self.seed)
                if answer.read + answer.written <= self._most:
                    return answer
                read_tokens = answer.read
            except ContextExceeded as error:
                read_tokens, self._most = error.read, min(self._most, error.context or self._most)
                if not read_tokens or self._most - read_tokens >= room_tokens:
                    raise
            room_tokens = min(room_tokens - 1, self._most - read_tokens)
        return None


def _unreadable(turn: Mapping[str, Any]) -> Said:
    """Return a turn with an unreadable call (`Choice.turn`)."""

    def written(call: Mapping[str, Any]) -> Written:
        id, text, name = (str(call.get(key, "")) for key in ("id", "text", "name"))
        error = invalid(str(call["error"])) if "error" in call else _call(name, str(call.get("arguments", "")))
        return Written(id=id, call=error, text=text)

    turn_calls = [call for call in turn.get("calls") or () if isinstance(call, dict)]
    return Said(text=str(turn.get("text", "")).strip(), calls=tuple(map(written, turn_calls)))


def call_on_wire(id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call in OpenAI's form. `arguments`: JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def spoken(message: Mapping[str, Any]) -> tuple[dict[str, Any], list[ToolCall | ToolError]]:
    """Return a reply in the form for the next request, and its calls, with an error for each malformed one."""
    content = message.get("content")
    turn: dict[str, Any] = {"role": "assistant", "content": content if isinstance(content, str) else ""}
    calls: list[ToolCall | ToolError] = []
    wire_calls: list[dict[str, Any]] = []
    reply_calls = message.get("tool_calls") or []
    for call_index, call in enumerate(reply_calls if isinstance(reply_calls, list) else [reply_calls]):
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        name, arguments = str(function.get("name", "")), function.get("arguments", "")
        arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        id = call.get("id") if isinstance(call, dict) else None
        wire_calls.append(call_on_wire(str(id or f"call_{call_index}"), name, arguments_text))
        calls.append(_call(name, arguments_text))
    return turn | ({"tool_calls": wire_calls} if wire_calls else {}), calls


def _call(name: str, arguments: str) -> ToolCall | ToolError:
    try:
        value = read_json(arguments or "{}")
    except ToolError as error:
        return error
    if not name or not isinstance(value, dict):
        return invalid("a call needs a name and one JSON object of arguments")
    return ToolCall(name=name, arguments=value)
