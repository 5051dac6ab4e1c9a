"""The recipe, from nothing to a policy that repairs code, as a sequence of stages that each resume.

    tokenizer → data → midtrain → sft → evaluate (base, midtrained, start) → rl → evaluate (final) → mismatch

Every rank runs this same program. A finished stage is noted in `run.db` and skipped the next time; mid-training, fine-tuning
and RL also resume from their last checkpoint, to the same numbers as if nothing had happened.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from composer_nb.config import Settings
from composer_nb.harness.agent import Agent
from composer_nb.harness.attempt import Attempt
from composer_nb.harness.bench import run_eval, summarise
from composer_nb.harness.execute import CachedExecutor
from composer_nb.harness.policy import Trace
from composer_nb.harness.programs import draw_program
from composer_nb.harness.render import CompactRenderer
from composer_nb.harness.repairs import buggy_prints, fingerprints, make_tasks
from composer_nb.harness.store import save_attempts
from composer_nb.harness.task import Task, load_tasks, save_tasks
from composer_nb.trainer.checkpoint import load_pretrained, save_pretrained
from composer_nb.trainer.data import (
    Row,
    code_rows,
    deal,
    demonstrate,
    demonstration_row,
    load_rows,
    read_corpus,
    save_rows,
)
from composer_nb.trainer.engine import Engine
from composer_nb.trainer.mismatch import measure_mismatch
from composer_nb.trainer.model import Model
from composer_nb.trainer.optimizer import FlatAdamW
from composer_nb.trainer.ranks import Ranks
from composer_nb.trainer.rl import (
    Learner,
    batch_metrics,
    clocked,
    ledger,
    sample_groups,
    score_groups,
    shuffle_rewards,
    to_stream,
)
from composer_nb.trainer.rundir import RunDir, write_json
from composer_nb.trainer.supervised import cross_entropy, share, train_step, trapezoid
from composer_nb.trainer.tokenizer import load_tokenizer, train_tokenizer
from composer_nb.trainer.weights import delta_sizes

CHUNK = 512
"""Tasks that are made in one piece: the unit of work and of resumption while data are made."""


@dataclass(slots=True)
class Stages:
    """What every stage needs: where to write, what was asked, who else works on it, where code runs."""

    run: RunDir
    settings: Settings
    ranks: Ranks
    executor: CachedExecutor
    say: Callable[[str], None]

    def rows(self, kind: str) -> list[Row]:
        """All demonstrations of a kind, in order of chunk."""
        return [row for path in sorted((self.run.path / "data").glob(f"{kind}-*.npz")) for row in load_rows(path)]

    @property
    def tokenizer_file(self) -> Path:
        return self.run.path / "data" / "tokenizer.json"

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file.parent)

    def agent(self) -> Agent:
        return Agent(CompactRenderer(self.tokenizer()), limits=self.settings.limits)

    def engine(self, model: Model, *, seed: int, temperature: float = 1.0, version: int = 0) -> Engine:
        return Engine(
            model,
            stop=CompactRenderer(self.tokenizer()).stop,
            slots=self.settings.engine.slots,
            max_length=self.settings.limits.tokens,
            temperature=temperature,
            seed=seed * 1_000_003 + self.ranks.rank,
            version=version,
        )

    def load(self, name: str) -> Model:
        return load_pretrained(self.run.path / "weights" / name)

    def publish(self, model: Model, name: str) -> None:
        if self.ranks.first:
            save_pretrained(model, self.run.path / "weights" / name, tokenizer=self.tokenizer_file)
        self.ranks.barrier()

    @contextmanager
    def stage(self, name: str) -> Iterator[dict[str, Any] | None]:
        """`with stages.stage(name) as info:` gives None when the stage is complete; else what is put into `info` is noted
        at the end."""
        known = self.ranks.gather(self.run.finished(name))[0]
        if known is not None:
            yield None
            return
        if self.ranks.first:
            self.say(f"{name} …")
        start, info = time.perf_counter(), {}
        yield info
        self.ranks.barrier()
        if self.ranks.first:
            seconds = time.perf_counter() - start + info.pop("seconds_before", 0.0)
            self.run.finish(name, seconds, info)
            self.say(f"{name}: done in {seconds:.0f} s")


def run_recipe(s: Stages) -> None:
    """All stages, in order."""
    make_tokenizer(s)
    make_data(s)
    midtrain(s)
    fine_tune(s)
    for name in ("base", "midtrained", "start"):
        evaluate(s, name)
    reinforce(s)
    evaluate(s, "final")
    compare_numerics(s)


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
    tasks = list(make_tasks(seed, chunk.count, heldout=chunk.heldout, executor=s.executor))
    if chunk.mistake_rate is not None:
        done = demonstrate(tasks, agent, s.executor, s.settings.seed, chunk.mistake_rate)
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


@dataclass(slots=True)
class _Supervised:
    """What differs between mid-training and fine-tuning."""

    stage: str
    steps: int
    lr: Callable[[int], float]
    batches: Iterator[list[Row]]
    balance: float
    clip: float
    weight_decay: float
    watch: dict[str, list[Row]]


def _train(s: Stages, model: Model, plan: _Supervised, info: dict[str, Any], every: int = 250) -> None:
    """The supervised loop, with checkpoints. `plan.batches` yields whole batches, of which this rank takes its part."""
    optimizer = FlatAdamW(model, weight_decay=plan.weight_decay)
    begin, pending = 0, []
    start, before = time.perf_counter(), 0.0
    if found := s.run.checkpoint(plan.stage):
        begin, state, before = found
        optimizer.load(state)
    watch_every = max(1, plan.steps // 10)
    recent: list[dict[str, float]] = []
    for step, rows in enumerate(plan.batches):
        if step == plan.steps:
            break
        if step < begin:
            continue
        mine = share(rows, range(len(rows)), s.ranks)
        metrics = train_step(model, mine, optimizer, s.ranks, lr=plan.lr(step), balance=plan.balance, clip=plan.clip)
        recent.append(metrics)
        last = step + 1 == plan.steps
        if (step + 1) % watch_every == 0 or last:
            point = {name: float(np.nanmean([m[name] for m in recent])) for name in ("loss", "grad_norm", "tokens")}
            agent_losses = [m["agent_loss"] for m in recent if m["agent_loss"] == m["agent_loss"]]
            point["agent_loss"] = float(np.mean(agent_losses)) if agent_losses else None
            point |= {name: cross_entropy(model, rows, s.ranks) for name, rows in plan.watch.items()}
            recent = []
            pending.append((step + 1, point))
            if s.ranks.first:
                s.run.log(plan.stage, step + 1, point)
                shown = ", ".join(f"{k} {v:.3f}" for k, v in point.items() if v is not None and k != "tokens")
                s.say(f"{plan.stage} {step + 1}/{plan.steps}: {shown}")
        if ((step + 1) % every == 0 or last) and s.ranks.first:
            seconds = before + time.perf_counter() - start
            s.run.commit(plan.stage, step + 1, optimizer.state(), pending, seconds=seconds)
            pending = []
    info["seconds_before"] = before


def midtrain(s: Stages) -> None:
    """Continued training from random weights: code first, then clean demonstrations with code mixed in."""
    with s.stage("midtrain") as info:
        if info is None:
            return
        m = s.settings.midtrain
        torch.manual_seed(s.settings.seed)
        model = Model(replace(s.settings.model, vocab_size=s.tokenizer().get_vocab_size()))
        s.publish(model, "base")
        plan = _Supervised(
            stage="midtrain",
            steps=m.steps,
            lr=lambda step: m.lr * trapezoid(step, m.steps, m.warmup, m.constant),
            batches=_midtrain_batches(s),
            balance=m.balance,
            clip=m.clip,
            weight_decay=m.weight_decay,
            watch=_watched(s),
        )
        _train(s, model, plan, info)
        s.publish(model, "midtrained")


def _watched(s: Stages) -> dict[str, list[Row]]:
    corpus = read_corpus(s.settings.data.code)
    code = code_rows(corpus.validation, s.tokenizer(), 1.0, limit=48)
    return {"heldout_agent_loss": s.rows("tune")[:64], "heldout_code_loss": code}


def _midtrain_batches(s: Stages) -> Iterator[list[Row]]:
    m, seed = s.settings.midtrain, s.settings.seed
    texts = list(read_corpus(s.settings.data.code).train)
    Random(f"code {seed}").shuffle(texts)
    first = round(m.code_first * m.steps)
    wanted = m.tokens * (first + m.code_share * (m.steps - first)) / 256
    code = code_rows(texts, s.tokenizer(), m.code_weight, limit=int(wanted) + 8)
    demonstrations = s.rows("clean")
    only_code = deal(code, m.tokens, Random(f"rows {seed}"))
    mixed = deal(demonstrations, round(m.tokens * (1 - m.code_share)), Random(f"demonstrations {seed}"))
    used, debt = 0, 0.0
    for step in range(m.steps):
        if step < first:
            numbers = next(only_code)
            used += len(numbers)
            yield [code[number] for number in numbers]
            continue
        rows = [demonstrations[number] for number in next(mixed)]
        debt += m.tokens * m.code_share
        while debt >= 256:
            rows.append(code[used % len(code)])
            used, debt = used + 1, debt - 256
        yield rows


def fine_tune(s: Stages) -> None:
    """Fine-tuning on demonstrations of an expert that makes mistakes: what RL starts from. Only the agent's tokens count."""
    with s.stage("sft") as info:
        if info is None:
            return
        t = s.settings.sft
        model = s.load("midtrained")
        rows = [Row(row.token_ids, np.where(row.weight == 1.0, row.weight, 0.0)) for row in s.rows("mistaken")]
        dealt = deal(rows, t.tokens, Random(f"sft {s.settings.seed}"))
        plan = _Supervised(
            stage="sft",
            steps=t.steps,
            lr=lambda step: t.lr * trapezoid(step, t.steps, 0.05, 0.05, 0.1),
            batches=([rows[number] for number in numbers] for numbers in dealt),
            balance=0.0,
            clip=t.clip,
            weight_decay=0.0,
            watch={"heldout_agent_loss": s.rows("tune")[:64]},
        )
        _train(s, model, plan, info)
        s.publish(model, "start")


