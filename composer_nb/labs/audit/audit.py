"""Audit a set of tasks, or an environment of one's own, before it trains anything: `composer-nb audit`.

Each task is graded with workspaces that it must accept and workspaces that it must refuse (`probes.py`). Its solution is graded
several times, also by its tests with every assertion negated, by the visible tests, and with a clock that is ahead. What an agent
can read is searched for answers, and for the names that it must use (`leaks.py`). An environment's own reward must pay the
solution more than any wrong workspace, and more than idle talk.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, cast

from composer_nb.harness.agent.loop import Conversation
from composer_nb.harness.grading.box import Boxes, RunnerEnded
from composer_nb.harness.grading.check import workspace_of
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import PLAN, digest, job, plan_of, with_plan
from composer_nb.harness.grading.pytest_grader import grade_pytest
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.requests import Executor
from composer_nb.harness.syntax import literal_eval
from composer_nb.harness.tasks.functions import literal, parse_test_files, request_tests
from composer_nb.harness.tasks.history import committed
from composer_nb.harness.tasks.runtime import limits_spec
from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.probes import (
    CLOCK_READ,
    Files,
    Probe,
    changed_code,
    contradicted,
    later,
    leaks,
    near,
    probes,
    untold,
)

Rewards = Callable[[Rollout, Grade], float]
Box = Executor | Backend
# Kinds of problems, with what is wrong.
Problems = Iterator[tuple[str, str]]
Found = Iterable[tuple[str, Task | ValueError]]
Counts = dict[str, Counter[str]]
# Grades of a solution that must agree.
REPEATS = 3
# A time limit is this many times what the slowest grade of the solution took, at least.
SLACK = 10
KINDS = ("unreadable", "false negative", "false positive", "unstable", "leak", "time limit", "reward", "unknown")
# Seconds by which a clock is ahead.
LATER = 400 * 24 * 3600
# Time limit of the visible tests of the grader `pytest`.
SHOWN_S = 20.0
# Beginning of what is wrong with a task of the grader `pytest` -> its kind.
INVALID = {"the gold patch": "false negative", "all tests pass": "false positive"}
# Turns of an agent that works, whatever it leaves in the workspace.
WORK: tuple[Turn, ...] = (
    Turn(call='{"name": "read_file", "arguments": {"target_file": "README.md"}}', observation="It is a project. " * 20),
    Turn(call='{"name": "write", "arguments": {"file_path": "a.py", "contents": "x = 1"}}', observation="written"),
    Turn(call='{"name": "run_tests", "arguments": {}}', observation="1 passed", tests_passed=1, tests_run=1),
)
READ = Turn(call='{"name": "list_dir", "arguments": {"target_directory": "."}}', observation="a.py")
# Turns of agents that change nothing.
TALK: Mapping[str, tuple[Turn, ...]] = {
    "twenty reads": (READ,) * 20,
    "a long answer": (Turn(call="", observation="", said="All that was asked is done. " * 200),),
    "a claim": (Turn(call="", observation="", said="I ran the tests. All tests pass."),),
    "no turn at all": (),
}


def audit(
    tasks: Found, backend: str = "bwrap", *, seconds: float = 55.0, seed: int = 0, pays: Rewards | None = None
) -> dict[str, Any]:
    """Audit tasks in a random order, until the time is up.

    Args:
        seconds: after these no further task is begun.
        pays: an environment's own reward.

    Returns: `tasks`, a row for each that was audited (`id`, `grader`, `problems` as pairs of a kind of KINDS and a text, `slips`:
        planted bugs that were found and tried, `seconds`, `limit_s`: a time limit that would fit), and of all `read`, `audited`,
        `sound`, `problems` by kind, `probes` by name (`tried`, `wrong`) and `seconds`.

    Raises SandboxUnavailable where the backend does not work here.
    """
    began, sources = time.monotonic(), list(tasks)
    Random(seed).shuffle(sources)
    tasks_by_id = Counter(task.id for _, task in sources if isinstance(task, Task))
    counts: Counts = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        graders = {task.grader for _, task in sources if isinstance(task, Task)}
        calls = stack.enter_context(SandboxExecutor()) if "functions" in graders else None
        boxes = stack.enter_context(open_backend(backend)) if graders - {"functions"} else None
        for source, task in sources:
            if rows and time.monotonic() - began > seconds:
                break
            if isinstance(task, ValueError):
                rows.append(_row(source, "", [("unreadable", str(task))]))
                continue
            sandbox = calls if task.grader == "functions" else boxes
            assert sandbox is not None
            row = audit_task(task, sandbox, counts, pays)
            if tasks_by_id[task.id] > 1:
                row["problems"].append(("unreadable", f"several tasks are named {task.id!r}"))
            rows.append(row)
    return {
        "tasks": sorted(rows, key=lambda row: row["id"]),
        "read": len(sources),
        "audited": len(rows),
        "sound": sum(not row["problems"] for row in rows),
        "problems": Counter(kind for row in rows for kind in {kind for kind, _ in row["problems"]}),
        "probes": {name: {**probe_counts} for name, probe_counts in counts.items()},
        "seconds": time.monotonic() - began,
    }


def _row(id: str, grader: str, problems: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {"id": id, "grader": grader, "problems": problems, "slips": (0, 0), "seconds": 0.0, "limit_s": None} | more


def audit_task(task: Task, sandbox: Box, counts: Counts, pays: Rewards | None = None) -> dict[str, Any]:
    """Return a task's row, and add to `counts` how many of each probe were tried and graded wrongly."""
    began = time.monotonic()
    row = _row(task.id, task.grader, [])
    try:
        row["problems"] += _problems(task, sandbox, counts, pays, row)
    except (ValueError, SandboxUnavailable, SandboxFailure, SandboxDied) as error:
        row["problems"].append(("unreadable", str(error).removeprefix(f"task {task.id}: ")))
    return row | {"seconds": time.monotonic() - began}


