"""The loop over a graph: runs its notebooks headless, here or on a Ray cluster, and records what happened.

runs/jobs/<name>-<time>-<id>/   runs/jobs/<name> links to the newest
  job.json              the request: file, settings, nodes with their parameters
  run.json              a summary, rewritten at each change
  log.txt               what the runner printed
  notebooks/            the notebooks as they were when the run began
  nodes/<node>/<n>/     attempt n: the executed notebook, run.json, log.txt, outputs.json

Each attempt is a process of its own (`notebook.py`). A node is completed when an attempt under its key is: a hash of the
notebook's code, the resolved parameters, this package and the completed nodes before it. So `--resume` repeats what is
unfinished, changed or damaged, and nothing else.
"""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from composer_nb.harness.files import file_digest, point, read_json, write_json
from composer_nb.harness.sandbox.reap import end_writers, owned_directory
from composer_nb.jobs import directory, processes
from composer_nb.jobs.check import check_parameters, notebook_digest
from composer_nb.jobs.directory import ENDED, STOP_S, now
from composer_nb.jobs.file import DIR, JOB, Job, Node, load_job, name_of, references, resolve
from composer_nb.trainer.records.provenance import package_digest
from composer_nb.trainer.services.cluster import attach
from composer_nb.trainer.services.head import held, last_words

TICK_S = 0.1
# What a notebook prints after each cell (`notebook.py`).
PROGRESS = re.compile(r"^cell \d+ of \d+, .*$", re.MULTILINE)
ANSWERS_S = 5.0
# Files beside an attempt on Ray by which its machine is asked to end it.
STOP, KILL = "stop", "kill"
SWEEP_S = 30.0


def run_job(
    path: Path,
    settings: Mapping[str, str] | None = None,
    *,
    runs: Path = Path("runs/jobs"),
    ray: str | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the graph in the job file `path` and return its run.json.

    `settings` are those of `--set` (see `load_job`); `ray` is the address of a cluster to run on, empty for this machine;
    `resume` resumes the newest run of that name, if there is one, where it ran unless `ray` is given, and with its settings and
    these on top. Nodes that fail do not stop those that do not need them.
    SIGTERM and Ctrl-C interrupt all notebooks and wait for them; the state is then `interrupted`. Raises ValueError or
    FileNotFoundError for a wrong job file, for a cluster that does not answer, and for a run that has a live runner. For the main
    thread.
    """
    newest = (runs / name_of(path)).resolve()
    previous_request = read_json(newest / "job.json") if resume else None
    if resume and previous_request is None and (newest / "job.json").exists():
        raise ValueError(f"{newest / 'job.json'} cannot be read: this run is lost; start a new one, without --resume")
    previous = previous_request or {"settings": {}, "ray": None}
    settings, ray = {**previous["settings"], **(settings or {})}, previous["ray"] if ray is None else ray
    job = load_job(path, settings)
    with ExitStack() as stack:
        address = stack.enter_context(_cluster(ray)) if ray else None
        folder = newest if previous_request is not None else directory.create(runs, job.name)
        stack.enter_context(directory.locked(folder))
        directory.settle_all(folder)
        _, run_mark = stack.enter_context(owned_directory(folder, {}))
        executor = Local(job.parallel) if address is None else OnRay(address, folder.name, job, run_mark)
        node_requests = {
            name: {"notebook": str(node.notebook), "parameters": dict(node.parameters), "needs": list(node.needs)}
            for name, node in job.nodes.items()
        }
        request = {"id": folder.name, "name": job.name, "file": str(job.path), "settings": settings, "ray": ray}
        write_json(folder / "job.json", request | {"nodes": node_requests}, sync=True)
        if previous_request is None:  # now that it can be resumed
            point(runs / job.name, folder)
        return Runner(job, folder, executor, say, run_mark).run()


@contextmanager
def _cluster(ray: str) -> Iterator[str]:
    """Yield the address of the cluster that `ray` names, and keep a head of `composer-nb up` alive meanwhile. Raises ValueError
    where there is none, or where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    with held(ray) as address:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # else it is `auto`, and Ray looks for itself
            try:
                socket.create_connection((host, int(port)), ANSWERS_S).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"--ray {ray}: nothing answers there ({error}); nothing was started") from None
        yield address


