"""Requests for function calls in sandboxes, and their outcomes, apart from what carries them out (`calls.py`).

Values come back as texts (`value_text`); expected values never enter a sandbox, because code in it can claim any result it likes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from composer_nb.harness.sandbox.contract import CallLimits
from composer_nb.harness.sandbox.guest import calls as guest
from composer_nb.harness.syntax import literal_eval
from composer_nb.harness.untrusted import checked

Status = Literal["returned", "raised", "timeout", "died", "unreadable", "not_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Call `function` of `module` once for each text of an argument tuple, in one process.

    Raises ValueError for paths that leave the workspace, for bad names and for texts that are no tuple.
    """

    files: Mapping[str, str]
    """Workspace path -> text."""
    module: str
    """Dotted name."""
    function: str
    arguments: tuple[str, ...]
    """Literals such as "([3, 1], 4)"."""
    limits: CallLimits | None = None
    """Limits of each call; None takes the executor's."""

    def __post_init__(self) -> None:
        for name in self.files:
            checked(name)
        if not all(part.isidentifier() for part in self.module.split(".")):
            raise ValueError(f"CallRequest.module: {self.module!r} is not a module name")
        if not self.function.isidentifier():
            raise ValueError(f"CallRequest.function: {self.function!r} is not a function name")
        for text in self.arguments:
            _check_argument(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The result of one argument."""

    status: Status
    """returned: a readable value. raised: the call or the import raised. timeout: it used up its CPU time or slept too long.
    died: its process ended otherwise. unreadable: a value, or a report, that is not plain data of a fair size. not_run: an
    earlier argument ended the process."""
    text: str = ""
    """The value's text (`value_text`), or the name of the exception's type."""


@functools.lru_cache(maxsize=8192)
def _check_argument(text: str) -> None:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a literal") from error
    if type(value) is not tuple:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a tuple (one argument is written (x,))")


def value_text(value: object, limit: int = CallLimits().output_bytes) -> str:
    """Return the text that a sandbox reports for `value`: its repr, with the elements of sets sorted by their texts.

    Raises ValueError for values that a sandbox calls unreadable.
    """
    try:
        return guest.value_text(value, limit)
    except guest.Unreadable:
        raise ValueError(f"a {type(value).__name__} that is not plain data of at most {limit} characters") from None


class Executor(Protocol):
    """Answers requests in their order, each as if in a fresh sandbox of its own."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Return a tuple of outcomes for each request. Raises SandboxFailure."""
        ...
