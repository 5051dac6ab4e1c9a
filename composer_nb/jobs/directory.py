"""The files of a run of a job file: made, read, corrected.

The records of the attempts are the truth; run.json of the whole is a summary. A run is alive while its lock is held, so no
process number has to be trusted.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.files import point, write_atomic
from composer_nb.harness.untrusted import beneath
from composer_nb.jobs import processes
from composer_nb.jobs.check import notebook_digest
from composer_nb.jobs.records import ENDED, file_digest, now, read_json, remove_parts, write_record
from composer_nb.trainer.services.head import claim, holder

STOP_S = 40.0
"""Seconds after a request to stop until a notebook is killed: its cell's grace, the kernel's end, the sweep."""


def create(runs: Path, name: str) -> Path:
    """Make `runs/<name>-<time>-<id>` and point `runs/<name>` at it. The id keeps runs apart that begin at once, here and in
    the environment of their processes."""
    unique = uuid.uuid4().hex[:6]
    folder = runs.resolve() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{unique}"
    folder.mkdir(parents=True)
    point(runs / name, folder)
    return folder


def find(runs: Path, text: str | None = None) -> Path:
    """Return the run that `text` names: a directory, a job's name (its newest run), or nothing (the newest of all). Raises
    FileNotFoundError."""
    for path in (Path(text), runs / text) if text else ():
        if (path / "job.json").is_file():
            return path.resolve()
    found = sorted(path.parent for path in runs.glob("*/job.json") if not path.parent.is_symlink())
    if text or not found:
        raise FileNotFoundError(f"{text or runs}: no run of a job file is there; composer-nb jobs run FILE makes one")
    return max(found, key=lambda path: (path / "job.json").stat().st_mtime).resolve()


def attempts(folder: Path, node: str) -> list[int]:
    """Return the numbers of the attempts at a node, in order."""
    return sorted(int(path.name) for path in beneath(folder / "nodes", node).glob("*") if path.name.isdecimal())


def attempt_dir(folder: Path, node: str, number: int) -> Path:
    return beneath(folder / "nodes", node) / str(number)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock. Raises ValueError where another process does."""
    fd = claim(folder / "lock", tries=40)  # to ask whether a run is alive is to hold its lock for a moment
    if fd is None:
        raise ValueError(f"{folder} is being run already; composer-nb jobs cancel {folder} ends it")
    try:
        yield
    finally:
        os.close(fd)


def alive(folder: Path) -> bool:
    """Return whether a runner holds the run's lock."""
    return holder(folder / "lock") is not None


def snapshot(notebook: Path, folder: Path) -> Path:
    """Return a copy of a notebook in the run, so that an edit meanwhile changes nothing."""
    digest = notebook_digest(notebook)
    copy = folder / "notebooks" / digest[:12] / notebook.name
    with suppress(FileNotFoundError, ValueError):  # not there yet, or damaged
        if notebook_digest(copy) == digest:
            return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(copy, notebook.read_bytes())
    return copy


# Making records true


def settle(path: Path, state: str, error: str) -> dict[str, Any]:
    """Write the record of an attempt that could not do it itself, end what it left running here, and set the state of the cell
    that ran."""
    attempt = read_json(path / "attempt.json") or {}
    if mark := attempt.get("mark"):
        processes.end(lambda: [p for p in processes.marked(processes.NODE, mark) if processes.lease(p) is None])
    record = {**attempt.get("about", {}), **(read_json(path / "run.json") or {})}
    record |= {"state": state, "error": error, "ended": now()}
    import nbformat  # takes a second, which a look at a run need not wait

    output = beneath(path, Path(attempt.get("output", "missing")).name)
    try:
        book = nbformat.read(output, 4)
    except Exception as fault:  # nbformat's reader raises what its many versions happen to raise
        record["notebook_error"] = f"{output.name} cannot be read: {type(fault).__name__}"
    else:
        for cell in book.cells:
            if cell.metadata.get("papermill", {}).get("status") == "running":
                cell.metadata.papermill["status"] = state
        write_atomic(output, nbformat.writes(book) + "\n")
        record |= {"output": output.name, "output_sha256": file_digest(output)}
    write_record(path / "run.json", record)
    remove_parts(path)
    return record


def settle_all(folder: Path) -> list[dict[str, Any]]:
    """Correct the records that a killed runner left, once its notebooks have ended; return the processes that had to be ended.
    The caller holds the lock."""
    patience = time.monotonic() + STOP_S
    while time.monotonic() < patience and any(map(_saves, processes.of_run(folder.name))):
        time.sleep(0.2)
    ended = processes.end(lambda: processes.of_run(folder.name))
    remove_parts(folder)
    (folder / "cancel").unlink(missing_ok=True)
    for path in (folder / "nodes").glob("*/*"):
        if path.name.isdecimal() and (read_json(path / "run.json") or {}).get("state") not in ENDED:
            settle(path, "lost", "its runner was killed")
    return ended


def _saves(process: psutil.Process) -> bool:
    """Return whether this is the process of an attempt. It ends by itself when its runner has gone."""
    with suppress(psutil.Error):
        return "composer_nb.jobs" in process.cmdline()
    return False


# For people


def status(folder: Path, *, running: bool | None = None) -> dict[str, Any]:
    """Return the status of a run: its run.json, corrected by the records of its attempts.

    `running` says whether it has a runner, for a caller who holds the lock.
    """
    job = read_json(folder / "job.json")
    if job is None or "nodes" not in job:
        raise ValueError(f"{folder / 'job.json'} cannot be read: this run is lost; start a new one")
    running = alive(folder) if running is None else running
    summary = read_json(folder / "run.json") or {"id": job["id"], "name": job["name"], "state": "running", "nodes": {}}
    nodes = {name: _node(folder, name, summary["nodes"].get(name, {}), running) for name in job["nodes"]}
    for name, node in nodes.items():
        if node["state"] == "pending":
            waits = [need for need in job["nodes"][name]["needs"] if nodes[need]["state"] != "completed"]
            node["error"] = f"waits for {', '.join(waits)}" if waits else ""
    state = summary["state"] if running or summary["state"] != "running" else "lost"
    return {**summary, "state": state, "alive": running, "dir": str(folder), "nodes": nodes}


def _node(folder: Path, name: str, summary: dict[str, Any], running: bool) -> dict[str, Any]:
    """Return a node's record: the runner's last one if it is final, else that of its last attempt."""
    node = {"state": "pending", "attempt": 0, **summary}
    numbers = attempts(folder, name)
    if node["state"] in ENDED or not numbers:
        return node
    record = read_json(attempt_dir(folder, name, numbers[-1]) / "run.json") or {}
    state = record.get("state", "pending")
    if not running and state not in ENDED:
        state, record["error"] = "lost", "its runner was killed"
    known = {key: value for key, value in record.items() if key in ("error", "seconds", "outputs", "key")}
    return {**node, **known, "state": state, "attempt": numbers[-1]}


def cancel(folder: Path) -> dict[str, Any]:
    """End a run on whatever machine, or what is left of one; return its status."""
    if alive(folder):
        (folder / "cancel").touch()
        patience = time.monotonic() + STOP_S + 20
        while alive(folder):
            if time.monotonic() > patience:
                raise ValueError(f"{folder}: its runner does not answer; end that process, then cancel again")
            time.sleep(0.2)
    else:
        sweep(folder)
    return status(folder)


def sweep(folder: Path) -> list[dict[str, Any]]:
    """Clean up after a run without a runner; return the processes that were ended on this machine."""
    with locked(folder):
        ended = settle_all(folder)
        write_record(folder / "run.json", status(folder, running=False))
    return ended
