"""Validate candidate tasks by execution, cheapest checks first, and store the outcomes, so that nothing is tried twice.

1. `look`: do the tests that reach the changed function notice it?
2. The whole suite runs once, which finds every failing test. Then the task's solution and its start run five times each
   under different hash seeds; every result must be the same. Last, both are graded with twins and recorded calls: the solution
   must score 1 and the start 0, with exactly the failing tests that were seen before.

A test whose result differs between runs counts in no task.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

from composer_nb.harness.grading.box import Boxes, JobResult, RunnerEnded, TestJob
from composer_nb.harness.grading.plan import GradePlan, digest, gold_files, job, modules_of, normal, plan_of, with_plan
from composer_nb.harness.grading.pytest_grader import RUN_S, SECONDS, grade_pytest
from composer_nb.harness.grading.validate import IDS, guarded
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.tasks.making.baseline import Baseline, whole
from composer_nb.harness.tasks.making.changes import Change, Unit, units
from composer_nb.harness.tasks.making.instructions import without_tests, write, write_feature
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.making.symptoms import Symptom, symptom
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import check_database

# unseen: no test fails. endless, ends early: the tests do not end, or their process does. too much: more tests fail than one
# bug should break. flaky: no failing test fails every time. copied: the original lines occur elsewhere in the workspace.
# ungraded: the grader does not score the solution 1 and the start 0 without a flag. silent: no failing test has a symptom for
# the instruction, or one of several bugs has no symptom of its own.
Verdict = Literal["kept", "unseen", "endless", "ends early", "too much", "flaky", "copied", "ungraded", "silent"]
LOOK_AT = 24  # Tests that a change is first tried with.
MOST_BROKEN = 0.3  # Largest share of the suite that may fail; eight tests always may.
BESIDES = 80  # Maximum tests of a task that pass before and after; the nearest to the change are chosen.
REPEATS = 5
LISTENED = 8  # Failing tests, nearest to the change first, among which the best symptom is chosen.
SHORT_CODE = 300  # Characters of code that are quickly read.


class Subject:
    """The repository that changes are tried on."""

    def __init__(
        self, repository: Repository, baseline: Baseline, backend: Backend, spec: SandboxSpec, seed: str
    ) -> None:
        self.repository, self.baseline, self.backend, self.spec, self.seed = repository, baseline, backend, spec, seed
        self.units: list[Unit] = []
        # Sources in which no bug can be planted, with why.
        self.unfit: dict[str, str] = {}
        for path in repository.sources:
            try:
                self.units += units(path, repository.files[path])
            except ValueError as error:
                self.unfit[path] = str(error)

    def boxes(self, timeout_s: float) -> Boxes:
        return Boxes(backend=self.backend, spec=self.spec, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The result of trying a change.

    Attributes:
        verdict: A `Verdict`, or one of `mine.py`.
    """

    key: str
    kind: str
    verdict: str
    seconds: float
    task: Task | None = None


