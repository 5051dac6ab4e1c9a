"""The learner, which turns token streams with an advantage per token into optimizer steps. It has no notion of rewards or
groups.

With targeted textual feedback, a turn's hint makes the policy its own teacher.

A hint is inserted into the context before a chosen turn. The policy that RL started from, π₀, is the teacher with the hint; the
policy without the hint is the student. Over the tokens t of these turns alone, the objective has the term

    loss.feedback · Σ_t KL(π(· | context_t) ‖ π₀(· | context with hint_t)) / denominator

over the whole vocabulary, beside the policy gradient of the whole rollout. So a wrong turn gets a signal for every token, which
one reward for hundreds of turns cannot give. References: Cursor, *Composer 2.5* (2026); the form of the KL is SDPO's (arXiv
2601.20802). Neither states a weight. SDPO's code, too, slows its teacher down or ties it to the initial weights. With a teacher
that moves with the policy, one seed of five came apart (docs/log.md).

Dimensions: S tokens of hinted turns, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.rollout import Hint
from composer_nb.trainer.learning.balance import Cost, deal_out, first_fit
from composer_nb.trainer.learning.loss import LossSettings, centring, clip_covariance, kl_penalty, policy_loss
from composer_nb.trainer.learning.optimizer import Optimizer
from composer_nb.trainer.learning.packing import (
    NO_REPLAY,
    FlatBatch,
    ReplaySettings,
    Stream,
    distributions,
    families,
    flatten,
    forward,
    microbatches,
    moved,
    score,
    target_scores,
)
from composer_nb.trainer.learning.ranks import Ranks
from composer_nb.trainer.learning.routes import overlap, own_routes, require_routes
from composer_nb.trainer.models.transformer import Model

PER_TOKEN = ("masked", "ratio_off_20", "k3", "ratio_cut", "entropy")
# Sums over a batch: metrics to be divided by the number of tokens, and other sums.
COUNTS = ("tokens", "rows", "agreed", "chosen", "implausible", "hinted", "feedback_kl")


@dataclass(slots=True)
class Learner:
    """A model with its optimizer and loss.

    Attributes:
        reference: Frozen model for the KL penalty, and the teacher of hints; required if `loss.beta` or `loss.feedback`
            is above 0.
        sampler: Frozen model from which the batch was sampled, computing as its engine did; required if
            `loss.centre_scores`.
    """

    model: Model
    optimizer: Optimizer
    settings: LossSettings
    reference: Model | None = None
    replay: ReplaySettings = NO_REPLAY
    sampler: Model | None = None

    def __post_init__(self) -> None:
        if (self.settings.beta or self.settings.feedback) and self.reference is None:
            raise ValueError("loss.beta or loss.feedback is above 0: it needs a reference model")

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
        microbatch_tokens: int,
        final_lr_share: float = 1.0,
        rehearsed: Sequence[Stream] = (),
        after: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Learn one epoch over `streams` (the same list on every rank) in up to `minibatches` optimizer steps (fewer if there are
        fewer families, none without streams). Streams of one family share a step. The learning rate falls linearly from `lr` to
        `final_lr_share` times it. Call `after` after each step. Return metrics, NaN if no token contributes; `lr` is the first
        rate. Raises ValueError, before the first step, for routes that cannot be replayed; FloatingPointError, possibly after
        some steps, for a gradient norm that is not finite.

        `denominator`: of the loss of all streams, divided evenly over the steps. `clip`: largest gradient norm.
        `microbatch_tokens`: most tokens of a micro-batch. `rehearsed`: demonstrations (the same on every rank), which add
        −A log p to the sum, with routes of the model's own (InstructGPT's PPO-ptx: arXiv 2203.02155, eq. 2)."""
        if self.replay.recorded:
            require_routes(streams, self.model.config, self.replay)
        shuffled_families = families(streams)
        rng.shuffle(shuffled_families)
        totals: Counter[str] = Counter()
        norms, gaps = list[float](), [np.zeros(0, np.float32)]
        # Without streams there is no step: momentum would move the weights even without a gradient.
        step_count = min(minibatches, len(shuffled_families))
        families_by_step = [shuffled_families[step::minibatches] for step in range(step_count)]
        dealt = [self._deal(streams, step_families, ranks, microbatch_tokens) for step_families in families_by_step]
        rates = np.linspace(lr, lr * final_lr_share, len(dealt))
        steps = [
            [(microbatch, self._batch(microbatch, ranks)) for microbatch in rank_part if microbatch or ranks.lockstep]
            for rank_part, _ in dealt
        ]
        for number, (step_batches, rate) in enumerate(zip(steps, rates, strict=True)):
            self.optimizer.zero_()
            self._rehearse(
                rehearsed,
                families(rehearsed)[number :: len(steps)],
                ranks,
                denominator / minibatches,
                microbatch_tokens,
            )
            for microbatch, batch in step_batches:
                loss, metrics, gap_S = self._loss(batch, denominator / minibatches)
                gaps.append(gap_S)
                if self.settings.feedback and any(stream.hints for stream in microbatch):
                    assert self.reference is not None
                    kl_S = feedback_kl(self.model, self.reference, microbatch)
                    loss = loss + self.settings.feedback * kl_S.sum() / (denominator / minibatches)
                    totals.update({"hinted": len(kl_S), "feedback_kl": float(kl_S.detach().sum())})
                loss.backward()
                totals.update(metrics)
            self.optimizer.sum_(ranks)
            norms.append(self.optimizer.step(float(rate), clip))
            after()
        figures = self._figures(totals, gaps, streams, ranks)
        if ranks.world > 1 and dealt:
            figures |= {name: float(np.mean([imbalances[name] for _, imbalances in dealt])) for name in dealt[0][1]}
        return figures | {"grad_norm": float(np.mean(norms)) if norms else math.nan, "lr": lr}

    def _rehearse(
        self,
        streams: Sequence[Stream],
        families: Sequence[Sequence[int]],
        ranks: Ranks,
        denominator: float,
        microbatch_tokens: int,
    ) -> None:
        """Add the gradient of −A log p over the tokens of demonstrations, divided like those of rollouts."""
        loss_settings = LossSettings(ratio="none", length_norm=self.settings.length_norm)
        parts = self._deal(streams, families, ranks, microbatch_tokens)[0] if families else []
        for microbatch in (part for part in parts if part or ranks.lockstep):
            batch = moved(ranks.split(flatten(microbatch)), self.model.embed.device)
            logprob_S, _ = score(self.model, batch)
            of_tokens = logprob_S, logprob_S.detach(), batch.advantage_S, batch.rollout_S
            policy_loss(*of_tokens, loss_settings, denominator, batch.length_S)[0].backward()

    def _figures(
        self, totals: Counter[str], gaps: Sequence[NDArray[np.float32]], streams: Sequence[Stream], ranks: Ranks
    ) -> dict[str, float]:
        """Return means over the tokens of all ranks, from this rank's sums and gaps."""
        sums = ranks.sums({name: totals[name] for name in (*PER_TOKEN, *COUNTS)})
        token_count, forwarded_rows, agreed, choices, implausible, hinted, kl = (sums.pop(name) for name in COUNTS)
        figures = {name: ratio(value, token_count) for name, value in sums.items()}
        figures["logprob_gap_p99"] = _p99(ranks, gaps)
        if self.settings.feedback:
            figures |= {"hinted": hinted, "feedback_kl": ratio(kl, hinted)}
        if self.replay.on:
            forwarded_tokens = sum(len(stream.token_ids) - 1 for stream in streams)
            assert forwarded_rows == forwarded_tokens, "each row of routes is used exactly once"
            figures["replay_overlap"] = ratio(agreed, choices)
            figures["replay_implausible"] = ratio(implausible, choices)
        return figures

    def _deal(
        self, streams: Sequence[Stream], families: Sequence[Sequence[int]], ranks: Ranks, microbatch_tokens: int
    ) -> tuple[list[list[Stream]], dict[str, float]]:
        """Return this rank's micro-batches of one step, equal in number on all ranks, and the imbalance of ranks here and with
        `first_fit` (nothing for one shard). `families` are lists of indices of streams."""
        cost, whole_rollouts = Cost.of(self.model.config), self.settings.together
        shard, shard_count = ranks.data_shard
        family_streams = [streams[number] for family in families for number in family]
        if shard_count == 1:
            return microbatches(family_streams, microbatch_tokens, whole_rollouts), {}
        by_rank, packing = deal_out(streams, families, shard_count, microbatch_tokens, cost, whole_rollouts)
        lengths = [len(stream.token_ids) - 1 for stream in family_streams]
        baseline = first_fit(lengths, [cost.row(length) for length in lengths], shard_count, microbatch_tokens)
        return by_rank[shard], {"imbalance": packing.imbalance, "imbalance_first_fit": baseline.imbalance}

    def _batch(self, streams: Sequence[Stream], ranks: Ranks) -> FlatBatch:
        """Return this rank's part of the streams as one batch, with the routes to replay, if any."""
        batch: FlatBatch = moved(ranks.split(flatten(streams, self.replay)), self.model.embed.device)
        if not self.replay.on or self.replay.source == "engine":
            return batch
        with torch.no_grad():
            _, routings = forward(self.model, batch)
        return replace(batch, recorded=own_routes(routings, self.replay))

    def _loss(self, batch: FlatBatch, denominator: float) -> tuple[Tensor, dict[str, float], NDArray[np.float32]]:
        """Return the loss of a micro-batch, sums over its tokens, and |Δ log p| of engine and trainer at each (0 and none where
        another rank counts them)."""
        s = self.settings
        if not s.centre_scores:
            hidden_ND, routings = forward(self.model, batch, batch.recorded)
            logprob_S, entropy_S = target_scores(self.model, batch, hidden_ND)
        else:
            logprob_SV, routings = distributions(self.model, batch, batch.recorded)
            logprob_S = logprob_SV.gather(1, batch.token_S[:, None])[:, 0]
            entropy_S = -(logprob_SV.detach().exp() * logprob_SV.detach()).sum(-1)
        advantage_S, loss_penalty = batch.advantage_S, None
        if s.beta and self.reference is not None:
            with torch.no_grad():
                reference_S, _ = score(self.reference, batch, batch.recorded)
            advantage_penalty_S, loss_penalty = kl_penalty(
                logprob_S, reference_S, batch.rollout_S, s, denominator, batch.length_S
            )
            advantage_S = advantage_S - advantage_penalty_S
        of_tokens = logprob_S, batch.sampled_S, advantage_S, batch.rollout_S
        loss, metrics = policy_loss(*of_tokens, s, denominator, batch.length_S)
        if loss_penalty is not None:
            loss = loss + loss_penalty
        if s.centre_scores:
            assert self.sampler is not None
            with torch.no_grad():
                sampler_SV, _ = distributions(self.sampler, batch, batch.recorded if self.replay.recorded else None)
            loss = loss + centring(logprob_SV, sampler_SV, advantage_S, s, denominator, batch.length_S)
        sums = {"entropy": float(entropy_S.sum()), **metrics}
        gap_S = (logprob_S.detach() - batch.sampled_S).abs().float().cpu().numpy()
        if not batch.counts:
            sums, gap_S = dict.fromkeys(sums, 0.0), gap_S[:0]
        sums |= overlap(routings) | {"rows": float(batch.rows)} if self.replay.on else {}
        return loss, sums, gap_S


