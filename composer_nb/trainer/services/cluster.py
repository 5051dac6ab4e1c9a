"""A connection of this process to Ray: to a new cluster, which ends with the process, or to an existing one.

The folder of a new cluster is in the journal, so that `reap` can remove it and its processes after a SIGKILL: Ray's agents would
live for another half minute, and the folder would stay. A new cluster requires a token, and listens on the loopback alone unless
it has an address for other machines (`ClusterNode`).
"""

import ctypes
import json
import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.files import socket_folder
from composer_nb.harness.sandbox.reap import WRITER, Resource, ResourceJournal, release, with_mark

END_S = 5.0
LOCAL = ("127.0.0.1:", "localhost:")
# Ray's servers of metrics ask for no token and listen everywhere. A port that is none is the only way to keep one of them off.
NO_METRICS = {"RAY_enable_metrics_collection": "false", "DASHBOARD_METRIC_PORT": str(1 << 16)}
# Makes Ray listen on the loopback alone, as it does by default on systems other than Linux.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": False}
# A path of Ray's sockets, below the folder for temporary files.
SOCKET = "/cnb-12345678/session_2026-01-01_12-00-00_123456_1234567/sockets/plasma_store"
ROLES = ("trainer", "engine", "environment", "evaluation")
# Environment variable with the folder of the node (`composer-nb up`) on which a process runs.
NODE = "COMPOSER_NB_NODE"
# Environment variable with the address of the relay of weight versions in this region.
RELAY = "COMPOSER_NB_RELAY"
# Amount of a role that a node has by default, as a resource of Ray, of which each service takes 1.
ROLE = 1000
# Ports of a cluster, with the names of the files in which Ray's agents tell their raylet of theirs.
PORTS = {
    "dashboard-agent-grpc-port": "metrics_agent_port",
    "dashboard-agent-listen-port": "dashboard_agent_listen_port",
    "metrics-export-port": "metrics_export_port",
    "runtime-env-agent-port": "runtime_env_agent_port",
    "ray-client-server-port": "",
}
# Tries to start Ray.
STARTS = 2
GCS = "gcs_server_port_"
# File with the address of a cluster, once it has started.
ADDRESS = "ray_current_cluster"
# Seconds within which a live cluster accepts a connection.
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """What a machine brings to a cluster.

    Attributes:
        host: Its address for the cluster's other machines; empty: there are none, and it listens on the loopback.
        join: Address (host:port) of the cluster; empty: it is the first of a new one.
        roles: Services (`ROLES`) that run here and on other nodes of that role alone; with `=N`, at most N of them here.
        relay: Address (host:port) of its region's relay of weight versions, which runs on the node with this `host`.
    """

    host: str = ""
    join: str = ""
    roles: tuple[str, ...] = ()
    relay: str = ""

    def __post_init__(self) -> None:
        if self.join and not self.host:
            raise ValueError(f"--join {self.join}: also give --host, this machine's address for the other machines")
        if unknown := [role for role in self.roles if not re.fullmatch(rf"({'|'.join(ROLES)})(=[1-9]\d*)?", role)]:
            raise ValueError(f"--roles {','.join(unknown)}: the roles are {', '.join(ROLES)}, or ROLE=N")
        if len({role.partition("=")[0] for role in self.roles}) < len(self.roles):
            raise ValueError(f"--roles {','.join(self.roles)}: give each role once")
        if self.relay and not re.fullmatch(r"[^:]+:\d+", self.relay):
            raise ValueError(
                f"--relay {self.relay}: give HOST:PORT, with the --host of the node that is to be the relay"
            )


class Cluster:
    """This process's connection to Ray, one at a time."""

    def __init__(
        self, address: str, namespace: str, journal: ResourceJournal, machine: ClusterNode | None = None
    ) -> None:
        """`address`: address of the cluster to attach to; empty: start one with this `machine` and record it in `journal`.

        Raises ConnectionError if no cluster answers at `address`, or none can be started.
        """
        self._machine = machine or ClusterNode()
        # Ray's processes, and thus the actors, inherit these.
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would let everything else go first
        # Ray's default of 60 is too short on a busy machine.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "180")
        if address.startswith(LOCAL) or not (address or self._machine.host):
            # A lost control service does not return: its clients need not wait a minute for it. A network does return.
            os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
        self._journal, self._closed = journal, False
        self._resources: list[Resource] = []
        self._node: subprocess.Popen[bytes] | None = None
        try:
            if address:
                attach(address, namespace)
            else:
                attach(self._start(), namespace, ours=True)
        except BaseException:
            self._remove()
            raise
        import ray

        context = ray.get_runtime_context()
        # Address host:port to which others can attach.
        self.address = str(context.gcs_address)
        self._raylet = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == context.get_node_id())

    def lost(self) -> str | None:
        """Name the part of the cluster that does not answer; None if all do, or after `close`."""
        host, _, port = self.address.rpartition(":")
        parts = [("raylet", socket.AF_UNIX, self._raylet), ("control service", socket.AF_INET, (host, int(port)))]
        if self._machine.join:  # the raylet knows how long to wait for its head
            del parts[1:]
        for part, family, endpoint in parts:
            with socket.socket(family) as connection:
                connection.settimeout(ANSWER_S)
                try:
                    connection.connect(endpoint)
                except OSError as error:
                    return None if self._closed else f"Ray's {part} is gone ({error.strerror or error})"
        return None

    def close(self) -> None:
        """Leave the cluster. If this process started it, end it and remove its folder."""
        import ray

        self._closed = True
        ray.shutdown()
        if self._node is not None:
            self._node.terminate()
            with suppress(subprocess.TimeoutExpired):  # it waits for its workers
                self._node.wait(END_S)
        self._remove()

    def _start(self) -> str:
        """Start a cluster, record its folder, whose mark its processes inherit, and return its address."""
        folder = Path(tempfile.mkdtemp(prefix="cnb-", dir=socket_folder(len(SOCKET))))
        marks = os.environ.get(WRITER, "")
        if (resource := self._journal.made("directory", folder)) is not None:
            self._resources.append(resource)
            os.environ[WRITER] = with_mark(resource.mark)
        try:
            self._node = start(folder, self._machine)
        finally:
            os.environ[WRITER] = marks
        return (folder / ADDRESS).read_text()

    def _remove(self) -> None:
        """End Ray's agents, which write into the folder until then, and remove the folder."""
        release(self._journal, self._resources)
        self._resources = []


