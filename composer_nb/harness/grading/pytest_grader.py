"""The grader `pytest`: run a task's hidden pytest tests on the files that an agent left, in fresh sandboxes.

    agent's files -> changes inside the source scope (`diff.py`) -> over the task's own files
                  -> a new sandbox per run, without network; tests sealed, twins in place of some (`guest/runner.py`, `plan.py`)
                  -> the result of each test in the plan; a missing result is a failure
                  -> the comparison of expected with reported results, outside the sandbox

* A test passes if it passed under its own node id in every run that executed it, and its twin passed in none. Code that supplies
  a table of parameters therefore cannot put one row in another's place.
* A test that passed, and whose twin passed too, proves that something other than a correct solution makes tests pass: `tampered`.
  A twin that passes where the test failed proves nothing, because wrong solutions do that; it scores nothing.
* Where recorded calls are no guard, a few tests also run alone, each as itself or as its twin, in processes that hold nothing
  else (`alone.py`): expectations that stand in one process may explain one another.
* Foreign lines on the result channel and a changed report file are `tampered` too.

Limits: tests without a twin are only as safe as a process that agent code shares with pytest, which in principle is not at all.
The plan's `coverage` says how many have one. Where tests can be written as calls with plain values, the grader `functions`
guarantees more.

References: SWE-smith #24 (missing counted as passed), SWE-bench #601 and 5.0's cross-check of exit codes (forged output), Harbor
#1779 (a separate sandbox alone does not stop the code that it executes).
"""

import random
import time
from collections.abc import Mapping, Sequence
from itertools import islice

from composer_nb.harness.grading.alone import lone_job
from composer_nb.harness.grading.box import Boxes, JobResult, RunnerEnded
from composer_nb.harness.grading.diff import changes
from composer_nb.harness.grading.grade import Grade, Status
from composer_nb.harness.grading.plan import GradePlan, Runs, Twin, draw, job, plan_of
from composer_nb.harness.grading.recorded import INDEPENDENT, enough, replay, wrong
from composer_nb.harness.grading.written import grade_written
from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.tasks import harbor
from composer_nb.harness.tasks.runtime import limits_spec
from composer_nb.harness.tasks.task import Task

TAMPERING = {"twin_passed", "forged_events", "forged_report"}
# Meaning of each flag of a grade.
FLAGS = {
    "outside_scope": "a change outside the source scope, which was dropped",
    "test_setup": "a changed conftest, ini file or the like inside the scope, which was dropped",
    "too_large": "a change that was dropped because it, or all changes together, are too large",
    "unsafe_path": "a path that leads out of the workspace or that no sandbox could write",
    "conflict": "a file where a folder of the task lies, or the other way round",
    "twin_passed": "a test passed, and so did its twin",
    "forged_events": "something else than the runner wrote on the result channel",
    "forged_report": "something wrote a test report",
    "printed_results": "something printed lines that look like pytest's",
    "read_tests": "something read where the hidden tests would lie",
    "ended_early": "the tests' process ended before the tests had",
    "timeout": "the tests did not end in time",
    "calls_disagree": "every test passed, but a recorded call gave another value than the gold patch",
    "inconsistent": "a test, or its twin, passed in one run and not in another: chance decides, or guessing",
}
SECONDS = "pytest.seconds"  # Metadata key of the time limit of one run, which a suite that takes long needs.
# Runs of a grade. Code that decides at random in each run is right about one test with probability 1 / (2^RUNS - 2); code
# that decides by the test's text is right at best once in two, whatever the number of runs.
RUNS = 3


RUN_S = 60.0  # Time limit of one run, in seconds, of a task that states none.


def limit_of(task: Task) -> float:
    """Return the time limit in seconds of one run of a task's tests: its metadata's, else that of its task.toml. Raises
    ValueError if it is not above 0."""
    verifier = task.settings.verifier if task.kept else harbor.Verifier()
    stated = verifier.timeout_sec if "timeout_sec" in verifier.model_fields_set else RUN_S
    if not 0 < (seconds := float(task.metadata.get(SECONDS, stated))) < float("inf"):
        raise ValueError(f"task {task.id}: {SECONDS} {seconds}: must be above 0")
    return seconds


