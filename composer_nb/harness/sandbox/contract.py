"""What a sandbox is, whoever provides it: the words that backends, tools, graders and tests share.

A *sandbox* is an isolated machine with a workspace, in which hostile commands run. A *backend* makes them. Every sandbox holds
one resident program of ours (`guest/program.py`) that carries out requests from a pipe; a backend only decides how that program
is started, isolated and ended, and which limits the kernel enforces on it.

A command's own failings (a wrong exit code, a timeout, memory used up) are results. SandboxDied says that the sandbox ended
under what ran in it; SandboxFailure that the machinery failed, so that nothing is known about the code.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from composer_nb.harness.sandbox.host import (
    Called,
    Channel,
    Counted,
    F,
    Facts,
    Line,
    Listed,
    Packed,
    Polled,
    Ran,
    Refused,
    Started,
    Unknown,
    frame_of,
)
from composer_nb.harness.sandbox.journal import Resource
from composer_nb.harness.sandbox.system.cgroups import Group
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.untrusted import visible

WORKSPACE = "/workspace"
"""Where the workspace is in every sandbox but those of the backend `process`."""

PLACES = {f"/{name}": f"/tmp/{name}" for name in ("tests", "logs", "solution")}
"""Links in every isolated sandbox, by which scripts of Harbor tasks find their things: its root is read-only."""

LIMITS = ("memory_bytes", "disk_bytes", "inodes", "processes", "cpus", "open_files", "network", "system_calls", "locks")
"""What `Capabilities.enforced` speaks of. `locks`: whether locks that one sandbox takes on files are hidden from all others."""


class SandboxUnavailable(RuntimeError):
    """A backend is missing or cannot start here; the message says what to install or change."""


class SandboxFailure(RuntimeError):
    """The machinery failed: the result says nothing about the code that was to run."""


class SandboxSlow(SandboxFailure):
    """A sandbox was not ready in time on a busy machine: trying again may help."""


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
class CallLimits:
    """Limits of one request of function calls; all of its arguments share them, except `output_bytes`.

    Raises ValueError for a limit that is not above 0.
    """

    cpu_s: float = 0.1
    """CPU seconds from the import of the module on."""
    wall_s: float = 2.0
    """Seconds that it may sleep; waiting for the machine is no sleep."""
    memory_bytes: int = 256 << 20
    """Address space."""
    disk_bytes: int = 4 << 20
    """Size of the workspace, which is in memory."""
    inodes: int = 256
    files: int = 32
    """Files open at once."""
    threads: int = 16
    """Threads; new processes are never allowed."""
    output_bytes: int = 16 << 10
    """Characters of one value's text."""
    answer_bytes: int = 1 << 20
    """Bytes of everything a request may report."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"CallLimits.{name} must be above 0, not {value!r}")


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
    calls: CallLimits | None = None
    """Limits of each request of function calls, for a sandbox that serves these and nothing else (backend `bwrap`)."""

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


GRACE_S = 5.0
"""How much longer than the resident program's own deadlines the host waits."""
START_S = 20.0
"""How long a sandbox may take to be ready, or a background command to be executed: more on a busy machine."""
SPARE = 64 << 20
"""Bytes that an answer may have beyond the data that were asked for: headers, of an archive with very many files too."""
AHEAD = 1 << 16
"""Bytes of requests that are sent before the answers to earlier ones have come: a socket's buffer holds twice as much."""
HEADER = 1000
"""Bytes of an answer's header, at most."""
LONGEST_S = 1e6
"""Of a time limit."""


@dataclass(slots=True, kw_only=True)
class Machine:
    """What a backend holds of one sandbox."""

    id: str
    channel: Channel
    group: Group | None = None
    noted: list[Resource | None] = field(default_factory=list)
    """What of it is in the run's journal."""

    def end(self) -> None:
        """End everything in it and remove what there is of it. Called once."""
        raise NotImplementedError

    def usage(self) -> tuple[int | None, float | None]:
        """Return (bytes of memory, seconds of CPU), None where that is not known."""
        return (None, None) if self.group is None else (self.group.memory_bytes(), self.group.cpu_s())

    def kills(self) -> int:
        """Return how often the kernel has killed something in it for memory."""
        return 0 if self.group is None else self.group.kills()


