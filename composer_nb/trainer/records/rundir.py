"""The run directory: one durable truth (`run.db`); everything else is derived from it or immutable.

runs/<name>-<time>/   runs/<name> links to the newest
  settings.json, provenance.json      settings, code and machine
  capsule.json                        digests of code, data, image and tools, as RL began (`provenance.capsule`)
  run.db                              stages, steps, ledger, cursor; changed in one transaction with the checkpoint pointer
  metrics.jsonl                       one line per step, rebuilt from run.db on resume
  data/ weights/ checkpoints/ rollouts/ figures/ report.json
  excerpt.json                        only in an excerpt of a larger run, which is read-only
"""

import json
import os
import platform
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.harness.files import point, replacing, write_atomic
from composer_nb.harness.plain import to_json
from composer_nb.harness.untrusted import beneath, check_database, json_of
from composer_nb.trainer.records.provenance import changed, commit, package_digest

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stage (name TEXT PRIMARY KEY, seconds REAL NOT NULL, info TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS step (stage TEXT, step INTEGER, metrics TEXT NOT NULL, PRIMARY KEY (stage, step));
CREATE TABLE IF NOT EXISTS ledger (stage TEXT, step INTEGER, reason TEXT, tokens INTEGER, PRIMARY KEY (stage, step, reason));
CREATE TABLE IF NOT EXISTS checkpoint (stage TEXT PRIMARY KEY, step INTEGER NOT NULL, file TEXT NOT NULL, seconds REAL NOT NULL);
"""

EXCERPT = "excerpt.json"


@contextmanager
def well_formed(file: Path) -> Iterator[None]:
    """Turn any error from strange content of a file into a ValueError that names it."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, ValueError) and str(file) in str(error):
            raise
        raise ValueError(f"{file}: not what a run writes ({type(error).__name__}: {error})") from error


def full_disk(error: Exception, path: Path) -> str:
    """Return the message for an error caused by a full disk, or "" for others. Each library has its own exception; all name the
    reason."""
    full = any(words in str(error) for words in ("No space left", "disk is full", "StorageFull", "code: 28"))
    return f"the disk is full: free some space for {path}, then go on with --resume ({error})" if full else ""


class RunDir:
    """A run on disk. Only the first rank writes; an excerpt is read-only."""

    _checked = False

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if self.excerpt is not None:
            return
        for folder in ("data", "weights", "checkpoints", "rollouts", "figures"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        with closing(self.connect()) as db, db:
            db.executescript(_SCHEMA)

    @property
    def excerpt(self) -> dict[str, Any] | None:
        """Contents of an excerpt of a larger run (`scripts/data/make_example.py`); None for a full run."""
        file = self.path / EXCERPT
        return json_of(file.read_text()) if file.is_file() else None

    def connect(self) -> sqlite3.Connection:
        """Open the database. Raises ValueError for a damaged run.db."""
        if (self.path / EXCERPT).is_file():  # immutable: SQLite makes no journal and no lock beside it
            return self._opened("?mode=ro&immutable=1")
        db = self._opened()
        db.execute("PRAGMA journal_mode=WAL")
        return db

    def _opened(self, options: str = "", *, trusted: bool = False) -> sqlite3.Connection:
        """Open the database; its pages are checked the first time, unless they are `trusted`. Raises ValueError that names the
        file if it is damaged or holds anything but plain tables."""
        file = self.path / "run.db"
        db = sqlite3.connect(file.as_uri() + options, uri=True, timeout=30.0)
        try:
            check_database(db, file, whole=not (trusted or self._checked))
        except sqlite3.OperationalError:  # locked, or no such file
            db.close()
            raise
        except (sqlite3.DatabaseError, ValueError) as error:
            db.close()
            raise ValueError(f"{file}: {error}; bring it back from a copy, or start a new run") from None
        self._checked = True
        return db

    def settings(self) -> dict[str, Any]:
        """Return the contents of settings.json (for `settings.from_dict`). Raises ValueError if it cannot be read."""
        path = self.path / "settings.json"
        try:
            content = json_of(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"{path} is not there: this is no run, or one that never began") from None
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); bring it back from a copy, or start a new run") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path}: damaged (no JSON object); bring it back from a copy, or start a new run")
        return content

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as db:
            return db.execute(sql, values).fetchall()

    # Stages

    def finish(self, stage: str, seconds: float, info: Mapping[str, Any]) -> None:
        """Record that a stage is complete, with its results."""
        with closing(self.connect()) as db, db:
            db.execute("INSERT OR REPLACE INTO stage VALUES (?, ?, ?)", (stage, seconds, to_json(info)))

    def finished(self, stage: str) -> dict[str, Any] | None:
        """Return the results of a complete stage with its `seconds`, or None."""
        rows = self.query("SELECT seconds, info FROM stage WHERE name = ?", stage)
        return {"seconds": rows[0][0], **json_of(rows[0][1])} if rows else None

    @property
    def sharpness(self) -> float:
        """The factor by which the start of RL was calibrated."""
        return float((self.finished("sft") or {}).get("sharpness", 1.0))

    @property
    def trained_weights(self) -> Path:
        """The published weights as RL's last step left them; `final` may be their mean with the start, or sharper."""
        weights = self.path / "weights"
        return weights / ("trained" if (weights / "trained").is_dir() else "final")

    # Steps and checkpoints

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a line to metrics.jsonl, for progress displays. It becomes durable with the next checkpoint."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(to_json({"stage": stage, "step": step, **metrics}) + "\n")

    def commit(
        self,
        stage: str,
        step: int,
        state: Mapping[str, Tensor] | str,
        metrics: Iterable[tuple[int, Mapping[str, Any]]],
        ledger: Iterable[tuple[int, Mapping[str, int]]] = (),
        seconds: float = 0.0,
    ) -> None:
        """Write a checkpoint of `stage` after `step` steps and move the pointer to it, with all records since the last one, in
        one transaction. The previous file is removed afterwards. `state` may also name a folder in `checkpoints` that ranks have
        written together (`parallel/checkpoint.py`)."""
        name = state if isinstance(state, str) else f"{stage}-{step:06d}.safetensors"
        if not isinstance(state, str):
            # SQLite syncs the pointer, which must not outlive the file in a power failure.
            with replacing(self.path / "checkpoints" / name, sync=True) as part:
                save_file({key: value.contiguous() for key, value in state.items()}, part)
        before = self.query("SELECT file FROM checkpoint WHERE stage = ?", stage)
        with closing(self.connect()) as db, db:
            steps = [(stage, at, to_json(m)) for at, m in metrics]
            db.executemany("INSERT OR REPLACE INTO step VALUES (?, ?, ?)", steps)
            uses = [(stage, at, reason, count) for at, counts in ledger for reason, count in counts.items()]
            db.executemany("INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?)", uses)
            db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?)", (stage, step, name, seconds))
        for (old,) in before:
            if old != name:
                _remove(beneath(self.path / "checkpoints", old))

    def pointer(self, stage: str) -> tuple[int, Path, float] | None:
        """Return (steps done, file or folder, seconds spent) of the newest checkpoint of `stage`, or None."""
        rows = self.query("SELECT step, file, seconds FROM checkpoint WHERE stage = ?", stage)
        return (rows[0][0], beneath(self.path / "checkpoints", str(rows[0][1])), rows[0][2]) if rows else None

    def checkpoint(self, stage: str) -> tuple[int, dict[str, Tensor], float] | None:
        """Return (steps done, state, seconds spent) of the newest checkpoint of `stage`, or None.

        Raises ValueError that names the file if it is damaged, or a folder that ranks wrote.
        """
        if (pointer := self.pointer(stage)) is None:
            return None
        step, file, seconds = pointer
        if file.is_dir():
            raise ValueError(
                f"{file} was written by the ranks of a mesh, and this run's mesh.* is at its defaults: set it as it was"
            )
        try:
            return step, load_file(file), seconds
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: the checkpoint is damaged or missing ({error}); start a new run, or restore the file"
            ) from None

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """Return the metrics of all durable steps of a stage."""
        rows = self.query("SELECT step, metrics FROM step WHERE stage = ? ORDER BY step", stage)
        with well_formed(self.path / "run.db"):
            return [{"step": step, **json_of(metrics)} for step, metrics in rows]

    def take_steps(self, stage: str, steps: Iterable[Mapping[str, Any]]) -> None:
        """Record the metrics of steps from another run."""
        rows = [(stage, step["step"], to_json({k: v for k, v in step.items() if k != "step"})) for step in steps]
        with closing(self.connect()) as db, db:
            db.executemany("INSERT OR REPLACE INTO step VALUES (?, ?, ?)", rows)

    def ledger(self) -> dict[str, int]:
        """Return sampled tokens by their use."""
        return dict(self.query("SELECT reason, SUM(tokens) FROM ledger GROUP BY reason"))

    def changed_live(self) -> dict[str, dict[str, Any]]:
        """Return the settings that were changed while the run was live, as `services.changes`: by step, from 1, and by name."""
        changes: dict[str, dict[str, Any]] = {}
        if self.query("SELECT 1 FROM sqlite_master WHERE name = 'change'"):  # the plain loop takes no changes
            for step, name, value in self.query("SELECT step, name, value FROM change WHERE step >= 0 ORDER BY number"):
                changes.setdefault(str(step + 1), {})[name] = json_of(value)
        return changes

    def last_live_step(self) -> int:
        """Return the last RL step, from 1, that trained on any token; 0 if none did. The weights have not changed since."""
        [(step,)] = self.query("SELECT MAX(step) FROM ledger WHERE stage = 'rl' AND reason = 'trained' AND tokens > 0")
        return step or 0

    @property
    def forked_at_step(self) -> int:
        """The RL step of another run after which this one goes on; 0 if it began by itself."""
        file = self.path / "provenance.json"
        return int(json_of(file.read_text(encoding="utf-8")).get("forked_at_step", 0)) if file.is_file() else 0

    def clean(self) -> None:
        """Remove partial files of a killed run and unreferenced checkpoints, and rebuild metrics.jsonl from the durable steps."""
        for part in list(self.path.rglob("*.part*")):
            _remove(part)
        referenced = {name for (name,) in self.query("SELECT file FROM checkpoint")}
        for file in (self.path / "checkpoints").iterdir():
            if file.name not in referenced:
                _remove(file)
        rows = self.query("SELECT stage, step, metrics FROM step ORDER BY rowid")
        lines = [json.dumps({"stage": stage, "step": step, **json.loads(m)}) + "\n" for stage, step, m in rows]
        write_atomic(self.path / "metrics.jsonl", "".join(lines))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_run(path: Path) -> RunDir:
    """Return the run in `path`. Raises FileNotFoundError if there is none."""
    if not (path / "run.db").is_file():
        raise FileNotFoundError(f"{path}: no run here (run.db is missing)")
    return RunDir(path)


def create(runs: Path, name: str) -> RunDir:
    """Make `runs/<name>-<time>` and point `runs/<name>` at it. Raises ValueError for a name that cannot be a link."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not a run name: it must be a plain file name")
    if (runs / name).exists() and not (runs / name).is_symlink():
        raise ValueError(f"{runs / name} is a folder of its own; choose another run name, or move it away")
    runs.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = runs / f"{name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = runs / f"{name}-{stamp}-{number}"
    run = RunDir(path)
    point(runs / name, path)
    return run


def provenance() -> dict[str, Any]:
    """Return versions of code and machine; `commit` and `changed` are None outside a git repository."""
    return {
        "commit": commit(),
        "changed": changed(),
        "package_digest": package_digest(),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of everything that a result depends on."""
    modules = {"torch": torch, "tokenizers": tokenizers, "safetensors": safetensors}
    return {"python": sys.version.split()[0]} | {name: module.__version__ for name, module in modules.items()}
