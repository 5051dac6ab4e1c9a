"""What a case of the sandbox check is: a hostile program, and a judge that looks at what it reported and at the host."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.calls import CallOutcome, CallRequest
from composer_nb.harness.sandbox import BwrapSandboxes

SECRET_NAME = "COMPOSER_NB_CHECK_SECRET"  # an environment variable of the host
SECRET = "canary-7f3a91"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the cases may look at from outside."""

    boxes: BwrapSandboxes
    listener: socket.socket  # on the loopback of the host; nobody is to reach it
    canary: Path  # a world-readable file of the host that holds SECRET

    def run(self, source: str, *arguments: str) -> tuple[CallOutcome, ...]:
        request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=arguments or ("()",))
        return self.boxes.run([request])[0]

    def report(self, source: str, *arguments: object) -> Any:
        """The plain value that `f(*arguments)` returned. Raises Silent when it returned none."""
        outcome = self.run(source, repr(arguments))[0]
        if outcome.status != "returned":
            raise Silent(f"{outcome.status} {outcome.text}".strip())
        return ast.literal_eval(outcome.text)


class Silent(Exception):
    """The program gave no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    blocked: bool
    detail: str
    flagged: bool = False  # the outcome itself shows that something was wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    id: str
    title: str
    judge: Callable[[Host], Verdict]


def case(cases: list[Case], title: str) -> Callable[[Callable[[Host], Verdict]], Callable[[Host], Verdict]]:
    """Add a judge to `cases`; its name, with hyphens, is the case's id."""

    def register(judge: Callable[[Host], Verdict]) -> Callable[[Host], Verdict]:
        cases.append(Case(id=judge.__name__.replace("_", "-"), title=title, judge=judge))
        return judge

    return register


def nothing(found: Any) -> Verdict:
    """Blocked when the program reports that nothing worked."""
    return Verdict(blocked=found == [], detail=f"succeeded: {found}" if found else "every attempt failed")


# Each program may use these: `attempt(found, name, thunk)` notes a name when the thunk raises nothing.
HELPERS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def attempt(found, name, thunk):
    try:
        result = thunk()
    except BaseException:
        return
    found.append(name if result is None or result is True else name + "=" + repr(result)[:60])
def syscall(number, *arguments):
    result = libc.syscall(*[ctypes.c_long(each) for each in (number, *arguments)])
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""


def descendants(boxes: BwrapSandboxes) -> list[int]:
    """Processes below this sandbox's bubblewrap, itself first, as the host sees them, oldest first."""
    root = boxes.pid
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                parent = re.sub(r"^.*\) ", "", (entry / "stat").read_text(), flags=re.S).split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [] if root is None else [root]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found
