"""Store the outcomes of candidates in one SQLite file, so that nothing is tried twice.

Each outcome is one transaction: an interrupted or killed run loses at most what was under way.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

from composer_nb.harness.tasks.making.trial import TrialOutcome
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import check_database

_TABLES = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists outcomes (
    key text primary key, kind text not null, verdict text not null, seconds real not null, task text
);
"""


class TaskStore:
    """The record of a repository's tasks. For one thread."""

    def __init__(self, path: Path) -> None:
        """Open the record. Raises ValueError for a file that is not one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path)
        try:
            check_database(self._db, path)
            self._db.executescript(_TABLES)
            self.facts: dict[str, str] = dict(self._db.execute("select name, value from facts"))
            rows = self._db.execute("select key, kind, verdict, seconds, task from outcomes order by rowid").fetchall()
        except (sqlite3.DatabaseError, ValueError) as error:
            self._db.close()
            raise ValueError(f"{path}: not a record of tasks made: {error}") from None
        self.outcomes: dict[str, TrialOutcome] = {}
        """By key, in the order in which they were stored."""
        for key, kind, verdict, seconds, text in rows:
            task = None if text is None else Task.model_validate_json(text)
            self.outcomes[key] = TrialOutcome(key=key, kind=kind, verdict=verdict, seconds=seconds, task=task)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def keep_fact(self, name: str, value: str) -> None:
        self.facts[name] = value
        with self._db:
            self._db.execute("insert or replace into facts values (?, ?)", (name, value))

    def keep(self, outcome: TrialOutcome) -> None:
        self.outcomes[outcome.key] = outcome
        text = outcome.task.model_dump_json() if outcome.task is not None and outcome.verdict == "kept" else None
        row = (outcome.key, outcome.kind, outcome.verdict, outcome.seconds, text)
        with self._db:
            self._db.execute("insert or replace into outcomes values (?, ?, ?, ?, ?)", row)
