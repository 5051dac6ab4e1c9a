"""Validate tasks of the grader `pytest`, and make the plan by which they are graded.

A task is valid if its gold patch passes every test, its start does not, and repeats agree. Tests that disagree are left out and
named. Twins are proposed from the tests' texts and kept if they fail on the gold patch. A task with failing tests that have no
twin is valid, but do not train on it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import product
from random import Random
from typing import Any

from composer_nb.harness.grading.alone import lone_job
from composer_nb.harness.grading.box import MISSING, Boxes, Failure, JobResult, RunnerEnded
from composer_nb.harness.grading.plan import (
    GradePlan,
    Keys,
    Twin,
    changed_text,
    conftests,
    digest,
    gold_files,
    job,
    normal,
)
from composer_nb.harness.grading.pytest_grader import grade_pytest, limit_of, same_id
from composer_nb.harness.grading.recorded import INDEPENDENT, Guard, enough, guard, record
from composer_nb.harness.grading.twins import TwinCandidate, all_candidates
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.tasks.runtime import limits_spec, workspace
from composer_nb.harness.tasks.task import Task

IDS = "pytest.ids"  # Metadata key of the node ids that count, as a JSON list; without it, all count.
HARMLESS = {"printed_results"}  # Flags that a task's own tests may cause.
ON_ASSERTION = {"AssertionError", "Failed", "failureException"}
# Time limit of a changed test, in seconds. A test that fails inside a `with` may leave it waiting forever.
TEST_S = 5.0
TESTS_ALONE, TWINS_ALONE = 8, 2  # Maximum tests of a task that may run alone, and twins of each.
FARTHER = 2.0
NO_FAILURE = Failure(line=0, message="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The findings about a task.

    Attributes:
        problems: Reasons not to use it; empty if it is valid.
        flaky: Ids of tests that were left out because repeats disagreed about their result or their id.
        left_out: Ids of tests that were left out because the gold patch skips them, or they are expected to fail.
        fail_to_pass: Ids of tests that fail without a change.
    """

    problems: tuple[str, ...] = ()
    plan: GradePlan | None = None
    flaky: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    fail_to_pass: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        return not self.problems

    @property
    def coverage(self) -> float:
        """Share of the tests that have a twin."""
        return self.plan.coverage if self.plan else 0.0

    @property
    def guard(self) -> Guard | None:
        """The guard of the tests that fail without a change."""
        return guard(self.plan, self.fail_to_pass) if self.plan else None

    @property
    def trainable(self) -> bool:
        """Return whether it can support a reward: recorded calls, or tests that run alone, guard what an answer has to repair."""
        return self.valid and self.guard is not None and self.guard.by != "none"


def validate_task(
    task: Task, backend: Backend, *, repeats: int = 3, timeout_s: float = 0.0, keys: Keys = None
) -> Validation:
    """Validate a task. `keys`: the tests to run; None runs all. `timeout_s`: of one run; 0 takes the task's own.

    Raises SandboxFailure, from which nothing follows, and ValueError for a task of another grader.
    """
    if task.grader != "pytest":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, not 'pytest'")
    timeout_s = timeout_s or limit_of(task)
    boxes = Boxes(backend=backend, spec=limits_spec(task), timeout_s=timeout_s)
    gold = gold_files(task)
    try:
        for path, text in {**task.tests, **conftests(task)}.items():
            _ = path.endswith(".py") and normal(changed_text(text, ()))
    except (SyntaxError, ValueError, RecursionError) as error:
        return Validation(problems=(f"{path} cannot be rewritten by `ast`: {error}",))
    try:
        trials = boxes.run([replace(job(task, gold, keys=keys), hash_seed=seed) for seed in range(repeats)])
    except (SandboxDied, RunnerEnded) as error:
        return Validation(problems=(f"the gold patch ends its sandbox: {error}",))
    validation = _agreed(task, trials)
    if validation.problems or validation.plan is None:
        return validation
    plan, twin_problems = with_twins(task, validation.plan, boxes, repeats=repeats)
    problems = list(twin_problems)
    pristine = workspace(task)
    nothing = grade_pytest(task, pristine, backend, plan, timeout_s=timeout_s)
    if nothing.status not in ("graded", "agent_failed"):
        problems.append(f"no change is {nothing.status} {list(nothing.flags)}")
    # Without twins: one that passes would make a passing test look like one that an answer has to repair.
    bare = grade_pytest(task, pristine, backend, replace(plan, twins=()), timeout_s=timeout_s)
    if bare.passed:
        problems.append("all tests pass without a change")
    if not problems:
        plan = guarded(task, plan, bare.failed, boxes)
    return replace(validation, problems=tuple(problems), plan=plan, fail_to_pass=bare.failed)


