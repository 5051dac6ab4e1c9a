"""Validate candidate tasks by execution, cheapest checks first, and store the outcomes, so that nothing is tried twice.

1. `look`: do the tests that reach the changed function notice it?
2. The whole suite runs once, which finds every failing test. Then the task's solution and its start run five times each
   under different hash seeds; every result must be the same. Last, both are graded with twins and recorded calls: the solution
   must score 1 and the start 0, with exactly the failing tests that were seen before.

A test whose result differs between runs counts in no task.
"""

import hashlib
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from composer_nb.harness.grading.box import Boxes, JobResult, RunnerEnded, TestJob
from composer_nb.harness.grading.front import strictly
from composer_nb.harness.grading.plan import PLAN, GradePlan, digest, gold_files, job, modules_of, normal, with_plan
from composer_nb.harness.grading.pytest_grader import RUN_S, SECONDS, grade_pytest
from composer_nb.harness.grading.validate import IDS, guarded
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.tasks.making.baseline import Baseline, whole
from composer_nb.harness.tasks.making.changes import Change, Unit, units
from composer_nb.harness.tasks.making.instructions import passing_modules, write, write_feature
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.making.symptoms import Symptom, symptom
from composer_nb.harness.tasks.runtime import workspace
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import check_database


class NoTask(Exception):
    """There is no task of a change.

    unseen: no test fails. endless, ends early: the tests do not end, or their process does. too much: more tests fail than one
    bug should break. flaky: no failing test fails every time. copied: the original lines occur elsewhere in the workspace.
    ungraded: the grader does not score the solution 1 and the start 0 without a flag. unfit: it is no valid task. silent: no
    failing test has a symptom for the instruction, or one of several bugs has none of its own. `mine.py` has further verdicts.
    """

    def __init__(self, verdict: str, why: str = "") -> None:
        super().__init__(verdict, why)
        self.verdict, self.why = verdict, why


