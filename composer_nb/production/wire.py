"""Requests and answers in the forms of OpenAI, Anthropic and vLLM. A parameter is honoured or refused; none is ignored."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from composer_nb.harness.agent.chat import CallResult, Message, Said, User, Written
from composer_nb.harness.agent.endpoint import call_on_wire, spoken
from composer_nb.harness.tools.tool_call import ToolCall, ToolError
from composer_nb.production.record import NAME

Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Named = Annotated[str, Field(pattern=f"^{NAME}$")]
Zero = Annotated[float, Field(ge=0, le=0)]
# Maximum size of a tool, and of all tools of a request, as JSON: the check of a tool blocks all other requests.
MOST_TOOL_BYTES, MOST_TOOLS_BYTES = 128 << 10, 1 << 20


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Schema(BaseModel):
    """What a JSON Schema must be for the formats to read it."""

    type: str | list[str] = []
    enum: list[Any] = []
    anyOf: list[_Schema | bool] = []
    oneOf: list[_Schema | bool] = []
    allOf: list[_Schema | bool] = []
    properties: dict[str, _Schema | bool] = {}
    required: list[str] = []
    defs: dict[str, _Schema | bool] = Field({}, alias="$defs")
    definitions: dict[str, _Schema | bool] = {}


class _Function(BaseModel):
    name: str
    description: str | None = None
    parameters: _Schema = Field({}, validate_default=True)
    strict: bool | None = None


class _OpenAITool(BaseModel):
    type: Literal["function"]
    function: _Function


class _Name(Strict):
    name: Annotated[str, Field(min_length=1)]


class _Chosen(Strict):
    type: Literal["function"]
    function: _Name


class _SamplingParameters(Strict):
    """Parameters of requests for text, whether it follows messages or text."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage"], bool] | None = None
    user: str | None = None
    # Accepted with the values that change nothing.
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None


class RequestBody(_SamplingParameters):
    """The body of a request. Parameters that it does not name are refused.

    Attributes:
        rollout: Name of the rollout that the conversation belongs to, for a server that records.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    rollout: Named | None = None
    # Accepted with the values that change nothing.
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        sizes = [len(json.dumps(tool)) for tool in tools or ()]
        if sum(sizes) > MOST_TOOLS_BYTES or max(sizes, default=0) > MOST_TOOL_BYTES:
            raise ValueError(f"at most {MOST_TOOL_BYTES} bytes each and {MOST_TOOLS_BYTES} in all, not {sum(sizes)}")
        for tool in tools or ():  # one by one, so that other threads run in between
            _OpenAITool.model_validate(tool)
        return tools  # as the client ordered them: the model reads them so

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("auto", "none", None)

    @property
    def tool(self) -> str | None:
        """Name of the one tool that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, _Chosen) else None

    @property
    def stops(self) -> list[str]:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in texts if text]


class Sampling(Strict):
    """Settings of sampling of a `Generate`, by vLLM's names."""

    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the drawn tokens, and of so many of the most probable ones."""


class Generate(Strict):
    """The body of a request for tokens that follow tokens."""

    prompt_token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    model: str | None = None
    sampling_params: Sampling = Sampling()
    return_routed_experts: bool = False
    stream: Literal[False] = False

    @property
    def asked(self) -> RequestBody:
        return RequestBody(messages=[{}])


class Complete(_SamplingParameters):
    """The body of a request for text that follows text or tokens."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    max_tokens: Annotated[Count, BeforeValidator(lambda count: 16 if count is None else count)] = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    # Accepted with the values that change nothing.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    @property
    def asked(self) -> RequestBody:
        """Its sampling as that of a conversation."""
        sampling = self.model_dump(include={"max_tokens", *_SamplingParameters.model_fields})
        return RequestBody(messages=[{}], logprobs=self.logprobs is not None, top_logprobs=self.logprobs, **sampling)


# Keys of blocks that do not change what the model reads.
IGNORED = ("cache_control", "citations")


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


