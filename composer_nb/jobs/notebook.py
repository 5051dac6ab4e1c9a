"""Run one notebook with parameters by papermill, and record what happened.

papermill sets the parameters, keeps times and saves. What it gets wrong is done here: parameters are checked against the
notebook's annotations before a kernel starts; files are renamed into place; SIGTERM and Ctrl-C interrupt the cell that runs and
wait for it; processes that a kernel left are ended (`processes.py`); `run.json` beside the executed notebook holds the record. A
cell's state, in `cell.metadata.papermill.status`, is true:

    pending      it did not run
    running      it runs now (or ran when everything was killed at once)
    completed    it ran to its end
    failed       it raised
    interrupted  it was interrupted, whatever it made of that
    timed_out    it ran too long, or the notebook did
    lost         the kernel died under it

Imported when a notebook is about to run: nbclient takes a second or two to import.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from traitlets.config import Config

from composer_nb import __version__
from composer_nb.harness.files import write_atomic, write_json
from composer_nb.harness.sandbox.reap import WRITER, with_mark
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.tools.session import ESCAPES
from composer_nb.harness.untrusted import visible
from composer_nb.jobs import processes
from composer_nb.jobs.check import check_outputs, check_parameters, notebook_digest, outputs_cell
from composer_nb.jobs.directory import ENDED, OUTPUTS, file_digest, now, read_json
from composer_nb.trainer.records.provenance import commit, package_digest

# Seconds a kernel may take to start, more on a busy machine: ten at once on two cores take most of a minute.
START_S = 180
# Seconds a cell has to end after an interrupt: enough to save, less than the 30 that Slurm and Kubernetes give.
GRACE_S = 15.0
TICK_S = 0.25
# Seconds between saves while a cell prints; papermill saves a big notebook more rarely.
SAVE_S = 0.5


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
    run_mark: str = "",
) -> dict[str, Any]:
    """Execute `source` into `output` and return the record that is also written to run.json beside it.

    `say` gets every line that a cell prints, as it is printed; `timeout_s` limits the notebook, `cell_timeout_s` one cell;
    `outputs` are names for variables of the notebook (`{"run_dir": "run.path"}`) whose final values are recorded; `folder` is
    where the kernel runs, by default the notebook's own; `about` is added to the record; `run_mark` is for processes that outlive
    the notebook (`processes.py`). Raises ValueError for parameters that the notebook does not take, JobFailed, and
    KeyboardInterrupt on Ctrl-C or SIGTERM, always after output and run.json have been written. For the main thread.
    """
    values = check_parameters(source, parameters or {})
    check_outputs(source, outputs or {})
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        **(about or {}), "state": "running", "notebook": source.name,
        "notebook_sha256": notebook_digest(source), "parameters": values,
        "package_digest": package_digest(), "commit": commit(), "versions": _versions(),
        "host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time(),
        "started": now(),
    }  # fmt: skip
    start, path, output_values = time.perf_counter(), output.with_name("run.json"), output.with_name("outputs.json")
    with processes.terminate_as_interrupt():
        write_json(path, record, sync=True)
        output_values.unlink(missing_ok=True)
        with processes.owned_directory(output.parent, record) as (sockets, mark):
            variables = {WRITER: with_mark(mark), processes.RUN: run_mark, OUTPUTS: str(output_values)}
            book = load_notebook_node(str(source))
            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # the record says it
            book = parameterize_notebook(book, values) if values else book
            if outputs:
                book.cells.append(new_code_cell(outputs_cell(outputs), metadata={"tags": ["outputs"]}))
            manager = _Manager(book, str(output), progress_bar=False, autosave_cell_every=SAVE_S)
            # Kernels that start at once take each other's TCP ports and hang: sockets are files.
            execution = _Execution(
                manager,
                timeout=cell_timeout_s,
                startup_timeout=int(patience(START_S)),
                resources={"metadata": {"path": str(folder or source.parent)}},
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/k"}}),
            )
            execution.say, execution.timeout_s = say, timeout_s
            with _environment(variables | {"JUPYTER_RUNTIME_DIR": str(sockets)}):
                failure = execution.outcome(record)
        if outputs and failure is None:
            record["outputs"] = json.loads(output_values.read_text(encoding="utf-8"))
        if output.is_file():
            record |= {"output": output.name, "output_sha256": file_digest(output)}
        record |= {"ended": now(), "seconds": time.perf_counter() - start}
        write_json(path, record, sync=True)
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if record["state"] != "completed":
        message = f"{record['error']} (the cell and its traceback are in {output})"
        raise JobFailed(message, ENDED[record["state"]]) from failure
    return record


def _versions() -> dict[str, str]:
    versions = {"composer_nb": __version__, "python": sys.version.split()[0]}
    for name in ("papermill", "nbclient", "ipykernel", "numpy", "torch", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let the kernel inherit `variables`."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Manager(NotebookExecutionManager):
    """papermill's record of an execution, with the states that it is given, in a file that is always whole."""

    def save(self, **_: Any) -> None:
        write_atomic(Path(self.output_path), nbformat.writes(self.nb) + "\n")  # the record's digest tells whether it is
        self.last_save_time = self.now()

    def cell_complete(self, cell: NotebookNode, cell_index: int | None = None, state: str = "", **_: Any) -> None:
        super().cell_complete(cell, cell_index)
        cell.metadata.papermill["status"] = state
        self.save()


