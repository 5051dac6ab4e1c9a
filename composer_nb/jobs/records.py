"""Files that are there whole or not at all, and what else records need."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OUTPUTS = "COMPOSER_NB_OUTPUTS"
"""Variable that tells the last cell of a notebook where to write."""
RESERVE, RESERVE_BYTES = ".reserve", 256 * 1024
ENDED = {"completed": 0, "failed": 1, "timed_out": 124, "interrupted": 130, "lost": 75}
"""States of a run that is over, with its exit status; before that it is `pending` or `running`."""


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Writes a file that is there whole or not at all; with `sync` also after a power failure."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(text.encode("utf-8", errors="backslashreplace"))  # half a surrogate pair: JSON's own escape
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file as `write_text` does; on a full disk it takes the space that was reserved beside it."""
    text = json.dumps(value, indent=2) + "\n"
    try:
        write_text(path, text)
    except OSError:
        if not (path.parent / RESERVE).exists():
            raise
        (path.parent / RESERVE).unlink(missing_ok=True)
        write_text(path, text)


def read_json(path: Path) -> dict[str, Any] | None:
    """A record, or None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def now() -> str:
    """The time, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def reserve(folder: Path) -> Iterator[None]:
    """Keeps a little space, so that the record can be written when the disk is full."""
    (folder / RESERVE).write_bytes(bytes(RESERVE_BYTES))
    try:
        yield
    finally:
        (folder / RESERVE).unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Removes what was being written, and what was set aside, when their writer was killed."""
    for pattern in ("*.part", RESERVE):
        for part in folder.rglob(pattern):
            part.unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep(**values: Any) -> None:
    """Writes the outputs of a notebook; the runner adds a last cell that calls it. Paths become text, NumPy's numbers
    Python's. Raises TypeError for what JSON does not hold."""
    plain = {name: _plain(value) for name, value in values.items()}
    for name, value in plain.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"output {name} must be text, a number, a list or a dictionary of such: {error}") from None
    write_json(Path(os.environ[OUTPUTS]), plain)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
