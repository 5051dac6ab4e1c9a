"""Store the outcomes of candidates in one SQLite file, so that nothing is tried twice.

Each outcome is one transaction: an interrupted or killed run loses at most what was under way.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import Self

from composer_nb.harness.tasks.making.trial import Outcome
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import check_database

_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists outcomes (
    key text primary key, kind text not null, verdict text not null, seconds real not null, task text
);
"""


class Store:
    """The record of a repository's tasks. For one thread."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is not such a record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path)
        try:
            check_database(self._db, path)
            self._db.executescript(_TABLES)
        except (sqlite3.DatabaseError, ValueError) as error:
            self._db.close()
            raise ValueError(f"{path}: not a record of tasks made: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._db.close()

    def fact(self, name: str) -> str | None:
        row = self._db.execute("select value from facts where name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def keep_fact(self, name: str, value: str) -> None:
        with self._db:
            self._db.execute("insert or replace into facts values (?, ?)", (name, value))

    def outcome(self, key: str) -> Outcome | None:
        row = self._db.execute("select * from outcomes where key = ?", (key,)).fetchone()
        return None if row is None else _outcome(*row)

    def outcomes(self) -> list[Outcome]:
        """Return all outcomes in the order in which they were stored."""
        return [_outcome(*row) for row in self._db.execute("select * from outcomes order by rowid")]

    def keep(self, outcome: Outcome) -> None:
        text = outcome.task.model_dump_json() if outcome.task is not None and outcome.verdict == "kept" else None
        row = (outcome.key, outcome.kind, outcome.verdict, outcome.seconds, text)
        with self._db:
            self._db.execute("insert or replace into outcomes values (?, ?, ?, ?, ?)", row)


def _outcome(key: str, kind: str, verdict: str, seconds: float, task: str | None) -> Outcome:
    held = None if task is None else Task.model_validate_json(task)
    return Outcome(key=key, kind=kind, verdict=verdict, seconds=seconds, task=held)  # type: ignore[arg-type]
