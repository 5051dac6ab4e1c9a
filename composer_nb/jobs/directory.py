"""The files of a run of a job file: made, read, corrected; and the outputs of a notebook.

The records of the attempts are the truth; run.json of the whole is a summary. A run is alive while its lock is held, so no
process number has to be trusted.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.files import file_digest, read_json, write_atomic, write_json
from composer_nb.harness.sandbox.reap import reap
from composer_nb.jobs.check import notebook_digest
from composer_nb.trainer.services.head import claim, holder

# Seconds after a request to stop until a notebook is killed: its cell's grace, the kernel's end, the sweep.
STOP_S = 40.0
# File in a run, which its runner has locked.
LOCK = "lock"
# Variable that tells the last cell of a notebook where to write.
OUTPUTS = "COMPOSER_NB_OUTPUTS"
# States of a run that is over, with its exit status; before that it is `pending` or `running`.
ENDED = {"completed": 0, "failed": 1, "timed_out": 124, "interrupted": 130, "lost": 75}


def create(runs: Path, name: str) -> Path:
    """Make `runs/<name>-<time>-<id>`. The id keeps runs apart that begin at once."""
    folder = runs.resolve() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True)
    return folder


def find(runs: Path, text: str | None = None) -> Path:
    """Return the run that `text` names: a directory, a job's name (its newest run), or nothing (the newest of all). Raises
    FileNotFoundError."""
    for path in (Path(text), runs / text) if text else ():
        if (path / "job.json").is_file():
            return path.resolve()
    folders = sorted(path.parent for path in runs.glob("*/job.json") if not path.parent.is_symlink())
    if text or not folders:
        raise FileNotFoundError(f"{text or runs}: no run of a job file is there; composer-nb jobs run FILE makes one")
    return max(folders, key=lambda path: (path / "job.json").stat().st_mtime).resolve()


def attempts(folder: Path, node: str) -> list[Path]:
    """Return the directories of the attempts at a node, in order."""
    paths = (folder / "nodes" / node).glob("*")
    return sorted((path for path in paths if path.name.isdecimal()), key=lambda path: int(path.name))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run's lock. Raises ValueError where another process holds it."""
    if (fd := claim(folder / LOCK)) is None:
        raise ValueError(f"{folder} is being run already; composer-nb jobs cancel {folder} ends it")
    try:
        yield
    finally:
        os.close(fd)


def alive(folder: Path) -> bool:
    """Return whether a runner holds the run's lock."""
    return holder(folder / LOCK) is not None


def snapshot(notebook: Path, folder: Path) -> Path:
    """Return a copy of a notebook in the run, so that an edit meanwhile changes nothing."""
    copy = folder / "notebooks" / notebook_digest(notebook)[:12] / notebook.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(copy, notebook.read_bytes())
    return copy


# Making records true


def settle(attempt_folder: Path, state: str, error: str) -> dict[str, Any]:
    """Write the record of an attempt that could not do it itself, end what it left running here, and set the state of the cell
    that ran in the notebook. Return the record, with `notebook_error` if the notebook cannot be read."""
    import nbformat  # takes a second, which a look at a run need not wait

    reap(attempt_folder)
    for unfinished_file in attempt_folder.glob("*.part"):
        unfinished_file.unlink(missing_ok=True)
    attempt = read_json(attempt_folder / "attempt.json") or {}
    record = {**attempt.get("about", {}), **(read_json(attempt_folder / "run.json") or {})}
    record |= {"state": state, "error": error, "ended": now()}
    output = attempt_folder / Path(attempt.get("output", "missing")).name
    try:
        notebook = nbformat.read(output, 4)
    except Exception as read_error:  # nbformat's reader raises what its many versions happen to raise
        record["notebook_error"] = f"{output.name} cannot be read: {type(read_error).__name__}"
    else:
        for cell in notebook.cells:
            if cell.metadata.get("papermill", {}).get("status") == "running":
                cell.metadata.papermill["status"] = state
        with suppress(OSError):  # the disk is full
            write_atomic(output, nbformat.writes(notebook) + "\n")
        record |= {"output": output.name, "output_sha256": file_digest(output)}
    with suppress(OSError):
        write_json(attempt_folder / "run.json", record, sync=True)
    return record


def settle_all(run_folder: Path) -> list[str]:
    """Mark as lost each attempt that a killed runner left unfinished, after its notebook on this host ended or, after STOP_S, was
    killed; remove a request to cancel, and end leftover resources. Return a line for each lost attempt. The caller holds the
    lock."""
    (run_folder / "cancel").unlink(missing_ok=True)
    lines = []
    for attempt_folder in sorted((run_folder / "nodes").glob("*/*")):
        record = read_json(attempt_folder / "run.json") or {}
        if not attempt_folder.name.isdecimal() or record.get("state") in ENDED:
            continue
        with suppress(psutil.Error, KeyError):
            process = psutil.Process(record["pid"])
            if record["host"] == socket.gethostname() and process.create_time() == record["process_started"]:
                psutil.wait_procs([process], timeout=STOP_S)  # it ends by itself when its runner has gone
                process.kill()
                psutil.wait_procs([process])
        if (read_json(attempt_folder / "run.json") or {}).get("state") not in ENDED:
            settle(attempt_folder, "lost", "its runner was killed")
            lines.append(f"{attempt_folder.parent.name}: attempt {attempt_folder.name} is lost")
    reap(run_folder)
    return lines


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
    nodes: dict[str, dict[str, Any]] = {}
    for name in job["nodes"]:
        node = {"state": "pending", "attempt": 0, **summary["nodes"].get(name, {})}
        if node["state"] not in ENDED and (paths := attempts(folder, name)):  # the last attempt knows better
            record = read_json(paths[-1] / "run.json") or {}
            state = record.get("state", "pending")
            if not running and state not in ENDED:
                state, record["error"] = "lost", "its runner was killed"
            node |= {key: record[key] for key in ("error", "seconds", "outputs", "key") if key in record}
            node |= {"state": state, "attempt": int(paths[-1].name)}
        if node["state"] == "pending":
            waits = [need for need in job["nodes"][name]["needs"] if nodes[need]["state"] != "completed"]
            node["error"] = f"waits for {', '.join(waits)}" if waits else ""
        nodes[name] = node
    state = summary["state"] if running or summary["state"] != "running" else "lost"
    return {**summary, "state": state, "alive": running, "dir": str(folder), "nodes": nodes}


def cancel(folder: Path) -> dict[str, Any]:
    """End a run on whatever machine, or what is left of one; return its status."""
    if alive(folder):
        (folder / "cancel").touch()
        deadline = time.monotonic() + STOP_S + 20
        while alive(folder):
            if time.monotonic() > deadline:
                raise ValueError(f"{folder}: its runner does not answer; end that process, then cancel again")
            time.sleep(0.2)
    else:
        sweep(folder)
    return status(folder)


def sweep(folder: Path) -> list[str]:
    """Clean up after a run without a runner; return a line for each record that was corrected."""
    with locked(folder):
        lines = settle_all(folder)
        write_json(folder / "run.json", status(folder, running=False), sync=True)
    return lines


# Records and the outputs of a notebook


def now() -> str:
    """Return the time, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


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