LOOK_AT = 24  # Tests that a change is first tried with.
MOST_BROKEN = 0.3  # Largest share of the suite that may fail; eight tests always may.
BESIDES = 80  # Maximum tests of a task that pass before and after; the nearest to the change are chosen.
REPEATS = 5
LISTENED = 8  # Failing tests, nearest to the change first, among which the best symptom is chosen.
FEATURES = ("feature", "features")  # Kinds of changes that take functions away, in one file or in several.
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

        functions = {function for reach in baseline.reach.values() for function in reach.depths}
        # Functions that tests call.
        self.reached = [unit for unit in self.units if unit.place in functions]

    def boxes(self, timeout_s: float) -> Boxes:
        return Boxes(backend=self.backend, spec=self.spec, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A candidate for a task that is no planted bug and no missing feature.

    Attributes:
        key: Digest of the code that it is about.
        build: Returns its task, or raises NoTask and SandboxFailure.
    """

    kind: str
    key: str
    build: Callable[[], Task]
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The result of trying a change.

    Attributes:
        kind: Kind of the change; of a commit or a release, why there is no task.
        verdict: `kept`, or that of `NoTask`.
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
        self._folder = path.parent
        self._folder.mkdir(parents=True, exist_ok=True)
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

    def claim(self, name: str, origin: str) -> None:
        """Note what the tasks are made of. Raises ValueError if those in the record are made of something else."""
        fingerprint = hashlib.sha256(origin.encode()).hexdigest()
        if (self.outcomes or "baseline" in self.facts) and self.facts.get(name) != fingerprint:
            raise ValueError(f"--out {self._folder}: holds tasks of another repository, seed or options; give another")
        self.keep_fact(name, fingerprint)

    def keep(self, outcome: TrialOutcome) -> None:
        self.outcomes[outcome.key] = outcome
        text = outcome.task.model_dump_json() if outcome.task else None
        row = (outcome.key, outcome.kind, outcome.verdict, outcome.seconds, text)
        with self._db:
            self._db.execute("insert or replace into outcomes values (?, ?, ?, ?, ?)", row)


def job_on(subject: Subject, changed: Mapping[str, str], keys: Iterable[str], explain: bool = False) -> TestJob:
    """Return a run of the tests of these keys on a changed repository, without the test modules that they do not need."""
    files = {path: text.encode() for path, text in {**subject.repository.files, **changed}.items()}
    whole_job = job(whole(subject.repository), files, (), frozenset(keys), explain=explain)
    paths = needed(whole_job.hidden, whole_job.tests)
    return replace(whole_job, hidden={path: whole_job.hidden[path] for path in paths})


def needed(hidden: Mapping[str, str], modules: Iterable[str]) -> list[str]:
    """Return these test modules, those that they import, and everything that is no test module."""
    by_name: dict[str, set[str]] = {}
    for path in hidden:
        by_name.setdefault(path.rpartition("/")[2].removesuffix(".py"), set()).add(path)
    paths = {*modules}
    queue = [*paths]
    for path in queue:  # grows
        imports = " ".join(re.findall(r"^\s*(?:from|import)\b.*", hidden[path], re.M))
        named = {other for word in re.findall(r"\w+", imports) for other in by_name.get(word, ())} - paths
        paths |= named
        queue += named
    return sorted({*paths, *(path for path in hidden if not is_test_module(path))})


def run_jobs(subject: Subject, jobs: Sequence[TestJob], timeout_s: float) -> list[JobResult]:
    """Return the runs. Raises NoTask if one does not end. If one ends a sandbox that all share, each runs alone."""
    try:
        ran = subject.boxes(timeout_s).run(jobs)
    except (SandboxDied, RunnerEnded):
        if len(jobs) == 1:
            raise NoTask("ends early") from None
        return [result for alone in jobs for result in run_jobs(subject, [alone], timeout_s)]
    for run in ran:
        if run.flags:
            raise NoTask("endless" if "timeout" in run.flags else "ends early")
    return ran


def failing_keys(ran: JobResult, keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not ran.result(key).passed}


Part = tuple[Change, Task]  # A component bug of a combined change, and its task.


def settle(subject: Subject, change: Change | Assignment, parts: Sequence[Part] = ()) -> TrialOutcome:
    """Return the task of a candidate, or why there is none. Raises SandboxFailure."""
    began, verdict = 0.0, "kept"
    task: Task | None = None
    try:
        if isinstance(change, Change) and not parts:  # the parts of a combined bug have been looked at
            look(subject, change)
        began = time.monotonic()
        task = change.build() if isinstance(change, Assignment) else settled(subject, change, parts)
    except NoTask as no_task:
        verdict = no_task.verdict
    seconds = time.monotonic() - began if began else 0.0
    return TrialOutcome(key=change.key, kind=change.kind, verdict=verdict, seconds=seconds, task=task)


def look(subject: Subject, change: Change) -> None:
    """Raise NoTask if the tests nearest to a change do not notice it."""
    keys = subject.baseline.nearest(change.places)[:LOOK_AT]
    seconds = sum(subject.baseline.reach[key].seconds for key in keys)
    [ran] = run_jobs(subject, [job_on(subject, change.apply(subject.repository.files), keys)], 6.0 + 4 * seconds)
    if not failing_keys(ran, keys):
        raise NoTask("unseen")


def settled(subject: Subject, change: Change, parts: Sequence[Part] = ()) -> Task:
    """Return the task of a change that tests notice. Raises NoTask, and SandboxFailure."""
    baseline, repository, tests = subject.baseline, subject.repository, subject.baseline.plan.tests
    files, changed = repository.files, change.apply(repository.files)
    originals = ["\n".join(files[edit.path].split("\n")[edit.start - 1 : edit.end]) for edit in change.edits]
    if any(text.count("\n") > 1 and sum(other.count(text) for other in files.values()) > 1 for text in originals):
        raise NoTask("copied")
    [ran] = run_jobs(subject, [job_on(subject, changed, tests, explain=True)], 15.0 + 4 * baseline.suite_s)
    failing = failing_keys(ran, tests)
    names = {tests[key] for key in failing}
    if not failing or any(names.isdisjoint(json.loads(part.metadata["fail_to_pass"])) for _, part in parts):
        raise NoTask("unseen")
    if len(failing) > max(8, MOST_BROKEN * len(tests)):
        raise NoTask("too much")
    nearest = baseline.nearest(change.places)
    passing_near = [key for key in nearest if key not in failing]
    modules = modules_of([*failing, *passing_near[:BESIDES]])
    same_module = [key for key in sorted(tests) if key.partition("::")[0] in modules]
    besides = [key for key in dict.fromkeys([*passing_near, *same_module]) if key not in failing][:BESIDES]
    symptoms = _symptoms(subject, ran, [key for key in nearest if key in failing] or sorted(failing), change, parts)
    keys, places = frozenset({*failing, *besides}), json.dumps([f"{edit.path}::{edit.name}" for edit in change.edits])
    hidden = needed(repository.hidden, modules_of(keys))
    task = Task(
        id=f"{repository.name}-{change.kind}-{change.key}",
        instruction="-",
        files={**files, **changed},
        tests={path: repository.hidden[path] for path in hidden},
        solution={path: files[path] for path in changed},
        source_scope=repository.scope,
        grader="pytest",
        metadata=repository.settings
        | {"kind": change.kind, "repository": repository.name, "places": places, PLAN: ""},  # made last
    )
    steady, varying = repeated(subject, task, keys, failing)
    if not steady:
        raise NoTask("flaky")
    seed = f"{subject.seed} {change.key}"
    if change.kind in FEATURES:
        texts = dict(zip(change.edits, originals, strict=True))
        missing = [edit for edit in change.edits if edit.text]  # without their helpers
        examples = symptoms if len(missing) == 1 else []
        requests = [write_feature(edit.path, edit.name, texts[edit], seed, examples) for edit in missing]
        text = "\n\n".join(requests) if all(requests) else ""
    else:
        text = write(symptoms, len(steady), seed)
    if not text:
        raise NoTask("silent")
    # The workspace keeps only tests that pass: the agent has to find out what fails.
    passing = passing_modules(task.files, steady)
    counted = sorted(keys - varying)
    facts = {IDS: [tests[key] for key in counted], "fail_to_pass": [tests[key] for key in sorted(steady)]}
    metadata = task.metadata | {name: json.dumps(ids) for name, ids in facts.items()}
    task = task.model_copy(update={"instruction": text, "files": task.files | passing, "metadata": metadata})
    return graded(subject, task, plan_on(subject, task, counted), facts["fail_to_pass"])


def repeated(
    subject: Subject, task: Task, keys: frozenset[str], failing: Collection[str] | None = None
) -> tuple[set[str], set[str]]:
    """Return the tests that fail without a change every time, and those that do so at times; `failing`: those that did before.
    Raises NoTask if the solution fails one."""
    jobs = [job(task, files, (), keys) for files in (gold_files(task), workspace(task))]
    reach = subject.baseline.reach
    timeout_s = 10.0 + 4 * sum(reach[key].seconds for key in keys if key in reach)
    failures = [] if failing is None else [set(failing)]
    for seed in range(REPEATS):
        gold_run, start_run = run_jobs(subject, [replace(run, hash_seed=seed) for run in jobs], timeout_s)
        if failing_keys(gold_run, keys):
            raise NoTask("ungraded")
        failures.append(failing_keys(start_run, keys))
    steady = set.intersection(*failures)
    return steady, set.union(*failures) - steady


def plan_on(subject: Subject, task: Task, keys: Sequence[str]) -> GradePlan:
    """Return a plan of the tests of these keys, with the repository's twins."""
    baseline, counted = subject.baseline.plan, set(keys)
    twins = [replace(twin, keys=tuple(sorted(counted.intersection(twin.keys)))) for twin in baseline.twins]
    tests = {key: baseline.tests[key] for key in keys}
    return GradePlan(digest=digest(task), tests=tests, twins=tuple(twin for twin in twins if twin.keys))


def graded(subject: Subject, task: Task, plan: GradePlan, failing: Sequence[str], stub: Task | None = None) -> Task:
    """Return the task with this plan and recorded calls, by which the grader itself tells its solution from its start. `stub`: a
    start that does nothing, for calls that the task's own start answers. Raises NoTask."""
    # A multiple of RUN_S, so that it does not vary from run to run.
    timeout_s = RUN_S * round(1 + 4 * subject.baseline.suite_s / RUN_S)
    seconds = {SECONDS: f"{timeout_s:g}"} if timeout_s > RUN_S else {}
    task = with_plan(task.model_copy(update={"metadata": task.metadata | seconds}), plan)
    task = with_plan(task, guarded(stub or task, plan, failing, subject.boxes(timeout_s)))
    gold_grade, start_grade = (
        strictly(task, files, grade_pytest(task, files, subject.backend, timeout_s=timeout_s, spec=subject.spec))
        for files in (gold_files(task), workspace(task))
    )
    fits = gold_grade.passed and not gold_grade.flags and start_grade.status == "graded" and not start_grade.flags
    if not fits or start_grade.passed or {*start_grade.failed}.intersection(plan.tests.values()) != set(failing):
        raise NoTask("ungraded")
    return task


def _symptoms(
    subject: Subject, ran: JobResult, ranked_keys: Sequence[str], change: Change, parts: Sequence[Part]
) -> list[Symptom]:
    """Return one symptom for each bug, or the examples for a feature. Raises NoTask if a bug has no symptom that tells.

    For several bugs, a test that fails because of one bug alone is preferred.
    """

    def telling(keys: Sequence[str]) -> list[Symptom]:
        modules = {key: normal(subject.repository.hidden[key.partition("::")[0]]) for key in keys[:LISTENED]}
        reports = (symptom(key, text, ran.result(key), ran.failures.get(key)) for key, text in modules.items())
        return [report for report in reports if report is not None]

    if change.kind in FEATURES:
        return telling(ranked_keys)
    tests_of_bugs: Sequence[Sequence[str]] = [ranked_keys]
    if parts:
        tests = subject.baseline.plan.tests
        failing_by_bug = [set(json.loads(task.metadata["fail_to_pass"])) for _, task in parts]
        bugs_by_test = Counter(name for names in failing_by_bug for name in names)
        tests_of_bugs = [
            sorted(  # stable
                (key for key in subject.baseline.nearest(part.places) if key in ranked_keys and tests[key] in names),
                key=lambda key: bugs_by_test[tests[key]] > 1,
            )
            for names, (part, _) in zip(failing_by_bug, parts, strict=True)
        ]
    symptoms: list[Symptom] = []
    for keys in tests_of_bugs:
        ranked = telling(keys)
        best = min(ranked, key=lambda s: (bool(s.code), bool(s.setup), len(s.code) > SHORT_CODE), default=None)
        if best is None or best in symptoms:
            raise NoTask("silent")
        symptoms.append(best)
    return symptoms