def grade_pytest(
    task: Task,
    files: Mapping[str, bytes],
    backend: Backend,
    plan: GradePlan | None = None,
    *,
    timeout_s: float = 0.0,
    spec: SandboxSpec | None = None,
    rng: random.Random | None = None,
) -> Grade:
    """Grade `files`, a whole workspace.

    What the sandbox or the agent did is in the grade's status. A task without a valid plan grades as `invalid_task`.

    Args:
        plan: replaces the plan in the task's metadata.
        timeout_s: time limit of one run, in seconds; 0 takes the task's, or else 60 s.
        rng: draws the twins. Agent code must not be able to predict it; the default is the system's generator.

    Raises SandboxUnavailable if pytest is missing, or does not fit the sandboxes' Python.
    """
    began = time.monotonic()
    edits = changes(task, files)
    try:
        plan, timeout_s = plan or plan_of(task), timeout_s or limit_of(task)
    except ValueError:
        return Grade(status="invalid_task", flags=edits.flags)
    boxes = Boxes(backend=backend, spec=spec or limits_spec(task), timeout_s=timeout_s)
    if task.mutants:
        return grade_written(task, edits, plan, boxes)
    rng = rng or random.SystemRandom()
    lone = draw_alone(plan, rng)
    twin_sets = draw(plan, rng, 2 if lone else RUNS)
    jobs = [job(task, edits.files, twins, frozenset(plan.tests)) for twins in twin_sets]
    jobs += filter(None, (lone_job(task, edits.files, twin, changed) for twin, changed in lone))
    if len(jobs) < len(twin_sets) + len(lone):  # a test no longer stands alone: validate the task again
        return Grade(status="invalid_task", flags=edits.flags)
    replays = replay(edits.files, plan.calls, rng)
    jobs += [call_job for call_job, _ in replays]
    try:
        ran = boxes.run(jobs)
    except SandboxFailure as error:
        cost = {"wall_s": time.monotonic() - began}
        return Grade(status="infra_error", flags=edits.flags, cost=cost, output=str(error))
    except (SandboxDied, RunnerEnded):
        early = tuple(sorted({*edits.flags, "ended_early"}))
        nothing = dict.fromkeys(plan.tests.values(), False)
        return Grade(status="agent_failed", tests=nothing, flags=early, cost={"wall_s": time.monotonic() - began})
    results = iter(ran)
    tests, flags = judge(plan, twin_sets, [*islice(results, len(twin_sets))])
    flags |= _judge_alone(plan, lone, [*islice(results, len(lone))], tests)
    answered = [*results]
    failed = [call for (_, order), answer in zip(replays, answered, strict=True) for call in wrong(order, answer)]
    flags |= {*edits.flags, *(flag for answer in answered for flag in answer.flags)}
    if failed and all(tests.values()):
        flags.add("calls_disagree")
    cost = {"wall_s": time.monotonic() - began, "tests_s": sum(run.seconds for run in ran)}
    status: Status = "tampered" if flags & TAMPERING else "graded"
    return Grade(
        status=status,
        tests=tests,
        flags=tuple(sorted(flags)),
        calls=len(plan.calls),
        calls_failed=len(failed),
        timeouts=sum("timeout" in run.flags for run in ran),
        cost=cost,
    )


def judge(plan: GradePlan, twin_sets: Runs, ran: Sequence[JobResult]) -> tuple[dict[str, bool], set[str]]:
    """Return whether each test passed, by node id, and the flags."""
    flags = {flag for run in ran for flag in run.flags}
    twins = [{key for twin in run for key in twin.keys} for run in twin_sets]
    changed = [{_function(key) for key in keys} for keys in twins]
    tests: dict[str, bool] = {}
    for key, name in plan.tests.items():
        real, twin, named = set[bool](), set[bool](), True
        for number, run in enumerate(ran):
            result = run.result(key)
            if key in twins[number]:
                twin.add(result.passed)
            else:
                real.add(result.passed)
                if result.passed and result.id != name:
                    named &= _function(key) in changed[number] and same_id(result.id, name)
        if False not in real and True in twin:
            flags.add("twin_passed")
        if len(real) > 1 or len(twin) > 1:
            flags.add("inconsistent")
        tests[name] = False not in real and named and True not in twin
    return tests, flags


Lone = list[tuple[Twin, bool]]  # Tests that run alone: a twin of each, and whether it replaces the test.


def draw_alone(plan: GradePlan, rng: random.Random) -> Lone:
    """Draw the tests that a grade runs alone, each as itself or as its twin. None, where recorded calls are enough, or where too
    few tests can stand alone to guard anything."""
    twins: dict[str, list[Twin]] = {}
    for twin in plan.twins:
        if twin.alone:
            twins.setdefault(twin.keys[0], []).append(twin)
    if len(twins) < INDEPENDENT or enough(plan.calls):
        return []
    return [(rng.choice(twins[key]), rng.random() < 0.5) for key in rng.sample(sorted(twins), INDEPENDENT)]


def _judge_alone(plan: GradePlan, lone: Lone, ran: Sequence[JobResult], tests: dict[str, bool]) -> set[str]:
    """Mark in `tests` those that failed as themselves or passed as their twins. Return the flags."""
    flags = {flag for run in ran for flag in run.flags}
    for (twin, changed), run in zip(lone, ran, strict=True):
        name = plan.tests[twin.keys[0]]
        passed = any(result.passed for result in run.results.values())
        if tests[name] and passed == changed:
            flags.add("twin_passed" if changed else "inconsistent")
        tests[name] &= passed != changed
    return flags


def same_id(first: str, second: str) -> bool:
    """Return whether two node ids differ at most in the number that pytest appends to rows that look alike.

    A changed row may make another row look like it, or no longer like it.
    """
    ones, twos = [{text, _without_number(text)} for text in (first, second)]
    return not ones.isdisjoint(twos)


def _without_number(name: str) -> str:
    """Return a node id without the number at its end, in time linear in its length: a run may claim ids of any length."""
    inside = name.removesuffix("]")
    rest = inside.rstrip("0123456789")
    return name if inside == name or rest == inside else rest.removesuffix("_") + "]"


def _function(key: str) -> str:
    """Return the test function of a key."""
    return key.rpartition("#")[0]
