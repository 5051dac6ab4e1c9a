"""The reader of runs, live or finished, which writes nothing: a run's state, its steps, its stored rollouts.

    status = read_status(path)                                the state at this moment, wherever the run was started
    status.state                                              live, complete or dead; a dead run can be resumed
    wait_until(path, lambda status: len(status.steps) >= 5, 300)
    prompts(path)                                             was any prompt skipped, or trained on twice?

`run.db` is read in one transaction, and logs are read up to their last complete line, so a live run can be read.
"""

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.untrusted import beneath, json_of
from composer_nb.trainer.prompts import Order, prompt_order, tasks_by_id
from composer_nb.trainer.recipe.launch import COMPLETE, LOCK, SAID, stages_of
from composer_nb.trainer.records.batches import load_batch
from composer_nb.trainer.records.rundir import RunDir, open_run, well_formed
from composer_nb.trainer.rl import Scored
from composer_nb.trainer.services.head import holder
from composer_nb.trainer.services.journal import REFUSED
from composer_nb.trainer.settings import Settings, from_dict, override

# Excerpts of full runs with seeds 0 and 1; the second holds only scores.
EXAMPLES = tuple(Path(__file__).parents[3] / "data" / name for name in ("example", "example_seed_1"))
RL_FILE = re.compile(r"rl_(\d+)_\d+\.parquet")
# Number of bytes at the end of a run's log that are searched for its last line.
TAIL = 65_536
# Number of last steps whose median duration estimates the remaining time.
RECENT = 8


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
        immutable = not live and not (self.path / "run.db-wal").exists()
        return self._opened("?mode=ro&immutable=1" if immutable else "?mode=ro", trusted=live)


def example_run(seed: int = 0) -> RunDir:
    """Return the excerpt of a full run that ships with the checkout (`make example` makes it). Raises FileNotFoundError without a
    checkout."""
    if not EXAMPLES[seed].is_dir():
        raise FileNotFoundError(f"{EXAMPLES[seed]}: the stored example comes with the repository; give a run directory")
    return open_run(EXAMPLES[seed])


# The state


@dataclass(frozen=True, slots=True)
class PromptSlot:
    """One prompt whose group of `size` rollouts is in flight: `finished` are graded, and `running` were in flight at the last
    transaction; a resumed run dispatches these again."""

    slot: int
    size: int
    finished: int
    running: int
    training: bool


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """The version that an inference engine reported last, with the seconds to fetch and verify it, and those of them in which no
    tokens were decoded (`paused`)."""

    name: str
    version: int
    hash: str
    seconds: float
    paused: float


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A requested change of a live run's setting. `step` counts the trained batches when the run applied it; None: not applied
    yet; REFUSED: refused."""

    name: str
    value: Any
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment: its tables, from one transaction, and what follows from them.

    Attributes:
        state: live, complete or dead
        pid: process that runs it; 0 if unknown
        last_line: last line of its log; empty if there is none
        quiet_s: seconds since the run last wrote a record
        stages: seconds of each complete stage
        infos: results of each complete stage
        checkpoints: steps and seconds of the newest checkpoint of each stage
        supervised: metrics of the durable steps of each stage but RL
        steps: metrics of RL steps; of a live run, also those that its next checkpoint will make durable
        stage: first stage that is not complete; empty if all are
        steps_done, total: optimizer or RL steps of that stage, 0 if it has no steps; of a complete run, the RL steps
        left_s: estimated seconds until that stage is complete; None without an estimate
        ledger: sampled tokens of RL by their use; `held` tokens belong to rollouts that wait for training
        sampled: tokens that RL sampled and reported, the sum of the ledger; None if they are only counted at the end
        served: trained batches behind the oldest weights that an engine serves; None for the synchronous loop, which has no
            `slots`, `engines`, `changes` and no weight `versions` either
    """

    path: Path
    state: Literal["live", "complete", "dead"]
    pid: int | None
    last_line: str
    quiet_s: float | None
    settings: Mapping[str, Any]
    stages: Mapping[str, float]
    infos: Mapping[str, Mapping[str, Any]]
    checkpoints: Mapping[str, tuple[int, float]]
    supervised: Mapping[str, Sequence[Mapping[str, Any]]]
    stage: str
    steps_done: int
    total: int
    left_s: float | None
    steps: tuple[Mapping[str, Any], ...]
    ledger: Mapping[str, int]
    sampled: int | None = None
    served: int | None = None
    slots: tuple[PromptSlot, ...] = ()
    versions: int = 0
    engines: tuple[EngineVersion, ...] = ()
    changes: tuple[SettingChange, ...] = ()

    @property
    def scores(self) -> dict[str, Mapping[str, Any]]:
        """Results of the evaluation of each policy so far."""
        return {name.removeprefix("eval_"): info for name, info in self.infos.items() if name.startswith("eval_")}

    @property
    def trained(self) -> int:
        """Number of trained batches."""
        return len(self.steps)

    @property
    def bound(self) -> int:
        """Highest staleness bound so far, in batches; 0 for the synchronous loop."""
        services = self.settings.get("services", {"on": False})
        applied = [int(c.value) for c in self.changes if c.name == "services.bound" and c.step not in (None, REFUSED)]
        return max([services["bound"], *applied]) if services["on"] else 0


