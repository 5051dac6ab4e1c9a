"""The loop over a graph: runs its notebooks headless, here or on a Ray cluster, and keeps what is true about it.

runs/jobs/<name>-<time>-<id>/   runs/jobs/<name> links to the newest
  job.json              what was asked: file, settings, nodes with their parameters
  run.json              what became of it, rewritten at each change
  log.txt               what the runner said
  notebooks/            the notebooks as they were when the run began
  nodes/<node>/<n>/     attempt n: the executed notebook, run.json, log.txt, outputs.json

Each attempt is a process of its own (`notebook.py`). A node is completed when an attempt under its key is: a hash of the
notebook's code, the resolved parameters, this package and the completed nodes before it. So `--resume`, or a second look, repeats
what is unfinished, changed or damaged, and nothing else.
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

from composer_nb.jobs import directory, processes
from composer_nb.jobs.check import check_parameters, notebook_digest, package_digest
from composer_nb.jobs.directory import STOP_S
from composer_nb.jobs.executor import Executor, Local
from composer_nb.jobs.file import DIR, JOB, Job, Node, load_job, name_of, references, resolve
from composer_nb.jobs.records import ENDED, file_digest, now, read_json, reserve, write_json

TICK_S = 0.1
ANSWERS_S = 5.0


@dataclass(kw_only=True)
class NodeState:
    """A node as it stands."""

    state: str = "pending"
    key: str = ""
    attempt: int = 0
    lost: int = 0
    kept: bool = False
    """Completed by an earlier call of the runner."""
    error: str = ""
    outputs: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    digest: str = ""
    """Of the executed notebook."""
    handle: Any = None
    begun: float = 0.0

    def told(self) -> dict[str, Any]:
        names = ("state", "attempt", "kept", "error", "seconds", "outputs", "key")
        return {name: getattr(self, name) for name in names if getattr(self, name) or name in ("state", "attempt")}


def run_job(
    path: Path,
    settings: Mapping[str, str] | None = None,
    *,
    runs: Path = Path("runs/jobs"),
    ray: str | None = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Runs the graph in the job file `path` and returns what run.json says.

    `settings` are those of `--set` (see `load_job`); `ray` is the address of a cluster to run on; `resume` goes on with the
    newest run of that name, if there is one, with its settings and these on top. Nodes that fail do not stop those that
    do not need them. SIGTERM and Ctrl-C interrupt all notebooks and wait for them; the state is then `interrupted`. Raises
    ValueError or FileNotFoundError for what is wrong with the file, for a cluster that does not answer, and for a run that
    somebody else is running. For the main thread.
    """
    newest = (runs / name_of(path)).resolve()
    before = read_json(newest / "job.json") if resume else None
    if resume and before is None and (newest / "job.json").exists():
        raise ValueError(f"{newest / 'job.json'} cannot be read: this run is lost; start a new one, without --resume")
    settings = {**(before["settings"] if before is not None else {}), **(settings or {})}
    job = load_job(path, settings)
    if ray is not None:
        answers(ray)
    folder = newest if before is not None else directory.create(runs, job.name)
    with ExitStack() as stack:
        stack.enter_context(directory.locked(folder))
        directory.settle_all(folder)
        stack.enter_context(reserve(folder))
        # The watcher gives the notebooks, which end by themselves when we are gone, time to save.
        stack.enter_context(processes.guarded(processes.RUN, folder.name, folder, wait_s=STOP_S))
        stack.enter_context(processes.adopting_orphans())
        executor = _executor(ray, folder.name, job)
        runner = Runner(job, folder, executor, say, {"settings": settings, "ray": ray})
        return runner.run()


