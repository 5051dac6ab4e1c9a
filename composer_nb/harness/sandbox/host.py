"""The host's end of the socket to a resident program (`guest/program.py`).

Nothing that comes out of a sandbox is believed beyond its form.
"""

from __future__ import annotations

import contextlib
import json
import os
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

    `peer` is the pid, as this machine sees it, of the process that sent last; `ended` is true once nobody is there.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._held = threading.RLock()  # so that no thread waits on a number that means another file by now
        self._pending = bytearray()
        self.peer, self.ended = 0, False

    def send(self, data: bytes, timeout_s: float) -> None:
        """Send all of `data`. Raises OSError when nobody is there, TimeoutError when it is not taken in time."""
        with self._held:
            self._end.settimeout(max(timeout_s, 0.001))
            try:
                self._end.sendall(data)
            except ConnectionError:
                self.ended = True
                raise

    def receive(self, timeout_s: float) -> bytes:
        """Return some bytes; none at the end of the stream. Raises TimeoutError."""
        with self._held:
            self._end.settimeout(max(timeout_s, 0.001))
            try:
                data = self._receive()
            except ConnectionError:
                data = b""
        self.ended = not data
        return data

    def _receive(self) -> bytes:
        data, ancillary, _, _ = self._end.recvmsg(1 << 18, socket.CMSG_SPACE(12))
        self.peer = sender(ancillary) or self.peer
        return data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)  # wakes any waiting thread
        with self._held:
            self._end.close()

    def answer(self, deadline: float, most: int) -> tuple[dict[str, Any], bytes]:
        """Return the header and the data of the next frame.

        Raises TimeoutError, OSError at the end of the stream, ValueError for a frame that is malformed or longer than `most`.
        """
        size = int.from_bytes(self._take(4, deadline), "big")
        if size > most:
            raise ValueError(f"an answer of {size} bytes")
        head, _, data = self._take(size, deadline).partition(b"\n")
        facts = json_of(head)
        if not isinstance(facts, dict):
            raise ValueError("an answer without a header")
        return facts, data

    def wait(self, deadline: float, stop: threading.Event | GrantedTime) -> None:
        """Wait until an answer begins. Once `stop` is set, ask the resident program to end the command."""
        sent = False
        while not self._pending:
            left = deadline - time.monotonic()
            if stop.is_set() and not sent:
                self.send(frame_of({"do": "stop"}), left)
                sent = True
            try:
                self._more(left if sent else min(left, STOP_S))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._pending) < size:
            self._more(deadline - time.monotonic())
        data = bytes(self._pending[:size])
        del self._pending[:size]
        return data

    def _more(self, timeout_s: float) -> None:
        chunk = self.receive(timeout_s)
        if not chunk:
            raise ConnectionResetError("its resident program is gone")
        self._pending += chunk


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