def guarded(task: Task, plan: GradePlan, failing: Iterable[str], boxes: Boxes) -> GradePlan:
    """Return the plan with recorded calls and, where these are too few, with tests that stand alone. Raises SandboxFailure.

    Args:
        failing: node ids of the tests that fail without a change.
    """
    failing = list(failing)
    plan = replace(plan, calls=record(task, plan, failing, boxes))
    return plan if enough(plan.calls) else standing_alone(task, plan, failing, boxes)


def standing_alone(task: Task, plan: GradePlan, failing: Iterable[str], boxes: Boxes) -> GradePlan:
    """Return the plan with its twins marked whose tests stand alone: in a process that holds nothing else, the gold patch passes
    the test and fails the twin, and the start fails both and is about as far from both (`_shows_itself`).

    Raises SandboxFailure."""
    names, gold, pristine = set(failing), gold_files(task), workspace(task)
    tried: dict[str, list[Twin]] = {}
    ranked_twins = list[tuple[int, Twin]]()
    twin_counts = Counter[tuple[str, int]]()
    for twin in plan.twins:
        ranked_twins.append((twin_counts[twin.path, twin.start], twin))
        twin_counts[twin.path, twin.start] += 1
    # Other expectations of a test come before other values of one.
    for _, twin in sorted(ranked_twins, key=lambda pair: pair[0]):
        [*_, key] = twin.keys or ("",)
        key_twins = tried.get(key, [])
        fits = plan.tests.get(key) in names and len(key_twins) < TWINS_ALONE and (key_twins or len(tried) < TESTS_ALONE)
        if fits and lone_job(task, gold, twin, False) and lone_job(task, gold, twin, True):
            tried.setdefault(key, []).append(twin)
    if len(tried) < INDEPENDENT:
        return plan
    twins = [twin for key_twins in tried.values() for twin in key_twins]
    cases = product(twins, (gold, pristine), (False, True))
    jobs = [lone_job(task, files, twin, changed) for twin, files, changed in cases]
    try:
        ran = boxes.run([replace(lone_run, test_s=TEST_S, explain=True) for lone_run in jobs if lone_run is not None])
    except (SandboxDied, RunnerEnded):
        return plan
    lone = set[Twin]()
    for twin, runs in zip(twins, zip(*[iter(ran)] * 4, strict=True), strict=True):
        gold_result, gold_twin, start_result, start_twin = (next(iter(run.results.values()), MISSING) for run in runs)
        is_telling = gold_result.passed and gold_twin.outcome == "failed" and gold_twin.why in ON_ASSERTION
        if is_telling and not (start_result.passed or start_twin.passed or _shows_itself(*runs[2:])):
            lone.add(twin)
    return replace(plan, twins=tuple(replace(twin, alone=twin in lone) for twin in plan.twins))


def _shows_itself(wrong: JobResult, twin_wrong: JobResult) -> bool:
    """Return whether the start's value is much closer to the test's than to the twin's: code that knows the start could tell them
    apart."""
    values, twin_values = (
        {*failure.compared[1:]} for run in (wrong, twin_wrong) for failure in [*run.failures.values(), NO_FAILURE][:1]
    )
    if not (len(values) == len(twin_values) == 2 and len(values & twin_values) == 1):
        return False
    [answer], [expected], [twin] = values & twin_values, values - twin_values, twin_values - values
    return _distance(answer, twin) > FARTHER * _distance(answer, expected)


def _distance(first: str, second: str) -> float:
    try:
        return abs(float(first) - float(second))
    except ValueError:
        return 1 - SequenceMatcher(None, first, second, autojunk=False).ratio()


def with_twins(task: Task, plan: GradePlan, boxes: Boxes, *, repeats: int = 3) -> tuple[GradePlan, tuple[str, ...]]:
    """Return the plan with the twins that fail on the gold patch, and remaining problems.

    Raises SandboxFailure.
    """
    gold = gold_files(task)
    proposed = all_candidates(task.tests)
    plan = replace(plan, twins=tuple(seen_to_fail(task, plan, proposed, boxes)))
    limits: dict[str, Any] = {"timeout_s": boxes.timeout_s, "spec": boxes.spec}
    for last in (False, False, False, True):
        grades = [grade_pytest(task, gold, boxes.backend, plan, rng=Random(n), **limits) for n in range(repeats)]
        places = {name.partition("::")[0] for grade in grades for name in grade.failed}
        if not places:
            break
        # Tests depend on others in a way that their texts do not show.
        near = [twin for twin in plan.twins if twin.path in places]
        lost = near if last else _disturbing(task, plan, near, boxes) or near
        plan = replace(plan, twins=tuple(twin for twin in plan.twins if twin not in lost))
    problems = tuple(
        f"the gold patch with twins is {grade.status} {list(grade.flags)}, failing {list(grade.failed)}"
        for grade in grades
        if not grade.passed or set(grade.flags) - HARMLESS
    )
    return plan, problems


