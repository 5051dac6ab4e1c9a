"""Run one notebook with parameters and record what happened.

papermill alone marks cells that never ran as completed, leaves empty files after a kill, ignores misspelt parameters and dies of
SIGTERM. Here parameters are checked against the notebook's annotations before a kernel starts; files are renamed into place;
SIGTERM and Ctrl-C interrupt the cell that runs and wait for it (`cells.py`); processes that a kernel left are ended unless they
hold a lease (`processes.py`), even if this process is killed; `run.json` beside the executed notebook holds the record.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb import __version__
from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.jobs import processes
from composer_nb.jobs.check import check_outputs, check_parameters, notebook_digest, outputs_cell
from composer_nb.jobs.records import ENDED, OUTPUTS, file_digest, now, reserve, write_record
from composer_nb.trainer.records.provenance import commit, package_digest

START_S = 180
"""Seconds a kernel may take to start, more on a busy machine: ten at once on two cores take most of a minute."""


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
    """Execute `source` into `output` and return the record that is also written to run.json beside it.

    `say` gets every line that a cell prints, as it is printed; `timeout_s` limits the notebook, `cell_timeout_s` one cell;
    `outputs` are names for variables of the notebook (`{"run_dir": "run.path"}`) whose final values are recorded; `folder` is
    where the kernel runs, by default the notebook's own; `about` is added to the record; `mark` identifies its processes. Raises
    ValueError for parameters that the notebook does not take, JobFailed, and KeyboardInterrupt on Ctrl-C or SIGTERM, always
    after output and run.json have been written. For the main thread.
    """
    values, wanted = check_parameters(source, parameters or {}), outputs or {}
    check_outputs(source, wanted)
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    mark = mark or f"{source.stem}-{uuid.uuid4().hex[:12]}"
    record = {
        **(about or {}), "state": "running", "notebook": source.name,
        "notebook_sha256": notebook_digest(source), "parameters": dict(values),
        "package_digest": package_digest(), "commit": commit(), "versions": _versions(),
        "host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time(),
        "started": now(),
    }  # fmt: skip
    start, path, kept = time.perf_counter(), output.with_name("run.json"), output.with_name("outputs.json")
    with ExitStack() as stack:
        stack.enter_context(terminate_as_interrupt())
        stack.enter_context(reserve(output.parent))
        write_record(path, record)
        kept.unlink(missing_ok=True)
        with ExitStack() as inner:
            sockets = inner.enter_context(_sockets())
            inner.enter_context(processes.guarded(processes.NODE, mark, output.parent, sockets))
            variables = {processes.NODE: mark, OUTPUTS: str(kept), "JUPYTER_RUNTIME_DIR": str(sockets)}
            inner.enter_context(_environment(variables))
            inner.enter_context(_swept(mark, record))
            limits = timeout_s, cell_timeout_s
            failure = _execute(source, output, values, wanted, folder or source.parent, say, limits, record)
        if wanted and failure is None:
            record["outputs"] = json.loads(kept.read_text(encoding="utf-8"))
        if output.is_file():
            record["output"], record["output_sha256"] = output.name, file_digest(output)
        record |= {"ended": now(), "seconds": time.perf_counter() - start}
        write_record(path, record)
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
    limits: tuple[float | None, int | None],
    record: dict[str, Any],
) -> BaseException | None:
    """Run the cells; add state, error and cells to `record`. Return what ended them early."""
    from nbformat.v4 import new_code_cell
    from papermill.iorw import load_notebook_node
    from papermill.parameterize import parameterize_notebook
    from traitlets.config import Config

    from composer_nb.jobs.cells import CANCELLED, Execution, first_line

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # the record says it
    book = load_notebook_node(str(source))
    book = parameterize_notebook(book, dict(values)) if values else book
    if outputs:
        book.cells.append(new_code_cell(outputs_cell(outputs), metadata={"tags": ["outputs"]}))
    run = Execution(
        *(book, output, say, limits[0]),
        timeout=limits[1],
        startup_timeout=int(patience(START_S)),
        resources={"metadata": {"path": str(folder)}},
        config=Config({"KernelManager": {"transport": "ipc", "ip": os.environ["JUPYTER_RUNTIME_DIR"] + "/k"}}),
    )
    failure: BaseException | None = None
    with run.heeding_signals():
        try:
            run.run()
            record["state"] = "completed"
        except KeyboardInterrupt as interrupt:
            record["state"], failure = run.stopped or "interrupted", interrupt
            run.error = run.error or CANCELLED
            if run.stopped == "timed_out":
                run.error = f"the notebook took longer than {limits[0]} s (timeout_s)"
                failure = TimeoutError(run.error)
        except Exception as error:  # whatever nbclient, the kernel or a cell raises is this run's outcome
            # Kernels that do not start, or die between cells, are RuntimeErrors; what a cell raises is a `fault`.
            record["state"] = run.fault or ("lost" if isinstance(error, RuntimeError) else "failed")
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            hint = "; free some space, then run again with --resume" if full else ""
            run.error = run.error or f"{type(error).__name__}: {first_line(error)}{hint}"
            failure = error
    if run.error:
        record["error"] = run.error
    record |= run.counts()
    return failure


def _versions() -> dict[str, str]:
    found = {"composer_nb": __version__, "python": sys.version.split()[0]}
    for name in ("papermill", "nbclient", "ipykernel", "numpy", "torch", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# Signals and processes


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, once, so that everything ends as on Ctrl-C. For the main thread."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    with processes.handling({signal.SIGTERM: interrupt}):
        yield


@contextmanager
def _swept(mark: str, record: dict[str, Any]) -> Iterator[None]:
    """End every process that was started while the block ran, orphans of the kernel included, and record it. Processes that hold
    a lease are spared and recorded."""
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
    """Yield a private directory for the kernel's sockets. Kernels that start at once take each other's TCP ports and hang."""
    folder = socket_folder(len("/nb-12345678/k-12345"))
    with tempfile.TemporaryDirectory(prefix="nb-", dir=folder, ignore_cleanup_errors=True) as made:
        yield Path(made)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Let the kernel inherit `values`, and no lease of ours."""
    before = dict(os.environ)
    os.environ.pop(processes.LEASE, None)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
