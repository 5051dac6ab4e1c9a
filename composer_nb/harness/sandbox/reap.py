"""End what a killed run left on this machine: containers, processes, cgroups, directories, as its journals name them.

`reap` touches a thing only if all of this holds: a journal names it, its owner is a process of this machine and pid namespace
that is dead (or of an earlier boot of this machine), and what has its name now also has its mark (`journal.py`). Everything
else is left alone and counted. Whatever was ended, or proved gone, is struck from the journal, so that the next time there is
nothing to do. What cannot be ended now, as a container while no Docker Engine answers, stays in the journal for the next time.

Covers Linux. Does not cover what a run writes into its own directory (`RunDir.clean` does).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from composer_nb.harness.sandbox.journal import (
    FOLDER,
    LABEL,
    WRITER,
    Kind,
    Owner,
    Resource,
    ResourceJournal,
    append,
    below,
    mark_of,
    mounts,
    started,
    this_process,
)
from composer_nb.harness.sandbox.system.linux import patience

PATIENCE_S = 5.0
"""Seconds that a killed process may take to end, more on a busy machine."""
FIELDS: dict[Kind, str] = {
    "container": "containers", "process": "processes", "cgroup": "cgroups", "directory": "directories",
}  # fmt: skip
"""Kinds in the order in which they are ended, and the fields of `Reaped` that name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Result of `reap`. Names are pids, paths, and those of containers."""

    containers: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    kept: int = 0
    """Number of things whose owner lives, or cannot be seen from here (another machine, another container)."""
    failed: tuple[str, ...] = ()
    """Things that could not be ended and why, a line each."""


def reap(root: Path) -> Reaped:
    """End what the journals of `root`, a run directory or a folder of them, name and no living process owns.

    Raises FileNotFoundError when there is no such folder.
    """
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: there is no such folder of runs")
    found: dict[str, list[str]] = {name: [] for name in (*FIELDS.values(), "failed")}
    kept = 0
    for file in sorted({file.resolve() for folder in ("", "*/") for file in root.glob(f"{folder}{FOLDER}/*.jsonl")}):
        with _locked(file) as there:
            kept += _reap_file(file, found) if there else 0
    return Reaped(kept=kept, **{name: tuple(lines) for name, lines in found.items()})


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Keep other reapers away; yield False when the file is gone."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield file.exists()
    finally:
        os.close(fd)


def _reap_file(file: Path, found: dict[str, list[str]]) -> int:
    """Add what was ended to `found`, and return how many things were kept."""
    held, strange = _read(file)
    found["failed"] += strange
    left, kept = len(held) + len(strange), 0
    for resource in _in_order(held):
        owner = held[resource]
        if not is_dead(owner):
            kept += 1
            continue
        lasting = resource.kind in ("container", "directory") or owner.boot == this_process().boot
        try:
            if lasting and end(resource):
                found[FIELDS[resource.kind]].append(resource.name)
        except OSError as error:
            found["failed"].append(f"{resource.kind} {resource.name}: {error.strerror or error}")
            continue
        left -= 1
        _strike(file, resource)
    if held and not left:
        file.unlink(missing_ok=True)
    return kept


def _strike(file: Path, resource: Resource) -> None:
    """Note in the journal of a dead owner that a thing is gone, past a line that its death may have cut off."""
    os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
    append(file, {"event": "gone", **asdict(resource)})


def _read(file: Path) -> tuple[dict[Resource, Owner], list[str]]:
    """Return the resources in a journal with their owners, and a complaint about each malformed line, but for a last one that was
    cut off."""
    held: dict[Resource, Owner] = {}
    strange: list[str] = []
    for number, line in enumerate(file.read_bytes().decode("utf-8", "replace").split("\n")[:-1], 1):
        try:
            entry = json.loads(line)
            resource = Resource(kind=entry["kind"], name=entry["name"], mark=entry["mark"])
            if resource.kind not in FIELDS:
                raise ValueError(f"unknown kind {resource.kind!r}")
            if entry["event"] == "made":
                held[resource] = Owner(**entry["owner"])
            else:
                held.pop(resource, None)
        except (ValueError, KeyError, TypeError) as error:
            strange.append(f"{file}:{number}: no line of a journal ({type(error).__name__}: {error})")
    return held, strange


def is_dead(owner: Owner) -> bool:
    """Return whether an owner certainly lives no more; False also where that cannot be known from here."""
    here = this_process()
    if owner.boot != here.boot:
        return owner.host == here.host  # this machine has started anew since
    return owner.namespace == here.namespace and started(owner.pid) != owner.started


def end(resource: Resource) -> bool:
    """End what a resource names, if it is still that. Return False when it is gone. Raises OSError when that does not work."""
    if mark_of(resource.kind, resource.name) != resource.mark:
        return False
    _ENDS[resource.kind](resource)
    return True


def release(journal: ResourceJournal, resources: Iterable[Resource]) -> None:
    """End resources of this process and strike them from its journal. What cannot be ended now stays there for `reap`."""
    for resource in _in_order(resources):
        with suppress(OSError):
            end(resource)
            journal.gone(resource)


def _in_order(resources: Iterable[Resource]) -> list[Resource]:
    return sorted(resources, key=lambda resource: list(FIELDS).index(resource.kind))


def _end_container(resource: Resource) -> None:
    from composer_nb.harness.sandbox.docker import connect, remove_container

    with closing(connect()) as client:
        remove_container(client, resource.name)


def _end_process(resource: Resource) -> None:
    """Kill a process and all that runs below it."""
    root = int(resource.name)
    doomed = [(root, int(resource.mark)), *below(root)]
    for pid, tick in doomed:
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                if started(pid) == tick:  # the descriptor keeps meaning this process, whatever gets its number
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)
    _wait(lambda: all(started(pid) != tick for pid, tick in doomed))


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("still there, long after it was killed")
        time.sleep(0.01)


def _end_cgroup(resource: Resource) -> None:
    """Kill what runs in a cgroup and those below it, and remove them."""
    folders = [Path(folder) for folder, _, _ in os.walk(resource.name, topdown=False)]

    def empty() -> bool:
        left = [int(pid) for folder in folders for pid in (folder / "cgroup.procs").read_text().split()]
        # A pid of 0 belongs to another pid namespace and is out of reach; as a target it would mean ourselves.
        _kill(filter(None, left))
        return not left

    _wait(empty)
    for folder in folders:
        folder.rmdir()


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _end_directory(resource: Resource) -> None:
    path = Path(resource.name)
    if inside := [mount for mount in mounts() if Path(mount).is_relative_to(path)]:
        raise OSError(errno.EBUSY, f"{inside[0]} is mounted in it")
    remove_directory(path)


def remove_directory(path: Path) -> None:
    """Remove a directory of a journal, and end its writers (`journal.WRITER`), which could make it anew.

    Others may write there for a moment more, so this is tried for PATIENCE_S; then it raises OSError, and the directory still has
    its label, by which it is known the next time.
    """
    label = path / LABEL
    text, deadline = label.read_text() if label.is_file() else "", time.monotonic() + patience(PATIENCE_S)
    while (writers := _writers(text)) or path.is_dir():
        _kill(writers)
        with suppress(OSError):
            if not writers:
                for entry in list(os.scandir(path)):
                    if entry.name != LABEL:
                        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)
                label.unlink(missing_ok=True)
                path.rmdir()
        if time.monotonic() > deadline and path.is_dir():
            label.write_text(text)
            who = f"process {writers[0]}, which does not end," if writers else "something"
            raise OSError(errno.EBUSY, f"it cannot be emptied; {who} may still write into it")
        time.sleep(0.01)


def _writers(mark: str) -> list[int]:
    """Return the living processes that were started for the directory with this mark."""
    name, pids = f"{WRITER}=".encode(), []
    for entry in Path("/proc").iterdir() if mark else ():
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if any(mark.encode() in text[len(name) :].split(b":") for text in variables if text.startswith(name)):
                pids.append(int(entry.name))
    return [pid for pid in pids if pid != os.getpid() and started(pid) is not None]


_ENDS: dict[Kind, Callable[[Resource], None]] = {
    "container": _end_container,
    "process": _end_process,
    "cgroup": _end_cgroup,
    "directory": _end_directory,
}
