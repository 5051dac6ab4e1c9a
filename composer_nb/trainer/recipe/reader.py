"""Readers of a run's database, logs and stored rollouts, which write nothing.

`run.db` is read in one transaction, and logs are read up to their last complete line, so a live run can be read.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.untrusted import beneath, json_of
from composer_nb.trainer.recipe.launch import LOCK, SAID
from composer_nb.trainer.records.rundir import RunDir, open_run, well_formed
from composer_nb.trainer.services.head import holder

EXAMPLES = tuple(Path(__file__).parents[3] / "data" / name for name in ("example", "example_seed_1"))
"""Excerpts of full runs with seeds 0 and 1; the second holds only scores."""
RL_FILE = re.compile(r"rl_(\d+)_\d+\.parquet")
TAIL = 65_536
"""Number of bytes at the end of a run's log that are searched for its last line."""


class ReadOnly(RunDir):
    """A run that is only read. Raises FileNotFoundError if there is no run in `path`."""

    def __init__(self, path: Path) -> None:
        if not (path / "run.db").is_file():
            raise FileNotFoundError(f"{path}: no run here (run.db is missing)")
        self.path = path.resolve()

    def connect(self) -> sqlite3.Connection:
        """Open the database read-only. While a process may write, SQLite's readers leave a log beside the database, which the
        writer removes. Without a writer and a log, the database is opened as immutable, so that no file is left."""
        live = holder(self.path / LOCK) is not None
        nobody = not live and not (self.path / "run.db-wal").exists()
        return self._opened("?mode=ro&immutable=1" if nobody else "?mode=ro", trusted=live)


def example_run(seed: int = 0) -> RunDir:
    """Return the excerpt of a full run that ships with the checkout (`make example` makes it). Raises FileNotFoundError without a
    checkout."""
    path = EXAMPLES[seed]
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: the stored example comes with the repository; give a run directory instead")
    return open_run(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSlot:
    """One prompt whose group of rollouts is in flight."""

    slot: int
    size: int
    done: int
    """Number of finished, graded rollouts."""
    running: int
    """Number of rollouts in flight at the last transaction; a resumed run dispatches them again."""
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersion:
    """The version that an inference engine reported last."""

    name: str
    version: int
    hash: str
    seconds: float
    """Time to fetch and verify the version."""
    paused: float
    """Part of that time in which no tokens were decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A requested change of a live run's setting."""

    name: str
    value: Any
    step: int | None
    """Trained batches when the run applied the change; None: not applied yet; REFUSED: refused."""


def database(run: RunDir) -> dict[str, Any]:
    """Return RL's steps, the stages, the checkpoints and the state of services, read in one transaction. Raises ValueError for a
    malformed database."""
    with closing(run.connect()) as db, well_formed(run.path / "run.db"):
        db.execute("BEGIN")
        rows = db.execute("SELECT step, metrics FROM step WHERE stage = 'rl' ORDER BY step")
        stages = db.execute("SELECT name, seconds FROM stage ORDER BY rowid")
        scored = db.execute("SELECT name, info FROM stage WHERE name LIKE 'eval\\_%' ESCAPE '\\' ORDER BY rowid")
        checkpoints = db.execute("SELECT stage, step, seconds FROM checkpoint")
        return {
            "steps": [_step(step, json_of(metrics)) for step, metrics in rows],
            "stages": {str(name): float(spent) for name, spent in stages},
            "scores": {str(name).removeprefix("eval_"): json_of(info) for name, info in scored},
            "checkpoints": {str(name): (int(step), float(spent)) for name, step, spent in checkpoints},
            "services": _services(db),
        }


def _step(number: Any, metrics: dict[str, Any]) -> dict[str, Any]:
    wall_s, train_s = (float(metrics["time"][name]) for name in ("wall_s", "train_s"))
    return {"step": int(number), **metrics, "time": metrics["time"] | {"wall_s": wall_s, "train_s": train_s}}


def _services(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the records that only services make during RL: the orchestrator's state, versions and changes."""
    sums = db.execute("SELECT reason, SUM(tokens) FROM ledger GROUP BY reason")
    ledger: Counter[str] = Counter({str(why): int(tokens) for why, tokens in sums})
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
            EngineVersion(
                name=str(name), version=int(version), hash=str(hash), seconds=float(seconds), paused=float(paused)
            )
            for name, version, hash, seconds, paused in db.execute(newest + "GROUP BY engine) ORDER BY rowid")
        ),
        "changes": tuple(
            SettingChange(name=str(name), value=json_of(value), step=None if step is None else int(step))
            for name, value, step in db.execute("SELECT name, value, step FROM change ORDER BY number")
        ),
    }


