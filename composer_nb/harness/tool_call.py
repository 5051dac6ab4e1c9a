"""A tool call in canonical form, and the ways in which one can fail: what every set of tools shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ErrorKind = Literal["InvalidArguments", "UnexpectedEnvironment", "ProviderError", "UserAborted", "Timeout"]


class ToolError(Exception):
    """A call that failed. `kind` is of the fixed taxonomy: anything else that goes wrong in a tool is a bug of ours."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, in canonical form."""

    name: str
    arguments: Mapping[str, Any]
