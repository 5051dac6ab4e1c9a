"""Adversarial checks of a sandbox backend: hostile programs run as ordinary requests, judged by evidence.

Each case looks at what the program reported and at what the host saw: a listener that was reached, a process
that stayed, the time it took. A program that reports nothing at all has not proved to be stopped: then the
outcome itself must be the one that the limit in question gives, or the case is not counted as blocked.

The thirty kinds of case run on every backend: hostile patches (1 to 18; `patches.py`), which are graded, and hostile uses of a
sandbox (19 to 30). On `bwrap`, function calls have cases of their own (`calls.py`).
Covers escapes, resource use and the ways to forge a result. Does not cover faults of the kernel.
"""

import contextlib
import itertools
import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.labs.attacks import calls, uses  # noqa: F401  (each adds its cases)
from composer_nb.labs.attacks.case import CALL_CASES, SANDBOX_CASES, SECRET, SECRET_NAME, Site
from composer_nb.labs.attacks.patch_check import check_fitted, check_patches

SANDBOX_CASES.sort(key=lambda case: case.number)
KINDS = 30  # kinds of attack: 1 to 18 are patches, the rest uses of a sandbox


@contextlib.contextmanager
def surroundings(backend: Backend, executor: Executor | None = None) -> Iterator[Site]:
    """Put secrets around sandboxes: a file, an environment variable, a descriptor, listeners of three kinds."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        directory.chmod(0o777)
        canary = directory / "canary"
        canary.write_text(SECRET)
        canary.chmod(0o644)
        leak = stack.enter_context(canary.open())
        os.set_inheritable(leak.fileno(), True)
        stack.enter_context(mock.patch.dict(os.environ, {SECRET_NAME: SECRET}))
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        local, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        local.bind(str(directory / "socket"))
        (directory / "socket").chmod(0o777)
        abstract.bind("\0composer_nb-" + uuid.uuid4().hex)
        for listener in (tcp, local, abstract):
            listener.listen()
            listener.setblocking(False)
        yield Site(backend=backend, canary=canary, tcp=tcp, local=local, abstract=abstract, calls=executor)


def run_checks(backend: str = "bwrap", note: Callable[[dict[str, Any]], None] = lambda row: None) -> dict[str, Any]:
    """{"backend", "capabilities", "kinds": [{"kind", "blocked", "cases"}], "cases": [{"id", "kind", "title", "blocked",
    "flagged", "detail"}]}. `note` is called with each case as soon as it is judged.

    The kind is a number of the list of thirty; 0: a control, or a case of function calls. A kind is blocked when each of
    its cases is, of which there is one at least. Raises ValueError for an unknown backend and SandboxUnavailable where it cannot
    work.
    """
    rows, verdicts = [], dict[int, list[bool]]()
    with open_backend(backend) as opened:
        facts = opened.capabilities()
        for row in itertools.chain(check_patches(opened), check_fitted(opened), _uses(opened)):
            rows.append(row)
            verdicts.setdefault(row["kind"], []).append(row["blocked"])
            note(row)
    limits = {"mode": facts.mode, "uid": facts.uid, "limits": dict(facts.enforced), "why_not": dict(facts.why_not)}
    numbered = [(kind, verdicts.get(kind, [])) for kind in range(1, KINDS + 1)]
    kinds = [{"kind": kind, "blocked": bool(cases) and all(cases), "cases": len(cases)} for kind, cases in numbered]
    return {"backend": backend, "capabilities": limits, "kinds": kinds, "cases": rows}


def _uses(backend: Backend) -> Iterator[dict[str, Any]]:
    with surroundings(backend) as site:
        yield from (case.row(site) for case in SANDBOX_CASES)
    if backend.name == "bwrap":
        with SandboxExecutor() as executor, surroundings(executor.backend, executor) as site:
            yield from (case.row(site) for case in CALL_CASES)
