"""Faults on purpose: a short run of RL by the real services, on threads of this process, in which one thing goes wrong.

    coordinator ── call ──▶ ThreadRemote ── fault(remote, method, values) ──▶ engine, environment worker, trainer

A fault stands where Ray's transport stands otherwise: it carries out the calls of all services, and may lose one, repeat its
answer, or end the service instead.
"""

import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.trainer.recipe.reader import Prompts, prompts
from composer_nb.trainer.records.rundir import RunDir, create
from composer_nb.trainer.services.actors import ActorDied
from composer_nb.trainer.services.coordinator import Coordinator
from composer_nb.trainer.services.orchestrator import Dispatch, Finished
from composer_nb.trainer.settings import from_dict, override, to_dict

SHORT: dict[str, Any] = {
    "services.on": True, "services.engines": 2, "services.ahead": 1, "services.bound": 2, "services.retries": 50,
    "rl.steps": 4, "rl.prompts": 2, "rl.group": 4, "rl.minibatches": 1, "rl.evaluate_every": 0, "rl.max_seconds": 0.0,
    "limits.turns": 4, "ranks": 1,
}  # fmt: skip
"""Settings of a run with a fault."""


def impatient() -> dict[str, Any]:
    """Return settings by which a dispatch without news for six seconds is given up, or for longer on a busy machine."""
    return {"limits.seconds": patience(2.0), "services.hang_s": patience(4.0)}


class ThreadRemote:
    """A service of this process, with as many threads as it takes calls at a time."""

    def __init__(
        self, kind: Callable[..., Any], values: tuple[Any, ...], name: str, threads: int, carry: "Fault"
    ) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._made = self._pool.submit(kind, *values)
        self.name, self.values, self.dead, self._carry = name, values, False, carry

    @property
    def service(self) -> Any:
        return self._made.result()

    def call(self, method: str, *values: Any) -> Future[Any]:
        try:
            return self._pool.submit(self._invoke, method, values)
        except RuntimeError as ended:
            reply: Future[Any] = Future()
            reply.set_exception(ActorDied(str(ended)))
            return reply

    def _invoke(self, method: str, values: tuple[Any, ...]) -> Any:
        self.require_alive()
        result = self._carry(self, method, values)
        self.require_alive()
        return result

    def require_alive(self) -> None:
        if self.dead:
            raise ActorDied(f"{self.name} was killed")

    def kill(self) -> None:
        self.dead = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait([self._made])  # a thread cannot be ended while it is born: it would go on to write, as no process does
        if not self._made.cancelled() and not self._made.exception() and hasattr(self.service, "stop"):
            self.service.stop()


# Carries out a call of a service by name.
Fault = Callable[[ThreadRemote, str, tuple[Any, ...]], Any]


