"""The contract of a sandbox: the terms that backends, tools, graders and tests share.

A *sandbox* is an isolated machine with a workspace, in which hostile commands run. A *backend* creates sandboxes. In every
sandbox, one resident program of this package (`guest/program.py`) executes requests from a pipe. A backend only determines how
that program is started, isolated and ended, and which limits the kernel enforces on it.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, TypeVar

from pydantic import Field, FiniteFloat, TypeAdapter

from composer_nb.harness.plain import require_ranges
from composer_nb.harness.sandbox.egress import Destination, EgressProxy
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure, SandboxSlow
from composer_nb.harness.sandbox.granted import PATIENCE, GrantedTime
from composer_nb.harness.sandbox.host import Channel, frame_of
from composer_nb.harness.sandbox.requests import CallLimits
from composer_nb.harness.sandbox.system.cgroups import Cgroup
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.untrusted import visible

WORKSPACE = "/workspace"  # in every sandbox
# Folders of every sandbox that can be written, in memory, and their sizes in multiples of `SandboxSpec.disk_bytes`.
WRITABLE = {WORKSPACE: 1.0, "/tmp": 1.0, "/dev/shm": 0.25}
# Links in every sandbox, through which scripts of Harbor tasks find their files, since its root is read-only.
PLACES = {f"/{name}": f"/tmp/{name}" for name in ("tests", "logs", "solution")}
# Names in `Capabilities.enforced`. `locks`: locks that one sandbox takes on files and devices are hidden from all others.
# `page_cache`: no sandbox with `SandboxSpec.basic`, or of an image, changes which pages of common files are in memory.
# `core_dumps`: a crash starts no program of the host.
LIMITS = (
    "memory_bytes", "disk_bytes", "inodes", "processes", "cpus", "open_files", "network", "system_calls", "locks",
    "page_cache", "core_dumps",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Limits of a sandbox, for all its processes and files together. Raises ValueError for a limit out of range.

    Attributes:
        memory_bytes: memory of processes and of files, which live in memory.
        disk_bytes: size of the workspace. The folder for temporary files gets the same size, and shared memory a quarter of it.
        processes: processes and threads.
        open_files: maximum open files of one process. Fewer than 32 would not suffice for the resident program itself.
        image: name of an image, for the backend `docker`; empty: an image made from this machine's files.
        warm: import pytest in advance, if the backend can (`bwrap`), so that its runs begin at once (`Sandbox.exec`).
        basic: show the basic programs alone (`layout.py`), as copies in memory that no sandbox can change for another. Backend
            `bwrap`; what `docker` shows is the image. Locks have no effect, and there are no watches. For code that has something
            to tell: grades run this way.
        calls: limits of each request of function calls, for a sandbox that serves only these (backend `bwrap`).
        egress: hosts that the sandbox reaches (`egress.py`); it has no other network.
    """

    memory_bytes: Annotated[int, Field(ge=1, le=1 << 46)] = 512 << 20
    disk_bytes: Annotated[int, Field(ge=1, le=1 << 45)] = 64 << 20
    inodes: Annotated[int, Field(ge=1, le=1 << 31)] = 16_384
    processes: Annotated[int, Field(ge=1, le=1 << 22)] = 128
    cpus: Annotated[float, Field(ge=0.01, le=4096)] = 1.0
    open_files: Annotated[int, Field(ge=32, le=1 << 20)] = 1024
    image: str = ""
    warm: bool = False
    basic: bool = False
    calls: CallLimits | None = None
    egress: tuple[Destination, ...] = ()

    def __post_init__(self) -> None:
        require_ranges(self, "SandboxSpec")
        if self.memory_bytes < 2 * self.disk_bytes + (64 << 20):
            raise ValueError(
                f"SandboxSpec.memory_bytes={self.memory_bytes}: its files live in memory, so it must be at least twice "
                f"disk_bytes ({self.disk_bytes}) and 64 MiB"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """Result of a command.

    Attributes:
        exit_code: exit code as a shell reports it: 128 + n after signal n; 126 or 127 if the command did not start (stderr says
            why).
        truncated: whether the middle of a stream was left out; a line in the stream says how much.
        timed_out: whether the command and its processes were ended at the time limit.
        stopped: whether the command and its processes were ended because the caller set `stop`.
        oom: whether a process in the sandbox was killed for memory meanwhile.
    """

    exit_code: int
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    stopped: bool = False
    oom: bool = False
    duration_s: float = 0.0


Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderEntry:
    """An entry of a folder: its size in bytes, and its permissions. `name` has bytes that are not UTF-8 as lone surrogates, as in
    `os.fsdecode`."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: Count
    mode: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Resource use of a sandbox; None if the backend cannot tell. `processes`: besides the resident program."""

    memory_bytes: int | None
    processes: int
    disk_bytes: int
    inodes: int
    cpu_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All files of a workspace at one moment, as a tar archive that only another sandbox unpacks. Processes are not included.

    `digest`: SHA-256 of paths, kinds, permissions and contents, independent of order and times.
    """

    archive: bytes = field(repr=False)
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of a backend on this machine.

    Attributes:
        mode: kind of sandboxes: `forked`, or the container runtime's name.
        uid: user id of a sandbox's processes on this machine.
        why_not: reason and remedy for each limit that is not enforced.
    """

    backend: str
    mode: str
    uid: int
    enforced: Mapping[str, bool]
    why_not: Mapping[str, str] = field(default_factory=dict)


class CommandReport(NamedTuple):
    """A resident program's report on a command. The command's streams follow as data, the first `stdout_bytes` from stdout."""

    exit_code: int
    stdout_bytes: Count
    truncated: bool
    timed_out: bool
    stopped: bool
    duration_s: FiniteFloat


CallEnd = Literal["finished", "died", "cpu", "asleep", "flood", "starved", "slow start"]
T = TypeVar("T")
Variables = Mapping[str, str] | None
# Forms of answers. Any code in a sandbox can write an answer; an answer of another form ends the sandbox.
_DONE: TypeAdapter[None] = TypeAdapter(None)
_COUNT: TypeAdapter[int] = TypeAdapter(Count)
_DIGEST = TypeAdapter(str)
_RAN = TypeAdapter(CommandReport)
_ENTRIES = TypeAdapter(list[FolderEntry])
_COUNTS: TypeAdapter[tuple[int, int, int]] = TypeAdapter(tuple[Count, Count, Count])
_CALL_END: TypeAdapter[CallEnd] = TypeAdapter(CallEnd)
_ERROR = TypeAdapter(tuple[int, str])

GRACE_S = 5.0  # that the host waits beyond the resident program's own deadlines
START_S = 20.0  # within which a sandbox must be ready; more on a busy machine
# Maximum bytes of an answer beyond the requested data, for headers, also of an archive with very many files.
SPARE = 64 << 20
# Bytes of requests that are sent ahead of the answers to earlier ones: a socket's buffer holds twice as much.
AHEAD = 1 << 16
HEADER = 1000  # maximum bytes of an answer's header
LONGEST_S = 1e6  # maximum time limit of a command


@dataclass(slots=True, kw_only=True)
class Machine:
    """A backend's side of one sandbox."""

    id: str
    channel: Channel
    group: Cgroup | None = None
    proxy: EgressProxy | None = None

    def end(self) -> None:
        """End all processes of the sandbox and remove its resources. Called once."""
        raise NotImplementedError

    def kills(self) -> int:
        """Return the number of processes that the kernel has killed for memory."""
        return 0 if self.group is None else self.group.kills()


class Sandbox:
    """One sandbox of any backend. Paths are relative to its workspace, or absolute in it. As a context manager, it is destroyed
    at the end.

    Several threads may use it: their commands run side by side, and other requests are answered meanwhile, in order. Every method
    raises SandboxDied or SandboxFailure if the sandbox is gone.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, machine: Machine) -> None:
        """Wait until the resident program is ready. Raises SandboxFailure if it does not become ready."""
        self.id, self.spec = machine.id, spec
        self.backend, self._machine = backend, machine
        self._calling, self._ending = threading.Lock(), threading.RLock()
        self._gone: Exception | None = None
        self._ended = False
        self._counted = 0  # kills for memory up to the last answer; later ones ended the sandbox
        try:
            facts, _ = machine.channel.answer(time.monotonic() + patience(START_S), SPARE)
        except BaseException as error:
            self.destroy()
            if not isinstance(error, OSError | ValueError):
                raise
            if isinstance(error, TimeoutError):
                raise SandboxSlow(f"sandbox {self.id} was not ready in time: the machine is busy") from error
            raise SandboxFailure(f"sandbox {self.id} did not start: {error}") from error
        self.warm = facts.get("warm") is True  # whether pytest is imported in advance
        if not facts.get("ready"):
            self.destroy()
            raise SandboxFailure(f"sandbox {self.id} did not start: {visible(str(facts.get('failed'))[:300])}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str = ".",
        env: Variables = None,
        stdin: bytes = b"",
        output_bytes: int = 1 << 20,
        stop: threading.Event | None = None,
        warm: bool = False,
        granted: bool = False,
    ) -> ExecResult:
        """Run a command to its end or its time limit; at the limit, end everything that it started.

        `granted`: the limit does not count what the command waited for a CPU that others used (`granted.py`), where the sandbox
        has a control group. Raises SandboxSlow if the machine grants it less than its limit in PATIENCE times as long.

        `warm`: run a Python command that uses pytest in a process with pytest imported, if the result is the same.

        `stop`: an event that, set by another thread, ends the command like the time limit.

        At most `output_bytes` of each stream are kept, its head and its tail. After a normal end, processes that the command left
        behind continue to run. Of processes that left their parents, a limit ends all that began since the command did, also
        those of commands beside it.
        """
        if not 0 < timeout_s <= LONGEST_S:
            raise ValueError(f"timeout_s={timeout_s!r}: must be above 0 and at most {LONGEST_S:g}")
        if type(output_bytes) is not int or output_bytes < 2:
            raise ValueError(f"output_bytes={output_bytes!r}: must be a whole number, at least 2, a head and a tail")
        header = _command(command, cwd, env) | {"timeout_s": timeout_s, "output_bytes": output_bytes, "warm": warm}
        clock, kills = None, self._kills()
        if granted and self._machine.group is not None:
            clock = GrantedTime(self._machine.group, timeout_s, stop)
            header["timeout_s"] = min(PATIENCE * timeout_s, LONGEST_S)
        ran, output = self._ask("exec", _RAN, header, stdin, header["timeout_s"], 2 * output_bytes, clock or stop)
        facts = ran._asdict()
        cut = facts.pop("stdout_bytes")
        if clock is not None and clock.over and ran.stopped:
            facts |= {"timed_out": True, "stopped": False}
        elif clock is not None and ran.timed_out:
            waited = f"{clock.starved_s:.1f} of {header['timeout_s']:g} s"
            raise SandboxSlow(f"a command with {timeout_s:g} s waited for a CPU {waited}: run less beside it")
        return ExecResult(stdout=output[:cut], stderr=output[cut:], oom=self._kills() > kills, **facts)

    def exec_background(self, command: Sequence[str], *, log: str, env: Variables = None) -> int:
        """Start a command and return its pid in the sandbox. Both of its streams go to the file `log`."""
        return self._ask("background", _COUNT, _command(command, ".", env) | {"log": log})[0]

    def end_all(self) -> None:
        """End all processes in the sandbox, including orphans. Raises OSError if one is still running after some seconds."""
        self._ask("end_all", _DONE)

    def read(self, path: str, *, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
        """Return part of a regular file. Raises OSError (FileNotFoundError, …), also for links that lead out of the workspace."""
        return self._ask("read", _COUNT, {"path": path, "offset": offset, "max_bytes": max_bytes}, most=max_bytes)[1]

    def last_read(self, path: str) -> int:
        """Return when a file was last read, in seconds since 1970. Raises OSError like `read`."""
        return self._ask("read", _COUNT, {"path": path, "offset": 0, "max_bytes": 0})[0]

    def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Write a whole file, atomically, and create its folders. Raises OSError, for instance if the disk is full.

        `mode`: its permissions. None keeps those of an existing file, and means 0o644 for a new one.
        """
        self._ask("write", _DONE, {"path": path, "mode": mode}, data)

    def entries(self, path: str = ".") -> list[FolderEntry]:
        """Return the content of a folder, by name. Raises OSError (NotADirectoryError, …) like `read`."""
        return self._ask("entries", _ENTRIES, {"path": path})[0]

    def remove(self, path: str) -> None:
        """Remove a file or a link, but not the target of the link. Raises OSError (FileNotFoundError, IsADirectoryError, …)."""
        self._ask("remove", _DONE, {"path": path})

    def upload(self, files: Mapping[str, bytes]) -> None:
        """Write many files at once."""
        self._ask("unpack", _DONE, payload=archive_of(files))

    def download(self, *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        """Return the contents of all regular files by path, without links and devices. Raises OSError (EFBIG)."""
        _, packed = self._ask("pack", _DIGEST, {"max_bytes": max_bytes, "links": False}, most=max_bytes)
        return {info.name: data for info, data in members(packed) if info.isreg()}

    def snapshot(self, *, max_bytes: int | None = None) -> Snapshot:
        """Return all files, except those that cannot be opened or vanish meanwhile.

        Raises OSError if the files are too large in total (holes count) or too deep, which is the code's fault.
        """
        most = self.spec.disk_bytes if max_bytes is None else max_bytes
        digest, packed = self._ask("pack", _DIGEST, {"max_bytes": most, "links": True}, most=most)
        return Snapshot(archive=packed, digest=digest)

    def restore(self, snapshot: Snapshot) -> None:
        """Unpack the files of a snapshot into this empty workspace."""
        self._ask("unpack", _DONE, payload=snapshot.archive)

    def fork(self) -> Sandbox:
        """Return another sandbox of the same spec, with a copy of this workspace. Raises OSError like `snapshot`."""
        return self.backend.create(self.spec, self.snapshot())

    def call(self, requests: Sequence[bytes], *, within_s: float, most: int) -> Generator[tuple[CallEnd, bytes]]:
        """Yield the answer to each request, in order: why its worker ended, and the bytes that the worker wrote.

        `requests`: JSON texts for `guest/calls.py`. `within_s`: time limit of each. `most`: maximum bytes of an answer. Requests
        are sent ahead of the answers as long as the channel's buffer certainly holds them.
        """
        frames = [frame_of({"do": "call", "size": len(request)}) + request for request in requests]
        sent = unanswered = 0
        longest = within_s + patience(GRACE_S)
        with self._calling, self._exchange(within_s):
            for number, frame in enumerate(frames):
                deadline = time.monotonic() + longest
                ahead = bytearray()
                while sent < len(frames) and (sent == number or unanswered + len(frames[sent]) <= AHEAD):
                    ahead += frames[sent]
                    unanswered, sent = unanswered + len(frames[sent]), sent + 1
                if ahead:
                    self._machine.channel.send(bytes(ahead), longest)
                facts, data = self._machine.channel.answer(deadline, most + HEADER)
                unanswered -= len(frame)
                yield _CALL_END.validate_python(facts.get("answer")), data

    @property
    def egress_log(self) -> tuple[str, ...]:
        """A line for each connection that went out, or was refused (`egress.py`)."""
        return () if self._machine.proxy is None else self._machine.proxy.log

    def stats(self) -> Stats:
        (processes, disk_bytes, inodes), _ = self._ask("stats", _COUNTS)
        group = self._machine.group
        memory, cpu = (None, None) if group is None else (group.memory_bytes(), group.cpu_s())
        return Stats(memory_bytes=memory, processes=processes, disk_bytes=disk_bytes, inodes=inodes, cpu_s=cpu)

    def destroy(self) -> None:
        """End the sandbox and remove all of it. May be called again, and from another thread during a call, which then raises
        SandboxFailure."""
        self._retire(SandboxFailure(f"sandbox {self.id} was destroyed"))

    def _retire(self, why: Exception) -> Exception:
        """End the sandbox and return the first reason for its end, with which all later requests fail.

        If the end is interrupted, as by Ctrl-C, the next call completes it.
        """
        self._gone = self._gone or why
        with self._ending:
            if not self._ended:
                if self._machine.proxy is not None:
                    self._machine.proxy.close()
                self._machine.end()
                self._ended = True
        return self._gone

    def _ask(
        self,
        do: str,
        form: TypeAdapter[T],
        header: Mapping[str, Any] | None = None,
        payload: bytes = b"",
        within_s: float = 60.0,
        most: int = 0,
        stop: threading.Event | GrantedTime | None = None,
    ) -> tuple[T, bytes]:
        """Return the answer to a request, of the type `form`, and its data, at most `most` bytes. `stop` ends the command."""
        with self._exchange(within_s):
            deadline = time.monotonic() + within_s + patience(GRACE_S)
            request = {"do": do, **(header or {})}
            facts, data = self._machine.channel.ask(request, payload, deadline, most + SPARE, stop)
            failure = _ERROR.validate_python(facts["error"]) if "error" in facts else None
            answer = form.validate_python(facts.get("answer")) if failure is None else None
            self._counted = self._kills()
        if failure is not None:
            raise OSError(failure[0], visible(failure[1][:300]))
        return answer, data  # type: ignore[return-value]

    @contextlib.contextmanager
    def _exchange(self, within_s: float) -> Iterator[None]:
        """Wrap requests and their answers. End the sandbox if they are interrupted."""
        if self._gone is not None:
            raise self._gone
        try:
            yield
        except TimeoutError as error:
            text = f"sandbox {self.id} gave no answer within {within_s + GRACE_S:g} s; it was ended"
            raise self._retire(SandboxFailure(text)) from error
        except (OSError, ValueError) as error:
            raise self._retire(self._death(error)) from error
        except BaseException as error:  # Ctrl-C: half a frame may be sent or read
            self._retire(SandboxFailure(f"sandbox {self.id} was ended in the middle of a request: {error!r}"))
            raise

    def _kills(self) -> int:
        try:
            return self._machine.kills()
        except OSError:
            return 0  # its group is gone, and it with it

    def _death(self, error: Exception) -> Exception:
        """Return the reason for a missing answer."""
        if self._gone is not None:
            return self._gone  # ended from another thread, in the middle of this call
        if self._kills() > self._counted:
            return SandboxDied(f"sandbox {self.id} ended: its memory of {self.spec.memory_bytes} bytes was used up")
        return SandboxFailure(f"sandbox {self.id} ended unexpectedly: {error}")


def _command(command: Sequence[str], cwd: str, env: Variables) -> dict[str, Any]:
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r}: give a list of words, as ['bash', '-c', …]")
    words = [*command, *(f"{name}{value}" for name, value in (env or {}).items())]
    if any("\0" in word for word in words):
        raise ValueError("command: a word with a NUL in it")
    return {"command": list(command), "cwd": cwd, "env": dict(env or {})}


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files by path."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the regular files, with their contents, and the symbolic links of an archive from a sandbox.

    Their names are untrusted. Raises SandboxFailure for data that is not an archive or unpacks to more than its size.
    """
    last = -1
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
            for info in opened:
                if info.offset <= last or info.size < 0 or info.issparse():  # a circle, or a hole of any size
                    raise tarfile.ReadError("an entry that no sandbox writes")
                last = info.offset
                if info.issym():
                    yield info, b""
                elif info.isreg() and (file := opened.extractfile(info)) is not None:
                    yield info, file.read()
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, OSError) as error:
        why = visible(str(error)[:300])
        raise SandboxFailure(f"the archive of files that the sandbox sent cannot be read: {why}") from error


class Backend(Protocol):
    """Creates sandboxes. As a context manager, it destroys the remaining ones at the end.

    Attributes:
        egress: What sandboxes of tasks that need a network may reach.
    """

    name: str
    egress: tuple[Destination, ...]

    def capabilities(self) -> Capabilities: ...

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        """Return a sandbox with an empty workspace, or with the files of `snapshot`.

        Raises SandboxFailure, and OSError if the files do not fit.
        """
        ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
