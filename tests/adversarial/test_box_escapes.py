"""Hostile programs as function calls: every case is blocked, and the cases notice where walls are missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.requests import CallOutcome, CallRequest
from composer_nb.labs.attacks.case import SECRET, SECRET_NAME, NoEvidence, verdict_of
from composer_nb.labs.attacks.sandbox_check import CALL_CASES as CASES
from composer_nb.labs.attacks.sandbox_check import SANDBOX_CASES, surroundings
from tests.adversarial.test_sandboxes import NoWalls as Trusting

Rows = dict[str, dict[str, Any]]


def rows_of(executor: SandboxExecutor) -> Rows:
    with executor, surroundings(executor.backend, executor) as site:
        return {case.id: case.row(site) for case in CASES}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(SandboxExecutor())


@pytest.mark.parametrize("case_id", [case.id for case in CASES])
def test_case_is_blocked(rows: Rows, case_id: str) -> None:
    assert rows[case_id]["blocked"], rows[case_id]["detail"]


def test_rows_have_their_shape(rows: Rows) -> None:
    assert len(rows) == len(CASES) >= 21
    assert all(set(row) == {"id", "kind", "title", "blocked", "flagged", "detail"} for row in rows.values())
    assert json.loads(json.dumps(rows)) == rows
    flagged = {name for name, row in rows.items() if row["flagged"]}
    assert {"forged-lines", "always-equal", "endless-loop", "exit-at-import", "huge-output"} <= flagged


class NoWalls:
    """Runs requests as plain processes: only for cases that do no harm outside a sandbox."""

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace

    def run(self, requests: Sequence[CallRequest]) -> list[tuple[CallOutcome, ...]]:
        return [tuple(self._call(request, argument) for argument in request.arguments) for request in requests]

    def _call(self, request: CallRequest, argument: str) -> CallOutcome:
        program = request.files["f.py"] + f"\nprint(repr(f(*{argument})))\n"
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=self.workspace,
            check=False,
            close_fds=False,
        )
        if done.returncode:
            return CallOutcome(status="died")
        return CallOutcome(status="returned", text=done.stdout.strip())


@pytest.mark.parametrize(
    "case_id", ["call-read-the-host", "call-network", "call-inherited", "leftovers", "always-equal"]
)
def test_cases_notice_missing_walls(case_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAME, SECRET)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    judge = next(case.judge for case in CASES if case.id == case_id)
    with Trusting() as backend, surroundings(backend, NoWalls(tmp_path)) as site:
        verdict = verdict_of(judge, site)
        assert not verdict.blocked
        if case_id == "call-read-the-host":
            assert "link to" in verdict.detail and str(site.canary) in verdict.detail


def test_a_silent_program_is_no_evidence() -> None:
    with SandboxExecutor() as executor, surroundings(executor.backend, executor) as site:
        with pytest.raises(NoEvidence, match="died"):
            site.report("import os\nos._exit(0)\n")


def test_every_judge_names_a_distinct_case() -> None:
    every = (*CASES, *SANDBOX_CASES)
    assert len({case.id for case in every}) == len(every) == len({case.title for case in every})
