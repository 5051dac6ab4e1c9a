"""A Ray head independent of notebook kernels: started once, used by several runs, ended by its lease.

    up(folder) ──▶ a process in its own session, with Ray below it ──▶ folder/head.json
    with held(folder) as address: …     the head lives at least as long as this block
    services.address = folder           a run's services use it, and hold it while the run is live
    jobs run FILE --ray folder          notebooks that run as jobs do the same

A head ends when its lease has run out and no process holds it, on `down`, and when its Ray dies. The remains of a SIGKILL are in
the folder's journal, for `reap`; the next `up` reaps too.

Runs use a head on its machine, because its holders must see its folder. Other machines join it by an `up` of their own
(`ClusterNode.join`); a node has no lease and lives as long as its head. If a head is lost while a run uses it, the run ends
with an error, and resumes when the head is up again.
"""

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.reap import FOLDER, WRITER, ResourceJournal, reap
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.services.cluster import NODE, RELAY, Cluster, ClusterNode

LEASE_S = 3600.0
# Maximum seconds of a head's start; Ray takes a third of this on a busy machine.
START_S = 240.0
END_S = 30.0
# Seconds within which a killed process is gone, unless the kernel holds it.
KILLED_S = 15.0
SAY_S = 5.0
POLL_S = 0.5
# Environment variables of a process that computes and writes a log.
PROCESS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
SILENT = "it said nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A live head.

    Attributes:
        folder: Absolute path, the value of `services.address`.
        address: host:port of the cluster's control service.
        started: Time of its start, in seconds since the epoch.
        until: End of its lease, in seconds since the epoch.
        machine: Fields of its `ClusterNode`.
    """

    folder: str
    address: str
    pid: int
    started: float
    until: float
    machine: dict[str, Any] = field(default_factory=dict)


class HeadGone(ConnectionError, ValueError):
    """There is no live head where one was expected."""


def up(folder: Path, lease_s: float = LEASE_S, machine: ClusterNode | None = None) -> Head:
    """Start a head or node in `folder`, or extend the lease of the head that lives there to `lease_s` seconds from now.

    Raises ValueError with the last line of its log if it does not start, and if one that was started otherwise than as `machine`
    lives there.
    """
    folder = folder.resolve()
    if not 0 < lease_s < math.inf:
        raise ValueError(f"lease_s={lease_s:g}: a lease is a time in seconds, longer than 0")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: not a folder; give one for the head's files, as runs/head")
    folder.mkdir(parents=True, exist_ok=True)
    node = json.dumps(asdict(machine or ClusterNode()))
    if (head := find(folder)) is not None:
        if machine not in (None, ClusterNode()) and json.loads(node) != head.machine:
            raise ValueError(
                f"{folder}: a head or node with other options lives here; give another folder, or --down first"
            )
        with held(str(folder)):
            head = replace(head, until=max(head.until, time.time() + lease_s))
            write_json(folder / "head.json", asdict(head))
        return head
    reap(folder)
    command = ("composer_nb.trainer.services.head", str(folder), repr(lease_s), node)
    if reason := begin(command, folder / "head.log", folder / "head.lock", lambda _: find(folder) is not None, START_S):
        raise ValueError(f"the head in {folder} {reason}")
    head = find(folder)
    if head is None:
        raise ValueError(f"the head in {folder} ended as soon as it had started; see {folder / 'head.log'}")
    return head


def find(folder: Path) -> Head | None:
    """Return the live head in `folder`, or None."""
    try:
        head = Head(**json.loads((folder / "head.json").read_text()))
    except FileNotFoundError:
        return None
    return head if holder(folder / "head.lock") == head.pid else None


def down(folder: Path) -> bool:
    """End the head in `folder`, even if it is in use, and clean up after a killed one. Return whether there was a live head."""
    head = find(folder)
    if head is not None:
        end(folder / "head.lock", head.pid, signal.SIGTERM, patience(END_S))
    if folder.is_dir():
        reap(folder)
    return head is not None


@contextmanager
def held(address: str) -> Iterator[str]:
    """Hold the head whose folder `address` names until the end of this block or process, whatever its lease, and yield its Ray
    address. Text with a colon, `auto` and empty text are Ray's own addresses and yielded unchanged. Raises HeadGone for a folder
    without a live head."""
    folder = Path(address).resolve()
    if address in ("", "auto") or (":" in address and not folder.is_dir()):
        yield address
        return
    gone = HeadGone(f"no head lives in {folder}; start one: composer-nb up {folder}")
    if not (folder / "head.lock").is_file():
        raise gone
    with ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder / "users.lock", fcntl.LOCK_SH))
        except BlockingIOError:
            raise gone from None  # it is about to end
        if (head := find(folder)) is None:
            raise gone
        yield head.address


@contextmanager
def _locked(lock: Path, mode: int) -> Iterator[None]:
    """Hold a lock, LOCK_SH or LOCK_EX. Raises BlockingIOError if others do not allow it."""
    with lock.open("ab") as file:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
        yield


# Processes that outlive the one that starts them


def begin(
    words: Sequence[str], log: Path, lock: Path, ready: Callable[[subprocess.Popen[bytes]], bool], seconds: float
) -> str:
    """Run a module as `detach` does, and wait until it is `ready`. If it ends without a holder of `lock`, or takes longer than
    `seconds` (more on a busy machine), return the reason with the last line of its log."""
    log_start, limit_s = log.stat().st_size if log.is_file() else 0, patience(seconds)
    process = detach(words, log)
    deadline = time.monotonic() + limit_s
    while not ready(process):
        has_ended = process.poll() is not None and holder(lock) is None
        if has_ended or time.monotonic() > deadline:
            process.kill()
            reason = f"ended with {process.returncode}" if has_ended else f"did not start within {limit_s:.0f} s"
            return f"{reason}: {last_words(log, log_start)}"
        time.sleep(0.05)
    return ""


def last_words(log: Path, begin: int) -> str:
    """Return the last line written to `log` from byte `begin` on, and the path of the log."""
    text = log.read_bytes()[begin:].decode("utf-8", "replace").strip()
    return f"{text.splitlines()[-1] if text else SILENT} ({log})"


def end(
    lock: Path, pid: int, signal_number: signal.Signals, seconds: float, say: Callable[[str], None] = lambda line: None
) -> None:
    """Send a signal to the holder of a lock, and SIGKILL if it holds the lock after `seconds`. Say what is waited for. Raises
    TimeoutError if even that has not ended it after KILLED_S."""
    start_s = reported_s = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(pid, signal_number)
        is_killed = False
        while holder(lock) == pid:
            now_s = time.monotonic()
            if not is_killed and now_s - start_s > seconds:
                os.kill(pid, signal.SIGKILL)
                is_killed = True
                say(f"process {pid} was killed: it had not ended within {seconds:g} s")
            if now_s - start_s > seconds + KILLED_S:
                raise TimeoutError(
                    f"process {pid} outlives SIGKILL: it waits for its disk; look at {lock.parent} later"
                )
            if not is_killed and now_s - reported_s > SAY_S:
                reported_s = now_s
                say(f"waiting for process {pid} to end, {now_s - start_s:.0f} s of {seconds:g} s")
            time.sleep(0.05)


def claim(lock: Path, tries: int = 20) -> int | None:
    """Take a lock and write this process's id into it. Return the open file, which holds the lock; None if another process has
    the lock."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for _ in range(tries):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # the holder may only be looking
            continue
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        return fd
    os.close(fd)
    return None