class _ContextEdit(Strict):
    """An edit of the context: earlier thinking, of which the messages hold none here (`_openai_messages`)."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


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
    # Accepted with the values that change nothing: a policy thinks as it was trained to.
    thinking: dict[Literal["type", "budget_tokens", "display"], str | int | None] | None = None
    output_config: dict[Literal["effort"], str | None] | None = None
    context_management: dict[Literal["edits"], list[_ContextEdit]] | None = None
    cache_control: dict[str, str] | None = None
    diagnostics: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: str | None = None
    container: None = None

    @property
    def asked(self) -> RequestBody:
        """The same request in OpenAI's form. Raises ValueError for messages that hold anything but texts and calls."""
        choice = self.tool_choice
        tool_choice: Any = choice and {"any": "required"}.get(choice.type, choice.type)
        if choice and choice.name:
            tool_choice = {"type": "function", "function": {"name": choice.name}}
        tools = [
            {
                "type": "function",
                "function": {"name": tool.name, "parameters": tool.input_schema}
                | ({"description": tool.description} if tool.description else {})
                | ({"strict": True} if tool.strict else {}),
            }
            for tool in self.tools or ()
        ]
        return RequestBody(
            messages=[
                *([{"role": "system", "content": _texts(self.system)}] if self.system else ()),
                *(part for message in self.messages for part in _openai_messages(message)),
            ],
            model=self.model,
            tools=tools or None,
            tool_choice=tool_choice,
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            stop=self.stop_sequences,
            user=(self.metadata or {}).get("user_id"),
            **self.model_dump(include={"max_tokens", "temperature", "top_p", "top_k", "stream", "rollout"}),
        )


def _openai_messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form: results of calls are messages of their own, before the user's text. Earlier thinking, of
    whatever model, is left out."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant", "system") or not isinstance(blocks, list):
        raise ValueError(f"messages: this is not a message: {json.dumps(message)[:200]}")
    texts, calls = list[Any](), list[dict[str, Any]]()
    for block in blocks:
        match role, block:
            case "user", {"type": "tool_result", "tool_use_id": str(name)}:
                yield {"role": "tool", "tool_call_id": name, "content": _texts(block.get("content") or "")}
            case "assistant", {"type": "tool_use", "id": str(name), "name": str(tool), "input": dict(arguments)}:
                calls.append(call_on_wire(name, tool, json.dumps(arguments)))
            case "assistant", {"type": "thinking" | "redacted_thinking"}:
                pass
            case _:
                texts.append(block)
    if texts or calls or not blocks or role == "assistant":
        yield {"role": role, "content": _texts(texts)} | ({"tool_calls": calls} if calls else {})


def _texts(content: str | Sequence[Any]) -> str | list[Any]:
    """Return content without keys that change nothing; what is no text is refused where it is read."""
    if isinstance(content, str):
        return content
    return [
        {key: value for key, value in block.items() if key not in IGNORED} if isinstance(block, dict) else block
        for block in content
    ]


