"""Replay: a run's RL steps repeated from its records and compared bit for bit with the original versions.

The log of batches records which rollouts were trained, and in which order. The file of a step holds these rollouts with their
rewards. The hash of a version identifies the result. The trainer starts from the initial weights; nothing is sampled.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_nb.harness.files import write_json
from composer_nb.harness.untrusted import json_of
from composer_nb.trainer.prompts import tasks_by_id
from composer_nb.trainer.recipe.launch import absolute, fork
from composer_nb.trainer.recipe.reader import settings_at
from composer_nb.trainer.records.batches import batch_file, load_batch
from composer_nb.trainer.records.provenance import CAPSULE, capsule
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import streams_of
from composer_nb.trainer.services.journal import Journal
from composer_nb.trainer.services.orchestrator import Orchestrator
from composer_nb.trainer.services.services import hinter_of, rehearsal_of, store_url
from composer_nb.trainer.services.slots import Group
from composer_nb.trainer.services.trainer_ranks import TrainerRank
from composer_nb.trainer.settings import Settings, changed, override
from composer_nb.trainer.versions.manifest import entries_of
from composer_nb.trainer.versions.store import VersionStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One repeated step, with the hash of the published version (`was`) and of this one (`now`), and the first tensor that
    differs, if any and if the store's ledger has its hash."""

    step: int
    version: int
    was: str
    now: str
    first: str = ""

    @property
    def same(self) -> bool:
        return self.was == self.now


def replay(
    run: RunDir, settings: Settings, until: int, then: Callable[[TrainerRank], None] = lambda trainer: None
) -> Iterator[Replayed]:
    """Repeat steps 1 … `until` of the RL stage and yield each. The run is only read. `then`: called with the trainer at the end.

    Raises ValueError for a run that has not reached `until`, whose RL was the plain loop, which logs no versions, for an excerpt,
    and for a run that needs a GPU where there is none.
    """
    if settings.mesh.gpus and not torch.cuda.is_available():
        raise ValueError(f"{run.path}: trained with mesh.device='cuda', and this machine has no GPU to repeat it on")
    if run.excerpt is not None:
        raise ValueError(f"{run.path} is an excerpt, which lacks batches of its run; replay a full run")
    if not settings.services.on:
        raise ValueError(
            f"{run.path}: its RL was the plain loop (services.on=false), which logs no versions to compare"
        )
    with closing(Journal(run)) as journal:
        batches = journal.batches(0, until)
        rates = [journal.rate(train.step) for train in batches]
        hashes = {version: journal.hash_of(version) for version, *_ in run.query("SELECT version FROM version")}
    if len(batches) < until or not batch_file(run.path, until - 1).is_file():
        raise ValueError(f"{run.path} has come to step {len(batches)}; --step {until} is not there yet")
    tasks = tasks_by_id(run.path)
    ledger = {line.version: line.files for line in VersionStore(store_url(run.path, settings)).ledger()}
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="composer_nb-replay-"))
        # From the start, because the stored checkpoint is of the last steps. Elsewhere, because the store belongs to the run.
        replay_settings = replace(settings, services=replace(settings.services, store=store))
        trainer = TrainerRank(0, run.path, replay_settings)
        trainer.begin(sharpness=run.sharpness)  # before it there is nothing to close
        stack.enter_context(closing(trainer))
        hinter, rehearsal = hinter_of(run, settings), rehearsal_of(run, settings)
        for train, lr in zip(batches, rates, strict=True):
            groups = load_batch(batch_file(run.path, train.step), tasks)
            streams = streams_of(groups, settings.loss, hinter)
            metrics = trainer.learn(train.step, lr, streams, [], rehearsed=rehearsal(train.step))
            version, now = metrics["version"], metrics["hash"]
            was, first = hashes.get(version) or "", ""
            if was != now:
                stored_hashes, tensors = ledger.get(version, {}), entries_of(trainer.tensors()[1])
                first = next(
                    (name for name, tensor in tensors.items() if stored_hashes.get(name, tensor.hash) != tensor.hash),
                    "",
                )
            yield Replayed(step=train.step + 1, version=version, was=was, now=now, first=first)
        then(trainer)


def other_origins(run: RunDir, settings: Settings) -> list[str]:
    """Return what of the capsule with which a run's RL began (`provenance.capsule`) is not the same here and now; nothing for a
    run without a capsule."""
    file = run.path / CAPSULE
    stored = json_of(file.read_text(encoding="utf-8")) if file.is_file() else {}
    digests = capsule(run.path, settings.env, settings.user_code)
    return [name for name, digest in digests.items() if stored.get(name, digest) != digest]


