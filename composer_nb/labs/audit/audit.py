"""Audit a set of tasks, or an environment of one's own, before it trains anything: `composer-nb audit`.

Each task is graded with workspaces that it must accept and workspaces that it must refuse (`probes.py`). Its solution is graded
several times, also by its tests with every assertion negated. What an agent can read is searched for answers (`leaks.py`). An
environment's own reward must pay the solution more than any wrong workspace, and more than idle talk.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, cast

from composer_nb.harness.agent.loop import Conversation
from composer_nb.harness.grading.check import workspace_of
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.grading.plan import PLAN, digest, plan_of, with_plan
from composer_nb.harness.grading.validate import validate_task
from composer_nb.harness.rollout import Rollout, Turn
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.calls import Executor, SandboxExecutor
from composer_nb.harness.sandbox.contract import Backend, SandboxDied, SandboxFailure, SandboxUnavailable
from composer_nb.harness.tasks.task import Task
from composer_nb.labs.audit.leaks import leaks
from composer_nb.labs.audit.probes import Files, Probe, contradicted, probes

Rewards = Callable[[Rollout, Grade], float]
Found = Iterable[tuple[str, Task | ValueError]]
REPEATS = 3
"""Grades of a solution that must agree."""
SLACK = 10
"""A time limit is this many times what the slowest grade of the solution took, at least."""
KINDS = ("unreadable", "false negative", "false positive", "unstable", "leak", "time limit", "reward", "unknown")
TALK: Mapping[str, tuple[Turn, ...]] = {
    "twenty reads": (Turn(call='{"name": "list_dir", "arguments": {"target_directory": "."}}', observation="a.py"),)
    * 20,
    "a long answer": (Turn(call="", observation="", said="All that was asked is done. " * 200),),
    "a claim": (Turn(call="", observation="", said="I ran the tests. All tests pass."),),
}
"""Turns of agents that change nothing."""


def audit(
    found: Found, backend: str = "bwrap", *, seconds: float = 55.0, seed: int = 0, pays: Rewards | None = None
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
    began, places = time.monotonic(), list(found)
    Random(seed).shuffle(places)
    twice = {
        name for name, count in Counter(task.id for _, task in places if isinstance(task, Task)).items() if count > 1
    }
    counts: dict[str, Counter[str]] = {}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        kinds = {task.grader for _, task in places if isinstance(task, Task)}
        calls = stack.enter_context(SandboxExecutor()) if "functions" in kinds else None
        boxes = stack.enter_context(open_backend(backend)) if kinds - {"functions"} else None
        for place, task in places:
            if rows and time.monotonic() - began > seconds:
                break
            if isinstance(task, ValueError):
                rows.append(_row(place, "", [("unreadable", str(task))]))
                continue
            sandbox = calls if task.grader == "functions" else boxes
            assert sandbox is not None
            row = audit_task(task, sandbox, counts, pays)
            if task.id in twice:
                row["problems"].append(("unreadable", f"several tasks are named {task.id!r}"))
            rows.append(row)
    return {
        "tasks": sorted(rows, key=lambda row: row["id"]),
        "read": len(places),
        "audited": len(rows),
        "sound": sum(not row["problems"] for row in rows),
        "problems": Counter(kind for row in rows for kind in {kind for kind, _ in row["problems"]}),
        "probes": {name: {**count} for name, count in counts.items()},
        "seconds": time.monotonic() - began,
    }


def _row(id: str, grader: str, problems: list[tuple[str, str]], **more: Any) -> dict[str, Any]:
    return {"id": id, "grader": grader, "problems": problems, "slips": (0, 0), "seconds": 0.0, "limit_s": None} | more


def audit_task(
    task: Task, sandbox: Executor | Backend, counts: dict[str, Counter[str]], pays: Rewards | None = None
) -> dict[str, Any]:
    """Return a task's row, and add to `counts` how many of each probe were tried and graded wrongly."""
    began = time.monotonic()
    row = _row(task.id, task.grader, [])
    try:
        if task.grader == "pytest" and PLAN not in task.metadata:
            task = _planned(task, cast(Backend, sandbox), row)
        start, gold = (workspace_of(task, sandbox, solved) for solved in (False, True))
        if start == gold:
            row["problems"].append(("false negative", "it has no solution"))
        graded = list(_graded(task, sandbox, probes(task, start, gold)))
        row["problems"] += _judged(graded, counts)
        failed = next(found.failed for probe, found in graded if probe.name == "no change")
        row["problems"] += [
            ("leak", text) for text in leaks(task, start, gold, () if task.grader == "script" else failed)
        ]
        row["slips"] = (
            sum(not found.passed for probe, found in graded if probe.slip),
            sum(probe.slip for probe, _ in graded),
        )
        row["problems"] += _repeated(task, sandbox, gold, graded[0][1], row)
        row["problems"] += _contradicted(task, sandbox, gold)
        row["problems"] += _paid(task, graded, pays) if pays else ()
    except (ValueError, SandboxUnavailable, SandboxFailure, SandboxDied) as error:
        row["problems"].append(("unreadable", str(error).removeprefix(f"task {task.id}: ")))
    return row | {"seconds": time.monotonic() - began}