class Refused(ValueError):
    """A request that is answered with an error."""

    def __init__(
        self, message: str, status: int = 400, code: str = "invalid_value", param: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers


class PromptTooLong(Refused):
    """A conversation without room for an answer, in the words by which clients such as litellm tell it from other errors."""

    def __init__(self, context: int, read: int, param: str) -> None:
        """`context`: maximum tokens of a conversation; `read`: those of this one, or at least so many."""
        problem = f"This model's maximum context length is {context} tokens. However, your messages resulted in {read} tokens."
        super().__init__(f"{param}: {problem} Shorten the conversation.", code="context_length_exceeded", param=param)
        self.anthropic = f"prompt is too long: {read} tokens > {context} maximum"


AnyAsked = RequestBody | Generate | Complete
# Log-probabilities of tokens, in OpenAI's form.
Logprobs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A turn on the wire.

    Attributes:
        written: Number of tokens.
        lead: Letters of its text before the first call; None: all.
        cut: The turn was cut off by a limit of tokens.
        logprobs: Log-probability of each written token.
        versions: Policy version of each token.
        token_ids: For a `Generate`.
        stopped: The stop text that ended it.
        turn: Text and calls of a turn with an unreadable call: each has its id, and `error` or name and arguments. An agent that
            answers these calls by their ids continues as it would beside the engine.
        rollout: Name of its rollout, on a server that records.
        routes: Experts [T - 1, L, K] of all tokens read and written but the last, as a .npy file in base64.
    """

    message: Mapping[str, Any]
    written: int
    lead: int | None = None
    cut: bool = False
    logprobs: Logprobs | None = None
    versions: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    stopped: str = ""
    turn: Mapping[str, Any] | None = None
    rollout: str = ""
    routes: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a request: its choices, and the number of tokens that were `read` for it."""

    choices: Sequence[Choice]
    read: int

    @property
    def written(self) -> int:
        return sum(choice.written for choice in self.choices)


Body = TypeVar("Body", bound=BaseModel)
Calls = Sequence[Mapping[str, Any]]
# Takes what is known of an unfinished answer: number of a choice, next part of its text, its calls so far, and the next part of
# its log-probabilities.
Told = Callable[[int, str, Calls, Logprobs], None]


def read_request(body: bytes, kind: type[Body]) -> Body:
    """Return the body of a request. Raises Refused, which names the first parameter that is wrong."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = [str(part) for part in first["loc"]]
        unknown = first["type"] == "extra_forbidden"
        why = "this server does not support it" if unknown else first["msg"]
        code = "unsupported_parameter" if unknown else "invalid_value"
        param = names[0] if names else None
        raise Refused(f"{'.'.join(names) or 'the body'}: {why}", code=code, param=param) from None
    if isinstance(parsed, RequestBody) and parsed.top_logprobs and not parsed.logprobs:
        raise Refused("top_logprobs: only beside logprobs=true", param="top_logprobs")
    return parsed


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content of a message, which may come in parts. Raises ValueError if it is not text."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError("messages: a content must be text, or parts that are texts")
    whole = "".join(map(str, texts))
    if any("\ud800" <= letter <= "\udfff" for letter in whole):
        raise ValueError("messages: a content holds half of a surrogate pair, which is not a character")
    return whole


def messages_of(wire: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation in canonical form, without system texts. Raises ValueError for an invalid message."""
    messages: list[Message] = []
    for message in wire:
        match message:
            case {"role": "system" | "developer"}:
                pass
            case {"role": "user", "content": str() | list()}:
                messages.append(User(text=text_of(message)))
            case {"role": "tool", "tool_call_id": str(name), "content": str() | list()}:
                messages.append(CallResult(id=name, text=text_of(message)))
            case {"role": "assistant"}:
                turn, calls = spoken(message)
                written = list[Written]()
                for on_wire, call in zip(turn.get("tool_calls", ()), calls, strict=True):
                    name, text = on_wire["function"]["name"], on_wire["function"]["arguments"]
                    if isinstance(call, ToolError) and name:  # cut off or unreadable: with the arguments that it has
                        call = ToolCall(name=name, arguments=arguments_of(text))
                    written.append(Written(id=on_wire["id"], call=call))
                messages.append(Said(text=turn["content"], calls=tuple(written)))
            case _:
                raise ValueError(f"messages: this is not a message: {json.dumps(message)[:200]}")
    return messages


def arguments_of(text: str) -> dict[str, Any]:
    """Return what can be read of an object that need not be complete, as Anthropic's client does."""
    try:
        arguments = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def wire_of(turn: Said) -> dict[str, Any]:
    """Return a turn as an endpoint's message."""
    calls = []
    for written in turn.calls:
        if isinstance(written.call, ToolCall):
            calls.append(call_on_wire(written.id, written.call.name, json.dumps(dict(written.call.arguments))))
    return {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})


