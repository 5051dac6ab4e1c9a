"""An HTTP request that ends in time, whatever its server does.

A socket's own limit is one of silence: a server that sends a byte now and then, or never stops, keeps within it for ever. So
somebody watches, and ends the connection of a request whose time is over.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

CONNECT_S = 10.0
_mine = threading.local()
"""`connections` that are made for the request of this thread, and `sockets` that it is made by: a connection does not know its
own any more where the answer ends with it."""


class TimeIsUp(Exception):
    """It is later than something was to last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a server answered, whatever it thinks of the request."""

    status: int
    headers: Mapping[str, str]
    """By names in any case."""
    data: bytes


class _Plain(HTTPConnection):
    def connect(self) -> None:
        _mine.connections.append(self)
        super().connect()
        _mine.sockets.append(self.sock)

    def request(self, *given: Any, **more: Any) -> None:
        _mine.sockets.append(self.sock)  # of a connection that is used again
        super().request(*given, **more)


class _Secure(HTTPSConnection):
    def connect(self) -> None:
        _mine.connections.append(self)
        super().connect()
        _mine.sockets.append(self.sock)

    def request(self, *given: Any, **more: Any) -> None:
        _mine.sockets.append(self.sock)
        super().request(*given, **more)


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _Plain


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _Secure


def open_pool() -> urllib3.PoolManager:
    """Connections for `exchange`."""
    pool = urllib3.PoolManager(maxsize=64)
    pool.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}
    return pool


def exchange(
    pool: urllib3.PoolManager, method: str, url: str, *, until: float, silence_s: float, most: int, **given: Any
) -> Reply:
    """One request, of whose answer at most `most` bytes are read, as they are sent.

    `until`: on the clock `time.monotonic`, or infinite. `silence_s`: between two pieces of the answer. Raises TimeIsUp, and
    urllib3's HTTPError or OSError for what failed before.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeIsUp
    timeout = urllib3.Timeout(connect=min(CONNECT_S, silence_s, left), read=min(silence_s, left))
    try:
        with _ended(until):
            answer = pool.request(
                method, url, retries=False, redirect=False, timeout=timeout, preload_content=False, **given
            )
            with answer:
                data = answer.read(most, decode_content=False)
                if len(data) < most and answer.length_remaining:
                    raise urllib3.exceptions.IncompleteRead(len(data), answer.length_remaining)
    except (urllib3.exceptions.HTTPError, OSError):
        if time.monotonic() >= until:
            raise TimeIsUp from None
        raise
    if time.monotonic() >= until:  # what came may end where the connection was ended
        raise TimeIsUp
    return Reply(status=answer.status, headers=answer.headers, data=data)


@contextmanager
def _ended(until: float) -> Iterator[None]:
    """Ends, from that time on, every connection by which this thread makes a request."""
    connections, sockets = list[HTTPConnection](), list[socket.socket | None]()
    _mine.connections, _mine.sockets = connections, sockets
    if until == math.inf:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        done.wait(max(0.0, until - time.monotonic()))
        while not done.wait(0.05):
            for each in [*sockets, *(connection.sock for connection in connections)]:
                if each is not None:
                    with suppress(OSError):
                        socket.socket.shutdown(each, socket.SHUT_RDWR)

    threading.Thread(target=watch, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        done.set()
