"""The nodes of a graph as tasks on a Ray cluster: same file, same attempts, same records, other machines.

Every machine must see the run's directory and the notebooks' folders under the same path (a shared file system) and have the same
package; all of it is checked where an attempt begins. A machine that is lost takes its attempts along: they are `lost`, and tried
again elsewhere. Requests to stop travel as files beside the attempt, so nothing but Ray's own connections is needed.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from composer_nb.jobs import processes
from composer_nb.jobs.file import Job, Node
from composer_nb.trainer.records.provenance import package_digest
from composer_nb.trainer.services.cluster import attach

STOP, KILL = "stop", "kill"
TICK_S = 0.2
SWEEP_S = 30.0


class OnRay:
    """Attempts as Ray tasks; Ray's resources decide how many run at once."""

    limit = None

    def __init__(self, address: str, run: str, job: Job, mark: str) -> None:
        """Raise ValueError where Ray is not installed, there is no cluster, or no machine of it is large enough."""
        try:
            attach(address, run)
            import ray
        except ImportError:
            raise ValueError("--ray: Ray is not installed here; pip install ray") from None
        except ConnectionError as error:
            raise ValueError(f"--ray: {error}") from None
        self.ray, self.run, self.mark, self.gone = ray, run, mark, False
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for node in job.nodes.values():
            needs = {"CPU": node.spec.cpus, "GPU": node.spec.gpus}
            if not any(all(has.get(name, 0) >= count for name, count in needs.items()) for has in machines):
                ray.shutdown()
                raise ValueError(f"{node.name} wants {needs}; no machine of the cluster has that: change cpus or gpus")
        # What Ray retries would be an attempt that no record tells of.
        self.task = ray.remote(max_retries=0)(run_attempt)

    def start(self, attempt: Path, node: Node) -> tuple[Any, Path]:
        needs = {"num_cpus": node.spec.cpus, "num_gpus": node.spec.gpus}
        options = self.task.options(name=f"{self.run}/{node.name}", scheduling_strategy="SPREAD", **needs)
        return options.remote(str(attempt), package_digest()), attempt

    def poll(self, handle: tuple[Any, Path]) -> str | None:
        reference, _ = handle
        done, _ = self.ray.wait([reference], timeout=0)
        if not done:
            return None
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:  # the task's own words: a folder not shared, another package
            return str(error.cause)
        except self.ray.exceptions.RayError as error:
            # Ray on this very machine: without it nothing can be started, and every call to Ray may wait for ever.
            self.gone = self.gone or isinstance(error, self.ray.exceptions.LocalRayletDiedError)
            return f"Ray lost it: {type(error).__name__}"

    def stop(self, handle: tuple[Any, Path], *, kill: bool) -> None:
        reference, attempt = handle
        attempt.with_name(KILL if kill else STOP).touch()
        if kill or not attempt.with_name("run.json").exists():  # it may not have begun, nor ever begin
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(reference, force=kill)

    def close(self) -> None:
        if self.gone:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        sweep = self.ray.remote(max_retries=0, num_cpus=0)(end_marked)
        machines = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
        sweeps = [sweep.options(scheduling_strategy=OnNode(name, soft=False)).remote(self.mark) for name in machines]
        self.ray.wait(sweeps, num_returns=len(sweeps), timeout=SWEEP_S)
        self.ray.shutdown()


def run_attempt(path: str, digest: str) -> str:
    """Run one attempt on the machine that Ray chose; return the fault of the infrastructure, empty if none."""
    attempt, host = Path(path), socket.gethostname()
    if not attempt.is_file():
        raise FileNotFoundError(f"{host} does not see {path}: keep --runs on a shared file system")
    folder = Path(json.loads(attempt.read_text(encoding="utf-8"))["folder"])
    if not folder.is_dir():
        raise FileNotFoundError(f"{host} does not see {folder}: keep the notebooks on a shared file system")
    if package_digest() != digest:
        raise RuntimeError(f"{host} has another composer_nb than the one that was started")
    process = processes.spawn(attempt)
    stopped = False
    try:
        while (status := process.poll()) is None:
            if attempt.with_name(STOP).exists() and not stopped:
                stopped = True
                process.terminate()
            if attempt.with_name(KILL).exists():
                process.kill()
            time.sleep(TICK_S)
    except KeyboardInterrupt:  # Ray cancelled the task
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    return f"its process on {host} ended by signal {-status}" if status < 0 else ""


def end_marked(mark: str) -> int:
    """End on this machine what lives for the run; return the number of processes."""
    return len(processes.end(lambda: processes.carrying(mark)))