class AnswerWriter:
    """Writes the answer to one request: whole, or as the chunks of a stream."""

    kind = "chat.completion"

    def __init__(self, body: Any, model: str, **rollout: str) -> None:
        """`rollout`: the name in the request's address, if there is one. Raises ValueError like `Messages.asked`."""
        self.asked: RequestBody = (body if isinstance(body, RequestBody) else body.asked).model_copy(update=rollout)
        self.body: AnyAsked = body if isinstance(body, Complete | Generate) else self.asked
        self._head: dict[str, Any] = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        # Letters and log-probabilities of each choice sent so far.
        self._sent: dict[int, tuple[int, int]] = {}
        # Letters of the arguments of each call sent so far, by the numbers of its choice and its own.
        self._called: dict[tuple[int, int], int] = {}

    def whole(self, answered: Answered) -> dict[str, Any]:
        choices = [self._whole(number, choice) for number, choice in enumerate(answered.choices)]
        self._head["system_fingerprint"] = _fingerprint(answered)
        return {**self._head, "object": self.kind, "choices": choices, "usage": _usage(answered)}

    def part(self, number: int, text: str, calls: Calls, logprobs: Logprobs) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a part of an answer."""
        letters, tokens = self._sent.get(number, (0, 0))
        if text or logprobs or number not in self._sent:
            role = {} if number in self._sent else {"role": "assistant"}
            self._sent[number] = letters + len(text), tokens + len(logprobs)
            more = {"logprobs": {"content": list(logprobs), "refusal": None}} if logprobs else {}
            yield self._chunk(number, {**role, "content": text}, **more)
        for position, call in enumerate(shown(calls, self.asked)):
            sent, arguments = self._called.get((number, position)), call["function"]["arguments"]
            if sent is None:
                named = {**call, "function": {**call["function"], "arguments": ""}}
                yield self._chunk(number, {"tool_calls": [{"index": position, **named}]})
            if more := arguments[sent or 0 :]:
                yield self._chunk(number, {"tool_calls": [{"index": position, "function": {"arguments": more}}]})
            self._called[number, position] = len(arguments)

    def rest(self, answered: Answered) -> Iterator[dict[str, Any]]:
        """Yield the chunks of all that was not sent yet."""
        self._head["system_fingerprint"] = _fingerprint(answered)
        for number, choice in enumerate(answered.choices):
            letters, tokens = self._sent.get(number, (0, 0))
            text, logprobs = choice.message["content"][letters:], (choice.logprobs or ())[tokens:]
            yield from self.part(number, text, choice.message.get("tool_calls", ()), logprobs)
            yield self._chunk(number, {}, finish_reason=self._reason(choice), **spoke(choice))
        if self._counted:
            yield {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answered)}

    @property
    def _counted(self) -> bool:
        return bool((self.asked.stream_options or {}).get("include_usage"))

    def _chunk(self, number: int, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        counted = {"usage": None} if self._counted else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **counted}

    def _whole(self, number: int, choice: Choice) -> dict[str, Any]:
        calls = shown(choice.message.get("tool_calls", ()), self.asked)
        message = {**choice.message, **({"tool_calls": calls} if calls else {})}
        turn = {} if choice.turn is None else {"turn": choice.turn}
        return {**_choice(number, choice, self._reason(choice)), "message": message, **turn}

    def _reason(self, choice: Choice) -> str:
        return "length" if choice.cut else "tool_calls" if "tool_calls" in choice.message else "stop"


class CompletionReply(AnswerWriter):
    """Writes the answer to a `Complete`."""

    kind = "text_completion"

    def _whole(self, number: int, choice: Choice) -> dict[str, Any]:
        text = choice.message["content"]
        return self._text(number, text, self._reason(choice), choice.logprobs) | spoke(choice)

    def _chunk(self, number: int, delta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        tokens = (more.get("logprobs") or {}).get("content")
        choice = self._text(number, delta.get("content", ""), more.get("finish_reason"), tokens)
        return {**self._head, "object": self.kind, "choices": [choice]}

    def _text(self, number: int, text: str, reason: str | None, tokens: Logprobs | None) -> dict[str, Any]:
        logprobs = tokens and {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens],
        }
        return {"index": number, "text": text, "logprobs": logprobs or None, "finish_reason": reason}


class GenerateReply(AnswerWriter):
    """Writes the answer to a `Generate`, in vLLM's form."""

    def whole(self, answered: Answered) -> dict[str, Any]:
        choices = [
            {
                **_choice(number, choice, "length" if choice.cut else "stop"),
                "token_ids": list(choice.token_ids),
                "policy_versions": list(choice.versions),
                **({} if choice.routes is None else {"routed_experts": choice.routes}),
            }
            for number, choice in enumerate(answered.choices)
        ]
        head = {"id": f"gen-{uuid.uuid4().hex}", "model": self._head["model"]}
        return {**head, "system_fingerprint": _fingerprint(answered), "choices": choices, "usage": _usage(answered)}