def read_status(path: Path) -> Status:
    """Return the state of the run in `path` at this moment. Raises FileNotFoundError if there is no run, and ValueError for
    malformed records."""
    run = ReadOnly(path)
    pid = holder(run.path / LOCK)  # first, so that the reads after the end of a run see its final state
    settings = run.settings() if (run.path / "settings.json").is_file() else {}
    steps: dict[str, list[dict[str, Any]]] = {}
    with closing(run.connect()) as db, well_formed(run.path / "run.db"):
        db.execute("BEGIN")
        stage_rows = db.execute("SELECT name, seconds, info FROM stage ORDER BY rowid").fetchall()
        checkpoint_rows = db.execute("SELECT stage, step, seconds FROM checkpoint")
        checkpoints = {str(name): (int(step), float(seconds)) for name, step, seconds in checkpoint_rows}
        for name, step, metrics in db.execute("SELECT stage, step, metrics FROM step ORDER BY step"):
            steps.setdefault(str(name), []).append({"step": int(step), **json_of(metrics)})
        rl = steps.pop("rl", [])
        for point in rl:
            point["time"] |= {name: float(point["time"][name]) for name in ("wall_s", "train_s")}
        stages = {str(name): float(seconds) for name, seconds, _ in stage_rows}
        infos = {str(name): json_of(info) for name, _, info in stage_rows}
        services = _services(db)
    logged, last_line = logged_steps(run.path / "metrics.jsonl"), _last_line(run.path / SAID)
    records = [run.path / name for name in ("run.db", "run.db-wal", "metrics.jsonl", SAID)]
    mtimes = [record.stat().st_mtime for record in records if record.is_file()]
    unfinished = [name for name in stages_of(settings) if name not in stages]
    is_complete = last_line.startswith(COMPLETE) or not unfinished
    is_live = pid is not None
    if is_live:
        rl += [point for at, point in sorted(logged.get("rl", {}).items()) if at > len(rl)]
    stage = "" if is_complete and not is_live else next(iter(unfinished), "")
    steps_done, total, left_s = _progress(stage or "rl", settings, rl, checkpoints, logged)
    return Status(
        path=run.path,
        state="live" if is_live else "complete" if is_complete else "dead",
        pid=pid,
        last_line=last_line,
        quiet_s=max(0.0, time.time() - max(mtimes)) if mtimes else None,
        settings=settings,
        stages=stages,
        infos=infos,
        checkpoints=checkpoints,
        supervised=steps,
        stage=stage,
        steps_done=steps_done,
        total=total,
        left_s=left_s if is_live and stage else None,
        steps=tuple(rl),
        **services,
    )


