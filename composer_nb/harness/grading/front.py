"""Grade a task by its own grader."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import cast

from composer_nb.harness.grading.grade import Grade, grade_functions
from composer_nb.harness.grading.repeats import grade_once
from composer_nb.harness.grading.script_grader import grade_script
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import Executor, SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.task import Task


def grade(task: Task, files: Mapping[str, str | bytes], sandbox: Executor | Backend | None = None) -> Grade:
    """Grade `files`, a whole workspace, by the task's own grader, or look up the clean grade by `pytest` of the same tree.

    Args:
        sandbox: what runs the tests: an `Executor` for the grader `functions`, a `Backend` for `pytest` and `script`. By default
            one on bubblewrap is opened and closed here.

    Raises SandboxUnavailable if no sandbox can be made here, and ValueError for a task that asks for what no sandbox has.
    """
    wanted, needed = ("Executor", "run") if task.grader == "functions" else ("Backend", "create")
    if sandbox is not None and not hasattr(sandbox, needed):
        raise TypeError(f"task {task.id}: its grader {task.grader!r} needs sandbox to be of type {wanted}")
    with ExitStack() as stack:
        if task.grader == "functions":
            texts = {
                path: data if isinstance(data, str) else data.decode("utf-8", "replace") for path, data in files.items()
            }
            return grade_functions(task, texts, cast(Executor, sandbox or stack.enter_context(SandboxExecutor())))
        backend = cast(Backend, sandbox or stack.enter_context(open_backend("bwrap")))
        held = {path: data if isinstance(data, bytes) else data.encode() for path, data in files.items()}
        return (grade_script if task.grader == "script" else grade_once)(task, held, backend)
