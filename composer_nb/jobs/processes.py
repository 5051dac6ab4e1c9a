"""Processes that a run started: found even when their parents are gone, spared if they hold a lease, ended.

Every process below a notebook's kernel inherits two environment variables, so it can be found after its parents died:

    COMPOSER_NB_RUN     the run of a job file (the same for all its notebooks)
    COMPOSER_NB_NODE    one attempt at one notebook

A process that is to outlive its notebook says so by a third one, set by whoever starts it:

    COMPOSER_NB_LEASE   the id of the run that it belongs to

A lease on the job's own run (the value of COMPOSER_NB_RUN) ends with that run; one on any other run, as a detached training
run takes on itself, is that run's affair: such a process is left alone, and named in the record. What a leased process starts
is leased with it. Linux only: environments are read in /proc, orphans are adopted with PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

RUN, NODE, LEASE = "COMPOSER_NB_RUN", "COMPOSER_NB_NODE", "COMPOSER_NB_LEASE"
POLITE_S = 3.0
"""Seconds between SIGTERM and SIGKILL."""
Find = Callable[[], Iterable[psutil.Process]]


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
def adopting_orphans() -> Iterator[None]:
    """Adopt descendants whose parent dies while the block runs; otherwise init adopts them."""
    pr_set_child_subreaper = 36
    control = ctypes.CDLL(None, use_errno=True).prctl
    control(pr_set_child_subreaper, 1)
    try:
        yield
    finally:
        control(pr_set_child_subreaper, 0)


def environment(process: psutil.Process) -> dict[str, str]:
    """Return the environment that a process was started with; empty where it cannot be read, as of another user's."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def marked(name: str, value: str) -> list[psutil.Process]:
    """Return every living process but this one that was started with `name=value` in its environment."""
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return [process for process in others if environment(process).get(name) == value and living(process)]


def living(process: psutil.Process) -> bool:
    """Return whether a process runs: neither gone nor a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def lease(process: psutil.Process) -> str | None:
    """Return the lease that a process, or one above it and below the kernel, holds; None without."""
    if held := environment(process).get(LEASE):
        return held
    with suppress(psutil.Error):
        for above in process.parents():
            if above.pid == os.getpid():
                break
            variables = environment(above)
            if LEASE in variables and NODE in variables:  # without a mark it is above the runner: not about us
                return variables[LEASE]
    return None


def started_by(node: str, before: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run below us or carry `node`'s mark, except those of `before`."""
    found = {*psutil.Process().children(recursive=True), *marked(NODE, node)} - set(before)
    return [process for process in found if living(process)]


def of_run(run: str) -> list[psutil.Process]:
    """Return the processes of a run: all that carry its mark and hold no other lease, and all that it leases."""
    return [p for p in {*marked(RUN, run), *marked(LEASE, run)} if lease(p) in (None, run)]


def orphans(before: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that run below us without a lease, except those of `before`: also those without a mark, as of a
    program that cleared its environment, which came to us when an attempt was killed."""
    found = set(psutil.Process().children(recursive=True)) - set(before)
    return [p for p in found if living(p) and lease(p) is None and not _watches(p)]


def _watches(process: psutil.Process) -> bool:
    """Return whether this is the watcher of an attempt. It cleans up and ends by itself."""
    with suppress(psutil.Error):
        return __file__ in process.cmdline()
    return False


def end(find: Find, polite_s: float = POLITE_S) -> list[dict[str, Any]]:
    """End what `find` finds, again and again until it finds nothing: SIGTERM, SIGKILL `polite_s` later.

    Return pid and name of each. Gives up after ten more seconds on what not even SIGKILL ends (a process stuck in a
    system call); `find` still finds that.
    """
    ended: dict[int, dict[str, Any]] = {}
    start = time.monotonic()
    while (alive := list(find())) and time.monotonic() - start < polite_s + 10:
        kill = time.monotonic() - start >= polite_s
        for process in alive:
            with suppress(psutil.Error):
                if kill or process.pid not in ended:
                    ended.setdefault(process.pid, {"pid": process.pid, "name": process.name()})
                    process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        time.sleep(0.05)
        reap(ended)
    reap(ended)  # what the last look found to be a zombie
    return list(ended.values())


def reap(pids: Iterable[int]) -> None:
    """Remove our ended children among `pids` from the table of processes."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


@contextmanager
def guarded(kind: str, value: str, folder: Path, scratch: Path | None = None, wait_s: float = 0.0) -> Iterator[None]:
    """Let a small process watch over us while the block runs. If we are killed, it gives what we started `wait_s` seconds to
    end by itself, ends the rest, and removes what we were writing in `folder` and all of `scratch`.

    `kind` is RUN or NODE, `value` the mark to look for.
    """
    clean = {name: text for name, text in os.environ.items() if name not in (RUN, NODE, LEASE)}
    given = kind, value, str(wait_s), str(folder), str(os.getpid()), str(scratch or "")
    streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-P", __file__, *given]
    watch = subprocess.Popen(command, **streams, env=clean, start_new_session=True)
    try:
        yield
    finally:
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            watch.communicate(b"done", timeout=10)
        watch.kill()
        watch.wait()


def follow_parent() -> None:
    """Interrupt this process when the parent closes the pipe that is its input, also by dying."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _guard(kind: str, value: str, wait_s: str, folder: str, writer: str, scratch: str) -> None:
    """Watch: return at once on the word `done`; when the input ends without it, clean up."""
    if sys.stdin.buffer.read() == b"done":
        return

    def left() -> list[psutil.Process]:
        return of_run(value) if kind == RUN else [p for p in marked(NODE, value) if lease(p) is None]

    patience = time.monotonic() + float(wait_s)
    while time.monotonic() < patience and left():
        time.sleep(0.2)
    end(left)
    for pattern in (f"*.{writer}.part", ".reserve"):  # as records.remove_parts, which would import the package
        for part in Path(folder).glob(pattern):
            part.unlink(missing_ok=True)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    _guard(*sys.argv[1:])
