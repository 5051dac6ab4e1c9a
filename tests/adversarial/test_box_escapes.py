"""Hostile programs in a box: every case is blocked, and the cases notice where walls are missing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from composer_nb.harness import sandbox_check
from composer_nb.harness.attacks.case import SECRET, SECRET_NAME, Host, Silent
from composer_nb.harness.calls import CallOutcome, CallRequest, Limits
from composer_nb.harness.sandbox import BwrapSandboxes, Mode
from composer_nb.harness.sandbox_check import CASES, run_checks
from composer_nb.harness.sandboxes.bwrap import BwrapBackend


class OneShot(BwrapSandboxes):
    """On a machine that forbids nested namespaces: bubblewrap itself forbids them here."""

    def _command(self, mode: Mode) -> list[str]:
        command = super()._command(mode)
        return [command[0], "--unshare-user", "--disable-userns", *command[1:]]


def run_cases(make: Callable[[], BwrapSandboxes]) -> list[dict[str, Any]]:
    with BwrapBackend() as backend:
        return list(sandbox_check._run_cases(make, backend))


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in run_cases(BwrapSandboxes)}


@pytest.fixture(scope="module")
def one_shot_rows() -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in run_cases(OneShot)}


@pytest.mark.parametrize("case_id", [case.id for case in CASES])
def test_case_is_blocked(rows: dict[str, dict[str, Any]], case_id: str) -> None:
    assert rows[case_id]["blocked"], rows[case_id]["detail"]


@pytest.mark.parametrize("case_id", [case.id for case in CASES])
def test_case_is_blocked_without_nested_namespaces(one_shot_rows: dict[str, dict[str, Any]], case_id: str) -> None:
    assert one_shot_rows[case_id]["blocked"], one_shot_rows[case_id]["detail"]


def test_nothing_nests_in_the_one_shot_mode() -> None:
    with OneShot() as boxes:
        assert boxes.capabilities["mode"] == "one-shot"


def test_rows_have_their_shape(rows: dict[str, dict[str, Any]]) -> None:
    assert len(rows) == len(CASES) >= 21
    assert all(set(row) == {"id", "kind", "title", "blocked", "flagged", "detail"} for row in rows.values())
    assert json.loads(json.dumps(rows)) == rows
    flagged = {name for name, row in rows.items() if row["flagged"]}
    assert {"forged-lines", "always-equal", "endless-loop", "exit-at-import", "huge-output"} <= flagged


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="backend must be one of bwrap, docker, process, not 'chroot'"):
        run_checks("chroot")


class NoWalls:
    """Runs requests as plain processes: only for cases that do no harm outside a box."""

    limits = Limits()
    pid = None

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

    def __init__(self, workspace: Path) -> None:
        self.workspace = workspace


@pytest.mark.parametrize(
    "case_id",
    [
        "read-host-files",
        "network",
        "leftovers",
        "environment",
        "descriptors",
        "privileges",
        "links",
        "always-equal",
    ],
)
def test_cases_notice_missing_walls(case_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_NAME, SECRET)
    canary = tmp_path / "canary"
    canary.write_text(SECRET)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    monkeypatch.setenv("TMPDIR", str(workspace))
    judge = next(case.judge for case in CASES if case.id == case_id)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        host = Host(boxes=cast(BwrapSandboxes, NoWalls(workspace)), listener=listener, canary=canary)
        assert not judge(host).blocked


def test_a_silent_program_is_no_evidence() -> None:
    with BwrapSandboxes() as boxes, socket.socket() as unused:
        host = Host(boxes=boxes, listener=unused, canary=Path("none"))
        with pytest.raises(Silent, match="died"):
            host.report("import os\nos._exit(0)\n")


def test_every_judge_names_a_distinct_case() -> None:
    assert all(case.judge.__module__.startswith("composer_nb.harness.attacks.") for case in CASES)
    assert len({case.id for case in CASES}) == len(CASES)
    assert len({case.title for case in CASES}) == len(CASES)