class _Execution(PapermillNotebookClient):
    """One execution of a notebook: signals come in here, and what happened is read off."""

    say: Callable[[str], None]
    timeout_s: float | None
    stopped: str | None = None
    """`interrupted` or `timed_out`, once somebody asked for an end."""
    fault: str | None = None
    """State of the cell that ended the notebook, where it is not `stopped`."""
    error: str | None = None
    """One line about it."""
    cell: NotebookNode | None = None
    """The one that the kernel has."""
    sent = over = False
    deadline = 0.0
    line = ""

    def outcome(self, record: dict[str, Any]) -> BaseException | None:
        """Run the notebook; add state, error and cells to `record`. Return what ended it early."""
        failure: BaseException | None = None
        with self._heeding_signals():
            try:
                self.nb_man.notebook_start()
                self._check()
                self.execute()
                record["state"] = "completed"
            except KeyboardInterrupt as interrupt:
                record["state"], failure = self.stopped or "interrupted", interrupt
                self.error = self.error or "cancelled"
                if self.stopped == "timed_out":
                    self.error = f"the notebook took longer than {self.timeout_s} s (timeout_s)"
                    failure = TimeoutError(self.error)
            except Exception as error:  # whatever nbclient, the kernel or a cell raises is this run's outcome
                # Kernels that do not start, or die between cells, are RuntimeErrors; what a cell raises is a `fault`.
                record["state"] = self.fault or ("lost" if isinstance(error, RuntimeError) else "failed")
                full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                hint = "; free some space, then run again with --resume" if full else ""
                self.error = self.error or f"{type(error).__name__}: {_first_line(error)}{hint}"
                failure = error
            with suppress(OSError):  # the disk is full: the record says so
                self.nb_man.save()
        if self.error:
            record["error"] = self.error
        states = [cell.metadata.papermill["status"] for cell in self.nb.cells if cell.cell_type == "code"]
        run_count = sum(state not in ("pending", "running") for state in states)
        record |= {"cells": len(states), "cells_run": run_count, "cell_states": dict(Counter(states))}
        return failure

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Interrupt the cell that runs on Ctrl-C, SIGTERM and at the time limit. A cell that does not end within the
        grace period, or a second Ctrl-C, ends everything by a KeyboardInterrupt. For the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        with processes.handling(dict.fromkeys(numbers, self._on_signal)):
            signal.setitimer(signal.ITIMER_REAL, self.timeout_s or 0)
            try:
                yield
            finally:
                self.over = True
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.over:
            return
        if self.stopped is None:
            self.stopped = "timed_out" if number == signal.SIGALRM else "interrupted"
            self.deadline = time.monotonic() + GRACE_S
            signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        elif number == signal.SIGINT:
            self.deadline = 0.0
        if self.cell is None or time.monotonic() >= self.deadline:
            self.over = True
            raise KeyboardInterrupt
        if not self.sent and self.cell.execution_count is not None:  # before that a kernel ignores it
            self.sent = True
            provisioner: Any = self.km and self.km.provisioner
            with suppress(ProcessLookupError):
                os.killpg(provisioner.pgid, signal.SIGINT)

    def _check(self) -> None:
        if self.stopped:
            self.over = True
            raise KeyboardInterrupt

    def papermill_execute_cells(self) -> None:
        """Run all cells. Raises KeyboardInterrupt when it was stopped, and RuntimeError for a cell that ends it otherwise, whose
        state is then `fault`."""
        for index, cell in enumerate(self.nb.cells):
            self._check()
            self.nb_man.cell_start(cell, index)
            state = "failed"
            try:
                state = self._state_after(cell, index)
            except KeyboardInterrupt:
                state = self.stopped or "interrupted"
                raise
            finally:
                self.nb_man.cell_complete(cell, index, state=state)
            if self.sent:
                raise KeyboardInterrupt
            if state != "completed":
                self.fault = state
                raise RuntimeError(self.error)
        self._check()
        self.over = True

    def _state_after(self, cell: NotebookNode, index: int) -> str:
        """Execute a cell, note its error, and return its state."""
        state = "completed"
        self.cell = cell if cell.cell_type == "code" and cell.source.strip() else None
        try:
            self.execute_cell(cell, index)
        except CellExecutionError as error:
            state, self.error = "failed", _error_line(cell, error.ename, error.evalue)
        except CellTimeoutError:
            state, self.error = "timed_out", f"a cell took longer than {self.timeout} s (cell_timeout_s)"
        except DeadKernelError:
            status = getattr(getattr(self.km and self.km.provisioner, "process", None), "returncode", None) or 0
            reason = f"signal {-status}; out of memory?" if status < 0 else f"exit status {status}"
            state, self.error = "lost", f"the kernel died ({reason})"
        finally:
            self.cell = None
        if self.sent:
            if self.stopped != "timed_out":
                self.error = "cancelled"
            return self.stopped or "interrupted"
        errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if state == "completed" and errors:  # shown, not raised: the tag `raises-exception`, or a magic's own handling
            state, self.error = "failed", _error_line(cell, errors[0].ename, errors[0].evalue)
        return state

    def process_message(self, *args: Any, **kwargs: Any) -> NotebookNode | None:
        """Pass on whole lines."""
        output = super().process_message(*args, **kwargs)
        if output and output.output_type == "stream" and output.name == "stdout":
            *lines, self.line = (self.line + output.text).split("\n")
            for line in lines:
                self.say(line)
        return output


