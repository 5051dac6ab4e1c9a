"""Values of stored rollouts that need execution: their sandboxes are gone; what was left in them is stored, and runs again."""

from __future__ import annotations

from collections.abc import Sequence

from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests


def graded_again(attempts: Sequence[Attempt], sandboxes: Sandboxes) -> list[Grade]:
    """Return the grades of what attempts left, each in a fresh sandbox. Raises SandboxUnavailable."""
    return [
        grade(done.task, done.rollout.files, sandboxes.functions)
        if done.task.grader == "functions"
        else grade(done.task, _bytes(done), sandboxes.backend)
        for done in attempts
    ]


def _bytes(done: Attempt) -> dict[str, bytes]:
    return {path: text.encode("utf-8", "surrogateescape") for path, text in done.rollout.files.items()}


def visible_share(attempts: Sequence[Attempt], sandboxes: Sandboxes) -> list[float | None]:
    """Return the share of the visible tests, as they were at the start, that what an attempt left passes; None where a task has
    none of the grader `functions`. Raises SandboxFailure."""
    shares: list[float | None] = []
    for done in attempts:
        visible = done.task.visible_tests if done.task.grader == "functions" else {}
        tests = parse_test_files(visible) if visible else ()
        [outcomes] = sandboxes.run([request_tests(done.rollout.files, tests)]) if tests else [()]
        shares.append(sum(map(passes, tests, outcomes)) / len(tests) if tests else None)
    return shares
