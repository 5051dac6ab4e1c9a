"""What a sandbox is, whoever provides it: the words that backends, tools, graders and tests share.

A *sandbox* is an isolated machine with a workspace, in which hostile commands run. A *backend* makes them. Every sandbox holds
one resident program of ours (`guest.py`) that carries out what is asked over a pipe; a backend only decides how that program is
started, kept apart and ended, and which limits the kernel enforces on it.

A command's own failings (a wrong exit code, a timeout, memory used up) are results. SandboxDied says that the sandbox ended
under what ran in it; SandboxFailure that the machinery failed, so that nothing is known about the code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Protocol, Self

from composer_nb.harness.calls import SandboxFailure, SandboxUnavailable

__all__ = ["Backend", "Capabilities", "Entry", "ExecResult", "Sandbox", "SandboxDied", "SandboxFailure", "SandboxSpec"]
__all__ += ["SandboxUnavailable", "Snapshot", "Stats"]

WORKSPACE = "/workspace"
"""Where the workspace is in every sandbox but those of the backend `process`."""

PLACES = {f"/{name}": f"/tmp/{name}" for name in ("tests", "logs", "solution")}
"""Links in every isolated sandbox, by which scripts of Harbor tasks find their things: its root is read-only."""

LIMITS = ("memory_bytes", "disk_bytes", "inodes", "processes", "cpus", "open_files", "network", "system_calls")
"""What `Capabilities.enforced` speaks of."""


class SandboxDied(RuntimeError):
    """The sandbox ended under what ran in it, for instance because that used up its memory: the agent's own doing."""


