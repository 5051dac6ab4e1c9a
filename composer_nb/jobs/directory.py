"""What a run of a job file leaves on disk, and how to read it, whoever wrote it and however that ended.

The records of the attempts are the truth; run.json of the whole is a summary. A run is alive while somebody holds its lock, so
nobody has to believe a process number.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb.jobs import processes
from composer_nb.jobs.check import notebook_digest
from composer_nb.jobs.records import ENDED, file_digest, now, read_json, remove_parts, write_json, write_text

STOP_S = 40.0
"""Seconds after a request to stop until a notebook is killed: its cell's grace, the kernel's end, the sweep."""


def create(runs: Path, name: str) -> Path:
    """Makes `runs/<name>-<time>-<id>` and points `runs/<name>` at it. The id keeps runs apart that begin at once, here and in
    the environment of their processes."""
    unique = uuid.uuid4().hex[:6]
    folder = runs.resolve() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{unique}"
    folder.mkdir(parents=True)
    link, temporary = runs / name, runs / f".{name}-{unique}"
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is a folder of its own; choose another name for the job, or move it away")
    temporary.symlink_to(folder.name)
    os.replace(temporary, link)
    return folder


def find(runs: Path, text: str | None = None) -> Path:
    """The run that `text` names: a directory, a job's name (its newest run), or nothing (the newest of all). Raises
    FileNotFoundError."""
    for path in (Path(text), runs / text) if text else ():
        if (path / "job.json").is_file():
            return path.resolve()
    found = sorted(path.parent for path in runs.glob("*/job.json") if not path.parent.is_symlink())
    if text or not found:
        raise FileNotFoundError(f"{text or runs}: no run of a job file is there; composer-nb jobs run FILE makes one")
    return max(found, key=lambda path: (path / "job.json").stat().st_mtime).resolve()


def attempts(folder: Path, node: str) -> list[int]:
    """Numbers of the attempts at a node, in order."""
    return sorted(int(path.name) for path in (folder / "nodes" / node).glob("*") if path.name.isdecimal())


def attempt_dir(folder: Path, node: str, number: int) -> Path:
    return folder / "nodes" / node / str(number)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the run's lock. Raises ValueError where somebody else does."""
    with (folder / "lock").open("a+") as lock:
        patience = time.monotonic() + 2  # to ask whether a run is alive is to hold its lock for a moment
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > patience:
                    raise ValueError(
                        f"{folder} is being run already; composer-nb jobs cancel {folder} ends it"
                    ) from None
                time.sleep(0.1)
        yield


def alive(folder: Path) -> bool:
    """Whether a runner holds the run's lock."""
    try:
        with (folder / "lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def snapshot(notebook: Path, folder: Path) -> Path:
    """A copy of a notebook in the run, so that an edit meanwhile changes nothing."""
    digest = notebook_digest(notebook)
    copy = folder / "notebooks" / digest[:12] / notebook.name
    with suppress(FileNotFoundError, ValueError):  # not there yet, or damaged
        if notebook_digest(copy) == digest:
            return copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    part = copy.with_suffix(".part")
    shutil.copyfile(notebook, part)
    os.replace(part, copy)
    return copy


# Making records true


def settle(path: Path, state: str, error: str) -> dict[str, Any]:
    """Writes the record of an attempt that could not do it itself, ends what it left running here, and says in its notebook
    what became of the cell that ran."""
    attempt = read_json(path / "attempt.json") or {}
    if mark := attempt.get("mark"):
        processes.end(lambda: [p for p in processes.marked(processes.NODE, mark) if processes.lease(p) is None])
    record = {**attempt.get("about", {}), **(read_json(path / "run.json") or {})}
    record |= {"state": state, "error": error, "ended": now()}
    import nbformat  # takes a second, which a look at a run need not wait

    output = Path(attempt.get("output", path / "missing"))
    try:
        book = nbformat.read(output, 4)
    except Exception as fault:  # nbformat's reader raises what its many versions happen to raise
        record["notebook_error"] = f"{output.name} cannot be read: {type(fault).__name__}"
    else:
        for cell in book.cells:
            if cell.metadata.get("papermill", {}).get("status") == "running":
                cell.metadata.papermill["status"] = state
        write_text(output, nbformat.writes(book) + "\n")
        record |= {"output": output.name, "output_sha256": file_digest(output)}
    write_json(path / "run.json", record)
    remove_parts(path)
    return record


def settle_all(folder: Path) -> list[dict[str, Any]]:
    """Makes true what a killed runner left, once its notebooks have ended, and ends what they did not; returns that. The
    caller holds the lock."""
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
    """Whether it is the process of an attempt, which ends by itself when its runner has gone."""
    with suppress(psutil.Error):
        return "composer_nb.jobs" in process.cmdline()
    return False


# For people


def status(folder: Path, *, running: bool | None = None) -> dict[str, Any]:
    """What became of a run: its run.json, corrected by the records of the attempts where it has not the last word.

    `running` says whether somebody runs it, for a caller who holds the lock.
    """
    job = read_json(folder / "job.json")
    if job is None or "nodes" not in job:
        raise ValueError(f"{folder / 'job.json'} cannot be read: this run is lost; start a new one")
    running = alive(folder) if running is None else running
    told = read_json(folder / "run.json") or {"id": job["id"], "name": job["name"], "state": "running", "nodes": {}}
    nodes = {name: _node(folder, name, told["nodes"].get(name, {}), running) for name in job["nodes"]}
    for name, node in nodes.items():
        if node["state"] == "pending":
            waits = [need for need in job["nodes"][name]["needs"] if nodes[need]["state"] != "completed"]
            node["error"] = f"waits for {', '.join(waits)}" if waits else ""
    state = told["state"] if running or told["state"] != "running" else "lost"
    return {**told, "state": state, "alive": running, "dir": str(folder), "nodes": nodes}


def _node(folder: Path, name: str, told: dict[str, Any], running: bool) -> dict[str, Any]:
    """A node as it is: what the runner said last, if that is final, else what its last attempt says."""
    node = {"state": "pending", "attempt": 0, **told}
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
    """Ends a run, whoever runs it and wherever, or what is left of one; returns its status."""
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
    """Cleans up after a run that nobody runs any more; returns the processes it ended on this machine."""
    with locked(folder):
        ended = settle_all(folder)
        write_json(folder / "run.json", status(folder, running=False))
    return ended