def _p99(ranks: Ranks, gaps: Sequence[NDArray[np.float32]]) -> float:
    gap_N = np.concatenate(ranks.gather(np.concatenate(gaps)))
    return float(np.quantile(gap_N, 0.99)) if len(gap_N) else math.nan


def ratio(part: float, whole: float) -> float:
    """Return `part / whole`, or NaN if `whole` is 0: a figure without data is not 0."""
    return part / whole if whole else math.nan


def without_gradient(streams: Sequence[Stream], share: float) -> list[Stream]:
    """Return the streams of a batch with an advantage of 0 at the tokens that `clip_covariance` chooses."""
    written = [np.flatnonzero(stream.acted[1:]) + 1 for stream in streams]
    sizes = [len(positions) for positions in written]
    logprob_N, advantage_N = (
        torch.from_numpy(
            np.concatenate([getattr(stream, name)[at] for stream, at in zip(streams, written, strict=True)])
        )
        for name in ("logprob", "advantage")
    )
    clipped = clip_covariance(logprob_N, advantage_N, share).split(sizes)
    results = []
    for stream, positions, values in zip(streams, written, clipped, strict=True):
        advantage = stream.advantage.copy()
        advantage[positions] = values.numpy()
        results.append(replace(stream, advantage=advantage))
    return results


