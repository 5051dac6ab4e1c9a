"""The host's end of a sandbox's channel, and the form of what a resident program (`guest/program.py`) may answer.

Nothing that comes out of a sandbox is believed beyond its form.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Mapping
from select import POLLIN, POLLOUT, poll
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from composer_nb.harness.untrusted import json_of

STOP_S = 0.02
"""Seconds between two looks whether a command shall stop."""


class Channel(Protocol):
    """A pipe in both directions to a resident program."""

    def send(self, data: bytes, timeout_s: float) -> None:
        """Raises OSError when nobody is there, TimeoutError when it is not taken in time."""
        ...

    def receive(self, timeout_s: float) -> bytes:
        """Some bytes; none at the end of the stream. Raises TimeoutError."""
        ...

    def close(self) -> None: ...


class Facts(BaseModel):
    """What an answer says beside its data. Everything in a sandbox can write one: what does not fit ends the sandbox."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=1 << 63)]
F = TypeVar("F", bound=Facts)


class Ran(Facts):
    """A command that has ended."""

    exit_code: int
    sizes: tuple[Count, Count]
    """Bytes of its output and of its errors, which are the answer's data."""
    truncated: bool
    timed_out: bool
    stopped: bool
    duration_s: float


class Started(Facts):
    """A command in the background."""

    pid: Count


class Polled(Facts):
    """How a command in the background ended; None: it has not."""

    exit_code: int | None


class Listed(Facts):
    """A folder's entries: name, kind, size, mode."""

    entries: list[tuple[str, Literal["file", "folder", "link", "other"], Count, Count]]


class Packed(Facts):
    """An archive of the workspace."""

    digest: str


class Counted(Facts):
    """What is in a sandbox."""

    processes: Count
    disk_bytes: Count
    inodes: Count


class Called(Facts):
    """A request of calls that has ended, and why."""

    end: Literal["finished", "died", "cpu", "asleep", "flood", "starved", "slow start"]
    cpu_s: float


class Refused(Facts):
    """A request that failed: the error's number and text."""

    error: tuple[int, str]


class Unknown(Facts):
    """A request about a command that was not started here."""

    missing: str


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


class Line:
    """Frames over a channel: 4 bytes of length, a JSON header in one line, data."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pending = bytearray()

    def send(self, frames: bytes, deadline: float) -> None:
        self.channel.send(frames, deadline - time.monotonic())

    def answer(self, deadline: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Return the header and the data of the next frame.

        Raises TimeoutError, OSError at the end of the stream, ValueError for what is no answer of at most `most` bytes.
        """
        size = int.from_bytes(self._take(4, deadline), "big")
        if size > most:
            raise ValueError(f"an answer of {size} bytes")
        head, _, data = self._take(size, deadline).partition(b"\n")
        facts = json_of(head)
        if not isinstance(facts, dict):
            raise ValueError("an answer without a header")
        return facts, data

    def wait(self, deadline: float, stop: threading.Event) -> None:
        """Wait until an answer begins. Once `stop` is set, ask the resident program to end the command."""
        asked = False
        while not self._pending:
            if stop.is_set() and not asked:
                self.send(frame_of({"do": "stop"}), deadline)
                asked = True
            left = deadline - time.monotonic()
            try:
                self._receive(left if asked else min(left, STOP_S))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._pending) < size:
            self._receive(deadline - time.monotonic())
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data

    def _receive(self, timeout_s: float) -> None:
        chunk = self.channel.receive(timeout_s)
        if not chunk:
            raise ConnectionResetError("its resident program is gone")
        self._pending += chunk


def frame_of(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode() + b"\n"
    return (len(head) + len(payload)).to_bytes(4, "big") + head + payload


def socket_pair() -> tuple[SocketChannel, socket.socket]:
    """A channel, and the other end, to be handed to a resident program and then closed here."""
    here, there = socket.socketpair()
    return SocketChannel(here), there