def attach(address: str, namespace: str, ours: bool = False) -> None:
    """Connect this process to the Ray cluster at `address`, which is HOST:PORT or `auto`. Call it before anything imports Ray.

    This machine's token is sent to a cluster that is `ours`, and to one at an address of this machine, which either is ours or
    ignores the token. Raises ConnectionError, and nothing else, if no cluster answers.
    """
    if ours or address == "auto" or _is_here(address):
        if "RAY_AUTH_TOKEN" in os.environ or _token_file().is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        if address.startswith(LOCAL):
            os.environ.update(LOOPBACK)
    import ray

    try:
        ray.init(address=address, namespace=namespace, **QUIET)
    except Exception as error:  # Ray raises many kinds, including Exception
        is_named = os.environ.get("RAY_AUTH_MODE") == "token"
        hint = (
            "" if is_named else f" (a cluster with a token wants RAY_AUTH_MODE=token, and its token in {_token_file()})"
        )
        raise ConnectionError(f"no Ray answers at {address}: {' '.join(str(error).split())}{hint}") from error


def start(folder: Path, machine: ClusterNode) -> subprocess.Popen[bytes]:
    """Start a node by `ray start`, and return its process, with which it ends. Raises ConnectionError if it fails. The path of
    `folder` must be short, because it becomes part of paths of sockets."""
    if machine.join:
        token()
    if "RAY_AUTH_TOKEN" not in os.environ:
        make_token(_token_file())
    ports = free_ports(machine.host or "127.0.0.1")
    roles = {name: int(most or ROLE) for name, _, most in (role.partition("=") for role in machine.roles)}
    options = {
        "num-cpus": os.cpu_count(), "object-store-memory": 256 << 20, "temp-dir": folder, "include-log-monitor": "false",
        "resources": json.dumps(roles), **ports,
    }  # fmt: skip
    options |= {"node-ip-address": machine.host} if machine.host else {}
    options |= {"address": machine.join} if machine.join else {"port": 0, "include-dashboard": "false"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--no-monitor"]
    command += [*([] if machine.join else ["--head"]), *(f"--{name}={value}" for name, value in options.items())]
    log, environment = folder / "start.log", {"RAY_AUTH_MODE": "token"} | os.environ
    environment |= NO_METRICS if machine.host else LOOPBACK
    for _ in range(STARTS):
        with log.open("wb") as out:
            # A group of its own: Ctrl-C, or a supervisor's signal to all, ends this process, which drains and then closes Ray.
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        while process.poll() is None:
            if (folder / ADDRESS).is_file():
                return process
            tell_ports(folder, ports)
            time.sleep(0.05)
    raise ConnectionError(f"Ray did not start: {' '.join(log.read_text(errors='replace').split())[-500:]}")


def free_ports(host: str) -> dict[str, int]:
    """Return a free port for each option in PORTS."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server((host, 0))) for _ in PORTS]
        return {name: listener.getsockname()[1] for name, listener in zip(PORTS, listeners, strict=True)}


def tell_ports(folder: Path, ports: Mapping[str, int]) -> None:
    """Write the ports of the agents of nodes that start in `folder`, in place of these: a raylet ends itself if its agents have
    not told it of their ports after 15 s, as on a busy machine."""
    for gcs in folder.glob(f"session_*/{GCS}*"):
        for option, name in PORTS.items():
            if name and not (file := gcs.with_name(f"{name}_{gcs.name.removeprefix(GCS)}")).exists():
                file.write_text(str(ports[option]))


def make_token(file: Path) -> None:
    """Write a new token, which its owner alone may read, unless `file` exists. The file never holds a part of a token."""
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent) as draft, suppress(FileExistsError):
        draft.write(secrets.token_hex(32))
        draft.flush()
        os.link(draft.name, file)


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _is_here(address: str) -> bool:
    """Return whether host:port is of this machine."""
    try:
        socket.create_server((address.rpartition(":")[0], 0)).close()
    except OSError:
        return False
    return True


def _token_file() -> Path:
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()


def token() -> str:
    """Return the cluster's token. Raises ConnectionError if this machine has none."""
    try:
        return os.environ.get("RAY_AUTH_TOKEN") or _token_file().read_text().strip()
    except FileNotFoundError:
        raise ConnectionError(
            f"{_token_file()} is missing: copy it from the head's machine, readable by you alone"
        ) from None
