"""The cases of hostile use that every backend of sandboxes withstands, and that they notice where walls are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from composer_nb.harness.sandbox.contract import Backend
from composer_nb.labs.attacks import sandbox_check
from composer_nb.labs.attacks.sandbox_check import SANDBOX_CASES as CASES
from tests.harness.sandbox.conftest import BACKENDS, make


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with make(request.param, request) as opened:
        yield opened


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_is_blocked(backend: Backend, case: Any, request: pytest.FixtureRequest) -> None:
    with sandbox_check.surroundings(backend) as site:
        verdict = case.verdict(site)
    if not verdict.blocked and case.id == "unread-files" and os.geteuid() == 0:
        # Other programs may have needed the memory since this back end read its files: once more, with nothing in memory before.
        Path("/proc/sys/vm/drop_caches").write_text("1")
        with make(backend.name, request) as fresh, sandbox_check.surroundings(fresh) as site:
            verdict = case.verdict(site)
    assert verdict.blocked, verdict.detail


class NoWalls:
    """A backend and its only sandbox without any walls: plain processes in a folder. Only for cases that do no harm."""

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
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout_s, cwd=self.folder, check=False)
        return SimpleNamespace(stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode)


@pytest.mark.parametrize("name", ["read-the-host", "network"])
def test_missing_walls_are_noticed(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.id == name)
    backend: Any = NoWalls(tmp_path)
    with sandbox_check.surroundings(backend) as site:
        verdict = case.verdict(site)
    assert not verdict.blocked and "succeeded" in verdict.detail
