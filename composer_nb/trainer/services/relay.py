"""A relay for a region: each file of a weight version crosses the link to the store once, however many receivers there are.

    receivers ── GET /HASH/RUN/v000012/delta.safetensors ──▶ relay ── once ──▶ store

Receivers read manifests from the store, and ask for files by their hash. What the relay of `COMPOSER_NB_RELAY` (HOST:PORT)
does not give, they read from the store. Requests bring the cluster's token.
"""

import hmac
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.services.cluster import token
from composer_nb.trainer.versions.manifest import PayloadFile, WeightFault, digest
from composer_nb.trainer.versions.store import StoreError, VersionStore

# Environment variable with the address of this region's relay.
RELAY = "COMPOSER_NB_RELAY"
# Seconds within which a relay answers, and for which it is left alone if it did not.
ANSWER_S = 60.0


class RelayedStore(VersionStore):
    """A store whose files come from a relay, if it has them."""

    def __init__(self, url: str | Path) -> None:
        super().__init__(url)
        self._run = self.url.rstrip("/").rpartition("/")[2]
        self._relay, self._failed_s = os.environ.get(RELAY, ""), -ANSWER_S

    def read_file(self, name: str, file: PayloadFile) -> bytes:
        if self._relay and time.monotonic() > self._failed_s + ANSWER_S:
            url = f"http://{self._relay}/{file.hash}/{quote(f'{self._run}/{name}')}"
            try:
                with urlopen(Request(url, headers={"Authorization": f"Bearer {token()}"}), timeout=ANSWER_S) as answer:
                    data: bytes = answer.read()
                if digest(data) == file.hash:
                    return data
            except OSError:
                self._failed_s = time.monotonic()
        return super().read_file(name, file)


class Relay(ThreadingHTTPServer):
    """Serves the files of the runs in `store` (`services.store`), and has the newest `keep` bytes of them in `folder`."""

    daemon_threads = True

    def __init__(self, store: str, folder: Path, host: str, port: int = 0, keep: int = 20 << 30) -> None:
        """Raises OSError if it cannot listen at `host`."""
        super().__init__((host, port), _Requests)
        self._store, self._folder, self._keep = VersionStore(store), folder, keep
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    @contextmanager
    def file(self, hash: str, name: str) -> Iterator[IO[bytes]]:
        """Open a file, after fetching it unless it is there. Raises WeightFault or StoreError."""
        if not re.fullmatch(r"[0-9a-f]{40}", hash):
            raise WeightFault(f"{hash!r} is no hash")
        path = beneath(self._folder, hash)
        with self._locks[hash]:
            if not path.is_file():
                self._store.copy(name, hash, path)
                self._make_room()
            content = path.open("rb")
        with content:
            yield content

    def _make_room(self) -> None:
        """Remove the oldest files."""
        files = sorted(self._folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for number, file in enumerate(files):
            total += file.stat().st_size
            if number and total > self._keep:
                file.unlink()


class _Requests(BaseHTTPRequestHandler):
    server: Relay

    def do_GET(self) -> None:
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), f"Bearer {token()}".encode()):
            self.send_error(401)
            return
        hash, _, name = unquote(self.path[1:]).partition("/")
        try:
            with self.server.file(hash, name) as content:
                self.send_response(200)
                self.send_header("Content-Length", str(os.fstat(content.fileno()).st_size))
                self.end_headers()
                shutil.copyfileobj(content, self.wfile)
        except (WeightFault, StoreError) as error:
            self.send_error(502, explain=str(error))

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""
