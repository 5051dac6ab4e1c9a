"""papermill's loop over the cells of a notebook, with states that are true.

papermill calls every cell that did not run `completed`, and forgets what stopped the one that did. Here a cell's state, in
`cell.metadata.papermill.status`, is one of

    pending      it did not run
    running      it runs now (or ran when everything was killed at once)
    completed    it ran to its end
    failed       it raised
    interrupted  it was interrupted, whatever it made of that
    timed_out    it ran too long, or the notebook did
    lost         the kernel died under it

Imported when a notebook is about to run: papermill takes a second or two to import.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.log import logger

from composer_nb.jobs.processes import handling

ENGINE = "composer_nb"
CANCELLED = "cancelled"
"""Error of a cell that was interrupted from outside."""
GRACE_S = 15.0
"""Seconds a cell has to end after an interrupt: enough to save, less than the 30 that Slurm and Kubernetes give."""
TICK_S = 0.25
SAVE_S = 1.0
"""Seconds between looks at whether the notebook changed and is to be saved while a cell runs."""
SAVING_SHARE = 0.1
"""A big notebook is saved rarely enough that saving takes no more than about this share of the time."""


@dataclass(kw_only=True)
class Progress:
    """One execution: signals come in here, and what happened is read off."""

    timeout_s: float | None = None
    """Seconds for the notebook as a whole."""
    grace_s: float = GRACE_S
    stopped: str | None = None
    """`interrupted` or `timed_out`, once somebody asked for an end."""
    fault: str | None = None
    """State of the cell that ended the notebook, where it is not `stopped`."""
    error: str | None = None
    """One line about it."""
    states: list[str] = field(default_factory=list)
    """States of the code cells, at the end."""
    client: Any = None
    cell: NotebookNode | None = None
    """The one that the kernel has."""
    sent: bool = False
    over: bool = False
    deadline: float = 0.0

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
            self.deadline = time.monotonic() + self.grace_s
            signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        elif number == signal.SIGINT:
            self.deadline = 0.0
        if self.cell is None or time.monotonic() >= self.deadline:
            self.over = True
            raise KeyboardInterrupt
        if not self.sent and self.cell.execution_count is not None:  # before that a kernel ignores it
            self.sent = True
            with suppress(ProcessLookupError):
                os.killpg(self.client.km.provisioner.pgid, signal.SIGINT)

    def check(self) -> None:
        """Raise KeyboardInterrupt if an end was asked for."""
        if self.stopped:
            self.over = True
            raise KeyboardInterrupt

    def counts(self) -> dict[str, Any]:
        """Return the counts of code cells for the record."""
        ran = [state for state in self.states if state not in ("pending", "running")]
        return {"cells": len(self.states), "cells_run": len(ran), "cell_states": dict(Counter(self.states))}


class _Manager(NotebookExecutionManager):
    """Saves the notebook, rarely if it is big, and leaves the states of its cells alone."""

    saving_s = 0.0
    saved_at = float("-inf")
    changed = False

    def save(self, **kwargs: Any) -> None:
        start = time.monotonic()
        super().save()
        self.saved_at = time.monotonic()
        self.saving_s, self.changed = self.saved_at - start, False

    def save_if_due(self) -> None:
        if self.changed and time.monotonic() - self.saved_at > self.saving_s / SAVING_SHARE:
            self.save()

    async def saving(self) -> None:
        """Saves what changed, while a cell runs. On a full disk the save at the end of the cell is the one that raises."""
        while True:
            await asyncio.sleep(SAVE_S)
            with suppress(OSError):
                self.save_if_due()

    def autosave_cell(self, **kwargs: Any) -> None:
        """Note a change; papermill's client calls this with every message."""
        self.changed = True

    def begin(self, cell: NotebookNode) -> None:
        metadata = cell.metadata.papermill
        metadata["start_time"], metadata["status"], metadata["exception"] = self.now().isoformat(), "running", False
        self.save()  # whatever happens now, the file says that the cell has begun

    def end(self, cell: NotebookNode, state: str, seconds: float) -> None:
        metadata = cell.metadata.papermill
        metadata["end_time"], metadata["duration"] = self.now().isoformat(), seconds
        metadata["status"], metadata["exception"] = state, state != "completed"
        self.changed = True
        self.save_if_due()

    def finish(self) -> None:
        """Save for the last time, without touching the cells."""
        end, metadata = self.now(), self.nb.metadata.papermill
        metadata["end_time"], metadata["duration"] = end.isoformat(), (end - self.start_time).total_seconds()
        self.save()