def evaluate(s: Stages, name: str) -> None:
    """Scores published weights on the held-out tasks; the untrained base on a hundred of them, once."""
    with s.stage(f"eval_{name}") as info:
        if info is None:
            return
        tasks = load_tasks(s.run.path / "data" / "heldout.jsonl")
        samples = s.settings.eval.samples
        if name == "base":
            tasks, samples = tasks[:100], 1
        sampled = evaluate_model(s, s.load(name), tasks, samples, 1.0)
        greedy = evaluate_model(s, s.load(name), tasks, 1, 0.0)
        if s.ranks.first:
            save_attempts(s.run.path / "rollouts" / f"eval_{name}.parquet", [*sampled, *greedy])
            info |= summarise(sampled, greedy)
            s.say(
                f"eval {name}: pass@1 {info['pass_at_1']:.3f}, greedy {info['pass_greedy']:.3f}, "
                f"best of {info['k']} {info['best_of_k']:.3f} on {info['n_tasks']} tasks"
            )


def evaluate_model(s: Stages, model: Model, tasks: Sequence[Task], samples: int, temperature: float) -> list[Attempt]:
    """Attempts of a model at tasks, the work dealt over the ranks; the same list on every rank, in order of task."""
    engine = s.engine(model, seed=s.settings.seed + 17, temperature=temperature)
    mine = run_eval(engine, s.agent(), tasks[s.ranks.rank :: s.ranks.world], s.executor, samples)
    parts = s.ranks.gather([_light(done) for done in mine])
    order = {task.id: place for place, task in enumerate(tasks)}
    return sorted((done for part in parts for done in part), key=lambda done: order[done.task.id])


