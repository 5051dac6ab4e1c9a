"""Reinforcement learning in its plainest form: sample, grade, score, learn, publish; then the next batch.

    for step in range(steps):
        attempts  = engine.sample(P tasks × G rollouts)        # every rank its share, sandboxes included
        streams   = advantages(reward(attempts))                # A = R − mean of the group
        optimiser steps on streams                              # all ranks, gradients summed
        publish bf16 weights                                    # what the next batch is sampled from

The trainer's half (`Learner`) is blind to rewards and groups: it gets token streams with an advantage a token.
Leaves out: asynchrony (every batch is sampled from the newest version) and summaries (one segment a rollout).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer_nb.harness.agent.tiny import Agent, drive
from composer_nb.harness.attempt import Attempt, attempt
from composer_nb.harness.policy import Policy
from composer_nb.harness.rewards import Reward, RewardSettings, reward
from composer_nb.harness.sandbox.calls import Executor
from composer_nb.harness.sandbox.contract import SandboxFailure
from composer_nb.harness.tasks.task import Task
from composer_nb.kernels.moe.routing import Routing
from composer_nb.trainer.learning.balance import Cost, deal_out, first_fit
from composer_nb.trainer.learning.loss import LossSettings, advantages, kl_penalty, policy_loss
from composer_nb.trainer.learning.optimizer import Optimizer
from composer_nb.trainer.learning.packing import FlatBatch, Stream, families, flatten, microbatches, score
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.replay_settings import NO_REPLAY, ReplaySettings
from composer_nb.trainer.learning.routes import overlap, own_routes, require_routes
from composer_nb.trainer.models.transformer import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An attempt with its reward and advantage."""

    attempt: Attempt
    reward: Reward
    advantage: float


def sample_groups(
    policy: Policy, agent: Agent, tasks: Mapping[int, Task], group: int, executor: Executor, tries: int = 3
) -> tuple[list[list[Attempt]], int]:
    """`group` attempts at each task, and how many were lost to the infrastructure on the way.

    `tasks` are keyed by their place in the order of the run's prompts: it numbers the rollouts, and so what they draw. A lost
    attempt is dispatched again, up to `tries` in all; then SandboxFailure is raised, because a batch without it would be
    biased.
    """
    order = [(slot * group + place, task) for slot, task in tasks.items() for place in range(group)]
    done: dict[int, Attempt] = {}
    lost = 0
    for _ in range(tries):
        missing = [number for number in range(len(order)) if number not in done]
        runs = (attempt(agent, order[number][1], order[number][0], policy.release) for number in missing)
        results = [(missing[place], result) for place, result in drive(runs, policy, executor)]
        done |= {number: result for number, result in results if result.grade.status == "graded"}
        lost += len(missing) - sum(result.grade.status == "graded" for _, result in results)
        if len(done) == len(order):
            return [[done[i] for i in range(at, at + group)] for at in range(0, len(order), group)], lost
    raise SandboxFailure(f"{len(order) - len(done)} attempts got no grade in {tries} tries; run `composer-nb doctor`")


def score_groups(
    groups: Sequence[Sequence[Attempt]], rewards: RewardSettings, loss: LossSettings
) -> list[list[Scored]]:
    """Rewards and advantages, group by group."""
    scored = []
    for group in groups:
        totals = [reward(done.rollout, done.grade, rewards) for done in group]
        values = torch.tensor([r.total for r in totals], dtype=torch.float32)
        shares = advantages(values, loss.std_norm).tolist()
        scored.append([Scored(attempt=d, reward=r, advantage=a) for d, r, a in zip(group, totals, shares, strict=True)])
    return scored


def shuffle_rewards(groups: list[list[Scored]], loss: LossSettings, rng: Random) -> list[list[Scored]]:
    """A control: the batch's rewards dealt out at random."""
    totals = [scored.reward for group in groups for scored in group]
    rng.shuffle(totals)
    dealt = []
    for group in groups:
        mine, totals = totals[: len(group)], totals[len(group) :]
        values = torch.tensor([r.total for r in mine], dtype=torch.float32)
        shares = advantages(values, loss.std_norm).tolist()
        dealt.append(
            [
                Scored(attempt=scored.attempt, reward=r, advantage=a)
                for scored, r, a in zip(group, mine, shares, strict=True)
            ]
        )
    return dealt


