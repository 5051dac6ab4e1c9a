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

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.agent import Agent, drive
from composer_nb.harness.attempt import Attempt, attempt
from composer_nb.harness.execute import Executor
from composer_nb.harness.policy import Policy
from composer_nb.harness.reward import Reward, RewardSettings, reward
from composer_nb.harness.sandbox import SandboxFailure
from composer_nb.harness.task import Task
from composer_nb.trainer.loss import LossSettings, advantages, kl_estimate, policy_loss
from composer_nb.trainer.model import Model, PackedRows
from composer_nb.trainer.optimizer import FlatAdamW
from composer_nb.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An attempt with its reward and advantage."""

    attempt: Attempt
    reward: Reward
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What the trainer sees of a rollout of T tokens."""

    token_ids: NDArray[np.int32]
    acted: NDArray[np.bool_]
    logprob: NDArray[np.float32]
    advantage: NDArray[np.float32]
    routes: NDArray[np.uint8]
    """[T, L, K] as sampled."""


def sample_groups(
    policy: Policy, agent: Agent, tasks: Sequence[Task], group: int, executor: Executor, redispatch: int = 3
) -> tuple[list[list[Attempt]], int]:
    """`group` attempts at each task, and how many were lost to the infrastructure on the way.

    A lost attempt is dispatched again, up to `redispatch` times; then SandboxFailure is raised, because a batch without
    it would be biased.
    """
    order = [task for task in tasks for _ in range(group)]
    done: dict[int, Attempt] = {}
    lost = 0
    for _ in range(redispatch):
        missing = [number for number in range(len(order)) if number not in done]
        runs = (attempt(agent, order[number], number, policy.release) for number in missing)
        results = [(missing[place], result) for place, result in drive(runs, policy, executor)]
        done |= {number: result for number, result in results if result.grade.status == "graded"}
        lost += len(missing) - sum(result.grade.status == "graded" for _, result in results)
        if len(done) == len(order):
            return [[done[i] for i in range(at, at + group)] for at in range(0, len(order), group)], lost
    raise SandboxFailure(
        f"{len(order) - len(done)} attempts got no grade in {redispatch} tries; run `composer-nb doctor`"
    )


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
    optimizer: FlatAdamW
    settings: LossSettings
    reference: Model | None = None
    """Frozen, for the KL weight; needed when beta is above 0."""
    replay: bool = False
    """Train on the experts that sampling chose."""

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
    ) -> dict[str, float]:
        """One epoch over `streams` (the same list on every rank) in `minibatches` optimiser steps. Returns metrics."""
        order = list(range(len(streams)))
        rng.shuffle(order)
        totals: Counter[str] = Counter()
        norms = []
        for part in range(minibatches):
            numbers = order[part::minibatches]
            if not numbers:  # a step on no gradient would still move the weights, by momentum
                continue
            self.optimizer.zero_()
            for chunk in microbatches([streams[n] for n in _share(streams, numbers, ranks)], budget):
                loss, metrics = self._loss(chunk, denominator / minibatches)
                loss.backward()
                totals.update(metrics)
            ranks.sum_(self.optimizer.gradients)
            norms.append(self.optimizer.step(lr, clip))
        sums = ranks.sums({name: totals[name] for name in ("masked", "ratio_off_20", "k3", "tokens", "entropy")})
        count = max(1.0, sums.pop("tokens"))
        return {name: value / count for name, value in sums.items()} | {
            "grad_norm": float(np.mean(norms)) if norms else 0.0
        }

    def _loss(self, streams: Sequence[Stream], denominator: float) -> tuple[Tensor, dict[str, float]]:
        batch = flatten(streams)
        logprob_N, entropy_N = score(self.model, batch, replay=self.replay)
        advantage_N = batch.advantage_N
        if self.settings.beta and self.reference is not None:
            with torch.no_grad():
                reference_N, _ = score(self.reference, batch, replay=self.replay)
            advantage_N = advantage_N - self.settings.beta * kl_estimate(
                logprob_N.detach(), reference_N, self.settings.kl
            )
        loss, metrics = policy_loss(
            logprob_N, batch.sampled_N, advantage_N, batch.rollout_N, self.settings, denominator
        )
        return loss, metrics | {"entropy": float(entropy_N.sum())}


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """Streams side by side: T tokens that are forwarded, N of whose successors were sampled."""

    lengths: list[int]
    inputs_T: Tensor
    routes_TLK: Tensor
    place_N: Tensor
    """Position in T whose output predicts the token."""
    token_N: Tensor
    sampled_N: Tensor
    advantage_N: Tensor
    rollout_N: Tensor


def flatten(streams: Sequence[Stream]) -> FlatBatch:
    """Joins streams. The last token of each is only predicted, never forwarded."""
    acted = [stream.acted[1:] for stream in streams]
    join = np.concatenate
    return FlatBatch(
        lengths=[len(stream.token_ids) - 1 for stream in streams],
        inputs_T=torch.from_numpy(join([stream.token_ids[:-1] for stream in streams])).long(),
        routes_TLK=torch.from_numpy(join([stream.routes[:-1] for stream in streams])).long(),
        place_N=torch.from_numpy(np.flatnonzero(join(acted))),
        token_N=torch.from_numpy(join([s.token_ids[1:][a] for s, a in zip(streams, acted, strict=True)])).long(),
        sampled_N=torch.from_numpy(join([s.logprob[1:][a] for s, a in zip(streams, acted, strict=True)])),
        advantage_N=torch.from_numpy(join([s.advantage[1:][a] for s, a in zip(streams, acted, strict=True)])),
        rollout_N=torch.from_numpy(join([np.full(a.sum(), i) for i, a in enumerate(acted)])),
    )


def score(model: Model, batch: FlatBatch, *, replay: bool) -> tuple[Tensor, Tensor]:
    """Log-probability [N] and (detached) entropy [N] of each sampled token; with `replay` on the experts sampling chose."""
    packed = PackedRows.of_lengths(batch.lengths, model.config)
    routes = batch.routes_TLK if replay else None
    hidden_TD, _ = model.trunk(batch.inputs_T, packed.position_N, packed.attend, routes)
    logprob_NV = F.linear(hidden_TD[batch.place_N], model.output_weight).log_softmax(-1)
    entropy_N = -(logprob_NV.detach().exp() * logprob_NV.detach()).sum(-1)
    return logprob_NV.gather(1, batch.token_N[:, None])[:, 0], entropy_N


def microbatches(streams: Sequence[Stream], budget: int) -> list[list[Stream]]:
    """Streams of similar length together, about `budget` tokens each."""
    chunks: list[list[Stream]] = []
    room = 0
    for stream in sorted(streams, key=lambda stream: len(stream.token_ids)):
        if len(stream.token_ids) > room:
            chunks.append([])
            room = budget
        chunks[-1].append(stream)
        room -= len(stream.token_ids)
    return chunks


def _share(streams: Sequence[Stream], numbers: Sequence[int], ranks: Ranks) -> list[int]:
    """This rank's part, dealt so that the ranks' token counts are about equal."""
    parts: list[list[int]] = [[] for _ in range(ranks.world)]
    load = [0] * ranks.world
    for number in sorted(numbers, key=lambda n: (-len(streams[n].token_ids), n)):
        lightest = load.index(min(load))
        parts[lightest].append(number)
        load[lightest] += len(streams[number].token_ids)
    return parts[ranks.rank]


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