def _services(db: sqlite3.Connection) -> dict[str, Any]:
    """Return the ledger of RL and what only services record: the orchestrator's state, versions and changes."""
    token_sums = db.execute("SELECT reason, SUM(tokens) FROM ledger GROUP BY reason")
    ledger: Counter[str] = Counter({str(reason): int(tokens) for reason, tokens in token_sums})
    if (state := _snapshot(db)) is None:
        return {"ledger": dict(ledger)}
    if not db.execute("SELECT 1 FROM ledger WHERE stage = 'rl' AND step = 0").fetchone():  # written at RL's very end
        ledger.update({reason: count for reason, count in state["ledger"].items() if reason != "trained"})
        ledger["held"] = state["held_tokens"]
    newest = "SELECT engine, version, hash, seconds, paused FROM served WHERE rowid IN (SELECT MAX(rowid) FROM served "
    engines = db.execute(newest + "GROUP BY engine) ORDER BY rowid")
    changes = db.execute("SELECT name, value, step FROM change ORDER BY number")
    [(versions,)] = db.execute("SELECT COUNT(*) FROM version")
    slots = []
    for group in state["groups"]:
        running = sum(reason == "restored" for _, _, reason, _ in group["gone"])  # as `Group.pack`
        training = group["slot"] in state["training"]
        slots.append(PromptSlot(group["slot"], group["size"], len(group["done"]), running, training))
    return {
        "ledger": dict(ledger),
        "sampled": state["counts"].get("received_tokens", 0),
        "served": state["served"],
        "slots": tuple(slots),
        "versions": versions,
        "engines": tuple(EngineVersion(str(n), int(v), str(h), float(s), float(p)) for n, v, h, s, p in engines),
        "changes": tuple(
            SettingChange(str(name), json_of(value), None if step is None else int(step))
            for name, value, step in changes
        ),
    }


