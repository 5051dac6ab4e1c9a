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

# Root needs no user namespace, in which the sandboxes' account would be missing.
APART = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
APART += ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"']


class Cluster:
    """Two nodes of Ray, with what they have (`num_cpus`, `num_gpus`). The folder `hidden` is an empty one for the second."""

    def __init__(self, bench: Bench, first: dict[str, Any], second: dict[str, Any], hidden: Path | None = None) -> None:
        self.bench, self.words = bench, bench.folder / "cluster.txt"
        bench.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.folder = Path(tempfile.mkdtemp(prefix="cnb-"))  # short, because it contains the paths of sockets
        self.nodes: list[subprocess.Popen[str]] = []
        try:
            self.start(first, second, hidden)
        except BaseException:
            self.lose(*self.nodes)
            raise

    def start(self, first: dict[str, Any], second: dict[str, Any], hidden: Path | None) -> None:
        self.start_node([], "--head", "--port=0", f"--temp-dir={self.folder}", "--include-dashboard=false", **first)
        address = self.folder / "ray_current_cluster"
        while not address.is_file():
            assert self.nodes[0].poll() is None, self.words.read_text()
            time.sleep(0.1)
        self.address = address.read_text()
        self.start_node([*APART, str(hidden)] if hidden else [], f"--address={self.address}", **second)

    def open(self, command: list[str]) -> subprocess.Popen[str]:
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": self.words.open("a")}
        return subprocess.Popen(command, env=self.bench.environment, text=True, **pipes)

    def start_node(self, apart: list[str], *options: str, **resources: int) -> None:
        has = [f"--{name.replace('_', '-')}={count}" for name, count in resources.items()]
        node = self.open([*apart, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options, *has])
        assert node.stdout is not None
        self.nodes.append(node)
        while "block forever" not in node.stdout.readline():
            assert node.poll() is None, self.words.read_text()

    def lose(self, *nodes: subprocess.Popen[str]) -> None:
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