class Local:
    """Attempts as processes on this machine, which `owned_directory` ends with the run."""

    def __init__(self, limit: int) -> None:
        self.limit, self.gone = limit, False

    def start(self, attempt_file: Path, node: Node) -> subprocess.Popen[bytes]:
        return processes.spawn(attempt_file)

    def poll(self, handle: subprocess.Popen[bytes]) -> str | None:
        status = handle.poll()
        return f"its process ended by signal {-status}" if status and status < 0 else None if status is None else ""

    def stop(self, handle: subprocess.Popen[bytes], *, kill: bool) -> None:
        handle.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None: ...


class OnRay:
    """Attempts as Ray tasks; Ray's resources decide how many run at once."""

    def __init__(self, address: str, run: str, job: Job, mark: str) -> None:
        """Raise ValueError where Ray is not installed, there is no cluster, or no machine of it is large enough."""
        try:
            attach(address, run)
            import ray
        except ImportError:
            raise ValueError("--ray: Ray is not installed here; pip install ray") from None
        except ConnectionError as error:
            raise ValueError(f"--ray: {error}") from None
        self.ray, self.run, self.mark, self.limit, self.gone = ray, run, mark, None, False
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for node in job.nodes.values():
            needs = {"CPU": node.spec.cpus, "GPU": node.spec.gpus}
            if not any(all(free.get(name, 0) >= amount for name, amount in needs.items()) for free in machines):
                ray.shutdown()
                raise ValueError(f"{node.name} wants {needs}; no machine of the cluster has that: change cpus or gpus")
        # What Ray retries would be an attempt that no record tells of.
        self.task = ray.remote(max_retries=0)(run_attempt)

    def start(self, attempt_file: Path, node: Node) -> tuple[Any, Path]:
        resources = {"num_cpus": node.spec.cpus, "num_gpus": node.spec.gpus}
        options = self.task.options(name=f"{self.run}/{node.name}", scheduling_strategy="SPREAD", **resources)
        return options.remote(str(attempt_file), package_digest()), attempt_file

    def poll(self, handle: tuple[Any, Path]) -> str | None:
        reference, _ = handle
        ready, _ = self.ray.wait([reference], timeout=0)
        if not ready:
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
        reference, attempt_file = handle
        attempt_file.with_name(KILL if kill else STOP).touch()
        if kill or not attempt_file.with_name("run.json").exists():  # it may not have begun, nor ever begin
            with suppress(self.ray.exceptions.RayError):
                self.ray.cancel(reference, force=kill)

    def close(self) -> None:
        if self.gone:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        sweep = self.ray.remote(max_retries=0, num_cpus=0)(end_writers)
        node_ids = [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]
        sweeps = [sweep.options(scheduling_strategy=OnNode(node, soft=False)).remote(self.mark) for node in node_ids]
        self.ray.wait(sweeps, num_returns=len(sweeps), timeout=SWEEP_S)
        self.ray.shutdown()


def run_attempt(attempt_path: str, expected_digest: str) -> str:
    """Run one attempt on the machine that Ray chose; return the fault of the infrastructure, empty if none. Raises
    FileNotFoundError for a folder that this machine does not see, and RuntimeError for another composer_nb than the one of digest
    `expected_digest`."""
    attempt_file, host = Path(attempt_path), socket.gethostname()
    if not attempt_file.is_file():
        raise FileNotFoundError(f"{host} does not see {attempt_path}: keep --runs on a shared file system")
    notebook_folder = Path(json.loads(attempt_file.read_text(encoding="utf-8"))["folder"])
    if not notebook_folder.is_dir():
        raise FileNotFoundError(f"{host} does not see {notebook_folder}: keep the notebooks on a shared file system")
    if package_digest() != expected_digest:
        raise RuntimeError(f"{host} has another composer_nb than the one that was started")
    process, is_terminated = processes.spawn(attempt_file), False
    try:
        while (return_code := process.poll()) is None:
            if attempt_file.with_name(STOP).exists() and not is_terminated:
                is_terminated = True
                process.terminate()
            if attempt_file.with_name(KILL).exists():
                process.kill()
            time.sleep(TICK_S)
    except KeyboardInterrupt:  # Ray cancelled the task
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    return f"its process on {host} ended by signal {-return_code}" if return_code < 0 else ""