def _error_line(cell: NotebookNode, name: str, message: str) -> str:
    """Return an error on one line, with its cell (as numbered in the executed notebook) and the cell's line that raised it."""
    traceback = "\n".join(line for output in cell.get("outputs", []) for line in output.get("traceback", []))
    numbers = re.findall(rf"Cell In\[{cell.execution_count}\], line (\d+)", ESCAPES.sub("", traceback))
    lines = cell.source.split("\n")
    location, code = f"cell [{cell.execution_count}]", ""
    if numbers and int(numbers[-1]) <= len(lines):
        location, code = f"{location}, line {numbers[-1]}", visible(lines[int(numbers[-1]) - 1].strip())[:100]
    message = message.strip() or "no message"
    if name == "SystemExit":  # has no traceback
        message += ", which ends the notebook before its last cell"
    elif name == "AssertionError" and message == "no message" and code:
        message = f"`{code}` does not hold"
    return f"{name}: {_first_line(message)}, in {location}" + (f": `{code}`" if code and code not in message else "")


def _first_line(text: object) -> str:
    """Return the first line that is not empty."""
    return (str(text).strip() or "no message").splitlines()[0]


# An attempt of a job, in a process of its own: python -m composer_nb.jobs.notebook attempt.json


def main(path: Path) -> int:
    """Run the attempt at a node of a job file that `path` describes; return the exit status of its state."""
    attempt = json.loads(path.read_text(encoding="utf-8"))  # the arguments of run_notebook
    attempt |= {name: Path(attempt[name]) for name in ("source", "output", "folder")}
    try:
        with processes.terminate_as_interrupt():
            processes.follow_parent()
            run_notebook(**attempt, say=_print)
    except KeyboardInterrupt:
        _print("interrupted")
    except (JobFailed, ValueError, OSError) as error:
        _print(str(error))
        return getattr(error, "exit_status", 1)
    except Exception:  # a bug of ours: the log keeps its traceback, the job its record
        _print(traceback.format_exc())
        return 1
    return ENDED[(read_json(attempt["output"].with_name("run.json")) or {}).get("state", "interrupted")]


def _print(line: str) -> None:
    """Print a line. Where the log cannot grow (a full disk) the notebook still has it."""
    with suppress(OSError):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