_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists outcomes (
    key text primary key, kind text not null, verdict text not null, seconds real not null, task text
);
"""


class TaskStore:
    """The record of a repository's tasks. For one thread."""

    def __init__(self, path: Path) -> None:
        """Open the record. Raises ValueError for a file that is not one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path)
        try:
            check_database(self._db, path)
            self._db.executescript(_TABLES)
            self.facts: dict[str, str] = dict(self._db.execute("select name, value from facts"))
            rows = self._db.execute("select key, kind, verdict, seconds, task from outcomes order by rowid").fetchall()
        except (sqlite3.DatabaseError, ValueError) as error:
            self._db.close()
            raise ValueError(f"{path}: not a record of tasks made: {error}") from None
        # By key, in the order in which they were stored.
        self.outcomes: dict[str, TrialOutcome] = {}
        for key, kind, verdict, seconds, text in rows:
            task = None if text is None else Task.model_validate_json(text)
            self.outcomes[key] = TrialOutcome(key=key, kind=kind, verdict=verdict, seconds=seconds, task=task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def keep_fact(self, name: str, value: str) -> None:
        self.facts[name] = value
        with self._db:
            self._db.execute("insert or replace into facts values (?, ?)", (name, value))

    def keep(self, outcome: TrialOutcome) -> None:
        self.outcomes[outcome.key] = outcome
        text = outcome.task.model_dump_json() if outcome.task is not None and outcome.verdict == "kept" else None
        row = (outcome.key, outcome.kind, outcome.verdict, outcome.seconds, text)
        with self._db:
            self._db.execute("insert or replace into outcomes values (?, ?, ?, ?, ?)", row)


def _job(subject: Subject, changed: Mapping[str, str], keys: Iterable[str], explain: bool = False) -> TestJob:
    """Return a run of the tests of these keys on a changed repository, without the test modules that they do not need."""
    files = {path: text.encode() for path, text in {**subject.repository.files, **changed}.items()}
    whole_job = job(whole(subject.repository), files, (), frozenset(keys), explain=explain)
    paths = needed(whole_job.hidden, whole_job.tests)
    return replace(whole_job, hidden={path: whole_job.hidden[path] for path in paths})


def needed(hidden: Mapping[str, str], modules: Iterable[str]) -> list[str]:
    """Return these test modules, those that they import, and everything that is no test module."""
    paths = list(modules)
    for path in paths:  # grows
        imports = " ".join(re.findall(r"^\s*(?:from|import)\b.*", hidden[path], re.M))
        named = [other for other in hidden if re.search(rf"\b{re.escape(other.rpartition('/')[2][:-3])}\b", imports)]
        paths += [other for other in named if other not in paths]
    return sorted({*paths, *(path for path in hidden if not is_test_module(path))})


def _tried(subject: Subject, jobs: Sequence[TestJob], timeout_s: float) -> list[JobResult | Verdict]:
    """Return each run, or the verdict where it did not end. If one ends a sandbox that all share, each runs alone."""
    try:
        ran = subject.boxes(timeout_s).run(jobs)
    except (SandboxDied, RunnerEnded):
        if len(jobs) == 1:
            return ["ends early"]
        return [result for alone in jobs for result in _tried(subject, [alone], timeout_s)]
    return ["endless" if "timeout" in run.flags else "ends early" if run.flags else run for run in ran]


def _failing(ran: JobResult, keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not ran.result(key).passed}


Part = tuple[Change, Task]  # A component bug of a combined change, and its task.


def settle(subject: Subject, change: Change, parts: Sequence[Part] = ()) -> TrialOutcome:
    """Return the task of a change, or why there is none. Raises SandboxFailure."""
    if not parts and (unfit := look(subject, change)):  # the parts of a combined bug have been looked at
        return TrialOutcome(key=change.key, kind=change.kind, verdict=unfit, seconds=0.0)
    began = time.monotonic()
    verdict, task = _settled(subject, change, parts)
    seconds = time.monotonic() - began
    return TrialOutcome(key=change.key, kind=change.kind, verdict=verdict, seconds=seconds, task=task)


def look(subject: Subject, change: Change) -> Verdict | None:
    """Return what is wrong with a change at first sight; None if its nearest tests notice it."""
    keys = subject.baseline.nearest(change.places)[:LOOK_AT]
    seconds = sum(subject.baseline.reach[key].seconds for key in keys)
    [ran] = _tried(subject, [_job(subject, change.apply(subject.repository.files), keys)], 6.0 + 4 * seconds)
    return ran if isinstance(ran, str) else None if _failing(ran, keys) else "unseen"


def _settled(subject: Subject, change: Change, parts: Sequence[Part]) -> tuple[Verdict, Task | None]:
    baseline, changed = subject.baseline, change.apply(subject.repository.files)
    if _copied(subject.repository, change):
        return "copied", None
    [ran] = _tried(subject, [_job(subject, changed, baseline.plan.tests, explain=True)], 15.0 + 4 * baseline.suite_s)
    if isinstance(ran, str):
        return ran, None
    failing = _failing(ran, baseline.plan.tests)
    names = {baseline.plan.tests[key] for key in failing}
    if not failing or any(names.isdisjoint(json.loads(part.metadata["fail_to_pass"])) for _, part in parts):
        return "unseen", None
    if len(failing) > max(8, MOST_BROKEN * len(baseline.plan.tests)):
        return "too much", None
    near = [key for key in baseline.nearest(change.places) if key not in failing]
    modules = modules_of([*failing, *near[:BESIDES]])
    others = [key for key in sorted(baseline.plan.tests) if key.partition("::")[0] in modules]
    besides = [key for key in dict.fromkeys([*near, *others]) if key not in failing][:BESIDES]
    order = [key for key in baseline.nearest(change.places) if key in failing] or sorted(failing)
    symptoms = _symptoms(subject, ran, order, change, parts)
    if not symptoms:
        return "silent", None
    draft = _draft(subject, change, changed, sorted({*failing, *besides}))
    task = repeated(subject, draft, failing)
    if not isinstance(task, Task):
        return task, None
    seed = f"{subject.seed} {change.key}"
    if change.kind == "feature":
        edit = change.edits[0]
        original = "\n".join(subject.repository.files[edit.path].split("\n")[edit.start - 1 : edit.end])
        text = write_feature(edit.path, edit.name, original, seed, symptoms)
    else:
        text = write(symptoms, len(json.loads(task.metadata["fail_to_pass"])), seed)
    if not text:
        return "silent", None
    task = task.model_copy(update={"instruction": text})
    return graded(subject, task)


def _draft(subject: Subject, change: Change, changed: Mapping[str, str], keys: Sequence[str]) -> Task:
    """Return the task with these tests, before any is ruled out."""
    repository, plan = subject.repository, subject.baseline.plan
    modules, places = modules_of(keys), json.dumps([f"{edit.path}::{edit.name}" for edit in change.edits])
    task = Task(
        id=f"{repository.name}-{change.kind}-{change.key}",
        instruction="-",
        files={**repository.files, **changed},
        tests={path: repository.hidden[path] for path in needed(repository.hidden, modules)},
        solution={path: repository.files[path] for path in changed},
        source_scope=repository.scope,
        grader="pytest",
        metadata=repository.settings | {"kind": change.kind, "repository": repository.name, "places": places},
    )
    return with_plan(task, restricted(plan, keys, digest(task)))


def restricted(plan: GradePlan, keys: Iterable[str], made_for: str) -> GradePlan:
    """Return a plan of fewer tests."""
    wanted_keys = set(keys)
    twins = [replace(twin, keys=tuple(sorted(wanted_keys.intersection(twin.keys)))) for twin in plan.twins]
    twins = [twin for twin in twins if twin.keys]
    return GradePlan(digest=made_for, tests={key: plan.tests[key] for key in sorted(wanted_keys)}, twins=tuple(twins))


def repeated(subject: Subject, task: Task, failing: Iterable[str]) -> Task | Verdict:
    """Return the task with the tests on which all runs agree, and its workspace without those that fail."""
    plan = GradePlan.from_json(task.metadata["pytest.plan"])
    keys = frozenset(plan.tests)
    jobs = [job(task, files, (), keys) for files in (gold_files(task), workspace(task))]
    reach = subject.baseline.reach
    timeout_s = 10.0 + 4 * sum(reach[key].seconds for key in keys)
    failures: list[set[str]] = []
    for seed in range(REPEATS):
        right, wrong = _tried(subject, [replace(run, hash_seed=seed) for run in jobs], timeout_s)
        if isinstance(wrong, str):
            return wrong
        if isinstance(right, str) or _failing(right, keys):
            return "ungraded"
        failures.append(_failing(wrong, keys))
    steady, ever = set.intersection(*failures) & set(failing), set.union(*failures) | set(failing)
    if not steady:
        return "flaky"
    counted = [key for key in sorted(keys) if key in steady or key not in ever]
    # The workspace keeps only tests that pass: the agent has to find out what fails.
    by_module = {path: [key for key in steady if key.startswith(path + "::")] for path in modules_of(steady)}
    by_module = {path: gone for path, gone in by_module.items() if path in task.files}
    visible = {path: without_tests(task.files[path], gone) for path, gone in by_module.items()}
    ids = [plan.tests[key] for key in counted]
    facts = {IDS: json.dumps(ids), "fail_to_pass": json.dumps([plan.tests[key] for key in sorted(steady)])}
    task = task.model_copy(update={"files": task.files | visible, "metadata": task.metadata | facts})
    return with_plan(Task.model_validate(task.model_dump()), restricted(plan, counted, digest(task)))


def graded(subject: Subject, task: Task) -> tuple[Verdict, Task]:
    """Grade the task by the grader itself, with twins and recorded calls, which its plan then holds."""
    # A multiple of RUN_S, so that it does not vary from run to run.
    timeout_s = RUN_S * round(1 + 4 * subject.baseline.suite_s / RUN_S)
    if timeout_s > RUN_S:
        task = task.model_copy(update={"metadata": task.metadata | {SECONDS: f"{timeout_s:g}"}})
    plan, failing = plan_of(task), json.loads(task.metadata["fail_to_pass"])
    task = with_plan(task, guarded(task, plan, failing, subject.boxes(timeout_s)))
    right, wrong = (
        grade_pytest(task, files, subject.backend, timeout_s=timeout_s, spec=subject.spec)
        for files in (gold_files(task), workspace(task))
    )
    fits = right.passed and not right.flags and wrong.status == "graded" and not wrong.flags
    return "kept" if fits and set(wrong.failed) == set(failing) else "ungraded", task


def _copied(repository: Repository, change: Change) -> bool:
    """Return whether the original text of a changed function occurs more than once in the repository."""
    for edit in change.edits:
        lines = repository.files[edit.path].split("\n")[edit.start - 1 : edit.end]
        text = "\n".join(lines)
        if len(lines) >= 3 and sum(content.count(text) for content in repository.files.values()) > 1:
            return True
    return False


def _symptoms(
    subject: Subject, ran: JobResult, order: Sequence[str], change: Change, parts: Sequence[Part]
) -> list[Symptom]:
    """Return one symptom for each bug, or the examples for a feature; nothing if a bug has no symptom that tells.

    For several bugs, a test that fails because of one bug alone is preferred.
    """
    if change.kind == "feature":
        return [_symptom(subject, ran, key) for key in order[:LISTENED]]
    if not parts:
        best = _best(subject, ran, order)
        return [best] if best else []
    plan = subject.baseline.plan
    broken = [set(json.loads(part.metadata["fail_to_pass"])) for _, part in parts]
    symptoms: list[Symptom] = []
    for number, (failed, (kind, _)) in enumerate(zip(broken, parts, strict=True)):
        others = set().union(*broken[:number], *broken[number + 1 :])
        near = [key for key in subject.baseline.nearest(kind.places) if key in order and plan.tests[key] in failed]
        mixed = sorted(near, key=lambda key: plan.tests[key] in others)  # stable
        best = _best(subject, ran, mixed)
        if best is None or best in symptoms:
            return []
        symptoms.append(best)
    return symptoms


def _best(subject: Subject, ran: JobResult, keys: Sequence[str]) -> Symptom | None:
    """Return the first of the symptoms that tell most."""
    candidates = [
        candidate for candidate in (_symptom(subject, ran, key) for key in keys[:LISTENED]) if candidate.tells
    ]
    return min(
        candidates,
        key=lambda candidate: (candidate.rank, bool(candidate.setup), len(candidate.code) > SHORT_CODE),
        default=None,
    )


def _symptom(subject: Subject, ran: JobResult, key: str) -> Symptom:
    text = normal(subject.repository.hidden[key.partition("::")[0]])
    return symptom(key, text, ran.result(key), ran.failures.get(key))
