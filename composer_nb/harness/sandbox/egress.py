"""Egress: connections from a sandbox to the hosts and ports of an allow-list, through a proxy outside the sandbox.

    program in the sandbox -> listening socket in the sandbox's network -> EgressProxy on this machine -> the listed host

Each listed host has an address in 127.80.0.0/24 in the sandbox's /etc/hosts, and its ports are listening sockets there, made
before any agent code runs. Programs need no setting for it. The socket that accepts a connection alone decides where it goes:
nothing that a program sends is interpreted, so no CONNECT request, header or DNS query can change it. Names are resolved on
this machine, once for each connection, and a name with a private address is refused unless the list gives the address itself.

Covers TCP over IPv4. Does not look into what is sent: a listed host that forwards requests reaches what it can reach.
"""

import asyncio
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from composer_nb.harness.sandbox.system.linux import NAMESPACES, check, libc

MOST = 250  # maximum entries of a list, each with a listening socket
LOGGED = 200  # connections of which a log has a line; it counts the others
AT_A_TIME = 64  # open connections of a sandbox
CONNECT_S = 20.0
CHUNK = 64 << 10
_ENTRY = re.compile(r"([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)(?:=(\d+\.\d+\.\d+\.\d+))?:(\d{1,5})")


class Destination(NamedTuple):
    """A listed host and port. `local`: its address in the sandbox. `address`: the address that the list gives, or empty."""

    host: str
    port: int
    local: str
    address: str = ""


def destinations(egress: str) -> tuple[Destination, ...]:
    """Parse an allow-list: `HOST:PORT` or `HOST=ADDRESS:PORT`, separated by commas. Raises ValueError."""
    parsed: list[Destination] = []
    hosts: dict[str, str] = {}
    for text in filter(None, egress.split(",")):
        entry = _ENTRY.fullmatch(text.lower())
        if (
            entry is None
            or entry[1] == "localhost"
            or entry[1].replace(".", "").isdigit()
            or not 0 < int(entry[3]) < 65536
        ):
            raise ValueError(f"env.egress: {text!r} must be HOST:PORT, or HOST=ADDRESS:PORT for a private IPv4 address")
        if entry[2]:
            ipaddress.IPv4Address(entry[2])
        local = hosts.setdefault(entry[1], f"127.80.0.{len(hosts) + 1}")
        parsed.append(Destination(entry[1], int(entry[3]), local, entry[2] or ""))
    if len(parsed) > MOST:
        raise ValueError(f"env.egress: {len(parsed)} entries; there may be {MOST}")
    return tuple(dict.fromkeys(parsed))


def listen_in(pid: int, allowed: Sequence[Destination]) -> list[socket.socket]:
    """Return listening sockets in the network of a process, one for each destination. Raises OSError unless this is root."""
    listeners: list[socket.socket] = []
    failures: list[OSError] = []

    def listen() -> None:  # in a thread of its own, which alone changes its network
        try:
            network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            check(libc.setns(network, NAMESPACES["network"]), "the network of a sandbox")
            os.close(network)
            listeners.extend(socket.create_server((to.local, to.port)) for to in allowed)
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return listeners


class EgressProxy:
    """Forwards the connections of one sandbox, in a thread of its own, until it is closed."""

    def __init__(self, allowed: Sequence[Destination], listeners: Sequence[socket.socket]) -> None:
        """`listeners`: a listening socket for each destination."""
        self._lines: list[str] = []
        self._unlogged = self._open = 0
        self._began = time.monotonic()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        arguments = list(zip(allowed, listeners, strict=True)), ready
        self._thread = threading.Thread(target=self._serve, args=arguments, name="egress", daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def log(self) -> tuple[str, ...]:
        """One line for each connection that has ended or was refused, then the number of those without a line."""
        more = self._unlogged
        return (*self._lines, *([f"{more} more connections"] if more else []))

    def close(self) -> None:
        """End all connections. May be called again."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self, pairs: Sequence[tuple[Destination, socket.socket]], ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        starts = (asyncio.start_server(partial(self._forward, to), sock=listener) for to, listener in pairs)
        servers = [self._loop.run_until_complete(start) for start in starts]
        ready.set()
        try:
            self._loop.run_forever()
        finally:
            connections = asyncio.all_tasks(self._loop)
            for connection in connections:
                connection.cancel()
            self._loop.run_until_complete(asyncio.gather(*connections, return_exceptions=True))
            for server in servers:
                server.close()
            self._loop.close()

    async def _forward(self, to: Destination, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, and log where it went, how many bytes went each way, or why it was refused."""
        began, counts, address, problem = time.monotonic(), [0, 0], "", ""
        writers = [writer]
        self._open += 1
        try:
            if self._open > AT_A_TIME:
                raise PermissionError(f"more than {AT_A_TIME} connections at a time")
            async with asyncio.timeout(CONNECT_S):
                address = to.address or await self._public_address(to)
                far_reader, far_writer = await asyncio.open_connection(address, to.port)
            writers.append(far_writer)
            await asyncio.gather(_pump(reader, far_writer, counts, 0), _pump(far_reader, writer, counts, 1))
        except OSError as error:  # of either side; TimeoutError is one
            problem = str(error) or type(error).__name__
        except asyncio.CancelledError:
            problem = "the sandbox ended"
        finally:
            for end in writers:
                end.transport.abort() if problem else end.close()
            at, took = began - self._began, time.monotonic() - began
            line = f"{at:.1f} s: {to.host}:{to.port} {address or 'refused'}, {counts[0]} bytes out, {counts[1]} in, {took:.1f} s"
            if len(self._lines) < LOGGED:
                self._lines.append(line + (f": {problem[:200]}" if problem else ""))
            else:
                self._unlogged += 1
            try:  # what is sent keeps it open until that is read
                await asyncio.gather(*(end.wait_closed() for end in writers), return_exceptions=True)
            except asyncio.CancelledError:
                for end in writers:
                    end.transport.abort()
            self._open -= 1

    async def _public_address(self, to: Destination) -> str:
        """Return an address of a host, all of whose addresses are public. Raises OSError."""
        answers = await self._loop.getaddrinfo(to.host, to.port, family=socket.AF_INET, type=socket.SOCK_STREAM)
        addresses = [ipaddress.IPv4Address(answer[4][0]) for answer in answers]
        for address in addresses:
            if not address.is_global or address.is_multicast:
                raise PermissionError(
                    f"{to.host} has the private address {address}: list {to.host}={address}:{to.port}"
                )
        return str(addresses[0])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: list[int], way: int) -> None:
    """Copy one direction of a connection to its end."""
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
        counts[way] += len(data)
    if writer.can_write_eof():
        writer.write_eof()
