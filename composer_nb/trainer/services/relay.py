"""A relay for a region: each file of a weight version crosses the link to the store once, however many receivers there are.

    receivers ── GET /HASH/v000012/delta.safetensors?STORE ──▶ relay (`composer-nb up --relay`) ── once ──▶ store
        └─────── manifests, reports, and files that the relay does not give ───────────────────────────────▶

Requests bring the cluster's token. Receivers check what they get, so a relay cannot give them anything else.
"""

import hmac
import math
import os
import re
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote

from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.services.cluster import RELAY, token
from composer_nb.trainer.versions.manifest import PayloadFile, WeightFault, digest
from composer_nb.trainer.versions.store import StoreError, VersionStore

# Seconds within which a relay takes a connection, and within which it answers when its link brings so many bytes a second.
CONNECT_S, ANSWER_S, LINK_BYTES_S = 10.0, 60.0, 1e6
# Seconds for which a relay is left alone that did not answer.
SILENT_S = 60.0


class RelayedStore(VersionStore):
    """A store whose files come from the relay of this region (`RELAY`, HOST:PORT), if it has one."""

    def __init__(self, url: str | Path) -> None:
        super().__init__(url)
        self._relay, self._silent_s = os.environ.get(RELAY, ""), -math.inf

    def read_file(self, name: str, file: PayloadFile) -> bytes:
        data = self._relayed(name, file)
        return data if data is not None and digest(data) == file.hash else super().read_file(name, file)

    def _relayed(self, name: str, file: PayloadFile) -> bytes | None:
        """Return a file from the relay; None if it does not answer, or does not get it from the store."""
        if not self._relay or time.monotonic() < self._silent_s + SILENT_S:
            return None
        path = f"/{file.hash}/{quote(name)}?{quote(self.url, safe='')}"
        try:
            with closing(HTTPConnection(self._relay, timeout=CONNECT_S)) as connection:
                connection.connect()
                connection.sock.settimeout(ANSWER_S + file.bytes / LINK_BYTES_S)
                # A host that is gone, and says nothing more, ends the wait.
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    connection.sock.setsockopt(socket.IPPROTO_TCP, option, int(CONNECT_S))
                connection.request("GET", path, headers={"Authorization": f"Bearer {token()}"})
                answer = connection.getresponse()
                data = answer.read()
                return data if answer.status == 200 else None
        except (OSError, HTTPException):
            self._silent_s = time.monotonic()
            return None


class FileCache:
    """The newest files of stores, by hash, up to `keep` bytes in `folder`."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        """`keep`: by default half of what is free on the disk."""
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob("*.part"):  # of a relay that was killed
            part.unlink()
        self._folder, self._keep = folder, keep or shutil.disk_usage(folder).free // 2
        self._locks, self._room = defaultdict[str, threading.Lock](threading.Lock), threading.Lock()

    @contextmanager
    def open(self, store: VersionStore, name: str, hash: str) -> Iterator[IO[bytes]]:
        """Open a file, after fetching it unless it is there. Raises WeightFault or StoreError."""
        if not re.fullmatch(r"[0-9a-f]{40}", hash):
            raise WeightFault(f"{hash!r} is no hash")
        path = beneath(self._folder, hash)
        with self._locks[hash]:
            if not path.is_file():
                store.copy(name, hash, path)
                self._make_room()
            content = path.open("rb")
        with content:
            yield content

    def _make_room(self) -> None:
        """Remove the oldest files."""
        with self._room:
            files = [file for file in self._folder.iterdir() if not file.suffix]  # others are on their way
            total = 0
            for number, file in enumerate(sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)):
                total += file.stat().st_size
                if number and total > self._keep:
                    file.unlink()


class Relay(ThreadingHTTPServer):
    """Serves files of the stores that receivers name."""

    daemon_threads = True

    def __init__(self, files: FileCache, host: str, port: int = 0) -> None:
        """Raises OSError if it cannot listen at `host`."""
        super().__init__((host, port), _Requests)
        self.files = files


class _Requests(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True  # or the body waits for the acknowledgement of the head, which is delayed
    server: Relay

    def do_GET(self) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {token()}".encode()):
            self.send_error(401)
            return
        path, _, store = self.path[1:].partition("?")
        hash, _, name = unquote(path).partition("/")
        try:
            with self.server.files.open(VersionStore(unquote(store)), name, hash) as content:
                self.send_response(200)
                self.send_header("Content-Length", str(os.fstat(content.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(content, self.wfile)
        except (WeightFault, StoreError) as error:
            self.send_error(502, explain=str(error))

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""
