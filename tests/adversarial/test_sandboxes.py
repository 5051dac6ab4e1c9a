"""The cases of hostile use that every backend of sandboxes withstands, and that they notice where walls are missing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_nb.harness.sandbox.contract import Backend, Sandbox, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.process import ProcessBackend
from composer_nb.labs.attacks import sandbox_check
from composer_nb.labs.attacks.case import verdict_of
from composer_nb.labs.attacks.sandbox_check import SANDBOX_CASES as CASES
from tests.harness.sandbox.conftest import ISOLATED, make


@pytest.fixture(params=ISOLATED, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with make(request.param, request) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_is_blocked(backend: Backend, case: Any, request: pytest.FixtureRequest) -> None:
    with sandbox_check.surroundings(backend) as site:
        verdict = verdict_of(case.judge, site)
    if not verdict.blocked and case.id == "unread-files" and os.geteuid() == 0:
        # Other programs may have needed the memory since this back end read its files: once more, with nothing in memory before.
        Path("/proc/sys/vm/drop_caches").write_text("1")
        with make(backend.name, request) as fresh, sandbox_check.surroundings(fresh) as site:
            verdict = verdict_of(case.judge, site)
    assert verdict.blocked, verdict.detail


class NoWalls(ProcessBackend):
    """Plain processes that trust whatever comes: only for cases that do no harm."""

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        return super().create(replace(spec or SandboxSpec(), trusted=True), snapshot)


@pytest.mark.parametrize("name", ["read-the-host", "network", "time-limit"])
def test_missing_walls_are_noticed(name: str) -> None:
    case = next(case for case in CASES if case.id == name)
    with NoWalls() as backend, sandbox_check.surroundings(backend) as site:
        verdict = verdict_of(case.judge, site)
    if name == "time-limit":
        assert verdict.blocked  # the resident program keeps this one by itself
    else:
        assert not verdict.blocked and "succeeded" in verdict.detail


def test_a_backend_without_walls_is_not_attacked_and_passes_nothing() -> None:
    report = sandbox_check.run_checks("process")
    assert len(report["cases"]) >= len(CASES) and not any(row["blocked"] for row in report["cases"])
    assert not report["capabilities"]["limits"]["network"]
    assert [kind["kind"] for kind in report["kinds"]] == list(range(1, 31)), "each of the thirty is tried"
    assert all(kind["cases"] and not kind["blocked"] for kind in report["kinds"])
