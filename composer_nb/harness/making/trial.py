"""Whether a change makes a task, found out by execution: from the cheap question to the dear one.

1. `look`: do the tests that reach the changed function notice? Many changes in one sandbox, each in a process and a folder of
   its own, forked from one process that has pytest loaded.
2. `settle`: the whole suite once, which says every test that fails; then the task itself, its right answer and its start, five
   times each under other hash seeds, in which every result must be the same; and last, graded with twins: the right answer 1, the
   start 0, with exactly the failing tests that were seen before.

A test that comes out differently in any of these runs is in no task.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from composer_nb.harness.grading.box import Job, Ran, RunnerEnded, run_jobs
from composer_nb.harness.grading.plan import Plan, Twin, digest, modules_of, normal, plain_lines, with_plan
from composer_nb.harness.grading.pytest_grader import grade_pytest, job
from composer_nb.harness.grading.scope import is_test_module
from composer_nb.harness.grading.validate import IDS
from composer_nb.harness.making.baseline import Baseline, whole
from composer_nb.harness.making.changes import Change, changed_lines
from composer_nb.harness.making.instructions import Symptom, symptom, without_tests, write, write_feature
from composer_nb.harness.making.repository import Repository
from composer_nb.harness.sandboxes.contract import Backend, SandboxDied, SandboxSpec
from composer_nb.harness.task import Task

Verdict = Literal["kept", "unseen", "endless", "ends early", "too much", "flaky", "copied", "ungraded"]
"""unseen: no test fails. endless, ends early: the tests do not end, or their process does. too much: more tests fail than one bug
should break. flaky: no failing test fails every time. copied: the right lines lie elsewhere in the workspace. ungraded: the
grader does not give the right answer 1 and the start 0, without a flag."""
LOOK_AT = 24
"""Tests by which a change is first tried."""
MOST_BROKEN = 0.3
"""Of the suite's tests, how many may fail; eight always may."""
BESIDES = 80
"""Tests that pass before and after and count in a task, at most; those nearest to the change."""
REPEATS = 5
OWN_S = 5.0
"""What a test may take that is none of the suite's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What changes are tried on."""

    repository: Repository
    baseline: Baseline
    names: frozenset[str]
    """Of the repository's functions and classes."""
    backend: Backend
    spec: SandboxSpec
    seed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a change."""

    key: str
    kind: str
    verdict: Verdict
    seconds: float
    task: Task | None = None


def look(subject: Subject, changes: Sequence[Change]) -> list[Verdict | None]:
    """What is wrong with each change at first sight; None: its tests notice it. Raises SandboxFailure."""
    jobs = []
    for change in changes:
        keys = subject.baseline.nearest(change.places)[:LOOK_AT]
        jobs.append(_job(subject, change.apply(subject.repository.files), keys))
    seconds = [sum(subject.baseline.reach[key].seconds for key in each.keys or ()) for each in jobs]
    return [
        ran if isinstance(ran, str) else None if _failing(ran, each.keys or ()) else "unseen"
        for each, ran in zip(jobs, _tried(subject, jobs, 6.0 + 4 * max(seconds, default=0.0)), strict=True)
    ]


def failures(subject: Subject, changes: Sequence[Change], keys: Sequence[str]) -> list[set[str]]:
    """Which of these tests notice each change; none where a run has no end, or ends early. Raises SandboxFailure."""
    jobs = [_job(subject, change.apply(subject.repository.files), keys) for change in changes]
    timeout_s = 6.0 + 4 * sum(subject.baseline.reach[key].seconds for key in keys)
    return [set() if isinstance(ran, str) else _failing(ran, keys) for ran in _tried(subject, jobs, timeout_s)]


def _job(subject: Subject, changed: Mapping[str, str], keys: Iterable[str], explain: bool = False) -> Job:
    """The tests of these keys on a changed repository, without the test modules that they do not need."""
    files = {path: text.encode() for path, text in {**subject.repository.files, **changed}.items()}
    whole_job = job(whole(subject.repository), files, (), frozenset(keys))
    kept = needed(whole_job.hidden, whole_job.tests)
    return replace(whole_job, hidden={path: whole_job.hidden[path] for path in kept}, explain=explain)


def needed(hidden: Mapping[str, str], modules: Iterable[str]) -> list[str]:
    """These test modules, those that they import, and everything that is no test module."""
    kept = list(modules)
    for path in kept:  # grows
        imports = " ".join(re.findall(r"^\s*(?:from|import)\b.*", hidden[path], re.M))
        kept += [
            other
            for other in hidden
            if other not in kept and re.search(rf"\b{re.escape(other.rpartition('/')[2][:-3])}\b", imports)
        ]
    return sorted({*kept, *(path for path in hidden if not is_test_module(path))})


def _tried(subject: Subject, jobs: Sequence[Job], timeout_s: float) -> list[Ran | Verdict]:
    """A run, or what came instead of it. One that ends the sandbox of all is found by running them one by one."""
    try:
        ran = run_jobs(subject.backend, jobs, timeout_s=timeout_s, spec=subject.spec)
    except (SandboxDied, RunnerEnded):
        if len(jobs) == 1:
            return ["ends early"]
        return [each for one in jobs for each in _tried(subject, [one], timeout_s)]
    return ["endless" if "timeout" in each.flags else "ends early" if each.flags else each for each in ran]


def _failing(ran: Ran, keys: Iterable[str]) -> set[str]:
    return {key for key in keys if key not in ran.results or not ran.results[key].passed}


def settle(subject: Subject, change: Change, parts: Sequence[Task] = (), kinds: Sequence[Change] = ()) -> Outcome:
    """The task of a change, or why there is none. `parts` are the tasks of the changes that it combines, `kinds` these.

    Raises SandboxFailure.
    """
    began = time.monotonic()
    verdict, task = _settled(subject, change, parts, kinds)
    seconds = time.monotonic() - began
    return Outcome(key=change.key, kind=change.kind, verdict=verdict, seconds=seconds, task=task)


def _settled(
    subject: Subject, change: Change, parts: Sequence[Task], kinds: Sequence[Change]
) -> tuple[Verdict, Task | None]:
    baseline, changed = subject.baseline, change.apply(subject.repository.files)
    if _copied(subject.repository, change):
        return "copied", None
    [ran] = _tried(subject, [_job(subject, changed, baseline.plan.tests, explain=True)], 15.0 + 4 * baseline.suite_s)
    if isinstance(ran, str):
        return ran, None
    failing = _failing(ran, baseline.plan.tests)
    names = {baseline.plan.tests[key] for key in failing}
    if not failing or any(names.isdisjoint(json.loads(part.metadata["fail_to_pass"])) for part in parts):
        return "unseen", None
    if len(failing) > max(8, MOST_BROKEN * len(baseline.plan.tests)):
        return "too much", None
    near = [key for key in baseline.nearest(change.places) if key not in failing]
    modules = modules_of([*failing, *near[:BESIDES]])
    others = [key for key in sorted(baseline.plan.tests) if key.partition("::")[0] in modules]
    besides = [key for key in dict.fromkeys([*near, *others]) if key not in failing][:BESIDES]
    order = [key for key in baseline.nearest(change.places) if key in failing] or sorted(failing)
    told = _symptoms(subject, ran, order, kinds or [change])
    draft = _draft(subject, change, changed, sorted({*failing, *besides}))
    task = repeated(subject, draft, failing)
    if not isinstance(task, Task):
        return task, None
    failing_ids = json.loads(task.metadata["fail_to_pass"])
    text = (
        _feature_text(subject, change)
        if change.kind == "feature"
        else write(told, len(failing_ids), f"{subject.seed} {change.key}")
    )
    task = task.model_copy(
        update={"instruction": text, "metadata": task.metadata | _difficulty(subject, change, failing_ids)}
    )
    return graded(subject, task), task


def _draft(subject: Subject, change: Change, changed: Mapping[str, str], keys: Sequence[str]) -> Task:
    """The task with these tests, all of which are still thought to count."""
    repository, plan = subject.repository, subject.baseline.plan
    modules = modules_of(keys)
    task = Task(
        id=f"{repository.name}-{change.kind}-{change.key}",
        instruction="-",
        files={**repository.files, **changed},
        tests={path: repository.hidden[path] for path in needed(repository.hidden, modules)},
        solution={path: repository.files[path] for path in changed},
        source_scope=repository.scope,
        grader="pytest",
        metadata={
            "kind": change.kind,
            "repository": repository.name,
            "places": json.dumps([f"{edit.path}::{edit.name}" for edit in change.edits]),
        },
    )
    return with_plan(task, restricted(plan, keys, digest(task)))


def restricted(plan: Plan, keys: Iterable[str], made_for: str) -> Plan:
    """A plan of fewer tests."""
    kept = set(keys)
    twins = [
        replace(twin, keys=tuple(kept.intersection(twin.keys)), besides=tuple(kept.intersection(twin.besides)))
        for twin in plan.twins
        if kept.intersection(twin.keys)
    ]
    ordered: list[Twin] = [replace(t, keys=tuple(sorted(t.keys)), besides=tuple(sorted(t.besides))) for t in twins]
    return Plan(digest=made_for, tests={key: plan.tests[key] for key in sorted(kept)}, twins=tuple(ordered))


def repeated(subject: Subject, task: Task, failing: Iterable[str]) -> Task | Verdict:
    """The task with the tests on which all runs agree, and without the failing ones in its workspace."""
    plan = Plan.from_json(task.metadata["pytest.plan"])
    keys = frozenset(plan.tests)
    start = {path: text.encode() for path, text in task.files.items()}
    gold = {path: text.encode() for path, text in (task.files | task.solution).items()}
    jobs = [job(task, files, (), keys) for files in (gold, start)]
    reach = subject.baseline.reach
    timeout_s = 10.0 + 4 * sum(reach[key].seconds if key in reach else OWN_S for key in keys)
    seen: list[set[str]] = []
    for seed in range(REPEATS):
        try:
            pair = [replace(each, hash_seed=seed) for each in jobs]
            right, wrong = run_jobs(subject.backend, pair, timeout_s=timeout_s, spec=subject.spec)
        except (SandboxDied, RunnerEnded):
            return "ends early"
        if wrong.flags:
            return "endless" if "timeout" in wrong.flags else "ends early"
        if right.flags or _failing(right, keys):
            return "ungraded"
        seen.append(_failing(wrong, keys))
    steady, ever = set.intersection(*seen) & set(failing), set.union(*seen) | set(failing)
    if not steady:
        return "flaky"
    counted = [key for key in sorted(keys) if key in steady or key not in ever]
    # In the workspace stand the tests that pass: what fails, an agent has to find out.
    by_module = {path: [key for key in steady if key.startswith(path + "::")] for path in modules_of(steady)}
    by_module = {path: gone for path, gone in by_module.items() if path in task.files}
    visible = {path: without_tests(task.files[path], gone) for path, gone in by_module.items()}
    ids = [plan.tests[key] for key in counted]
    facts = {IDS: json.dumps(ids), "fail_to_pass": json.dumps([plan.tests[key] for key in sorted(steady)])}
    task = task.model_copy(update={"files": task.files | visible, "metadata": task.metadata | facts})
    return with_plan(Task.model_validate(task.model_dump()), restricted(plan, counted, digest(task)))


def graded(subject: Subject, task: Task) -> Verdict:
    """By the grader itself, with twins."""
    timeout_s = 60.0 + 4 * subject.baseline.suite_s
    gold = {path: text.encode() for path, text in (task.files | task.solution).items()}
    right = grade_pytest(task, gold, subject.backend, timeout_s=timeout_s, spec=subject.spec)
    start = {path: text.encode() for path, text in task.files.items()}
    wrong = grade_pytest(task, start, subject.backend, timeout_s=timeout_s, spec=subject.spec)
    failed = {name for name, passed in wrong.tests.items() if not passed}
    fits = right.passed and not right.flags and wrong.status == "graded" and not wrong.flags
    return "kept" if fits and failed == set(json.loads(task.metadata["fail_to_pass"])) else "ungraded"


def _copied(repository: Repository, change: Change) -> bool:
    """Whether the right text of a changed function lies in another file as well, or twice in one."""
    for edit in change.edits:
        lines = repository.files[edit.path].split("\n")[edit.start - 1 : edit.end]
        text = "\n".join(lines)
        if len(lines) >= 3 and sum(each.count(text) for each in repository.files.values()) > 1:
            return True
    return False


def _symptoms(subject: Subject, ran: Ran, order: Sequence[str], changes: Sequence[Change]) -> list[Symptom]:
    """One for each change, of the failing test that is nearest to it."""
    found = []
    for change in changes:
        near = [key for key in subject.baseline.nearest(change.places) if key in order]
        key = (near or list(order))[0]
        if key in ran.results:
            text = subject.repository.hidden[key.partition("::")[0]]
            found.append(
                symptom(key, normal(plain_lines(text)), ran.results[key], ran.failures.get(key), subject.names)
            )
    return list(dict.fromkeys(found)) or [Symptom(subject=subject.repository.name, topic="its tests do not run")]


def _feature_text(subject: Subject, change: Change) -> str:
    edit = change.edits[0]
    text = "\n".join(subject.repository.files[edit.path].split("\n")[edit.start - 1 : edit.end])
    return write_feature(edit.path, edit.name, text, f"{subject.seed} {change.key}")


def _difficulty(subject: Subject, change: Change, failing: Sequence[str]) -> dict[str, str]:
    """An estimate from 0 to 1 and what it is made of: how far the symptom is from the place, how much code lies between, how many
    lines change, how many tests tell."""
    baseline, files = subject.baseline, subject.repository.files
    keys = [key for key, name in baseline.plan.tests.items() if name in set(failing)]
    places = set(change.places)
    depths = [depth for key in keys for place, depth in baseline.reach[key].depths.items() if place in places]
    between = min(len(baseline.reach[key].depths) for key in keys)
    old = {edit: "\n".join(files[edit.path].split("\n")[edit.start - 1 : edit.end]) for edit in change.edits}
    lines = sum(changed_lines(text, edit.text) for edit, text in old.items())
    distance = min(depths, default=1)
    parts = (min(distance - 1, 4) / 4, min(between, 60) / 60, min(lines, 40) / 40, 1 / len(failing))
    score = 0.35 * parts[0] + 0.25 * parts[1] + 0.25 * parts[2] + 0.15 * parts[3]
    return {
        "difficulty": f"{score:.2f}",
        "distance": str(distance),
        "functions_between": str(between),
        "changed_lines": str(lines),
    }
