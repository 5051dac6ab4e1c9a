"""Grades: gold 1, nothing 0, whose fault is whose, and what a grade does not depend on."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, get_args

import pytest

from composer_nb.harness.grading import box, diff, pytest_grader
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import GradePlan, job, with_plan
from composer_nb.harness.grading.pytest_grader import FLAGS, SECONDS, TAMPERING, grade_pytest
from composer_nb.harness.grading.twins import all_candidates
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.sandbox.contract import Backend, ExecResult
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET
from composer_nb.labs.attacks.patches import Patch
from composer_nb.labs.attacks.snippets import SETUP, module

GOLD = Patch(id="", title="", case=0, files={MODULE: RIGHT.encode()}).workspace
NOTHING = Patch(id="", title="", case=0, files={}).workspace


@pytest.fixture(scope="module")
def ledger(plans: Mapping[str, GradePlan]) -> Task:
    return with_plan(TARGET, plans[TARGET.id])


def test_gold_passes_and_nothing_fails(ledger: Task, backend: Backend) -> None:
    gold = grade_pytest(ledger, GOLD, backend)
    assert gold.passed and gold.status == "graded" and gold.flags == () and len(gold.tests) == 16
    assert "tests/test_hidden_ledger.py::test_amount[1.50-150]" in gold.tests
    nothing = grade_pytest(ledger, NOTHING, backend)
    assert not nothing.passed and nothing.status == "graded" and not nothing.flags
    assert set(nothing.tests) == set(gold.tests) and 4 < sum(nothing.tests.values()) <= 8


def test_changes_outside_the_scope_neither_help_nor_harm(ledger: Task, backend: Backend) -> None:
    spoilt = {"conftest.py": b"raise 1", "tests/helpers.py": b"", "pytest.ini": b"[pytest]\naddopts = --nope"}
    assert grade_pytest(ledger, GOLD | spoilt, backend) == Grade(
        status="graded", tests=grade_pytest(ledger, GOLD, backend).tests, flags=("outside_scope",)
    )
    fixed = grade_pytest(ledger, NOTHING | {"other.py": RIGHT.encode()}, backend)
    assert not fixed.passed and fixed.flags == ("outside_scope",)


def test_new_files_of_the_scope_are_graded(ledger: Task, backend: Backend) -> None:
    moved = {MODULE: b"from util.right import *\n", "util/right.py": RIGHT.encode(), "util/__pycache__/x.pyc": b"x"}
    found = grade_pytest(ledger, GOLD | moved, backend)
    assert found.passed and found.flags == ()


def test_a_task_without_a_fitting_plan_is_invalid(ledger: Task, backend: Backend) -> None:
    stale = ledger.model_copy(update={"tests": ledger.tests | {"tests/test_more.py": "def test_x(): pass\n"}})
    broken = ledger.model_copy(update={"metadata": {"pytest.plan": "{}"}})
    for task in (TARGET, stale, broken):
        found = grade_pytest(task, GOLD, backend)
        assert found.status == "invalid_task" and not found.passed and found.tests == {}


class Faulty:
    """A backend whose sandboxes fail, or end, when told to run."""

    warm = False

    def __init__(self, inner: Backend, fault: Exception | ExecResult | None, at_create: bool = False) -> None:
        self.inner, self.fault, self.at_create, self.name, self.destroyed = inner, fault, at_create, inner.name, 0
        self.made = 0

    def create(self, *arguments: Any) -> Any:
        if self.at_create and isinstance(self.fault, Exception):
            raise self.fault
        self.made += 1
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        if isinstance(self.fault, Exception):
            raise self.fault
        assert self.fault is not None
        return self.fault

    def destroy(self) -> None:
        self.destroyed += 1


def result(stdout: bytes, exit_code: int = 0, **options: Any) -> ExecResult:
    return ExecResult(exit_code=exit_code, stdout=stdout, stderr=b"", **options)


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (SandboxFailure("broken"), "infra_error"),
        (SandboxDied("out of memory"), "agent_failed"),
        (result(b""), "infra_error"),
        (result(b"", 137, oom=True), "infra_error"),  # before anything of the agent ran
        (result(b"read"), "infra_error"),
        (result(b"ready\n", 137, oom=True), "agent_failed"),
        (result(b"ready\n", 137, timed_out=True), "agent_failed"),
        (result(b"ready\n[]"), "agent_failed"),
        (result(b"ready\n" + b"[" * 100_000), "agent_failed"),
        (result(b'ready\n{"failed": ""}'), "agent_failed"),
        (result(b'ready\n{"a": "b"}'), "agent_failed"),
        (result(b"ready\nnonsense"), "agent_failed"),
    ],
    ids=str,
)
def test_whose_fault_it_is(ledger: Task, backend: Backend, fault: Any, status: str) -> None:
    faulty: Any = Faulty(backend, fault)
    found = grade_pytest(ledger, GOLD, faulty)
    assert found.status == status and not found.passed and 0 < faulty.destroyed == faulty.made
    assert found.tests == ({} if status == "infra_error" else dict.fromkeys(found.tests, False))
    assert (len(found.tests) == 16) == (status == "agent_failed")


def test_every_sandbox_is_destroyed(ledger: Task, backend: Backend) -> None:
    for files in (GOLD, GOLD | {MODULE: SETUP["kill_everything"].encode()}):
        grade_pytest(ledger, files, backend)
    assert backend._live == {}  # type: ignore[attr-defined]


def test_a_clock_that_the_agent_changed_does_not_change_the_cost(ledger: Task, backend: Backend) -> None:
    slow = module(SETUP["patched_time"], "import select\nselect.select([], [], [], 0.3)\nreturn wrong\n")
    began = time.monotonic()
    found = grade_pytest(ledger, GOLD | {MODULE: slow.encode()}, backend)
    took = time.monotonic() - began
    assert 3 * 5 * 0.3 < found.cost["tests_s"] < 3 * found.cost["wall_s"] <= 3 * took


@pytest.mark.parametrize("own", [False, True], ids=["asked for", "of the task"])
def test_too_little_time_fails_what_is_missing(make_task: Callable[..., Task], backend: Backend, own: bool) -> None:
    tests = "import f\ndef test_a(): assert f.f(1) == 2\ndef test_b(): assert f.f(2) == 3\n"
    task = make_task({"test_f.py": tests})
    plan = validate_task(task, backend).plan
    loops = b"def f(x):\n    while x == 2: pass\n    return x + 1\n"
    if own:
        task = task.model_copy(update={"metadata": task.metadata | {SECONDS: "3"}})
    found = grade_pytest(task, {"f.py": loops}, backend, plan, runs=2, timeout_s=0.0 if own else 3.0)
    assert found.status == "graded" and found.flags == ("timeout",)
    assert found.tests == {"test_f.py::test_a": True, "test_f.py::test_b": False}


@pytest.mark.parametrize("limit", ["long", "nan", "inf", "0", "-1"])
def test_a_time_limit_that_limits_nothing_makes_a_task_invalid(
    make_task: Callable[..., Task], backend: Backend, limit: str
) -> None:
    task = make_task({"test_f.py": "import f\ndef test_a(): assert f.f(1) == 2\n"})
    plan = validate_task(task, backend).plan
    task = task.model_copy(update={"metadata": task.metadata | {SECONDS: limit}})
    assert grade_pytest(task, {"f.py": b""}, backend, plan).status == "invalid_task"


def test_a_failing_test_is_not_looked_at_more_closely(make_task: Callable[..., Task], backend: Backend) -> None:
    tests = """\
