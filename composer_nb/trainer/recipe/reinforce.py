"""The RL stage: the step of `rl.py` in a loop that measures, looks, saves and resumes."""

from __future__ import annotations

import time
from collections import Counter
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch

from composer_nb.harness.tasks.task import Task, load_tasks
from composer_nb.trainer.learning.muon import make_optimizer
from composer_nb.trainer.models.variants import as_engine
from composer_nb.trainer.recipe.evaluate import evaluate_model
from composer_nb.trainer.recipe.stages import Stages
from composer_nb.trainer.records.batches import batch_file, save_batch
from composer_nb.trainer.rl import (
    Learner,
    batch_metrics,
    clocked,
    ledger,
    sample_groups,
    score_groups,
    shuffle_rewards,
    step_point,
    to_stream,
    trains,
)
from composer_nb.trainer.services.environments import prompt_order


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
        model.recompute = settings.rl.recompute
        optimizer = make_optimizer(
            model, settings.optimizer, published=torch.bfloat16, scale_rate=settings.rl.scale_rate
        )
        reference = s.load("start") if settings.loss.beta else None
        self.learner = Learner(model, optimizer, settings.loss, reference, settings.replay)
        self.tasks = prompt_order(s.run.path / "data" / "rl.jsonl", f"{settings.seed} {settings.rl_seed}")
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
            seconds = max(self.s.ranks.gather(self.seconds))
            if rl.max_seconds and seconds > rl.max_seconds:
                self.stopped_early = True
                break
            self.one_step(rl.rate(self.step, seconds))
            last = self.step == rl.steps
            if rl.evaluate_every and self.step % rl.evaluate_every == 0 and not last:
                self._look()
            if self.s.ranks.first:
                self.s.run.log("rl", *self.pending[-1])
            if self.step % rl.checkpoint_every == 0 or last:
                self._save()
        self._save()

    def one_step(self, lr: float) -> None:
        """Sample, grade, score, learn."""
        s, rl = self.s, self.s.settings.rl
        clock: dict[str, float] = {}
        begin = at = time.perf_counter()
        slots = range(self.step * rl.prompts, (self.step + 1) * rl.prompts)[s.ranks.rank :: s.ranks.world]
        sampler = as_engine(self.learner.model, s.settings.engine.numerics, s.settings.engine.batch_invariant)
        engine = s.engine(sampler, seed=s.rl_sampling_seed, version=self.version)
        attempts, lost = sample_groups(
            engine, s.agent(), {slot: self.tasks[slot] for slot in slots}, rl.group, s.executor
        )
        groups = score_groups(attempts, s.settings.reward, s.settings.loss)
        if rl.shuffle_rewards:
            groups = shuffle_rewards(groups, s.settings.loss, Random(f"shuffle {self.step} {s.ranks.rank}"))
        save_batch(batch_file(s.run.path, self.step, s.ranks.rank), groups)
        at = clocked(clock, "sample_s", at)
        mine = [to_stream(scored) for group in groups for scored in group if trains(scored, s.settings.loss)]
        streams = [stream for part in s.ranks.gather(mine) for stream in part]
        at = clocked(clock, "wait_s", at)
        if streams or not self.step:
            s.publish(self.learner.model, "before_final")
        metrics = self._learn(streams, lr)
        at = clocked(clock, "train_s", at)
        sums = s.ranks.sums({**batch_metrics(groups), "infra_errors": float(lost), **clock})
        counts = s.ranks.gather(ledger(groups, s.settings.loss))
        self.step += 1
        self._note(metrics, sums, sum(counts, Counter()), time.perf_counter() - begin)

    def _learn(self, streams: list[Any], lr: float) -> dict[str, float]:
        rl = self.s.settings.rl
        return self.learner.learn(
            streams,
            self.s.ranks,
            Random(f"minibatches {self.s.settings.rl_seed} {self.step}"),
            minibatches=rl.minibatches,
            denominator=rl.denominator(self.s.settings.loss),
            lr=lr,
            clip=rl.clip,
            budget=rl.microbatch_tokens,
        )

    def _note(self, metrics: dict[str, float], sums: dict[str, float], counts: Counter[str], wall: float) -> None:
        point = {
            **step_point(sums),
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
        if self.s.ranks.first and self.step % 5 == 0:
            recent = [p["solved"] for _, p in self.pending[-5:]]
            self.s.say(
                f"rl {self.step}/{self.s.settings.rl.steps}: solved {np.mean(recent):.3f}, "
                f"{point['turns']:.1f} calls, entropy {point['entropy']:.2f}, {self.seconds:.0f} s"
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