class MessagesReply(AnswerWriter):
    """Writes the answer to a `Messages`: whole, or as the events of a stream."""

    def __init__(self, body: Messages, model: str, **rollout: str) -> None:
        super().__init__(body, model, **rollout)
        # Letters sent so far, of the text and of the arguments of each call.
        self._letters, self._arguments = 0, dict[int, int]()
        # What stands in each block; the last one is open.
        self._blocks = list[object]()

    def whole(self, answered: Answered) -> dict[str, Any]:
        [choice] = answered.choices
        text, calls = choice.message["content"], shown(choice.message.get("tool_calls", ()), self.asked)
        before, after = text[: choice.lead], "" if choice.lead is None else text[choice.lead :]
        texts = [[{"type": "text", "text": part}] if part else [] for part in (before, after)]
        content = [*texts[0], *map(_use, calls), *texts[1]] or [{"type": "text", "text": ""}]
        return {**self._start(), "content": content, **_stopped(choice), "usage": _tokens(answered), **spoke(choice)}

    def part(self, number: int, text: str, calls: Calls, logprobs: Logprobs) -> Iterator[dict[str, Any]]:
        if text:
            self._letters += len(text)
            yield from self._in("text before" if not self._arguments else "text after", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})
        for position, call in enumerate(shown(calls, self.asked)):
            arguments = call["function"]["arguments"]
            if more := arguments[self._arguments.get(position, 0) :]:
                yield from self._in(position, {**_use(call), "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": more})
            self._arguments[position] = len(arguments)

    def rest(self, answered: Answered) -> Iterator[dict[str, Any]]:
        [choice] = answered.choices
        text, calls = choice.message["content"], choice.message.get("tool_calls", ())
        lead = len(text) if choice.lead is None else choice.lead
        yield from self.part(0, text[self._letters : lead], calls, ())
        yield from self.part(0, text[self._letters :], (), ())
        if not self._blocks:
            yield from self._in("text before", {"type": "text", "text": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        yield {"type": "message_delta", "delta": {**_stopped(choice), **spoke(choice)}, "usage": _tokens(answered)}
        yield {"type": "message_stop"}

    def _in(self, what: object, start: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what opens a block, unless it is open."""
        if not self._blocks:
            usage = {"input_tokens": 0, "output_tokens": 0}
            head = {**self._start(), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": head}
        elif self._blocks[-1] != what:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        if self._blocks[-1:] != [what]:
            self._blocks.append(what)
            yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": start}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _start(self) -> dict[str, Any]:
        return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": self._head["model"]}


def shown(calls: Calls, body: RequestBody) -> Calls:
    """Return the calls that a client wants to see."""
    return calls[:1] if body.parallel_tool_calls is False else calls


def _choice(number: int, choice: Choice, reason: str) -> dict[str, Any]:
    logprobs = None if choice.logprobs is None else {"content": list(choice.logprobs), "refusal": None}
    return {"index": number, "finish_reason": reason, "logprobs": logprobs, **spoke(choice)}


def spoke(choice: Choice) -> dict[str, Any]:
    """Return the policy version of the last token, and which versions wrote which tokens, in vLLM's form."""
    named = {"rollout": choice.rollout} if choice.rollout else {}
    if not choice.versions:
        return named
    spans, end = list[dict[str, int]](), 0
    for version, same in groupby(choice.versions):
        start, end = end, end + len([*same])
        spans.append({"version": version, "start": start, "end": end})
    return {**named, "policy_version": choice.versions[-1], "weight_versions": spans}


def _fingerprint(answered: Answered) -> str | None:
    """Return the newest version that spoke."""
    newest = max((version for choice in answered.choices for version in choice.versions), default=-1)
    return f"v{newest}" if newest >= 0 else None


def _usage(answered: Answered) -> dict[str, int]:
    total = answered.read + answered.written
    return {"prompt_tokens": answered.read, "completion_tokens": answered.written, "total_tokens": total}


def _use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = arguments_of(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


def _stopped(choice: Choice) -> dict[str, Any]:
    plain = "stop_sequence" if choice.stopped else "end_turn"
    reason = "max_tokens" if choice.cut else "tool_use" if "tool_calls" in choice.message else plain
    return {"stop_reason": reason, "stop_sequence": choice.stopped or None}


def _tokens(answered: Answered) -> dict[str, int]:
    return {"input_tokens": answered.read, "output_tokens": answered.written}


# Address -> what is read there, and what writes the answer.
DIALECTS: Mapping[str, tuple[type[BaseModel], type[AnswerWriter]]] = {
    "/v1/chat/completions": (RequestBody, AnswerWriter),
    "/v1/completions": (Complete, CompletionReply),
    "/v1/messages": (Messages, MessagesReply),
    "/v1/generate": (Generate, GenerateReply),
}


def refusal(refused: Refused, path: str) -> dict[str, Any]:
    """Return a refusal in the form of a path."""
    if path == "/v1/messages":
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
        kinds |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}
        kind = kinds.get(refused.status, "invalid_request_error")
        message = refused.anthropic if isinstance(refused, PromptTooLong) else str(refused)
        return {"type": "error", "error": {"type": kind, "message": message}}
    kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}