def _snapshot(db: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the orchestrator's state; None if the services never started."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'orchestrator'").fetchone():
        return None
    row = db.execute("SELECT snapshot FROM orchestrator").fetchone()
    return json_of(row[0]) if row else None


def whole_lines(raw: bytes) -> list[str]:
    """Return all complete lines."""
    return raw[: raw.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines()


def _last_line(file: Path) -> str:
    with suppress(FileNotFoundError), file.open("rb") as log:
        log.seek(max(0, file.stat().st_size - TAIL))
        return next((line for line in reversed(whole_lines(log.read())) if line.strip()), "")
    return ""


def logged_steps(file: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the last entry of metrics.jsonl for each step, by stage and step."""
    points: dict[str, dict[int, dict[str, Any]]] = {}
    for number, line in enumerate(whole_lines(file.read_bytes()) if file.is_file() else (), 1):
        try:
            point = json_of(line)
            points.setdefault(point.pop("stage"), {})[point["step"]] = point
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}:{number}: no line of metrics ({error})") from None
    return points


def _progress(
    stage: str,
    settings: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    checkpoints: Mapping[str, tuple[int, float]],
    logged: Mapping[str, Mapping[int, Any]],
) -> tuple[int, int, float | None]:
    """Return (steps done, total steps, seconds left) of a stage. RL goes on at the median pace of its last steps, up to its time
    limit; supervised stages at their mean pace."""
    total = settings.get(stage, {}).get("steps", 0)
    if stage == "rl":
        step_seconds = [point["time"]["wall_s"] for point in steps]
        left_s = float(np.median(step_seconds[-RECENT:])) * max(0, total - len(steps)) if step_seconds else None
        if left_s is not None and (limit := settings.get("rl", {}).get("max_seconds", 0.0)):
            left_s = min(left_s, max(0.0, limit - sum(step_seconds)))
        return len(steps), total, left_s
    if stage not in ("midtrain", "extend", "sft"):
        return 0, 0, None
    saved_steps, seconds = checkpoints.get(stage, (0, 0.0))
    steps_done = max([saved_steps, *logged.get(stage, ())])
    return steps_done, total, seconds / saved_steps * (total - steps_done) if saved_steps else None


POLL_S = 0.5


def wait_until(
    path: Path, is_done: Callable[[Status], bool], seconds: float, say: Callable[[str], None] | None = None
) -> Status:
    """Poll the run until `is_done` returns true or the run has ended, and return its status. Raises TimeoutError after `seconds`.

    With `say`, say what the run does whenever that changes, and after `seconds` return the status as it is: ask again later."""
    deadline, reported_stage = time.monotonic() + seconds, ""
    while not is_done(status := read_status(path)) and status.state == "live":
        steps = f" {status.steps_done} of {status.total} steps" if status.total else ""
        progress = f"{path.name} is at {status.stage or 'its end'}{steps}"
        if say and status.stage != reported_stage:
            say(f"{progress}; last log line: {status.last_line}")
            reported_stage = status.stage
        if time.monotonic() > deadline:
            if say:
                say(f"{progress}; ask again later")
                break
            raise TimeoutError(f"{path.name}: not within {seconds:g} s; its last line: {status.last_line!r}")
        time.sleep(POLL_S)
    return status


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of RL by their fate, as positions in the prompt order, in the surviving lineage: `in_flight` are dispatched but
    not trained on yet, or left over at the end. `skipped` are neither, although a later prompt is one of the two; they and those
    trained on `twice` must be empty."""

    trained: tuple[int, ...]
    in_flight: tuple[int, ...]
    skipped: tuple[int, ...]
    twice: tuple[int, ...]


def prompts(path: Path) -> Prompts | None:
    """Return the fate of RL's prompts, from the log of batches or, for the synchronous loop, from the stored rollouts of all
    steps. None if neither is stored, as in an excerpt, or before RL's tasks are made. Raises ValueError for rollouts of other
    tasks than the run's."""
    run = ReadOnly(path)
    with closing(run.connect()) as db, well_formed(run.path / "run.db"):
        db.execute("BEGIN")
        snapshot = _snapshot(db)
        batches = [json_of(text) for (text,) in db.execute("SELECT train FROM batch ORDER BY step")] if snapshot else []
    if snapshot:
        counts = Counter(slot for batch in batches if batch["step"] < snapshot["version"] for slot in batch["slots"])
        in_flight = {group["slot"] for group in snapshot["groups"]}
    elif (counts_of_files := _prompts_of_files(run)) is not None:
        counts, in_flight = counts_of_files, set()
    else:
        return None
    used_slots = counts.keys() | in_flight
    return Prompts(
        trained=tuple(sorted(counts)),
        in_flight=tuple(sorted(in_flight)),
        skipped=tuple(slot for slot in range(max(used_slots, default=-1) + 1) if slot not in used_slots),
        twice=tuple(sorted(slot for slot, count in counts.items() if count > 1)),
    )


def _prompts_of_files(run: RunDir) -> Counter[int] | None:
    """Return the number of trained groups of each prompt, where a group is one task's rollouts in one file; None if the tasks, or
    the rollouts of a step, are not stored."""
    if not (run.path / "data" / "rl.jsonl").is_file():
        return None
    settings = from_dict(run.settings())
    tables, steps = list(rl_tables(run, ("group", "task_id"))), len(run.steps("rl"))
    files_per_step = 1 if settings.services.on else settings.ranks  # of a step
    if Counter(step for step, _ in tables) != dict.fromkeys(range(steps), files_per_step):
        return None
    slots: dict[str, list[int]] = {}
    for slot, task_id in prompt_order(run.path, Order.of(settings)).places(steps * settings.rl.prompts):
        slots.setdefault(task_id, []).append(slot)
    counts: Counter[int] = Counter()
    counts_by_task: Counter[str] = Counter()
    for _, table in tables:
        task_by_group = dict(zip(table["group"].to_pylist(), table["task_id"].to_pylist(), strict=True))
        if unknown_tasks := set(task_by_group.values()) - slots.keys():
            raise ValueError(f"{run.path}: rollouts of tasks that are not the run's: {sorted(unknown_tasks)[:3]}")
        for task in task_by_group.values():
            counts[slots[task][min(counts_by_task[task], len(slots[task]) - 1)]] += 1
            counts_by_task[task] += 1
    return counts


# Stored rollouts and weights


def _rl_files(run: RunDir) -> list[tuple[int, Path]]:
    """Return (step from 0, path) of the stored files of rollouts of durable steps, in order."""
    durable, files = len(run.steps("rl")), sorted((run.path / "rollouts").glob("rl_*.parquet"))
    numbered = [(int(match[1]), path) for path in files if (match := RL_FILE.fullmatch(path.name))]
    return [(number, path) for number, path in numbered if number < durable]


def stored_steps(run: RunDir) -> list[int]:
    """Return the durable RL steps, from 1, whose rollouts are stored (an excerpt stores few)."""
    return sorted({number + 1 for number, _ in _rl_files(run)})


def stored_groups(run: RunDir, step: int = -1) -> tuple[int, list[list[Scored]]]:
    """Return an RL step, from 1 (−1: `telling_step`), and the groups that it trained on. Raises ValueError for a step whose
    rollouts are missing or damaged."""
    number, stored = telling_step(run) if step == -1 else step, stored_steps(run)
    if number not in stored:
        raise ValueError(f"RL step {number}: its rollouts are not in {run.path.name}, which has those of {stored}")
    tasks = tasks_by_id(run.path)
    return number, [group for at, file in _rl_files(run) if at == number - 1 for group in load_batch(file, tasks)]


def settings_at(run: RunDir, step: int | None = None) -> Settings:
    """Return the settings that RL step `step` (from 1) ran with, or those of now: what was changed live included."""
    applied = (values for at, values in run.changed_live().items() if step is None or int(at) <= step)
    return reduce(override, applied, from_dict(run.settings()))


def rl_tables(run: RunDir, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
    """Yield (step from 0, columns) of each stored file of rollouts of a durable step, in order. Raises ValueError for a damaged
    file."""
    for number, path in _rl_files(run):
        try:
            yield number, pq.read_table(path, columns=list(columns))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path}: damaged or incomplete ({error})") from None


def solved_by_task(run: RunDir, policy: str, within: int | None = None, *, greedy: bool = False) -> dict[str, float]:
    """Return the share of attempts with a known grade, sampled or `greedy`, that solved each held-out task, within `within` calls
    if given. `policy` may end in `_structures`."""
    path = beneath(run.path / "rollouts", f"eval_{policy}.parquet")
    try:
        rows = pq.read_table(path, columns=["task_id", "status", "passed", *(["turns"] if within else [])]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: damaged or missing ({error})") from None
    sampled_count = len(rows) - len({row["task_id"] for row in rows})  # greedy attempts, one per task, come last
    outcomes: dict[str, list[float]] = {}
    for row in rows[sampled_count:] if greedy else rows[:sampled_count]:
        if Grade(status=row["status"]).known:
            turns = json_of(row["turns"]) if within else []  # those with a call, as `Rollout.calls`
            calls = sum(bool(turn["call"]) or turn["error"] not in (None, "ProviderError") for turn in turns)
            solved = row["passed"] and (within is None or calls <= within)
            outcomes.setdefault(row["task_id"], []).append(float(solved))
    return {task: float(np.mean(solved)) for task, solved in outcomes.items()}


def telling_step(run: RunDir, weights: bool = False) -> int:
    """Return the last stored RL step, from 1, with a live group, or else the last stored one. With `weights`, consider only steps
    whose weights before the update are stored. Raises ValueError if there is none."""
    steps = {step["step"]: step for step in run.steps("rl")}
    stored = [number for number in stored_steps(run) if not weights or weights_before(run, number)]
    if not stored:
        raise ValueError(f"{run.path.name}: no RL step is stored{' with its weights' if weights else ''}")
    return max((number for number in stored if steps[number].get("live_groups")), default=stored[-1])


def weights_before(run: RunDir, step: int) -> Path | None:
    """Return the published weights before RL step `step`, from 1; None if they are not stored."""
    live, is_over = run.last_live_step(), run.finished("rl") is not None  # until then they may belong to a later step
    weights = run.path / "weights"
    fitting = {
        weights / "start": step == 1,
        weights / "before_final": is_over and step == live,
        run.trained_weights: is_over and step > live,
    }
    return next((path for path, fits in fitting.items() if fits and path.is_dir()), None)
