"""The inference service: an engine for rollouts and for users, with the weight versions of a store.

    RL's environments ── exchange ──┐
                                    ├── orders ── one thread: between two steps take them, then a step for all ── engine
    serve's requests ──── start ────┘                ▲
    a store's versions ── update ────────────────────┘  fetched while it decodes, hashed and reported

RL tells it which version to take; `composer-nb serve --follow` takes the newest (`following`).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from composer_nb.harness.agent.shared import Shared
from composer_nb.harness.policy import Completion, ProviderFailure, Request
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.models.checkpoint import empty_model, from_hugging_face, published
from composer_nb.trainer.models.transformer import Model, ModelConfig
from composer_nb.trainer.models.variants import EngineName, as_engine
from composer_nb.trainer.services.relay import RelayedStore
from composer_nb.trainer.versions.manifest import Weights, state_hash
from composer_nb.trainer.versions.receiver import Fetched, Receiver, VersionRule
from composer_nb.trainer.versions.store import StoreError

# A version that was announced is in the store within so long, or the publisher is in trouble.
APPEARS_S = 120.0
# Seconds between two looks for a newer version.
LOOK_S = 1.0
LOG = logging.getLogger(__name__)
# Has something done between two steps of an engine, and waits for it.
Between = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVersion:
    """The version that an engine runs, by its own account.

    Attributes:
        seconds: From the order to the swap.
        paused: Part of these seconds without decoding.
        idle: Share of the time since the last version in which the engine had no turn to decode.
    """

    version: int
    hash: str
    read_bytes: int
    seconds: float
    paused: float
    idle: float = 0.0


def fetch(receiver: Receiver, version: int) -> Fetched:
    """Fetch a version that may still be on its way, from a store that may refuse for a while. Raises TimeoutError when it does
    not appear, WeightFault if it is damaged."""
    deadline, reason = time.monotonic() + APPEARS_S, "see the trainer's log"
    while time.monotonic() < deadline:
        try:
            if receiver.appeared(version):
                return receiver.fetch(version)
        except StoreError as error:
            reason = str(error)
        time.sleep(0.01)
    raise TimeoutError(f"version {version} did not appear within {APPEARS_S:.0f} s; {reason}")


class Updates:
    """Versions of a store as models of one engine."""

    def __init__(
        self,
        url: str | Path,
        name: str,
        config: ModelConfig,
        *,
        kernels: Any = None,
        numerics: EngineName = "float32",
        device: str = "cpu",
    ) -> None:
        """`numerics`: the engine's number format; `device`: where it computes."""
        self.receiver, self.rule = Receiver(RelayedStore(url), name=name), VersionRule()
        # Versions that cannot be used.
        self.left_out = set[int]()
        self.config, self.kernels, self.numerics, self.device = config, kernels, numerics, device

    def wanted(self) -> int | None:
        """Return the version that should run by the rule; None if it cannot be used, or if the store is empty."""
        if (newest := self.receiver.newest()) is None:
            return None
        rule = self.rule
        version = rule.of(newest)
        if version in self.left_out and rule.most < version:
            version = int(rule.most)
        return None if version in self.left_out else version

    def model(self, tensors: Weights) -> Model:
        model = empty_model(self.config)
        model.kernels = self.kernels or model.kernels
        from_hugging_face(model, tensors)
        return model

    def first(self, version: int) -> Model:
        """Return the model that an engine begins with. Raises like `fetch`."""
        fetched = fetch(self.receiver, version)
        model = self.model(fetched.tensors)
        self.first_hash = state_hash(published(model))
        self.receiver.install(fetched)
        return as_engine(model, self.numerics).to(self.device)

    def update(self, engine: Engine, version: int, between: Between, full: Weights | None = None) -> RunningVersion:
        """Fetch a version, swap it in between two steps, and say what runs now. `full` are the version's tensors, for when the
        store's copy cannot be used.

        Raises WeightFault when the version is damaged (what runs is untouched), TimeoutError when it never appears, ValueError
        for the weights of another model, or turns that a synchronous transition waits for too long."""
        start_s = time.perf_counter()
        fetched = fetch(self.receiver, version) if full is None else None
        tensors = full if fetched is None else fetched.tensors
        assert tensors is not None
        trained_model = self.model(tensors)
        model = as_engine(trained_model, self.numerics).to(self.device)
        pause_s = time.perf_counter()
        between(lambda: engine.swap(model, version))
        while engine.version != version:  # a synchronous transition
            if time.perf_counter() - pause_s > APPEARS_S:
                raise ValueError(
                    f"version {version} waits for turns under way since {APPEARS_S:.0f} s: use engine.transition=async"
                )
            time.sleep(0.01)
        end_s = time.perf_counter()
        if fetched is not None:
            self.receiver.install(fetched)
        return RunningVersion(
            version=version,
            hash=state_hash(published(trained_model)),
            read_bytes=fetched.read_bytes if fetched else 0,
            seconds=end_s - start_s,
            paused=end_s - pause_s,
        )


