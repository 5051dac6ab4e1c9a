"""What a run holds of this machine, as its journals name it, and the end of what a killed run left.

Each `ResourceJournal` writes a file of its own, `<folder>/<pid>-<random>.jsonl`, which is there only while it holds something:

    {"event": "made", "kind": "process", "name": "4711", "mark": "86234", "run_id": …, "owner": {…}, "time": …}
    {"event": "gone", "kind": "process", "name": "4711", "mark": "86234"}

Others use numbers and names again, so each resource has a *mark*, which tells it from whatever has its name later: for a process
the clock tick in which it began, for a cgroup its name, which is random (OWN), for a directory the text of a file in it (inodes
are used again at once), for a container a label. The owner is a process, known by pid, tick, boot and pid namespace: a pid means
nothing elsewhere.

To have a process tree ended when this process dies: `note = journal.made("process", pid)` once it runs, and `journal.gone(note)`
after its end. `release(journal, notes)` ends noted trees and strikes them now; `end` does it for one resource.

`reap` touches a resource only if all of this holds: a journal names it, its owner is a process of this machine and pid namespace
that is dead (or of an earlier boot of this machine), and what has its name now also has its mark. Everything else is left alone
and counted. Whatever was ended, or proved gone, is struck from the journal, so that the next time there is nothing to do. What
cannot be ended now, as a container while no Docker Engine answers, stays in the journal for the next time.

Covers Linux. Does not cover what a run writes into its own directory (`RunDir.clean` does), nor the moment between making a
resource and noting it: what a run starts also ends with its parent. A container and a cgroup do not, so they are noted before
they are made, under the mark that they will have.
"""

import ctypes
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil

from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.engine import connect, container_mark, remove_container
from composer_nb.harness.sandbox.system.linux import lives, patience, status_of

FOLDER = "journal"  # of a run directory, with its journals
LABEL = ".composer_nb-journal"  # the file that marks a directory
# Environment variable with the marks of directories, joined by colons, for processes that live for them and may write there to
# their end. They and all that they start are ended before one of them is removed.
WRITER = "COMPOSER_NB_DIRECTORY"
# Prefix of names with a random number, which are never used again: those of a sandbox's cgroups.
OWN = "composer_nb-"
POLITE_S = 3.0  # between SIGTERM and SIGKILL, for what is ended politely
# What a small process runs that waits for the end of a directory's owner.
WATCH = "import sys; from pathlib import Path; from composer_nb.harness.sandbox.reap import reap\n"
WATCH += "sys.stdin.read(); reap(Path(sys.argv[1]))"
PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 5.0  # that a killed process may take to end, more on a busy machine

