"""A host with secrets around its sandboxes, and what a case of their check is."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.attacks.case import HELPERS, Verdict
from composer_nb.harness.sandboxes.contract import Backend, Sandbox, SandboxSpec

SPEC = SandboxSpec(memory_bytes=192 << 20, disk_bytes=16 << 20, inodes=2000, processes=48, open_files=256)


REFUSED = (OSError, ValueError, KeyError)
"""What a call that can not be carried out raises."""


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

    def reached(self) -> list[str]:
        """Which listeners somebody has connected to."""
        found = []
        for name in ("tcp", "local", "abstract"):
            try:
                getattr(self, name).accept()[0].close()
                found.append(name)
            except BlockingIOError:
                pass
        return found


Judge = Callable[[Site], Verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxCase:
    id: str
    number: int
    title: str
    judge: Judge


def register(cases: list[SandboxCase], number: int, title: str) -> Callable[[Judge], Judge]:
    """Add a judge to `cases`; its name, with hyphens, is the case's id."""

    def note(judge: Judge) -> Judge:
        cases.append(SandboxCase(id=judge.__name__.replace("_", "-"), number=number, title=title, judge=judge))
        return judge

    return note


def python(box: Sandbox, source: str, *arguments: object, timeout_s: float = 30.0) -> Any:
    """What `source`, a program that has `arguments` as `A` and prints JSON as its last line, reports.

    Raises ValueError when it reports nothing.
    """
    text = f"import json, sys\nA = json.load(sys.stdin)\n{HELPERS}\n{source}"
    done = box.exec(["python3", "-c", text], timeout_s=timeout_s, stdin=json.dumps(arguments).encode())
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if not lines:
        raise ValueError(f"no evidence: exit code {done.exit_code}, {done.stderr[-200:]!r}")
    return json.loads(lines[-1])


def nothing(found: list[str]) -> Verdict:
    return Verdict(blocked=not found, detail=f"succeeded: {found}" if found else "every attempt failed")


def alive(box: Sandbox) -> bool:
    return box.exec(["echo", "on"], timeout_s=20).stdout == b"on\n"
