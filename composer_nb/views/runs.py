"""Runs as a table: the settings that differ, scores with intervals, and names by what differs.

rows = run_rows(runs_below(Path("runs")))
"""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_nb.trainer.recipe.arms import SEEDS, label
from composer_nb.trainer.recipe.reader import Status, read_status
from composer_nb.trainer.recipe.report import current, differing, flat, mean
from composer_nb.views.curves import known
from composer_nb.views.query import selector

# Policies whose held-out scores a run's row has.
POLICIES = ("start", "final")
# RL steps at the end whose mean a run's row has.
LAST = 10


def runs_below(folder: Path) -> list[Path]:
    """Return the runs in a folder and in its folders, the newest last; links are left out."""
    paths = []
    for root, folders, files in os.walk(folder):
        if "run.db" in files:
            paths.append(Path(root))
            folders.clear()
    return sorted(paths, key=lambda path: (path / "run.db").stat().st_mtime)


def differing_settings(statuses: Sequence[Status]) -> list[dict[str, Any]]:
    """Return the settings of each run, by dotted name, that are not the same in all."""
    settings = differing(*(current(status.settings) for status in statuses))
    return [{name: values[run] for name, values in settings.items()} for run in range(len(statuses))]


def run_rows(paths: Sequence[Path], where: str = "") -> list[dict[str, Any]]:
    """Return a row for each run that fits `where` (`views.query`); a folder that cannot be read as a run is left out."""
    statuses = []
    for path in paths:
        with suppress(ValueError, FileNotFoundError, sqlite3.OperationalError):  # a run.db without tables yet
            statuses.append(read_status(path))
    rows, searched_rows = [], []
    for status, values in zip(statuses, differing_settings(statuses), strict=True):
        row: dict[str, Any] = {"run": status.path.name, "name": label(values), "path": str(status.path)}
        row |= {"state": status.state, "steps": len(status.steps)}
        row["solved"] = mean([value for _, value in known(status.steps[-LAST:], "solved")])
        for policy in POLICIES:
            score = status.scores.get(policy, {})
            low, high = score.get("ci95", (None, None))
            row |= {policy: score.get("pass_at_1"), f"{policy}_low": low, f"{policy}_high": high}
        rows.append(row | values)
        searched_rows.append(flat(current(status.settings)) | row)
    names = {name for row in searched_rows for name in row}
    fits = selector(where, names, lambda row: " ".join(map(str, row.values())))
    return [row for row, searched in zip(rows, searched_rows, strict=True) if fits(searched, row)]


def grouped(statuses: Sequence[Status]) -> dict[str, list[Status]]:
    """Return runs by what differs between them. Three and more that differ in their seeds alone, or in nothing, are one group."""
    groups: dict[str, list[tuple[Status, str]]] = {}
    for status, values in zip(statuses, differing_settings(statuses), strict=True):
        alone = label({name: value for name, value in values.items() if name not in SEEDS})
        groups.setdefault(alone, []).append((status, label(values)))
    result: dict[str, list[Status]] = {}
    for text, members in groups.items():
        if len(members) > 2:
            repeated = len({name for _, name in members}) < len(members)
            count = f"{len(members)} {'runs' if repeated else 'seeds'}"
            result[", ".join(filter(None, (text, count)))] = [status for status, _ in members]
        else:
            for status, name in members:
                path_name = status.path.name
                result[(name or path_name) if name not in result else f"{name}, {path_name}"] = [status]
    return result