import ast
from f import f
def mismatch(*arguments, **options): raise SystemError("AST constructor recursion depth mismatch")
ast.parse = mismatch  # as Python 3.11 sometimes does
def test_fails(): assert f(1) == 1
def test_after(): assert f(1) == 2
"""
    task = make_task({"test_f.py": tests})
    files = {path: text.encode() for path, text in (task.files | task.solution).items()}
    [ran] = box.Boxes(backend=backend).run([job(task, files, (), None)])
    assert [each.outcome for each in ran.results.values()] == ["failed", "passed"] and not ran.flags


def test_a_run_that_pytest_gives_up_is_no_whole_one(make_task: Callable[..., Task], backend: Backend) -> None:
    tests = """\
from _pytest.reports import TestReport
from f import f
def test_before(): assert f(1) == 2
def test_breaks_pytest(): TestReport.from_item_and_call = None
def test_after(): assert f(1) == 2
"""
    task = make_task({"test_f.py": tests})
    files = {path: text.encode() for path, text in (task.files | task.solution).items()}
    [ran] = box.Boxes(backend=backend).run([job(task, files, (), None)])
    assert "test_f.py::test_after#0" not in ran.results and ran.flags == {"ended_early"}


def test_what_flags_mean_is_written_down() -> None:
    text = Path(box.__file__).read_text()
    noticed = set(re.findall(r'\("(\w+)", (?:changed|read|_looks|ended|not done)', text)) | {"forged_events"}
    assert len(noticed) == 6
    added = re.findall(r"flags\.add\(.*\)", Path(pytest_grader.__file__).read_text())
    judged = set(re.findall(r'"(\w+)"', " ".join(added)))
    assert noticed | judged | set(get_args(diff.Drop)) - {"cache"} == set(FLAGS) and set(FLAGS) > TAMPERING


def test_the_same_files_give_the_same_grade(ledger: Task, backend: Backend) -> None:
    peeks = module(answer="import sys\nreturn sys._getframe(2).f_code.co_consts[-1]\n").encode()
    for files in (GOLD, NOTHING, GOLD | {MODULE: peeks}):
        grades = [grade_pytest(ledger, files, backend) for _ in range(3)]
        assert len({(grade.status, grade.passed) for grade in grades}) == 1


BY_HAND = """\
from f import f  # a comment

