"""Check whether tasks are fit, by running them: `composer-nb tasks check`.

A task is fit if its solution scores 1, its start scores less, and repeats agree. A task of the grader `pytest` without a plan is
validated first (`validate.py`). For `script`, `solution/solve.sh` writes the answer in one sandbox and another grades it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, cast

from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import PLAN, gold_files
from composer_nb.harness.grading.recorded import Guarding, guard_of, meets
from composer_nb.harness.grading.script_grader import run_script
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.tasks.runtime import artifacts_left, start_sandbox, workspace
from composer_nb.harness.tasks.task import SOLVE, Task

NOT_GUARDED = "code that only claims to be right could pass it"
SOLVE_S = 600.0  # Time limit of a solution's script, in seconds, if the task gives its agent none.


Found = Iterable[tuple[str, Task | ValueError]]  # Places, and the task in each or why it cannot be read.
ROW = {"tests": 0, "gold": False, "none": False, "repeatable": False, "guard": {"by": "none"}}


def check_tasks(
    tasks: Found, backend: str = "bwrap", require: Guarding = "none", egress: str = ""
) -> list[dict[str, Any]]:
    """Return a row for each task: its id and grader, how many tests count, what its solution (`gold`) and its start (`none`)
    score, whether two runs agree, its `guard` (`recorded.Guard`; of the other graders `by` alone), and `ok`, or the `problem`.
    A task that cannot be read, or whose id another has, is a problem of its own.

    `require` makes a lesser guard a problem. Tests of the grader `functions` are calls whose values stay outside.

    `egress`: as `env.egress`. Raises SandboxUnavailable where the backend does not work here.
    """
    tasks = list(tasks)
    with ExitStack() as stack:
        kinds = {task.grader for _, task in tasks if isinstance(task, Task)}
        calls = stack.enter_context(SandboxExecutor()) if "functions" in kinds else None
        boxes = stack.enter_context(open_backend(backend, egress=egress)) if kinds - {"functions"} else None
        rows: dict[str, dict[str, Any]] = {}
        for where, task in tasks:
            if isinstance(task, ValueError):
                row = {"id": where, "grader": "", "problem": str(task)}
            elif task.id in rows:
                row = {"id": where, "grader": task.grader, "problem": f"another task is named {task.id!r} too"}
            else:
                sandbox = calls if task.grader == "functions" else boxes
                assert sandbox is not None
                row = check_task(task, sandbox, require)
            rows[row["id"]] = ROW | row | {"ok": not row["problem"]}
        return list(rows.values())


def check_task(task: Task, sandbox: Executor | Backend, require: Guarding = "none") -> dict[str, Any]:
    """Return a task's row."""
    row: dict[str, Any] = {"id": task.id, "grader": task.grader}
    row["guard"] = {"by": "calls" if task.grader == "functions" else "none"}
    try:
        if task.grader == "pytest" and PLAN not in task.metadata:
            row |= _validated(task, cast(Backend, sandbox))
        else:
            gold, none = (
                [grade(task, workspace_of(task, sandbox, solved), sandbox, anew=True) for _ in range(2)]
                for solved in (True, False)
            )
            solved = SOLVE in task.solution if task.grader == "script" else bool(task.solution)
            row |= {"tests": len(gold[0].tests), "gold": solved and gold[0].passed, "none": none[0].passed}
            row |= {"output": gold[0].output, "repeatable": not (_unlike(gold) or _unlike(none))}
            row["problem"] = next(_problems(gold, none, solved), "")
            if task.grader == "pytest":
                row["guard"] = asdict(guard_of(task, none[0].failed))
    except (ValueError, SandboxUnavailable, SandboxFailure, SandboxDied) as error:
        row["problem"] = str(error).removeprefix(f"task {task.id}: ")
    if not row["problem"] and not meets(row["guard"]["by"], require):
        row["problem"] = f"its guard is {row['guard']['by']!r}, not {require!r}: {NOT_GUARDED}"
    return row


def workspace_of(task: Task, sandbox: Executor | Backend, solved: bool) -> Mapping[str, bytes]:
    """Return the workspace with the solution, or as it is at the start."""
    if task.grader == "script":
        return _left(task, cast(Backend, sandbox), solve=solved and SOLVE in task.solution)
    return gold_files(task) if solved else workspace(task)


def _validated(task: Task, backend: Backend) -> dict[str, Any]:
    """Return a row's findings about a task without a plan."""
    validation = validate_task(task, backend)
    tests = len(validation.plan.tests) if validation.plan else 0
    valid = validation.valid and bool(task.solution)
    return {
        "tests": tests,
        "gold": valid,
        "none": bool(tests) and not validation.fail_to_pass,
        "repeatable": not validation.flaky,
        "twins": round(validation.coverage, 3),
        "guard": asdict(validation.guard) if validation.guard else {"by": "none"},
        "problem": "" if valid else (validation.problems or ("has no solution",))[0],
    }


def _left(task: Task, backend: Backend, solve: bool) -> dict[str, bytes]:
    """Return the workspace as it is at the start, or as `solve.sh` leaves it."""
    settings = task.settings
    with start_sandbox(task, backend) as box:
        if solve:
            result = run_script(box, task, "solution", settings.agent.timeout_sec or SOLVE_S, settings.solution.env)
            if result.exit_code:
                last = result.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
                why = "did not end in time" if result.timed_out else f"ends with {result.exit_code}: {''.join(last)}"
                raise ValueError(f"solution/{SOLVE} {why}")
        try:
            return box.download() | artifacts_left(task, box)
        except OSError as error:
            raise ValueError(f"its workspace cannot be carried into grading: {error}") from None


def _last(grade: Grade) -> str:
    """Return the end of what a grade's script printed."""
    lines = [line for line in grade.output.splitlines() if line.strip()]
    return f"; its script said: {' | '.join(lines[-3:])[-300:]}" if lines else ""


def _unlike(grades: Sequence[Grade]) -> list[str]:
    """Return up to three tests on which two runs disagree."""
    first, other = (grade.tests for grade in grades[:2])
    return [name for name in {**first, **other} if first.get(name) != other.get(name)][:3]


def _problems(gold: Sequence[Grade], none: Sequence[Grade], solved: bool) -> Iterator[str]:
    if any(not grade.known for grade in (*gold, *none)):
        output = next(filter(None, map(_last, (*gold, *none))), "")
        yield f"the sandbox failed while it was graded: nothing is known{output}"
    if unlike := _unlike(gold) or _unlike(none):
        yield f"two runs gave different results: {', '.join(unlike)}"
    if not solved:
        yield "has no solution"
    if not gold[0].passed:
        failed = gold[0].failed
        why = f"fails {len(failed)} tests, first {failed[0]}" if failed else f"is {gold[0].status}"
        yield f"the solution {why}{_last(gold[0])}"
    if none[0].passed:
        yield "passes before anything is changed"
