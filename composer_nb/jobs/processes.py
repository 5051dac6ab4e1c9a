"""Signals that processes of a run heed, and the start of an attempt.

A run and each of its attempts own a directory, which their journal names (`harness.sandbox.reap`). What they start has the
directory's mark in its environment, so it is found after its parents died, and ends with the directory:

    COMPOSER_NB_DIRECTORY   the mark of the attempt's directory, or of whatever else the process lives for
    COMPOSER_NB_RUN         the mark of the run's directory

A process that is to outlive its notebook gets another mark from whoever starts it: that of COMPOSER_NB_RUN to end with the run,
any other text to be spared, as detached training runs are. Linux only.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.reap import package_environment

RUN = "COMPOSER_NB_RUN"


@contextmanager
def handling(handlers: Mapping[int, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handle signals this way while the block runs. Only the main thread can enter it."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, once, so that everything ends as on Ctrl-C. SIGINT does so too where a script
    started this process in the background, where it would be ignored. For the main thread."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling({signal.SIGTERM: interrupt, signal.SIGINT: signal.default_int_handler}):
        yield


def spawn(attempt: Path) -> subprocess.Popen[bytes]:
    """Start the process of an attempt. It has a session of its own, ends with this process, and writes to log.txt beside
    `attempt`. -P: no random.py of the user's folder."""
    command = [sys.executable, "-P", "-m", "composer_nb.jobs.notebook", str(attempt), str(os.getpid())]
    with attempt.with_name("log.txt").open("ab") as log:
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen(command, **streams, env=package_environment(), start_new_session=True)
