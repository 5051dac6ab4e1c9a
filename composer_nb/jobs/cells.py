"""The cells of a notebook, run one after another by nbclient, with states that are true.

papermill, which sets the parameters, would call every cell that did not run `completed`, and forget what stopped the one that
did. Here a cell's state, in `cell.metadata.papermill.status`, is one of

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

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from nbformat import NotebookNode

from composer_nb.harness.files import write_atomic
from composer_nb.harness.tools.session import ESCAPES
from composer_nb.harness.untrusted import visible
from composer_nb.jobs.processes import handling
from composer_nb.jobs.records import now

CANCELLED = "cancelled"
"""Error of a cell that was interrupted from outside."""
GRACE_S = 15.0
"""Seconds a cell has to end after an interrupt: enough to save, less than the 30 that Slurm and Kubernetes give."""
TICK_S = 0.25
SAVE_S = 1.0
"""Seconds between looks at whether the notebook changed and is to be saved while a cell runs."""
SAVING_SHARE = 0.1
"""A big notebook is saved rarely enough that saving takes no more than about this share of the time."""


class Execution(NotebookClient):
    """One execution of a notebook: signals come in here, its file is kept up to date, and what happened is read off."""

    stopped: str | None = None
    """`interrupted` or `timed_out`, once somebody asked for an end."""
    fault: str | None = None
    """State of the cell that ended the notebook, where it is not `stopped`."""
    error: str | None = None
    """One line about it."""
    cell: NotebookNode | None = None
    """The one that the kernel has."""
    sent = over = changed = False
    deadline = saving_s = 0.0
    saved_at = float("-inf")
    rest = ""

    def __init__(
        self, nb: NotebookNode, path: Path, say: Callable[[str], None], timeout_s: float | None, **options: Any
    ) -> None:
        """`path` is where the notebook is saved, `say` gets every line that a cell prints, `timeout_s` is for the notebook."""
        super().__init__(nb, **options)
        self.path, self.say, self.timeout_s = path, say, timeout_s
        for cell in nb.cells:
            cell.metadata["papermill"] = {"status": "pending"}
            if cell.cell_type == "code":
                cell.execution_count, cell.outputs = None, []

    # Signals

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Interrupt the cell that runs on Ctrl-C, SIGTERM and at the time limit. A cell that does not end within the
        grace period, or a second Ctrl-C, ends everything by a KeyboardInterrupt. For the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
        with handling(dict.fromkeys(numbers, self._on_signal)):
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

    # Cells

    def run(self) -> None:
        """Run all cells. Raises KeyboardInterrupt when it was stopped, and RuntimeError for a cell that ends it otherwise, whose
        state is then `fault`; the notebook is always saved."""
        self._save()
        try:
            self._check()
            with self.setup_kernel():
                for index, cell in enumerate(self.nb.cells):
                    self._check()
                    self._run_cell(cell, index)
                self._check()
                self.over = True
                self.set_widgets_metadata()
        finally:
            self._save()

    def _run_cell(self, cell: NotebookNode, index: int) -> None:
        start, state, about = time.perf_counter(), "failed", cell.metadata["papermill"]
        about |= {"status": "running", "start_time": now()}
        self._save()  # whatever happens now, the file says that the cell has begun
        try:
            state = self._state_after(cell, index)
        except KeyboardInterrupt:
            state = self.stopped or "interrupted"
            raise
        finally:
            about |= {"status": state, "end_time": now(), "duration": time.perf_counter() - start}
            self.changed = True
            self._save_if_due()
        if self.sent:
            raise KeyboardInterrupt
        if state != "completed":
            self.fault = state
            raise RuntimeError(self.error)

    def _state_after(self, cell: NotebookNode, index: int) -> str:
        """Execute a cell, note its error, and return its state."""
        state = "completed"
        self.cell = cell if cell.cell_type == "code" and cell.source.strip() else None
        try:
            self.execute_cell(cell, index)
        except CellExecutionError as error:
            state, self.error = "failed", _described(cell, error.ename, error.evalue)
        except CellTimeoutError:
            state, self.error = "timed_out", f"a cell took longer than {self.timeout} s (cell_timeout_s)"
        except DeadKernelError:
            state, self.error = "lost", f"the kernel died ({self._last_words()})"
        finally:
            self.cell = None
        if self.sent:
            if self.stopped != "timed_out":
                self.error = CANCELLED
            return self.stopped or "interrupted"
        shown = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if state == "completed" and shown:  # shown, not raised: the tag `raises-exception`, or a magic's own handling
            state, self.error = "failed", _described(cell, shown[0].ename, shown[0].evalue)
        return state

    def _last_words(self) -> str:
        status = getattr(getattr(self.km and self.km.provisioner, "process", None), "returncode", None)
        if status is None:
            return "the reason is unknown"
        return f"signal {-status}; out of memory?" if status < 0 else f"exit status {status}"

    async def async_execute_cell(self, *args: Any, **kwargs: Any) -> NotebookNode:
        saving = asyncio.ensure_future(self._saving())
        try:
            return await super().async_execute_cell(*args, **kwargs)
        finally:
            saving.cancel()

    execute_cell = run_sync(async_execute_cell)

    def process_message(self, *args: Any, **kwargs: Any) -> NotebookNode | None:
        """Note a change, and pass on whole lines."""
        output = super().process_message(*args, **kwargs)
        self.changed = True
        if output and output.output_type == "stream" and output.name == "stdout":
            *lines, self.rest = (self.rest + output.text).split("\n")
            for line in lines:
                self.say(line)
        return output

    def counts(self) -> dict[str, Any]:
        """Return the counts of code cells for the record."""
        states = [cell.metadata["papermill"]["status"] for cell in self.nb.cells if cell.cell_type == "code"]
        ran = [state for state in states if state not in ("pending", "running")]
        return {"cells": len(states), "cells_run": len(ran), "cell_states": dict(Counter(states))}

    # Saving

    def _save(self) -> None:
        start = time.monotonic()
        # The record's digest tells whether the last one is whole.
        write_atomic(self.path, nbformat.writes(self.nb) + "\n")
        self.saved_at = time.monotonic()
        self.saving_s, self.changed = self.saved_at - start, False

    def _save_if_due(self) -> None:
        """Save what changed, rarely if it is big."""
        if self.changed and time.monotonic() - self.saved_at > self.saving_s / SAVING_SHARE:
            self._save()

    async def _saving(self) -> None:
        """Saves what changed, while a cell runs. On a full disk the save at the end of the cell is the one that raises."""
        while True:
            await asyncio.sleep(SAVE_S)
            with suppress(OSError):
                self._save_if_due()


def _described(cell: NotebookNode, name: str, message: str) -> str:
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
    return f"{name}: {first_line(message)}, in {location}" + (f": `{code}`" if code and code not in message else "")


def first_line(text: object) -> str:
    """Return the first line that is not empty."""
    return (str(text).strip() or "no message").splitlines()[0]
