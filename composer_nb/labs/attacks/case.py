"""Cases of the sandbox check: a hostile program, and a judge that looks at its report and at the host."""

import ast
import json
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import Backend, CallLimits, Sandbox, SandboxSpec
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest, Executor
from composer_nb.labs.attacks import hostile

SPEC = SandboxSpec(memory_bytes=192 << 20, disk_bytes=16 << 20, inodes=2000, processes=48, open_files=256)
LIMITS = CallLimits()
SECRET_NAME = "COMPOSER_NB_CHECK_SECRET"  # an environment variable of the host, with SECRET in it
SECRET = "canary-7f3a91"
REFUSED = (OSError, ValueError, KeyError)  # errors of a sandbox's methods that are no fault of the sandbox
HOSTILE = Path(hostile.__file__).read_text(encoding="utf-8")

Program = Callable[..., Any]  # a function of `hostile`


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

    def call(self, program: Program | str, *arguments: str) -> tuple[CallOutcome, ...]:
        """Call a program, or `f` of a text, once for each text of an argument tuple, and return the outcomes."""
        if self.calls is None:
            raise ValueError("this backend serves no calls")
        text, name = (program, "f") if isinstance(program, str) else (HOSTILE, program.__name__)
        request = CallRequest(files={"f.py": text}, module="f", function=name, arguments=arguments or ("()",))
        return self.calls.run([request])[0]

    def report(self, program: Program | str, *arguments: object) -> Any:
        """Return the plain value of a program, called as a function. Raises NoEvidence when there is none."""
        outcome = self.call(program, repr(arguments))[0]
        if outcome.status != "returned":
            raise NoEvidence(f"{outcome.status} {outcome.text}".strip())
        return ast.literal_eval(outcome.text)


@dataclass(slots=True)
class Cell:
    """Where hostile programs run: as commands of a sandbox, or as function calls. Its sandboxes end with it."""

    site: Site
    called: bool
    sandboxes: ExitStack = field(default_factory=ExitStack)

    def sandbox(self, spec: SandboxSpec = SPEC) -> Sandbox:
        """Return a new sandbox."""
        return self.sandboxes.enter_context(self.site.backend.create(spec))

    def run(self, program: Program, *arguments: object) -> Any:
        """Return a program's plain value, in a new sandbox or as a call. Raises NoEvidence or ValueError when it gives none."""
        return self.site.report(program, *arguments) if self.called else python(self.sandbox(), program, *arguments)


# Returns a verdict, or the names of what a program could do: it is blocked if there are none.
Judge = Callable[[Cell], AttackVerdict | list[str]]


@dataclass(frozen=True, slots=True)
class SandboxCase:
    """A case. `number`: its kind, in the list of thirty; 0 for function calls."""

    id: str
    number: int
    title: str
    judge: Judge

    def verdict(self, site: Site) -> AttackVerdict:
        """Judge the case. A program that gives no evidence is not proved to be stopped."""
        cell = Cell(site, called=not self.number)
        try:
            with cell.sandboxes:
                verdict = self.judge(cell)
        except (NoEvidence, ValueError) as silence:
            return AttackVerdict(False, f"no evidence: the program ended with {silence}")
        return verdict if isinstance(verdict, AttackVerdict) else nothing(verdict)

    def row(self, site: Site) -> dict[str, Any]:
        """Return {"id", "kind", "title", "blocked", "flagged", "detail"}."""
        return row(self.id, self.number, self.title, self.verdict(site))


SANDBOX_CASES: list[SandboxCase] = []  # of every backend
CALL_CASES: list[SandboxCase] = []  # of function calls


def row(id: str, kind: int, title: str, verdict: AttackVerdict) -> dict[str, Any]:
    return {"id": id, "kind": kind, "title": title, **asdict(verdict)}


def case(number: int, title: str, *, called: bool = False) -> Callable[[Judge], Judge]:
    """Add a judge to SANDBOX_CASES, or with the number 0 to CALL_CASES; its name, with hyphens, is the case's id. `called`: it is
    judged as a function call, too."""

    def add(judge: Judge) -> Judge:
        id = judge.__name__.replace("_", "-")
        (SANDBOX_CASES if number else CALL_CASES).append(SandboxCase(id, number, title, judge))
        if called:
            CALL_CASES.append(SandboxCase(f"call-{id}", 0, f"{title}: as a function call", judge))
        return judge

    return add


def command(program: Program, arguments: str = "") -> list[str]:
    """Return a command that runs a program."""
    return ["python3", "-c", f"{HOSTILE}\nprint(json.dumps({program.__name__}({arguments})))"]


def python(box: Sandbox, program: Program, *arguments: object) -> Any:
    """Return the value of a program that a command runs. Raises ValueError when it reports nothing."""
    words = command(program, "*json.load(sys.stdin)")
    result = box.exec(words, timeout_s=120.0, stdin=json.dumps(arguments).encode())
    if not (lines := result.stdout.decode("utf-8", "replace").splitlines()):
        raise ValueError(f"no evidence: exit code {result.exit_code}, {result.stderr[-200:]!r}")
    return json.loads(lines[-1])


def nothing(successes: list[str]) -> AttackVerdict:
    """Return the verdict on a program that reports what worked: blocked if nothing did."""
    return AttackVerdict(successes == [], f"succeeded: {successes}" if successes else "every attempt failed")


def alive(box: Sandbox) -> bool:
    return box.exec(["echo", "on"], timeout_s=20).stdout == b"on\n"