def to_stream(scored: Scored) -> Stream:
    """The trainer's view of a scored attempt."""
    [segment] = scored.attempt.rollout.segments
    return Stream(
        token_ids=segment.token_ids,
        acted=segment.acted,
        logprob=segment.logprob,
        advantage=np.where(segment.acted, scored.advantage, 0.0).astype(np.float32),
        routes=segment.trace.routes,
        gates=segment.trace.gates,
        route_valid=segment.trace.route_valid,
        checks=segment.trace.checks,
    )


def trains(scored: Scored, loss: LossSettings) -> bool:
    """Whether a rollout adds anything to the gradient: an advantage, or the KL weight, which needs none."""
    return abs(scored.advantage) > 1e-6 or loss.beta > 0


def ledger(groups: Sequence[Sequence[Scored]], loss: LossSettings) -> Counter[str]:
    """Where every sampled token went: trained, or why not."""
    counts: Counter[str] = Counter()
    for group in groups:
        for scored in group:
            reason = "trained" if trains(scored, loss) else "zero_advantage"
            counts[reason] += scored.attempt.rollout.sampled
    return counts


@dataclass(slots=True)
class Learner:
    """A model, its optimiser and the loss: turns streams into optimiser steps."""

    model: Model
    optimizer: Optimizer
    settings: LossSettings
    reference: Model | None = None
    """Frozen, for the KL weight; needed when beta is above 0."""
    replay: ReplaySettings = NO_REPLAY

    def __post_init__(self) -> None:
        if self.settings.beta and self.reference is None:
            raise ValueError("loss.beta is above 0: the KL weight needs a reference model")

    def learn(
        self,
        streams: Sequence[Stream],
        ranks: Ranks,
        rng: Random,
        *,
        minibatches: int,
        denominator: float,
        lr: float,
        clip: float,
        budget: int,
        after: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One epoch over `streams` (the same list on every rank) in `minibatches` optimiser steps; streams of one prompt share
        a step. Calls `after` when a step is done. Returns metrics; those that no token gave are NaN. Raises ValueError, before
        anything is learnt, for routes that cannot be replayed."""
        if self.replay.recorded:
            require_routes(streams, self.model.config, self.replay)
        order = families(streams)
        rng.shuffle(order)
        totals: Counter[str] = Counter()
        norms = []
        parts = [order[part::minibatches] for part in range(minibatches)]
        # An optimiser step on no gradient would still move the weights, by momentum: there is none without streams.
        shares = [_share(streams, numbers, ranks, budget, Cost.of(self.model.config)) for numbers in parts if numbers]
        for step in [[self._batch(c, ranks) for c in chunks if c or ranks.lockstep] for chunks, _ in shares]:
            self.optimizer.zero_()
            for batch in step:
                loss, metrics = self._loss(batch, denominator / minibatches)
                loss.backward()
                totals.update(metrics)
            self.optimizer.sum_(ranks)
            norms.append(self.optimizer.step(lr, clip))
            after()
        names = (
            "masked",
            "ratio_off_20",
            "k3",
            "ratio_cut",
            "tokens",
            "entropy",
            "rows",
            "agreed",
            "chosen",
            "implausible",
        )
        sums = ranks.sums({name: totals[name] for name in names})
        count, rows, agreed, chosen, implausible = (sums.pop(n) for n in ("tokens", *names[6:]))
        found = {name: share(value, count) for name, value in sums.items()}
        found |= {"grad_norm": float(np.mean(norms)) if norms else math.nan, "lr": lr}
        found["logit_scale"] = self.optimizer.logit_scale
        if ranks.world > 1 and shares:
            found |= {name: float(np.mean([waits[name] for _, waits in shares])) for name in shares[0][1]}
        if self.replay.on:
            assert rows == sum(len(stream.token_ids) - 1 for stream in streams), (
                "each row of routes is used exactly once"
            )
            found["replay_overlap"] = share(agreed, chosen)
            found["replay_implausible"] = share(implausible, chosen)
        return found

    def _batch(self, streams: Sequence[Stream], ranks: Ranks) -> FlatBatch:
        """What this rank computes of the streams as one batch, with the routes that they are to be trained on, if any."""
        batch: FlatBatch = ranks.split(flatten(streams, self.replay))
        if not self.replay.on or self.replay.source == "engine":
            return batch
        seen: list[Routing] = []
        with torch.no_grad():
            score(self.model, batch, seen=seen)
        return replace(batch, recorded=own_routes(seen, self.replay))

    def _loss(self, batch: FlatBatch, denominator: float) -> tuple[Tensor, dict[str, float]]:
        seen: list[Routing] = []
        logprob_S, entropy_S = score(self.model, batch, batch.recorded, seen=seen)
        advantage_S, penalty = batch.advantage_S, None
        if self.settings.beta and self.reference is not None:
            with torch.no_grad():
                reference_S, _ = score(self.reference, batch, batch.recorded)
            taken_S, penalty = kl_penalty(logprob_S, reference_S, batch.rollout_S, self.settings, denominator)
            advantage_S = advantage_S - taken_S
        loss, metrics = policy_loss(
            logprob_S, batch.sampled_S, advantage_S, batch.rollout_S, self.settings, denominator
        )
        if penalty is not None:
            loss = loss + penalty
        found = {"entropy": float(entropy_S.sum()), **metrics}
        if not batch.counts:
            found = dict.fromkeys(found, 0.0)
        return loss, found | (overlap(seen) | {"rows": float(batch.rows)} if self.replay.on else {})


def _share(
    streams: Sequence[Stream], families: Sequence[Sequence[int]], ranks: Ranks, budget: int, cost: Cost
) -> tuple[list[list[Stream]], dict[str, float]]:
    """This rank's micro-batches, as many as the others have; and how long ranks wait for each other, by `cost`."""
    share, count = ranks.share
    if count == 1:
        return microbatches([streams[number] for family in families for number in family], budget), {}
    parts, packing = deal_out(streams, families, count, budget, cost)
    lengths = [len(streams[number].token_ids) - 1 for family in families for number in family]
    plain = first_fit(lengths, [cost.row(length) for length in lengths], count, budget)
    return parts[share], {"imbalance": packing.imbalance, "imbalance_first_fit": plain.imbalance}


def share(part: float, whole: float) -> float:
    """Return `part / whole`, or NaN where there is nothing to share: a figure without data is not 0."""
    return part / whole if whole else math.nan


def clocked(clock: dict[str, float], name: str, start: float) -> float:
    """Adds the time since `start` to `clock[name]` and returns the time now."""
    now = time.perf_counter()
    clock[name] = clock.get(name, 0.0) + now - start
    return now


def batch_metrics(groups: Sequence[Sequence[Scored]]) -> dict[str, Any]:
    """Sums over this rank's groups that add up over ranks."""
    everyone = [scored for group in groups for scored in group]
    return {
        "samples": float(len(everyone)),
        "reward": sum(float(s.reward.total or 0.0) for s in everyone),
        "solved": sum(float(s.attempt.grade.passed) for s in everyone),
        "any_solved": float(sum(any(s.attempt.grade.passed for s in group) for group in groups)),
        "live_groups": float(sum(any(abs(s.advantage) > 1e-6 for s in group) for group in groups)),
        "groups": float(len(groups)),
        "turns": float(sum(len(s.attempt.rollout.turns) for s in everyone)),
        "tokens": float(sum(s.attempt.rollout.tokens for s in everyone)),
        "sampled": float(sum(s.attempt.rollout.sampled for s in everyone)),
        "invalid": float(sum(s.attempt.rollout.invalid_calls for s in everyone)),
        "flagged": float(sum(bool(s.attempt.grade.flags) for s in everyone)),
        "finished": float(sum(s.attempt.rollout.stop == "finished" for s in everyone)),
    }


def step_point(sums: dict[str, float]) -> dict[str, Any]:
    """A step's metrics from the sums of `batch_metrics` over all ranks."""
    count = sums["samples"]
    return {
        "reward": sums["reward"] / count,
        "solved": sums["solved"] / count,
        "best_of_group": sums["any_solved"] / sums["groups"],
        "live_groups": sums["live_groups"] / sums["groups"],
        "turns": sums["turns"] / count,
        "tokens": sums["tokens"],
        "sampled": sums["sampled"],
        "samples": count,
        "finished": sums["finished"] / count,
        "invalid_call_rate": share(sums["invalid"], sums["turns"]),
        "flagged": sums["flagged"],
    }