def _light(done: Attempt) -> Attempt:
    segments = tuple(replace(segment, trace=Trace()) for segment in done.rollout.segments)
    return replace(done, rollout=replace(done.rollout, segments=segments))


def reinforce(s: Stages) -> None:
    """Reinforcement learning from `start`; publishes `final` and the version before it."""
    with s.stage("rl") as info:
        if info is None:
            return
        loop = RlLoop(s)
        loop.run()
        info |= {"seconds_before": loop.before, "versions": loop.version, "stopped_early": loop.stopped_early}
        s.publish(loop.learner.model, "final")


class RlLoop:
    """The loop of `rl.py` with its state: where it stands, what it has measured, when it saves."""

    def __init__(self, s: Stages) -> None:
        self.s = s
        settings = s.settings
        model = s.load("start")
        optimizer = FlatAdamW(model, published=torch.bfloat16)
        reference = s.load("start") if settings.loss.beta else None
        self.learner = Learner(model, optimizer, settings.loss, reference, settings.rl.replay)
        tasks = load_tasks(s.run.path / "data" / "rl.jsonl")
        Random(f"rl tasks {settings.seed} {settings.rl_seed}").shuffle(tasks)
        self.tasks = tasks
        self.step, self.before = 0, 0.0
        if found := s.run.checkpoint("rl"):
            self.step, state, self.before = found
            optimizer.load(state)
        self.pending: list[tuple[int, dict[str, Any]]] = []
        self.ledgers: list[tuple[int, dict[str, int]]] = []
        self.start = time.perf_counter()
        self.stopped_early = False

    @property
    def version(self) -> int:
        return self.step * self.s.settings.rl.minibatches

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.start

    @cached_property
    def tune_tasks(self) -> list[Task]:
        return load_tasks(self.s.run.path / "data" / "tune.jsonl")

    def run(self) -> None:
        """Steps until the last one, or until the time is up. Every rank decides the same."""
        rl = self.s.settings.rl
        while self.step < rl.steps:
            self.s.publish(self.learner.model, "before_final")
            if rl.max_seconds and max(self.s.ranks.gather(self.seconds)) > rl.max_seconds:
                self.stopped_early = True
                break
            self.one_step()
            last = self.step == rl.steps
            if rl.evaluate_every and (self.step % rl.evaluate_every == 0 or last):
                self._look()
            if self.step % rl.checkpoint_every == 0 or last:
                self._save()
        self._save()

    def one_step(self) -> None:
        """Sample, grade, score, learn."""
        s, rl, clock = self.s, self.s.settings.rl, {}
        begin = at = time.perf_counter()
        batch = self.tasks[self.step * rl.prompts : (self.step + 1) * rl.prompts]
        engine = s.engine(
            self.learner.model,
            seed=(s.settings.seed * 101 + s.settings.rl_seed) * 10_007 + self.step,
            version=self.version,
        )
        attempts, lost = sample_groups(engine, s.agent(), batch[s.ranks.rank :: s.ranks.world], rl.group, s.executor)
        groups = score_groups(attempts, s.settings.reward, s.settings.loss)
        if rl.shuffle_rewards:
            groups = shuffle_rewards(groups, s.settings.loss, Random(f"shuffle {self.step} {s.ranks.rank}"))
        self._store(groups)
        at = clocked(clock, "sample_s", at)
        mine = [to_stream(scored) for group in groups for scored in group if abs(scored.advantage) > 1e-6]
        streams = [stream for part in s.ranks.gather(mine) for stream in part]
        at = clocked(clock, "wait_s", at)
        metrics = self._learn(streams)
        at = clocked(clock, "train_s", at)
        sums = s.ranks.sums({**batch_metrics(groups), "infra_errors": float(lost), **clock})
        counts = s.ranks.gather(ledger(groups))
        self.step += 1
        self._note(metrics, sums, sum(counts, Counter()), time.perf_counter() - begin)

    def _learn(self, streams: list[Any]) -> dict[str, float]:
        rl = self.s.settings.rl
        if not streams:
            return {}
        return self.learner.learn(
            streams,
            self.s.ranks,
            Random(f"minibatches {self.s.settings.rl_seed} {self.step}"),
            minibatches=rl.minibatches,
            denominator=float(rl.prompts * rl.group * rl.tokens_per_rollout),
            lr=rl.lr * min(1.0, (self.step + 1) / rl.warmup),
            clip=rl.clip,
            budget=rl.microbatch_tokens,
        )

    def _note(self, metrics: dict[str, float], sums: dict[str, float], counts: Counter[str], wall: float) -> None:
        count = sums["samples"]
        point = {
            "reward": sums["reward"] / count,
            "solved": sums["solved"] / count,
            "best_of_group": sums["any_solved"] / sums["groups"],
            "live_groups": sums["live_groups"] / sums["groups"],
            "turns": sums["turns"] / count,
            "tokens": sums["tokens"],
            "sampled": sums["sampled"],
            "samples": count,
            "finished": sums["finished"] / count,
            "invalid_call_rate": sums["invalid"] / max(1.0, sums["turns"]),
            "flagged": sums["flagged"],
            "infra_errors": sums["infra_errors"],
            "version": self.version,
            "staleness": 0,
            **metrics,
            "time": {
                "wall_s": wall,
                **{name: sums[name] / self.s.ranks.world for name in ("sample_s", "wait_s", "train_s")},
            },
        }
        self.pending.append((self.step, point))
        self.ledgers.append((self.step, dict(counts)))
        if self.s.ranks.first:
            self.s.run.log("rl", self.step, point)
            if self.step % 5 == 0:
                recent = [p["solved"] for _, p in self.pending[-5:]]
                self.s.say(
                    f"rl {self.step}/{self.s.settings.rl.steps}: solved {np.mean(recent):.3f}, "
                    f"{point['turns']:.1f} calls, entropy {point.get('entropy', 0):.2f}, {self.seconds:.0f} s"
                )

    def _look(self) -> None:
        """Scores the weights as they are on the tuning tasks."""
        sampled = evaluate_model(self.s, self.learner.model, self.tune_tasks, 1, 1.0)
        greedy = evaluate_model(self.s, self.learner.model, self.tune_tasks, 1, 0.0)
        scores = {
            "tune_pass_at_1": float(np.mean([done.grade.passed for done in sampled])),
            "tune_greedy": float(np.mean([done.grade.passed for done in greedy])),
        }
        self.pending[-1][1].update(scores)
        if self.s.ranks.first:
            self.s.say(
                f"rl {self.step}: on tuning tasks {scores['tune_pass_at_1']:.3f}, greedy {scores['tune_greedy']:.3f}"
            )

    def _save(self) -> None:
        if self.s.ranks.first and self.pending:
            state = self.learner.optimizer.state()
            self.s.run.commit("rl", self.step, state, self.pending, self.ledgers, self.seconds)
        self.pending, self.ledgers = [], []

    def _store(self, groups: Sequence[Sequence[Any]]) -> None:
        everyone = [scored for group in groups for scored in group]
        save_attempts(
            self.s.run.path / "rollouts" / f"rl_{self.step:05d}_{self.s.ranks.rank}.parquet",
            [scored.attempt for scored in everyone],
            {
                "group": [place for place, group in enumerate(groups) for _ in group],
                "reward": [scored.reward.total for scored in everyone],
                "terms": [json.dumps(scored.reward.terms) for scored in everyone],
                "advantage": [scored.advantage for scored in everyone],
            },
        )


def compare_numerics(s: Stages) -> None:
    """Measures, on the final weights, what a bf16 engine does to log-probabilities and what replaying its routes mends; and
    how large a lossless delta between two published versions is."""
    with s.stage("numerics") as info:
        if info is None or not s.ranks.first:
            return
        tasks = load_tasks(s.run.path / "data" / "tune.jsonl")[:48]
        model = s.load("final")
        engine = s.engine(s.load("final").to(torch.bfloat16), seed=s.settings.seed + 29)
        attempts = list(run_eval(engine, s.agent(), tasks, s.executor, 2))
        info["replay"] = measure_mismatch(model, attempts)
        info["weights"] = delta_sizes(s.run.path / "weights" / "before_final", s.run.path / "weights" / "final")
