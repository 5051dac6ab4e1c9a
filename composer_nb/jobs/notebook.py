"""Runs one notebook, through papermill's API, and says honestly what happened.

papermill alone marks cells that never ran as completed, writes files that a kill leaves empty, ignores misspelt parameters
and dies of SIGTERM without a word. So here: parameters are checked against the notebook's annotations before a kernel
starts; files are renamed into place; SIGTERM and Ctrl-C interrupt the cell that runs and wait for it; cells that did not run
say so; what a kernel left running is ended, but for what holds a lease (`processes.py`), even if we are killed outright;
`run.json` beside the executed notebook tells what happened.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb import __version__
from composer_nb.jobs import processes
from composer_nb.jobs.check import (
    check_outputs,
    check_parameters,
    notebook_digest,
    outputs_cell,
    package_digest,
)
from composer_nb.jobs.records import ENDED, OUTPUTS, file_digest, now, reserve, write_json, write_text

START_S = 180
"""Seconds a kernel may take to start: ten at once on two cores take most of a minute."""


class JobFailed(RuntimeError):
    """A cell raised, took too long, or the kernel died; the message is one line, the executed notebook holds the rest."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def run_notebook(
    source: Path,
    output: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    timeout_s: float | None = None,
    cell_timeout_s: int | None = None,
    outputs: Mapping[str, str] | None = None,
    folder: Path | None = None,
    about: Mapping[str, Any] | None = None,
    mark: str = "",
) -> dict[str, Any]:
    """Executes `source` into `output` and returns the record that is also written to run.json beside it.

    `say` gets every line that a cell prints, as it is printed; `timeout_s` limits the notebook, `cell_timeout_s` one cell;
    `outputs` are names for variables of the notebook (`{"run_dir": "run.path"}`) whose values are wanted at the end;
    `folder` is where the kernel runs, the notebook's own by default; `about` is added to the record; `mark` is what its
    processes are known by. Raises ValueError for parameters that the notebook does not take, JobFailed, and
    KeyboardInterrupt on Ctrl-C or SIGTERM, always after output and run.json have been written. For the main thread.
    """
    values = check_parameters(source, parameters or {})
    check_outputs(source, outputs or {})
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    mark = mark or f"{source.stem}-{uuid.uuid4().hex[:12]}"
    record = {**(about or {}), **_opening(source, values)}
    start = time.perf_counter()
    with terminate_as_interrupt(), reserve(output.parent):
        write_json(output.with_name("run.json"), record)
        kept = output.with_name("outputs.json")
        kept.unlink(missing_ok=True)
        with _sockets() as sockets, processes.guarded(processes.NODE, mark, output.parent, sockets):
            variables = {processes.NODE: mark, OUTPUTS: str(kept), "JUPYTER_RUNTIME_DIR": str(sockets)}
            with _environment(variables), _swept(mark, record):
                limits = {"timeout_s": timeout_s, "cell_timeout_s": cell_timeout_s}
                failure = _execute(source, output, values, outputs or {}, folder or source.parent, say, limits, record)
        _close(record, output, kept if outputs and failure is None else None, time.perf_counter() - start)
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if record["state"] != "completed":
        message = f"{record['error']} (the cell and its traceback are in {output})"
        raise JobFailed(message, ENDED[record["state"]]) from failure
    return record