def _problems(task: Task, sandbox: Box, counts: Counts, pays: Rewards | None, row: dict[str, Any]) -> Problems:
    """Yield the problems of a task, each a kind of KINDS and a text; count probes in `counts`, and slips and times in `row`."""
    if task.grader == "pytest" and PLAN not in task.metadata:
        validation = validate_task(task, cast(Backend, sandbox))
        if validation.flaky:
            yield "unstable", f"tests disagree with themselves: {', '.join(validation.flaky[:3])}"
        if validation.plan is None or not validation.valid:
            why = (validation.problems or ("it cannot be graded",))[0]
            if not validation.flaky:
                yield next((kind for prefix, kind in INVALID.items() if why.startswith(prefix)), "unreadable"), why
            return
        task = with_plan(task, validation.plan)
    start, gold = (workspace_of(task, sandbox, solved) for solved in (False, True))
    if start == gold:
        yield "false negative", "it has no solution"
    graded = list(_graded(task, sandbox, probes(task, start, gold), gold))
    yield from _judged(graded, counts)
    failed_tests = next(first_grade.failed for probe, first_grade in graded if probe.name == "no change")
    passed_before, passed_after = _shown(task, sandbox, start, gold)
    passing, failing = (
        {key.rpartition("#")[0] for key, ok in passed_before.items() if ok == outcome} for outcome in (True, False)
    )
    for leak in leaks(task, start, gold, () if task.grader == "script" else failed_tests, passing - failing):
        yield "leak", leak
    if names := untold(task, start, gold):
        yield "false negative", f"tests need names that nothing tells an agent: {', '.join(names[:3])}"
    slip_found = [not probe_grade.passed for probe, probe_grade in graded if probe.slip]
    row["slips"] = (sum(slip_found), len(slip_found))
    yield from _repeated(task, sandbox, gold, graded[0][1], row)
    yield from _contradicted(task, sandbox, gold)
    if refused := [name for name, passed in passed_after.items() if passed_before.get(name) and not passed]:
        yield "false negative", f"visible tests refuse the solution: {', '.join(refused[:3])}"
    yield from _dated(task, sandbox, start, gold)
    yield from _paid(task, graded, pays) if pays else ()


