"""The loop of reinforcement learning, independent of what samples and where it runs.

    batch   = services.next_batch()      the groups that are due: graded rollouts of one task each; the next ones are under way
    groups  = score_groups(batch)        rewards, and advantages A = R − mean of the group
    streams = streams_of(groups)         tokens with one advantage each: all that the learner sees
    metrics = services.learn(streams)    optimizer steps; each makes a weight version, published for later sampling
    services.evaluate()                  scores on the tuning tasks, at intervals
    services.record()                    metrics and the ledger of tokens; services.save() writes a checkpoint

`Services` has two implementations. `recipe.recipe.InProcess` samples each batch from the newest weights, in the processes that
train. `services.coordinator.Coordinator` runs on Ray: engines and environments sample ahead while a trainer learns. In lockstep,
with no batch ahead and on one rank, both make the same run, bit for bit.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

import numpy as np
import torch

from composer_nb.harness.blocking import CallTimeout
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.monitors import Watch, counts, forms
from composer_nb.harness.rewards import OWN, Reward, RewardSettings, own_reward, rated_alike, reward
from composer_nb.harness.rollout import Hint, Rollout
from composer_nb.harness.tool_errors import errors_of, tool_errors
from composer_nb.trainer.learning.learner import ratio
from composer_nb.trainer.learning.loss import LossSettings, group_advantages
from composer_nb.trainer.learning.packing import Stream, Whole
from composer_nb.trainer.learning.ranks import Ranks

# Returns hints for turns of a rollout, segment by segment.
Hinter = Callable[[Rollout], list[list[Hint]]]
OwnReward = Callable[[Rollout, Grade], float]
# Statuses of attempts that failed regardless of the tests; they train like other failures (`rewards.py`).
FAILED = ("tampered", "agent_failed")
SINGLE = Ranks()
# Reasons of a rollout's end that are limits.
LIMITS = ("turns", "tokens", "time")
# Steps between progress lines of RL.
SAID_EVERY = 5
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """An attempt with its reward and advantage."""

    attempt: Attempt
    reward: Reward
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups to train on.

    Attributes:
        step: Number of batches trained before this one.
        scored: The groups with their rewards from before a restart; None: the groups are new.
        lost: Rollouts lost to infrastructure faults since the last batch.
        more: Additional metrics.
    """

    step: int
    groups: Sequence[Sequence[Attempt]] = ()
    scored: list[list[Scored]] | None = None
    lost: float = 0
    more: Mapping[str, Any] = field(default_factory=dict)


class Services(Protocol):
    """The services behind the loop: they sample, grade, learn, evaluate and keep records.

    Attributes:
        settings: The tree of settings (`settings.py`). The loop reads them anew for every batch: some may change during a run.
        hinter: Returns hints if `loss.feedback` is above 0.
    """

    ranks: Ranks
    settings: Any
    hinter: Hinter | None

    @property
    def seconds(self) -> float:
        """Time spent on RL so far."""

    def past(self) -> Sequence[Mapping[str, Any]]:
        """Return the metrics of the recorded steps; `step` is the number of each, from 1."""

    def next_batch(self) -> Batch | None:
        """Wait for the next batch and return it, or None after the last one."""

    def store_batch(self, batch: Batch, groups: list[list[Scored]]) -> None:
        """Store the rollouts of a new batch."""

    def learn(self, batch: Batch, streams: list[Stream]) -> dict[str, Any] | None:
        """Learn from a batch and publish the resulting weight versions. Return metrics, or None if the trainer died: the batches
        since its last checkpoint are then taken again."""

    def evaluate(self, batch: Batch, metrics: dict[str, Any]) -> dict[str, float]:
        """Score the weights on the tuning tasks. Return the scores; empty if they follow later."""

    def record(self, batch: Batch, point: dict[str, Any], tokens: dict[str, int]) -> None:
        """Record the metrics and the token ledger of a step."""

    def save(self, step: int) -> None:
        """Write a checkpoint after `step` steps."""

    def say(self, line: str) -> None:
        """Show a line to the user."""