# Branches


# Settings that number prompts and versions, or say what a checkpoint looks like.
FIXED = ("rl_seed", "rl.prompts", "rl.minibatches", "curriculum", "mesh", "services.on", "ranks")


def branch(source: RunDir, step: int, changes: Mapping[str, Any], runs: Path, name: str) -> RunDir:
    """Return a new run `runs/name` that goes on after `step` RL steps of `source`, with other settings, ready to be resumed. Step
    0 is the start of RL. Its provenance names the source and the step.

    Raises ValueError for a step that the source has not trained, or whose trainer cannot be made again, and for settings that the
    steps before depend on; at step 0 these are the stages before RL.
    """
    source_settings = settings_after(source, step)
    settings = override(source_settings, changes)
    if step and (fixed := [setting for setting in changed(source_settings, settings) if setting.startswith(FIXED)]):
        raise ValueError(f"{fixed[0]}: cannot change at a step, because steps, prompts and versions are numbered by it")
    if not 0 <= step <= (trained_steps := len(source.steps("rl"))):
        raise ValueError(f"--step {step}: {source.path.name} has trained {trained_steps} steps")
    if step >= settings.rl.steps:
        raise ValueError(f"rl.steps={settings.rl.steps}: nothing is left after step {step}; raise it")
    state = trainer_state(source, source_settings, step) if step else None
    run = fork(source, settings, runs=runs, name=name)
    provenance = json_of((run.path / "provenance.json").read_text()) | {"forked_at_step": step}
    write_json(run.path / "provenance.json", provenance)
    if state is not None:
        for number in range(step):
            for file in source.path.glob(f"rollouts/*_{number:05d}*"):
                shutil.copyfile(file, run.path / "rollouts" / file.name)
        _take_over(source, run, settings, step)
        run.commit("rl", step, state, [])
    return run


def settings_after(source: RunDir, step: int) -> Settings:
    """Return the settings of a run after `step` steps, with what was changed while it was live. Changes that were planned for
    these steps are among them, and planned no more."""
    settings = absolute(settings_at(source, step))
    planned = {at: values for at, values in settings.services.changes.items() if int(at) > step}
    return replace(settings, services=replace(settings.services, changes=planned))


def trainer_state(source: RunDir, settings: Settings, step: int) -> Mapping[str, Tensor]:
    """Return the state of the trainer after `step` steps. Raises ValueError if it is neither kept nor can be made again."""
    if settings.meshed:
        raise ValueError(f"--step {step}: the trainer of a mesh cannot be taken over; give --step 0, the start of RL")
    if (checkpoint := source.checkpoint("rl")) is not None and checkpoint[0] == step:
        return checkpoint[1]
    if not settings.services.on:
        steps = f"0 or {checkpoint[0]}" if checkpoint else "0"
        raise ValueError(
            f"--step {step}: of a plain loop (services.on=false) only its checkpoint is kept: --step {steps}"
        )
    states: list[Any] = []
    for replayed in replay(source, settings, step, lambda trainer: states.append(trainer.state()[1])):
        if not replayed.same:
            raise ValueError(f"--step {step}: step {replayed.step} comes out differently here (composer-nb replay)")
    state: Mapping[str, Tensor] = states[0]
    return state


def _take_over(source: RunDir, run: RunDir, settings: Settings, step: int) -> None:
    """Copy the records of the first steps and, for services, make the orchestrator's state after them."""
    run.take_steps("rl", source.steps("rl")[:step])
    with closing(run.connect()) as db, db:
        rows = source.query("SELECT * FROM ledger WHERE stage = 'rl' AND step BETWEEN 1 AND ?", step)
        db.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", rows)
    if not settings.services.on:
        return
    with closing(Journal(run)) as journal:
        with closing(run.connect()) as db, db:
            for table, column_count in (("batch", 2), ("version", 4)):
                rows = source.query(f"SELECT * FROM {table} WHERE step < ?", step)
                db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * column_count)})", rows)
        batches = journal.batches(0, step)
        trained_slots = {slot for train in batches for slot in train.slots}
        orchestrator = Orchestrator(settings.schedule())
        orchestrator.version = orchestrator.slowest = step
        orchestrator.next_slot = max(trained_slots) + 1
        orchestrator.groups = {
            slot: Group(slot, settings.rl.group) for slot in range(orchestrator.next_slot) if slot not in trained_slots
        }
        orchestrator.books.counts["received_tokens"] = sum(run.ledger().values())
        journal.save(orchestrator.snapshot())
