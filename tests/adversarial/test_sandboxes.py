"""The cases of hostile use that every backend of sandboxes withstands, and function calls; they notice missing walls."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.labs.attacks.case import SECRET, SECRET_NAME, NoEvidence
from composer_nb.labs.attacks.sandbox_check import CALL_CASES, SANDBOX_CASES, surroundings
from tests.harness.sandbox.conftest import BACKENDS, make


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with make(request.param, request) as sandboxes:
        yield sandboxes


@pytest.mark.parametrize("case", SANDBOX_CASES, ids=lambda case: case.id)
def test_is_blocked(backend: Backend, case: Any, request: pytest.FixtureRequest) -> None:
    with surroundings(backend) as site:
        verdict = case.verdict(site)
    assert verdict.blocked, verdict.detail


class NoWalls:
    """A backend and its only sandbox without any walls: plain processes in a folder, for cases that do no harm."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, spec: object) -> NoWalls:
        return self

    def __enter__(self) -> NoWalls:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, path: str, data: bytes) -> None: ...

    def exec(self, command: list[str], *, timeout_s: float = 60.0, stdin: bytes = b"") -> Any:
        words = [sys.executable if word == "python3" else word for word in command]
        process = subprocess.run(
            words, input=stdin, capture_output=True, timeout=timeout_s, cwd=self.folder, check=False
        )
        return SimpleNamespace(stdout=process.stdout, stderr=process.stderr, exit_code=process.returncode)


# Hostile programs as function calls: every case is blocked, and the cases notice where walls are missing.


def test_every_case_is_blocked() -> None:
    with SandboxExecutor() as executor, surroundings(executor.backend, executor) as site:
        rows = [case.row(site) for case in CALL_CASES]
        with pytest.raises(NoEvidence, match="died"):
            site.report("import os\nos._exit(0)\n")
    assert [(row["id"], row["detail"]) for row in rows if not row["blocked"]] == [] and len(rows) >= 21
    flagged = {row["id"] for row in rows if row["flagged"]}
    assert {"forged-lines", "always-equal", "endless-loop", "exit-at-import", "huge-output"} <= flagged
    cases = (*CALL_CASES, *SANDBOX_CASES)
    assert len({case.id for case in cases}) == len(cases) == len({case.title for case in cases})


class NoExecutor:
    """Runs requests as plain processes, for cases that do no harm outside a sandbox."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        return [tuple(self._call(request, argument) for argument in request.arguments) for request in requests]

    def _call(self, request: CallRequest, argument: str) -> CallOutcome:
        command = [sys.executable, "-c", request.files["f.py"] + f"\nprint(repr({request.function}(*{argument})))\n"]
        process = subprocess.run(command, capture_output=True, text=True, cwd=self.workspace, close_fds=False)
        if process.returncode:
            return CallOutcome(status="died")
        return CallOutcome(status="returned", text=process.stdout.strip())


@pytest.mark.parametrize("id", ["call-read-the-host", "call-network", "call-inherited", "leftovers", "always-equal"])
def test_cases_notice_missing_walls(id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAME, SECRET)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    case = next(case for case in CALL_CASES if case.id == id)
    backend: Any = NoWalls(tmp_path)
    with surroundings(backend, NoExecutor(tmp_path)) as site:
        verdict = case.verdict(site)
        assert not verdict.blocked
        if id == "call-read-the-host":
            assert "link to" in verdict.detail and str(site.canary) in verdict.detail
