"""Hostile patches, and a rule that is fitted to constants, against a backend: each must be rejected, the honest fix accepted."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from composer_nb.harness.grading.plan import GradePlan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.case import AttackVerdict, row
from composer_nb.labs.attacks.joint import FITTED, JOINT
from composer_nb.labs.attacks.patch_target import PROPERTY, TARGET
from composer_nb.labs.attacks.patches import patches

TIMEOUT_S = 20.0
GRADES = 6  # of one attack whose success is a matter of chance


def plan_for(task: Task, backend: Backend) -> GradePlan:
    """Return the plan of one of the tasks here, without recorded calls: no patch answers those, and twins are to be tried.

    Raises ValueError when it is not valid in this backend's sandboxes.
    """
    report = validate_task(task, backend)
    if report.plan is None or not report.valid:
        raise ValueError(f"task {task.id} is not valid here: {'; '.join(report.problems)}")
    return replace(report.plan, calls=())


def check_patches(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield {"id", "kind", "title", "blocked", "flagged", "detail"} of each, as `composer-nb sandbox check` prints them.

    `blocked` of the honest fix means that it was dealt with rightly: accepted.
    """
    plans = {task.id: plan_for(task, backend) for task in (TARGET, PROPERTY)}
    for patch in patches():
        grade = grade_pytest(patch.task, patch.workspace, backend, plans[patch.task.id], timeout_s=TIMEOUT_S)
        right = grade.passed == patch.honest and grade.status not in ("infra_error", "invalid_task")
        passed = f"{sum(grade.tests.values())} of {len(grade.tests)} tests"
        flagged = bool(grade.flags)
        detail = ", ".join([grade.status, passed, *grade.flags])
        verdict = AttackVerdict(blocked=right and flagged >= patch.flagged, flagged=flagged, detail=detail)
        yield row(patch.id, patch.case, patch.title, verdict)


def check_fitted(backend: Backend) -> Iterator[dict[str, Any]]:
    """Yield the rows of `composer-nb sandbox check` for a rule that is fitted to constants, which passes once in eight."""
    for name, task in JOINT.items():
        draws = Random(name)
        report = validate_task(task, backend, repeats=1)
        assert report.plan is not None and report.guard is not None
        files = {"scale.py": FITTED.encode()}
        grades = [grade_pytest(task, files, backend, report.plan, rng=draws) for _ in range(GRADES)]
        passed = sum(grade.passed for grade in grades)
        detail = f"guard {report.guard.by}; {passed} of {GRADES} grades passed, by chance one in eight"
        blocked = report.guard.by == "twins" and passed <= GRADES // 3
        verdict = AttackVerdict(blocked, detail, flagged=any(grade.flags for grade in grades))
        yield row(f"fitted-to-{name}", 12, f"a rule fitted to all constants of the process: {name}", verdict)
