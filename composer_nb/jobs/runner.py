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

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_nb.harness.files import write_json
from composer_nb.jobs import directory, processes
from composer_nb.jobs.check import check_parameters, notebook_digest
from composer_nb.jobs.directory import ENDED, STOP_S, file_digest, now, read_json
from composer_nb.jobs.file import DIR, JOB, Job, Node, load_job, name_of, references, resolve
from composer_nb.trainer.records.provenance import package_digest
from composer_nb.trainer.services.head import held, last_words

if TYPE_CHECKING:
    from composer_nb.jobs.on_ray import OnRay

TICK_S = 0.1
ANSWERS_S = 5.0


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

    `settings` are those of `--set` (see `load_job`); `ray` is the address of a cluster to run on; `resume` resumes the newest run
    of that name, if there is one, with its settings and these on top. Nodes that fail do not stop those that do not need them.
    SIGTERM and Ctrl-C interrupt all notebooks and wait for them; the state is then `interrupted`. Raises ValueError or
    FileNotFoundError for a wrong job file, for a cluster that does not answer, and for a run that has a live runner. For the main
    thread.
    """
    newest = (runs / name_of(path)).resolve()
    before = read_json(newest / "job.json") if resume else None
    if resume and before is None and (newest / "job.json").exists():
        raise ValueError(f"{newest / 'job.json'} cannot be read: this run is lost; start a new one, without --resume")
    settings = {**(before["settings"] if before is not None else {}), **(settings or {})}
    job = load_job(path, settings)
    with ExitStack() as stack:
        address = None if ray is None else stack.enter_context(_cluster(ray))
        folder = newest if before is not None else directory.create(runs, job.name)
        stack.enter_context(directory.locked(folder))
        directory.settle_all(folder)
        _, mark = stack.enter_context(processes.owned_directory(folder, {}))
        executor: Local | OnRay = Local(limit=job.parallel)
        if address is not None:
            from composer_nb.jobs.on_ray import OnRay

            executor = OnRay(address, folder.name, job, mark)
        runner = Runner(job, folder, executor, say, mark)
        write_json(folder / "job.json", runner.request() | {"settings": settings, "ray": ray}, sync=True)
        return runner.run()


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


@dataclass(kw_only=True)
class Local:
    """Attempts as processes on this machine."""

    limit: int | None
    gone = False

    def start(self, attempt: Path, node: Node) -> subprocess.Popen[bytes]:
        return processes.spawn(attempt)

    def poll(self, handle: subprocess.Popen[bytes]) -> str | None:
        status = handle.poll()
        if status is None:
            return None
        return f"its process ended by signal {-status}" if status < 0 else ""

    def stop(self, handle: subprocess.Popen[bytes], *, kill: bool) -> None:
        handle.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        """Nothing: `processes.owned_directory` ends what the run started here."""


@dataclass(kw_only=True)
class NodeState:
    """State of a node.

    Attributes:
        record: The node's part of run.json: state, attempt, key, error, seconds, outputs, output, and `kept` for one that an
            earlier call of the runner completed.
        handle: The executor's handle of the running attempt.
        begun: When the attempt began to run.
        lost: Number of attempts that the infrastructure lost.
    """

    record: dict[str, Any] = field(default_factory=lambda: {"state": "pending", "attempt": 0})
    handle: Any = None
    begun: float = 0.0
    lost: int = 0

    @property
    def state(self) -> str:
        return str(self.record["state"])

    def take(self, record: Mapping[str, Any]) -> None:
        """Take over what an attempt's record says."""
        self.record |= {
            "state": record["state"],
            "error": record.get("error", ""),
            "seconds": record.get("seconds", 0.0),
        }
        self.record |= {"outputs": record.get("outputs", {}), "digest": record.get("output_sha256", "")}