def detach(words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Run a module of this package in its own session, where it outlives this process; its output goes to `log`. The end of a job
    does not end it, because it lives for its own folder (docs/jobs.md)."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | PROCESS | {WRITER: str(log.parent)},
            start_new_session=True,
        )
    threading.Thread(target=process.wait, daemon=True).start()  # no zombie if it ends before this process
    return process


def holder(lock: Path) -> int | None:
    """Return the id of the process that holds a lock; None without a holder, 0 if it has not written its id yet."""
    with suppress(FileNotFoundError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read().strip() or 0)  # of this file, which may be removed by now
    return None


# The head's own process


def main(arguments: list[str]) -> None:
    """Start Ray and keep it until its lease has run out unused, it is lost, or SIGTERM; `arguments` are the folder, the lease in
    seconds, and the node as JSON."""
    folder, lease_s, machine = Path(arguments[0]), float(arguments[1]), ClusterNode(**json.loads(arguments[2]))
    os.environ[NODE] = str(folder)
    if claim(folder / "head.lock") is None:
        return  # another head starts here, which serves as well
    try:
        _open_relay(machine, folder / "relay")
        cluster = Cluster("", "head", ResourceJournal(folder / FOLDER, folder.name), machine)
    except ConnectionError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"--relay {machine.relay}: {error}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_s, head_file = time.time(), folder / "head.json"
    head = Head(
        folder=str(folder),
        address=cluster.address,
        pid=os.getpid(),
        started=start_s,
        until=start_s + lease_s,
        machine=json.loads(arguments[2]),
    )
    try:
        write_json(head_file, asdict(head))
        end_reason = ""
        while not end_reason:
            if stop.wait(POLL_S):
                end_reason = "it was asked to"
            elif lost := cluster.lost():
                end_reason = lost
            elif not machine.join and time.time() >= json.loads(head_file.read_text())["until"]:
                with suppress(BlockingIOError), _locked(folder / "users.lock", fcntl.LOCK_EX):
                    end_reason = "its lease has run out, and nobody uses it"
                    head_file.unlink()  # before a new user can come
        print(f"{time.ctime()}: ended: {end_reason}", flush=True)
    finally:
        head_file.unlink(missing_ok=True)
        cluster.close()


def _open_relay(machine: ClusterNode, folder: Path) -> None:
    """Tell services of the node of their region's relay, which runs in this process if the address is its own, with its files in
    `folder`. Raises OSError if it cannot listen there."""
    if not machine.relay:
        return
    os.environ[RELAY], (host, _, port) = machine.relay, machine.relay.rpartition(":")
    if host == machine.host:
        from composer_nb.trainer.services.relay import FileCache, Relay

        threading.Thread(target=Relay(FileCache(folder), host, int(port)).serve_forever, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
