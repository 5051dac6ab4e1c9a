"""Tools, calls and replies in canonical form, and the ways in which a call can fail: shared by every set of tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

ErrorKind = Literal["InvalidArguments", "UnexpectedEnvironment", "ProviderError", "UserAborted", "Timeout"]


class ToolError(Exception):
    """A call failed. `kind` is of the fixed taxonomy: anything else that goes wrong in a tool is a bug of this project."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


def invalid(message: str) -> ToolError:
    """Return the error of a call that cannot be read, or whose arguments are wrong."""
    return ToolError("InvalidArguments", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, in canonical form."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def json(self) -> str:
        """The call in OpenAI's form, as stored with a rollout."""
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)}, sort_keys=True)


def call(name: str, /, **arguments: Any) -> ToolCall:
    """Return the call of a tool with these arguments."""
    return ToolCall(name=name, arguments=arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A schema with its implementation.

    Attributes:
        needs: A program that must be in the sandbox.
        ends: A call of it ends the rollout.
    """

    name: str
    description: str
    arguments: type[BaseModel]
    run: Callable[..., Any]
    mutates: bool = False
    needs: str | None = None
    ends: bool = False

    def __call__(self, session: Any, arguments: BaseModel) -> Any:
        """Carry out a call with checked arguments. `session`: what the tool works in."""
        return self.run(session, **{name: getattr(arguments, name) for name in type(arguments).model_fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to a call.

    Attributes:
        error: Kind of the error; "Bug" is a fault of the tool itself, which is logged and says nothing about the agent.
        tests_passed: Visible tests passed, if the tool ran them.
    """

    call: ToolCall
    text: str
    error: ErrorKind | Literal["Bug"] | None = None
    seconds: float = 0.0
    tests_passed: int | None = None
    tests_run: int | None = None
    ends: bool = False