def _agreed(task: Task, trials: Sequence[JobResult]) -> Validation:
    """Return a plan of the tests that pass in all trials."""
    first = trials[0].results
    names = {key: result.id for trial in trials for key, result in trial.results.items()}
    results_of = {key: {trial.result(key) for trial in trials} for key in names}
    outcomes = {key: {result.outcome for result in results} for key, results in results_of.items()}
    required = json.loads(task.metadata[IDS]) if IDS in task.metadata else None
    counted = [key for key in names if required is None or names[key] in required]
    flaky = [key for key in counted if len({(result.outcome, result.id) for result in results_of[key]}) > 1]
    problems = [f"the gold patch fails {names[k]} ({first[k].why})" for k in counted if outcomes[k] == {"failed"}]
    problems += [f"no test {name}" for name in required or () if name not in names.values()]
    flags = sorted({flag for trial in trials for flag in trial.flags} - HARMLESS)
    problems += [f"the gold patch: {flag}" for flag in flags]
    tests = {key: names[key] for key in counted if outcomes[key] == {"passed"} and key not in flaky}
    if not tests:
        problems.append("the gold patch passes no test")
    if len(set(tests.values())) < len(tests):
        problems.append("two tests have one id")
    return Validation(
        problems=tuple(problems),
        plan=GradePlan(digest=digest(task), tests=tests),
        flaky=tuple(names[key] for key in flaky),
        left_out=tuple(names[key] for key in counted if outcomes[key] == {"skipped"}),
    )


def seen_to_fail(task: Task, plan: GradePlan, proposed: Sequence[TwinCandidate], boxes: Boxes) -> list[Twin]:
    """Return the changes that fail on the gold patch, on an assertion. Each round runs only the tests that it changes."""
    keys_of: dict[str, list[str]] = {}
    for key in plan.tests:
        keys_of.setdefault(key.rpartition("#")[0], []).append(key)
    rounds: list[tuple[list[TwinCandidate], dict[str, set[int | None]]]] = []
    for candidate in (candidate for candidate in proposed if candidate.base in keys_of):
        row = candidate.row
        free_rounds = (
            round_index
            for round_index, (_, changed_rows) in enumerate(rounds)  # a round has at most one change for each test
            if not (used := changed_rows.get(candidate.base, set())) or not (row is None or used & {row, None})
        )
        if (round_index := next(free_rounds, len(rounds))) == len(rounds):
            rounds.append(([], {}))
        rounds[round_index][0].append(candidate)
        rounds[round_index][1].setdefault(candidate.base, set()).add(row)
    keys_by_round = [[key for base in rows_of for key in keys_of[base]] for _, rows_of in rounds]
    gold = gold_files(task)
    jobs = [
        replace(job(task, gold, changes, frozenset(round_keys)), test_s=TEST_S)
        for (changes, _), round_keys in zip(rounds, keys_by_round, strict=True)
    ]
    twins = []
    for (changes, _), round_keys, run in zip(rounds, keys_by_round, boxes.run(jobs), strict=True):
        failed = {key for key in round_keys if not run.result(key).passed}
        # A row that is not the test of its number, as where a fixture multiplies the tests.
        strays = {key.rpartition("#")[0] for key in failed if not any(change.changes(key) for change in changes)}
        for change in changes:
            changed = tuple(key for key in round_keys if change.changes(key))
            results = [run.result(key) for key in changed]
            fails = all(result.outcome == "failed" and result.why in ON_ASSERTION for result in results)
            if results and fails and change.base not in strays:
                twins.append(Twin(path=change.path, start=change.start, end=change.end, text=change.text, keys=changed))
    return twins


def _disturbing(task: Task, plan: GradePlan, twins: Sequence[Twin], boxes: Boxes) -> list[Twin]:
    """Return the twins of test functions whose change makes other tests of their module fail. One twin of each is tried."""
    first = {twin.keys[0].rpartition("#")[0]: twin for twin in reversed(twins)}.values()
    keys = [frozenset(key for key in plan.tests if key.startswith(f"{twin.path}::")) for twin in first]
    ran = boxes.run([job(task, gold_files(task), [twin], some) for twin, some in zip(first, keys, strict=True)])
    suspect: set[str] = set()
    for twin, some, run in zip(first, keys, ran, strict=True):
        others = {key: run.result(key) for key in some.difference(twin.keys)}
        if not all(result.passed and same_id(result.id, plan.tests[key]) for key, result in others.items()):
            suspect.update(twin.keys)
    return [twin for twin in twins if not suspect.isdisjoint(twin.keys)]
