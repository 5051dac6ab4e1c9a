"""The audit finds faults that others planted, and none in sound environments (`planted.py`)."""

from pathlib import Path

import pytest

from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.audit import audit_task
from tests.labs.audit.planted import CASES

QUICK = "functions"
"""The grader that takes milliseconds."""
PARAMETERS = [
    pytest.param(name, marks=[] if task.grader == QUICK else [pytest.mark.slow]) for name, (_, task, _) in CASES.items()
]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_audit_names_the_fault_and_no_other(name: str, sandboxes: SandboxExecutor, tmp_path: Path) -> None:
    kind, task, reward = CASES[name]
    if task.grader == "script":
        task = Task.from_harbor(task.to_harbor(tmp_path / task.id))
    with Sandboxes() as others:
        row = audit_task(task, sandboxes if task.grader == QUICK else others.backend, {}, reward)
    assert {kind for kind, _ in row["problems"]} == (set() if kind in ("sound", "missed") else {kind}), row["problems"]
