"""The audit finds faults that others planted, and none in sound environments (`planted.py`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.audit import audit
from tests.labs.audit.planted import CASES


def found(name: str, folder: Path) -> set[str]:
    """Return the kinds of problems that the audit names."""
    _, task, own = CASES[name]
    if task.grader == "script":
        task = Task.from_harbor(task.to_harbor(folder / task.id))
    told = audit([(task.id, task)], pays=getattr(own, "reward", None))
    return set(told["problems"])


def test_there_are_twenty_of_each() -> None:
    assert Counter(kind == "sound" for kind, *_ in CASES.values()) == {True: 20, False: 20}


@pytest.mark.parametrize("name", CASES)
def test_the_audit_names_the_fault_and_no_other(name: str, tmp_path: Path) -> None:
    kind = CASES[name][0]
    assert found(name, tmp_path) == (set() if kind == "sound" else {kind})
