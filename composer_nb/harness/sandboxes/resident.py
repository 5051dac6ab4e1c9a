"""The host's side of a sandbox: asks the resident program (`guest.py`) over a channel, whoever made the sandbox.

Nothing that comes out of a sandbox is believed beyond its form: sizes are bounded, archives are read in memory and never
unpacked here.
"""

from __future__ import annotations

import contextlib
import io
import json
import socket
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from select import POLLIN, POLLOUT, poll
from types import TracebackType
from typing import Any, Protocol, Self

from composer_nb.harness.bundle import bundle, packet
from composer_nb.harness.sandboxes import guest, guest_commands, guest_files
from composer_nb.harness.sandboxes.contract import (
    Backend,
    Entry,
    ExecResult,
    Sandbox,
    SandboxDied,
    SandboxFailure,
    SandboxSpec,
    Snapshot,
    Stats,
)

GRACE_S = 5.0
"""How much longer than the resident program's own deadlines the host waits."""
START_S = 20.0
"""How long a sandbox may take to be ready."""
SPARE = 64 << 20
"""Bytes that an answer may have beyond the data that were asked for: headers, of an archive with very many files too."""
STOP_S = 0.02
"""How soon it is noticed that a command shall stop."""
LONGEST_S = 1e6
"""Of a time limit."""


class Channel(Protocol):
    """A pipe in both directions to a resident program."""

    def send(self, data: bytes, timeout_s: float) -> None:
        """Raises OSError when nobody is there, TimeoutError when it is not taken in time."""
        ...

    def receive(self, timeout_s: float) -> bytes:
        """Some bytes; none at the end of the stream. Raises TimeoutError."""
        ...

    def close(self) -> None: ...


class Machine(Protocol):
    """What a backend holds of one sandbox."""

    @property
    def id(self) -> str: ...

    @property
    def channel(self) -> Channel: ...

    def end(self) -> None:
        """Ends everything in it and removes what there is of it. Called once."""
        ...

    def usage(self) -> tuple[int | None, float | None]:
        """(bytes of memory, seconds of CPU), None where that can not be told."""
        ...

    def kills(self) -> int:
        """How often the kernel has killed something in it for memory."""
        ...


class SocketChannel:
    """A channel over a connected socket. `peer` is the pid, as this machine sees it, of who sent last."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._held = threading.RLock()  # so that no thread waits on a number that means another file by now
        self.peer = 0
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._poller = poll()
        self._poller.register(end, POLLIN)
        self._writable = poll()
        self._writable.register(end, POLLOUT)

    def send(self, data: bytes, timeout_s: float) -> None:
        left, deadline = memoryview(data), time.monotonic() + timeout_s
        with self._held:
            while left:
                try:
                    left = left[self._end.send(left) :]
                except BlockingIOError:
                    if not self._writable.poll(max(deadline - time.monotonic(), 0) * 1000):
                        raise TimeoutError from None

    def receive(self, timeout_s: float) -> bytes:
        with self._held:
            if not self._poller.poll(max(timeout_s, 0) * 1000):
                raise TimeoutError
            try:
                data, ancillary, _, _ = self._end.recvmsg(1 << 18, socket.CMSG_SPACE(12))
            except ConnectionError:
                return b""
        self.peer = sender(ancillary) or self.peer
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes who waits
        with self._held:
            self._end.close()


def sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The pid, as this machine sees it, of who sent a message to a socket with SO_PASSCRED; 0 where that is not told."""
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int.from_bytes(content[:4], sys.byteorder)
    return 0


