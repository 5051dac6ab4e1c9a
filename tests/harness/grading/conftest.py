"""Plans of the ledger tasks, for all tests of grading."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from composer_nb.harness.grading.box import Boxes, JobResult, TestJob
from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_check import plan_for
from composer_nb.labs.attacks.patch_target import PROPERTY, TARGET


@pytest.fixture(scope="session")
def plans(backend: Backend) -> dict[str, GradePlan]:
    """Return the plans of `TARGET` and `PROPERTY`, by id."""
    return {task.id: plan_for(task, backend) for task in (TARGET, PROPERTY)}


@pytest.fixture(scope="session")
def run(backend: Backend) -> Callable[..., JobResult]:
    """Return `run(tests, files)`, which runs test modules, and what they need, once beside files."""

    def run_once(tests: Mapping[str, str], files: Mapping[str, str] | None = None, **options: float) -> JobResult:
        modules = tuple(path for path in tests if path.rpartition("/")[2].startswith("test_"))
        job = TestJob(files={path: text.encode() for path, text in (files or {}).items()}, hidden=tests, tests=modules)
        [result] = Boxes(backend=backend, timeout_s=options.get("timeout_s", 30.0)).run([job])
        return result

    return run_once


@pytest.fixture(scope="session")
def make_task() -> Callable[..., Task]:
    """Return `make_task(tests, files, solution, …)`, which makes a task of the grader `pytest` in which `f.py` may change."""

    def make(
        tests: Mapping[str, str], files: Any = None, solution: Any = None, scope: Any = ("f.py",), **more: Any
    ) -> Task:
        files = files or {"f.py": "def f(x):\n    return x\n"}
        solution = solution or {"f.py": "def f(x):\n    return x + 1\n"}
        fields = {"tests": dict(tests), "files": dict(files), "solution": dict(solution), "source_scope": scope}
        return Task(id="t", instruction="repair f.py", grader="pytest", **fields | more)

    return make
