"""Atomic records, their states, and the outputs of a notebook."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json

OUTPUTS = "COMPOSER_NB_OUTPUTS"
"""Variable that tells the last cell of a notebook where to write."""
RESERVE, RESERVE_BYTES = ".reserve", 256 * 1024
ENDED = {"completed": 0, "failed": 1, "timed_out": 124, "interrupted": 130, "lost": 75}
"""States of a run that is over, with its exit status; before that it is `pending` or `running`."""


def write_record(path: Path, value: Any) -> None:
    """Write a JSON file and sync it. On a full disk, use the space that `reserve` keeps beside it."""
    try:
        write_json(path, value, sync=True)
    except OSError:
        if not (path.parent / RESERVE).exists():
            raise
        (path.parent / RESERVE).unlink(missing_ok=True)
        write_json(path, value, sync=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a record; None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def now() -> str:
    """Return the time, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def reserve(folder: Path) -> Iterator[None]:
    """Keep a little space, so that the record can be written when the disk is full."""
    (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
    try:
        yield
    finally:
        (folder / RESERVE).unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove the unfinished files of a killed writer."""
    for pattern in ("*.part", RESERVE):
        for part in folder.rglob(pattern):
            part.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep(**values: Any) -> None:
    """Write the outputs of a notebook; the runner adds a last cell that calls it. Paths become text, NumPy's numbers
    Python's, and NaN and the infinities null. Raises TypeError for what JSON does not hold."""
    plain = {name: _plain(value) for name, value in values.items()}
    for name, value in plain.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"output {name} must be text, a number, a list or a dictionary of such: {error}") from None
    write_record(Path(os.environ[OUTPUTS]), plain)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
