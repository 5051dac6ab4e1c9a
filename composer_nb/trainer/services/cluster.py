"""A connection of this process to Ray: to a new cluster, which ends with the process, or to an existing one.

The processes and the folder of a new cluster are in the journal, so that `reap` can remove them after a SIGKILL: Ray's agents
would live for another minute, and its folder would stay. A new cluster listens on the loopback only, has no dashboard and
requires a token.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.reap import WRITER, Resource, ResourceJournal, release, with_mark
from composer_nb.harness.sandbox.system.linux import patience

START_S = 180.0
"""Time limit of Ray's start. Its default of 30 s is too short on a busy machine."""
LOOPBACK = "127.0.0.1"
LOCAL = (f"{LOOPBACK}:", "localhost:")
AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
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
        self._node: Any = None
        self._noted: list[Resource] = []
        try:
            attach(address or self._start(), namespace)
        except BaseException:
            self._remove()
            raise
        from ray._private import worker

        node: Any = worker._global_node
        self._control, self._raylet = node.gcs_address, node.raylet_socket_name

    @property
    def address(self) -> str:
        """Address host:port to which others can attach."""
        return str(self._control)

    def lost(self) -> str | None:
        """Name the part of the cluster that does not answer; None if all do, or after `close`."""
        host, _, port = self._control.rpartition(":")
        for part, family, where in (
            ("control service", socket.AF_INET, (host, int(port))),
            ("raylet", socket.AF_UNIX, self._raylet),
        ):
            with socket.socket(family) as line:
                line.settimeout(ANSWER_S)
                try:
                    line.connect(where)
                except OSError as error:
                    if self._closed:
                        return None
                    return f"Ray's {part} is gone ({error.strerror or error})"
        return None

    def close(self) -> None:
        """Leave the cluster. If this process started it, end it and remove its folder."""
        import ray

        self._closed = True
        ray.shutdown()
        if self._node is not None:
            self._node.kill_all_processes(check_alive=False, allow_graceful=True)
        self._remove()

    def _start(self) -> str:
        """Start a cluster and return its address."""
        folder = Path(tempfile.mkdtemp(prefix="cnb-", dir=socket_folder(len(SOCKET))))
        marks = os.environ.get(WRITER, "")
        if (noted := self._note("directory", folder)) is not None:
            os.environ[WRITER] = with_mark(noted.mark)
        before = _below()
        try:
            self._node = start_node(folder)
        finally:
            os.environ[WRITER] = marks
            for pid in _below() - before:
                self._note("process", pid)
        return str(self._node.gcs_address)

    def _note(self, kind: Any, name: int | Path) -> Resource | None:
        resource = self._journal.made(kind, name)
        if resource is not None:
            self._noted.append(resource)
        return resource

    def _remove(self) -> None:
        """End Ray's agents, which write into the folder until then, and remove the folder."""
        release(self._journal, self._noted)
        self._noted = []


def attach(address: str, namespace: str) -> None:
    """Connect this process to the Ray cluster at `address`, which is HOST:PORT or `auto`.

    This machine's token is sent to a cluster on the loopback, which either is one of ours or ignores the token. Raises
    ConnectionError, and nothing else, if no cluster answers.
    """
    if address == "auto" or address.startswith(LOCAL):
        _use_token(create=False)
    import ray
    from ray._private import services

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        # Ray would replace the loopback by this machine's network address, where nothing listens.
        with _instead(services, "resolve_ip_for_localhost", lambda host: host):
            ray.init(address=address, namespace=namespace, **quiet)
    except Exception as error:  # Ray raises many kinds, including Exception
        raise ConnectionError(f"no Ray answers at {address}: {' '.join(str(error).split())}") from error


def _use_token(*, create: bool) -> None:
    """Make Ray authenticate with this machine's token, unless `RAY_AUTH_MODE` is set. Without a token, `create` makes one;
    otherwise nothing changes."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled: no types

    if create or AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray has read the environment already
        ensure_token_if_auth_enabled()


def start_node(folder: Path, *, head: bool = True, **more: Any) -> Any:
    """Start Ray's processes without autoscaler, log monitor and dashboard, which take most of the start-up time and half of the
    memory. `more`: other parameters of the node. Raises ConnectionError if they do not start."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Lean(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            self._webui_url = None

        def start_ray_processes(self) -> None:
            # The raylet waits 15 s for the ports of its agents, then ends itself. So they are written here.
            for name, port in zip(AGENTS, _free_ports(len(AGENTS)), strict=True):
                setattr(self._ray_params, name, port)
                Path(self._session_dir, f"{name}_{self._node_id}").write_text(str(port))
            super().start_ray_processes()

    once, until = services.get_node, time.monotonic() + patience(START_S)

    def patiently(*which: Any) -> Any:
        while True:
            try:
                return once(*which)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    parameters: dict[str, Any] = {
        "node_ip_address": LOOPBACK,
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
        "num_cpus": os.cpu_count(),
        "object_store_memory": 256 << 20,
        "temp_dir": str(folder),  # must be short, because it contains the paths of sockets
        "min_worker_port": 0,
        "max_worker_port": 0,
    }
    try:
        _use_token(create=True)
        with _instead(services, "get_node", patiently):
            return Lean(RayParams(**parameters | more), head=head, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:  # a plain Exception after a timeout
        raise ConnectionError(f"Ray did not start: {' '.join(str(error).split())}") from error


@contextmanager
def _instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of Ray, for behaviour that no setting changes."""
    before = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, before)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        lines = [stack.enter_context(socket.socket()) for _ in range(count)]
        for line in lines:
            line.bind((LOOPBACK, 0))
        return [line.getsockname()[1] for line in lines]


def _below() -> set[int]:
    """Return the descendants of this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
