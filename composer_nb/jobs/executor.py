"""Executors of a graph's attempts: the protocol, and processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from composer_nb.jobs import processes
from composer_nb.jobs.file import Node


class JobExecutor(Protocol):
    """A place in which attempts run."""

    limit: int | None
    """Maximum attempts at once; None where the executor itself makes them wait."""
    gone: bool
    """The place itself was lost, so trying again is useless."""

    def start(self, attempt: Path, node: Node) -> Any:
        """Begin the attempt that a file describes; return its handle."""

    def poll(self, handle: Any) -> str | None:
        """Return None while it runs; then empty text, or the fault of the infrastructure that ended it."""

    def stop(self, handle: Any, *, kill: bool) -> None:
        """Ask it to end, or end it."""

    def close(self) -> None:
        """End what the run leased anywhere, and disconnect."""


@dataclass(kw_only=True)
class Local:
    """Attempts as processes on this machine."""

    run: str
    limit: int | None
    gone: bool = False
    before: Sequence[psutil.Process] = field(default_factory=lambda: psutil.Process().children(recursive=True))
    """Processes that ran below us already."""

    def start(self, attempt: Path, node: Node) -> subprocess.Popen[bytes]:
        return spawn(attempt, self.run)

    def poll(self, handle: subprocess.Popen[bytes]) -> str | None:
        status = handle.poll()
        if status is None:
            return None
        return f"its process ended by signal {-status}" if status < 0 else ""

    def stop(self, handle: subprocess.Popen[bytes], *, kill: bool) -> None:
        handle.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        processes.end(lambda: {*processes.of_run(self.run), *processes.orphans(self.before)})


def spawn(attempt: Path, run: str) -> subprocess.Popen[bytes]:
    """Start the process of an attempt. It has a session of its own, ends when our end of its input closes, and writes to log.txt
    beside `attempt`."""
    environment = {name: text for name, text in os.environ.items() if name != processes.LEASE} | {processes.RUN: run}
    root = Path(__file__).parents[2]
    if root.name != "site-packages":  # a checkout: the attempt runs this one, also where a Ray worker lost PYTHONPATH
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH", "")]))
    command = [sys.executable, "-P", "-m", "composer_nb.jobs", str(attempt)]  # -P: no random.py of the user's folder
    with attempt.with_name("log.txt").open("ab") as log:
        streams: Any = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        return subprocess.Popen(command, **streams, env=environment, start_new_session=True)
