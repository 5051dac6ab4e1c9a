"""The grader `pytest`: a task's hidden pytest tests, run on the files that an agent left, in a fresh sandbox.

In the order of things: the agent's changes, restricted to the source scope, over the task's own files (`diff.py`); for each run
a new sandbox without network, in which nothing of the agent ran before; the hidden tests sealed, with twins in place of some
(`runner.py`, `plan.py`); a result for exactly the tests of the plan, where one that is missing failed; and only here, outside,
the comparison of what should have passed with what did.

What follows from it:
* a test passes if it passed in every run in which it was itself, under its own node id (so that code that a table of parameters
  comes from can not put one row in another's place), and its twin in none;
* a test that passed *and* whose twin passed is proof that something else than a right answer makes tests pass: `tampered`.
  A twin that passes where the test itself failed proves nothing: wrong answers do that, and get no score for it;
* some twins are weak: an exception may be of two kinds at once, an assertion in a loop may never be reached. They fail the test,
  and prove nothing;
* lines on the result channel that are not the runner's, or a report file that changed, are `tampered` too.

What it can not promise: tests without a twin are only as safe as one process that agent code shares with pytest, which in
principle is not at all; the plan's `coverage` says how many have one. Wherever tests can be put as calls with plain values, the
grader `functions` promises more.

References: SWE-smith #24 (missing counted as passed), SWE-bench #601 and 5.0's cross-check of exit codes (forged output),
Harbor #1779 (a separate sandbox alone does not stop what it executes).
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from composer_nb.harness.calls import SandboxFailure
from composer_nb.harness.grade import Grade, Status
from composer_nb.harness.grading.box import Job, Ran, RunnerEnded, run_jobs
from composer_nb.harness.grading.diff import changes
from composer_nb.harness.grading.plan import (
    Drawn,
    Plan,
    Twin,
    changed_text,
    conftests,
    draw,
    modules_of,
    normal,
    plan_of,
)
from composer_nb.harness.grading.scope import is_test_module
from composer_nb.harness.sandboxes.contract import Backend, SandboxDied, SandboxSpec
from composer_nb.harness.task import Task

TAMPERING = {"twin_passed", "forged_events", "forged_report"}
FLAGS = {
    "outside_scope": "a change outside the source scope, which was dropped",
    "test_setup": "a changed conftest, ini file or the like inside the scope, which was dropped",
    "too_large": "a change that was dropped because it, or all of them together, are too large",
    "unsafe_path": "a path that leads out of the workspace or that no sandbox could write",
    "conflict": "a file where a folder of the task lies, or the other way round",
    "twin_passed": "a test passed, and so did its twin",
    "weak_twin_passed": "a test passed, and so did a twin of it that honest code may pass: the test does not count",
    "forged_events": "something else than the runner wrote on the result channel",
    "forged_report": "something wrote a test report",
    "printed_results": "something printed lines that look like pytest's",
    "read_tests": "something read where the hidden tests would lie",
    "ended_early": "the tests' process ended before the tests had",
    "timeout": "the tests did not end in time",
    "inconsistent": "a test, or its twin, passed in one run and not in another: chance decides, or guessing",
}
"""What the flags of a grade mean."""


RUNS = 3
"""How often a grade runs the tests, unless told otherwise. Code that decides by chance, run by run, is right about one test with
probability 1 / (2^RUNS - 2); code that decides by what the test says, at best 1 / 2, whatever the number."""


def grade_pytest(
    task: Task,
    files: Mapping[str, bytes],
    backend: Backend,
    plan: Plan | None = None,
    *,
    runs: int = RUNS,
    timeout_s: float = 60.0,
    spec: SandboxSpec | None = None,
    lot: random.Random | None = None,
) -> Grade:
    """Grades `files`, a whole workspace, for at most `timeout_s` seconds a run.

    `plan` is the one in the task's metadata unless given. `lot` draws the twins; it must be one that agent code can not foresee,
    and is the system's own by default: what is graded must not depend on it. Raises nothing for what the sandbox or the agent
    did: the grade's status says it; a task without a valid plan gets `invalid_task`. Raises SandboxUnavailable where there is no
    pytest, or one that is not for the sandboxes' Python.
    """
    began = time.monotonic()
    found = changes(task, files)
    try:
        plan = plan or plan_of(task)
    except ValueError:
        return Grade(status="invalid_task", flags=found.flags)
    drawn = draw(plan, lot or random.SystemRandom(), runs)
    jobs = [job(task, found.files, twins, frozenset(plan.tests)) for twins in drawn.runs]
    try:
        ran = run_jobs(backend, jobs, timeout_s=timeout_s, spec=spec)
    except SandboxFailure:
        return Grade(status="infra_error", flags=found.flags, cost={"wall_s": time.monotonic() - began})
    except (SandboxDied, RunnerEnded):
        flags = tuple(sorted({*found.flags, "ended_early"}))
        nothing = dict.fromkeys(plan.tests.values(), False)
        return Grade(status="agent_failed", tests=nothing, flags=flags, cost={"wall_s": time.monotonic() - began})
    tests, flagged = judge(plan, drawn, ran)
    flagged |= set(found.flags)
    cost = {"wall_s": time.monotonic() - began, "tests_s": sum(run.seconds for run in ran)}
    status: Status = "tampered" if flagged & TAMPERING else "graded"
    return Grade(status=status, tests=tests, flags=tuple(sorted(flagged)), cost=cost)


def job(task: Task, files: Mapping[str, bytes], twins: Sequence[Twin], keys: frozenset[str] | None) -> Job:
    """One run of a task's hidden tests on `files`, all or those of `keys`, with some twins in place of their tests."""
    modules = {path: text for path, text in task.tests.items() if path.endswith(".py")}
    sealed = conftests(task) | modules
    for path, text in sealed.items():
        sealed[path] = normal(changed_text(text, [twin for twin in twins if twin.path == path]))
    data = {path: text.encode() for path, text in task.tests.items() if path not in modules}
    plain = {path: content for path, content in files.items() if path not in sealed}
    tests = tuple(sorted(filter(is_test_module, modules))) if keys is None else modules_of(keys)
    return Job(files=plain | data, hidden=sealed, tests=tests, keys=keys)


def judge(plan: Plan, drawn: Drawn, ran: Sequence[Ran]) -> tuple[dict[str, bool], set[str]]:
    """Which tests passed, by node id, and flags."""
    flags = {flag for run in ran for flag in run.flags}
    twins = [drawn.twins(number) for number in range(len(ran))]
    void = [drawn.void(number) for number in range(len(ran))]
    tests: dict[str, bool] = {}
    for key, name in plan.tests.items():
        said = [key in run.results and run.results[key].passed for run in ran]
        twin = [passed for passed, keys in zip(said, twins, strict=True) if key in keys]
        named = [key in run.results and run.results[key].id == name for run in ran]
        itself = [number for number in range(len(ran)) if key not in twins[number] | void[number]]
        real = [said[number] for number in itself]
        if all(real) and any(twin):
            if any(key in drawn.weak(run) for run in range(len(ran))):
                flags.add("weak_twin_passed")
            else:
                flags.add("twin_passed")
        if len(set(real)) > 1 or len(set(twin)) > 1:
            flags.add("inconsistent")
        tests[name] = all(real) and all(named[number] for number in itself) and not any(twin)
    return tests, flags
