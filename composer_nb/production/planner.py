"""The arm `planned` of the bench: one policy writes a plan, and the policy that is scored carries it out.

A plan is one message, written once for each task from its request and its files; calls that a planner writes are not carried out.
The policy finds the plan after the request, in the same message.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from composer_nb.harness.agent.chat import Said, User
from composer_nb.harness.agent.scripts import play
from composer_nb.harness.agent.turns import Script, TurnPolicy
from composer_nb.harness.files import write_atomic
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import opcodes

ASK = (
    "Another engineer will carry out the request below in the repository below. Write a short plan: which files and functions to "
    "change, how, and how to check it. Answer with the plan alone, and call no tool.\n\nRequest: {request}\n\n{files}"
)
# Characters of a repository that a planner reads.
SHOWN = 60_000


class TaskPlan(BaseModel, frozen=True):
    """A plan, and the tokens read and written for it, where they are counted."""

    text: str
    read: int
    written: int

    def given(self, task: Task) -> Task:
        """Return the task with the plan in its request; unchanged if the plan is empty."""
        planned = f"{task.instruction}\n\nplan:\n{self.text}" if self.text else task.instruction
        return task.model_copy(update={"instruction": planned})


def make_plans(
    tasks: Sequence[Task], cast: Callable[[Task, int], TurnPolicy], keep: Path, workers: int, seconds: float
) -> list[TaskPlan]:
    """Return a plan for each task, written within `seconds`, or read from the folder `keep`. Raises ProviderFailure, TimeIsUp."""
    keep.mkdir(parents=True, exist_ok=True)

    def one(number: int, task: Task) -> TaskPlan:
        path = keep / f"{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:24]}.json"
        if not path.is_file():
            files = "\n\n".join(f"{name}:\n{text}" for name, text in sorted(task.files.items()))[:SHOWN]
            turn_policy = cast(task, number)
            try:
                prompt = User(text=ASK.format(request=task.instruction, files=files))
                spoken = turn_policy.say([prompt], time.monotonic() + seconds)
            finally:
                held_tokens = sum(len(segment.token_ids) for segment in turn_policy.close())
            text, written = (spoken.said.text.strip(), spoken.written) if spoken else ("", 0)
            read = held_tokens - written if held_tokens else spoken.read if spoken else 0
            write_atomic(path, TaskPlan(text=text, read=read, written=written).model_dump_json())
        return TaskPlan.model_validate_json(path.read_bytes())

    with ThreadPoolExecutor(workers, thread_name_prefix="plan") as pool:
        return list(pool.map(one, range(len(tasks)), tasks))


def with_plans(
    row: dict[str, Any], plans: Sequence[TaskPlan], policy: str, price: tuple[float, float] | None
) -> dict[str, Any]:
    """Return the figures of an arm with those of its planner, whose tokens and dollars at `price` each attempt pays once: as many
    as a user would pay. Without a price there is no cost, unless the planner counts no tokens."""
    read, written = (float(np.mean([getattr(plan, name) for plan in plans])) for name in ("read", "written"))
    empty = sum(not plan.text for plan in plans)
    figures = row | {"planner": {"policy": policy, "read": read, "written": written, "empty": empty}}
    if not row["n_tasks"]:
        return figures
    own_cost, more = row["dollars_per_task"], (read * price[0] + written * price[1]) / 1e6 if price else None
    cost = own_cost if own_cost is None or not read + written else None if more is None else own_cost + more
    return figures | {"tokens_per_task": row["tokens_per_task"] + read + written, "dollars_per_task": cost}


def planner(task: Task) -> Script:
    """Return a script that says which lines the solution changes: the best that a plan can say, for comparison."""
    return play([Said(text="\n".join(_changes(task)))])


def _changes(task: Task) -> Iterator[str]:
    for path, text in sorted(task.solution.items()):
        old, new = task.files.get(path, "").splitlines(), text.splitlines()
        for _, at, end, start, stop in opcodes(old, new):
            if old[at:end] != new[start:stop]:
                was, now = ("\n".join(lines).strip() for lines in (old[at:end], new[start:stop]))
                yield f"{path}:{at + 1}: {was} -> {now}"