def _snapshot(db: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the orchestrator's state; None if the services never started."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'orchestrator'").fetchone():
        return None
    found = db.execute("SELECT snapshot FROM orchestrator").fetchone()
    return json_of(found[0]) if found else None


def _slot(group: Mapping[str, Any], training: list[int]) -> PromptSlot:
    return PromptSlot(
        slot=group["slot"],
        size=group["size"],
        done=len(group["done"]),
        running=sum(why == "restored" for _, _, why, _ in group["gone"]),  # rollouts in flight (`Group.pack`)
        training=group["slot"] in training,
    )


def _whole_lines(raw: bytes) -> list[str]:
    """Return all complete lines."""
    return raw[: raw.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()


def groups_of_batches(run: RunDir) -> tuple[set[int], Counter[int]] | None:
    """Return, from the log of batches, the prompts in flight and how often each prompt was trained on; None without services."""
    with closing(run.connect()) as db, well_formed(run.path / "run.db"):
        db.execute("BEGIN")
        if (state := _snapshot(db)) is None:
            return None
        batches = [json_of(text) for (text,) in db.execute("SELECT train FROM batch ORDER BY step")]
        trained = Counter(slot for one in batches if one["step"] < state["version"] for slot in one["slots"])
        return {group["slot"] for group in state["groups"]}, trained


def last_line(run: RunDir) -> str:
    """Return the last line of a run's log; empty if there is none."""
    file = run.path / SAID
    try:
        with file.open("rb") as said:
            said.seek(max(0, file.stat().st_size - TAIL))
            return next((line for line in reversed(_whole_lines(said.read())) if line.strip()), "")
    except FileNotFoundError:
        return ""


def logged_steps(run: RunDir) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the last entry of metrics.jsonl for each step, by stage and step."""
    file = run.path / "metrics.jsonl"
    found: dict[str, dict[int, dict[str, Any]]] = {}
    with suppress(FileNotFoundError):
        for number, line in enumerate(_whole_lines(file.read_bytes()), 1):
            try:
                point = json_of(line)
                found.setdefault(point.pop("stage"), {})[point["step"]] = point
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{file}:{number}: no line of metrics ({error})") from None
    return found


def quiet_seconds(run: RunDir) -> float | None:
    """Return the seconds since a run last wrote a record; None if it never did."""
    times = []
    for name in ("run.db", "run.db-wal", "metrics.jsonl", SAID):
        with suppress(FileNotFoundError):
            times.append((run.path / name).stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


def stored_steps(run: RunDir) -> list[int]:
    """Return the durable RL steps, from 1, whose rollouts are stored (an excerpt stores few)."""
    durable = len(run.steps("rl"))
    numbers = {int(match[1]) for path in (run.path / "rollouts").iterdir() if (match := RL_FILE.fullmatch(path.name))}
    return [number + 1 for number in sorted(numbers) if number < durable]


def rl_tables(run: RunDir, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """Yield (step from 0, columns) of each stored file of rollouts of a durable step, in order. Raises ValueError for a damaged
    file."""
    durable = len(run.steps("rl"))
    for path in sorted((run.path / "rollouts").glob("rl_*.parquet")):
        match = RL_FILE.fullmatch(path.name)
        if match and int(match[1]) < durable:
            try:
                yield int(match[1]), pq.read_table(path, columns=list(columns))
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"{path}: damaged or incomplete ({error})") from None


def solved_by_task(run: RunDir, policy: str, within: int | None = None, *, greedy: bool = False) -> dict[str, float]:
    """Return the share of graded attempts, sampled or `greedy`, that solved each held-out task, within `within` calls if given.
    `policy` may end in `_structures`."""
    path = beneath(run.path / "rollouts", f"eval_{policy}.parquet")
    try:
        rows = pq.read_table(path, columns=["task_id", "status", "passed", *(["turns"] if within else [])]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or missing ({error})") from None
    sampled = len(rows) - len({row["task_id"] for row in rows})  # greedy attempts, one per task, come last
    shares: dict[str, list[float]] = {}
    for row in rows[sampled:] if greedy else rows[:sampled]:
        if row["status"] == "graded":
            solved = row["passed"] and (within is None or calls_in(json_of(row["turns"])) <= within)
            shares.setdefault(row["task_id"], []).append(float(solved))
    return {task: float(np.mean(solved)) for task, solved in shares.items()}


def calls_in(turns: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of calls in stored turns (`Rollout.calls`)."""
    return sum(bool(turn["call"]) or turn["error"] not in (None, "ProviderError") for turn in turns)


def telling_step(run: RunDir, weights: bool = False) -> int:
    """Return the last stored RL step, from 1, with a live group, or else the last stored one. With `weights`, consider only steps
    whose weights before the update are stored. Raises ValueError if there is none."""
    steps = {step["step"]: step for step in run.steps("rl")}
    there = [number for number in stored_steps(run) if not weights or weights_before(run, number)]
    if not there:
        raise ValueError(f"{run.path.name}: no RL step is stored{' with its weights' if weights else ''}")
    return max((number for number in there if steps[number].get("live_groups")), default=there[-1])


def weights_before(run: RunDir, step: int) -> Path | None:
    """Return the published weights before RL step `step`, from 1; None if they are not stored."""
    live, over = run.last_live_step(), run.finished("rl") is not None  # until then they may belong to a later step
    fitting = {"start": step == 1, "before_final": over and step == live, "final": over and step > live}
    names = [name for name, fits in fitting.items() if fits]
    return next((path for name in names if (path := run.path / "weights" / name).is_dir()), None)
