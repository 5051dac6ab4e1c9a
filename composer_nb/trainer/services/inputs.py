"""The files of a run directory that engines, environments and evaluations read, on machines that do not see it.

    the coordinator's machine: RUN/data, RUN/weights/start ── publish_inputs ──▶ <services.store>/<run>/inputs/
    a node of `composer-nb up FOLDER --join`: FOLDER/<run>/ ◀── local_run ───────┘

Covers files that do not change once RL has begun.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from fsspec.core import url_to_fs

from composer_nb.trainer.services.cluster import NODE

# A run directory is where it has the last of these, which is written last.
INPUTS = ("data/tokenizer.json", "data/tune.jsonl", "weights/start/config.json")


class NotSeen(ValueError):
    """A machine of the cluster does not see the run directory."""


def publish_inputs(run: Path, store: str) -> None:
    """Write the inputs of a run into a store."""
    fs, folder = url_to_fs(f"{store.rstrip('/')}/{run.name}/inputs")
    for name in INPUTS:
        fs.makedirs(f"{folder}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{folder}/{name}", (run / name).read_bytes() if (run / name).is_file() else b"")


def local_run(run: Path, store: str = "") -> Path:
    """Return the run directory, or this node's copy of its inputs from `store`. Services ask before they make files there. Raises
    NotSeen if there is neither."""
    if (run / INPUTS[-1]).is_file():
        return run
    node = os.environ.get(NODE, "")
    if not (node and store):
        raise NotSeen(
            f"{socket.gethostname()} does not see {run}: keep --runs on a file system that all nodes of services.address share, "
            "under the same path; or set services.store, and start the nodes with composer-nb up --join"
        )
    copy = Path(node, run.name)
    if not copy.is_dir():
        fs, folder = url_to_fs(f"{store.rstrip('/')}/{run.name}/inputs", use_listings_cache=False)
        with tempfile.TemporaryDirectory(dir=node) as part:
            for name in INPUTS:
                Path(part, run.name, name).parent.mkdir(parents=True, exist_ok=True)
                Path(part, run.name, name).write_bytes(fs.cat_file(f"{folder}/{name}"))
            with suppress(OSError):  # another service of this node was faster
                Path(part, run.name).rename(copy)
    return copy
