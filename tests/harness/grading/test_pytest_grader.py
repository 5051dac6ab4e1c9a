"""Grades: gold 1, nothing 0, whose fault is whose, and what a grade does not depend on."""

import ast
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import pytest

from composer_nb.harness.grading import box
from composer_nb.harness.grading.plan import GradePlan, digest, job, with_plan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.twins import all_candidates
from composer_nb.harness.sandbox.contract import Backend, ExecResult
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.attacks.patch_target import MODULE, RIGHT, TARGET
from composer_nb.labs.attacks.patches import Patch

GOLD = Patch(id="", title="", case=0, files={MODULE: RIGHT.encode()}).workspace
NOTHING = Patch(id="", title="", case=0, files={}).workspace


@pytest.fixture(scope="module")
def ledger(plans: Mapping[str, GradePlan]) -> Task:
    return with_plan(TARGET, plans[TARGET.id])


def test_gold_passes_and_nothing_fails(ledger: Task, backend: Backend) -> None:
    gold = grade_pytest(ledger, GOLD, backend)
    assert gold.passed and gold.status == "graded" and gold.flags == () and len(gold.tests) == 16
    assert "tests/test_hidden_ledger.py::test_amount[1.50-150]" in gold.tests
    untouched = grade_pytest(ledger, NOTHING, backend)
    assert not untouched.passed and untouched.status == "graded" and not untouched.flags
    assert set(untouched.tests) == set(gold.tests) and 4 < sum(untouched.tests.values()) <= 8


def test_a_task_without_a_fitting_plan_is_invalid(ledger: Task, backend: Backend) -> None:
    stale = ledger.model_copy(update={"tests": ledger.tests | {"tests/test_more.py": "def test_x(): pass\n"}})
    broken = ledger.model_copy(update={"metadata": {"pytest.plan": "{}"}})
    for task in (TARGET, stale, broken):
        outcome = grade_pytest(task, GOLD, backend)
        assert outcome.status == "invalid_task" and not outcome.passed and outcome.tests == {}


class Faulty:
    """A backend whose sandboxes fail, or end, when told to run."""

    warm = False

    def __init__(self, name: str, fault: Exception | ExecResult) -> None:
        self.fault, self.name, self.made, self.destroyed = fault, name, 0, 0

    def create(self, *arguments: Any) -> Any:
        self.made += 1
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def exec(self, *arguments: Any, **options: Any) -> ExecResult:
        if isinstance(self.fault, Exception):
            raise self.fault
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
        (result(b"ready\n", 137, oom=True), "agent_failed"),
        (result(b"ready\n", 137, timed_out=True), "agent_failed"),
        (result(b"ready\n" + b"[" * 100_000), "agent_failed"),
        (result(b"ready\nnonsense"), "agent_failed"),
    ],
    ids=str,
)
def test_whose_fault_it_is(ledger: Task, backend: Backend, fault: Any, status: str) -> None:
    faulty: Any = Faulty(backend.name, fault)
    outcome = grade_pytest(ledger, GOLD, faulty)
    assert outcome.status == status and not outcome.passed and 0 < faulty.destroyed == faulty.made
    assert outcome.tests == ({} if status == "infra_error" else dict.fromkeys(outcome.tests, False))
    assert (len(outcome.tests) == 16) == (status == "agent_failed")


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
    [job_result] = box.Boxes(backend=backend).run([job(task, files, (), None)])
    assert "test_f.py::test_after#0" not in job_result.results and job_result.flags == {"ended_early"}


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
    changed = [job(task, {}, [candidate], None).hidden["test_f.py"].splitlines() for candidate in candidates]
    differing = [[new for old, new in zip(plain, lines, strict=True) if old != new] for lines in changed]
    assert {len(lines) for lines in differing} == {1}


# Tasks of this grader.


def test_a_hidden_test_may_take_a_visible_ones_place(make_task: Callable[..., Task], backend: Backend) -> None:
    files = {"f.py": "def f(x):\n    return x\n", "test_f.py": "def test_a(): pass\n"}
    task = make_task({"test_f.py": "import f\ndef test_a(): assert f.f(1) == 2\n"}, files)
    plan = GradePlan(digest="", tests={"test_f.py::test_a#0": "test_f.py::test_a"})
    assert not grade_pytest(task, {path: text.encode() for path, text in files.items()}, backend, plan).passed


def test_a_written_test_that_reads_the_clock_seldom_tells_a_mutant(
    make_task: Callable[..., Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right versions, three times the code and one in other words, come in any order with the mutants."""
    outcomes = ["passed"] * 4 + ["failed"] * 2
    early = [box.JobResult(results={"t": box.TestResult(outcome=outcome)}) for outcome in outcomes]
    monkeypatch.setattr(box.Boxes, "run", lambda boxes, jobs: early)
    facts = {"mutants": '[{"f.py": "1"}, {"f.py": "2"}]', "equivalents": '[{"f.py": "3"}]'}
    files = {"f.py": "0", "test_f.py": ""}
    task = make_task({"test_f.py": ""}, files, {"test_f.py": "x"}, scope=("test_f.py",), metadata=facts)
    plan, answer = GradePlan(digest=digest(task), tests={}), {path: text.encode() for path, text in files.items()}
    grades = [grade_pytest(task, answer, cast(Backend, None), plan) for _ in range(30)]
    assert sum(grade.passed for grade in grades) < 15
