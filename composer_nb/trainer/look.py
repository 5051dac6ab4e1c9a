"""Looking at a run without touching it: where it stands, whether anybody carries it, what is under way.

    seen = look(path)                                        one moment of the run, whoever started it, wherever
    seen.state                                               live, complete or dead; a dead run can be resumed
    wait_until(path, lambda seen: len(seen.steps) >= 5, 300)
    prompts(path)                                            was any skipped, was any trained on twice?

Nothing here writes. What `run.db` says is read in one transaction, and text that is being written is read up to its last
whole line, so a run may go on writing meanwhile.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from composer_nb.trainer.head import holder
from composer_nb.trainer.journal import REFUSED
from composer_nb.trainer.launch import COMPLETE, LOCK, SAID
from composer_nb.trainer.report import STAGES, rl_tables
from composer_nb.trainer.rundir import RunDir, opened

State = Literal["live", "complete", "dead"]
RECENT = 8
"""Steps whose median duration estimates the rest."""
TAIL = 65_536
"""Bytes from the end of what a run said in which its last line is looked for."""


class ReadOnly(RunDir):
    """A run that is only looked at. Raises FileNotFoundError where there is none: looking never makes one."""

    def __init__(self, path: Path) -> None:
        if not (path / "run.db").is_file():
            raise FileNotFoundError(f"{path}: no run here (run.db is missing)")
        self.path = path.resolve()

    def connect(self) -> sqlite3.Connection:
        """While somebody may write, SQLite's readers leave a log beside the database, which the writer removes. Where nobody
        does, nothing is left: that there is no log says that the file is all there is."""
        nobody = holder(self.path / LOCK) is None and not (self.path / "run.db-wal").exists()
        return opened(self.path, "?mode=ro&immutable=1" if nobody else "?mode=ro")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One prompt whose group of rollouts is under way."""

    slot: int
    size: int
    done: int
    """Rollouts that are finished and graded."""
    running: int
    """Rollouts that were being sampled at the last transaction; of a dead run they are to be dispatched again."""
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The last version that an inference engine reported to run."""

    name: str
    version: int
    hash: str
    seconds: float
    """That fetching and checking it took."""
    paused: float
    """Seconds of those without decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A setting that somebody asked a live run to change."""

    name: str
    value: Any
    step: int | None
    """Batches trained when the run took it up; None: not yet; REFUSED: it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run at one moment."""

    path: Path
    state: State
    pid: int | None
    """Of the process that carries it; 0 where that can not be told."""
    last_line: str
    """The last that it said; empty for a run that never said anything."""
    quiet_s: float | None
    """Seconds since it last wrote anything down."""
    settings: Mapping[str, Any]
    stages: Mapping[str, float]
    """Seconds of every stage that is complete."""
    stage: str
    """The first of the recipe that is not; empty when all are."""
    done: int
    total: int
    """Optimiser or RL steps of that stage; 0 of 0 for one without steps. Of a complete run: those of RL."""
    left_s: float | None
    """An estimate of the seconds until that stage is complete; None where there is nothing to go by."""
    steps: tuple[Mapping[str, Any], ...]
    """Metrics of RL's steps. Of a live run also those that its next checkpoint will make durable."""
    ledger: Mapping[str, int]
    """RL's sampled tokens by what became of them; `held` belong to rollouts that wait to be trained on."""
    sampled: int | None
    """All tokens that RL sampled and reported; the ledger adds up to it. None where that is not counted while RL goes on."""
    trained: int
    """RL's batches learnt."""
    served: int | None
    """Batches learnt by the oldest weights that any engine serves; None for the plain loop, as are the next four empty."""
    slots: tuple[Slot, ...]
    versions: int
    """Weight versions made."""
    engines: tuple[Engine, ...]
    changes: tuple[Change, ...]

    @property
    def bound(self) -> int:
        """The highest bound on staleness that was in force, in batches; 0 for the plain loop."""
        services = self.settings.get("services", {"on": False})
        asked = [int(c.value) for c in self.changes if c.name == "services.bound" and c.step not in (None, REFUSED)]
        return max([services["bound"], *asked]) if services["on"] else 0


