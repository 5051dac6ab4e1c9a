"""Replay: a run's RL steps repeated from its records and compared bit for bit with the original versions.

The log of batches records which rollouts were trained, and in which order. The file of a step holds these rollouts with their
rewards. The hash of a version identifies the result. The trainer starts from the initial weights; nothing is sampled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch

from composer_nb.trainer.prompts import tasks_by_id
from composer_nb.trainer.records.batches import batch_file, load_batch
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import streams_of
from composer_nb.trainer.services.journal import Journal
from composer_nb.trainer.services.services import TrainerService, hinter_of
from composer_nb.trainer.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One repeated step."""

    step: int
    version: int
    was: str
    """Hash of the published version."""
    now: str

    @property
    def same(self) -> bool:
        return self.was == self.now


def replay(
    run: RunDir, settings: Settings, until: int, then: Callable[[TrainerService], None] = lambda trainer: None
) -> Iterator[Replayed]:
    """Repeat steps 1 … `until` of the RL stage and yield each. The run is only read. `then`: called with the trainer at the end.

    Raises ValueError for a run that has not reached `until`, whose RL was the plain loop, which logs no versions, or that needs a
    GPU where there is none.
    """
    if settings.mesh.gpus and not torch.cuda.is_available():
        raise ValueError(f"{run.path}: trained with mesh.device='cuda', and this machine has no GPU to repeat it on")
    with closing(Journal(run)) as journal:
        batches = journal.batches(0, until)
        rates = [journal.rate(train.step) for train in batches]
        hashes = {version: journal.hash_of(version) for version, *_ in run.query("SELECT version FROM version")}
    if not hashes:
        raise ValueError(
            f"{run.path}: its RL was the plain loop (services.on=false), which logs no versions to compare"
        )
    if len(batches) < until or not batch_file(run.path, until - 1).is_file():
        raise ValueError(f"{run.path} has come to step {len(batches)}; --step {until} is not there yet")
    by_id = tasks_by_id(run.path)
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="composer_nb-replay-"))
        # From the start, because the stored checkpoint is of the last steps. Elsewhere, because the store belongs to the run.
        elsewhere = replace(settings, services=replace(settings.services, store=store))
        trainer = stack.enter_context(closing(TrainerService(run.path, elsewhere, from_start=True)))
        hinter = hinter_of(run, settings)
        for train, lr in zip(batches, rates, strict=True):
            groups = load_batch(batch_file(run.path, train.step), by_id)
            metrics = trainer.learn(train.step, lr, streams_of(groups, settings.loss, hinter), [])
            version = metrics["version"]
            yield Replayed(step=train.step + 1, version=version, was=hashes.get(version) or "", now=metrics["hash"])
        then(trainer)
