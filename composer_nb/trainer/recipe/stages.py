"""The objects that all stages of a run share: its directory, settings, ranks and sandboxes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from composer_nb.harness.agent.formats import FORMATS
from composer_nb.harness.attempt import Agent
from composer_nb.harness.environment import Sandboxes, carry, make_agent
from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.learning.data import TokenRow, load_rows
from composer_nb.trainer.learning.optimizer import FlatOptimizer, Optimizer
from composer_nb.trainer.learning.ranks import Ranks, release_memory
from composer_nb.trainer.learning.supervised import StagePlan
from composer_nb.trainer.models.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.models.tokenizer import load_tokenizer
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.services.services import make_engine
from composer_nb.trainer.settings import Settings


@dataclass(slots=True)
class Stages:
    """The directory, settings, ranks and sandboxes of a run whose ranks have a copy of the model each (else `meshed.py`)."""

    run: RunDir
    settings: Settings
    ranks: Ranks
    sandboxes: Sandboxes
    say: Callable[[str], None]

    def rows(self, kind: str) -> list[TokenRow]:
        """Return all demonstrations of a kind, in order of chunk."""
        return [row for path in sorted((self.run.path / "data").glob(f"{kind}-*.npz")) for row in load_rows(path)]

    def tasks(self, kind: str) -> list[Task]:
        """Return the tasks of a kind; an empty list if the run has none."""
        path = self.run.path / "data" / f"{kind}.jsonl"
        return load_tasks(path) if path.is_file() else []

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.run.path / "data", FORMATS[self.settings.env.renderer].tokens)

    def agent(self) -> Agent:
        return make_agent(self.settings.env, self.tokenizer(), self.settings.limits, self.sandboxes)

    def engine(self, model: Model, **options: Any) -> Engine:
        return make_engine(model, self.settings, self.agent().renderer.stop, **options)

    def load(self, name: str) -> Model:
        """Load published weights, whole."""
        model = load_pretrained(self.weights(name)).to(self.settings.mesh.device)
        model.kernels = self.settings.kernels
        return model

    def policy(self, name: str) -> Model:
        """Load published weights with as many positions as an agent may need. Weights from before the long-context phase are
        stretched."""
        model = self.load(name)
        if self.settings.limits.tokens <= model.config.max_position_embeddings:
            return model
        return model.on_positions(model.config.stretched(self.settings.extend.factor))

    def weights(self, name: str) -> Path:
        """Return the folder of published weights."""
        return self.run.path / "weights" / name

    def publish(self, model: Model, name: str) -> None:
        path = self.weights(name)
        self._write(model, path)
        if self.ranks.first:
            carry(path, self.settings.env, self.settings.limits)
        self.ranks.barrier()

    def _write(self, model: Model, path: Path) -> None:
        if self.ranks.first:
            save_pretrained(model, path, dtype=torch.bfloat16)

    # Supervised training, on each rank's copy of the model or on the trainer's mesh

    def divided(self, model: Model) -> Model:
        """Return the model to train: sharded if `mesh.*` is set, else whole."""
        return model

    def trained(self, path: Path) -> Model:
        """Load the model to train, as `divided` returns it."""
        model = self._read(path)
        model.kernels = self.settings.kernels
        return model

    def _read(self, path: Path) -> Model:
        return load_pretrained(path).to(self.settings.mesh.device)

    def optimizer(self, model: Model, weight_decay: float) -> Optimizer:
        return FlatOptimizer(model, self.settings.optimizer, weight_decay=weight_decay)

    def resume(self, plan: StagePlan, optimizer: Optimizer) -> tuple[int, float]:
        """Restore the newest checkpoint of a supervised stage. Return the number of its steps and their seconds."""
        if (saved := self.run.checkpoint(plan.stage)) is None:
            return 0, 0.0
        step, state, seconds = saved
        load_state(plan, optimizer, state)
        return step, seconds

    def commit(self, plan: StagePlan, optimizer: Optimizer, step: int, point: dict[str, Any], seconds: float) -> None:
        """Write a checkpoint of a supervised stage, with its metrics."""
        if self.ranks.first:
            self.run.commit(plan.stage, step, state_of(plan, optimizer), [(step, point)], seconds=seconds)

    def publish_again(self, name: str, again: str) -> None:
        """Publish the weights `name` under the name `again` as well, for a stage that is left out."""
        if self.ranks.first:
            link = self.weights(again)
            link.unlink(missing_ok=True)
            link.symlink_to(name)
        self.ranks.barrier()


def stage(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function of (stages, info, *values) a stage of a run, a function of (stages, *values) that does nothing once the
    stage is complete. `info` is recorded at the end. The stage's name has each value in place of a `{}`."""

    def staged(work: Callable[..., None]) -> Callable[..., None]:
        @wraps(work)
        def run(s: Stages, *values: str) -> None:
            title = name.format(*values)
            if s.ranks.gather(s.run.finished(title))[0] is not None:
                return
            release_memory()
            s.say(f"{title} …")
            start = time.perf_counter()
            info: dict[str, Any] = {}
            work(s, info, *values)
            s.ranks.barrier()
            if s.ranks.first:
                seconds = time.perf_counter() - start + info.pop("seconds_before", 0.0)
                s.run.finish(title, seconds, info)
                s.say(f"{title}: done in {seconds:.0f} s")

        return run

    return staged


def state_of(plan: StagePlan, optimizer: Optimizer) -> dict[str, Any]:
    """Return what a resumed stage needs: the state of the optimizer, and that of a draft head that learns beside the model."""
    return optimizer.state() | (plan.beside.state() if plan.beside else {})


def load_state(plan: StagePlan, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore `state_of`."""
    optimizer.load({name: value for name, value in state.items() if not name.startswith("draft_")})
    if plan.beside:
        plan.beside.load(state)