# Feedback


def feedback_kl(model: Model, teacher: Model, streams: Sequence[Stream]) -> Tensor:
    """Return the KL [S] of each token of the hinted turns, with a gradient through the student only. Both sides use their own
    routes, since none are recorded for the teacher's context. A hint that exceeds the model's positions is left out."""
    room = model.config.max_position_embeddings
    fitting = [(stream, hint) for stream in streams for hint in stream.hints if hint.stop + len(hint.token_ids) <= room]
    pairs = [sides(stream, hint) for stream, hint in fitting]
    if not pairs:
        return model.embed.new_zeros(0)
    device = model.embed.device
    with torch.no_grad():
        teacher_SV, _ = distributions(teacher, moved(flatten([hinted for _, hinted in pairs]), device))
    student_SV, _ = distributions(model, moved(flatten([student for student, _ in pairs]), device))
    return divergence(student_SV, teacher_SV)


def divergence(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """Return KL(student ‖ teacher) [S] of log-probabilities. The gradient in logits is p ⊙ (log p − log q − KL)."""
    return (student_SV.exp() * (student_SV - teacher_SV)).sum(-1)


def sides(stream: Stream, hint: Hint) -> tuple[Stream, Stream]:
    """Return a stream up to the end of a hinted turn, without and with the hint. `acted` marks the turn's tokens."""
    ids, size = stream.token_ids, hint.stop - hint.start
    hinted = np.concatenate([ids[: hint.at], np.array(hint.token_ids, np.int32), ids[hint.at : hint.stop]])

    def side(token_ids: np.ndarray) -> Stream:
        none = np.zeros(len(token_ids), np.float32)
        acted = np.arange(len(token_ids)) >= len(token_ids) - size
        return Stream(token_ids=token_ids, acted=acted, logprob=none, advantage=none, routes=stream.routes[:0])

    return side(ids[: hint.stop]), side(hinted)