def _execute(
    source: Path,
    output: Path,
    values: Mapping[str, Any],
    outputs: Mapping[str, str],
    folder: Path,
    say: Callable[[str], None],
    limits: Mapping[str, Any],
    record: dict[str, Any],
) -> BaseException | None:
    """Runs the cells; adds state, error and cells to `record`. Returns what ended it early."""
    import papermill
    from papermill.iorw import papermill_io
    from traitlets.config import Config

    from composer_nb.jobs.cells import ENGINE, Progress

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it would say is in the record
    papermill_io.register(f"{output.parent}/", _AtomicHandler())
    progress = Progress(timeout_s=limits["timeout_s"])
    failure: BaseException | None = None
    with progress.heeding_signals():
        try:
            papermill.execute_notebook(
                source,
                output,
                dict(values),
                engine_name=ENGINE,
                progress=progress,
                last_cell=outputs_cell(outputs),
                progress_bar=False,
                stdout_file=_Lines(say),
                start_timeout=START_S,
                execution_timeout=limits["cell_timeout_s"],
                cwd=folder,
                config=Config({"KernelManager": {"transport": "ipc", "ip": os.environ["JUPYTER_RUNTIME_DIR"] + "/k"}}),
            )
            record["state"] = progress.fault or "completed"
        except KeyboardInterrupt as interrupt:
            record["state"], failure = progress.stopped or "interrupted", interrupt
            if progress.stopped == "timed_out":
                progress.error = f"the notebook took longer than {limits['timeout_s']} s (timeout_s)"
                failure = TimeoutError(progress.error)
        except Exception as error:  # whatever papermill, the kernel or a cell raises is this run's outcome
            # Kernels that do not start, or die between cells, are RuntimeErrors; what a cell raises is a `fault`.
            record["state"] = progress.fault or ("lost" if isinstance(error, RuntimeError) else "failed")
            progress.error = progress.error or _one_line(error)
            failure = error
    if progress.error:
        record["error"] = progress.error
    record |= progress.counts()
    return failure


def _opening(source: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a run that has just begun."""
    return {
        "state": "running",
        "notebook": source.name,
        "notebook_sha256": notebook_digest(source),
        "parameters": dict(values),
        "package_digest": package_digest(),
        "commit": _commit(),
        "versions": _versions(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": psutil.Process().create_time(),
        "started": now(),
    }


def _close(record: dict[str, Any], output: Path, kept: Path | None, seconds: float) -> None:
    """Completes the record and writes it."""
    if kept:
        record["outputs"] = json.loads(kept.read_text(encoding="utf-8"))
    if output.is_file():
        record["output"], record["output_sha256"] = output.name, file_digest(output)
    record |= {"ended": now(), "seconds": seconds}
    write_json(output.with_name("run.json"), record)


def _versions() -> dict[str, str]:
    names = ("papermill", "nbclient", "ipykernel", "numpy", "torch", "ray")
    found = {"composer_nb": __version__, "python": sys.version.split()[0]}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    """The commit of the package's checkout; None outside of one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# Signals and processes


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, once, so that everything ends as on Ctrl-C. For the main thread."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _swept(mark: str, record: dict[str, Any]) -> Iterator[None]:
    """Ends, afterwards, every process that was started meanwhile, orphans of the kernel too, and notes which they were; what
    holds a lease is spared, and noted."""
    before = set(psutil.Process().children(recursive=True))

    def left() -> list[psutil.Process]:
        return [p for p in processes.started_by(mark, before) if processes.lease(p) is None]

    with processes.adopting_orphans():
        try:
            yield
        finally:
            record["ended_processes"] = processes.end(left)
            leased = [p for p in processes.started_by(mark, before) if processes.lease(p)]
            record["leased_processes"] = [{"pid": p.pid, "name": p.name(), "lease": processes.lease(p)} for p in leased]


@contextmanager
def _sockets() -> Iterator[Path]:
    """A private directory for the kernel's sockets. Over TCP kernels that start at once take one another's ports, and hang."""
    longest = 80  # of the 108 bytes that the path of a socket may have
    folder = None if len(tempfile.gettempdir()) < longest else "/tmp"
    with tempfile.TemporaryDirectory(prefix="nb-", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """What the kernel inherits: `values`, and no lease of ours."""
    before = dict(os.environ)
    os.environ.pop(processes.LEASE, None)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _AtomicHandler:
    """What papermill reads and writes notebooks with: files appear whole or not at all."""

    def read(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8")

    def write(self, text: str, path: str) -> None:
        write_text(Path(path), text, sync=False)  # often; the record's digest tells whether the last one is whole

    def pretty_path(self, path: str) -> str:
        return path


class _Lines:
    """A stream that hands on whole lines."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.rest = say, ""

    def write(self, text: str) -> None:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.say(line)

    def flush(self) -> None: ...


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return text + "; free some space, then run again with --resume" if full else text
