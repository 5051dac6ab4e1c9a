"""Runs a notebook as a job, through papermill's API, and says honestly what happened.

papermill alone marks cells that never ran as completed, writes files that a kill leaves empty, ignores misspelt parameters
and dies of SIGTERM without a word. So here: parameters are checked against the notebook's annotations before a kernel
starts; files are renamed into place; SIGTERM is an interrupt; cells that did not run say so; what a kernel left running is
ended; `run.json` beside the executed notebook tells what happened.

Leaves out: graphs of jobs, schedules, retries, Ray.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import difflib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil


class JobFailed(RuntimeError):
    """A cell raised, took too long, or the kernel died; the message is one line, the executed notebook holds the rest."""

    exit_status = 1


def run_notebook(
    source: Path,
    output: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    timeout_s: int | None = None,
) -> dict[str, Any]:
    """Executes `source` into `output` and returns the record that is also written to run.json beside it.

    `say` gets every line that a cell prints, as it is printed; `timeout_s` limits one cell. Raises ValueError for parameters
    that the notebook does not take, JobFailed, and KeyboardInterrupt on Ctrl-C or SIGTERM, always after output and
    run.json have been written.
    """
    import papermill
    from papermill.iorw import papermill_io
    from traitlets.config import Config

    values = check_parameters(source, parameters or {})
    output = output.resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns when the disk is slow
    papermill_io.register(f"{output.parent}/", _AtomicHandler())
    record: dict[str, Any] = {
        "notebook": source.name,
        "parameters": values,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    failure: BaseException | None = None
    start = time.perf_counter()
    with _sweep() as swept, terminate_as_interrupt():
        try:
            papermill.execute_notebook(
                source,
                output,
                values,
                progress_bar=False,
                stdout_file=_Lines(say),
                autosave_cell_every=2,
                execution_timeout=timeout_s,
                cwd=source.parent,
                # ipykernel 7.3 and later warn about, and this closes, a connection over TCP that is not encrypted.
                config=Config({"KernelManager": {"transport_encryption": "auto"}}),
            )
            record["state"] = "completed"
        except KeyboardInterrupt as interrupt:
            record["state"], failure = "interrupted", interrupt
        except Exception as error:  # whatever papermill, the kernel or a cell raises is this job's outcome
            record["state"] = "timed_out" if type(error).__name__ == "CellTimeoutError" else "failed"
            record["error"], failure = _one_line(error), error
        record |= _correct_cells(output)
    record |= {"seconds": time.perf_counter() - start, "ended_processes": swept}
    _write(output.parent / "run.json", json.dumps(record, indent=2) + "\n")
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    if failure is not None:
        raise JobFailed(f"{record['error']} (the cell and its traceback are in {output})") from failure
    return record


def check_parameters(source: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, if the notebook's parameters cell takes it. Raises ValueError that names the parameter and the nearest known
    one, or the type wanted; FileNotFoundError when there is no notebook."""
    if not source.is_file():
        raise FileNotFoundError(f"{source}: no such notebook")
    known = parameters_of(source)
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]!r}?" if near else "it takes none"
            raise ValueError(f"{source.name} has no parameter {name!r}; {hint}")
        wanted = known[name]
        fits = isinstance(value, (int, float) if wanted is float else wanted)
        if not fits or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{source.name}: parameter {name}={value!r} must be of type {wanted.__name__}")
    return dict(given)


def parameters_of(source: Path) -> dict[str, type]:
    """Name -> type of the parameters cell. Raises ValueError unless there is exactly one, of annotated names alone."""
    cells = [c for c in nbformat.read(source, 4).cells if "parameters" in c.metadata.get("tags", [])]
    if len(cells) != 1:
        raise ValueError(f"{source.name}: {len(cells)} cells are tagged `parameters`, not one")
    found: dict[str, type] = {}
    for node in ast.parse(cells[0].source).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=kind)) if hasattr(builtins, kind):
                found[name] = getattr(builtins, kind)
            case _:
                raise ValueError(f"{source.name}: the parameters cell may hold lines like `steps: int = 3` alone")
    return found


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
def _sweep() -> Iterator[list[int]]:
    """Ends, afterwards, every process that was started meanwhile, orphans of the kernel too; yields the list of their ids,
    filled at the end."""
    pr_set_child_subreaper = 36  # orphans come to us instead of to init
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1)
    before, ended = set(psutil.Process().children(recursive=True)), list[int]()
    try:
        yield ended
    finally:
        left = [child for child in psutil.Process().children(recursive=True) if child not in before]
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for child in left:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(sent)
            ended += [child.pid for child in left if sent == signal.SIGTERM]
            _, left = psutil.wait_procs(left, timeout=3)


def _correct_cells(output: Path) -> dict[str, int]:
    """Counts cells, and corrects those that are called completed though they never ran; {} without an output."""
    if not output.is_file():
        return {}
    book = nbformat.read(output, 4)
    code = [cell for cell in book.cells if cell.cell_type == "code" and "papermill" in cell.metadata]
    ran = [cell for cell in code if cell.execution_count is not None]
    false = [c for c in code if c.execution_count is None and c.metadata.papermill.get("status") == "completed"]
    for cell in false:
        cell.metadata.papermill["status"] = "pending"
    _write(output, nbformat.writes(book) + "\n")
    return {"cells": len(code), "cells_run": len(ran), "cells_corrected": len(false)}


class _AtomicHandler:
    """What papermill reads and writes notebooks with: files appear whole or not at all."""

    def read(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8")

    def write(self, text: str, path: str) -> None:
        _write(Path(path), text)

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


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _one_line(error: Exception) -> str:
    name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", str(error))
    return f"{name}: {(str(value).strip() or 'no message').splitlines()[0]}"
