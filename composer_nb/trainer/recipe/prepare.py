"""The first stages: the tokenizer, and the tasks and demonstrations that a run is made of."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from composer_nb.harness.attempt import Agent
from composer_nb.harness.files import write_json
from composer_nb.harness.tasks.programs import draw_program
from composer_nb.harness.tasks.repairs import buggy_prints, fingerprints, make_tasks
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks
from composer_nb.settings import Settings
from composer_nb.trainer.learning.data import demonstrate, demonstration_row, read_corpus, save_rows
from composer_nb.trainer.models.tokenizer import train_tokenizer
from composer_nb.trainer.recipe.stages import Stages

CHUNK = 512
"""Tasks that are made in one piece: the unit of work and of resumption while data are made."""


def make_tokenizer(s: Stages) -> None:
    """Trains the tokenizer on half of the code and on the text of 1,500 programs that no held-out task uses."""
    with s.stage("tokenizer") as info:
        if info is None or not s.ranks.first:
            return
        corpus = read_corpus(s.settings.data.code)
        rng = Random(f"tokenizer {s.settings.seed}")
        programs = [p for p in (draw_program(rng) for _ in range(1900)) if not p.heldout][:1500]
        texts = [f"fix f.py: {p.spec}\n{p.source}" for p in programs]
        train_tokenizer([*corpus.train[::2], *texts, *texts], s.settings.tokenizer.vocab_size).save(
            str(s.tokenizer_file)
        )
        write_json(s.run.path / "data" / "corpus.json", {"digest": corpus.digest, "files": corpus.names})
        info |= {"files": len(corpus.names), "corpus_digest": corpus.digest}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of the data: `count` tasks of a kind, from a seed of its own."""

    kind: str
    number: int
    count: int
    heldout: bool = False
    mistake_rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number:03d}"


def chunks(settings: Settings) -> list[Chunk]:
    """Every piece of data that a run needs."""
    d = settings.data
    kinds: list[tuple[str, int, bool, float | None]] = [
        ("heldout", d.heldout_tasks, True, None),
        ("tune", d.tune_tasks, True, 0.0),
        ("rl", d.rl_tasks, False, None),
        ("mistaken", d.mistaken_demonstrations, False, d.mistake_rate),
        ("clean", d.demonstrations, False, 0.0),
    ]
    return [
        Chunk(kind, number, min(CHUNK, count - at), heldout, rate)
        for kind, count, heldout, rate in kinds
        for number, at in enumerate(range(0, count, CHUNK))
    ]


def make_data(s: Stages) -> None:
    """Makes tasks and demonstrations, each rank its chunks, and checks that nothing held out leaks into training."""
    with s.stage("data") as info:
        if info is None:
            return
        agent, folder = s.agent(), s.run.path / "data"
        work = chunks(s.settings)[s.ranks.rank :: s.ranks.world]
        for place, chunk in enumerate(work):
            if not (folder / f"{chunk.name}.prints.json").is_file():
                _make_chunk(s, agent, chunk, folder)
            if s.ranks.first and place % 4 == 3:
                s.say(
                    f"data: {(place + 1) / len(work):.0%} of {s.settings.data.demonstrations} demonstrations and more"
                )
        s.ranks.barrier()
        if s.ranks.first:
            info |= _drop_leaks(s, folder)


def _make_chunk(s: Stages, agent: Agent, chunk: Chunk, folder: Path) -> None:
    seed = f"{s.settings.seed} {chunk.name}"
    if chunk.heldout:
        seed = chunk.name  # the same questions for every seed, so that scores compare
    tasks = list(make_tasks(seed, chunk.count, heldout=chunk.heldout, executor=s.sandboxes.functions))
    if chunk.mistake_rate is not None:
        done = demonstrate(tasks, agent, s.sandboxes.functions, s.settings.seed, chunk.mistake_rate)
        rows = [demonstration_row(d.rollout, s.settings.midtrain.context_weight) for d in done]
        save_rows(rows, folder / f"{chunk.name}.npz")
    if chunk.kind in ("heldout", "tune", "rl"):
        save_tasks(tasks, folder / f"{chunk.name}.jsonl")
    write_json(folder / f"{chunk.name}.prints.json", sorted(fingerprints(tasks) | buggy_prints(tasks)))


def _drop_leaks(s: Stages, folder: Path) -> dict[str, Any]:
    """Joins the chunks of tasks; drops held-out tasks whose structure or texts occur in training, and RL tasks that occur
    twice. Raises ValueError when too few remain."""
    training: set[str] = set()
    for path in folder.glob("*.prints.json"):
        if not path.name.startswith(("heldout", "tune")):
            training |= set(json.loads(path.read_text()))
    kept: dict[str, list[Task]] = {}
    seen: set[tuple[str, str]] = set()
    dropped: Counter[str] = Counter()
    for kind in ("heldout", "tune", "rl"):
        kept[kind] = []
        for path in sorted(folder.glob(f"{kind}-*.jsonl")):
            for task in load_tasks(path):
                key = (task.instruction, task.files["f.py"])
                leaked = kind != "rl" and bool(fingerprints([task]) & training)
                dropped[kind] += leaked or key in seen
                if not leaked and key not in seen:
                    kept[kind].append(task)
                seen.add(key)
        if not kept[kind]:
            raise ValueError(f"no {kind} task is left; raise data.{kind}_tasks")
        save_tasks(kept[kind], folder / f"{kind}.jsonl")
    needed = s.settings.rl.steps * s.settings.rl.prompts
    if len(kept["rl"]) < needed:
        raise ValueError(
            f"rl.steps × rl.prompts = {needed} tasks are needed, no task is trained on twice, and only "
            f"{len(kept['rl'])} are there; raise data.rl_tasks or lower rl.steps"
        )
    return {"tasks": {kind: len(tasks) for kind, tasks in kept.items()}, "dropped": dict(dropped)}
