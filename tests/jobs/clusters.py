"""A Ray cluster of two nodes on this machine, in a process of its own, for a module of tests."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from test_jobs_fire import Bench

from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.services.cluster import ADDRESS, NO_METRICS, STARTS, free_ports, tell_ports

# Root needs no user namespace, in which the sandboxes' account would be missing.
APART = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
APART += ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']


class Cluster:
    """Two nodes of Ray, with what they have (`num_cpus`, `num_gpus`). The folder `hidden` is an empty one for the second."""

    def __init__(self, bench: Bench, first: dict[str, Any], second: dict[str, Any], hidden: Path | None = None) -> None:
        self.bench = bench
        bench.environment |= NO_METRICS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.folder = Path(tempfile.mkdtemp(prefix="cnb-"))  # short, because it contains the paths of sockets
        self.nodes: list[subprocess.Popen[bytes]] = []
        try:
            self.start(first, second, hidden)
        except BaseException:
            self.lose(*self.nodes)
            raise

    def start(self, first: dict[str, Any], second: dict[str, Any], hidden: Path | None) -> None:
        self.start_node([], "--head", "--port=0", f"--temp-dir={self.folder}", "--include-dashboard=false", **first)
        self.address = (self.folder / ADDRESS).read_text()
        self.start_node([*APART, str(hidden)] if hidden else [], f"--address={self.address}", **second)

    def start_node(self, apart: list[str], *options: str, **resources: int) -> None:
        """Start a node as `services.cluster.start` does, with other resources and its own view of the file system."""
        ports = free_ports("127.0.0.1")
        values = {name.replace("_", "-"): count for name, count in resources.items()} | ports
        command = [*apart, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--no-monitor", *options]
        command += ["--include-log-monitor=false", *(f"--{name}={value}" for name, value in values.items())]
        log = self.bench.folder / f"node-{len(self.nodes)}.txt"
        for _ in range(STARTS):
            with log.open("wb") as out:
                node = subprocess.Popen(command, env=self.bench.environment, stdout=out, stderr=out)
            while node.poll() is None:
                if "block forever" in log.read_text():
                    self.nodes.append(node)
                    return
                tell_ports(self.folder, ports)
                time.sleep(0.1)
        raise AssertionError(log.read_text())

    def lose(self, *nodes: subprocess.Popen[bytes]) -> None:
        for node in (node for node in nodes if node.poll() is None):
            for process in psutil.Process(node.pid).children(recursive=True):
                process.kill()
            node.kill()


@contextmanager
def two_nodes(folder: Path, first: dict[str, Any], second: dict[str, Any], hidden: Path) -> Iterator[Cluster]:
    """Start a cluster whose files lie in `folder`, and end all of its processes afterwards."""
    cluster = Cluster(Bench(folder), first, second, hidden)
    yield cluster
    for process in cluster.nodes:
        process.terminate()
        process.communicate(timeout=patience(120))
    for process in cluster.bench.alive():
        process.kill()
    shutil.rmtree(cluster.folder, ignore_errors=True)
