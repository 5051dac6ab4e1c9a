"""A Ray head that belongs to no kernel: started once, used by run after run, ended by its lease.

    up(folder) ──▶ a process of its own session, with Ray below it ──▶ folder/head.json
    with attach(folder) as head: …      it lives on at least as long as this
    services.address = folder           a run's services use it, and hold it while the run is live
    jobs run FILE --ray folder          so do notebooks that run as jobs

It ends when its lease has run out and nobody holds it, on `down`, and when Ray dies under it. What a SIGKILL leaves is in
the folder's journal, for `reap`; the next `up` reaps too.

Covers one machine: whoever holds a head sees its folder. Does not cover a head's loss while a run uses it: the run ends with an
error, and resumes when the head is up again.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.journal import FOLDER, Journal
from composer_nb.harness.sandbox.reap import reap
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.services.cluster import Cluster

LEASE_S = 3600.0
START_S = 240.0
"""Seconds that a head may take to start; Ray takes a third of it on a busy machine."""
END_S = 30.0
POLL_S = 0.5
PROCESS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
"""Environment of a process that computes and writes a log."""
SILENT = "it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head that lives."""

    folder: str
    """Absolute; what `services.address` names."""
    address: str
    """host:port of its control service."""
    pid: int
    started: float
    """Seconds since the epoch."""
    until: float
    """End of its lease, in seconds since the epoch."""


class HeadGone(ConnectionError, ValueError):
    """There is no head where one was expected."""


def up(folder: Path, lease_s: float = LEASE_S) -> Head:
    """Starts a head that lives in `folder`, or renews the lease of the one that lives there already.

    Raises ValueError with its last words when it does not start.
    """
    folder = folder.resolve()
    if not 0 < lease_s < math.inf:
        raise ValueError(f"lease_s={lease_s:g}: a lease is a time in seconds, longer than 0")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder; give one for the head's files, as runs/head")
    folder.mkdir(parents=True, exist_ok=True)
    if find(folder) is not None:
        return renew(folder, lease_s)
    reap(folder)
    words = ("composer_nb.trainer.services.head", str(folder), repr(lease_s))
    if why := begin(words, folder / "head.log", folder / "head.lock", lambda _: find(folder) is not None, START_S):
        raise ValueError(f"the head in {folder} {why}")
    head = find(folder)
    if head is None:
        raise ValueError(f"the head in {folder} ended as soon as it had started; see {folder / 'head.log'}")
    return head


def find(folder: Path) -> Head | None:
    """The head that lives in `folder`, if one does."""
    try:
        head = Head(**json.loads((folder / "head.json").read_text()))
    except FileNotFoundError:
        return None
    return head if holder(folder / "head.lock") == head.pid else None


@contextmanager
def attach(folder: Path) -> Iterator[Head]:
    """The head that lives in `folder`, which will not end of its lease before this does, or this process.

    Raises HeadGone when there is none.
    """
    folder = folder.resolve()
    gone = HeadGone(f"no head lives in {folder}; start one: composer-nb up {folder}")
    if not (folder / "head.lock").is_file():
        raise gone
    fd = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise gone from None  # it is about to end
        head = find(folder)
        if head is None:
            raise gone
        yield head
    finally:
        os.close(fd)


def renew(folder: Path, lease_s: float = LEASE_S) -> Head:
    """Prolongs the lease to `lease_s` seconds from now; never shortens it. Raises HeadGone."""
    with attach(folder) as head:
        renewed = replace(head, until=max(head.until, time.time() + lease_s))
        _write(renewed)
    return renewed


def down(folder: Path) -> bool:
    """Ends the head in `folder`, whoever uses it, and whatever a killed one left; False when none lived there."""
    head = find(folder)
    if head is not None:
        end(folder / "head.lock", head.pid, signal.SIGTERM, END_S)
    if folder.is_dir():
        reap(folder)
    return head is not None


def resolve(address: str) -> str:
    """Return the Ray address that `address` names, as `held` does."""
    with held(address) as found:
        return found