class Runner:
    """Starts what is ready and watches what runs until nothing is left to do.

    An executor starts an attempt (`start`); returns None while it runs, then the fault of the infrastructure that ended it, or
    empty text (`poll`); asks it to end or kills it (`stop`); and ends what the run left elsewhere (`close`). `limit` is the
    number of attempts at once, None where the executor makes them wait; `gone` says that the executor itself was lost.

    Attributes:
        nodes: The nodes' parts of run.json: state, attempt, key, error, seconds, outputs, output, and `kept` for one that an
            earlier call of the runner completed.
        handles: The executor's handles of the running attempts.
        begun: When their notebooks began to run.
        losses: Attempts of each node that the infrastructure lost.
        log_sizes: Bytes of the log of each node's attempt that progress was read from.
    """

    def __init__(self, job: Job, folder: Path, executor: Local | OnRay, say: Callable[[str], None], mark: str) -> None:
        self.job, self.folder, self.executor, self.mark = job, folder, executor, mark
        self.nodes: dict[str, dict[str, Any]] = {name: {"state": "pending", "attempt": 0} for name in job.nodes}
        self.handles, self.begun, self.losses = dict[str, Any](), dict[str, float](), Counter[str]()
        self.log_sizes = Counter[str]()
        self.clock, self.stopping, self.asked, self.hurry = time.monotonic(), 0.0, False, False
        self.started, self._say, self.package = now(), say, package_digest()
        self.notebooks = {node.notebook: directory.snapshot(node.notebook, folder) for node in job.nodes.values()}

    def run(self) -> dict[str, Any]:
        """Run until nothing is left to do or a signal ends the run; return the final run.json."""

        def on_signal(number: int, frame: object) -> None:
            """Stop the run; on a second Ctrl-C at once."""
            self.hurry = self.asked and number == signal.SIGINT
            self.asked = True

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        with processes.handling(dict.fromkeys(numbers, on_signal)):
            try:
                while self._step():
                    time.sleep(TICK_S)
            finally:
                for handle in self.handles.values():
                    self.executor.stop(handle, kill=True)
                self.executor.close()
        summary = self._save(is_over=True)
        self.say(f"{self.job.name}: {summary['state']} ({summary['seconds']:.1f} s)")
        if failed := [name for name, node in self.nodes.items() if node["state"] == "failed"]:
            self.say(f"composer-nb jobs log {self.folder} {failed[0]} shows why; mend it, then run again with --resume")
        return summary

    def _step(self) -> bool:
        """Take one turn; return whether there is more to do."""
        states_before = [(node["state"], node["attempt"]) for node in self.nodes.values()]
        if not self.stopping and (self.asked or (self.folder / "cancel").exists()):
            self.stopping = time.monotonic()
            self.say(f"{'interrupted' if self.asked else 'cancelled'}: the notebooks are given {STOP_S:.0f} s to end")
            for handle in self.handles.values():
                self.executor.stop(handle, kill=False)
        for name in [*self.handles]:
            self._watch(self.job.nodes[name], self.nodes[name])
        for name, node in self.job.nodes.items():
            if self._ready(name):
                self._begin(node, self.nodes[name])
        if states_before != [(node["state"], node["attempt"]) for node in self.nodes.values()]:
            self._save()
        return bool(self.handles) or any(map(self._ready, self.nodes))

    def _ready(self, name: str) -> bool:
        if self.nodes[name]["state"] != "pending" or name in self.handles or self.stopping or self.executor.gone:
            return False
        room = self.executor.limit is None or len(self.handles) < self.executor.limit
        return room and all(self.nodes[need]["state"] == "completed" for need in self.job.nodes[name].needs)

    def _begin(self, node: Node, record: dict[str, Any]) -> None:
        """Keep a finished attempt under the same key, or start a new one; a wrong parameter, or an attempt that cannot be
        started, fails the node."""
        notebook_copy = self.notebooks[node.notebook]
        try:
            parameters = check_parameters(notebook_copy, resolve(dict(node.parameters), self._reference_values(node)))
        except ValueError as error:  # the type of another node's output
            record |= {"state": "failed", "error": str(error)}
            self.say(f"{node.name}: failed: {error}")
            return
        dependency_keys = {need: [self.nodes[need].get(n) for n in ("key", "digest")] for need in sorted(node.needs)}
        key_parts = [notebook_digest(notebook_copy), parameters, node.spec.outputs, self.package, dependency_keys]
        key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()
        record |= {"key": key, "error": ""}
        earlier_folders = directory.attempts(self.folder, node.name)
        if any(self._keep(node, record, attempt_folder) for attempt_folder in reversed(earlier_folders)):
            return
        attempt_number = int(earlier_folders[-1].name) + 1 if earlier_folders else 1
        attempt_folder = self.folder / "nodes" / node.name / str(attempt_number)
        record |= {"attempt": attempt_number, "output": str(attempt_folder / node.notebook.name)}
        attempt_arguments = {
            "source": str(notebook_copy), "output": record["output"], "folder": str(node.notebook.parent),
            "parameters": parameters, "outputs": node.spec.outputs, "timeout_s": node.spec.timeout_s,
            "cell_timeout_s": node.spec.cell_timeout_s, "run_mark": self.mark,
            "about": {"run": self.folder.name, "node": node.name, "attempt": attempt_number, "key": key},
        }  # fmt: skip
        try:
            attempt_folder.mkdir(parents=True)
            write_json(attempt_folder / "attempt.json", attempt_arguments, sync=True)
            self.handles[node.name] = self.executor.start(attempt_folder / "attempt.json", node)
            self.log_sizes[node.name] = 0
        except OSError as error:
            record |= {"state": "failed", "error": f"it could not be started: {error}"}
        self.say(f"{node.name}: {record['error'] or f'attempt {attempt_number}'}")

    def _reference_values(self, node: Node) -> dict[tuple[str, str], Any]:
        """Return the values of the node's references."""
        folder = self.folder / "nodes"
        values: dict[tuple[str, str], Any] = {(JOB, DIR): str(self.folder), (node.family, DIR): str(folder / node.name)}
        for family, output in set(references(dict(node.parameters))) - values.keys():
            member_names = [other.name for other in self.job.nodes.values() if other.family == family]
            values_of_grid = [
                str(folder / name) if output == DIR else self.nodes[name]["outputs"][output] for name in member_names
            ]
            values[family, output] = values_of_grid if self.job.nodes[member_names[0]].spec.grid else values_of_grid[0]
        return values

    def _keep(self, node: Node, record: dict[str, Any], attempt_folder: Path) -> bool:
        """Take over an earlier attempt into `record` if it is completed, undamaged and has the node's key; mark a damaged one as
        lost. Return whether it was taken over."""
        attempt = read_json(attempt_folder / "run.json") or {}
        identity = (attempt.get("state"), attempt.get("key"), attempt.get("package_digest"))
        if identity != ("completed", record["key"], self.package):  # the package may be edited while the runner runs
            return False
        output = attempt_folder / attempt["output"]
        if not output.is_file() or file_digest(output) != attempt["output_sha256"]:
            self.say(f"{node.name}: attempt {attempt_folder.name} is damaged: {output.name} is not what was written")
            error = f"{output.name} was damaged afterwards"
            write_json(attempt_folder / "run.json", {**attempt, "state": "lost", "error": error}, sync=True)
            return False
        record |= _end_of(attempt) | {"attempt": int(attempt_folder.name), "kept": True, "output": str(output)}
        self.say(f"{node.name}: kept, attempt {attempt_folder.name}")
        return True

    def _watch(self, node: Node, record: dict[str, Any]) -> None:
        """Follow an attempt that was started: note when its notebook begins, kill it after its time limit, and take over its
        record when it has ended. A lost attempt makes the node pending again, `retries` times."""
        attempt_folder, handle, now_s = Path(record["output"]).parent, self.handles[node.name], time.monotonic()
        fault = self.executor.poll(handle)
        # Until then it waits, perhaps for its turn.
        if record["state"] == "pending" and (attempt_folder / "run.json").exists():
            record["state"], self.begun[node.name] = "running", now_s
        elapsed = now_s - self.begun[node.name] if record["state"] == "running" else 0.0
        timeout_s = node.spec.timeout_s or float("inf")
        if fault is None:
            self._report_progress(node.name, attempt_folder / "log.txt")
            if elapsed > timeout_s + STOP_S or (self.stopping and (self.hurry or now_s - self.stopping > STOP_S)):
                self.executor.stop(handle, kill=True)
            return
        del self.handles[node.name]
        attempt = read_json(attempt_folder / "run.json")
        if attempt is None or attempt.get("state") not in ENDED or (fault and attempt["state"] == "interrupted"):
            end_state = "interrupted" if self.stopping else "timed_out" if elapsed > timeout_s else "lost"
            if not fault and not self.stopping:  # it would end so again
                end_state = "failed"
                reason = "it ended without a record" if attempt else "its process ended before the notebook began"
                fault = f"{reason}: {last_words(attempt_folder / 'log.txt', 0)}"
            attempt = directory.settle(attempt_folder, end_state, fault or "it ended without a record")
        record |= _end_of(attempt)
        error = record["error"]
        self.say(f"{node.name}: {record['state']} ({record['seconds']:.1f} s){': ' * bool(error)}{error}")
        if record["state"] == "lost" and not (self.stopping or self.executor.gone):
            self.losses[node.name] += 1
            if self.losses[node.name] <= node.spec.retries:
                record["state"] = "pending"

    def _report_progress(self, name: str, log: Path) -> None:
        """Say which cell a node has ended, with its time and value."""
        if not log.is_file() or (size := log.stat().st_size) == self.log_sizes[name]:
            return
        with log.open("rb") as file:
            file.seek(self.log_sizes[name])
            lines = PROGRESS.findall(file.read().decode("utf-8", "replace"))
        self.log_sizes[name] = size
        if lines:
            self.say(f"{name}: {lines[-1]}")

    # Records

    def _save(self, *, is_over: bool = False) -> dict[str, Any]:
        """Write run.json and return it."""
        states = {node["state"] for node in self.nodes.values()}
        states_worst_first = ("failed", "timed_out", "lost", "interrupted")
        otherwise = "lost" if "pending" in states else "completed"  # the executor is gone: nothing more can be started
        state = next((name for name in states_worst_first if name in states), otherwise) if is_over else "running"
        if is_over and self.stopping and states != {"completed"}:
            state = "interrupted"
        nodes = {name: {k: v for k, v in node.items() if v or k == "attempt"} for name, node in self.nodes.items()}
        summary = {
            "id": self.folder.name, "name": self.job.name, "state": state, "started": self.started,
            "host": socket.gethostname(), "pid": os.getpid(), "seconds": time.monotonic() - self.clock,
            "dir": str(self.folder), "nodes": nodes, **({"ended": now()} if is_over else {}),
        }  # fmt: skip
        with suppress(OSError):  # a full disk: the last summary is tried again
            write_json(self.folder / "run.json", summary, sync=True)
        return summary

    def say(self, line: str) -> None:
        with suppress(OSError):  # the reader is gone; the log below stays
            self._say(line)
        with suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{now()} {line}\n")


def _end_of(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record of an attempt says about its node."""
    state, digest = attempt["state"], attempt.get("output_sha256", "")
    defaults = {"error": "", "seconds": 0.0, "outputs": {}}
    return {"state": state, "digest": digest, **{key: attempt.get(key, value) for key, value in defaults.items()}}
