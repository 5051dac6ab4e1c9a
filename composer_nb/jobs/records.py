"""Records of a run, their states, and the outputs of a notebook."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json

OUTPUTS = "COMPOSER_NB_OUTPUTS"
"""Variable that tells the last cell of a notebook where to write."""
ENDED = {"completed": 0, "failed": 1, "timed_out": 124, "interrupted": 130, "lost": 75}
"""States of a run that is over, with its exit status; before that it is `pending` or `running`."""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a record; None where there is none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def now() -> str:
    """Return the time, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keep(**values: Any) -> None:
    """Write the outputs of a notebook; the runner adds a last cell that calls it. Paths become text, NumPy's numbers
    Python's, and NaN and the infinities null. Raises TypeError for what JSON does not hold."""
    outputs = {}
    for name, value in values.items():
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise TypeError(f"output {name} must be text, a number, a list or a dictionary of such: {error}") from None
        outputs[name] = value
    write_json(Path(os.environ[OUTPUTS]), outputs, sync=True)