class Sandbox:
    """One sandbox of any backend. Paths are relative to its workspace, or absolute in it. A context manager, which destroys it.

    One call at a time is carried out; others wait. Every method raises SandboxDied or SandboxFailure when the sandbox is gone.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, machine: Machine) -> None:
        """Waits until the resident program is ready. Raises SandboxFailure when it does not get so."""
        self.id, self.spec = machine.id, spec
        self.backend, self._machine = backend, machine
        self.at_end: list[Callable[[], None]] = []
        self._lock, self._ending = threading.Lock(), threading.RLock()
        self._line = Line(machine.channel)
        self._gone: Exception | None = None
        self._ended = False
        self._counted = 0
        """How often memory had run out at the last answer: what was killed since then ended between two requests, or in one."""
        try:
            facts, _ = self._line.answer(time.monotonic() + patience(START_S), SPARE)
        except BaseException as error:
            self.destroy()
            if not isinstance(error, OSError | ValueError):
                raise
            if isinstance(error, TimeoutError):
                raise SandboxSlow(f"sandbox {self.id} was not ready in time: the machine is busy") from error
            raise SandboxFailure(f"sandbox {self.id} did not start: {error}") from error
        if not facts.get("ready"):
            self.destroy()
            raise SandboxFailure(f"sandbox {self.id} did not start: {visible(str(facts.get('failed'))[:300])}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.destroy()

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
        if not 0 < timeout_s <= LONGEST_S:
            raise ValueError(f"timeout_s={timeout_s!r}: must be above 0 and at most {LONGEST_S:g}")
        if type(output_bytes) is not int or output_bytes < 2:
            raise ValueError(f"output_bytes={output_bytes!r}: must be a whole number, at least 2, a head and a tail")
        asked = _command(command, cwd, env) | {"timeout_s": timeout_s, "output_bytes": output_bytes}
        kills = self._kills()
        ran, output = self._ask("exec", Ran, asked, stdin, timeout_s, 2 * output_bytes, stop)
        first, second = ran.sizes
        return ExecResult(
            exit_code=ran.exit_code,
            stdout=output[:first],
            stderr=output[first : first + second],
            truncated=ran.truncated,
            timed_out=ran.timed_out,
            stopped=ran.stopped,
            oom=self._kills() > kills,
            duration_s=ran.duration_s,
        )

    def exec_background(
        self, command: Sequence[str], *, log: str, cwd: str = ".", env: Mapping[str, str] | None = None
    ) -> int:
        """Starts a command and returns its pid in the sandbox. Both of its streams go to the file `log`."""
        call = _command(command, cwd, env) | {"log": log, "start_s": patience(START_S)}
        return self._ask("background", Started, call)[0].pid

    def poll(self, pid: int) -> int | None:
        """Exit code of a background command; None while it runs. Raises KeyError for one that was not started here."""
        return self._ask("poll", Polled, {"pid": pid})[0].exit_code

    def end(self, pid: int) -> None:
        """Ends a background command and its descendants. Orphans of it stay, as they can not be told from others."""
        self._ask("end", Facts, {"pid": pid})

    def end_all(self) -> None:
        """Ends everything that runs in it, orphans too. Raises OSError where something is still there after seconds."""
        self._ask("end_all", Facts, {})

    def read(self, path: str, *, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
        """A part of a regular file. Raises OSError (FileNotFoundError, …); links that lead out of the workspace are refused."""
        return self._ask("read", Facts, {"path": path, "offset": offset, "max_bytes": max_bytes}, most=max_bytes)[1]

    def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Writes a whole file, in a moment, and makes its folders. Raises OSError, as for a full disk.

        `mode`: its permissions; None keeps those of a file that is there, and is 0o644 for a new one.
        """
        self._ask("write", Facts, {"path": path, "mode": mode}, data)

    def entries(self, path: str = ".") -> list[Entry]:
        """What is in a folder, by name. Raises OSError (NotADirectoryError, …) like `read`."""
        found = self._ask("entries", Listed, {"path": path})[0].entries
        return [Entry(name=name, kind=kind, size=size, mode=mode) for name, kind, size, mode in found]

    def remove(self, path: str) -> None:
        """Removes a file or a link, not what it leads to. Raises OSError (FileNotFoundError, IsADirectoryError, …)."""
        self._ask("remove", Facts, {"path": path})

    def upload(self, files: Mapping[str, bytes]) -> None:
        """Writes many files at once."""
        self._ask("unpack", Facts, {}, archive_of(files))

    def download(self, *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        """Contents of all regular files of the workspace by path. Links and devices are left out. Raises OSError (EFBIG)."""
        _, packed = self._ask("pack", Packed, {"max_bytes": max_bytes, "links": False}, most=max_bytes)
        return {info.name: data for info, data in members(packed) if info.isreg()}

    def snapshot(self) -> Snapshot:
        """All files. Those that nobody may open, or that go meanwhile, are left out.

        Raises OSError for files that are too large together (holes count) or too deep: the doing of what runs here.
        """
        most = self.spec.disk_bytes
        facts, packed = self._ask("pack", Packed, {"max_bytes": most, "links": True}, most=most)
        return Snapshot(archive=packed, digest=facts.digest)

    def restore(self, snapshot: Snapshot) -> None:
        """Puts the files of a snapshot into this workspace, which is empty."""
        self._ask("unpack", Facts, {}, snapshot.archive)

    def fork(self) -> Sandbox:
        """Another sandbox of the same spec, with a copy of this workspace. Raises OSError like `snapshot`."""
        return self.backend.create(self.spec, self.snapshot())

    def call(self, requests: Sequence[bytes], *, within_s: float, most: int) -> Generator[tuple[Called, bytes]]:
        """Yield the answer to each request, in order: what became of its worker, and the bytes the worker wrote.

        `requests`: JSON texts for `guest/calls.py`. `within_s`: time limit of each. `most`: bytes of an answer. Requests are sent
        ahead of the answers as long as the channel certainly holds them.
        """
        frames = [frame_of({"do": "call", "size": len(request)}) + request for request in requests]
        sent = unanswered = 0
        longest = within_s + patience(GRACE_S)
        with self._exchange(within_s):
            for number, frame in enumerate(frames):
                deadline = time.monotonic() + longest
                ahead = bytearray()
                while sent < len(frames) and (sent == number or unanswered + len(frames[sent]) <= AHEAD):
                    ahead += frames[sent]
                    unanswered, sent = unanswered + len(frames[sent]), sent + 1
                if ahead:
                    self._line.send(bytes(ahead), deadline)
                facts, data = self._line.answer(deadline, most + HEADER)
                unanswered -= len(frame)
                yield Called.model_validate(facts), data

    def stats(self) -> Stats:
        counted, _ = self._ask("stats", Counted, {})
        memory, cpu = self._machine.usage()
        return Stats(memory_bytes=memory, cpu_s=cpu, **counted.model_dump())

    def destroy(self) -> None:
        """End everything in it; nothing is left of it afterwards. May be called again, and from another thread in the middle of
        a call, which then raises SandboxFailure."""
        self._retire(SandboxFailure(f"sandbox {self.id} was destroyed"))

    def _retire(self, why: Exception) -> Exception:
        """Ends the sandbox; what is asked from now on is answered by the first reason, which is returned.

        An end that was broken off, as by Ctrl-C, is taken up by the next call.
        """
        self._gone = self._gone or why
        with self._ending:
            if not self._ended:
                self._machine.end()
                self._ended = True
                for call in self.at_end:
                    call()
        return self._gone

    def _ask(
        self,
        do: str,
        form: type[F],
        header: Mapping[str, Any],
        payload: bytes = b"",
        within_s: float = 60.0,
        most: int = 0,
        stop: threading.Event | None = None,
    ) -> tuple[F, bytes]:
        """The answer to a request, of this form and of at most `most` bytes of data. `stop`: whoever sets it wants the command to
        end."""
        frame = frame_of({"do": do, **header}, payload)
        with self._exchange(within_s):
            deadline = time.monotonic() + within_s + patience(GRACE_S)
            self._line.send(frame, deadline)
            if stop is not None:
                self._line.wait(deadline, stop)
            facts, data = self._line.answer(deadline, most + SPARE)
            if "failed" in facts:
                raise ValueError(visible(str(facts["failed"])[:300]))
            kind = Refused if "error" in facts else Unknown if "missing" in facts else form
            answer = kind.model_validate(facts)
            self._counted = self._kills()
        if isinstance(answer, Refused):
            code, text = answer.error
            raise OSError(code, visible(text[:300]))
        if isinstance(answer, Unknown):
            raise KeyError(answer.missing)
        assert isinstance(answer, form)
        return answer, data

    @contextlib.contextmanager
    def _exchange(self, within_s: float) -> Iterator[None]:
        """One request and its answer, or several. Ends the sandbox when they are broken off."""
        with self._lock:
            if self._gone is not None:
                raise self._gone
            try:
                yield
            except TimeoutError as error:
                text = f"sandbox {self.id} gave no answer within {within_s + GRACE_S:g} s; it was ended"
                raise self._retire(SandboxFailure(text)) from error
            except (OSError, ValueError) as error:
                raise self._retire(self._death(error)) from error
            except BaseException as error:  # Ctrl-C: the answer would be taken for that of another request
                self._retire(SandboxFailure(f"sandbox {self.id} was ended in the middle of a request: {error!r}"))
                raise

    def _kills(self) -> int:
        try:
            return self._machine.kills()
        except OSError:
            return 0  # its group is gone, and it with it

    def _death(self, error: Exception) -> Exception:
        """Why there is no answer."""
        if self._gone is not None:
            return self._gone  # ended from another thread, in the middle of this call
        if self._kills() > self._counted:
            return SandboxDied(f"sandbox {self.id} ended: its memory of {self.spec.memory_bytes} bytes was used up")
        return SandboxFailure(f"sandbox {self.id} ended unexpectedly: {error}")


def _command(command: Sequence[str], cwd: str, env: Mapping[str, str] | None) -> dict[str, Any]:
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r}: give a list of words, as ['bash', '-c', …]")
    words = [*command, *(f"{name}{value}" for name, value in (env or {}).items())]
    if any("\0" in word for word in words):
        raise ValueError("command: a word with a NUL in it")
    return {"command": list(command), "cwd": cwd, "env": dict(env or {})}


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files by path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Regular files with their contents, and symbolic links, of an archive that came out of a sandbox. Their names are as it
    says: they need not be plain. Raises SandboxFailure for what is no archive, or unpacks to more than it is."""
    last = -1
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as held:
            for info in held:
                if info.offset <= last or info.size < 0 or info.issparse():  # a circle, or a hole of any size
                    raise tarfile.ReadError("an entry that no sandbox writes")
                last = info.offset
                if info.issym():
                    yield info, b""
                elif info.isreg() and (file := held.extractfile(info)) is not None:
                    yield info, file.read()
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise SandboxFailure(
            f"what the sandbox says that it holds is no archive: {visible(str(error)[:300])}"
        ) from error


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
