"""Adversarial checks of a sandbox backend: hostile programs run as ordinary requests, judged by evidence.

Each case looks at what the program reported and at what the host saw: a listener that was reached, a process
that stayed, the time it took. A program that reports nothing at all has not proved to be stopped: then the
outcome itself must be the one that the limit in question gives, or the case is not counted as blocked.

Covers escapes, resource use and the ways to forge a result. Does not cover faults of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from composer_nb.harness.attacks import forgery, isolation, resources
from composer_nb.harness.attacks.case import SECRET, SECRET_NAME, Host, Silent, Verdict
from composer_nb.harness.sandbox import BwrapSandboxes

BACKENDS = ("bwrap",)
CASES = (*isolation.CASES, *resources.CASES, *forgery.CASES)


@contextlib.contextmanager
def _host(make: Callable[[], BwrapSandboxes]) -> Iterator[Host]:
    """A host with secrets around its sandbox: a file, an environment variable, a descriptor, a listener."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o777)
        canary = directory / "canary"
        canary.write_text(SECRET)
        canary.chmod(0o644)
        leak = os.open(canary, os.O_RDONLY)
        stack.callback(os.close, leak)
        os.set_inheritable(leak, True)
        before = os.environ.get(SECRET_NAME)
        os.environ[SECRET_NAME] = SECRET
        stack.callback(_restore, before)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setblocking(False)
        boxes = stack.enter_context(make())
        yield Host(boxes=boxes, listener=listener, canary=canary)


def _restore(value: str | None) -> None:
    if value is None:
        del os.environ[SECRET_NAME]
    else:
        os.environ[SECRET_NAME] = value


def run_checks(backend: str = "bwrap") -> dict[str, Any]:
    """{"backend", "capabilities", "cases": [{"id", "title", "blocked", "flagged", "detail"}]}.

    Raises ValueError for an unknown backend and SandboxUnavailable where it cannot work.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    return _run_cases(backend, BwrapSandboxes)


def _run_cases(backend: str, make: Callable[[], BwrapSandboxes]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with _host(make) as host:
        for entry in CASES:
            try:
                verdict = entry.judge(host)
            except Silent as silence:
                verdict = Verdict(blocked=False, detail=f"no evidence: the program ended with {silence}")
            shown = {"blocked": verdict.blocked, "flagged": verdict.flagged, "detail": verdict.detail}
            rows.append({"id": entry.id, "title": entry.title, **shown})
        return {"backend": backend, "capabilities": host.boxes.capabilities, "cases": rows}
