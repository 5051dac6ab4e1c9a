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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer_nb.harness.untrusted import beneath
from composer_nb.jobs import directory, processes
from composer_nb.jobs.check import check_parameters, notebook_digest
from composer_nb.jobs.directory import STOP_S
from composer_nb.jobs.executor import JobExecutor, Local
from composer_nb.jobs.file import DIR, JOB, Job, Node, load_job, name_of, references, resolve
from composer_nb.jobs.records import ENDED, file_digest, now, read_json, reserve, write_record
from composer_nb.trainer.records.provenance import package_digest

TICK_S = 0.1
ANSWERS_S = 5.0


@dataclass(kw_only=True)
class NodeState:
    """State of a node."""

    record: dict[str, Any] = field(default_factory=lambda: {"state": "pending", "attempt": 0})
    """The node's part of run.json: state, attempt, key, error, seconds, outputs, output, and `kept` for one that an earlier call
    of the runner completed."""
    handle: Any = None
    """The executor's handle of the running attempt."""
    begun: float = 0.0
    lost: int = 0
    """Attempts that the infrastructure lost."""

    @property
    def state(self) -> str:
        return str(self.record["state"])


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
        stack.enter_context(reserve(folder))
        # The watcher gives the notebooks, which end by themselves when we are gone, time to save.
        stack.enter_context(processes.guarded(processes.RUN, folder.name, folder, wait_s=STOP_S))
        stack.enter_context(processes.adopting_orphans())
        executor: JobExecutor = Local(run=folder.name, limit=job.parallel)
        if address is not None:
            from composer_nb.jobs.on_ray import OnRay

            executor = OnRay(address, folder.name, job)
        return Runner(job, folder, executor, say, {"settings": settings, "ray": ray}).run()