class Inference(Shared):
    """An engine on a thread of its own. RL samples from it, and `serve` puts it behind HTTP."""

    policy: Engine

    def __init__(self, engine: Engine, updates: Updates | None = None, lockstep: bool = False) -> None:
        super().__init__(engine)
        self.updates, self.lockstep = updates, lockstep
        # When the last version was reported, and the idle seconds until then.
        self._told = time.perf_counter(), 0.0
        self._answers: dict[str, SimpleQueue[Future[Completion]]] = {}
        self._under_way: dict[str, set[Future[Completion]]] = {}

    @property
    def version(self) -> int:
        """The version that runs. Raises ProviderFailure if nothing does."""
        self.check()
        return self.policy.version

    def exchange(self, client: str, requests: Sequence[Request]) -> list[Completion | ProviderFailure]:
        """Take requests of a client in another process, and wait until at least one of its turns has ended, if any is under way.
        In lockstep the engine pauses between two calls.

        Raises what the engine raises, and ProviderFailure when it has ended."""
        try:
            return self.advance(*requests) if self.lockstep else self._exchange(client, requests)
        except Exception:
            self.check()
            raise

    def _exchange(self, client: str, requests: Sequence[Request]) -> list[Completion | ProviderFailure]:
        ended, under_way = self._answers.setdefault(client, SimpleQueue()), self._under_way.setdefault(client, set())
        answers = self.start(*requests)
        under_way |= {*answers}
        for answer in answers:
            answer.add_done_callback(ended.put)
        completions: list[Completion | ProviderFailure] = []
        while under_way and not (completions and ended.empty()):
            turn = ended.get()
            under_way.discard(turn)
            if not turn.cancelled():  # it was released
                completions.append(turn.result())
        return completions

    def update(self, version: int, full: Weights | None = None) -> RunningVersion:
        """Take a version, from the store or as its tensors, and say what runs now. Raises like `Updates.update`."""
        assert self.updates is not None
        report = self.updates.update(self.policy, version, self.between, full)
        (last_report_s, idle_before_s), self._told = self._told, (time.perf_counter(), self.idle_s)
        return replace(report, idle=(self._told[1] - idle_before_s) / (self._told[0] - last_report_s))


@contextmanager
def following(service: Inference) -> Iterator[None]:
    """Keep a service at the version that the rule of its updates gives. What cannot be used is logged and left out."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(service, ended), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(service: Inference, ended: threading.Event) -> None:
    """Look for the version that should run, and take it, until `ended` is set."""
    updates, engine, target = service.updates, service.policy, None
    assert updates is not None
    with suppress(StoreError):  # what is reported is not pruned
        updates.receiver.report()
    while not ended.wait(LOOK_S):
        try:
            target, running = updates.wanted(), engine.version
            if target is None or target == running or target < running <= updates.rule.most:
                continue
            service.update(target, updates.receiver.back(target) if target < running else None)
            updates.receiver.report()
        except (StoreError, TimeoutError) as error:
            LOG.warning("version %d goes on: %s", engine.version, error)
        except Exception as error:  # such as damage, or weights of another model: no later look mends that
            LOG.warning("version %d goes on, and %s is left out: %r", engine.version, target, error)
            updates.left_out |= set() if target is None else {target}
