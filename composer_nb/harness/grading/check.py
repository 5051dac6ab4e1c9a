"""What `composer-nb tasks check` does: whether tasks are fit, found out by running them.

A task is fit if a right answer scores 1, no answer scores less, and the same is said twice. How is the grader's affair:
`functions` calls the solution's functions, `pytest` grades by the plan that a task has, or makes one (`validate.py`), and
`script` lets `solution/solve.sh` write an answer in one sandbox and grades what it left in another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from composer_nb.harness.calls import SandboxFailure, SandboxUnavailable
from composer_nb.harness.execute import Executor
from composer_nb.harness.grade import Grade, grading
from composer_nb.harness.grading.plan import PLAN
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.script_grader import grade_script, run_script
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.runtime import start
from composer_nb.harness.sandbox import BwrapSandboxes
from composer_nb.harness.sandboxes import open_backend
from composer_nb.harness.sandboxes.contract import Backend, SandboxDied
from composer_nb.harness.task import SOLVE, Task

SOLVE_S = 600.0
"""How long a solution's script may take where the task gives its agent no time limit."""


def check_tasks(tasks: Sequence[Task], backend: str = "bwrap") -> list[dict[str, Any]]:
    """A row a task: its id and grader, how many tests count, what its solution (`gold`) and its start (`none`) score, whether
    two runs agree, and `ok`, or the `problem`.

    Raises SandboxUnavailable where the backend does not work here.
    """
    with ExitStack() as stack:
        kinds = {task.grader for task in tasks}
        calls = stack.enter_context(BwrapSandboxes()) if "functions" in kinds else None
        boxes = stack.enter_context(open_backend(backend)) if kinds - {"functions"} else None
        return [_row(task, calls, boxes) for task in tasks]


def _row(task: Task, calls: Executor | None, boxes: Backend | None) -> dict[str, Any]:
    row = {"id": task.id, "grader": task.grader, "tests": 0, "gold": False, "none": False, "repeatable": False}
    try:
        if task.grader == "functions":
            assert calls is not None
            found = check_functions(task, calls)
        else:
            assert boxes is not None
            found = (_check_pytest if task.grader == "pytest" else _check_script)(task, boxes)
    except (ValueError, SandboxUnavailable, SandboxFailure, SandboxDied) as error:
        found = {"problem": str(error).removeprefix(f"task {task.id}: ")}
    return row | found | {"ok": not found["problem"]}


def check_functions(task: Task, sandboxes: Executor) -> dict[str, Any]:
    gold = [grade_files(task, task.files | task.solution, sandboxes) for _ in range(2)]
    none = [grade_files(task, task.files, sandboxes) for _ in range(2)]
    return _compared(gold, none, bool(task.solution))


def grade_files(task: Task, files: Mapping[str, str], sandboxes: Executor) -> Grade:
    """What the hidden tests of the grader `functions` say of `files`, in a fresh sandbox."""
    steps = grading(task, files)
    [outcomes] = sandboxes.run([next(steps)])
    try:
        steps.send(outcomes)
    except StopIteration as stop:
        grade: Grade = stop.value
        return grade
    raise AssertionError("grading asks for one execution")


def _check_pytest(task: Task, backend: Backend) -> dict[str, Any]:
    if PLAN in task.metadata:
        gold, none = (
            [grade_pytest(task, files, backend) for _ in range(2)] for files in (_solved(task), _started(task))
        )
        return _compared(gold, none, bool(task.solution))
    found = validate_task(task, backend)
    tests = len(found.plan.tests) if found.plan else 0
    valid = found.valid and bool(task.solution)
    return {
        "tests": tests,
        "gold": valid,
        "none": bool(tests) and not found.fail_to_pass,
        "repeatable": not found.flaky,
        "twins": round(found.coverage, 3),
        "problem": "" if valid else (found.problems or ("has no solution",))[0],
    }


def _started(task: Task) -> dict[str, bytes]:
    return {path: text.encode() for path, text in task.files.items()}


def _solved(task: Task) -> dict[str, bytes]:
    return _started(task) | {path: text.encode() for path, text in task.solution.items()}


def _check_script(task: Task, backend: Backend) -> dict[str, Any]:
    none = [grade_script(task, _left(task, backend, solve=False), backend) for _ in range(2)]
    if SOLVE not in task.solution:
        return _compared(none, none, False)
    return _compared([grade_script(task, _left(task, backend, solve=True), backend) for _ in range(2)], none, True)


def _left(task: Task, backend: Backend, solve: bool) -> dict[str, bytes]:
    """The workspace as it is at the start, or as `solve.sh` leaves it."""
    told = task.settings
    with start(task, backend) as box:
        if solve:
            done = run_script(box, task, "solution", told.agent.timeout_sec or SOLVE_S, told.solution.env)
            if done.exit_code:
                last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
                why = "did not end in time" if done.timed_out else f"ends with {done.exit_code}: {''.join(last)}"
                raise ValueError(f"solution/{SOLVE} {why}")
        try:
            return box.download()
        except OSError as error:
            raise ValueError(f"its workspace can not be carried into grading: {error}") from None


def _compared(gold: Sequence[Grade], none: Sequence[Grade], solved: bool) -> dict[str, Any]:
    return {
        "tests": len(gold[0].tests),
        "gold": solved and gold[0].passed,
        "none": none[0].passed,
        "repeatable": gold[0].tests == gold[1].tests and none[0].tests == none[1].tests,
        "problem": next(_problems(gold, none, solved), ""),
    }


def _unlike(grades: Sequence[Grade]) -> list[str]:
    """Up to three tests of which two runs say different things."""
    one, other = (grade.tests for grade in grades[:2])
    return [name for name in {**one, **other} if one.get(name) != other.get(name)][:3]


def _problems(gold: Sequence[Grade], none: Sequence[Grade], solved: bool) -> Iterator[str]:
    if any(not grade.known for grade in (*gold, *none)):
        yield "the sandbox failed while it was graded: nothing is known"
    if gold[0].tests != gold[1].tests or none[0].tests != none[1].tests:
        yield f"two runs gave different results: {', '.join(_unlike(gold) or _unlike(none))}"
    if not solved:
        yield "has no solution"
    if not gold[0].passed:
        failed = [name for name, passed in gold[0].tests.items() if not passed]
        yield (
            f"the solution fails {len(failed)} tests, first {failed[0]}"
            if failed
            else f"the solution is {gold[0].status}"
        )
    if none[0].passed:
        yield "passes before anything is changed"
