"""The files of a run directory that its services read, on machines that do not see it.

    the coordinator's machine: RUN/data, RUN/weights/start ── publish_inputs ──▶ <services.store>/<run>/inputs/
    a node of `composer-nb up FOLDER --join`: FOLDER/<run>/ ◀── local_run ───────┘

Covers files that do not change once RL has begun.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from fsspec.core import url_to_fs

from composer_nb.harness.files import replacing
from composer_nb.trainer.services.cluster import NODE

CONFIG = "weights/start/config.json"
# What services read besides the weights, which are for the trainer alone.
INPUTS = ("data/tokenizer.json", "data/tune.jsonl", CONFIG)


class NotSeen(ValueError):
    """A machine of the cluster does not see the run directory."""


def publish_inputs(run: Path, store: str) -> None:
    """Write the inputs of a run into a store, unless they are there."""
    fs, folder = url_to_fs(f"{store.rstrip('/')}/{run.name}/inputs", use_listings_cache=False)
    for file in (*(run / "weights" / "start").iterdir(), *(run / name for name in INPUTS if name != CONFIG)):
        target = f"{folder}/{file.relative_to(run).as_posix()}"
        if file.is_file() and not (fs.exists(target) and fs.size(target) == file.stat().st_size):
            fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            fs.put_file(str(file), target)


def local_run(run: Path, store: str = "", weights: bool = False) -> Path:
    """Return the run directory, or this node's copy of its inputs from `store`. Services ask before they make files there. Raises
    NotSeen if there is neither."""
    if (run / CONFIG).is_file():
        return run
    node = os.environ.get(NODE, "")
    if not (node and store):
        raise NotSeen(
            f"{socket.gethostname()} does not see {run}: keep --runs on a file system that all nodes of services.address share, "
            "under the same path; or set services.store, and start the nodes with composer-nb up --join"
        )
    fs, folder = url_to_fs(f"{store.rstrip('/')}/{run.name}/inputs", use_listings_cache=False)
    for source in fs.find(folder):
        name = source.removeprefix(f"{folder}/")
        file = Path(node, run.name, name)
        if (weights or name in INPUTS) and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as part:
                fs.get_file(source, str(part))
    return Path(node, run.name)
