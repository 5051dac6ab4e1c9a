"""Processes that a run started: found even when their parents are gone, spared if they live for something else, ended.

A run and each of its attempts own a directory, which their journal names (`harness.sandbox.reap`). What they start has the
directory's mark in its environment, so it is found after its parents died, and ends with the directory:

    COMPOSER_NB_DIRECTORY   the mark of the attempt's directory, or of whatever else the process lives for
    COMPOSER_NB_RUN         the mark of the run's directory

A process that is to outlive its notebook gets another mark from whoever starts it: that of COMPOSER_NB_RUN to end with the run,
any other text to be spared, as detached training runs are. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.reap import FOLDER, WRITER, ResourceJournal, release

RUN = "COMPOSER_NB_RUN"
# Seconds between SIGTERM and SIGKILL.
POLITE_S = 3.0
WATCH = "import sys; from pathlib import Path; from composer_nb.harness.sandbox.reap import reap\n"
WATCH += "sys.stdin.read(); reap(Path(sys.argv[1]))"
PR_SET_CHILD_SUBREAPER = 36


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
    """Make SIGTERM raise KeyboardInterrupt, once, so that everything ends as on Ctrl-C. For the main thread."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling({signal.SIGTERM: interrupt}):
        yield


def follow_parent() -> None:
    """Interrupt this process when the parent closes the pipe that is its input, also by dying."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def package_environment() -> dict[str, str]:
    """Return the environment of a process that imports this package, also where a Ray worker lost PYTHONPATH."""
    root = Path(__file__).parents[2]
    if root.name == "site-packages":
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}


def spawn(attempt: Path) -> subprocess.Popen[bytes]:
    """Start the process of an attempt. It has a session of its own, ends when our end of its input closes, and writes to log.txt
    beside `attempt`."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "composer_nb.jobs.notebook",
        str(attempt),
    ]  # -P: no random.py of the user's folder
    with attempt.with_name("log.txt").open("ab") as log:
        streams: Any = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log}
        return subprocess.Popen(command, **streams, env=package_environment(), start_new_session=True)


@contextmanager
def owned_directory(folder: Path, record: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield a directory in which sockets fit, and its mark, and end what carries the mark with the block.

    The journal in `folder` names the directory, and a small process reaps it when this one is killed. Orphans below this process
    that have no mark at all, as of a program that cleared its environment, are ended too. `record` gets the processes that were
    ended, and those that were left because they live for something else.
    """
    control, before = ctypes.CDLL(None).prctl, set(psutil.Process().children(recursive=True))
    path = Path(tempfile.mkdtemp(prefix="nb-", dir=socket_folder(len("/nb-12345678/k-12345"))))
    journal = ResourceJournal(folder / FOLDER, folder.name)
    resource = journal.made("directory", path)
    assert resource is not None
    command, environment = [sys.executable, "-P", "-c", WATCH, str(folder)], package_environment() | {WRITER: "watch"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = subprocess.Popen(command, **pipes, env=environment, start_new_session=True)

    def below() -> set[psutil.Process]:
        return {p for p in psutil.Process().children(recursive=True) if p.pid != watcher.pid and living(p)} - before

    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield path, resource.mark
    finally:
        record["ended_processes"] = end(lambda: carrying(resource.mark, below()))
        record["leased_processes"] = [{"pid": p.pid, "name": p.name()} for p in below()]
        control(PR_SET_CHILD_SUBREAPER, 0)
        release(journal, [resource])
        watcher.communicate()
        with suppress(OSError):  # something is left in it
            journal.file.parent.rmdir()


def carrying(mark: str, unmarked: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes whose environment has a directory's mark, and those of `unmarked` that have none."""
    processes = []
    for process in psutil.process_iter():
        environment: dict[str, str] = {}
        with suppress(psutil.Error, OSError):
            environment = process.environ()
        marks = environment.get(WRITER, mark if process in unmarked else "")
        if mark in marks.split(":") and living(process):
            processes.append(process)
    return [process for process in processes if process.pid != os.getpid()]


def living(process: psutil.Process) -> bool:
    """Return whether a process runs: neither gone nor a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end(find: Callable[[], list[psutil.Process]]) -> list[dict[str, Any]]:
    """End what `find` finds, again and again until it finds nothing: SIGTERM, then SIGKILL. Return pid and name of each.

    Gives up after ten more seconds on what not even SIGKILL ends (a process stuck in a system call).
    """
    ended: dict[int, dict[str, Any]] = {}
    for number, wait_s in ((signal.SIGTERM, POLITE_S), *[(signal.SIGKILL, 1.0)] * 10):
        if not (alive := find()):
            break
        for process in alive:
            with suppress(psutil.Error):
                ended.setdefault(process.pid, {"pid": process.pid, "name": process.name()})
                process.send_signal(number)
        psutil.wait_procs(alive, timeout=wait_s)
    return list(ended.values())