def answers(address: str) -> None:
    """Raises ValueError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto`: Ray looks for itself
    try:
        socket.create_connection((host, int(port)), ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"--ray {address}: nothing answers there ({error}); nothing was started") from None


def _executor(ray: str | None, run: str, job: Job) -> Executor:
    if ray is None:
        return Local(run=run, limit=job.parallel)
    from composer_nb.jobs.on_ray import OnRay

    return OnRay(ray, run, job)


class Runner:
    """The loop: start what is ready, see what ended, until nothing is left to do."""

    def __init__(
        self, job: Job, folder: Path, executor: Executor, say: Callable[[str], None], about: dict[str, Any]
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
        told = {"id": folder.name, "name": job.name, "file": str(job.path), **about, "nodes": nodes}
        write_json(folder / "job.json", told)

    def run(self) -> dict[str, Any]:
        with self._heeding_signals():
            try:
                while self._step():
                    time.sleep(TICK_S)
            finally:
                for state in self.states.values():
                    if state.handle is not None:
                        self.executor.stop(state.handle, kill=True)
                self.executor.close()
        told = self._told(over=True)
        write_json(self.folder / "run.json", told)
        self.say(f"{self.job.name}: {told['state']} ({told['seconds']:.1f} s)")
        return told

    def _step(self) -> bool:
        """One turn; whether there is more to do."""
        before = [(state.state, state.attempt) for state in self.states.values()]
        if self.asked or (self.folder / "cancel").exists():
            self._stop("interrupted" if self.asked else "cancelled")
        for name, state in self.states.items():
            if state.handle is not None:
                self._watch(self.job.nodes[name], state)
        for name, state in self.states.items():
            if state.state == "pending" and state.handle is None and not self.stopping and self._ready(name):
                self._begin(self.job.nodes[name], state)
        if before != [(state.state, state.attempt) for state in self.states.values()]:
            with suppress(OSError):  # a full disk: the records of the attempts, and the last word, are tried again
                write_json(self.folder / "run.json", self._told())
        return any(state.handle is not None for state in self.states.values()) or (
            not self.stopping and any(s.state == "pending" and self._ready(n) for n, s in self.states.items())
        )

    def _ready(self, name: str) -> bool:
        needed = all(self.states[need].state == "completed" for need in self.job.nodes[name].needs)
        running = sum(state.handle is not None for state in self.states.values())
        return needed and not self.executor.gone and (self.executor.limit is None or running < self.executor.limit)

    # One node

    def _begin(self, node: Node, state: NodeState) -> None:
        """Takes over a finished attempt under the same key, or starts a new one."""
        try:
            parameters = resolve(dict(node.parameters), self._found(node))
            check_parameters(self.notebooks[node.notebook], parameters)
        except ValueError as error:  # the type of another node's output
            state.state, state.error = "failed", str(error)
            self.say(f"{node.name}: failed: {error}")
            return
        state.key, state.error = self._key(node, parameters), ""
        if self._take_over(node, state):
            return
        state.attempt = max(directory.attempts(self.folder, node.name), default=0) + 1
        path = directory.attempt_dir(self.folder, node.name, state.attempt)
        try:
            path.mkdir(parents=True)
            write_json(path / "attempt.json", self._attempt(node, state, path, parameters))
            state.handle = self.executor.start(path / "attempt.json", node)
        except OSError as error:
            state.state, state.error = "failed", f"it could not be started: {error}"
        self.say(f"{node.name}: {state.error or f'attempt {state.attempt}'}")

    def _attempt(self, node: Node, state: NodeState, path: Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What `notebook.main` reads."""
        about = {"run": self.folder.name, "node": node.name, "attempt": state.attempt, "key": state.key}
        return {
            "source": str(self.notebooks[node.notebook]),
            "output": str(path / node.notebook.name),
            "folder": str(node.notebook.parent),
            "parameters": parameters,
            "outputs": node.spec.outputs,
            "timeout_s": node.spec.timeout_s,
            "cell_timeout_s": node.spec.cell_timeout_s,
            "mark": f"{self.folder.name}/{node.name}/{state.attempt}",
            "about": about,
        }

    def _found(self, node: Node) -> dict[tuple[str, str], Any]:
        """What the node's references mean now."""
        home = self.folder / "nodes"
        found: dict[tuple[str, str], Any] = {(JOB, DIR): str(self.folder), (node.family, DIR): str(home / node.name)}
        for source, output in references(dict(node.parameters)):
            if (source, output) not in found:
                members = self.job.family(source)
                values = [str(home / n) if output == DIR else self.states[n].outputs[output] for n in members]
                found[source, output] = values if self.job.nodes[members[0]].spec.grid else values[0]
        return found

    def _key(self, node: Node, parameters: Mapping[str, Any]) -> str:
        before = {need: [self.states[need].key, self.states[need].digest] for need in sorted(node.needs)}
        parts = [notebook_digest(self.notebooks[node.notebook]), parameters, node.spec.outputs, self.package, before]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _take_over(self, node: Node, state: NodeState) -> bool:
        """Whether an earlier attempt did this already and is whole."""
        for number in reversed(directory.attempts(self.folder, node.name)):
            path = directory.attempt_dir(self.folder, node.name, number)
            record = read_json(path / "run.json")
            if record is None or record.get("state") != "completed" or record.get("key") != state.key:
                continue
            if record["package_digest"] != self.package:  # it was edited while the runner ran
                continue
            output = path / record["output"]
            if not output.is_file() or file_digest(output) != record["output_sha256"]:
                self.say(f"{node.name}: attempt {number} is damaged: {output.name} is not what was written")
                error = f"{output.name} was damaged afterwards"
                write_json(path / "run.json", {**record, "state": "lost", "error": error})
                continue
            self._take(state, record)
            state.attempt, state.kept = number, True
            self.say(f"{node.name}: kept, attempt {number}")
            return True
        return False

    def _take(self, state: NodeState, record: Mapping[str, Any]) -> None:
        state.state, state.error = record["state"], record.get("error", "")
        state.outputs, state.digest = record.get("outputs", {}), record.get("output_sha256", "")
        state.seconds = record.get("seconds", 0.0)

    def _watch(self, node: Node, state: NodeState) -> None:
        """Looks after an attempt that was started."""
        path = directory.attempt_dir(self.folder, node.name, state.attempt)
        blow = self.executor.poll(state.handle)
        at = time.monotonic()
        if state.state == "pending" and (path / "run.json").exists():  # until then it waits, be it for its turn
            state.state, state.begun = "running", at
        taken = at - state.begun if state.state == "running" else 0.0
        limit = node.spec.timeout_s or float("inf")
        if blow is None:
            if taken > limit + STOP_S or (self.stopping and (self.hurry or at - self.stopping > STOP_S)):
                self.executor.stop(state.handle, kill=True)
            return
        state.handle = None
        record = self._record(path, blow, taken > limit)
        self._take(state, record)
        self.say(f"{node.name}: {state.state} ({state.seconds:.1f} s){': ' * bool(state.error)}{state.error}")
        if state.state == "lost" and state.lost < node.spec.retries and not (self.stopping or self.executor.gone):
            state.lost += 1
            state.state = "pending"

    def _record(self, path: Path, blow: str, late: bool) -> dict[str, Any]:
        """The record of an attempt that ended; made true where the attempt could not do so itself."""
        record = read_json(path / "run.json")
        if record is not None and record.get("state") in ENDED and not (blow and record["state"] == "interrupted"):
            return record
        state = "interrupted" if self.stopping else "timed_out" if late else "lost"
        return directory.settle(path, state, blow or "it ended without a word")

    # Signals and records

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        """SIGTERM, Ctrl-C and a closed terminal stop the run, a second Ctrl-C at once."""

        def on_signal(number: int, frame: object) -> None:
            self.hurry = self.asked and number == signal.SIGINT
            self.asked = True

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, why: str) -> None:
        if self.stopping:
            return
        self.stopping = time.monotonic()
        self.say(f"{why}: the notebooks are given {STOP_S:.0f} s to end")
        for state in self.states.values():
            if state.handle is not None:
                self.executor.stop(state.handle, kill=False)

    def _told(self, *, over: bool = False) -> dict[str, Any]:
        nodes = {name: self._told_of(name) for name in self.states}
        ended = {state.state for state in self.states.values()}
        state = "running"
        if over:
            state = "interrupted" if self.stopping and ended != {"completed"} else _worst(ended)
        told: dict[str, Any] = {"id": self.folder.name, "name": self.job.name, "state": state, "started": self.started}
        told |= {"host": socket.gethostname(), "pid": os.getpid(), "seconds": time.monotonic() - self.begun}
        return told | {"dir": str(self.folder), "nodes": nodes} | ({"ended": now()} if over else {})

    def _told_of(self, name: str) -> dict[str, Any]:
        state, node = self.states[name], self.job.nodes[name]
        told = state.told()
        if state.attempt:
            told["output"] = str(directory.attempt_dir(self.folder, name, state.attempt) / node.notebook.name)
        waits = [need for need in node.needs if self.states[need].state != "completed"]
        if state.state == "pending" and waits:
            told["error"] = f"waits for {', '.join(waits)}"
        return told

    def say(self, line: str) -> None:
        with suppress(OSError):  # whoever read this has gone; the log below stays
            self._say(line)
        with suppress(OSError), (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{now()} {line}\n")


def _worst(states: set[str]) -> str:
    return next((state for state in ("failed", "timed_out", "lost", "interrupted") if state in states), "completed")
