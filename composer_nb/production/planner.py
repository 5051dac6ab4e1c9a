"""Plans: one policy writes a plan, and another carries it out, in the product and in the arm `planned` of the bench.

A plan is one message, written once for a request from its words and the files; calls that a planner writes are not carried out.
The other policy finds the plan after the request, in the same message. Of files that do not fit, a planner reads the names, and
the contents that a search for the request ranks first.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from composer_nb.harness.agent.chat import Said, User
from composer_nb.harness.agent.scripts import play
from composer_nb.harness.agent.turns import Script, TurnPolicy
from composer_nb.harness.files import write_atomic
from composer_nb.harness.search.index import CodeIndex
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import opcodes

ASK = (
    "Another engineer will carry out the request below in the repository below. Write a short plan: which files and functions to "
    "change, how, and how to check it. Answer with the plan alone, and call no tool.\n\nRequest: {request}\n\n{files}"
)
# Characters of a repository that a planner reads; of its names if its files do not fit; and of one of these files, of which it
# reads the chunks that were found if it is longer.
SHOWN, NAMES, WHOLE = 60_000, 15_000, 8_000
# Chunks that a search for the request returns.
HITS = 200


class TaskPlan(BaseModel, frozen=True):
    """A plan, and the tokens read and written for it, where they are counted.

    Attributes:
        policy: The planner; empty if the user wrote the plan.
        files: Files that the planner read, at least in part.
        left_out: Number of files of which it read no more than the name.
        flawed: Whether its message was cut off, or had calls.
        dollars: Price of the tokens, if known.
    """

    text: str
    read: int = 0
    written: int = 0
    policy: str = ""
    files: tuple[str, ...] = ()
    left_out: int = 0
    flawed: bool = False
    dollars: float | None = None

    def after(self, request: str) -> str:
        """Return a request with the plan after it; unchanged if the plan is empty."""
        return f"{request}\n\nplan:\n{self.text}" if self.text else request

    def given(self, task: Task) -> Task:
        """Return the task with the plan in its request."""
        return task.model_copy(update={"instruction": self.after(task.instruction)})


def excerpt(request: str, files: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return what a planner reads of a repository, and the paths of the files in it."""
    parts = {path: f"{path}:\n{text}" for path, text in sorted(files.items())}
    if len(whole := "\n\n".join(parts.values())) <= SHOWN:
        return whole, tuple(parts)
    names = "\n".join(parts)[:NAMES]
    text = f"Some of the {len(parts)} files follow, those first that suit the request best. The names of all:\n{names}"
    index = CodeIndex.build({path: content.encode("utf-8", "replace") for path, content in files.items()})
    hits, paths = index.search(request, limit=HITS), list[str]()
    for path in dict.fromkeys([*(hit.path for hit in hits), *parts]):
        part = parts[path]
        if len(part) > WHOLE:
            part = "\n\n".join(f"{path}, line {hit.first_line}:\n{hit.text}" for hit in hits if hit.path == path)
        if part and len(text) + 2 + len(part) <= SHOWN:
            text, paths = f"{text}\n\n{part}", [*paths, path]
    return text, tuple(paths)


def make_plan(request: str, files: Mapping[str, str], turn_policy: TurnPolicy, seconds: float) -> TaskPlan:
    """Return the plan of a policy, which is closed, for a request. Raises ProviderFailure, TimeIsUp after `seconds`."""
    text, paths = excerpt(request, files)
    try:
        spoken = turn_policy.say([User(text=ASK.format(request=request, files=text))], time.monotonic() + seconds)
    finally:
        held_tokens = sum(len(segment.token_ids) for segment in turn_policy.close())
    if spoken is None:
        return TaskPlan(text="", files=paths, left_out=len(files) - len(paths))
    return TaskPlan(
        text=spoken.message.text.encode("utf-8", "replace").decode().strip(),  # no half a pair
        read=held_tokens - spoken.written if held_tokens else spoken.read,
        written=spoken.written,
        files=paths,
        left_out=len(files) - len(paths),
        flawed=bool(spoken.message.calls),
    )


def make_plans(
    tasks: Sequence[Task], cast: Callable[[Task, int], TurnPolicy], keep: Path, workers: int, seconds: float
) -> list[TaskPlan]:
    """Return a plan for each task, written within `seconds`, or read from the folder `keep`. Raises ProviderFailure, TimeIsUp."""
    keep.mkdir(parents=True, exist_ok=True)

    def one(number: int, task: Task) -> TaskPlan:
        path = keep / f"{hashlib.sha256(task.model_dump_json().encode()).hexdigest()[:24]}.json"
        if not path.is_file():
            plan = make_plan(task.instruction, task.files, cast(task, number), seconds)
            write_atomic(path, plan.model_dump_json())
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