def _graded(task: Task, sandbox: Box, candidates: Iterable[Probe], gold: Files) -> Iterator[tuple[Probe, Grade]]:
    limit, quick = 60.0, task
    for probe in candidates:
        probe = replace(probe, files=committed(task, probe.files))
        if probe.slip and task.grader == "pytest":  # a bug may loop for ever
            result = grade_pytest(task, probe.files, cast(Backend, sandbox), timeout_s=limit)
            if not result.passed:
                yield probe, result
                continue
        result = grade(quick if probe.slip else task, probe.files, sandbox)
        if probe.name == "the solution":
            took = result.cost.get("wall_s", limit / 2)
            limit = max(5.0, min(limit, SLACK * took), 2 * took)  # of a slow solution, too, a bug is found by its tests
            quick = limited(task, limit)
        if not (probe.example and result.passed) or _differ(task, cast(Executor, sandbox), probe.files, gold):
            yield probe, result


def limited(task: Task, seconds: float) -> Task:
    """Return a task of the grader `script` with a lower time limit of its tests, if its task.toml names one."""
    if task.kept is None or task.settings.verifier.timeout_sec <= seconds:
        return task
    toml = re.sub(r"(?m)(^\[verifier\][^\[]*?^timeout_sec *= *)[\d.]+", rf"\g<1>{seconds:g}", task.kept.toml)
    return task.model_copy(update={"kept": task.kept.model_copy(update={"toml": toml})})


def _differ(task: Task, calls: Executor, files: Files, gold: Files) -> bool:
    """Return whether a call like those of the hidden tests has another value than with the solution."""
    tests = [
        replace(test, arguments=literal(arguments))
        for test in parse_test_files(task.tests)
        for arguments in near(literal_eval(test.arguments))
    ]
    texts = [{path: data.decode("utf-8", "replace") for path, data in workspace.items()} for workspace in (files, gold)]
    outcomes, other = calls.run([request_tests(part, tests) for part in texts]) if tests else ((), ())
    return any(a != b and a.status == b.status == "returned" for a, b in zip(outcomes, other, strict=True))


def _judged(graded: Iterable[tuple[Probe, Grade]], counts: Counts) -> Problems:
    """Yield the probes that were graded wrongly. Planted bugs count only where all of them pass."""
    slips, idle, refused = [], False, False
    for probe, result in graded:
        count = counts.setdefault("planted bugs" if probe.slip else probe.name, Counter(tried=0, wrong=0))
        count["tried"] += 1
        count["wrong"] += result.passed != probe.right
        if not result.known:
            yield "unknown", f"{probe.name}: {result.status}{': ' + result.output[-200:] if result.output else ''}"
        elif probe.slip:
            slips.append(result.passed)
        elif result.passed and not probe.right and not idle:
            idle = probe.name == "no change"  # which explains those that follow
            yield "false positive", f"accepts: {probe.name}"
        elif probe.right and not result.passed and not refused:
            refused = True
            why = ", ".join([*result.failed[:2], *sorted({*result.flags} - {"weak"})]) or result.status
            yield "false negative", f"refuses {probe.name} ({why})"
    if len(slips) > 2 and all(slips):
        yield "false positive", f"accepts the solution with any of {len(slips)} planted bugs"


def _repeated(task: Task, sandbox: Box, gold: Files, first: Grade, row: dict[str, Any]) -> Problems:
    """Yield whether grades of the solution differ, or nearly reach the task's time limit."""
    more = [grade(task, gold, sandbox, anew=True) for _ in range(REPEATS - 1)]
    different = {name for other in more for name, passed in other.tests.items() if first.tests.get(name) != passed}
    if different:
        yield "unstable", f"grades of the solution differ: {', '.join(sorted(different)[:3])}"
    slowest = max(result.cost.get("wall_s", 0.0) for result in (first, *more))
    row["limit_s"] = math.ceil(SLACK * slowest) or None
    if task.grader == "script" and (limit := task.settings.verifier.timeout_sec) < SLACK * slowest:
        yield "time limit", f"verifier.timeout_sec = {limit:g}, and the solution's tests took {slowest:.1f} s"


