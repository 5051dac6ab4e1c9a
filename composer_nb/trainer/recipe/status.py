"""The state of a run, only read: its stage, its process, the work in flight.

status = read_status(path)                               the state at this moment, wherever the run was started
status.state                                             live, complete or dead; a dead run can be resumed
wait_until(path, lambda status: len(status.steps) >= 5, 300)
prompts(path)                                            was any prompt skipped, or trained on twice?
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from composer_nb.trainer.recipe import reader
from composer_nb.trainer.recipe.launch import COMPLETE, LOCK
from composer_nb.trainer.recipe.reader import EngineVersion, PromptSlot, ReadOnly, SettingChange
from composer_nb.trainer.recipe.report import stages_of
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.services.journal import REFUSED

State = Literal["live", "complete", "dead"]
RECENT = 8
"""Number of last steps whose median duration estimates the remaining time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a run at one moment."""

    path: Path
    state: State
    pid: int | None
    """Process that runs it; 0 if unknown."""
    last_line: str
    """Last line of its log; empty if there is none."""
    quiet_s: float | None
    """Seconds since the run last wrote a record."""
    settings: Mapping[str, Any]
    stages: Mapping[str, float]
    """Seconds of each complete stage."""
    scores: Mapping[str, Mapping[str, Any]]
    """Results of the evaluation of each policy so far."""
    stage: str
    """First stage that is not complete; empty if all are."""
    done: int
    total: int
    """Optimizer or RL steps of that stage, 0 if it has no steps; of a complete run, the RL steps."""
    left_s: float | None
    """Estimated seconds until that stage is complete; None without an estimate."""
    steps: tuple[Mapping[str, Any], ...]
    """Metrics of RL steps; of a live run, also those that its next checkpoint will make durable."""
    ledger: Mapping[str, int]
    """Sampled tokens of RL by their use; `held` tokens belong to rollouts that wait for training."""
    sampled: int | None
    """Tokens that RL sampled and reported, the sum of the ledger; None if they are only counted at the end."""
    trained: int
    """Number of trained batches."""
    served: int | None
    """Trained batches behind the oldest weights that an engine serves; None for the synchronous loop, where the next four fields
    are empty."""
    slots: tuple[PromptSlot, ...]
    versions: int
    """Number of weight versions made."""
    engines: tuple[EngineVersion, ...]
    changes: tuple[SettingChange, ...]

    @property
    def bound(self) -> int:
        """Highest staleness bound so far, in batches; 0 for the synchronous loop."""
        services = self.settings.get("services", {"on": False})
        asked = [int(c.value) for c in self.changes if c.name == "services.bound" and c.step not in (None, REFUSED)]
        return max([services["bound"], *asked]) if services["on"] else 0


def read_status(path: Path) -> Status:
    """Return the state of the run in `path` at this moment. Raises FileNotFoundError if there is no run."""
    run = ReadOnly(path)
    pid = holder(run.path / LOCK)  # first, so that the reads after the end of a run see its final state
    records, logged, last_line = reader.database(run), reader.logged_steps(run), reader.last_line(run)
    stages: dict[str, float] = records["stages"]
    settings = run.settings() if (run.path / "settings.json").is_file() else {}
    missing = [name for name in stages_of(settings) if name not in stages]
    complete = last_line.startswith(COMPLETE) or not missing
    state: State = "live" if pid is not None else "complete" if complete else "dead"
    steps = list(records["steps"])
    if state == "live":
        steps += [point for at, point in sorted(logged.get("rl", {}).items()) if at > len(steps)]
    stage = "" if state == "complete" else next(iter(missing), "")
    done, total, left_s = _progress(stage or "rl", settings, steps, records["checkpoints"], logged)
    return Status(
        path=run.path,
        state=state,
        pid=pid,
        last_line=last_line,
        quiet_s=reader.quiet_seconds(run),
        settings=settings,
        stages=stages,
        scores=records["scores"],
        stage=stage,
        done=done,
        total=total,
        left_s=left_s if state == "live" and stage else None,
        steps=tuple(steps),
        trained=len(steps),
        **records["services"],
    )


def wait_until(
    path: Path,
    done: Callable[[Status], bool],
    seconds: float,
    poll_s: float = 0.5,
    say: Callable[[str], None] | None = None,
) -> Status:
    """Poll the run until `done` returns true or the run has ended, and return its status. Raises TimeoutError after `seconds`.

    With `say`, say what the run does whenever that changes, and after `seconds` return the status as it is: ask again later."""
    deadline, reported_stage = time.monotonic() + seconds, ""
    while not done(status := read_status(path)) and status.state == "live":
        steps = f" {status.done} of {status.total} steps" if status.total else ""
        now = f"{path.name} is at {status.stage or 'its end'}{steps}"
        if say and status.stage != reported_stage:
            say(f"{now}; last log line: {status.last_line}")
            reported_stage = status.stage
        if time.monotonic() > deadline:
            if say:
                say(f"{now}; ask again later")
                break
            raise TimeoutError(f"{path.name}: not within {seconds:g} s; its last line: {status.last_line!r}")
        time.sleep(poll_s)
    return status


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of RL by their fate, as positions in the prompt order, in the surviving lineage."""

    trained: tuple[int, ...]
    in_flight: tuple[int, ...]
    """Dispatched but not trained on yet, or left over at the end."""
    skipped: tuple[int, ...]
    """Neither, although a later prompt is one of the two; must be empty."""
    twice: tuple[int, ...]
    """Trained on more than once; must be empty."""