@contextmanager
def _cluster(ray: str) -> Iterator[str]:
    """Yield the address of the cluster that `ray` names, and keep a head of `composer-nb up` alive meanwhile. Raises ValueError
    where there is none, or where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    from composer_nb.trainer.services.head import held

    with held(ray) as address:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon and port.isdecimal():  # else it is `auto`, and Ray looks for itself
            try:
                socket.create_connection((host, int(port)), ANSWERS_S).close()
            except (OSError, OverflowError) as error:
                raise ValueError(f"--ray {ray}: nothing answers there ({error}); nothing was started") from None
        yield address


class Runner:
    """Starts what is ready and watches what runs until nothing is left to do."""

    def __init__(
        self, job: Job, folder: Path, executor: JobExecutor, say: Callable[[str], None], about: dict[str, Any]
    ) -> None:
        self.job, self.folder, self.executor = job, folder, executor
        self.states = {name: NodeState() for name in job.nodes}
        self.begun, self.stopping, self.asked, self.hurry = time.monotonic(), 0.0, False, False
        self.started = now()
        self._say = say
        self.package = package_digest()
        self.notebooks = {node.notebook: directory.snapshot(node.notebook, folder) for node in job.nodes.values()}
        nodes = {
            name: {"notebook": str(node.notebook), "parameters": dict(node.parameters), "needs": list(node.needs)}
            for name, node in job.nodes.items()
        }
        request = {"id": folder.name, "name": job.name, "file": str(job.path), **about, "nodes": nodes}
        write_record(folder / "job.json", request)

    def run(self) -> dict[str, Any]:
        with self._heeding_signals():
            try:
                while self._step():
                    time.sleep(TICK_S)
            finally:
                for state in self._running():
                    self.executor.stop(state.handle, kill=True)
                self.executor.close()
        summary = self._summary(over=True)
        write_record(self.folder / "run.json", summary)
        self.say(f"{self.job.name}: {summary['state']} ({summary['seconds']:.1f} s)")
        if failed := [name for name, state in self.states.items() if state.state == "failed"]:
            self.say(f"composer-nb jobs log {self.folder} {failed[0]} shows why; mend it, then run again with --resume")
        return summary

    def _running(self) -> list[NodeState]:
        return [state for state in self.states.values() if state.handle is not None]

    def _step(self) -> bool:
        """Take one turn; return whether there is more to do."""
        before = [(state.state, state.record["attempt"]) for state in self.states.values()]
        if self.asked or (self.folder / "cancel").exists():
            self._stop("interrupted" if self.asked else "cancelled")
        for name, state in self.states.items():
            if state.handle is not None:
                self._watch(self.job.nodes[name], state)
        for name, state in self.states.items():
            if self._ready(name):
                self._begin(self.job.nodes[name], state)
        if before != [(state.state, state.record["attempt"]) for state in self.states.values()]:
            with suppress(OSError):  # a full disk: the records of the attempts, and the last summary, are tried again
                write_record(self.folder / "run.json", self._summary())
        return bool(self._running()) or any(map(self._ready, self.states))

    def _ready(self, name: str) -> bool:
        state, limit = self.states[name], self.executor.limit
        needed = all(self.states[need].state == "completed" for need in self.job.nodes[name].needs)
        free = not (self.stopping or self.executor.gone) and (limit is None or len(self._running()) < limit)
        return state.state == "pending" and state.handle is None and needed and free

    # One node

    def _begin(self, node: Node, state: NodeState) -> None:
        """Keep a finished attempt under the same key, or start a new one."""
        record = state.record
        try:
            parameters = resolve(dict(node.parameters), self._found(node))
            check_parameters(self.notebooks[node.notebook], parameters)
        except ValueError as error:  # the type of another node's output
            record |= {"state": "failed", "error": str(error)}
            self.say(f"{node.name}: failed: {error}")
            return
        key = self._key(node, parameters)
        record |= {"key": key, "error": ""}
        if self._keep(node, state):
            return
        number = max(directory.attempts(self.folder, node.name), default=0) + 1
        path = directory.attempt_dir(self.folder, node.name, number)
        record |= {"attempt": number, "output": str(path / node.notebook.name)}
        attempt = {
            "source": str(self.notebooks[node.notebook]),
            "output": record["output"],
            "folder": str(node.notebook.parent),
            "parameters": parameters,
            "outputs": node.spec.outputs,
            "timeout_s": node.spec.timeout_s,
            "cell_timeout_s": node.spec.cell_timeout_s,
            "mark": f"{self.folder.name}/{node.name}/{number}",
            "about": {"run": self.folder.name, "node": node.name, "attempt": number, "key": key},
        }
        try:
            path.mkdir(parents=True)
            write_record(path / "attempt.json", attempt)
            state.handle = self.executor.start(path / "attempt.json", node)
        except OSError as error:
            record |= {"state": "failed", "error": f"it could not be started: {error}"}
        self.say(f"{node.name}: {record['error'] or f'attempt {number}'}")

    def _found(self, node: Node) -> dict[tuple[str, str], Any]:
        """Return the values of the node's references."""
        home = self.folder / "nodes"
        found: dict[tuple[str, str], Any] = {(JOB, DIR): str(self.folder)}
        found[node.family, DIR] = str(beneath(home, node.name))
        for source, output in references(dict(node.parameters)):
            if (source, output) not in found:
                members = self.job.family(source)
                if output == DIR:
                    values: list[Any] = [str(beneath(home, name)) for name in members]
                else:
                    values = [self.states[name].record["outputs"][output] for name in members]
                found[source, output] = values if self.job.nodes[members[0]].spec.grid else values[0]
        return found

    def _key(self, node: Node, parameters: Mapping[str, Any]) -> str:
        before = {need: [self.states[need].record.get(n) for n in ("key", "digest")] for need in sorted(node.needs)}
        parts = [notebook_digest(self.notebooks[node.notebook]), parameters, node.spec.outputs, self.package, before]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _keep(self, node: Node, state: NodeState) -> bool:
        """Return whether an earlier, undamaged attempt has the node's key; its record is then the node's."""
        for number in reversed(directory.attempts(self.folder, node.name)):
            path = directory.attempt_dir(self.folder, node.name, number)
            record = read_json(path / "run.json") or {}
            if record.get("state") != "completed" or record.get("key") != state.record["key"]:
                continue
            if record["package_digest"] != self.package:  # it was edited while the runner ran
                continue
            output = beneath(path, record["output"])
            if not output.is_file() or file_digest(output) != record["output_sha256"]:
                self.say(f"{node.name}: attempt {number} is damaged: {output.name} is not what was written")
                error = f"{output.name} was damaged afterwards"
                write_record(path / "run.json", {**record, "state": "lost", "error": error})
                continue
            _take(state, record)
            state.record |= {"attempt": number, "kept": True, "output": str(output)}
            self.say(f"{node.name}: kept, attempt {number}")
            return True
        return False

    def _watch(self, node: Node, state: NodeState) -> None:
        """Follow an attempt that was started."""
        path = directory.attempt_dir(self.folder, node.name, state.record["attempt"])
        fault = self.executor.poll(state.handle)
        at = time.monotonic()
        if state.state == "pending" and (path / "run.json").exists():  # until then it waits, perhaps for its turn
            state.record["state"], state.begun = "running", at
        taken = at - state.begun if state.state == "running" else 0.0
        limit = node.spec.timeout_s or float("inf")
        if fault is None:
            if taken > limit + STOP_S or (self.stopping and (self.hurry or at - self.stopping > STOP_S)):
                self.executor.stop(state.handle, kill=True)
            return
        state.handle = None
        record = read_json(path / "run.json")
        if record is None or record.get("state") not in ENDED or (fault and record["state"] == "interrupted"):
            ended = "interrupted" if self.stopping else "timed_out" if taken > limit else "lost"
            why = fault or "it ended without a record"
            if record is None and not fault and not self.stopping:  # it would end so again
                from composer_nb.trainer.services.head import last_words

                ended, why = "failed", f"its process ended before the notebook began: {last_words(path / 'log.txt', 0)}"
            record = directory.settle(path, ended, why)
        _take(state, record)
        error = state.record["error"]
        self.say(f"{node.name}: {state.state} ({state.record['seconds']:.1f} s){': ' * bool(error)}{error}")
        if state.state == "lost" and state.lost < node.spec.retries and not (self.stopping or self.executor.gone):
            state.lost += 1
            state.record["state"] = "pending"

    # Signals and records

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """Stop the run on SIGTERM, Ctrl-C and a closed terminal; on a second Ctrl-C at once."""

        def on_signal(number: int, frame: object) -> None:
            self.hurry = self.asked and number == signal.SIGINT
            self.asked = True

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        with processes.handling(dict.fromkeys(numbers, on_signal)):
            yield

    def _stop(self, why: str) -> None:
        if self.stopping:
            return
        self.stopping = time.monotonic()
        self.say(f"{why}: the notebooks are given {STOP_S:.0f} s to end")
        for state in self._running():
            self.executor.stop(state.handle, kill=False)

    def _summary(self, *, over: bool = False) -> dict[str, Any]:
        """Return the contents of run.json."""
        ended = {state.state for state in self.states.values()}
        state = "running"
        if over:
            worst = ("failed", "timed_out", "lost", "interrupted")
            state = next((each for each in worst if each in ended), "completed")
            state = "interrupted" if self.stopping and ended != {"completed"} else state
        nodes = {name: {k: v for k, v in s.record.items() if v or k == "attempt"} for name, s in self.states.items()}
        found: dict[str, Any] = {"id": self.folder.name, "name": self.job.name, "state": state, "started": self.started}
        found |= {"host": socket.gethostname(), "pid": os.getpid(), "seconds": time.monotonic() - self.begun}
        return found | {"dir": str(self.folder), "nodes": nodes} | ({"ended": now()} if over else {})

    def say(self, line: str) -> None:
        with suppress(OSError):  # the reader is gone; the log below stays
            self._say(line)
        with suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{now()} {line}\n")


def _take(state: NodeState, record: Mapping[str, Any]) -> None:
    """Take over what an attempt's record says."""
    state.record |= {"state": record["state"], "error": record.get("error", ""), "seconds": record.get("seconds", 0.0)}
    state.record |= {"outputs": record.get("outputs", {}), "digest": record.get("output_sha256", "")}
