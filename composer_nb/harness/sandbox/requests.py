"""Function calls in sandboxes: requests, outcomes, and the protocol of what carries them out (`calls.py` does).

A request names code, a function and arguments. Values come back as texts (`value_text`); expected values never enter a sandbox,
because code in it can claim any result it likes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from composer_nb.harness.plain import Positive, Some, require_ranges
from composer_nb.harness.sandbox.guest import values
from composer_nb.harness.syntax import literal_eval
from composer_nb.harness.untrusted import checked

# Name and text of the module through which one request calls functions of several modules.
CALLER = "composer_nb_caller"
CALLER_SOURCE = """from importlib import import_module


def call(module, function, arguments):
    return getattr(import_module(module), function)(*arguments)
"""
CallStatus = Literal["returned", "raised", "timeout", "died", "unreadable", "not_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits of one request of function calls. All of its arguments share them, except `output_bytes`.

    Raises ValueError for a limit that is not positive.

    Attributes:
        cpu_s: CPU seconds, from the import of the module on.
        wall_s: Maximum seconds of sleep; waiting for the machine does not count.
        memory_bytes: Address space.
        disk_bytes: Size of the workspace, which is in memory.
        files: Maximum number of open files.
        threads: Maximum number of threads; new processes are never allowed.
        output_bytes: Maximum characters of one value's text.
        answer_bytes: Maximum bytes of a request's whole report.
    """

    cpu_s: Positive = 0.1
    wall_s: Positive = 2.0
    memory_bytes: Some = 256 << 20
    disk_bytes: Some = 4 << 20
    inodes: Some = 256
    files: Some = 32
    threads: Some = 16
    output_bytes: Some = 16 << 10
    answer_bytes: Some = 1 << 20

    def __post_init__(self) -> None:
        require_ranges(self, "CallLimits")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Call `function` of `module` once for each text of an argument tuple, in one process.

    Raises ValueError for paths that leave the workspace, for bad names and for texts that are no tuple.

    Attributes:
        files: Workspace path -> text.
        module: Dotted name.
        arguments: Literals such as "([3, 1], 4)".
        limits: Limits of each call; None takes the executor's.
    """

    files: Mapping[str, str]
    module: str
    function: str
    arguments: tuple[str, ...]
    limits: CallLimits | None = None

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
    """The result of one argument.

    Attributes:
        status: returned: a readable value. raised: the call or the import raised. timeout: it used up its CPU time or slept
            too long. died: its process ended otherwise. unreadable: a value, or a report, that is not plain data of a fair
            size. not_run: an earlier argument ended the process.
        text: The value's text (`value_text`), or the name of the exception's type.
    """

    status: CallStatus
    text: str = ""


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
        return values.value_text(value, limit)
    except values.NotPlain:
        raise ValueError(f"a {type(value).__name__} that is not plain data of at most {limit} characters") from None


class Executor(Protocol):
    """Answers requests in their order, each as if in a fresh sandbox of its own."""

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        """Return a tuple of outcomes for each request. Raises SandboxFailure."""
        ...
