"""A Ray cluster of two nodes on this machine, in a process of its own, for a module of tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from test_jobs_fire import Bench

from composer_nb.harness.sandbox.system.linux import patience

CLUSTER = """
import json, sys
from pathlib import Path
from ray._private import services
from ray._private.state import GlobalState
from ray._raylet import GcsClientOptions
from composer_nb.trainer.services.cluster import start_node

folder, first, second, hidden = json.loads(sys.argv[1])
head = start_node(Path(folder), **first)
start = services.start_ray_process

def apart(command, *more, **named):
    over = 'mount -t tmpfs none "$0" && exec "$@"'
    return start(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", over, hidden, *command], *more, **named)

if hidden:
    services.start_ray_process = apart
other = start_node(Path(folder), head=False, gcs_address=head.gcs_address, **second)
print(json.dumps([head.gcs_address, head.node_id, other.node_id]), flush=True)
state = GlobalState()
state._initialize_global_state(GcsClientOptions.create(head.gcs_address, None, True, False))
for line in sys.stdin:
    if line == "lose a node\\n":
        other.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        print("lost", flush=True)
    else:
        actors = state.actor_table(None, None, None).values()
        print(json.dumps([[a["ActorID"], a["ActorClassName"], a["Address"]["NodeID"]] for a in actors]), flush=True)
for node in (other, head):
    node.kill_all_processes(check_alive=False, allow_graceful=True)
"""


class Cluster:
    """Two nodes of Ray, with what they have (`num_cpus`, `num_gpus`). The folder `hidden` is an empty one for the second."""

    def __init__(self, bench: Bench, first: dict[str, Any], second: dict[str, Any], hidden: Path | None = None) -> None:
        self.bench, self.words = bench, bench.folder / "cluster.txt"
        self.folder = tempfile.mkdtemp(prefix="cnb-")  # short, because it contains the paths of sockets
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, json.dumps([self.folder, first, second, str(hidden or "")])],
            env=bench.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words.open("w"),
            text=True,
        )
        begun = self.read()
        assert begun, self.words.read_text()
        self.address, self.head, self.other = json.loads(begun)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()

    def lose_a_node(self) -> None:
        assert self.ask("lose a node") == "lost"

    def actors(self) -> set[tuple[str, str, str]]:
        """(id, class, id of its node) of every actor that has been made."""
        return {tuple(each) for each in json.loads(self.ask("actors"))}


@contextmanager
def two_nodes(
    folder: Path, first: dict[str, Any], second: dict[str, Any], hidden: Path | None = None
) -> Iterator[Cluster]:
    """A cluster whose files lie in `folder`, and that is ended with all of its processes."""
    made = Cluster(Bench(folder), first, second, hidden)
    yield made
    made.process.communicate(timeout=patience(120))
    for process in made.bench.alive():
        process.kill()
    shutil.rmtree(made.folder, ignore_errors=True)