BOUNDS: Mapping[str, tuple[float, float]] = {
    "memory_bytes": (1, 1 << 46),
    "disk_bytes": (1, 1 << 45),
    "inodes": (1, 1 << 31),
    "processes": (1, 1 << 22),
    "cpus": (0.01, 4096),
    "open_files": (32, 1 << 20),
}
"""What a SandboxSpec may ask for. Below 32 open files the resident program itself would lack some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a sandbox may use, all of its processes and files together. Raises ValueError for a limit that is too low."""

    memory_bytes: int = 512 << 20
    """Of processes and of files in it, which live in memory."""
    disk_bytes: int = 64 << 20
    """Of the workspace, as much again of its folder for temporary files, and a quarter of it of memory that processes share."""
    inodes: int = 16_384
    processes: int = 128
    """Processes and threads."""
    cpus: float = 1.0
    open_files: int = 1024
    """A process."""
    image: str = ""
    """Of the backend `docker`: the image's name; empty: the one that is made of this machine's own files."""
    trusted: bool = False
    """Whether what runs is known to be harmless: the backend `process` takes nothing else."""

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            whole = type(value) is int or (name == "cpus" and isinstance(value, float))
            if not whole or not least <= value <= most:
                raise ValueError(f"SandboxSpec.{name} must be from {least:,} to {most:,}, not {value!r}")
        if self.memory_bytes < 2 * self.disk_bytes + (64 << 20):
            raise ValueError(
                f"SandboxSpec.memory_bytes={self.memory_bytes}: its files live in memory, so it must be at least twice "
                f"disk_bytes ({self.disk_bytes}) and 64 MiB"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What became of a command."""

    exit_code: int
    """As a shell reports it: 128 + n after signal n; 126 or 127 when it could not be started (stderr says why)."""
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    """Whether the middle of a stream was left out; a line in it says how much."""
    timed_out: bool = False
    """Whether it, and all that it had started, was ended at its time limit."""
    stopped: bool = False
    """Whether it, and all that it had started, was ended because whoever waited for it wanted that."""
    oom: bool = False
    """Whether something in the sandbox was killed for memory meanwhile."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a folder holds under one name."""

    name: str
    """Bytes that are not UTF-8 are lone surrogates, as from `os.fsdecode`."""
    kind: Literal["file", "folder", "link", "other"]
    size: int
    """Bytes."""
    mode: int
    """Permissions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a sandbox uses; None where this backend can not tell."""

    memory_bytes: int | None
    processes: int
    """Besides the resident program."""
    disk_bytes: int
    inodes: int
    cpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All files of a workspace at one moment, as a tar archive that only another sandbox unpacks. Processes are no part of it."""

    archive: bytes = field(repr=False)
    digest: str
    """SHA-256 of paths, kinds, permissions and contents, whatever the order and the times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend does here."""

    backend: str
    mode: str
    """How sandboxes are made: `forked`, `single`, …"""
    uid: int
    """Of what runs in it, as this machine sees it."""
    isolated: bool
    enforced: Mapping[str, bool]
    why_not: Mapping[str, str] = field(default_factory=dict)
    """For what is not enforced: the reason, and what to change."""


class Sandbox(Protocol):
    """One sandbox. Paths are relative to its workspace, or absolute in it. A context manager, which destroys it.

    One call at a time is carried out; others wait. Every method raises SandboxDied or SandboxFailure when the sandbox is gone.
    """

    id: str
    spec: SandboxSpec
    backend: Backend
    """Who makes its forks."""
    at_end: list[Callable[[], None]]
    """Called once when it has ended, whatever ended it."""

    def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str = ".",
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
        stop: threading.Event | None = None,
    ) -> ExecResult:
        """Runs a command to its end or its time limit, then ends everything that it started if that was reached.

        `stop`: set by another thread, it ends the command and everything that it started, as the time limit would.

        Of each stream at most `output_bytes` are kept, its head and its tail. Processes that the command left behind go on
        after a normal end.
        """
        ...

    def exec_background(
        self, command: Sequence[str], *, log: str, cwd: str = ".", env: Mapping[str, str] | None = None
    ) -> int:
        """Starts a command and returns its pid in the sandbox. Both of its streams go to the file `log`."""
        ...

    def poll(self, pid: int) -> int | None:
        """Exit code of a background command; None while it runs. Raises KeyError for one that was not started here."""
        ...

    def end(self, pid: int) -> None:
        """Ends a background command and its descendants. Orphans of it stay, as they can not be told from others."""
        ...

    def end_all(self) -> None:
        """Ends everything that runs in it, orphans too. Raises OSError where something is still there after seconds."""
        ...

    def read(self, path: str, *, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
        """A part of a regular file. Raises OSError (FileNotFoundError, …); links that lead out of the workspace are refused."""
        ...

    def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Writes a whole file, in a moment, and makes its folders. Raises OSError, as for a full disk.

        `mode`: its permissions; None keeps those of a file that is there, and is 0o644 for a new one.
        """
        ...

    def entries(self, path: str = ".") -> list[Entry]:
        """What is in a folder, by name. Raises OSError (NotADirectoryError, …) like `read`."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file or a link, not what it leads to. Raises OSError (FileNotFoundError, IsADirectoryError, …)."""
        ...

    def upload(self, files: Mapping[str, bytes]) -> None:
        """Writes many files at once."""
        ...

    def download(self, *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        """Contents of all regular files of the workspace by path. Links and devices are left out. Raises OSError (EFBIG)."""
        ...

    def snapshot(self) -> Snapshot:
        """All files. Those that nobody may open, or that go meanwhile, are left out.

        Raises OSError for files that are too large together (holes count) or too deep: the doing of what runs here.
        """
        ...

    def fork(self) -> Sandbox:
        """Another sandbox of the same spec, with a copy of this workspace. Raises OSError like `snapshot`."""
        ...

    def stats(self) -> Stats: ...

    def destroy(self) -> None:
        """Ends everything in it; nothing is left of it afterwards. May be called again."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Backend(Protocol):
    """Makes sandboxes. A context manager, which destroys those that are left."""

    name: str

    def capabilities(self) -> Capabilities: ...

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        """A sandbox with an empty workspace, or with the files of `snapshot`.

        Raises SandboxFailure, and OSError where the files do not fit in.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...
