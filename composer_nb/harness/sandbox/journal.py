"""The journal on disk of what a run holds of a machine, so that what a killed run left can be found and ended (`reap.py`).

Each `ResourceJournal` writes a file of its own, `<folder>/<pid>-<random>.jsonl`, which is there only while it holds something:

    {"event": "made", "kind": "process", "name": "4711", "mark": "86234", "run_id": …, "owner": {…}, "time": …}
    {"event": "gone", "kind": "process", "name": "4711", "mark": "86234"}

Others use numbers and names again, so each resource has a *mark*, which tells it from whatever has its name later: for a process
the clock tick in which it began, for a cgroup its name, which is random (OWN), for a directory the text of a file in it (inodes
are used again at once), for a container a label. The owner is a process, known by pid, tick, boot and pid namespace: a pid means
nothing elsewhere.

Covers Linux. Does not cover the moment between making a thing and noting it: what a run starts also ends with its parent.
A container and a cgroup do not, so they are noted before they are made, under the mark that they will have.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
import uuid
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from composer_nb.harness.sandbox.system.linux import lives, processes, status_of

FOLDER = "journal"
"""Folder of a run directory with its journals."""
LABEL = ".composer_nb-journal"
"""The file that marks a directory."""
WRITER = "COMPOSER_NB_DIRECTORY"
"""Environment variable with the marks of directories, joined by colons, for processes that live for them and may write there to
their end. They and all that they start are ended before one of them is removed."""
OWN = "composer_nb-"
"""Prefix of names with a random number, which are never used again: those of a sandbox's cgroups."""

Kind = Literal["container", "process", "cgroup", "directory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that holds resources."""

    pid: int
    started: int
    """Clock ticks from boot to its start."""
    host: str
    boot: str
    namespace: str
    """Namespace of the pid: `pid:[4026531836]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A thing that its owner has to remove. `name` is a pid, an absolute path, or a container's."""

    kind: Kind
    name: str
    mark: str


def started(pid: int) -> int | None:
    """Return the clock tick after boot in which a process began; None for one that is gone or a zombie."""
    fields = status_of(str(pid))
    return int(fields[19]) if lives(fields) else None


def with_mark(mark: str) -> str:
    """Return the value of WRITER for what this process starts for a directory."""
    return ":".join(filter(None, (os.environ.get(WRITER), mark)))


def below(root: int) -> list[tuple[int, int]]:
    """Return (pid, clock tick of its start) of every living process below one."""
    found, known = [(root, 0)], list(processes())
    for above, _ in found:
        found += [(pid, tick) for pid, parent, tick in known if parent == above]
    return found[1:]


def mark_of(kind: Kind, name: str) -> str | None:
    """Return the mark of what now has this name; None when nothing has. Raises OSError for a container if no Docker Engine
    answers."""
    if kind == "container":
        from composer_nb.harness.sandbox.docker import connect, container_mark

        with closing(connect()) as client:
            return container_mark(client, name)
    if kind == "process":
        tick = started(int(name))
        return None if tick is None else str(tick)
    if kind == "cgroup":
        return Path(name).name if os.path.isdir(name) else None
    try:
        return _label(name)
    except OSError:
        return None


def _label(directory: str) -> str:
    """Return a directory's label. Raises OSError where there is no directory, or none with a label; links are not followed."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fd = os.open(LABEL, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    with open(fd, encoding="ascii", errors="replace") as file:
        return file.read(200)


def mounts() -> frozenset[str]:
    """Return the paths at which something is mounted, as this process sees them."""
    paths = (line.split()[4] for line in Path("/proc/self/mountinfo").read_bytes().splitlines())
    return frozenset(os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda c: bytes([int(c[1], 8)]), path)) for path in paths)


@lru_cache(maxsize=1)
def _here() -> dict[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot, "namespace": os.readlink("/proc/self/ns/pid")}


def this_process() -> Owner:
    tick = started(os.getpid())
    assert tick is not None
    return Owner(pid=os.getpid(), started=tick, **_here())


class ResourceJournal:
    """Notes what this process holds for `run_id`, in a file of its own in `folder`."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.run_id = run_id
        self.file = folder / f"{os.getpid()}-{uuid.uuid4().hex[:12]}.jsonl"
        self._held: set[Resource] = set()

    def made(self, kind: Kind, name: str | int | Path, mark: str | None = None) -> Resource | None:
        """Note a thing that was just made, and label it if it is a directory; return None when it is gone already, as a process
        may be. `mark`: for a container or a cgroup, which are noted just before they are made."""
        name = str(name)
        if kind == "directory":
            Path(name, LABEL).write_text(uuid.uuid4().hex)
        mark = mark or mark_of(kind, name)
        if mark is None:
            return None
        resource = Resource(kind=kind, name=name, mark=mark)
        self._held.add(resource)
        note = {"run_id": self.run_id, "owner": asdict(this_process()), "time": time.time()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        append(self.file, {"event": "made", **asdict(resource), **note})
        return resource

    def gone(self, resource: Resource | None) -> None:
        """Note that it was removed; remove the file when nothing is held any more."""
        if resource is None:
            return
        self._held.discard(resource)
        with suppress(OSError):  # as of a full disk; without the note, `reap` looks once for what is not there
            if self._held:
                append(self.file, {"event": "gone", **asdict(resource)})
            else:
                self.file.unlink(missing_ok=True)


def append(file: Path, entry: dict[str, Any]) -> None:
    """Append one line, in one write. Raises OSError with the file's name, and then nothing of the line is there."""
    line = (json.dumps(entry) + "\n").encode()
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):  # as on a disk that is just full
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
    except OSError as error:
        raise OSError(error.errno, f"journal: {error.strerror}", str(file)) from error