@contextmanager
def held(address: str) -> Iterator[str]:
    """Hold the head whose folder `address` names, and give its Ray address. Anything with a colon, `auto` and the empty text
    are Ray's own, and given as they are. Raises HeadGone for a folder without a head."""
    if address in ("", "auto") or (":" in address and not Path(address).is_dir()):
        yield address
    else:
        with attach(Path(address)) as head:
            yield head.address


# Processes that outlive the one that starts them


def begin(
    words: Sequence[str], log: Path, lock: Path, ready: Callable[[subprocess.Popen[bytes]], bool], seconds: float
) -> str:
    """Run a module as `detach` does, and wait until it is `ready`. Return why it is not, with its last words, if it ended without
    a holder of `lock`, or took longer than `seconds` (more on a busy machine)."""
    start, longest = log.stat().st_size if log.is_file() else 0, patience(seconds)
    process = detach(words, log)
    deadline = time.monotonic() + longest
    while not ready(process):
        ended = process.poll() is not None and holder(lock) is None
        if ended or time.monotonic() > deadline:
            process.kill()
            why = f"ended with {process.returncode}" if ended else f"did not start within {longest:.0f} s"
            return f"{why}: {last_words(log, start)}"
        time.sleep(0.05)
    return ""


def last_words(log: Path, begin: int) -> str:
    """Return the last line that was written to `log` from byte `begin` on, and where it stands."""
    text = log.read_bytes()[begin:].decode("utf-8", "replace").strip()
    return f"{text.splitlines()[-1] if text else SILENT} ({log})"


def end(lock: Path, pid: int, number: signal.Signals, seconds: float) -> None:
    """Send a signal to the holder of a lock, and SIGKILL if it still holds it after `seconds` (more on a busy machine)."""
    os.kill(pid, number)
    deadline = time.monotonic() + patience(seconds)
    while holder(lock) == pid:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def claim(lock: Path, tries: int = 20) -> int | None:
    """Take a lock and note this process's number in it. Return the open file, which holds the lock; None if another process has
    it."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # it may be somebody who only looks
            continue
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd
    os.close(fd)
    return None


def detach(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Runs a module of ours in a session of its own, where it outlives this process; what it prints goes to `log`. A job that
    it was started in does not end it: it holds a lease on its own folder (docs/jobs.md)."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | PROCESS | {"COMPOSER_NB_LEASE": str(log.parent)},
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # no zombie, should it end before this process
    return process


def holder(lock: Path) -> int | None:
    """Return the process that holds a lock and wrote its number there; None when none does, 0 when its number is unknown."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = int(os.read(fd, 20).decode().strip() or 0)
        return pid if _has_open(pid, os.fstat(fd)) else 0  # or it is the number of the holder before
    finally:
        os.close(fd)
    return None


def _has_open(pid: int, file: os.stat_result) -> bool:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(entry.stat(), file):
                    return True
    return False


def _write(head: Head) -> None:
    write_json(Path(head.folder, "head.json"), asdict(head))


# The head's own process


def main(arguments: list[str]) -> None:
    folder, lease_s = Path(arguments[0]), float(arguments[1])
    if claim(folder / "head.lock") is None:
        return  # another one starts here, and serves as well
    try:
        cluster = Cluster("", "head", Journal(folder / FOLDER, folder.name))
    except ConnectionError as error:
        sys.exit(str(error))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    now = time.time()
    try:
        _write(Head(folder=str(folder), address=cluster.address, pid=os.getpid(), started=now, until=now + lease_s))
        print(f"{time.ctime()}: ended: {_live(folder, cluster, stop)}", flush=True)
    finally:
        (folder / "head.json").unlink(missing_ok=True)
        cluster.close()


def _live(folder: Path, cluster: Cluster, stop: threading.Event) -> str:
    """Returns when it is time to end, and says why."""
    users = os.open(folder / "users.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    while not stop.wait(POLL_S):
        if lost := cluster.lost():
            return lost
        if time.time() < json.loads((folder / "head.json").read_text())["until"]:
            continue
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and nobody comes any more
        except BlockingIOError:
            continue
        return "its lease has run out, and nobody uses it"
    return "it was asked to"


if __name__ == "__main__":
    main(sys.argv[1:])
