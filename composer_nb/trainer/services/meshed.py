"""The trainer's work on a mesh: the part of the model that one rank trains, and the checkpoints that ranks write together.

Imported where there is a mesh: with what this needs, PyTorch imports for seconds.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.learning.learner import Learner
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.checkpoint import load_sharded, published_share, restore, save
from composer_nb.trainer.parallel.mesh import Mesh
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import Team, join
from composer_nb.trainer.services import shards
from composer_nb.trainer.services.services import store_url
from composer_nb.trainer.settings import Settings
from composer_nb.trainer.versions.manifest import PayloadFile
from composer_nb.trainer.versions.store import VersionStore

# Of a group of ranks: steps, the name of its folder, and its files in the store.
RanksCheckpoint = tuple[int, str, Mapping[str, PayloadFile]]


class MeshShare:
    """A rank's share of the model, after `step` batches. `publishers` is the group in which ranks publish together."""

    def __init__(
        self, rank: int, run: Path, settings: Settings, meeting: dist.Store, checkpoint: RanksCheckpoint | None
    ) -> None:
        """Join the other ranks at `meeting`, and load this one's share from a checkpoint or the start. Raises ValueError for a
        checkpoint that is neither in the store nor in the folder."""
        self._rank, self._run, self._settings = rank, run, settings
        s = settings
        self._store = VersionStore(store_url(run, s))
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[dict[str, PayloadFile]] | None = None
        if s.mesh.device == "cuda":
            torch.cuda.set_device(0)  # the only one that Ray shows to this process
        join(rank, s.trainers, meeting, s.mesh.device)
        self.team = Team(Mesh.of(s.mesh, s.trainers), s.mesh.device)
        model = self._load()
        self._optimizer = ShardedOptimizer(model, self.team, s.optimizer, published=torch.bfloat16)
        self.learner = Learner(model, self._optimizer, s.loss, self._load() if s.loss.beta else None, s.replay)
        self._aside = dist.new_group(backend="gloo")
        self.step, self._saved_step = 0, -1
        if checkpoint is not None:
            self._restore(*checkpoint)
        self.publishers = dist.new_group(backend="gloo")

    def _load(self) -> Model:
        model = load_sharded(self._run / "weights" / "start", self.team, self._settings.mesh)
        model.recompute, model.kernels = self._settings.rl.recompute, self._settings.kernels
        return model

    def _restore(self, step: int, name: str, files: Mapping[str, PayloadFile]) -> None:
        folder = beneath(self._run / "checkpoints", name)
        if not files and not (folder / ".metadata").is_file():
            raise ValueError(
                f"{name} is in the run directory, which {socket.gethostname()} does not see: resume where all ranks see it"
            )
        state = self._optimizer.state()
        restore(state, folder, self._aside, partial(shards.fetch_shard, self._store, files, folder))
        self._optimizer.load(state)
        self.step = self._saved_step = step
        for file in files:  # all ranks have read by now
            beneath(folder, file).unlink(missing_ok=True)

    def weights(self) -> Mapping[str, Tensor]:
        return published_share(self.learner.model, self.team)

    def begin_saving(self, step: int) -> str:
        """Begin to write the checkpoint after `step` batches, once the one before is written. Return the name of its folder."""
        self.saved()
        name = f"rl-{step:06d}.ranks"
        if self._saved_step != step:  # otherwise it exists, and a resumed run may have started from it
            self._saved_step = step
            folder = beneath(self._run / "checkpoints", name)
            self._saving = self._writer.submit(self._stored, save(self._optimizer.state(), folder, self._aside), folder)
        return name

    def _stored(self, saving: Future[Any], folder: Path) -> dict[str, PayloadFile]:
        saving.result()
        # All ranks follow one rule, whichever of them see the run directory.
        return shards.put_shards(self._store, folder, self._rank) if self._settings.services.store else {}

    def saved(self) -> dict[str, PayloadFile]:
        """Wait until the checkpoint is written. Return this rank's files of it in the store."""
        return self._saving.result() if self._saving is not None else {}