def _planned(task: Task, backend: Backend, row: dict[str, Any]) -> Task:
    """Return a task of the grader `pytest` with its plan. Raises ValueError if it has none."""
    found = validate_task(task, backend)
    if found.plan is None or not found.valid:
        raise ValueError((found.problems or ("it cannot be graded",))[0])
    if found.flaky:
        row["problems"].append(("unstable", f"tests disagree with themselves: {', '.join(found.flaky[:3])}"))
    return with_plan(task, found.plan)


def _graded(task: Task, sandbox: Executor | Backend, given: Iterable[Probe]) -> Iterator[tuple[Probe, Grade]]:
    for probe in given:
        yield probe, grade(task, probe.files, sandbox)


def _judged(graded: Iterable[tuple[Probe, Grade]], counts: dict[str, Counter[str]]) -> Iterator[tuple[str, str]]:
    """Yield the probes that were graded wrongly. Planted bugs count only where all of them pass."""
    slips = []
    for probe, found in graded:
        count = counts.setdefault("planted bugs" if probe.slip else probe.name, Counter(tried=0, wrong=0))
        count["tried"] += 1
        count["wrong"] += found.passed != probe.right
        if not found.known:
            yield "unknown", f"{probe.name}: {found.status}{': ' + found.output[-200:] if found.output else ''}"
        elif probe.slip:
            slips.append(found.passed)
        elif found.passed and not probe.right:
            yield "false positive", f"accepts: {probe.name}"
        elif probe.right and not found.passed:
            why = ", ".join([*found.failed[:2], *found.flags]) or found.status
            yield "false negative", f"refuses {probe.name} ({why})"
    if len(slips) > 2 and all(slips):
        yield "false positive", f"accepts the solution with any of {len(slips)} planted bugs"


def _repeated(
    task: Task, sandbox: Executor | Backend, gold: Files, first: Grade, row: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield whether grades of the solution differ, or nearly reach the task's time limit."""
    more = [grade(task, gold, sandbox, anew=True) for _ in range(REPEATS - 1)]
    different = {name for other in more for name, passed in other.tests.items() if first.tests.get(name) != passed}
    if different:
        yield "unstable", f"grades of the solution differ: {', '.join(sorted(different)[:3])}"
    slowest = max(found.cost.get("wall_s", 0.0) for found in (first, *more))
    row["limit_s"] = math.ceil(SLACK * slowest) or None
    if task.grader == "script" and (limit := task.settings.verifier.timeout_sec) < SLACK * slowest:
        yield "time limit", f"verifier.timeout_sec = {limit:g}, and the solution's tests took {slowest:.1f} s"


def _contradicted(task: Task, sandbox: Executor | Backend, gold: Files) -> Iterator[tuple[str, str]]:
    """Yield whether the solution passes tests that say the opposite."""
    twin = contradicted(task)
    if twin is None:
        return
    if task.grader == "pytest":
        twin = with_plan(twin, replace(plan_of(task), digest=digest(twin), twins=(), calls=()))
    found = grade(twin, gold, sandbox)
    if found.passed:
        yield "false positive", "the solution passes the hidden tests with every assertion negated"


def _paid(task: Task, graded: list[tuple[Probe, Grade]], pays: Rewards) -> Iterator[tuple[str, str]]:
    """Yield what an environment's reward pays at least as well as the solution."""

    def of(probe: Probe, found: Grade, turns: tuple[Turn, ...] = ()) -> float:
        texts = {path: data.decode("utf-8", "surrogateescape") for path, data in probe.files.items()}
        return float(pays(Conversation(turns=turns, stop="finished").rollout(task.id, (), texts, task.files), found))

    try:
        paid = {probe.name: of(probe, found) for probe, found in graded if found.known}
        for probe, found in graded:
            if probe.name == "no change" and found.known:
                paid |= {name: of(probe, found, turns) for name, turns in TALK.items()}
    except Exception as error:  # the environment's own code
        yield "reward", f"it raises {type(error).__name__}: {error}"
        return
    best = paid.get("the solution", math.nan)
    if not all(map(math.isfinite, paid.values())):
        yield "reward", "it is not a finite number"
    right = {probe.name for probe, _ in graded if probe.right}
    for name, value in paid.items():
        if name not in right and not name.startswith("a planted bug") and value >= best:
            yield "reward", f"pays {value:g} for {name}, and {best:g} for the solution"
