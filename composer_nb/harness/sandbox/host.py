"""The host's end of the socket to a resident program (`guest/program.py`).

Nothing that comes out of a sandbox is believed beyond its form.
"""

import contextlib
import itertools
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from composer_nb.harness.sandbox.granted import GrantedTime
from composer_nb.harness.untrusted import json_of

STOP_S = 0.02  # Seconds between two checks for a request to stop

# Files of /proc/PID/net that are about one network alone.
OWN_NETWORK = frozenset(
    "arp dev if_inet6 igmp ipv6_route netstat raw raw6 route snmp snmp6 tcp tcp6 udp udp6 unix".split()
)


def hide_network_counts(pid: int) -> None:
    """Take all permissions from the files of a process's network that tell of other networks, such as `softnet_stat`, which
    counts the packets of the whole machine. Nobody inside has the capability to read them all the same. Only root may do so."""
    with contextlib.suppress(OSError):
        if os.path.samefile(f"/proc/{pid}/ns/net", "/proc/self/ns/net"):
            return  # the machine's own
        for name in set(os.listdir(f"/proc/{pid}/net")) - OWN_NETWORK:
            os.chmod(f"/proc/{pid}/net/{name}", 0)


class Channel:
    """Frames over a connected socket: 4 bytes of length, a JSON header in one line, data.

    Several threads may ask at a time. Whichever of them reads passes on the answers to the others' requests, by their numbers.

    `peer` is the pid, as this machine sees it, of the process that sent last; `ended` is true once nobody is there.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        # Closing takes both, so that no thread waits on a number that means another file by now.
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._pending = bytearray()
        self._numbers, self._turn, self._reading = itertools.count(1), threading.Condition(), False
        # By the number of a request: the maximum size of its answer, and the answers that are there but not picked up.
        self._awaited: dict[int, int] = {}
        self._answers: dict[int, tuple[dict[str, Any], bytes]] = {}
        self.peer, self.ended = 0, False

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of `data`. Raises OSError when nobody is there, TimeoutError when it is not taken in time."""
        with self._sending:
            self._end.settimeout(max(timeout_s, 0.001))
            try:
                self._end.sendall(data)
            except ConnectionError:
                self.ended = True
                raise

    def receive(self, timeout_s: float) -> bytes:
        """Return some bytes; none at the end of the stream. Raises TimeoutError."""
        with self._receiving:
            try:
                data = self._receive(time.monotonic() + timeout_s)
            except ConnectionError:
                data = b""
        self.ended = not data
        return data

    def _receive(self, deadline: float) -> bytes:
        self._wait(deadline)
        data, ancillary, _, _ = self._end.recvmsg(1 << 18, socket.CMSG_SPACE(12))
        self.peer = sender(ancillary) or self.peer
        return data

    def _wait(self, deadline: float) -> None:
        """Wait until something arrives; the socket's own time limit is the sender's. Raises TimeoutError."""
        poller = select.poll()
        poller.register(self._end, select.POLLIN)
        if not poller.poll(1000 * max(deadline - time.monotonic(), 0.001)):
            raise TimeoutError

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes any waiting thread
        with self._sending, self._receiving:
            self._end.close()

    def ask(
        self,
        request: Mapping[str, Any],
        payload: bytes,
        deadline: float,
        most: int,
        stop: threading.Event | GrantedTime | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and return its answer like `answer`. Once `stop` is set, ask the resident program to end the command."""
        number = next(self._numbers)
        self._awaited[number] = most  # before another thread can read the answer
        self.send(frame_of({**request, "number": number}, payload), deadline - time.monotonic())
        return self._answer(number, deadline, stop)

    def answer(self, deadline: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Return the header and the data of the next frame without a number.

        Raises TimeoutError, OSError at the end of the stream, ValueError for a frame that is malformed, answers no request or is
        longer than `most`.
        """
        self._awaited[0] = most
        return self._answer(0, deadline)

    def _answer(
        self, number: int, deadline: float, stop: threading.Event | GrantedTime | None = None
    ) -> tuple[dict[str, Any], bytes]:
        while (answer := self._answers.pop(number, None)) is None:
            left = deadline - time.monotonic()
            if stop is not None and stop.is_set():
                self.send(frame_of({"do": "stop", "number": number}), left)
                stop = None
            try:
                self._advance(number, left if stop is None else min(left, STOP_S))
            except TimeoutError:
                if stop is None or time.monotonic() >= deadline:
                    raise
        return answer

    def _advance(self, number: int, timeout_s: float) -> None:
        """Read a piece of the stream, or wait while another thread does. Raises like `answer`."""
        with self._turn:
            if self._reading and number not in self._answers and not self._turn.wait(timeout_s):
                raise TimeoutError
            if self._reading or number in self._answers:
                return
            self._reading = True
        try:
            self._read(timeout_s)
        finally:
            with self._turn:
                self._reading = False
                self._turn.notify_all()

    def _read(self, timeout_s: float) -> None:
        """Take the next frame if all of it has arrived, else wait for more of it."""
        size = int.from_bytes(self._pending[:4], "big") if len(self._pending) >= 4 else 0
        if size > max(self._awaited.values()):
            raise ValueError(f"an answer of {size} bytes")
        if len(self._pending) < 4 + size or not size:
            chunk = self.receive(timeout_s)
            if not chunk:
                raise ConnectionResetError("its resident program is gone")
            self._pending += chunk
            return
        head, _, data = bytes(self._pending[4 : 4 + size]).partition(b"\n")
        del self._pending[: 4 + size]
        facts = json_of(head)
        if not isinstance(facts, dict):
            raise ValueError("an answer without a header")
        number = facts.get("number", 0)
        if type(number) is not int or size > self._awaited.pop(number, -1):
            raise ValueError(f"an answer of {size} bytes to no request of this size")
        self._answers[number] = facts, data


def sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """Return the pid, as this machine sees it, of the sender of a message to a socket with SO_PASSCRED; 0 if it is unknown."""
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int.from_bytes(content[:4], sys.byteorder)
    return 0


def frame_of(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode() + b"\n"
    return (len(head) + len(payload)).to_bytes(4, "big") + head + payload


def socket_pair() -> tuple[Channel, socket.socket]:
    """Return a channel and its other end, to be handed to a resident program and then closed here."""
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return Channel(here), there