def reinforce(services: Services) -> None:
    """Train until no batch is left. Raises GamedError, before the batch is learned, if the monitors stop the run."""
    watch, total_steps = Watch.of(services.past()), services.settings.rl.steps
    while (batch := services.next_batch()) is not None:
        s = services.settings
        groups = batch.scored
        if groups is None:
            custom = s.env.reward_function(s.limits.seconds)
            groups = score_groups(batch.groups, s.reward, s.loss, custom, services.ranks)
            if s.rl.shuffle_rewards:
                rng = Random(f"shuffle {batch.step} {services.ranks.rank}")
                groups = shuffle_rewards(groups, s.loss, rng, services.ranks)
            services.store_batch(batch, groups)
        suspect_counts = sum(services.ranks.gather(suspects(groups)), Counter[str]())
        flagged_share, warning = watch.add(batch.step, suspect_counts, s.monitor)
        if warning:
            services.say(f"rl {batch.step + 1}: {warning}")
        train_metrics = services.learn(batch, streams_of(groups, s.loss, services.hinter))
        if train_metrics is None:
            continue
        step, steps = batch.step + 1, services.settings.rl.steps
        point = measured(groups, batch, s.rl.minibatches, services.ranks) | train_metrics
        point |= {"flagged_share": flagged_share, "monitors": dict(suspect_counts)}
        if s.rl.evaluate_every and step % s.rl.evaluate_every == 0 and step != steps:
            point |= services.evaluate(batch, point)
        tokens: Counter[str] = sum(services.ranks.gather(ledger(groups, s.loss)), Counter())
        services.record(batch, point, dict(tokens))
        if step % SAID_EVERY == 0 or step in (1, steps):
            entropy = f"entropy {point['entropy']:.2f}" if point["entropy"] == point["entropy"] else "no signal"
            services.say(
                f"rl {step}/{total_steps}: solved {point['solved']:.3f}, {point['turns']:.1f} calls, "
                f"staleness {point['staleness']:.2f}, {entropy}, {services.seconds:.0f} s"
            )
        if step % s.rl.checkpoint_every == 0 or step == steps:
            services.save(step)


def time_is_up(limit: float, steps: int, total: int) -> str:
    """Return the log line of a stage that ends at its time limit, in seconds."""
    return f"rl: stopped by rl.max_seconds={limit:g} after {steps} of {total} steps"


def scores_line(step: int, scores: Mapping[str, float]) -> str:
    """Return the log line with the scores on the tuning tasks after `step` steps."""
    if not scores:
        return f"rl {step}: no attempt at the tuning tasks has a grade"
    pass_at_1, best_of_k = scores["tune_pass_at_1"], scores["tune_best_of_k"]
    return f"rl {step}: on tuning tasks pass@1 {pass_at_1:.3f}, best of k {best_of_k:.3f}"


