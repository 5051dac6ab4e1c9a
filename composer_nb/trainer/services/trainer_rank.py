"""One rank of a trainer service of several processes: the same service on a model that is sharded over ranks.

Ranks must do the same work in the same order, while calls to their actors may overtake each other. So collective calls are
numbered, and each rank follows the numbers (`turn`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
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
from composer_nb.trainer.services.actors import require_seen
from composer_nb.trainer.services.services import TrainerService, store_url
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.publisher import BackgroundPublisher, Publisher

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
