"""Run one notebook with parameters by papermill, and record what happened.

papermill sets the parameters, keeps times and saves. What it gets wrong is done here: parameters are checked against the
notebook's annotations before a kernel starts; files are renamed into place; SIGTERM and Ctrl-C interrupt the cell that runs and
wait for it; processes that a kernel left are ended (`harness.sandbox.reap`); `run.json` beside the executed notebook holds the
record. A cell's state, in `cell.metadata.papermill.status`, is true:

    pending      it did not run
    running      it runs now (or ran when everything was killed at once)
    completed    it ran to its end
    failed       it raised
    interrupted  it was interrupted, whatever it made of that
    timed_out    it ran too long, or the notebook did
    lost         the kernel died under it

Imported when a notebook is about to run: nbclient takes a second or two to import.
"""

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
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat.v4 import new_code_cell
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NotebookExecutionManager
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook
from traitlets.config import Config

from composer_nb import __version__
from composer_nb.harness.files import file_digest, write_atomic, write_json
from composer_nb.harness.sandbox.reap import WRITER, owned_directory, with_mark
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.tools.session import ESCAPES
from composer_nb.harness.untrusted import visible
from composer_nb.jobs import processes
from composer_nb.jobs.check import check_outputs, check_parameters, notebook_digest
from composer_nb.jobs.directory import ENDED, OUTPUTS, now
from composer_nb.trainer.recipe.child import die_with
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

    def __init__(self, message: str, state: str = "failed") -> None:
        super().__init__(message)
        self.state, self.exit_status = state, ENDED[state]


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

    `say` gets every line that a cell prints, as it is printed, and after each cell its number, the time so far and its value;
    `timeout_s` limits the notebook, `cell_timeout_s` one cell;
    `outputs` are names for variables of the notebook (`{"run_dir": "run.path"}`) whose final values are recorded; `folder` is
    where the kernel runs, by default the notebook's own; `about` is added to the record; `run_mark` is for processes that outlive
    the notebook (`processes.py`). Raises ValueError for parameters that the notebook does not take, JobFailed, and
    KeyboardInterrupt on Ctrl-C or SIGTERM, always after output and run.json have been written. For the main thread.
    """
    checked_parameters = check_parameters(source, parameters or {})
    check_outputs(source, outputs or {})
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        **(about or {}), "state": "running", "notebook": source.name,
        "notebook_sha256": notebook_digest(source), "parameters": checked_parameters,
        "package_digest": package_digest(), "commit": commit(), "versions": _versions(),
        "host": socket.gethostname(), "pid": os.getpid(), "process_started": psutil.Process().create_time(),
        "started": now(),
    }  # fmt: skip
    start_s = time.perf_counter()
    record_file, outputs_file = output.with_name("run.json"), output.with_name("outputs.json")
    with processes.terminate_as_interrupt():
        write_json(record_file, record, sync=True)
        outputs_file.unlink(missing_ok=True)
        with owned_directory(output.parent, record) as (sockets, mark):
            environment = {WRITER: with_mark(mark), processes.RUN: run_mark, OUTPUTS: str(outputs_file)}
            notebook = load_notebook_node(str(source))
            logging.getLogger("papermill").setLevel(logging.CRITICAL)  # the record says it
            notebook = parameterize_notebook(notebook, checked_parameters) if checked_parameters else notebook
            if outputs:
                keyword_arguments = ", ".join(f"{name}={expression}" for name, expression in outputs.items())
                cell_source = f"from composer_nb.jobs.directory import keep\n\nkeep({keyword_arguments})"
                notebook.cells.append(new_code_cell(cell_source, metadata={"tags": ["outputs"]}))
            manager = _Manager(notebook, str(output), progress_bar=False, autosave_cell_every=SAVE_S)
            manager.outer = sys.exc_info()[1]
            # Kernels that start at once take each other's TCP ports and hang: sockets are files.
            kernel_channels = {"transport": "ipc", "ip": f"{sockets}/k", "connection_file": f"{sockets}/kernel.json"}
            timeouts = {"timeout": cell_timeout_s, "startup_timeout": int(patience(START_S))}
            execution = _Execution(manager, **timeouts, config=Config({"KernelManager": kernel_channels}))
            execution.say, execution.timeout_s = say, timeout_s
            failure = execution.run(record, env=os.environ | environment, cwd=str(folder or source.parent))
        if outputs and failure is None:
            record["outputs"] = json.loads(outputs_file.read_text(encoding="utf-8"))
        if output.is_file():
            record |= {"output": output.name, "output_sha256": file_digest(output)}
        record |= {"ended": now(), "seconds": time.perf_counter() - start_s}
        write_json(record_file, record, sync=True)
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if record["state"] != "completed":
        message = f"{record['error']} (the cell and its traceback are in {output})"
        raise JobFailed(message, record["state"]) from failure
    return record


def _versions() -> dict[str, str]:
    versions = {"composer_nb": __version__, "python": sys.version.split()[0]}
    for name in ("papermill", "nbclient", "ipykernel", "numpy", "torch", "ray"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


class _Manager(NotebookExecutionManager):
    """papermill's record of an execution, with true states, in a file that is always whole. `outer`: the error that the caller of
    all this handles, if there is one."""

    outer: BaseException | None

    def save(self, **_: Any) -> None:
        write_atomic(Path(self.output_path), nbformat.writes(self.nb) + "\n")  # the record's digest tells whether it is
        self.last_save_time = self.now()

    def cell_complete(self, cell: nbformat.NotebookNode, cell_index: int | None = None, **_: Any) -> None:
        """Give a cell its state: that of the error, if one is under way here."""
        super().cell_complete(cell, cell_index)
        if (error := sys.exc_info()[1]) is not self.outer:
            state = getattr(error, "state", "failed")
            if isinstance(error, KeyboardInterrupt):
                state = [*error.args, "interrupted"][0]
            cell.metadata.papermill["status"] = state
            self.save()


class _Execution(PapermillNotebookClient):
    """One execution of a notebook, which heeds signals and gives each cell its true state.

    Attributes:
        begun: When the execution began.
        stopped: `interrupted` or `timed_out`, once somebody asked for an end.
        cell: The one that the kernel has. It is `sent` an interrupt, and ends by itself or is left at the `deadline`.
        over: Signals change nothing any more.
    """

    say: Callable[[str], None]
    timeout_s: float | None
    stopped = line = ""
    cell: nbformat.NotebookNode | None = None
    sent, over, deadline, begun = False, False, 0.0, 0.0

    def run(self, record: dict[str, Any], **kernel: Any) -> BaseException | None:
        """Run the notebook; add state, error and cells to `record`. Return what ended it early.

        Ctrl-C, SIGTERM and the time limit interrupt the cell that runs. A cell that does not end within the grace period, or a
        second Ctrl-C, ends everything by a KeyboardInterrupt. For the main thread."""
        failure: BaseException | None = None
        signals, self.begun = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM), time.monotonic()
        with processes.handling(dict.fromkeys(signals, self._on_signal)):
            signal.setitimer(signal.ITIMER_REAL, self.timeout_s or 0)
            try:
                self.nb_man.notebook_start()
                self.execute(**kernel)
                record["state"] = "completed"
            except KeyboardInterrupt as interrupt:
                record |= {"state": self.stopped or "interrupted", "error": "cancelled"}
                failure = interrupt
                if self.stopped == "timed_out":
                    record["error"] = f"the notebook took longer than {self.timeout_s} s (timeout_s)"
                    failure = TimeoutError(record["error"])
            except Exception as error:  # kernels that do not start, or die between cells, are RuntimeErrors
                record["state"] = getattr(error, "state", "lost" if isinstance(error, RuntimeError) else "failed")
                has_message = isinstance(error, JobFailed)
                record["error"] = str(error) if has_message else f"{type(error).__name__}: {_first_line(error)}"
                failure = error
            finally:
                self.over = True
                signal.setitimer(signal.ITIMER_REAL, 0)
            with suppress(OSError):  # the disk is full: the record says so
                self.nb_man.save()
        state_counts = Counter(cell.metadata.papermill["status"] for cell in self.nb.cells if cell.cell_type == "code")
        run_count = state_counts.total() - state_counts["pending"] - state_counts["running"]
        record |= {"cells": state_counts.total(), "cells_run": run_count, "cell_states": dict(state_counts)}
        return failure

    def _on_signal(self, number: int, frame: object) -> None:
        """Interrupt the cell that runs; raise KeyboardInterrupt if none runs, or at the end of the grace period."""
        if self.over:
            return
        if not self.stopped:
            self.stopped = "timed_out" if number == signal.SIGALRM else "interrupted"
            self.deadline = time.monotonic() + GRACE_S
            signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        elif number == signal.SIGINT:
            self.deadline = 0.0
        if self.cell is None or time.monotonic() >= self.deadline:
            self.over = True
            raise KeyboardInterrupt(self.stopped)
        if not self.sent and self.cell.execution_count is not None:  # before that a kernel ignores it
            self.sent = True
            provisioner: Any = self.km and self.km.provisioner
            with suppress(ProcessLookupError):
                os.killpg(provisioner.pgid, signal.SIGINT)

    def papermill_execute_cells(self) -> None:
        super().papermill_execute_cells()
        self.over = True  # a signal while the kernel shuts down does not undo what the cells did

    def execute_cell(self, cell: nbformat.NotebookNode, cell_index: int, *_: Any, **__: Any) -> None:
        """Execute a cell. Raises JobFailed for one that did not run to its end, and KeyboardInterrupt for one that was
        interrupted, whatever it made of that."""
        if self.stopped:
            raise KeyboardInterrupt("pending")
        problem: JobFailed | None = None
        self.cell = cell if cell.cell_type == "code" and cell.source.strip() else None
        try:
            super().execute_cell(cell, cell_index)
            # Shown, not raised: the tag `raises-exception`, or a magic's own handling.
            for output in [output for output in cell.get("outputs", []) if output.output_type == "error"][:1]:
                problem = JobFailed(_error_line(cell, output.ename, output.evalue))
        except CellExecutionError as error:
            problem = JobFailed(_error_line(cell, error.ename, error.evalue))
        except CellTimeoutError:
            problem = JobFailed(f"a cell took longer than {self.timeout} s (cell_timeout_s)", "timed_out")
        except DeadKernelError:
            status = getattr(getattr(self.km and self.km.provisioner, "process", None), "returncode", None) or 0
            reason = f"signal {-status}; out of memory?" if status < 0 else f"exit status {status}"
            problem = JobFailed(f"the kernel died ({reason})", "lost")
        finally:
            self.cell = None
        if self.sent:
            raise KeyboardInterrupt(self.stopped)
        if problem is not None:
            raise problem
        if cell.cell_type == "code":
            texts = [
                output.data.get("text/plain", "") for output in cell.outputs if output.output_type == "execute_result"
            ]
            value = f": {visible(_first_line(texts[-1]))[:100]}" if texts else ""
            self.say(f"cell {cell_index + 1} of {len(self.nb.cells)}, {time.monotonic() - self.begun:.0f} s{value}")

    def process_message(self, *args: Any, **kwargs: Any) -> nbformat.NotebookNode | None:
        """Pass on whole lines."""
        output = super().process_message(*args, **kwargs)
        if output and output.output_type == "stream" and output.name == "stdout":
            *lines, self.line = (self.line + output.text).split("\n")
            for line in lines:
                self.say(line)
        return output


def _error_line(cell: nbformat.NotebookNode, name: str, message: str) -> str:
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


def main(path: Path, parent: int) -> None:
    """Run the attempt that `path` describes, while `parent` lives. Its run.json says how it ended."""
    arguments = json.loads(path.read_text(encoding="utf-8"))  # the arguments of run_notebook
    arguments |= {name: Path(arguments[name]) for name in ("source", "output", "folder")}
    try:
        with processes.terminate_as_interrupt():
            die_with(parent, signal.SIGTERM)
            run_notebook(**arguments, say=_print)
    except KeyboardInterrupt:
        _print("interrupted")
    except Exception as error:  # of a bug of ours the log keeps the traceback
        is_bug = not isinstance(error, JobFailed | ValueError | OSError)
        _print(traceback.format_exc() if is_bug else str(error))


def _print(line: str) -> None:
    """Print a line. Where the log cannot grow (a full disk) the notebook still has it."""
    with suppress(OSError):
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