def no_fault(remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
    return getattr(remote.service, method)(*values)


class Threads:
    """Services on threads of this process, in place of Ray's actors."""

    def __init__(self, fault: Fault = no_fault) -> None:
        self.made: dict[str, ThreadRemote] = {}
        self._fault = fault

    def make(self, kind: Callable[..., Any], *values: Any, name: str, threads: int = 1, gpus: int = 0) -> ThreadRemote:
        self.made[name] = ThreadRemote(kind, values, name, threads, self._fault)
        return self.made[name]

    def make_ranks(
        self, kind: Callable[..., Any], count: int, *values: Any, name: str, threads: int, gpus: int = 0
    ) -> list[ThreadRemote]:
        return [self.make(kind, rank, *values, name=f"{name}-{rank}", threads=threads) for rank in range(count)]

    def share(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        for remote in self.made.values():
            remote.kill()


class KilledInSwap:
    """An engine dies when it has fetched, checked and loaded its first new version, and still runs the old one. The third batch
    waits for that, so that there is a run for another engine to take over."""

    def __init__(self) -> None:
        self.victim, self.version = "", -1
        self._died = threading.Event()

    def __call__(self, remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method == "update" and not self.victim:
            self.victim, self.version = remote.name, values[0]
            updates = remote.service.updates
            take = updates.update

            def die(swap: Callable[[], Any]) -> None:
                remote.dead = True
                self._died.set()
                remote.require_alive()

            updates.update = lambda engine, version, between, full: take(engine, version, die, full)
        elif method == "learn" and values[0] >= 2:
            self._died.wait(patience(60.0))
        return no_fault(remote, method, values)


class LostDispatch:
    """The first request to start rollouts gets lost on its way to a worker. `dispatches` are all those of its group."""

    def __init__(self) -> None:
        self.dispatches: list[Dispatch] = []

    def __call__(self, remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        if method == "work":
            start, *others = values
            if start and not self.dispatches:
                self.dispatches.append(start[0][0])
                start = start[1:]
            slots = {dispatch.slot for dispatch in self.dispatches}
            self.dispatches += [dispatch for dispatch, _ in start if dispatch.slot in slots]
            values = start, *others
        return no_fault(remote, method, values)


class DeliveredTwice:
    """A worker's report of a finished rollout arrives, and arrives again with the worker's next answer."""

    def __init__(self) -> None:
        self.repeated = 0
        self._last: dict[str, list[Finished]] = {}

    def __call__(self, remote: ThreadRemote, method: str, values: tuple[Any, ...]) -> Any:
        answer = no_fault(remote, method, values)
        if method != "work":
            return answer
        again = self._last.get(remote.name, [])
        self._last[remote.name] = [report for report in answer if isinstance(report, Finished)]
        self.repeated += len(again)
        return [*answer, *again]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """The record of a run with a fault.

    Attributes:
        starts: The version with which each engine began.
        served: (Engine, version, whether its hash is the trainer's) of each swap, in order.
        trained: (Slot, attempt, member) of all trained rollouts, in order.
        sampled: Tokens of all reports that counted.
        counts: Events by kind, as the orchestrator counted them.
    """

    lines: list[str]
    starts: dict[str, int]
    served: list[tuple[str, int, bool]]
    trained: list[tuple[int, int, int]]
    prompts: Prompts
    ledger: dict[str, int]
    sampled: int
    counts: dict[str, int]
    staleness_max: int

    def trained_of(self, dispatch: Dispatch) -> int:
        """Return the number of trained rollouts of a dispatch."""
        return sum(key[:2] == (dispatch.slot, dispatch.attempt) for key in self.trained)

    @property
    def whole(self) -> bool:
        """Whether each prompt was trained once, and each token is in the ledger."""
        lost = self.prompts.skipped or self.prompts.twice or len(set(self.trained)) < len(self.trained)
        return not lost and sum(self.ledger.values()) == self.sampled


def run_with(fault: Fault, source: RunDir, changes: Mapping[str, Any] = MappingProxyType({})) -> Aftermath:
    """Begin RL from the start of a stored run, with the settings `SHORT` and `changes`, have `fault` carry out all calls, and
    return the record."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        settings = override(from_dict(source.settings()), SHORT | {**changes})
        run = create(Path(folder), "fault")
        for name in ("data", "weights/start"):
            shutil.copytree(source.path / name, run.path / name, dirs_exist_ok=True)
        write_json(run.path / "settings.json", to_dict(settings))
        services, lines = Threads(fault), list[str]()
        try:
            info = Coordinator(run, settings, services, lines.append).go()  # type: ignore[arg-type]
        finally:
            services.close()
        hashes = dict(run.query("SELECT version, hash FROM version"))
        served = run.query("SELECT engine, version, hash FROM served ORDER BY rowid")
        batches = [json.loads(text)["rollouts"] for (text,) in run.query("SELECT train FROM batch ORDER BY step")]
        engines = {name: remote for name, remote in services.made.items() if name.startswith("engine")}
        fates = prompts(run.path)
        assert fates is not None
        return Aftermath(
            lines=lines,
            starts={name: remote.values[2] for name, remote in engines.items()},
            served=[(engine, version, hashes[version] == digest) for engine, version, digest in served],
            trained=[(slot, attempt, member) for batch in batches for slot, attempt, member in batch],
            prompts=fates,
            ledger=run.ledger(),
            sampled=info["sampled"],
            counts=info["counts"],
            staleness_max=max(step["staleness_max"] for step in run.steps("rl")),
        )
