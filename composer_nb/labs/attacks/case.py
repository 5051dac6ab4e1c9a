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
SECRET_NAME = "COMPOSER_NB_CHECK_SECRET"
"""An environment variable of the host, with SECRET in it."""
SECRET = "canary-7f3a91"
REFUSED = (OSError, ValueError, KeyError)
"""Errors of a sandbox's methods that are no fault of the sandbox."""

HELPERS = """
import ctypes, json, os, sys
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
"""Functions for every hostile program: `attempt(found, name, thunk)` notes a name when the thunk raises nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A host with secrets around its sandboxes."""

    backend: Backend
    canary: Path
    """A file of the host that anybody may read, with SECRET in it."""
    tcp: socket.socket
    """A listener on the host's loopback."""
    local: socket.socket
    """A listener on a Unix socket beside the canary."""
    abstract: socket.socket
    """A listener on an abstract Unix socket, which lives in the network namespace."""
    calls: Executor | None = None
    """Serves function calls; only `bwrap` has one."""

    def reached(self) -> list[str]:
        """Return the names of the listeners that somebody has connected to."""
        found = []
        for name in ("tcp", "local", "abstract"):
            try:
                getattr(self, name).accept()[0].close()
                found.append(name)
            except BlockingIOError:
                pass
        return found

    def call(self, source: str, *arguments: str) -> tuple[CallOutcome, ...]:
        """Call `f` of a program once for each text of an argument tuple, and return the outcomes."""
        if self.calls is None:
            raise ValueError("this backend serves no calls")
        request = CallRequest(files={"f.py": source}, module="f", function="f", arguments=arguments or ("()",))
        return self.calls.run([request])[0]

    def report(self, source: str, *arguments: object) -> Any:
        """Return the plain value of `f(*arguments)`, called as a function. Raises Silent when there is none."""
        outcome = self.call(HELPERS + source, repr(arguments))[0]
        if outcome.status != "returned":
            raise NoEvidence(f"{outcome.status} {outcome.text}".strip())
        return ast.literal_eval(outcome.text)


class NoEvidence(Exception):
    """The program gave no evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackVerdict:
    blocked: bool
    flagged: bool = False
    """True if the outcome itself shows that something was wrong."""
    detail: str


Judge = Callable[[Site], AttackVerdict]


@dataclass(frozen=True, slots=True)
class Cell:
    """A place for hostile programs: a sandbox that runs them as commands, or function calls where `box` is None."""

    site: Site
    box: Sandbox | None

    def run(self, source: str, *arguments: object, timeout_s: float = 120.0) -> Any:
        """Return the plain value of `f(*arguments)` of a program. Raises Silent or ValueError when it gives none."""
        if self.box is None:
            return self.site.report(source, *arguments)
        return python(self.box, source, *arguments, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class SandboxCase:
    id: str
    number: int
    """Its kind, in the list of thirty; 0 for function calls."""
    title: str
    judge: Judge

    def row(self, site: Site) -> dict[str, Any]:
        """Return {"id", "kind", "title", "blocked", "flagged", "detail"}."""
        return row(self.id, self.number, self.title, verdict_of(self.judge, site))


def row(id: str, kind: int, title: str, verdict: AttackVerdict) -> dict[str, Any]:
    return {"id": id, "kind": kind, "title": title, **asdict(verdict)}


def verdict_of(judge: Judge, site: Site) -> AttackVerdict:
    """Return a judge's verdict; a program that gives no evidence is not proved to be stopped."""
    try:
        return judge(site)
    except (NoEvidence, ValueError) as silence:
        return AttackVerdict(blocked=False, detail=f"no evidence: the program ended with {silence}")


SANDBOX_CASES: list[SandboxCase] = []
"""Cases of every backend."""
CALL_CASES: list[SandboxCase] = []
"""Cases of function calls."""


def register(number: int, title: str) -> Callable[[Judge], Judge]:
    """Add a judge to SANDBOX_CASES, or with the number 0 to CALL_CASES; its name, with hyphens, is the case's id."""

    def note(judge: Judge) -> Judge:
        cases = SANDBOX_CASES if number else CALL_CASES
        cases.append(SandboxCase(judge.__name__.replace("_", "-"), number, title, judge))
        return judge

    return note


CellJudge = Callable[[Cell], AttackVerdict]


def register_both(number: int, title: str) -> Callable[[CellJudge], CellJudge]:
    """Add a judge to SANDBOX_CASES, for commands, and to CALL_CASES, for function calls: there its id begins with `call-`."""

    def note(judge: CellJudge) -> CellJudge:
        def commands(site: Site) -> AttackVerdict:
            with site.backend.create(SPEC) as box:
                return judge(Cell(site, box))

        id, called = judge.__name__.replace("_", "-"), f"{title}: as a function call"
        SANDBOX_CASES.append(SandboxCase(id, number, title, commands))
        CALL_CASES.append(SandboxCase(f"call-{id}", 0, called, lambda site: judge(Cell(site, None))))
        return judge

    return note


def python(box: Sandbox, source: str, *arguments: object, timeout_s: float = 30.0) -> Any:
    """Return `f(*arguments)` of a program that a command runs. Raises ValueError when it reports nothing."""
    text = f"{HELPERS}\n{source}\nprint(json.dumps(f(*json.load(sys.stdin))))"
    done = box.exec(["python3", "-c", text], timeout_s=timeout_s, stdin=json.dumps(arguments).encode())
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if not lines:
        raise ValueError(f"no evidence: exit code {done.exit_code}, {done.stderr[-200:]!r}")
    return json.loads(lines[-1])


def nothing(found: list[str]) -> AttackVerdict:
    """Return the verdict on a program that reports what worked: blocked if nothing did."""
    return AttackVerdict(blocked=found == [], detail=f"succeeded: {found}" if found else "every attempt failed")


def alive(box: Sandbox) -> bool:
    return box.exec(["echo", "on"], timeout_s=20).stdout == b"on\n"
