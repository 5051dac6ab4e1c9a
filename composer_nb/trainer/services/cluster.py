"""A connection of this process to Ray: to a new cluster, which ends with the process, or to an existing one.

The processes and the folder of a new cluster are in the journal, so that `reap` can remove them after a SIGKILL: Ray's agents
would live for another half minute, and its folder would stay. A new cluster listens on the loopback only and requires a token.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.reap import WRITER, Resource, ResourceJournal, release, with_mark

LOCAL = ("127.0.0.1:", "localhost:")
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray listen on the loopback alone, as it does by default on systems other than Linux."""
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
SOCKET = "/cnb-12345678/session_2026-01-01_12-00-00_123456_1234567/sockets/plasma_store"
"""A path of Ray's sockets, below the folder for temporary files."""
ANSWER_S = 5.0
"""Seconds within which a live cluster accepts a connection."""


class Cluster:
    """This process's connection to Ray, one at a time."""

    def __init__(self, address: str, namespace: str, journal: ResourceJournal) -> None:
        """`address`: address of the cluster to attach to; empty: start a new one and record it in `journal`.

        Raises ConnectionError if no cluster answers at `address`, or none can be started.
        """
        # Ray's processes, and thus the actors, inherit these.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would let everything else go first
        # Ray's default of 60 is too short on a busy machine.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "180")
        # A lost control service does not return: its clients need not wait a minute for it.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
        self._journal, self._closed = journal, False
        self._resources: list[Resource] = []
        try:
            if address:
                attach(address, namespace)
            else:
                self._start(namespace)
        except BaseException:
            self._remove()
            raise
        import ray

        context = ray.get_runtime_context()
        self.address = str(context.gcs_address)
        """Address host:port to which others can attach."""
        self._raylet = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())

    def lost(self) -> str | None:
        """Name the part of the cluster that does not answer; None if all do, or after `close`."""
        host, _, port = self.address.rpartition(":")
        for part, family, where in (
            ("control service", socket.AF_INET, (host, int(port))),
            ("raylet", socket.AF_UNIX, self._raylet),
        ):
            with socket.socket(family) as connection:
                connection.settimeout(ANSWER_S)
                try:
                    connection.connect(where)
                except OSError as error:
                    return None if self._closed else f"Ray's {part} is gone ({error.strerror or error})"
        return None

    def close(self) -> None:
        """Leave the cluster. If this process started it, end it and remove its folder."""
        import ray

        self._closed = True
        ray.shutdown()
        self._remove()

    def _start(self, namespace: str) -> None:
        """Start a cluster and record its folder and its processes."""
        folder = Path(tempfile.mkdtemp(prefix="cnb-", dir=socket_folder(len(SOCKET))))
        marks = os.environ.get(WRITER, "")
        if (resource := self._journal.made("directory", folder)) is not None:
            self._resources.append(resource)
            os.environ[WRITER] = with_mark(resource.mark)
        earlier = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            start(folder, namespace)
        finally:
            os.environ[WRITER] = marks
            for child in psutil.Process().children(recursive=True):
                if child.pid not in earlier and (resource := self._journal.made("process", child.pid)) is not None:
                    self._resources.append(resource)

    def _remove(self) -> None:
        """End Ray's agents, which write into the folder until then, and remove the folder."""
        release(self._journal, self._resources)
        self._resources = []


def attach(address: str, namespace: str) -> None:
    """Connect this process to the Ray cluster at `address`, which is HOST:PORT or `auto`. Call it before anything imports Ray.

    This machine's token is sent to a cluster on the loopback, which either is one of ours or ignores the token. Raises
    ConnectionError, and nothing else, if no cluster answers.
    """
    if address == "auto" or address.startswith(LOCAL):
        token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
        if "RAY_AUTH_TOKEN" in os.environ or token.is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        if address != "auto":
            os.environ.update(LOOPBACK)
    import ray

    try:
        ray.init(address=address, namespace=namespace, **QUIET)
    except Exception as error:  # Ray raises many kinds, including Exception
        raise ConnectionError(f"no Ray answers at {address}: {' '.join(str(error).split())}") from error


def start(folder: Path, namespace: str) -> None:
    """Start a cluster of one node, which ends with this process, and connect to it. Raises ConnectionError if it does not start.

    The path of `folder` must be short, because it becomes part of paths of sockets."""
    os.environ.update(LOOPBACK)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # makes this machine's token, if it has none
    import ray

    size: dict[str, Any] = {"num_cpus": os.cpu_count(), "object_store_memory": 256 << 20}
    try:
        ray.init("local", namespace=namespace, include_dashboard=False, _temp_dir=str(folder), **size, **QUIET)
    except Exception as error:  # a plain Exception after a timeout
        raise ConnectionError(f"Ray did not start: {' '.join(str(error).split())}") from error
