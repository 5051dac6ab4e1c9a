"""The records of asynchronous RL in `run.db`: the orchestrator's state, the log of batches and of versions, live settings.

With the stored rollouts (`finished.py`, `records/batches.py`), they give three levels of checkpoint. A finished rollout
is not sampled again. A complete group stays complete. A batch that was trained after the last checkpoint of the weights is
trained again, on the same rollouts in the same order.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any

from composer_nb.harness.grading.grade import Grade
from composer_nb.harness.plain import to_json
from composer_nb.harness.rollout import Rollout
from composer_nb.harness.untrusted import json_of
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.schedule import Changes, require_live
from composer_nb.trainer.services.orchestrator import Train
from composer_nb.trainer.settings import Settings, override

_SCHEMA = """
CREATE TABLE IF NOT EXISTS batch (step INTEGER PRIMARY KEY, train TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS version (version INTEGER PRIMARY KEY, step INTEGER NOT NULL, hash TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS served
  (version INTEGER, engine TEXT, hash TEXT NOT NULL, bytes INTEGER, seconds REAL, paused REAL);
CREATE TABLE IF NOT EXISTS service (host TEXT, name TEXT, results INTEGER, volume INTEGER, PRIMARY KEY (host, name));
CREATE TABLE IF NOT EXISTS orchestrator (id INTEGER PRIMARY KEY CHECK (id = 0), snapshot TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS change
  (number INTEGER PRIMARY KEY, at REAL NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, step INTEGER);
"""

# Stands for the step of a refused change.
REFUSED = -1


class Journal:
    """The connection of the only process that writes."""

    def __init__(self, run: RunDir) -> None:
        self._db = run.connect()
        self._db.isolation_level = None
        # Transactions survive a power failure, as published versions do, which must not be made again of other batches.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)
        self._planned: list[tuple[int, Mapping[str, Any]]] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def snapshot(self) -> dict[str, Any] | None:
        """Return the orchestrator's last saved state."""
        row = self._db.execute("SELECT snapshot FROM orchestrator").fetchone()
        return json_of(row[0]) if row else None

    def save(self, snapshot: Mapping[str, Any]) -> None:
        self._db.execute("INSERT OR REPLACE INTO orchestrator VALUES (0, ?)", (json.dumps(snapshot),))

    # The log

    def log_batch(self, train: Train, lr: float) -> None:
        """Log a batch and its learning rate. A logged batch keeps its rate, so that it is trained again unchanged."""
        if train not in self.batches(train.step, train.step + 1):
            text = json.dumps(asdict(train) | {"lr": lr})
            self._db.execute("INSERT OR REPLACE INTO batch VALUES (?, ?)", (train.step, text))

    def rate(self, step: int) -> float:
        """Return the learning rate of a logged batch."""
        [(text,)] = self._db.execute("SELECT train FROM batch WHERE step = ?", (step,))
        return float(json_of(text)["lr"])

    def batches(self, since: int, until: int) -> tuple[Train, ...]:
        """Return the logged batches of steps `since` … `until` − 1."""
        rows = self._db.execute("SELECT train FROM batch WHERE step >= ? AND step < ? ORDER BY step", (since, until))
        trains = (json_of(text) for (text,) in rows)
        return tuple(
            Train(step=t["step"], slots=tuple(t["slots"]), rollouts=tuple((s, a, p) for s, a, p in t["rollouts"]))
            for t in trains
        )

    def log_step(self, step: int, metrics: Mapping[str, Any], ledger: Mapping[str, int]) -> None:
        self._db.execute("INSERT OR REPLACE INTO step VALUES ('rl', ?, ?)", (step, to_json(metrics)))
        self.log_ledger(step, ledger)

    def log_ledger(self, step: int, ledger: Mapping[str, int]) -> None:
        self._db.execute("DELETE FROM ledger WHERE stage = 'rl' AND step = ?", (step,))
        self._db.executemany("INSERT INTO ledger VALUES ('rl', ?, ?, ?)", [(step, why, n) for why, n in ledger.items()])

    def log_version(self, version: int, step: int, hash: str) -> None:
        """Log the hash of a version. Raises ValueError if another hash is logged: a resumed run repeats steps exactly."""
        logged = self.hash_of(version) or hash
        if logged != hash:
            raise ValueError(f"version {version} came out as {hash[:12]}, was {logged[:12]} before: not reproducible")
        self._db.execute("INSERT OR IGNORE INTO version VALUES (?, ?, ?, ?)", (version, step, hash, time.time()))

    def hash_of(self, version: int) -> str | None:
        row = self._db.execute("SELECT hash FROM version WHERE version = ?", (version,)).fetchone()
        return row[0] if row else None

    def log_served(self, engine: str, report: Any) -> None:
        values = (report.version, engine, report.hash, report.read_bytes, report.seconds, report.paused)
        self._db.execute("INSERT INTO served VALUES (?, ?, ?, ?, ?, ?)", values)

    def log_service(self, name: str, host: str) -> None:
        """Log that a service has started on a host."""
        self._db.execute("INSERT OR IGNORE INTO service VALUES (?, ?, 0, 0)", (host, name))

    def log_work(self, name: str, host: str, results: int, volume: int) -> None:
        """Add to what a service did: an environment's graded rollouts and their sampled tokens, an engine's new versions and the
        bytes that it read for them."""
        sums = "results = results + ?, volume = volume + ?"
        self._db.execute(f"UPDATE service SET {sums} WHERE host = ? AND name = ?", (results, volume, host, name))

    # Live settings

    def ask(self, name: str, value: Any) -> None:
        """Add a change to the pending ones."""
        values = time.time(), name, json.dumps(value)
        self._db.execute("INSERT INTO change (at, name, value) VALUES (?, ?, ?)", values)

    def plan(self, changes: Changes) -> None:
        """Plan `services.changes`, without those that an earlier process asked for."""
        [(last,)] = self._db.execute("SELECT COALESCE(MAX(step), -1) FROM change")
        self._planned = sorted((int(step) - 1, values) for step, values in changes.items() if int(step) - 1 > last)

    def asked(self, at: int = 0) -> list[tuple[int, str, Any]]:
        """Return the pending changes of settings: number, name and value. Those planned for steps up to `at` (from 0) now are
        pending too."""
        while self._planned and self._planned[0][0] <= at:
            for name, value in self._planned.pop(0)[1].items():
                self.ask(name, value)
        rows = self._db.execute("SELECT number, name, value FROM change WHERE step IS NULL ORDER BY number")
        return [(number, name, json_of(value)) for number, name, value in rows]

    def judge(self, number: int, step: int | None) -> None:
        """Record that a change applies from `step` on, or with None that it is refused."""
        self._db.execute("UPDATE change SET step = ? WHERE number = ?", (REFUSED if step is None else step, number))

    def close(self) -> None:
        self._db.close()


def change_live(settings: Settings, name: str, value: Any, rollouts: Iterable[tuple[Rollout, Grade]] = ()) -> Settings:
    """Return `settings` with one change. Raises ValueError for a setting that a live run cannot change, or an unfit value:
    rewards must be able to score the rollouts in `rollouts`."""
    require_live(name)
    changed = override(settings, {name: value})
    changed.require_used()
    changed.reward.tried(rollouts)
    return changed


def request_change(run: RunDir, name: str, value: Any) -> None:
    """Ask a live run to change a setting. The run applies the change within a second, and records from which step on."""
    with closing(Journal(run)) as journal:
        journal.ask(name, value)
