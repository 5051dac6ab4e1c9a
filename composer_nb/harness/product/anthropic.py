"""Chat requests and answers in Anthropic's form (`/v1/messages`), as those of `wire.py`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from composer_nb.harness.product.wire import Answered, Asked, Choice, Count, Named, Probability, Refused, Strict, spoke

IGNORED = ("cache_control", "citations")
"""Keys of blocks that do not change what the model reads."""


class _Tool(BaseModel):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]


class _Choose(Strict):
    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool = False


class Messages(Strict):
    """The body of a request. Parameters that it does not name are refused."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Count
    model: str | None = None
    system: str | list[dict[str, Any]] = ""
    tools: list[_Tool] | None = None
    tool_choice: _Choose | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    rollout: Named | None = None
    # Accepted with the values that change nothing.
    metadata: dict[str, str | None] | None = None
    thinking: dict[Literal["type"], Literal["disabled"]] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def asked(self) -> Asked:
        """Return the same request in OpenAI's form. Raises ValueError for messages that hold anything but texts and calls."""
        choice = self.tool_choice
        tools = [
            {
                "type": "function",
                "function": {"name": each.name, "parameters": each.input_schema}
                | ({"description": each.description} if each.description else {}),
            }
            for each in self.tools or ()
        ]
        return Asked(
            messages=[
                *([{"role": "system", "content": _texts(self.system)}] if self.system else ()),
                *(each for message in self.messages for each in _message(message)),
            ],
            model=self.model,
            tools=tools or None,
            tool_choice=choice.type if choice else None,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            stop=self.stop_sequences,
            **self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream", "rollout"}),
        )


def _message(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form: results of calls are messages of their own, before the user's text."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant") or not isinstance(blocks, list):
        raise ValueError(f"messages: this is not a message: {json.dumps(message)[:200]}")
    texts, calls, count = list[Any](), list[dict[str, Any]](), 0
    for block in blocks:
        match role, block:
            case "user", {"type": "tool_result", "tool_use_id": str(name)}:
                count += 1
                yield {"role": "tool", "tool_call_id": name, "content": _texts(block.get("content") or "")}
            case "assistant", {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(given)}:
                function = {"name": tool, "arguments": json.dumps(given)}
                calls.append({"id": name, "type": "function", "function": function})
            case _:
                texts.append(block)
    if texts or not count:
        yield {"role": role, "content": _texts(texts)} | ({"tool_calls": calls} if calls else {})


def _texts(content: str | Sequence[Any]) -> str | list[Any]:
    """Return content without keys that change nothing; what is no text is refused where it is read."""
    if isinstance(content, str):
        return content
    return [{k: v for k, v in each.items() if k not in IGNORED} if isinstance(each, dict) else each for each in content]


class MessagesReply:
    """Writes the answer to one request: whole, or as the events of a stream."""

    def __init__(self, asked: Asked, model: str) -> None:
        self.asked = self.body = asked
        self.model, self._sent = model, -1
        """Letters sent so far; −1 before the first event."""

    def whole(self, done: Answered) -> dict[str, Any]:
        [choice] = done.choices
        text, calls = choice.message["content"], _calls(choice, self.asked)
        content = [{"type": "text", "text": text}] if text or not calls else []
        return {
            **self._head(),
            "content": [*content, *calls],
            **_stopped(choice),
            "usage": _usage(done),
            **spoke(choice),
        }

    def part(self, number: int, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        if self._sent < 0:
            usage = {"input_tokens": 0, "output_tokens": 0}
            start = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": start}
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            self._sent = 0
        if text:
            self._sent += len(text)
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def rest(self, done: Answered) -> Iterator[dict[str, Any]]:
        [choice] = done.choices
        yield from self.part(0, choice.message["content"][max(self._sent, 0) :], ())
        yield {"type": "content_block_stop", "index": 0}
        for place, call in enumerate(_calls(choice, self.asked), 1):
            given = {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}
            yield {"type": "content_block_start", "index": place, "content_block": {**call, "input": {}}}
            yield {"type": "content_block_delta", "index": place, "delta": given}
            yield {"type": "content_block_stop", "index": place}
        yield {"type": "message_delta", "delta": {**_stopped(choice), **spoke(choice)}, "usage": _usage(done)}
        yield {"type": "message_stop"}

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self.model}


def refusal(refused: Refused) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _calls(choice: Choice, asked: Asked) -> list[dict[str, Any]]:
    calls = choice.message.get("tool_calls", ())[: 1 if asked.parallel_tool_calls is False else None]
    return [
        {
            "type": "tool_use",
            "id": c["id"],
            "name": c["function"]["name"],
            "input": json.loads(c["function"]["arguments"]),
        }
        for c in calls
    ]


def _stopped(choice: Choice) -> dict[str, Any]:
    plain = "max_tokens" if choice.cut else "stop_sequence" if choice.stopped else "end_turn"
    reason = "tool_use" if "tool_calls" in choice.message else plain
    return {"stop_reason": reason, "stop_sequence": choice.stopped or None}


def _usage(done: Answered) -> dict[str, int]:
    return {"input_tokens": done.read, "output_tokens": sum(choice.written for choice in done.choices)}
