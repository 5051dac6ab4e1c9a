"""The trainer service as several processes: `TrainerRank`, the same service on a model that is sharded over ranks, and
`TrainerGroup`, their facade. Every call goes to all ranks, and they live and die together.

Ranks must do the same work in the same order, while calls to their actors may overtake each other. So collective calls are
numbered, and each rank follows the numbers (`turn`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.learning.ranks import set_up_process
from composer_nb.trainer.models.checkpoint import side_files
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.checkpoint import load_sharded, published_share, restore, save
from composer_nb.trainer.parallel.mesh import Mesh
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import PATIENCE, Team, join, meeting_place
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.actors import ActorDied, RayActors, require_seen
from composer_nb.trainer.services.services import TrainerService, store_url
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.publisher import BackgroundPublisher, Publisher

# Seconds to wait for the report of a rank's death: when one dies, the others fail too, and may report first.
HEARD_S = 20.0
LOOPBACK = "127.0.0.1"


class TrainerRank(TrainerService):
    """A rank of the trainer. It is uninitialized until `meet` (on the first rank) and `begin` are called."""

    def __init__(self, rank: int, run: Path, settings: Settings) -> None:
        require_seen(run)
        self._rank, self._run, self._settings = rank, RunDir(run), settings
        self._order, self._next = threading.Condition(), 0
        self._place: dist.Store | None = None

    def meet(self) -> str:
        """Return the "host:port" at which the other ranks find this one."""
        local = self._settings.services.address.startswith(LOOPBACK) or not self._settings.services.address
        host = LOOPBACK if local else _own_address()
        self._place = store = meeting_place(host)
        return f"{host}:{store.port}"

    def turn(self, number: int, method: str, *values: Any) -> Any:
        """Execute a call of all ranks with this number, from 0, after all calls with lower numbers."""
        with self._order:
            self._order.wait_for(lambda: self._next == number)
        try:
            return getattr(self, method)(*values)
        finally:
            with self._order:
                self._next += 1
                self._order.notify_all()

    def begin(self, address: str) -> None:
        """Join the others, load the newest checkpoint or the start, and publish these weights."""
        s, run = self._settings, self._run.path
        set_up_process(s.seed, s.matmul)
        host, _, port = address.rpartition(":")
        if host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = self._place or dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)
        if s.mesh.device == "cuda":
            torch.cuda.set_device(0)  # the only one that Ray shows to this process
        join(self._rank, s.trainers, store, s.mesh.device)
        self._ranks = team = Team(Mesh.of(s.mesh, s.trainers), s.mesh.device)
        model = self._load(team)
        self._optimizer = ShardedOptimizer(model, team, s.optimizer, published=torch.bfloat16)
        self._learner = Learner(model, self._optimizer, s.loss, self._load(team) if s.loss.beta else None, s.replay)
        self._aside = [dist.new_group(backend="gloo") for _ in range(2)]
        self.step, self._kept = 0, -1
        if (checkpoint := self._run.pointer("rl")) is not None:
            self.step, folder, _ = checkpoint
            restore(self._optimizer, folder, self._aside[0])
            self._kept = self.step
        self._saving: Future[Any] | None = None
        self._files = side_files(model)
        self.version = self.step * s.rl.minibatches
        url, group = store_url(run, s), self._aside[1]
        self._publisher = Publisher(url, owner="trainer", full_every=s.services.full_every, group=group)
        self._background = BackgroundPublisher(self._publisher)
        self._hand_over()

    def _load(self, team: Team) -> Model:
        model = load_sharded(self._run.path / "weights" / "start", team, self._settings.mesh)
        model.recompute, model.kernels = self._settings.rl.recompute, self._settings.kernels
        return model

    def _hand_over(self) -> None:
        self._newest = published_share(self._learner.model, self._team)
        self._hashed = self._background.publish(self.version, self._newest, self._files)

    @property
    def _team(self) -> Team:
        assert isinstance(self._ranks, Team)
        return self._ranks

    def _hash(self) -> str:
        return self._hashed.result()

    def state(self) -> tuple[int, str]:
        """Begin a checkpoint. Return the number of steps and its folder, which is complete once `saved` returns."""
        self.saved()
        name = f"rl-{self.step:06d}.ranks"
        if self._kept != self.step:  # otherwise it exists, and a resumed run may have started from it
            self._kept = self.step
            self._saving = save(self._optimizer, self._run.path / "checkpoints" / name, self._aside[0])
        return self.step, name

    def saved(self) -> None:
        """Wait until the checkpoint is written. This call is not numbered, because the next batch is learned meanwhile."""
        if self._saving is not None:
            self._saving.result()

    def _weights(self, version: int) -> Mapping[str, Tensor]:
        return self._stored(version)  # a rank has only its part


def _own_address() -> str:
    """Return this node's address in the cluster."""
    import ray

    return str(ray.util.get_node_ip_address())


