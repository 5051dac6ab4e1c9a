"""Cases of the sandbox check: a hostile program, and a judge that looks at its report and at the host."""

from __future__ import annotations

import ast
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import Backend, CallLimits, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor

SPEC = SandboxSpec(memory_bytes=192 << 20, disk_bytes=16 << 20, inodes=2000, processes=48, open_files=256)
LIMITS = CallLimits()
SECRET_NAME = "COMPOSER_NB_CHECK_SECRET"  # an environment variable of the host, with SECRET in it
SECRET = "canary-7f3a91"
REFUSED = (OSError, ValueError, KeyError)  # errors of a sandbox's methods that are no fault of the sandbox
# Functions for every hostile program: `attempt(found, name, thunk)` notes a name when the thunk raises nothing, `repeat` counts
# how often a thunk works.
HELPERS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(found, name, thunk):
    try:
        result = thunk()
    except BaseException:
        return
    found.append(name if result is None or result is True else name + "=" + repr(result)[:60])
def repeat(thunk, most):
    count = []
    while len(count) < most:
        before = len(count)
        attempt(count, "", thunk)
        if len(count) == before:
            break
    return len(count)
def syscall(number, *arguments):
    result = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
"""


class NoEvidence(Exception):
    """The program gave no evidence."""


@dataclass(frozen=True, slots=True)
class AttackVerdict:
    """Whether an attack was blocked. `flagged`: the outcome itself shows that something was wrong."""

    blocked: bool
    detail: str
    flagged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A host with secrets around its sandboxes.

    Attributes:
        canary: a file of the host that anybody may read, with SECRET in it.
        tcp: a listener on the host's loopback.
        local: a listener on a Unix socket beside the canary.
        abstract: a listener on an abstract Unix socket, which lives in the network namespace.
        calls: serves function calls; only `bwrap` has one.
    """

    backend: Backend
    canary: Path
    tcp: socket.socket
    local: socket.socket
    abstract: socket.socket
    calls: Executor | None = None

    def reached(self) -> list[str]:
        """Return the names of the listeners that somebody has connected to."""
        names = []
        for name in ("tcp", "local", "abstract"):
            try:
                getattr(self, name).accept()[0].close()
                names.append(name)
            except BlockingIOError:
                pass
        return names

    def call(self, source: str, *arguments: str) -> tuple[CallOutcome, ...]:
        """Call `f` of a program once for each text of an argument tuple, and return the outcomes."""
        if self.calls is None:
            raise ValueError("this backend serves no calls")
        request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=arguments or ("()",))
        return self.calls.run([request])[0]

    def report(self, source: str, *arguments: object) -> Any:
        """Return the plain value of `f(*arguments)`, called as a function. Raises NoEvidence when there is none."""
        outcome = self.call(HELPERS + source, repr(arguments))[0]
        if outcome.status != "returned":
            raise NoEvidence(f"{outcome.status} {outcome.text}".strip())
        return ast.literal_eval(outcome.text)


@dataclass(frozen=True, slots=True)
class Cell:
    """Where hostile programs run: as commands of a sandbox, or as function calls where `box` is None."""

    site: Site
    box: Sandbox | None

    def run(self, source: str, *arguments: object) -> Any:
        """Return the plain value of `f(*arguments)` of a program. Raises NoEvidence or ValueError when it gives none."""
        return self.site.report(source, *arguments) if self.box is None else python(self.box, source, *arguments)


Judge = Callable[[Site], AttackVerdict]
CellJudge = Callable[[Cell], AttackVerdict]


@dataclass(frozen=True, slots=True)
class SandboxCase:
    """A case. `number`: its kind, in the list of thirty; 0 for function calls."""

    id: str
    number: int
    title: str
    judge: Judge

    def row(self, site: Site) -> dict[str, Any]:
        """Return {"id", "kind", "title", "blocked", "flagged", "detail"}."""
        return row(self.id, self.number, self.title, verdict_of(self.judge, site))


SANDBOX_CASES: list[SandboxCase] = []  # of every backend
CALL_CASES: list[SandboxCase] = []  # of function calls


def row(id: str, kind: int, title: str, verdict: AttackVerdict) -> dict[str, Any]:
    return {"id": id, "kind": kind, "title": title, **asdict(verdict)}


def verdict_of(judge: Judge, site: Site) -> AttackVerdict:
    """Return a judge's verdict; a program that gives no evidence is not proved to be stopped."""
    try:
        return judge(site)
    except (NoEvidence, ValueError) as silence:
        return AttackVerdict(False, f"no evidence: the program ended with {silence}")


def register(number: int, title: str) -> Callable[[Judge], Judge]:
    """Add a judge to SANDBOX_CASES, or with the number 0 to CALL_CASES; its name, with hyphens, is the case's id."""

    def add(judge: Judge) -> Judge:
        cases = SANDBOX_CASES if number else CALL_CASES
        cases.append(SandboxCase(judge.__name__.replace("_", "-"), number, title, judge))
        return judge

    return add


def register_both(number: int, title: str) -> Callable[[CellJudge], CellJudge]:
    """Add a judge to SANDBOX_CASES, for commands, and to CALL_CASES, for function calls: there its id begins with `call-`."""

    def add(judge: CellJudge) -> CellJudge:
        def commands(site: Site) -> AttackVerdict:
            with site.backend.create(SPEC) as box:
                return judge(Cell(site, box))

        id = judge.__name__.replace("_", "-")
        SANDBOX_CASES.append(SandboxCase(id, number, title, commands))
        called = f"{title}: as a function call"
        CALL_CASES.append(SandboxCase(f"call-{id}", 0, called, lambda site: judge(Cell(site, None))))
        return judge

    return add


def python(box: Sandbox, source: str, *arguments: object) -> Any:
    """Return `f(*arguments)` of a program that a command runs. Raises ValueError when it reports nothing."""
    text = f"{HELPERS}\n{source}\nprint(json.dumps(f(*json.load(sys.stdin))))"
    result = box.exec(["python3", "-c", text], timeout_s=120.0, stdin=json.dumps(arguments).encode())
    if not (lines := result.stdout.decode("utf-8", "replace").splitlines()):
        raise ValueError(f"no evidence: exit code {result.exit_code}, {result.stderr[-200:]!r}")
    return json.loads(lines[-1])


def nothing(successes: list[str]) -> AttackVerdict:
    """Return the verdict on a program that reports what worked: blocked if nothing did."""
    return AttackVerdict(successes == [], f"succeeded: {successes}" if successes else "every attempt failed")


def alive(box: Sandbox) -> bool:
    return box.exec(["echo", "on"], timeout_s=20).stdout == b"on\n"
