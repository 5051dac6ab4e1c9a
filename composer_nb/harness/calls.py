"""What a sandbox is asked and what it answers: the vocabulary that tools, graders and sandboxes share.

Values come back as texts (`value_text`); expected values never enter a box, because code in a box can claim any result it
likes.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Literal

from composer_nb.harness import box

Status = Literal["returned", "raised", "timeout", "died", "unreadable", "not_run"]


class SandboxUnavailable(RuntimeError):
    """Bubblewrap is missing or cannot start here; the message says what to install or change."""


class SandboxFailure(RuntimeError):
    """The machinery failed: the result says nothing about the code that was to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may use; all of its arguments together, but for `output_bytes`."""

    cpu_s: float = 0.1  # CPU seconds from the import of the module on
    wall_s: float = 2.0  # seconds from the import on that it may sleep; waiting for the machine is no sleep
    memory_bytes: int = 256 << 20  # address space
    disk_bytes: int = 4 << 20  # the workspace, a tmpfs
    inodes: int = 256
    files: int = 32  # open at once
    threads: int = 16  # new processes are never allowed
    output_bytes: int = 16 << 10  # characters of one value's text
    answer_bytes: int = 1 << 20  # everything a request may report

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be above 0, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Call `function` of `module` once for each text of an argument tuple, in one sandbox.

    files: workspace path -> text; module: dotted name; arguments: literals such as "([3, 1], 4)".
    Raises ValueError for paths that leave the workspace, for bad names and for texts that are no tuple.
    """

    files: Mapping[str, str]
    module: str
    function: str
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.name or "\0" in name:
                raise ValueError(f"CallRequest.files: {name!r} is not a path inside the workspace")
        if not all(part.isidentifier() for part in self.module.split(".")):
            raise ValueError(f"CallRequest.module: {self.module!r} is not a module name")
        if not self.function.isidentifier():
            raise ValueError(f"CallRequest.function: {self.function!r} is not a function name")
        for text in self.arguments:
            _check_argument(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """What became of one argument. text: the value's text, the exception's type name, or "".

    returned: a readable value. raised: the call or the import raised. timeout: it used up its CPU time or
    slept too long. died: its process ended otherwise. unreadable: a value, or a report, that is not plain data of a fair
    size. not_run: an earlier argument ended the process.
    """

    status: Status
    text: str = ""


@functools.lru_cache(maxsize=8192)
def _check_argument(text: str) -> None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a literal") from error
    if type(value) is not tuple:
        raise ValueError(f"CallRequest.arguments: {text[:80]!r} is not a tuple (one argument is written (x,))")


def value_text(value: object, limit: int = Limits().output_bytes) -> str:
    """The text a box reports for `value`: repr, with set elements sorted by their texts.

    Raises ValueError for values a box calls unreadable.
    """
    try:
        return str(box.value_text(value, limit))
    except box.Unreadable:
        raise ValueError(f"a {type(value).__name__} that is not plain data of at most {limit} characters") from None
