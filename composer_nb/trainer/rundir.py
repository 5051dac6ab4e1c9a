"""The run directory: one durable truth (`run.db`), everything else derived from it or immutable.

runs/<name>-<time>/   runs/<name> links to the newest
  settings.json, provenance.json      what was asked, and of which code on which machine
  run.db                              stages, steps, ledger, cursor; changed in one transaction with the checkpoint pointer
  metrics.jsonl                       a line a step, rebuilt from run.db on resume
  data/ weights/ checkpoints/ rollouts/ figures/ report.json
  excerpt.json                        only in what was cut out of a larger run, to be looked at: nothing is written there
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import safetensors
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stage (name TEXT PRIMARY KEY, seconds REAL NOT NULL, info TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS step (stage TEXT, step INTEGER, metrics TEXT NOT NULL, PRIMARY KEY (stage, step));
CREATE TABLE IF NOT EXISTS ledger (stage TEXT, step INTEGER, reason TEXT, tokens INTEGER, PRIMARY KEY (stage, step, reason));
CREATE TABLE IF NOT EXISTS checkpoint (stage TEXT PRIMARY KEY, step INTEGER NOT NULL, file TEXT NOT NULL, seconds REAL NOT NULL);
"""

EXCERPT = "excerpt.json"


def opened(run: Path, options: str = "") -> sqlite3.Connection:
    """The database of a run. Raises ValueError that names the file when it is damaged."""
    db = sqlite3.connect((run / "run.db").as_uri() + options, uri=True, timeout=30.0)
    try:
        db.execute("PRAGMA schema_version")
    except sqlite3.OperationalError:  # locked, or no such file
        raise
    except sqlite3.DatabaseError as error:
        db.close()
        raise ValueError(f"{run / 'run.db'}: {error}; bring it back from a copy, or start a new run") from None
    return db


def full_disk(error: Exception, path: Path) -> str:
    """What to say of an error whose reason is a full disk, or nothing. Every library has its own exception for this; all name
    the reason."""
    full = any(words in str(error) for words in ("No space left", "disk is full", "StorageFull", "code: 28"))
    return f"the disk is full: free some space for {path}, then go on with --resume ({error})" if full else ""