def _contradicted(task: Task, sandbox: Box, gold: Files) -> Problems:
    """Yield whether the solution passes tests that say the opposite."""
    twin = contradicted(task)
    if twin is None:
        return
    if task.grader == "pytest":
        twin = with_plan(twin, replace(plan_of(task), digest=digest(twin), twins=(), calls=()))
    result = grade(twin, gold, sandbox)
    if result.passed:
        yield "false positive", "the solution passes the hidden tests with every assertion negated"


def _shown(task: Task, sandbox: Box, start: Files, gold: Files) -> tuple[Mapping[str, bool], Mapping[str, bool]]:
    """Return which visible tests pass at the start and on the solution. Tests that a task asks for are not among them."""
    texts = {path: data.decode("utf-8", "replace") for path, data in gold.items() if path in start}
    if task.grader == "functions" and (visible := {path: texts[path] for path in task.visible_tests if path in texts}):
        twin = task.model_copy(update={"tests": visible, "metadata": {}, "strictness": "tests"})
        passed_before, passed_after = (grade(twin, files, sandbox).tests for files in (start, gold))
        return passed_before, passed_after
    visible = {path: text for path, text in texts.items() if is_test_module(path)} if task.grader == "pytest" else {}
    jobs = [job(task.model_copy(update={"tests": visible}), files) for files in (start, gold)] if visible else []
    boxes = Boxes(backend=cast(Backend, sandbox), spec=limits_spec(task), timeout_s=SHOWN_S)
    try:
        passed_by_run = [{key: result.passed for key, result in run.results.items()} for run in boxes.run(jobs)]
    except (SandboxDied, RunnerEnded):
        passed_by_run = []
    return (passed_by_run[0], passed_by_run[1]) if passed_by_run else ({}, {})


def _dated(task: Task, sandbox: Box, start: Files, gold: Files) -> Problems:
    """Yield whether the solution fails when the clock is ahead, if it reads the clock and its tests do not."""
    changed = changed_code(start, gold)
    if not any(map(CLOCK_READ.search, changed.values())) or any(map(CLOCK_READ.search, task.tests.values())):
        return
    grade_now, grade_later = (grade(task, {**gold, **later(changed, seconds)}, sandbox) for seconds in (0, LATER))
    if grade_now.passed and grade_later.known and not grade_later.passed:
        refused = f"400 days from now the solution is refused ({', '.join(grade_later.failed[:2])})"
        yield "unstable", f"{refused}: tests hold today's date"


def _paid(task: Task, graded: list[tuple[Probe, Grade]], pays: Rewards) -> Problems:
    """Yield what an environment's reward pays at least as well as the solution."""

    rewards: dict[str, float] = {}
    [no_change] = [(probe, result) for probe, result in graded if probe.name == "no change"]
    cases = [(probe.name, probe, result, WORK) for probe, result in graded]
    cases += [(name, *no_change, turns) for name, turns in TALK.items()]
    for name, probe, result, turns in cases:
        texts = {path: data.decode("utf-8", "surrogateescape") for path, data in probe.files.items()}
        read = sum(len(turn.observation) for turn in turns) // 4
        written = sum(len(turn.call + turn.said) for turn in turns) // 4
        conversation = Conversation(turns=turns, stop="finished", read=read, written=written)
        try:
            if result.known:
                rewards[name] = float(pays(conversation.rollout(task.id, (), texts, task.files), result))
        except Exception as error:  # the environment's own code
            yield "reward", f"for {name} it raises {type(error).__name__}: {error}"
            return
    gold_reward = rewards.get("the solution", math.nan)
    if not all(map(math.isfinite, rewards.values())):
        yield "reward", "it is not a finite number"
    exempt = {probe.name for probe, _ in graded if probe.right or probe.slip}
    if overpaid := [name for name, value in rewards.items() if name not in exempt and value >= gold_reward]:
        highest = max(rewards[name] for name in overpaid)
        overpaid_names = ", ".join(overpaid[:3]) + (f" and {len(overpaid) - 3} more" if len(overpaid) > 3 else "")
        yield "reward", f"pays {gold_reward:g} for the solution, and up to {highest:g} for: {overpaid_names}"
