"""A connection of this process to Ray: a cluster of its own, which ends with it, or one that runs already.

Whatever a cluster of its own puts on the machine is in the journal, so that `reap` can end what a SIGKILL leaves: Ray's agents
would live on for a minute, its folder for ever. Loopback only, no dashboard, a token asked of whoever connects.
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

from composer_nb.harness.sandbox.journal import WRITER, Journal, Resource
from composer_nb.harness.sandbox.reap import release
from composer_nb.harness.sandbox.system.linux import patience

START_S = 180.0
"""Ray gives itself 30 s to start, which a busy machine may not keep."""
LOOPBACK = "127.0.0.1"
LOCAL = (f"{LOOPBACK}:", "localhost:")
AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
ANSWER_S = 5.0
"""Seconds in which a living cluster takes a connection."""


class Cluster:
    """Ray, as this process sees it. One a process at a time."""

    def __init__(self, address: str, namespace: str, journal: Journal) -> None:
        """`address`: of the cluster to attach to, empty for one of its own, which `journal` then names.

        Raises ConnectionError when nothing answers at `address`, or when no cluster can be started.
        """
        # What Ray's processes, and so the actors, inherit.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: everything else would go first
        os.environ.setdefault(
            "RAY_worker_register_timeout_seconds", "180"
        )  # on a busy machine Ray's own 60 are not enough
        # A control service that is gone stays gone: its clients need not wait a minute for it.
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
        """host:port, for others to attach to."""
        return str(self._control)

    def lost(self) -> str | None:
        """Name the part of the cluster that no longer answers; None while all do, and once it is closed."""
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
        """Leaves the cluster; ends it, and removes its folder, if it is this process's own."""
        import ray

        self._closed = True
        ray.shutdown()
        if self._node is not None:
            self._node.kill_all_processes(check_alive=False, allow_graceful=True)
        self._remove()

    def _start(self) -> str:
        """Starts a cluster and returns its address."""
        folder = Path(tempfile.mkdtemp(prefix="cnb-"))
        if (noted := self._note("directory", folder)) is not None:
            os.environ[WRITER] = noted.mark
        before = _below()
        try:
            self._node = _node(folder)
        finally:
            os.environ.pop(WRITER, None)
            for pid in _below() - before:
                self._note("process", pid)
        return str(self._node.gcs_address)

    def _note(self, kind: Any, name: int | Path) -> Resource | None:
        resource = self._journal.made(kind, name)
        if resource is not None:
            self._noted.append(resource)
        return resource

    def _remove(self) -> None:
        """End Ray's agents, which write into the folder until they end, then the folder."""
        release(self._journal, self._noted)
        self._noted = []


def attach(address: str, namespace: str) -> None:
    """Connects this process to the Ray cluster at `address`, which is HOST:PORT or `auto`.

    A cluster on the loopback is one of ours or accepts a token that it does not need, so this machine's token goes there.
    Raises ConnectionError, and nothing else, when no cluster answers.
    """
    if address == "auto" or address.startswith(LOCAL):
        _use_token(create=False)
    import ray
    from ray._private import services

    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
    try:
        # Ray would take the loopback for this machine's address in the network, where nothing listens.
        with _instead(services, "resolve_ip_for_localhost", lambda host: host):
            ray.init(address=address, namespace=namespace, **quiet)
    except Exception as error:  # of many kinds, plain ones among them
        raise ConnectionError(f"no Ray answers at {address}: {' '.join(str(error).split())}") from error


def _use_token(*, create: bool) -> None:
    """Makes Ray authenticate with this machine's token, unless `RAY_AUTH_MODE` says otherwise. Without a token, `create` makes
    one, and nothing changes otherwise."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled: no types

    if create or AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # Ray has read the environment already
        ensure_token_if_auth_enabled()


def _node(folder: Path) -> Any:
    """Ray's processes without its autoscaler, log monitor and dashboard, which take most of the time to start and half of the
    memory. Raises ConnectionError."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Lean(Node):
        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            self._webui_url = None

        def start_ray_processes(self) -> None:
            # The raylet waits for its agents to say where they listen: for 15 s, and then ends itself. So it is written here.
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

    parameters: Any = RayParams(
        node_ip_address=LOOPBACK,
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type]
        no_monitor=True,
        num_cpus=os.cpu_count(),
        object_store_memory=256 << 20,
        temp_dir=str(folder),  # the path of a socket lies in it: it must be short
        min_worker_port=0,
        max_worker_port=0,
    )
    try:
        _use_token(create=True)
        with _instead(services, "get_node", patiently):
            return Lean(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:  # a plain one when it takes too long
        raise ConnectionError(f"Ray did not start: {' '.join(str(error).split())}") from error


@contextmanager
def _instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Ray with one function of its own replaced: what it offers no setting for."""
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
    """Processes that this one, or one below it, started."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