class RunDir:
    """A run's place on disk. Only the first rank writes; nobody writes to an excerpt."""

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
        """What was kept of a larger run, if this is an excerpt of one (`scripts/make_example.py`); else None."""
        file = self.path / EXCERPT
        return json.loads(file.read_text()) if file.is_file() else None

    def connect(self) -> sqlite3.Connection:
        """Raises ValueError for a run.db that is no database."""
        if (self.path / EXCERPT).is_file():  # immutable: SQLite makes no journal and no lock beside it
            return opened(self.path, "?mode=ro&immutable=1")
        db = opened(self.path)
        db.execute("PRAGMA journal_mode=WAL")
        return db

    def settings(self) -> dict[str, Any]:
        """What settings.json holds (`config.from_dict` makes settings of it). Raises ValueError when that can not be read."""
        path = self.path / "settings.json"
        try:
            found = json.loads(path.read_text())
        except FileNotFoundError:
            raise ValueError(f"{path} is not there: this is no run, or one that never began") from None
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); bring it back from a copy, or start a new run") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path}: damaged (no JSON object); bring it back from a copy, or start a new run")
        return found

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as db:
            return db.execute(sql, values).fetchall()

    # Stages

    def finish(self, stage: str, seconds: float, info: Mapping[str, Any]) -> None:
        """Notes that a stage is complete, with what it found."""
        with closing(self.connect()) as db, db:
            db.execute("INSERT OR REPLACE INTO stage VALUES (?, ?, ?)", (stage, seconds, json.dumps(info)))

    def finished(self, stage: str) -> dict[str, Any] | None:
        """What a complete stage found (`seconds` among it), or None."""
        rows = self.query("SELECT seconds, info FROM stage WHERE name = ?", stage)
        return {"seconds": rows[0][0], **json.loads(rows[0][1])} if rows else None

    # Steps and checkpoints

    def log(self, stage: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl: for eyes and progress bars. It becomes durable with the next checkpoint."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": stage, "step": step, **metrics}) + "\n")

    def commit(
        self,
        stage: str,
        step: int,
        state: Mapping[str, Tensor] | str,
        metrics: Iterable[tuple[int, Mapping[str, Any]]],
        ledger: Iterable[tuple[int, Mapping[str, int]]] = (),
        seconds: float = 0.0,
    ) -> None:
        """Writes a checkpoint of `stage` after `step` steps and moves the pointer to it, with everything that happened
        since the last one, in one transaction. The file before is removed afterwards. `state` may also name a folder in
        `checkpoints` that ranks have written together (`distributed_checkpoint`)."""
        name = state if isinstance(state, str) else self._write_state(f"{stage}-{step:06d}.safetensors", state)
        before = self.query("SELECT file FROM checkpoint WHERE stage = ?", stage)
        with closing(self.connect()) as db, db:
            db.executemany(
                "INSERT OR REPLACE INTO step VALUES (?, ?, ?)",
                [(stage, at, json.dumps(m)) for at, m in metrics],
            )
            db.executemany(
                "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?)",
                [(stage, at, reason, count) for at, counts in ledger for reason, count in counts.items()],
            )
            db.execute("INSERT OR REPLACE INTO checkpoint VALUES (?, ?, ?, ?)", (stage, step, name, seconds))
        for (old,) in before:
            if old != name:
                _remove(self.path / "checkpoints" / old)

    def _write_state(self, name: str, state: Mapping[str, Tensor]) -> str:
        part = self.path / "checkpoints" / (name + ".part")
        save_file({key: value.contiguous() for key, value in state.items()}, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # the pointer is synced by SQLite: it must not outlive the file in a power failure
        os.replace(part, self.path / "checkpoints" / name)
        return name

    def pointer(self, stage: str) -> tuple[int, Path, float] | None:
        """(steps done, file or folder, seconds spent) of the newest checkpoint of `stage`, or None."""
        rows = self.query("SELECT step, file, seconds FROM checkpoint WHERE stage = ?", stage)
        return (rows[0][0], self.path / "checkpoints" / rows[0][1], rows[0][2]) if rows else None

    def checkpoint(self, stage: str) -> tuple[int, dict[str, Tensor], float] | None:
        """(steps done, state, seconds spent) of the newest checkpoint of `stage`, or None.

        Raises ValueError that names the file when it is damaged, or a folder, which ranks have written.
        """
        if (found := self.pointer(stage)) is None:
            return None
        step, file, seconds = found
        if file.is_dir():
            raise ValueError(
                f"{file} was written by ranks: go on with their mesh.*, or read it with `distributed_checkpoint.whole`"
            )
        try:
            return step, load_file(file), seconds
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file}: the checkpoint is damaged or missing ({error}); start a new run, or restore the file"
            ) from None

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """Metrics of all durable steps of a stage."""
        rows = self.query("SELECT step, metrics FROM step WHERE stage = ? ORDER BY step", stage)
        return [{"step": step, **json.loads(metrics)} for step, metrics in rows]

    def ledger(self) -> dict[str, int]:
        """Sampled tokens by what became of them."""
        return dict(self.query("SELECT reason, SUM(tokens) FROM ledger GROUP BY reason"))

    def clean(self) -> None:
        """Removes what a killed run left half written, and checkpoints that nothing points to; rebuilds metrics.jsonl from
        the durable steps."""
        for part in list(self.path.rglob("*.part*")):
            if part.is_dir():
                shutil.rmtree(part)
            else:
                part.unlink(missing_ok=True)
        kept = {name for (name,) in self.query("SELECT file FROM checkpoint")}
        for file in (self.path / "checkpoints").iterdir():
            if file.name not in kept:
                _remove(file)
        rows = self.query("SELECT stage, step, metrics FROM step ORDER BY rowid")
        lines = [json.dumps({"stage": stage, "step": step, **json.loads(m)}) + "\n" for stage, step, m in rows]
        write_text(self.path / "metrics.jsonl", "".join(lines))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def create(runs: Path, name: str) -> RunDir:
    """Makes `runs/<name>-<time>` and points `runs/<name>` at it. Raises ValueError for a name that can not be a link."""
    link, temporary = runs / name, runs / f".{name}.{os.getpid()}"
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not a run name: it must be a plain file name")
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is a folder of its own; choose another run name, or move it away")
    runs.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = runs / f"{name}-{stamp}"
    number = 1
    while path.exists():
        number += 1
        path = runs / f"{name}-{stamp}-{number}"
    run = RunDir(path)
    temporary.symlink_to(path.name)
    os.replace(temporary, link)
    return run


def provenance() -> dict[str, Any]:
    """What the code and the machine were; `commit` and `changed` are None outside a git repository."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    status = _git(root, "status", "--porcelain", "--", str(root))
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "changed": None if status is None else bool(status),
        "package_digest": digest.hexdigest(),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    modules = {"torch": torch, "tokenizers": tokenizers, "safetensors": safetensors}
    return {"python": sys.version.split()[0]} | {name: module.__version__ for name, module in modules.items()}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