class Runner:
    """Starts what is ready and watches what runs until nothing is left to do.

    An executor starts an attempt (`start`); returns None while it runs, then the fault of the infrastructure that ended it, or
    empty text (`poll`); asks it to end or kills it (`stop`); and ends what the run left elsewhere (`close`). `limit` is the
    number of attempts at once, None where the executor makes them wait; `gone` says that the executor itself was lost.
    """

    def __init__(self, job: Job, folder: Path, executor: Local | OnRay, say: Callable[[str], None], mark: str) -> None:
        self.job, self.folder, self.executor, self.mark = job, folder, executor, mark
        self.states = {name: NodeState() for name in job.nodes}
        self.begun, self.stopping, self.asked, self.hurry = time.monotonic(), 0.0, False, False
        self.started, self._say, self.package = now(), say, package_digest()
        self.notebooks = {node.notebook: directory.snapshot(node.notebook, folder) for node in job.nodes.values()}

    def request(self) -> dict[str, Any]:
        nodes = {
            name: {"notebook": str(node.notebook), "parameters": dict(node.parameters), "needs": list(node.needs)}
            for name, node in self.job.nodes.items()
        }
        return {"id": self.folder.name, "name": self.job.name, "file": str(self.job.path), "nodes": nodes}

    def run(self) -> dict[str, Any]:
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
                for state in self._running():
                    self.executor.stop(state.handle, kill=True)
                self.executor.close()
        summary = self._summary(over=True)
        with suppress(OSError):  # a full disk
            write_json(self.folder / "run.json", summary, sync=True)
        self.say(f"{self.job.name}: {summary['state']} ({summary['seconds']:.1f} s)")
        if failed := [name for name, state in self.states.items() if state.state == "failed"]:
            self.say(f"composer-nb jobs log {self.folder} {failed[0]} shows why; mend it, then run again with --resume")
        return summary

    def _running(self) -> list[NodeState]:
        return [state for state in self.states.values() if state.handle is not None]

    def _step(self) -> bool:
        """Take one turn; return whether there is more to do."""
        before = [(state.state, state.record["attempt"]) for state in self.states.values()]
        if not self.stopping and (self.asked or (self.folder / "cancel").exists()):
            self.stopping = time.monotonic()
            self.say(f"{'interrupted' if self.asked else 'cancelled'}: the notebooks are given {STOP_S:.0f} s to end")
            for state in self._running():
                self.executor.stop(state.handle, kill=False)
        for name, state in self.states.items():
            if state.handle is not None:
                self._watch(self.job.nodes[name], state)
        for name, state in self.states.items():
            if self._ready(name):
                self._begin(self.job.nodes[name], state)
        if before != [(state.state, state.record["attempt"]) for state in self.states.values()]:
            with suppress(OSError):  # a full disk: the last summary is tried again
                write_json(self.folder / "run.json", self._summary(), sync=True)
        return bool(self._running()) or any(map(self._ready, self.states))

    def _ready(self, name: str) -> bool:
        state, limit = self.states[name], self.executor.limit
        needs_done = all(self.states[need].state == "completed" for need in self.job.nodes[name].needs)
        free = not (self.stopping or self.executor.gone) and (limit is None or len(self._running()) < limit)
        return state.state == "pending" and state.handle is None and needs_done and free

    # One node

    def _begin(self, node: Node, state: NodeState) -> None:
        """Keep a finished attempt under the same key, or start a new one."""
        source, record = self.notebooks[node.notebook], state.record
        try:
            parameters = resolve(dict(node.parameters), self._reference_values(node))
            check_parameters(source, parameters)
        except ValueError as error:  # the type of another node's output
            record |= {"state": "failed", "error": str(error)}
            self.say(f"{node.name}: failed: {error}")
            return
        before = {need: [self.states[need].record.get(n) for n in ("key", "digest")] for need in sorted(node.needs)}
        parts = [notebook_digest(source), parameters, node.spec.outputs, self.package, before]
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        record |= {"key": key, "error": ""}
        paths = directory.attempts(self.folder, node.name)
        if any(self._keep(node, state, path) for path in reversed(paths)):
            return
        number = int(paths[-1].name) + 1 if paths else 1
        path = self.folder / "nodes" / node.name / str(number)
        record |= {"attempt": number, "output": str(path / node.notebook.name)}
        attempt = {
            "source": str(source),
            "output": record["output"],
            "folder": str(node.notebook.parent),
            "parameters": parameters,
            "outputs": node.spec.outputs,
            "timeout_s": node.spec.timeout_s,
            "cell_timeout_s": node.spec.cell_timeout_s,
            "run_mark": self.mark,
            "about": {"run": self.folder.name, "node": node.name, "attempt": number, "key": key},
        }
        try:
            path.mkdir(parents=True)
            write_json(path / "attempt.json", attempt, sync=True)
            state.handle = self.executor.start(path / "attempt.json", node)
        except OSError as error:
            record |= {"state": "failed", "error": f"it could not be started: {error}"}
        self.say(f"{node.name}: {record['error'] or f'attempt {number}'}")

    def _reference_values(self, node: Node) -> dict[tuple[str, str], Any]:
        """Return the values of the node's references."""
        home = self.folder / "nodes"
        values: dict[tuple[str, str], Any] = {(JOB, DIR): str(self.folder), (node.family, DIR): str(home / node.name)}
        for source, output in set(references(dict(node.parameters))) - values.keys():
            members = self.job.family(source)
            outputs = [
                str(home / name) if output == DIR else self.states[name].record["outputs"][output] for name in members
            ]
            values[source, output] = outputs if self.job.nodes[members[0]].spec.grid else outputs[0]
        return values

    def _keep(self, node: Node, state: NodeState, path: Path) -> bool:
        """Return whether an earlier attempt is undamaged and has the node's key; its record is then the node's."""
        record = read_json(path / "run.json") or {}
        if (record.get("state"), record.get("key")) != ("completed", state.record["key"]):
            return False
        if record["package_digest"] != self.package:  # it was edited while the runner ran
            return False
        output = path / record["output"]
        if not output.is_file() or file_digest(output) != record["output_sha256"]:
            self.say(f"{node.name}: attempt {path.name} is damaged: {output.name} is not what was written")
            error = f"{output.name} was damaged afterwards"
            write_json(path / "run.json", {**record, "state": "lost", "error": error}, sync=True)
            return False
        state.take(record)
        state.record |= {"attempt": int(path.name), "kept": True, "output": str(output)}
        self.say(f"{node.name}: kept, attempt {path.name}")
        return True

    def _watch(self, node: Node, state: NodeState) -> None:
        """Follow an attempt that was started."""
        path = self.folder / "nodes" / node.name / str(state.record["attempt"])
        fault = self.executor.poll(state.handle)
        at = time.monotonic()
        if state.state == "pending" and (path / "run.json").exists():  # until then it waits, perhaps for its turn
            state.record["state"], state.begun = "running", at
        elapsed = at - state.begun if state.state == "running" else 0.0
        limit = node.spec.timeout_s or float("inf")
        if fault is None:
            if elapsed > limit + STOP_S or (self.stopping and (self.hurry or at - self.stopping > STOP_S)):
                self.executor.stop(state.handle, kill=True)
            return
        state.handle = None
        record = read_json(path / "run.json")
        if record is None or record.get("state") not in ENDED or (fault and record["state"] == "interrupted"):
            ending = "interrupted" if self.stopping else "timed_out" if elapsed > limit else "lost"
            if not fault and not self.stopping:  # it would end so again
                ending = "failed"
                what = "its process ended before the notebook began" if record is None else "it ended without a record"
                fault = f"{what}: {last_words(path / 'log.txt', 0)}"
            record = directory.settle(path, ending, fault or "it ended without a record")
        state.take(record)
        error = state.record["error"]
        self.say(f"{node.name}: {state.state} ({state.record['seconds']:.1f} s){': ' * bool(error)}{error}")
        if state.state == "lost" and state.lost < node.spec.retries and not (self.stopping or self.executor.gone):
            state.lost += 1
            state.record["state"] = "pending"

    # Records

    def _summary(self, *, over: bool = False) -> dict[str, Any]:
        """Return the contents of run.json."""
        states = {state.state for state in self.states.values()}
        worst = ("failed", "timed_out", "lost", "interrupted")
        state = next((name for name in worst if name in states), "completed") if over else "running"
        if over and self.stopping and states != {"completed"}:
            state = "interrupted"
        nodes = {name: {k: v for k, v in s.record.items() if v or k == "attempt"} for name, s in self.states.items()}
        return {
            "id": self.folder.name, "name": self.job.name, "state": state, "started": self.started,
            "host": socket.gethostname(), "pid": os.getpid(), "seconds": time.monotonic() - self.begun,
            "dir": str(self.folder), "nodes": nodes, **({"ended": now()} if over else {}),
        }  # fmt: skip

    def say(self, line: str) -> None:
        with suppress(OSError):  # the reader is gone; the log below stays
            self._say(line)
        with suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{now()} {line}\n")