def look(path: Path) -> Seen:
    """The run in `path` at this moment. Raises FileNotFoundError when there is none."""
    run = ReadOnly(path)
    pid = holder(run.path / LOCK)  # before the rest: what is read of a run that is over is then its end
    found = _database(run)
    last_line = _last_line(run.path / SAID)
    stages: dict[str, float] = found["stages"]
    complete = last_line.startswith(COMPLETE) or all(name in stages for name in STAGES)
    state: State = "live" if pid is not None else "complete" if complete else "dead"
    settings = run.settings() if (run.path / "settings.json").is_file() else {}
    logged = _logged(run.path / "metrics.jsonl")
    steps = list(found["steps"])
    if state == "live":
        steps += [point for at, point in sorted(logged.get("rl", {}).items()) if at > len(steps)]
    stage = "" if state == "complete" else next((name for name in STAGES if name not in stages), "")
    done, total, left_s = _progress(stage or "rl", settings, steps, found["checkpoints"], logged)
    return Seen(
        path=run.path,
        state=state,
        pid=pid,
        last_line=last_line,
        quiet_s=_quiet(run.path),
        settings=settings,
        stages=stages,
        stage=stage,
        done=done,
        total=total,
        left_s=left_s if state == "live" and stage else None,
        steps=tuple(steps),
        trained=len(steps),
        **found["services"],
    )


def wait_until(path: Path, done: Callable[[Seen], bool], seconds: float, poll_s: float = 0.5) -> Seen:
    """Looks again and again until `done` says so or the run has ended. Raises TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done(seen := look(path)) and seen.state == "live":
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path.name}: not within {seconds:g} s; its last line: {seen.last_line!r}")
        time.sleep(poll_s)
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What became of the prompts of RL, by their place in its order, in the lineage that survives."""

    trained: tuple[int, ...]
    under_way: tuple[int, ...]
    """Dispatched and not trained yet, or left over at the end."""
    skipped: tuple[int, ...]
    """Neither, although a later one is: there must be none."""
    twice: tuple[int, ...]
    """Trained on more than once: there must be none."""


def prompts(path: Path) -> Prompts | None:
    """What RL did with its prompts, from the log of its batches; of a run of the plain loop, which has no such log, from the
    stored rollouts of all its steps. None for a run that kept neither, as an excerpt. Raises ValueError for rollouts of tasks
    that are not the run's."""
    run = ReadOnly(path)
    with closing(run.connect()) as db:
        db.execute("BEGIN")
        snapshot = _snapshot(db)
        batches = db.execute("SELECT train FROM batch ORDER BY step").fetchall() if snapshot else []
    if snapshot is None:
        under_way = set[int]()
        counts = _prompts_of_files(run)
        if counts is None:
            return None
    else:
        under_way = {group["slot"] for group in snapshot["groups"]}
        learnt = [train for (text,) in batches if (train := json.loads(text))["step"] < snapshot["version"]]
        counts = Counter(slot for train in learnt for slot in train["slots"])
    known = counts.keys() | under_way
    return Prompts(
        trained=tuple(sorted(counts)),
        under_way=tuple(sorted(under_way)),
        skipped=tuple(slot for slot in range(max(known, default=-1) + 1) if slot not in known),
        twice=tuple(sorted(slot for slot, count in counts.items() if count > 1)),
    )


def _prompts_of_files(run: RunDir) -> Counter[int] | None:
    """How many groups of each prompt were trained on (a group is one task's rollouts within one file); None where rollouts of
    a step are not stored."""
    from composer_nb.trainer.environments import prompt_order

    settings = run.settings()
    tables = list(rl_tables(run, ("group", "task_id")))
    files = 1 if settings["services"]["on"] else settings["ranks"]  # of a step
    if Counter(step for step, _ in tables) != dict.fromkeys(range(len(run.steps("rl"))), files):
        return None
    order = prompt_order(run.path / "data" / "rl.jsonl", f"{settings['seed']} {settings['rl_seed']}")
    place = {task.id: slot for slot, task in enumerate(order)}
    counts: Counter[int] = Counter()
    for _, table in tables:
        groups = dict(zip(table["group"].to_pylist(), table["task_id"].to_pylist(), strict=True))
        if strange := set(groups.values()) - place.keys():
            raise ValueError(f"{run.path}: rollouts of tasks that are not the run's: {sorted(strange)[:3]}")
        counts.update(place[task] for task in groups.values())
    return counts


# What run.db says


