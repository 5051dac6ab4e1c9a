"""Whether a task of the grader `pytest` can be graded, and the plan by which it is.

A task is valid if its gold patch passes every test, nothing passes not all of them, and repeats agree; tests that come out
differently are left out and named. Twins are proposed from the tests' texts and kept if they are seen to fail on the gold patch.
A task some of whose failing tests have no twin is valid, but nothing should be trained on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from composer_nb.harness.grading.box import Ran, Result, RunnerEnded, run_jobs
from composer_nb.harness.grading.plan import Plan, Twin, changed_text, conftests, digest, normal
from composer_nb.harness.grading.pytest_grader import grade_pytest, job
from composer_nb.harness.grading.reach import all_candidates
from composer_nb.harness.grading.twins import Candidate
from composer_nb.harness.sandboxes.contract import Backend, SandboxDied, SandboxSpec
from composer_nb.harness.task import Task

IDS = "pytest.ids"
"""Under this name a task's metadata may hold the node ids that count, as a JSON list; without it, all count."""
HARMLESS = {"printed_results"}
"""Of a task: its own tests may print such lines."""
ON_ASSERTION = {"AssertionError", "Failed", "failureException"}
TEST_S = 5.0
"""Longest that a changed test may take: one that fails within a `with` may leave it waiting for ever."""
NEVER_A_TWIN = {"Endless", "NameError", "SyntaxError", "ImportError", "ModuleNotFoundError", "Skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What was found out about a task."""

    problems: tuple[str, ...] = ()
    """Why it can not be used; empty when it can."""
    plan: Plan | None = None
    flaky: tuple[str, ...] = ()
    """Ids of tests that were left out because repeats did not agree on what became of them, or on their ids."""
    left_out: tuple[str, ...] = ()
    """Ids of tests that were left out because the gold patch skips them or they are expected to fail."""
    fail_to_pass: tuple[str, ...] = ()
    """Ids of tests that fail without a change."""
    proposed: int = 0
    """Changes of tests that were tried as twins."""
    output: str = field(default="", repr=False)
    """What the first run printed, where there are problems. Quotes hidden tests."""

    @property
    def valid(self) -> bool:
        return not self.problems

    @property
    def coverage(self) -> float:
        """Share of the tests that have a twin."""
        return self.plan.coverage if self.plan else 0.0

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Ids of `fail_to_pass` without a twin: ways to make those pass without an answer would not be seen."""
        covered = {self.plan.tests[key] for key in self.plan.covered} if self.plan else set()
        return tuple(name for name in self.fail_to_pass if name not in covered)

    @property
    def trainable(self) -> bool:
        """Whether a reward may rest on it: each test that an answer has to mend has a twin."""
        return self.valid and bool(self.fail_to_pass) and not self.uncovered


def validate_task(
    task: Task, backend: Backend, *, repeats: int = 3, timeout_s: float = 60.0, spec: SandboxSpec | None = None
) -> Validation:
    """Validates a task. Raises SandboxFailure, of which nothing follows, and ValueError for a task of another grader."""
    if task.grader != "pytest":
        raise ValueError(f"task {task.id}: its grader is {task.grader!r}, not 'pytest'")
    gold = {path: text.encode() for path, text in (task.files | task.solution).items()}
    try:
        for path, text in {**task.tests, **conftests(task)}.items():
            _ = path.endswith(".py") and normal(changed_text(text, ()))
    except (ValueError, RecursionError) as error:
        return Validation(problems=(f"{path} can not be written anew by `ast`: {error}",))
    try:
        jobs = [replace(job(task, gold, (), None), hash_seed=seed) for seed in range(repeats)]
        trials = run_jobs(backend, jobs, timeout_s=timeout_s, spec=spec)
    except (SandboxDied, RunnerEnded) as error:
        return Validation(problems=(f"the gold patch ends its sandbox: {error}",))
    found = _agreed(task, trials)
    if found.problems or found.plan is None:
        return found
    plan, told, proposed = with_twins(task, gold, found.plan, backend, repeats=repeats, timeout_s=timeout_s, spec=spec)
    problems = list(told)
    pristine = {path: text.encode() for path, text in task.files.items()}
    nothing = grade_pytest(task, pristine, backend, plan, timeout_s=timeout_s, spec=spec)
    if nothing.status not in ("graded", "agent_failed"):
        problems.append(f"no change is {nothing.status} {list(nothing.flags)}")
    if nothing.passed:
        problems.append("all tests pass without a change")
    return Validation(
        problems=tuple(problems),
        plan=plan,
        flaky=found.flaky,
        left_out=found.left_out,
        fail_to_pass=tuple(name for name, passed in nothing.tests.items() if not passed),
        proposed=proposed,
    )


def with_twins(
    task: Task,
    gold: Mapping[str, bytes],
    plan: Plan,
    backend: Backend,
    *,
    repeats: int = 3,
    timeout_s: float = 60.0,
    spec: SandboxSpec | None = None,
) -> tuple[Plan, tuple[str, ...], int]:
    """The plan with the twins that were seen to fail on the gold patch, what is wrong with it even so, and how many changes were
    tried. Raises SandboxFailure."""
    proposed = all_candidates(task.tests)
    plan = replace(plan, twins=tuple(seen_to_fail(task, gold, plan, proposed, backend, timeout_s, spec)))
    for _ in range(2):
        grades = [
            grade_pytest(task, gold, backend, plan, timeout_s=timeout_s, spec=spec, lot=random.Random(seed))
            for seed in range(repeats)
        ]
        bad = {name for grade in grades for name, passed in grade.tests.items() if not passed}
        if not bad:
            break
        # Tests that depend on others in a way that their texts do not show. Theirs are twins no longer.
        places = {name.partition("::")[0] for name in bad}
        plan = replace(plan, twins=tuple(twin for twin in plan.twins if twin.path not in places))
    problems = []
    for grade in grades:
        if not grade.passed or set(grade.flags) - HARMLESS:
            failed = [name for name, passed in grade.tests.items() if not passed]
            problems.append(f"the gold patch with twins is {grade.status} {list(grade.flags)}, failing {failed}")
    return plan, tuple(problems), len(proposed)


def _agreed(task: Task, trials: Sequence[Ran]) -> Validation:
    """The tests on which all trials agree that they pass."""
    first = trials[0].results
    names = {key: result.id for trial in trials for key, result in trial.results.items()}
    said = {key: {trial.results.get(key, Result(outcome="missing")) for trial in trials} for key in names}
    outcomes = {key: {result.outcome for result in results} for key, results in said.items()}
    wanted = json.loads(task.metadata[IDS]) if IDS in task.metadata else None
    counted = [key for key in names if wanted is None or names[key] in wanted]
    flaky = [key for key in counted if len({(result.outcome, result.id) for result in said[key]}) > 1]
    problems = [
        f"the gold patch fails {names[key]} ({first[key].why})" for key in counted if outcomes[key] == {"failed"}
    ]
    problems += [f"no test {name}" for name in wanted or () if name not in names.values()]
    flags = sorted({flag for trial in trials for flag in trial.flags} - HARMLESS)
    problems += [f"the gold patch: {flag}" for flag in flags]
    tests = {key: names[key] for key in counted if outcomes[key] == {"passed"} and key not in flaky}
    if not tests:
        problems.append("the gold patch passes no test")
    if len(set(tests.values())) < len(tests):
        problems.append("two tests have one id")
    return Validation(
        problems=tuple(problems),
        plan=Plan(digest=digest(task), tests=tests),
        flaky=tuple(names[key] for key in flaky),
        left_out=tuple(names[key] for key in counted if outcomes[key] == {"skipped"}),
        output=trials[0].output if problems else "",
    )


def seen_to_fail(
    task: Task,
    gold: Mapping[str, bytes],
    plan: Plan,
    proposed: Sequence[Candidate],
    backend: Backend,
    timeout_s: float,
    spec: SandboxSpec | None,
) -> list[Twin]:
    """Which of the changes fail, on an assertion, what they change. Each round runs the tests that it changes and no others."""
    of_base: dict[str, list[str]] = {}
    for key in plan.tests:
        of_base.setdefault(key.rpartition("#")[0], []).append(key)
    rounds: list[list[Candidate]] = []
    for candidate in proposed:  # in one round at most one change for each test
        if of_base.keys().isdisjoint(candidate.bases):
            continue
        place = next((r for r in rounds if not any(_meet(candidate, other) for other in r)), None)
        if place is None:
            rounds.append(place := [])
        place.append(candidate)
    changed = [sorted({base for candidate in each for base in candidate.bases}) for each in rounds]
    keys = [[key for base in bases for key in of_base.get(base, ())] for bases in changed]
    jobs = [job(task, gold, [_twin(c) for c in each], frozenset(k)) for each, k in zip(rounds, keys, strict=True)]
    jobs = [replace(each, test_s=TEST_S) for each in jobs]
    ran = run_jobs(backend, jobs, timeout_s=timeout_s, spec=spec)
    twins = [t for each, k, run in zip(rounds, keys, ran, strict=True) for t in _made(k, each, run)]
    strong = {key for twin in twins if twin.kind != "negation" for key in twin.keys}
    return [twin for twin in twins if twin.kind != "negation" or strong.isdisjoint([*twin.keys, *twin.besides])]


def _made(tests: Iterable[str], round: Sequence[Candidate], run: Ran) -> Iterator[Twin]:
    """The changes of one round that became twins, with the tests that they make fail."""
    failed = {
        key: run.results.get(key, Result(outcome="missing"))
        for key in tests
        if not (key in run.results and run.results[key].passed)
    }
    # A row that is not the test of its number, as where a fixture multiplies the tests.
    strays = {key.rpartition("#")[0] for key in failed if not any(candidate.changes(key) for candidate in round)}
    for candidate in round:
        keys = [key for key in failed if candidate.changes(key)]
        if keys and strays.isdisjoint(candidate.bases) and all(_tells(candidate, failed[key]) for key in keys):
            besides = [key for key in tests if candidate.changes(key) and key not in failed]
            yield _twin(candidate, keys, besides)


def _meet(one: Candidate, other: Candidate) -> bool:
    """Whether two changes may touch the same test."""
    return not set(one.bases).isdisjoint(other.bases) and (None in (one.row, other.row) or one.row == other.row)


def _tells(candidate: Candidate, result: Result) -> bool:
    """Whether a changed test failed because of what was changed in it."""
    if result.outcome != "failed":
        return False
    return result.why not in NEVER_A_TWIN if candidate.kind == "exception" else result.why in ON_ASSERTION


def _twin(candidate: Candidate, keys: Sequence[str] = (), besides: Sequence[str] = ()) -> Twin:
    return Twin(
        path=candidate.path,
        start=candidate.start,
        end=candidate.end,
        text=candidate.text,
        kind=candidate.kind,
        weak=candidate.weak,
        keys=tuple(keys),
        besides=tuple(besides),
    )