class ResidentSandbox:
    """A Sandbox of any backend; see `contract.Sandbox` for what its methods do."""

    def __init__(self, backend: Backend, spec: SandboxSpec, machine: Machine) -> None:
        """Waits until the resident program is ready. Raises SandboxFailure when it does not get so."""
        self.id, self.spec = machine.id, spec
        self.backend, self._machine = backend, machine
        self.at_end: list[Callable[[], None]] = []
        self._lock, self._ending = threading.Lock(), threading.RLock()
        self._pending = bytearray()
        self._gone: Exception | None = None
        self._ended = False
        self._counted = 0
        """How often memory had run out at the last answer: what was killed since then ended between two requests, or in one."""
        try:
            facts, _ = self._answer(time.monotonic() + START_S, SPARE)
        except BaseException as error:
            self.destroy()
            if not isinstance(error, OSError | ValueError):
                raise
            raise SandboxFailure(f"sandbox {self.id} did not start: {error or 'no answer in time'}") from error
        if not facts.get("ready"):
            self.destroy()
            raise SandboxFailure(f"sandbox {self.id} did not start: {str(facts.get('failed'))[:300]}")

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
        if not 0 < timeout_s <= LONGEST_S:
            raise ValueError(f"timeout_s={timeout_s!r}: must be above 0 and at most {LONGEST_S:g}")
        if type(output_bytes) is not int or output_bytes < 2:
            raise ValueError(f"output_bytes={output_bytes!r}: must be a whole number, at least 2, a head and a tail")
        asked = _command(command, cwd, env) | {"timeout_s": timeout_s, "output_bytes": output_bytes}
        kills = self._kills()
        facts, output = self._ask("exec", asked, stdin, timeout_s, 2 * output_bytes, stop)
        first, second = facts["sizes"]
        return ExecResult(
            exit_code=facts["exit_code"],
            stdout=output[:first],
            stderr=output[first : first + second],
            truncated=facts["truncated"],
            timed_out=facts["timed_out"],
            stopped=facts["stopped"],
            oom=self._kills() > kills,
            duration_s=facts["duration_s"],
        )

    def exec_background(
        self, command: Sequence[str], *, log: str, cwd: str = ".", env: Mapping[str, str] | None = None
    ) -> int:
        facts, _ = self._ask("background", _command(command, cwd, env) | {"log": log})
        return int(facts["pid"])

    def poll(self, pid: int) -> int | None:
        code: int | None = self._ask("poll", {"pid": pid})[0]["exit_code"]
        return code

    def end(self, pid: int) -> None:
        self._ask("end", {"pid": pid})

    def end_all(self) -> None:
        self._ask("end_all", {})

    def read(self, path: str, *, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
        return self._ask("read", {"path": path, "offset": offset, "max_bytes": max_bytes}, most=max_bytes)[1]

    def write(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        self._ask("write", {"path": path, "mode": mode}, data)

    def entries(self, path: str = ".") -> list[Entry]:
        found = self._ask("entries", {"path": path})[0]["entries"]
        return [Entry(name=name, kind=kind, size=size, mode=mode) for name, kind, size, mode in found]

    def remove(self, path: str) -> None:
        self._ask("remove", {"path": path})

    def upload(self, files: Mapping[str, bytes]) -> None:
        self._ask("unpack", {}, archive_of(files))

    def download(self, *, max_bytes: int = 64 << 20) -> dict[str, bytes]:
        _, packed = self._ask("pack", {"max_bytes": max_bytes, "links": False}, most=max_bytes)
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
            return {info.name: _content(archive, info) for info in archive if info.isreg()}

    def snapshot(self) -> Snapshot:
        most = self.spec.disk_bytes
        facts, packed = self._ask("pack", {"max_bytes": most, "links": True}, most=most)
        return Snapshot(archive=packed, digest=facts["digest"])

    def restore(self, snapshot: Snapshot) -> None:
        """Puts the files of a snapshot into this workspace, which is empty."""
        self._ask("unpack", {}, snapshot.archive)

    def fork(self) -> Sandbox:
        return self.backend.create(self.spec, self.snapshot())

    def stats(self) -> Stats:
        facts, _ = self._ask("stats", {})
        memory, cpu = self._machine.usage()
        return Stats(memory_bytes=memory, cpu_s=cpu, **facts)

    def destroy(self) -> None:
        """Also from another thread, in the middle of a call, which then raises SandboxFailure."""
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
        header: Mapping[str, Any],
        payload: bytes = b"",
        within_s: float = 60.0,
        most: int = 0,
        stop: threading.Event | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """The answer to a request, of at most `most` bytes of data. `stop`: whoever sets it wants the command to end."""
        frame = _frame({"do": do, **header}, payload)
        with self._lock:
            if self._gone is not None:
                raise self._gone
            deadline = time.monotonic() + within_s + GRACE_S
            try:
                self._machine.channel.send(frame, deadline - time.monotonic())
                if stop is not None:
                    self._await(deadline, stop)
                facts, data = self._answer(deadline, most + SPARE)
                if "failed" in facts:
                    raise ValueError(str(facts["failed"])[:300])
                self._counted = self._kills()
            except TimeoutError as error:
                text = f"sandbox {self.id} gave no answer within {within_s + GRACE_S:g} s; it was ended"
                raise self._retire(SandboxFailure(text)) from error
            except (OSError, ValueError) as error:
                raise self._retire(self._death(error)) from error
            except (
                BaseException
            ) as error:  # Ctrl-C: the answer is still to come, and would be taken for another request's
                self._retire(SandboxFailure(f"sandbox {self.id} was ended in the middle of a request: {error!r}"))
                raise
        if "error" in facts:
            code, text = facts["error"]
            raise OSError(code, text)
        if "missing" in facts:
            raise KeyError(facts["missing"])
        return facts, data

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

    def _answer(self, deadline: float, most: int) -> tuple[dict[str, Any], bytes]:
        """The next frame. Raises TimeoutError, OSError at the end of the stream, ValueError for what is no answer."""
        size = int.from_bytes(self._take(4, deadline), "big")
        if size > most:
            raise ValueError(f"an answer of {size} bytes")
        body = self._take(size, deadline)
        head, _, data = body.partition(b"\n")
        facts = json.loads(head)
        if not isinstance(facts, dict):
            raise ValueError("an answer without a header")
        return facts, data

    def _await(self, deadline: float, stop: threading.Event) -> None:
        """Waits until an answer begins; once `stop` is set, says so to the resident program."""
        told = False
        while not self._pending:
            if stop.is_set() and not told:
                self._machine.channel.send(_frame({"do": "stop"}), deadline - time.monotonic())
                told = True
            left = deadline - time.monotonic()
            try:
                chunk = self._machine.channel.receive(left if told else min(left, STOP_S))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                continue
            if not chunk:
                raise ConnectionResetError("its resident program is gone")
            self._pending += chunk

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._pending) < size:
            chunk = self._machine.channel.receive(deadline - time.monotonic())
            if not chunk:
                raise ConnectionResetError("its resident program is gone")
            self._pending += chunk
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data


def _frame(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode() + b"\n"
    return (len(head) + len(payload)).to_bytes(4, "big") + head + payload


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


def _content(archive: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(info)
    assert file is not None
    return file.read()


def socket_pair() -> tuple[SocketChannel, socket.socket]:
    """A channel, and the other end, to be handed to a resident program and then closed here."""
    here, there = socket.socketpair()
    return SocketChannel(here), there


def resident_settings(
    spec: SandboxSpec,
    *,
    workspace: str,
    drop: bool,
    filter: str,
    limits: Mapping[str, int],
    nice: int,
    programs: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a resident program is told, as JSON: the argument of `guest.main`, and what a zygote is sent.

    `limits` come on top of those that every backend sets. `nice`: by how much commands stand back behind the resident program;
    0 where they have no CPU group of their own, in which it counts. `programs`: a folder of more programs for commands to find.
    `environment`: variables that an image sets for what runs in it.
    """
    common = {"RLIMIT_NOFILE": spec.open_files, "RLIMIT_CORE": 0, "RLIMIT_FSIZE": spec.disk_bytes}
    return json.dumps(
        {
            "role": "resident",
            "workspace": workspace,
            "disk_bytes": spec.disk_bytes,
            "inodes": spec.inodes,
            "drop": drop,
            "filter": filter,
            "nice": nice,
            "programs": programs,
            "environment": dict(environment or {}),
            "rlimits": common | dict(limits),
        }
    )


def resident_program(told: str) -> bytes:
    """What BOOT is sent to become a resident program, or a zygote, with these settings."""
    return packet(bundle(guest_files, guest_commands, guest, arguments=(told,)))