def _database(run: RunDir) -> dict[str, Any]:
    with closing(run.connect()) as db:
        db.execute("BEGIN")
        rows = db.execute("SELECT step, metrics FROM step WHERE stage = 'rl' ORDER BY step")
        return {
            "steps": [{"step": step, **json.loads(metrics)} for step, metrics in rows],
            "stages": dict(db.execute("SELECT name, seconds FROM stage ORDER BY rowid")),
            "checkpoints": {name: rest for name, *rest in db.execute("SELECT stage, step, seconds FROM checkpoint")},
            "services": _services(db),
        }


def _services(db: sqlite3.Connection) -> dict[str, Any]:
    """What only the services write down while RL goes on: the state of the orchestrator, versions, changes."""
    ledger: Counter[str] = Counter(dict(db.execute("SELECT reason, SUM(tokens) FROM ledger GROUP BY reason")))
    snapshot = _snapshot(db)
    if snapshot is None:
        nothing: dict[str, Any] = {"slots": (), "versions": 0, "engines": (), "changes": ()}
        return nothing | {"ledger": dict(ledger), "sampled": None, "served": None}
    if not db.execute("SELECT 1 FROM ledger WHERE stage = 'rl' AND step = 0").fetchone():  # written at RL's very end
        ledger.update({why: count for why, count in snapshot["ledger"].items() if why != "trained"})
        ledger["held"] = snapshot["held_tokens"]
    newest = "SELECT engine, version, hash, seconds, paused FROM served WHERE rowid IN (SELECT MAX(rowid) FROM served "
    [(versions,)] = db.execute("SELECT COUNT(*) FROM version")
    return {
        "ledger": dict(ledger),
        "sampled": snapshot["counts"].get("received_tokens", 0),
        "served": snapshot["served"],
        "slots": tuple(_slot(group, snapshot["training"]) for group in snapshot["groups"]),
        "versions": versions,
        "engines": tuple(
            Engine(name=name, version=version, hash=hash, seconds=seconds, paused=paused)
            for name, version, hash, seconds, paused in db.execute(newest + "GROUP BY engine) ORDER BY rowid")
        ),
        "changes": tuple(
            Change(name=name, value=json.loads(value), step=step)
            for name, value, step in db.execute("SELECT name, value, step FROM change ORDER BY number")
        ),
    }


def _snapshot(db: sqlite3.Connection) -> dict[str, Any] | None:
    """The orchestrator's state; None for a run whose services never began."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'orchestrator'").fetchone():
        return None
    found = db.execute("SELECT snapshot FROM orchestrator").fetchone()
    return json.loads(found[0]) if found else None


def _slot(group: Mapping[str, Any], training: list[int]) -> Slot:
    return Slot(
        slot=group["slot"],
        size=group["size"],
        done=len(group["done"]),
        running=sum(why == "restored" for _, _, why, _ in group["gone"]),  # as `Group.pack` writes what is under way
        training=group["slot"] in training,
    )


# What its text files say


def _text(file: Path) -> str:
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    return ""


def _whole_lines(raw: bytes) -> list[str]:
    """All lines but one that is not written to its end yet."""
    return raw[: raw.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()


def _last_line(file: Path) -> str:
    try:
        with file.open("rb") as said:
            said.seek(max(0, file.stat().st_size - TAIL))
            return next((line for line in reversed(_whole_lines(said.read())) if line.strip()), "")
    except FileNotFoundError:
        return ""


def _logged(file: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """stage -> step -> the last line of metrics.jsonl about it."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    with suppress(FileNotFoundError):
        for number, line in enumerate(_whole_lines(file.read_bytes()), 1):
            try:
                point = json.loads(line)
                found.setdefault(point.pop("stage"), {})[point["step"]] = point
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}:{number}: no line of metrics ({error})") from None
    return found


def _quiet(path: Path) -> float | None:
    times = []
    for name in ("run.db", "run.db-wal", "metrics.jsonl", SAID):
        with suppress(FileNotFoundError):
            times.append((path / name).stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


# How far it is


def _progress(
    stage: str,
    settings: Mapping[str, Any],
    steps: list[dict[str, Any]],
    checkpoints: Mapping[str, tuple[int, float]],
    logged: Mapping[str, Mapping[int, Any]],
) -> tuple[int, int, float | None]:
    """(steps done, of how many, seconds left) of a stage."""
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
    """The median of the last steps' seconds, for each step that is left; no longer than RL's time limit allows."""
    walls = [point["time"]["wall_s"] for point in steps]
    if not walls:
        return None
    left = float(np.median(walls[-RECENT:])) * max(0, total - len(steps))
    return min(left, max(0.0, limit - sum(walls))) if limit else left