Kind = Literal["container", "process", "cgroup", "directory"]
# Kinds in the order in which they are ended, and the fields of `Reaped` that name them.
FIELDS: dict[Kind, str] = {
    "container": "containers", "process": "processes", "cgroup": "cgroups", "directory": "directories",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds resources.

    Attributes:
        started: clock ticks from boot to its start.
        namespace: namespace of the pid: `pid:[4026531836]`.
    """

    pid: int
    started: int
    host: str
    boot: str
    namespace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What its owner has to remove. `name` is a pid, an absolute path, or a container's."""

    kind: Kind
    name: str
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Result of `reap`. Names are pids, paths, and those of containers.

    Attributes:
        left_alone: number of resources whose owner lives, or cannot be seen from here (another machine, another container).
        failed: resources that could not be ended and why, a line each.
    """

    containers: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    left_alone: int = 0
    failed: tuple[str, ...] = ()


def started(pid: int) -> int | None:
    """Return the clock tick after boot in which a process began; None for one that is gone or a zombie."""
    fields = status_of(str(pid))
    return int(fields[19]) if lives(fields) else None


def with_mark(mark: str) -> str:
    """Return the value of WRITER for what this process starts for a directory."""
    return ":".join(filter(None, (os.environ.get(WRITER), mark)))


def below(root: int) -> list[tuple[int, int]]:
    """Return (pid, clock tick of its start) of every living process below one."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(root).children(recursive=True)
        return [(child.pid, tick) for child in children if (tick := started(child.pid)) is not None]
    return []


def mark_of(kind: Kind, name: str) -> str | None:
    """Return the mark of what now has this name; None when nothing has. Raises OSError for a container if no Docker Engine
    answers."""
    if kind == "container":
        with closing(connect()) as client:
            return container_mark(client, name)
    if kind == "process":
        tick = started(int(name))
        return None if tick is None else str(tick)
    if kind == "cgroup":
        return Path(name).name if os.path.isdir(name) else None
    with suppress(OSError):  # no directory, or one without a label; links are not followed
        folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            label = os.open(LABEL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        with open(label, encoding="ascii", errors="replace") as file:
            return file.read(200)
    return None


def mounts() -> frozenset[str]:
    """Return the paths at which something is mounted, as this process sees them."""
    return frozenset(partition.mountpoint for partition in psutil.disk_partitions(all=True))


@cache
def _machine() -> dict[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "namespace": os.readlink("/proc/self/ns/pid")}


def this_process() -> Owner:
    tick = started(os.getpid())
    assert tick is not None
    return Owner(pid=os.getpid(), started=tick, **_machine())


class ResourceJournal:
    """Notes what this process holds for `run_id`, in a file of its own in `folder`."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.file = folder / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
        self._resources: set[Resource] = set()

    def made(self, kind: Kind, name: str | int | Path, mark: str | None = None) -> Resource | None:
        """Note a resource that was just made, and label it if it is a directory; return None when it is gone already, as a
        process may be. A process stands for its tree. `mark`: for a container or a cgroup, which are noted just before they are
        made."""
        name = str(name)
        if kind == "directory":
            Path(name, LABEL).write_text(uuid.uuid4().hex)
        if (mark := mark or mark_of(kind, name)) is None:
            return None
        resource = Resource(kind=kind, name=name, mark=mark)
        self._resources.add(resource)
        note = {"run_id": self.run_id, "owner": asdict(this_process()), "time": time.time()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        _append(self.file, {"event": "made", **asdict(resource), **note})
        return resource

    def gone(self, resource: Resource | None) -> None:
        """Note that it was removed; remove the file when it names nothing any more."""
        if resource is None:
            return
        self._resources.discard(resource)
        with suppress(OSError):  # as of a full disk; without the note, `reap` looks once for what is not there
            if self._resources:
                _append(self.file, {"event": "gone", **asdict(resource)})
            else:
                self.file.unlink(missing_ok=True)


def _append(file: Path, entry: dict[str, Any]) -> None:
    """Append one line, in one write. Raises OSError with the file's name, and then nothing of the line is there."""
    line = (json.dumps(entry) + "\n").encode()
    try:
        with open(file, "ab", buffering=0) as journal:
            size = os.fstat(journal.fileno()).st_size
            if (journal.write(line) or 0) < len(line):  # as on a disk that is just full
                journal.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise OSError(error.errno, f"journal: {error.strerror}", str(file)) from error


def reap(root: Path) -> Reaped:
    """End what the journals of `root`, a run directory or a folder of them, name and no living process owns.

    Raises FileNotFoundError when there is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder of runs")
    report: dict[str, list[str]] = {name: [] for name in (*FIELDS.values(), "failed")}
    count = 0
    for path in sorted({path.resolve() for folder in ("", "*/") for path in root.glob(f"{folder}{FOLDER}/*.jsonl")}):
        with suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # keeps other reapers away
            count += _reap_file(path, report) if path.exists() else 0
    return Reaped(left_alone=count, **{name: tuple(lines) for name, lines in report.items()})


def _reap_file(file: Path, report: dict[str, list[str]]) -> int:
    """Add what was ended to `report`, and return the number of resources that stay."""
    owners, errors = _read(file)
    report["failed"] += errors
    left, spared = len(owners) + len(errors), 0
    for resource in _in_order(owners):
        if not is_dead(owners[resource]):
            spared += 1
            continue
        lasting = resource.kind in ("container", "directory") or owners[resource].boot == this_process().boot
        try:
            if lasting and end(resource):
                report[FIELDS[resource.kind]].append(resource.name)
        except OSError as error:
            report["failed"].append(f"{resource.kind} {resource.name}: {error.strerror or error}")
            continue
        left -= 1
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)  # its owner's death may have cut off a line
        _append(file, {"event": "gone", **asdict(resource)})
    if owners and not left:
        file.unlink(missing_ok=True)
    return spared


def _read(file: Path) -> tuple[dict[Resource, Owner], list[str]]:
    """Return the resources in a journal with their owners, and a complaint about each malformed line, but for a last one that was
    cut off."""
    owners: dict[Resource, Owner] = {}
    errors: list[str] = []
    for number, line in enumerate(file.read_bytes().decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            entry = json.loads(line)
            resource = Resource(kind=entry["kind"], name=entry["name"], mark=entry["mark"])
            if resource.kind not in FIELDS:
                raise ValueError(f"unknown kind {resource.kind!r}")
            if entry["event"] == "made":
                owners[resource] = Owner(**entry["owner"])
            else:
                owners.pop(resource, None)
        except (ValueError, KeyError, TypeError) as error:
            errors.append(f"{file}:{number}: no line of a journal ({type(error).__name__}: {error})")
    return owners, errors


def is_dead(owner: Owner, tick_of: Callable[[int], int | None] = started) -> bool:
    """Return whether an owner certainly lives no more; False also where that cannot be known from here. `tick_of` returns the
    clock tick in which the process with a pid began."""
    here = this_process()
    if owner.boot != here.boot:
        return owner.host == here.host  # this machine has started anew since
    return owner.namespace == here.namespace and tick_of(owner.pid) != owner.started


def end(resource: Resource) -> bool:
    """End what a resource names, if it is still that: a process with all below it. Return False when it is gone. Raises OSError
    when that does not work."""
    name = resource.name
    if mark_of(resource.kind, name) != resource.mark:
        return False
    if resource.kind == "container":
        with closing(connect()) as client:
            remove_container(client, name)
    elif resource.kind == "process":
        tree = [(int(name), int(resource.mark)), *below(int(name))]
        for pid, tick in tree:
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if started(pid) == tick:
                    process.kill()
        _wait(lambda: all(started(pid) != tick for pid, tick in tree))
    elif resource.kind == "cgroup":
        folders = [Path(folder) for folder, _, _ in os.walk(name, topdown=False)]
        _wait(lambda: not _kill(pid for folder in folders for pid in (folder / "cgroup.procs").read_text().split()))
        for folder in folders:
            folder.rmdir()
    else:
        if inside := [mount for mount in mounts() if Path(mount).is_relative_to(name)]:
            raise OSError(errno.EBUSY, f"{inside[0]} is mounted in it")
        _remove_directory(Path(name))
    return True


def release(journal: ResourceJournal, resources: Iterable[Resource]) -> None:
    """End resources of this process and strike them from its journal. What cannot be ended now stays there for `reap`."""
    for resource in _in_order(resources):
        with suppress(OSError):
            end(resource)
            journal.gone(resource)


def _in_order(resources: Iterable[Resource]) -> list[Resource]:
    return sorted(resources, key=lambda resource: list(FIELDS).index(resource.kind))


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("still there, long after it was killed")
        time.sleep(0.01)


def _kill(pids: Iterable[str | int]) -> list[int]:
    """Kill processes and return their pids. A pid of 0 is of another pid namespace and out of reach; it would mean ourselves."""
    targets = [int(pid) for pid in pids]
    for pid in filter(None, targets):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return targets


def _remove_directory(path: Path) -> None:
    """Remove a directory of a journal, and end its writers (WRITER), which could make it anew.

    Others may write there for a moment more, so this is tried for PATIENCE_S; then it raises OSError, and the directory still has
    its label, by which it is known the next time.
    """
    label = path / LABEL
    text, deadline = label.read_text() if label.is_file() else "", time.monotonic() + patience(PATIENCE_S)
    while (killed := _kill(process.pid for process in writers(text))) or path.is_dir():
        with suppress(OSError):
            if not killed:
                for entry in list(os.scandir(path)):
                    if entry.name != LABEL:
                        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
                label.unlink(missing_ok=True)
                path.rmdir()
        if time.monotonic() > deadline and path.is_dir():
            label.write_text(text)
            who = f"process {killed[0]}, which does not end," if killed else "something"
            raise OSError(errno.EBUSY, f"it cannot be emptied; {who} may still write into it")
        time.sleep(0.01)


def writers(mark: str, unmarked: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the living processes that were started for the directory with this mark, and those of `unmarked` that have no mark
    at all."""
    return [
        process
        for process in (psutil.process_iter(["environ"], ad_value={}) if mark else ())
        if mark in process.info["environ"].get(WRITER, mark if process in unmarked else "").split(":")
        and process.pid != os.getpid()
        and started(process.pid)
    ]


def end_writers(mark: str, unmarked: Callable[[], Collection[psutil.Process]] = tuple) -> list[dict[str, Any]]:
    """End what `writers` returns, again and again until there is nothing: SIGTERM, then SIGKILL. Return pid and name of each.

    Gives up after ten more seconds on what not even SIGKILL ends (a process stuck in a system call).
    """
    ended: dict[int, dict[str, Any]] = {}
    for number, wait_s in ((signal.SIGTERM, POLITE_S), *[(signal.SIGKILL, 1.0)] * 10):
        if not (alive := writers(mark, unmarked())):
            break
        for process in alive:
            with suppress(psutil.Error):
                ended.setdefault(process.pid, {"pid": process.pid, "name": process.name()})
                process.send_signal(number)
        psutil.wait_procs(alive, timeout=wait_s)
    return list(ended.values())


def package_environment() -> dict[str, str]:
    """Return the environment of a process that imports this package, also where a Ray worker lost PYTHONPATH."""
    root = Path(__file__).parents[3]
    if root.name == "site-packages":
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}


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

    def orphans() -> set[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return {child for child in children if child.pid != watcher.pid and started(child.pid)} - before

    control(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield path, resource.mark
    finally:
        record["ended_processes"] = end_writers(resource.mark, orphans)
        record["leased_processes"] = [{"pid": process.pid, "name": process.name()} for process in orphans()]
        control(PR_SET_CHILD_SUBREAPER, 0)
        release(journal, [resource])
        watcher.communicate()
        with suppress(OSError):  # something is left in it
            journal.file.parent.rmdir()
