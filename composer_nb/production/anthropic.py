"""Chat requests and answers in Anthropic's form (`/v1/messages`), as those of `wire.py`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from composer_nb.harness.agent.endpoint import call_on_wire
from composer_nb.production.wire import (
    Answered,
    Calls,
    Choice,
    Count,
    Logprobs,
    Named,
    Probability,
    PromptTooLong,
    Refused,
    RequestBody,
    Strict,
    arguments_of,
    shown,
    spoke,
)

IGNORED = ("cache_control", "citations")
"""Keys of blocks that do not change what the model reads."""


class _AnthropicTool(BaseModel):
    name: str
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _Choose(Strict):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    """Of the tool that must be called."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.type == "tool") != bool(self.name):
            raise ValueError("a name belongs to the type tool, and to no other")
        return self

    @property
    def openai(self) -> Any:
        """The same choice in OpenAI's form."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Messages(Strict):
    """The body of a request. Parameters that it does not name are refused."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Count
    model: str | None = None
    system: str | list[dict[str, Any]] = ""
    tools: list[_AnthropicTool] | None = None
    tool_choice: _Choose | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    rollout: Named | None = None
    metadata: dict[str, str | None] | None = None
    # Accepted with the values that change nothing.
    thinking: dict[Literal["type"], Literal["disabled"]] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def asked(self) -> RequestBody:
        """Return the same request in OpenAI's form. Raises ValueError for messages that hold anything but texts and calls."""
        choice = self.tool_choice
        tools = [
            {
                "type": "function",
                "function": {"name": each.name, "parameters": each.input_schema}
                | ({"description": each.description} if each.description else {})
                | ({"strict": True} if each.strict else {}),
            }
            for each in self.tools or ()
        ]
        return RequestBody(
            messages=[
                *([{"role": "system", "content": _texts(self.system)}] if self.system else ()),
                *(each for message in self.messages for each in _message(message)),
            ],
            model=self.model,
            tools=tools or None,
            tool_choice=choice.openai if choice else None,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            stop=self.stop_sequences,
            user=(self.metadata or {}).get("user_id"),
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
                calls.append(call_on_wire(name, tool, json.dumps(given)))
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

    def __init__(self, asked: RequestBody, model: str) -> None:
        self.asked = self.body = asked
        self.model, self._letters, self._called = model, 0, dict[int, int]()
        """Letters sent so far, of the text and of the arguments of each call."""
        self._blocks = list[object]()
        """What stands in each block; the last one is open."""

    def whole(self, done: Answered) -> dict[str, Any]:
        [choice] = done.choices
        text, calls = choice.message["content"], shown(choice.message.get("tool_calls", ()), self.asked)
        before, after = text[: choice.lead], "" if choice.lead is None else text[choice.lead :]
        texts = [[{"type": "text", "text": part}] if part else [] for part in (before, after)]
        content = [*texts[0], *map(_use, calls), *texts[1]] or [{"type": "text", "text": ""}]
        return {**self._head(), "content": content, **_stopped(choice), "usage": _usage(done), **spoke(choice)}

    def part(self, number: int, text: str, calls: Calls, logprobs: Logprobs) -> Iterator[dict[str, Any]]:
        if text:
            self._letters += len(text)
            yield from self._in("text before" if not self._called else "text after", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for place, call in enumerate(shown(calls, self.asked)):
            arguments = call["function"]["arguments"]
            if more := arguments[self._called.get(place, 0) :]:
                yield from self._in(place, {**_use(call), "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": more})
            self._called[place] = len(arguments)

    def rest(self, done: Answered) -> Iterator[dict[str, Any]]:
        [choice] = done.choices
        text, calls = choice.message["content"], choice.message.get("tool_calls", ())
        lead = len(text) if choice.lead is None else choice.lead
        yield from self.part(0, text[self._letters : lead], calls, ())
        yield from self.part(0, text[self._letters :], (), ())
        if not self._blocks:
            yield from self._in("text before", {"type": "text", "text": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        yield {"type": "message_delta", "delta": {**_stopped(choice), **spoke(choice)}, "usage": _usage(done)}
        yield {"type": "message_stop"}

    def _in(self, what: object, start: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what opens a block, unless it is open."""
        if not self._blocks:
            usage = {"input_tokens": 0, "output_tokens": 0}
            head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": head}
        elif self._blocks[-1] != what:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if self._blocks[-1:] != [what]:
            self._blocks.append(what)
            yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _head(self) -> dict[str, Any]:
        return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self.model}


def refusal(refused: Refused) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    message = refused.anthropic if isinstance(refused, PromptTooLong) else str(refused)
    return {"type": "error", "error": {"type": kind, "message": message}}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    told = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": told["name"], "input": arguments_of(told["arguments"])}


def _stopped(choice: Choice) -> dict[str, Any]:
    plain = "stop_sequence" if choice.stopped else "end_turn"
    reason = "max_tokens" if choice.cut else "tool_use" if "tool_calls" in choice.message else plain
    return {"stop_reason": reason, "stop_sequence": choice.stopped or None}


def _usage(done: Answered) -> dict[str, int]:
    return {"input_tokens": done.read, "output_tokens": sum(choice.written for choice in done.choices)}