class _Client(PapermillNotebookClient):
    """A client that runs cell after cell and records the state of each."""

    progress: Progress

    def papermill_execute_cells(self) -> None:
        for index, cell in enumerate(self.nb.cells):
            self.progress.check()
            self.nb_man.begin(cell)
            start, state = time.perf_counter(), "failed"
            try:
                state = self._state_after(cell, index)
            except KeyboardInterrupt:
                state = self.progress.stopped or "interrupted"
                raise
            finally:
                self.nb_man.end(cell, state, time.perf_counter() - start)
            if self.progress.sent:
                raise KeyboardInterrupt
            if state != "completed":
                self.progress.fault = state
                if state == "failed":
                    return  # papermill adds a pointer to the cell
                raise RuntimeError(self.progress.error)  # do not ask a kernel that is busy or dead how it is
        self.progress.check()
        self.progress.over = True

    async def async_execute_cell(self, *args: Any, **kwargs: Any) -> NotebookNode:
        saving = asyncio.ensure_future(self.nb_man.saving())
        try:
            return await super().async_execute_cell(*args, **kwargs)
        finally:
            saving.cancel()

    execute_cell = run_sync(async_execute_cell)

    def _state_after(self, cell: NotebookNode, index: int) -> str:
        """Execute a cell, note its error, and return its state."""
        state, progress = "completed", self.progress
        progress.cell = cell if cell.cell_type == "code" and cell.source.strip() else None
        try:
            self.execute_cell(cell, index)
        except CellExecutionError as error:
            state, progress.error = "failed", f"{error.ename}: {first_line(error.evalue)}"
        except CellTimeoutError:
            state, progress.error = "timed_out", f"a cell took longer than {self.timeout} s (cell_timeout_s)"
        except DeadKernelError:
            state, progress.error = "lost", f"the kernel died ({self._last_words()})"
        finally:
            progress.cell = None
        if progress.sent:
            if progress.stopped != "timed_out":
                progress.error = CANCELLED
            return progress.stopped or "interrupted"
        shown = [output for output in cell.get("outputs", []) if output.output_type == "error"]
        if state == "completed" and shown:  # shown, not raised: the tag `raises-exception`, or a magic's own handling
            state, progress.error = "failed", f"{shown[0].ename}: {first_line(shown[0].evalue)}"
        return state

    def _last_words(self) -> str:
        status = getattr(getattr(self.km.provisioner, "process", None), "returncode", None)
        if status is None:
            return "the reason is unknown"
        return f"signal {-status}; out of memory?" if status < 0 else f"exit status {status}"


class _Engine(NBClientEngine):
    """papermill's own engine with the two classes above."""

    @classmethod
    def execute_notebook(
        cls,
        nb: NotebookNode,
        kernel_name: str,
        output_path: str | None = None,
        *,
        progress: Progress,
        last_cell: str = "",
        execution_timeout: int | None = None,
        start_timeout: int = 60,
        **kwargs: Any,
    ) -> NotebookNode:
        """Run `nb`, and `last_cell` after it. Raises KeyboardInterrupt when it was stopped; `progress` records a cell that
        ends it otherwise."""
        if last_cell:
            nb.cells.append(new_code_cell(last_cell, metadata={"tags": ["outputs"]}))
        manager = _Manager(nb, output_path=output_path, progress_bar=False)
        manager.notebook_start()
        for name in ("input_path", "progress_bar", "log_output"):
            kwargs.pop(name, None)
        client = _Client(
            manager,
            kernel_name=kernel_name,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            log=logger,
            **kwargs,
        )
        client.progress, progress.client = progress, client
        try:
            progress.check()
            client.execute()
        finally:
            progress.states = [c.metadata.papermill["status"] for c in nb.cells if c.cell_type == "code"]
            manager.finish()
        return nb


papermill_engines.register(ENGINE, _Engine)


def first_line(text: object) -> str:
    """Return the first line that is not empty."""
    return (str(text).strip() or "no message").splitlines()[0]