def tuning_scores(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the mean and the best of k of attempts at the tuning tasks, k at each, without those that have no grade; nothing if
    none has one."""
    by_task: dict[str, list[bool]] = {}
    for attempt in attempts:
        if attempt.grade.known:
            by_task.setdefault(attempt.task.id, []).append(attempt.grade.passed)
    if not by_task:
        return {}
    means = [np.mean(passed) for passed in by_task.values()]
    best = [max(passed) for passed in by_task.values()]
    return {"tune_pass_at_1": float(np.mean(means)), "tune_best_of_k": float(np.mean(best))}


# Rewards and advantages


def score_groups(
    groups: Sequence[Sequence[Attempt]],
    rewards: RewardSettings,
    loss: LossSettings,
    custom: OwnReward | None = None,
    ranks: Ranks = SINGLE,
) -> list[list[Scored]]:
    """Return the groups with rewards and advantages, without attempts whose reward is unknown. `custom`: the reward function of
    an environment, which replaces the weighted terms. `ranks` share the batch."""
    scored = []
    for group in groups:
        share = float(np.mean([a.grade.passed for a in group if a.grade.known] or [False]))
        rewards_of_group = (reward_of(rated, rewards, custom, share) for rated in rated_alike(group))
        scored.append([(a, r, a.grade.passed) for a, r in zip(group, rewards_of_group, strict=True)])
    return _scored([[row for row in group if row[1].total is not None] for group in scored], loss, ranks)


def reward_of(attempt: Attempt, rewards: RewardSettings, custom: OwnReward | None, share: float = 1.0) -> Reward:
    """Return the reward of an attempt: that of `custom`, or the weighted terms, in a group of which this share is solved. It has
    no total if `custom` exceeds its time limit. Raises like `own_reward`."""
    if custom is None:
        return reward(attempt.rollout, attempt.grade, rewards, share)
    try:
        total = own_reward(custom, attempt)
    except CallTimeout as error:
        log.warning("%s; the attempt is left out", error)
        return Reward(total=None)
    return Reward(total=total, terms={OWN: total})


def shuffle_rewards(
    groups: list[list[Scored]], loss: LossSettings, rng: Random, ranks: Ranks = SINGLE
) -> list[list[Scored]]:
    """Return the groups with the rewards of the batch, and the outcomes that `loss.gate` reads, permuted at random: a control
    from which nothing can be learned."""
    outcomes = [(scored.reward, scored.attempt.grade.passed) for group in groups for scored in group]
    rng.shuffle(outcomes)
    shuffled_outcomes = iter(outcomes)
    return _scored([[(s.attempt, *next(shuffled_outcomes)) for s in group] for group in groups], loss, ranks)


def _scored(
    groups: Sequence[Sequence[tuple[Attempt, Reward, bool]]], loss: LossSettings, ranks: Ranks
) -> list[list[Scored]]:
    """Return the groups of this rank, whose attempts have a reward and an outcome, with advantages."""
    totals = [[float(rewarded.total or 0.0) for _, rewarded, _ in group] for group in groups]
    batch_mean = 0.0
    if loss.baseline == "batch":  # the exact sum does not depend on how ranks share the batch
        batch_totals = [total for part in ranks.gather(totals) for group in part for total in group]
        batch_mean = math.fsum(batch_totals) / max(1, len(batch_totals))
    results = []
    for group, group_totals in zip(groups, totals, strict=True):
        solved = torch.tensor([passed for _, _, passed in group], dtype=torch.float32)
        values = group_advantages(torch.tensor(group_totals, dtype=torch.float32), solved, loss, batch_mean).tolist()
        rows = [(a, r, 0.0 if masked(a, loss) else v) for (a, r, _), v in zip(group, values, strict=True)]
        results.append([Scored(attempt=a, reward=r, advantage=v) for a, r, v in rows])
    return results


def to_streams(attempt: Attempt, advantage: float = 0.0) -> list[Stream]:
    """Return the trainer's view of an attempt, one stream per segment. Every token that the policy wrote has the attempt's
    advantage, in summaries too."""
    segments = attempt.rollout.segments
    whole = Whole(sum(int(segment.acted[1:].sum()) for segment in segments))
    prompt = segments[0].token_ids[: int(segments[0].acted.argmax())].tobytes() if segments else b""
    return [
        Stream(
            token_ids=segment.token_ids,
            acted=segment.acted,
            logprob=segment.logprob,
            advantage=np.where(segment.acted, advantage, 0.0).astype(np.float32),
            routes=segment.trace.routes,
            gates=segment.trace.gates,
            route_valid=segment.trace.route_valid,
            checks=segment.trace.checks,
            whole=whole,
            family=attempt.task.id.encode() + prompt,  # other tasks may have the same words
        )
        for segment in segments
    ]


def trains(scored: Scored, loss: LossSettings) -> bool:
    """Return whether a rollout contributes to the gradient: through its advantage, or through the KL term, which needs none but
    leaves out rollouts that are masked, too."""
    return abs(scored.advantage) > 1e-6 or (loss.beta > 0 and not masked(scored.attempt, loss))


def masked(attempt: Attempt, loss: LossSettings) -> bool:
    """Return whether `loss.mask_overlong` gives an attempt no gradient."""
    return loss.mask_overlong and attempt.rollout.stop in LIMITS


def streams_of(groups: Sequence[Sequence[Scored]], loss: LossSettings, hinter: Hinter | None = None) -> list[Stream]:
    """Return the streams of all rollouts that contribute to the gradient, one per segment. `hinter` returns hints for some turns;
    a rollout with a hint trains whatever its advantage is."""
    streams: list[Stream] = []
    for scored in (scored for group in groups for scored in group):
        hints = hinter(scored.attempt.rollout) if hinter else []
        if trains(scored, loss) or any(hints):
            segment_streams = to_streams(scored.attempt, scored.advantage)
            hints = hints or [[]] * len(segment_streams)
            streams += [replace(stream, hints=tuple(h)) for stream, h in zip(segment_streams, hints, strict=True)]
    return streams


# Metrics


def ledger(groups: Sequence[Sequence[Scored]], loss: LossSettings) -> Counter[str]:
    """Count sampled tokens by their use: `trained`, or the reason why not."""
    counts: Counter[str] = Counter()
    for scored in (scored for group in groups for scored in group):
        reason = "trained" if trains(scored, loss) else "zero_advantage"
        counts[reason] += scored.attempt.rollout.sampled
    return counts


def suspects(groups: Sequence[Sequence[Scored]]) -> Counter[str]:
    """Count this rank's rollouts and their tokens, with the counts of the monitors: flags, and shares that may drift."""
    attempts = [scored.attempt for group in groups for scored in group]
    totals = Counter[str](samples=len(attempts), sampled=sum(attempt.rollout.sampled for attempt in attempts))
    return totals + counts(attempts) + forms(attempts)


def measured(groups: Sequence[Sequence[Scored]], batch: Batch, versions_a_step: int, ranks: Ranks) -> dict[str, Any]:
    """Return the metrics of a batch over all ranks. Staleness: steps since the oldest token of a rollout was sampled."""
    all_scored = [scored for group in groups for scored in group]
    attempts = [scored.attempt for scored in all_scored]
    rollouts, grades = [attempt.rollout for attempt in attempts], [attempt.grade for attempt in attempts]
    versions = [rollout.versions for rollout in rollouts if len(rollout.versions)]
    ages = [batch.step - int(token_versions.min()) // versions_a_step for token_versions in versions]
    # Sums over this rank's groups, to be added over ranks.
    local_sums = {
        "samples": len(all_scored),
        "reward": sum(float(scored.reward.total or 0.0) for scored in all_scored),
        "solved": sum(grade.passed for grade in grades),
        "any_solved": sum(any(scored.attempt.grade.passed for scored in group) for group in groups),
        "live_groups": sum(any(abs(scored.advantage) > 1e-6 for scored in group) for group in groups),
        "groups": len(groups),
        "turns": sum(len(rollout.turns) for rollout in rollouts),
        "tokens": sum(rollout.tokens for rollout in rollouts),
        "sampled": sum(rollout.sampled for rollout in rollouts),
        "invalid": sum(rollout.invalid_calls for rollout in rollouts),
        "flagged": sum(bool(grade.flags) for grade in grades),
        "timeouts": sum(grade.timeouts > 0 for grade in grades),
        **{status: sum(grade.status == status for grade in grades) for status in FAILED},
        "finished": sum(rollout.stop == "finished" for rollout in rollouts),
        "lost": batch.lost,
        "drawn": len(ages),
        "ages": sum(ages),
        "mixed": sum(len(np.unique(token_versions)) > 1 for token_versions in versions),
    }
    sums = ranks.sums({name: float(value) for name, value in local_sums.items()})
    return {
        **{name: sums[name] / sums["samples"] for name in ("reward", "solved", "turns", "finished")},
        "best_of_group": sums["any_solved"] / sums["groups"],
        "live_groups": sums["live_groups"] / sums["groups"],
        **{name: sums[name] for name in ("samples", "tokens", "sampled", "flagged", "timeouts", *FAILED)},
        "invalid_call_rate": ratio(sums["invalid"], sums["turns"]),
        "errors": tool_errors(ranks.gather(errors_of(rollouts))),
        "staleness": ratio(sums["ages"], sums["drawn"]),
        "staleness_max": max(ranks.gather(max(ages, default=0))),
        "mixed_versions": ratio(sums["mixed"], sums["drawn"]),
        "infra_errors": sums["lost"],
        **batch.more,
    }
