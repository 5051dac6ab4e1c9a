"""A server on the loopback that answers in the ways that a socket's own limit of silence does not end."""

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
DRIP_S = 0.05


def complete(message: object) -> list[bytes]:
    body = json.dumps(message).encode()
    return [HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def chat_reply(text: str, **call: object) -> list[bytes]:
    function = {"name": call.pop("name", ""), "arguments": json.dumps(call)}
    calls = {"tool_calls": [{"id": "c", "type": "function", "function": function}]} if function["name"] else {}
    return complete({"choices": [{"message": {"role": "assistant", "content": text} | calls}]})


def letters(data: bytes) -> Iterator[bytes]:
    """Return the bytes one at a time, and then spaces for ever."""
    return (bytes([byte]) for byte in chain(data, repeat(32)))


FAULTS = {
    "silent": lambda: repeat(b""),
    "slow head": lambda: letters(b"HTTP/1.1 200 OK\r\nX: "),
    "slow body": lambda: chain([HEAD + b"Content-Length: 9999999\r\n\r\n"], letters(b"")),
    "slow chunks": lambda: chain([HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], repeat(b"1\r\n \r\n")),
    "slow without an end": lambda: chain([HEAD + b"\r\n"], letters(b"")),
    "a stream for ever": lambda: chain(
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n"], repeat(b'13\r\ndata: {"x": 1234}\n\r\n')
    ),
}


class Stubborn:
    def __init__(self, turns: Sequence[Sequence[bytes]], fault: str) -> None:
        """Answer these turns well, and all further requests with this fault. A list of models is always given."""
        self.turns, self.fault = list(turns), fault
        self.ended = threading.Event()
        self.open = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        self.open += 1
        try:
            with connection, connection.makefile("rb") as reader:
                while line := reader.readline():
                    size = 0
                    while (head := reader.readline().strip()) not in (b"", b"\r\n"):
                        if head.lower().startswith(b"content-length:"):
                            size = int(head.split(b":")[1])
                    reader.read(size)
                    if line.startswith(b"GET"):
                        connection.sendall(complete({"data": [{"id": "m"}]})[0])
                    elif self.turns:
                        connection.sendall(b"".join(self.turns.pop(0)))
                    else:
                        for part in FAULTS[self.fault]():
                            if self.ended.wait(DRIP_S if len(part) < 10 else 0):
                                return
                            if part:
                                connection.sendall(part)
                            elif _gone(connection):
                                return
        except OSError:
            pass
        finally:
            self.open -= 1


def _gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


@contextmanager
def stubborn(fault: str, *turns: Sequence[bytes]) -> Iterator[Stubborn]:
    server = Stubborn(turns, fault)
    try:
        yield server
    finally:
        server.ended.set()
        server._socket.close()