def test_truth(): assert f (1)
def test_not(): assert not f(1)
def test_lines():
    assert f("x") == \"""<p>
x\"""
def test_quotes(): assert f(1) == "a"
def test_number(): assert f(1) == 0x0_21
def test_none(): assert {"a": f(1)} == {"a": None}
"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_test_and_its_twin_are_written_alike(make_task: Callable[..., Task], ends: str) -> None:
    """What goes into a box is what `ast` writes, so neither layout, comments, quotes nor columns of compiled code tell."""
    text = BY_HAND.replace("\n", ends)
    task = make_task({"test_f.py": text})
    candidates = all_candidates({"test_f.py": text})
    assert len({candidate.base for candidate in candidates}) == 3
    for twins in [[], *([candidate] for candidate in candidates)]:
        hidden = job(task, {}, twins, None).hidden["test_f.py"]
        assert ast.unparse(ast.parse(hidden)) + "\n" == hidden
        assert "#" not in hidden and '"' not in hidden and "\r" not in hidden and len(hidden.splitlines()) == 19
    plain = job(task, {}, [], None).hidden["test_f.py"].splitlines()
    changed = [job(task, {}, [each], None).hidden["test_f.py"].splitlines() for each in candidates]
    differing = [[new for old, new in zip(plain, lines, strict=True) if old != new] for lines in changed]
    assert {len(lines) for lines in differing} == {1}


# Tasks of this grader.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tests": {}}, "no test module found"),
        ({"tests": {"helpers.py": "x = 1\n"}}, "no test module found"),
        ({"tests": {"test_a.py": "def (\n"}}, r"test_a\.py:1: not Python"),
        ({"tests": {"test_a.py": "", "aid.py": "x = (\n"}}, r"aid\.py:1: not Python"),
        ({"tests": {"test_a.py": "x = 1\0"}}, "not Python"),
        ({"solution": {"setup.py": ""}}, r"the solution changes \['setup.py'\], outside source_scope"),
        ({"solution": {"util.py": ""}}, "outside source_scope"),
        ({"source_scope": ("../**",)}, "not a plain relative path"),
        ({"source_scope": ()}, "source_scope is empty"),
    ],
)
def test_unfit_tasks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task(**TARGET.model_dump() | change)


def test_a_hidden_test_may_take_a_visible_ones_place(make_task: Callable[..., Task], backend: Backend) -> None:
    files = {"f.py": "def f(x):\n    return x\n", "test_f.py": "def test_a(): pass\n"}
    task = make_task({"test_f.py": "import f\ndef test_a(): assert f.f(1) == 2\n"}, files)
    plan = GradePlan(digest="", tests={"test_f.py::test_a#0": "test_f.py::test_a"})
    assert not grade_pytest(task, {path: text.encode() for path, text in files.items()}, backend, plan).passed
