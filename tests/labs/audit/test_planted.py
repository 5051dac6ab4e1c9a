"""The audit finds faults that others planted, and none in sound environments (`planted.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.audit import audit_task
from tests.labs.audit.planted import CASES

QUICK = "functions"
"""The grader that takes milliseconds."""


@pytest.fixture(scope="module")
def calls() -> Iterator[SandboxExecutor]:
    with SandboxExecutor() as made:
        yield made


def found(name: str, calls: SandboxExecutor, folder: Path) -> set[str]:
    """Return the kinds of problems that the audit names."""
    _, task, own = CASES[name]
    if task.grader == "script":
        task = Task.from_harbor(task.to_harbor(folder / task.id))
    with Sandboxes() as sandboxes:
        place = calls if task.grader == QUICK else sandboxes.backend
        told = audit_task(task, place, {}, getattr(own, "reward", None))
    return {kind for kind, _ in told["problems"]}


def test_of_the_first_forty_half_are_sound() -> None:
    assert Counter(kind == "sound" for kind, *_ in [*CASES.values()][:40]) == {True: 20, False: 20}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if task.grader == QUICK else [pytest.mark.slow])
        for name, (_, task, _) in CASES.items()
    ],
)
def test_the_audit_names_the_fault_and_no_other(name: str, calls: SandboxExecutor, tmp_path: Path) -> None:
    kind = CASES[name][0]
    assert found(name, calls, tmp_path) == (set() if kind in ("sound", "missed") else {kind})