class TrainerGroup:
    """A `Remote` whose calls are executed by all ranks, in the order of the calls."""

    def __init__(self, actors: RayActors, run: Path, settings: Settings) -> None:
        ranks, gpus = settings.trainers, settings.mesh.gpus
        self._members = actors.make_ranks(TrainerRank, ranks, run, settings, name="trainer", threads=8, gpus=gpus)
        self._numbers = count(1)  # "begin" is the first, whenever it comes
        self._begun: Future[Any] = Future()
        self._members[0].call("meet").add_done_callback(self._met)

    def _met(self, meeting: Future[str]) -> None:
        if (error := meeting.exception()) is not None:
            self._begun.set_exception(error)
        else:
            begun = together([member.call("turn", 0, "begin", meeting.result()) for member in self._members])
            _chain(begun, self._begun.set_result, self._begun)

    def call(self, method: str, *values: Any) -> Future[Any]:
        """Return the first rank's result once all ranks have returned. Raises ActorDied if a rank is gone. `state` returns once
        the checkpoint is written; `tensors` returns those of all ranks."""
        if self._begun.done():
            self._begun.result()
        outer: Future[Any] = Future()
        inner = self._turn(method, *values)
        if method == "state":
            _chain(inner, lambda begun: self._when_saved(begun[0], outer), outer)
        elif method == "tensors":
            _chain(inner, lambda results: outer.set_result(_joined(results)), outer)
        else:
            _chain(inner, lambda results: outer.set_result(results[0]), outer)
        return outer

    def wait(self, method: str, *values: Any) -> Any:
        """Call a method and return its result."""
        self._begun.result()
        return self.call(method, *values).result()

    def kill(self) -> None:
        """End all ranks at once."""
        for member in self._members:
            member.kill()

    def _turn(self, method: str, *values: Any) -> Future[list[Any]]:
        number = next(self._numbers)
        return together([member.call("turn", number, method, *values) for member in self._members])

    def _when_saved(self, begun: Any, outer: Future[Any]) -> None:
        saved = together([member.call("saved") for member in self._members])
        _chain(saved, lambda _: outer.set_result(begun), outer)


def together(futures: Sequence[Future[Any]]) -> Future[list[Any]]:
    """Return a future of all results. It raises as soon as a rank is known to be dead. Another failure may be the first sign of a
    death, so it raises once all have ended or after `HEARD_S`."""
    outer: Future[list[Any]] = Future()
    lock, left, failed = threading.Lock(), len(futures), list[BaseException]()

    def settle(error: BaseException | None) -> None:
        with lock:
            if outer.done():
                return
            if error is None:
                outer.set_result([future.result() for future in futures])
            else:
                outer.set_exception(error)

    def ended(future: Future[Any]) -> None:
        nonlocal left
        error = future.exception()
        with lock:
            left -= 1
            last, first = left == 0, error is not None and not failed
            if error is not None:
                failed.append(error)
        if isinstance(error, ActorDied) or (last and failed):
            settle(error if isinstance(error, ActorDied) else failed[0])
        elif last:
            settle(None)
        elif first:
            timer = threading.Timer(HEARD_S, settle, (error,))
            timer.daemon = True
            timer.start()

    for future in futures:
        future.add_done_callback(ended)
    return outer


def _chain(inner: Future[Any], then: Callable[[Any], None], outer: Future[Any]) -> None:
    """Call `then` with the result of `inner`, or pass its exception to `outer`."""

    def done(future: Future[Any]) -> None:
        if (error := future.exception()) is not None:
            outer.set_exception(error)
        else:
            then(future.result())

    inner.add_done_callback(done)


def _joined(parts: list[tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    """Return the common version of all ranks, and its parts from each."""
    return parts[0][0], {name: tensor for _, tensors in parts for name, tensor in tensors.items()}