def prompts(path: Path) -> Prompts | None:
    """Return the fate of RL's prompts, from the log of batches or, for the synchronous loop, from the stored rollouts of all
    steps. None if neither is stored, as in an excerpt, or before RL's tasks are made. Raises ValueError for rollouts of other
    tasks than the run's."""
    run = ReadOnly(path)
    if (found := reader.groups_of_batches(run)) is not None:
        in_flight, counts = found
    elif (stored := _prompts_of_files(run)) is not None:
        in_flight, counts = set(), stored
    else:
        return None
    known = counts.keys() | in_flight
    return Prompts(
        trained=tuple(sorted(counts)),
        in_flight=tuple(sorted(in_flight)),
        skipped=tuple(slot for slot in range(max(known, default=-1) + 1) if slot not in known),
        twice=tuple(sorted(slot for slot, count in counts.items() if count > 1)),
    )


def _prompts_of_files(run: RunDir) -> Counter[int] | None:
    """Return the number of trained groups of each prompt, where a group is one task's rollouts in one file; None if the tasks, or
    the rollouts of a step, are not stored."""
    from composer_nb.trainer.prompts import Order, prompt_order
    from composer_nb.trainer.settings import from_dict

    if not (run.path / "data" / "rl.jsonl").is_file():
        return None
    settings = run.settings()
    tables = list(reader.rl_tables(run, ("group", "task_id")))
    files = 1 if settings["services"]["on"] else settings["ranks"]  # of a step
    if Counter(step for step, _ in tables) != dict.fromkeys(range(len(run.steps("rl"))), files):
        return None
    order = prompt_order(run.path, Order.of(from_dict(settings)))
    places: dict[str, list[int]] = {}
    for slot, name in order.places(len(run.steps("rl")) * settings["rl"]["prompts"]):
        places.setdefault(name, []).append(slot)
    counts: Counter[int] = Counter()
    counts_by_task: Counter[str] = Counter()
    for _, table in tables:
        groups = dict(zip(table["group"].to_pylist(), table["task_id"].to_pylist(), strict=True))
        if strange := set(groups.values()) - places.keys():
            raise ValueError(f"{run.path}: rollouts of tasks that are not the run's: {sorted(strange)[:3]}")
        for task in groups.values():
            counts[places[task][min(counts_by_task[task], len(places[task]) - 1)]] += 1
            counts_by_task[task] += 1
    return counts


def _progress(
    stage: str,
    settings: Mapping[str, Any],
    steps: list[dict[str, Any]],
    checkpoints: Mapping[str, tuple[int, float]],
    logged: Mapping[str, Mapping[int, Any]],
) -> tuple[int, int, float | None]:
    """Return (steps done, total steps, seconds left) of a stage."""
    if stage == "rl":
        total = settings.get("rl", {}).get("steps", 0)
        return len(steps), total, _rl_left(steps, total, settings.get("rl", {}).get("max_seconds", 0.0))
    if stage not in ("midtrain", "extend", "sft"):
        return 0, 0, None
    total = settings.get(stage, {}).get("steps", 0)
    saved, seconds = checkpoints.get(stage, (0, 0.0))
    done = max([saved, *logged.get(stage, ())])
    return done, total, seconds / saved * (total - done) if saved else None


def _rl_left(steps: list[dict[str, Any]], total: int, limit: float) -> float | None:
    """Return the median duration of the last steps times the steps left, capped by RL's time limit."""
    walls = [point["time"]["wall_s"] for point in steps]
    if not walls:
        return None
    left = float(np.median(walls[-RECENT:])) * max(0, total - len(steps))
    return min(left, max(0.0, limit - sum(walls))) if limit else left
