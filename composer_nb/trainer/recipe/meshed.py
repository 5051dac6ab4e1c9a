"""The stages of a run on a mesh: supervised training of a model whose weights the ranks share.

Imported where there is a mesh: with what this needs, PyTorch imports for seconds.
"""

from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from composer_nb.harness.untrusted import beneath
from composer_nb.trainer.learning.optimizer import Optimizer
from composer_nb.trainer.learning.supervised import StagePlan
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.parallel.checkpoint import load_sharded, restore, save, save_sharded
from composer_nb.trainer.parallel.fsdp import on_mesh
from composer_nb.trainer.parallel.optimizer import ShardedOptimizer
from composer_nb.trainer.parallel.team import Team
from composer_nb.trainer.recipe.stages import Stages, load_state, state_of


class MeshStages(Stages):
    """What all stages share, on a mesh. A model of which each rank has all is evaluated, and not trained."""

    ranks: Team

    def divided(self, model: Model) -> Model:
        return on_mesh(model, self.ranks, self.settings.mesh)

    def _read(self, path: Path) -> Model:
        return load_sharded(path, self.ranks, self.settings.mesh)

    def _write(self, model: Model, path: Path) -> None:
        if isinstance(model, FSDPModule):
            save_sharded(model, self.ranks, path)
        else:
            super()._write(model, path)

    def optimizer(self, model: Model, weight_decay: float) -> Optimizer:
        return ShardedOptimizer(model, self.ranks, self.settings.optimizer, weight_decay=weight_decay)

    def resume(self, plan: StagePlan, optimizer: Optimizer) -> tuple[int, float]:
        if (pointer := self.run.pointer(plan.stage)) is None:
            return 0, 0.0
        step, folder, seconds = pointer
        state = state_of(plan, optimizer)
        restore(state, folder)
        load_state(plan, optimizer, state)
        return step, seconds

    def commit(self, plan: StagePlan, optimizer: Optimizer, step: int, point: dict[str, Any], seconds: float) -> None:
        folder = f"{plan.stage}-{step:06d}.ranks"
        save(state_of(plan, optimizer), beneath(self.run.path / "checkpoints", folder)).result()
        self.ranks.barrier()
        if self.ranks.first:
            self.run.commit(plan.stage, step, folder, [(step, point)], seconds=seconds)
