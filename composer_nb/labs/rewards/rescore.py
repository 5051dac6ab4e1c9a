"""Re-scoring: a stored batch of RL under another reward, and the effect on its policy gradient.

    lab = open_lab(run)                                # the last step's rollouts, and the weights that it started from
    verdict = judge(lab, settings)                     # rewards, advantages, dead groups, the gradient's turn: milliseconds

Why milliseconds: a batch's loss is Σ_i |A_i| · L_i(sign A_i). Whatever `policy_loss` is set to, a rollout's advantage scales
its share of the loss, and beyond that only its sign matters (clips mask tokens by it). So the gradient under any advantages is
Σ_i |A_i| · g_i(sign A_i), and for lengths and angles of such sums the inner products of the g are all that is needed. They are
worked out once, exactly; no sampling is repeated and no model runs afterwards.

Refuses settings with a second gradient beside that of the losses, or a choice among all tokens of the batch (`APART`).

Dimensions: R rollouts of a batch, P its groups, V gradients (at most two a rollout), D weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.harness.environment import Sandboxes
from composer_nb.harness.grading.front import grade
from composer_nb.harness.grading.grade import Attempt, Grade
from composer_nb.harness.rewards import RewardSettings
from composer_nb.harness.tasks.functions import parse_test_files, passes, request_tests
from composer_nb.labs.gradient import flat_gradient, inner_products
from composer_nb.trainer.learning.loss import policy_loss
from composer_nb.trainer.learning.packing import flatten, score
from composer_nb.trainer.models.checkpoint import load_pretrained
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.reader import settings_at, stored_groups, weights_before
from composer_nb.trainer.records.rundir import RunDir
from composer_nb.trainer.rl import Scored, score_groups, shuffle_rewards, to_streams
from composer_nb.trainer.settings import Settings, from_dict

# Advantages up to this size are not trained on (`rl.trains`).
NO_SIGNAL = 1e-6
# Settings of the loss that change the gradient in a way that this module leaves out.
APART = ("beta", "feedback", "clip_cov", "centre_scores")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """The batch of one RL step, and the settings then in force.

    Attributes:
        step: Number of the RL step, from 1.
    """

    step: int
    groups: tuple[tuple[Scored, ...], ...]
    settings: Settings

    @property
    def attempts(self) -> list[Attempt]:
        """All rollouts, group after group."""
        return [scored.attempt for group in self.groups for scored in group]


def stored_batch(run: RunDir, step: int = -1) -> StoredBatch:
    """Return the batch of RL step `step` (from 1; −1 is the last that trained on something). Raises ValueError for a step whose
    rollouts are missing or damaged."""
    number, groups = stored_groups(run, step)
    return StoredBatch(step=number, groups=tuple(map(tuple, groups)), settings=settings_at(run, number))


# Rewards and advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The R rollouts of a batch under a reward, group after group.

    Attributes:
        advantage_R: The trainer's float32 numbers.
    """

    reward_R: NDArray[np.float64]
    advantage_R: NDArray[np.float64]
    group_R: NDArray[np.int64]
    solved_R: NDArray[np.bool_]

    @classmethod
    def of(cls, groups: Sequence[Sequence[Scored]]) -> Scores:
        everyone = [scored for group in groups for scored in group]
        return cls(
            reward_R=np.array([scored.reward.total for scored in everyone], np.float64),
            advantage_R=np.array([scored.advantage for scored in everyone], np.float64),
            group_R=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            solved_R=np.array([scored.attempt.grade.passed for scored in everyone]),
        )

    @property
    def live_P(self) -> NDArray[np.bool_]:
        """Groups that teach something. In a dead (degenerate) one all rewards are equal."""
        signal_R = np.abs(self.advantage_R) > NO_SIGNAL
        return np.array([signal_R[self.group_R == group].any() for group in range(self.group_R.max() + 1)])

    @property
    def agreement(self) -> float:
        """Agreement of the reward with the tests: of all pairs of a solved and an unsolved rollout in one group, the
        share in which the solved one has the higher reward, ties by half (the area under the ROC curve, within groups). 1:
        as the tests do; 0.5: as chance does; below: against them. NaN where no group has such a pair."""
        right, pairs = 0.0, 0
        for group in range(self.group_R.max() + 1):
            solved, unsolved = (self.reward_R[(self.group_R == group) & (self.solved_R == s)] for s in (True, False))
            ahead = solved[:, None] - unsolved[None, :]
            right += float((ahead > 0).sum() + 0.5 * (ahead == 0).sum())
            pairs += ahead.size
        return right / pairs if pairs else math.nan


def stored_scores(batch: StoredBatch) -> Scores:
    """Return rewards and advantages as the run trained on them."""
    return Scores.of(batch.groups)


def rescore(batch: StoredBatch, rewards: RewardSettings) -> Scores:
    """Score the same rollouts under other reward settings, through the code that scores them in training. Raises ValueError for a
    weight without a registered term."""
    groups = [[scored.attempt for scored in group] for group in batch.groups]
    return Scores.of(score_groups(groups, rewards, batch.settings.loss))


def rescore_with(batch: StoredBatch, values: Sequence[float | None], weight: float) -> Scores:
    """Return a batch's stored rewards with `weight` times a further value of each rollout, such as a judge's. A group in which a
    value is missing keeps its rewards: a missing one is no 0."""
    rest, totals = iter(values), dict[int, float]()
    for group in batch.groups:
        group_values = [next(rest) for _ in group]
        for scored, value in zip(group, group_values, strict=True):
            more = 0.0 if None in group_values else weight * float(value or 0.0)
            totals[id(scored.attempt.rollout)] = float(scored.reward.total or 0.0) + more
    groups = [[scored.attempt for scored in group] for group in batch.groups]
    settings = batch.settings
    return Scores.of(score_groups(groups, settings.reward, settings.loss, lambda rollout, _: totals[id(rollout)]))


def shuffled(batch: StoredBatch, seed: int) -> Scores:
    """Return a control: the stored rewards permuted at random over the batch."""
    return Scores.of(shuffle_rewards([*map(list, batch.groups)], batch.settings.loss, Random(f"control {seed}")))


# Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Inner products of the policy gradients of a batch's rollouts.

    Attributes:
        gram: [2R, 2R]: g_i(+1) of all rollouts, then g_i(−1).
    """

    gram: NDArray[np.float64]

    def _along(self, advantage_R: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [2R] the weight of each gradient in the batch's."""
        used_R = np.where(np.abs(advantage_R) > NO_SIGNAL, advantage_R, 0.0)
        return np.concatenate([np.maximum(used_R, 0.0), np.maximum(-used_R, 0.0)])

    def norm(self, advantage_R: NDArray[np.float64]) -> float:
        """Return the length of the batch's gradient under these advantages."""
        along = self._along(advantage_R)
        return math.sqrt(max(0.0, float(along @ self.gram @ along)))

    def cosine(self, one_R: NDArray[np.float64], other_R: NDArray[np.float64]) -> float:
        """Return the cosine of the angle between the gradients under two sets of advantages; NaN where one of them has no
        length."""
        lengths = self.norm(one_R) * self.norm(other_R)
        inner = float(self._along(one_R) @ self.gram @ self._along(other_R))
        return max(-1.0, min(1.0, inner / lengths)) if lengths else math.nan


def policy_gradients(model: Model, batch: StoredBatch) -> Gradients:
    """Return the inner products of every rollout's gradient at advantage +1 and −1, at the weights of `model`.

    Holds a float32 copy of the weights for each rollout meanwhile; two, where a token is masked. Raises ValueError for a setting
    of `APART`, and for routes that cannot be replayed.
    """
    if apart := [name for name in APART if getattr(batch.settings.loss, name)]:
        raise ValueError(f"loss.{apart[0]} is on: the gradient is then more than the sum over rollouts")
    everyone = [scored for group in batch.groups for scored in group]
    weights = list(model.parameters())
    width = sum(weight.numel() for weight in weights)
    gradients_VD = torch.empty(2 * len(everyone), width)  # rows that stay unused take no memory
    along = np.zeros((2 * len(everyone), 2 * len(everyone)))
    used = 0
    for number, scored in enumerate(everyone):
        (loss, metrics), (opposite, less) = _losses(model, scored.attempt, batch.settings)
        positive, other = number, number + len(everyone)
        along[positive, used], along[other, used] = 1.0, -1.0  # without masks the loss is linear in the advantage
        gradients_VD[used] = flat_gradient(loss, weights)
        if metrics["masked"] or less["masked"]:
            along[other, used : used + 2] = 0.0, 1.0
            used += 1
            gradients_VD[used] = flat_gradient(opposite, weights)
        used += 1
    gram = along[:, :used] @ inner_products(gradients_VD[:used]) @ along[:, :used].T
    return Gradients(gram=gram)


def _losses(model: Model, attempt: Attempt, settings: Settings) -> list[tuple[Tensor, dict[str, float]]]:
    """Return a rollout's share of the batch's loss, as `rl.Learner` has it, with its metrics, at advantage +1 and −1."""
    flat, how = flatten(to_streams(attempt), settings.replay), settings.loss
    logprob_S, _ = score(model, flat, flat.recorded)
    ones_S, denominator = torch.ones_like(flat.sampled_S), settings.rl.denominator(how)
    advantages = ones_S, -ones_S
    return [policy_loss(logprob_S, flat.sampled_S, a_S, flat.rollout_S, how, denominator) for a_S in advantages]


# The lab


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A stored batch with everything that other rewards are compared with."""

    batch: StoredBatch
    stored: Scores
    gradients: Gradients


def open_lab(run: RunDir, step: int = -1) -> Lab:
    """Read a step and compute its gradients, which takes some seconds. Raises ValueError for a step that is not there or whose
    weights are not kept (those of the first step are, and of the last once RL is over; an excerpt has the last step's)."""
    batch = stored_batch(run, step)
    gradients = policy_gradients(model_before(run, batch.step), batch)
    return Lab(batch=batch, stored=stored_scores(batch), gradients=gradients)


def weights_of(run: RunDir, step: int) -> Path:
    """Return the published weights that RL step `step` (from 1) started from. Raises ValueError where they are not kept."""
    if (path := weights_before(run, step)) is None:
        raise ValueError(f"the weights that RL step {step} started from are not kept in {run.path.name}")
    return path


def model_before(run: RunDir, step: int) -> Model:
    """Return the policy that RL step `step` (from 1) started from, computing as the run did. Raises ValueError like
    `weights_of`."""
    model = load_pretrained(weights_of(run, step))
    model.kernels = from_dict(run.settings()).kernels
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredBatch:
    """A stored batch under another reward; groups are numbered from 0.

    Attributes:
        cosine: Between the policy gradient under the stored advantages and under the new ones.
        revived: Groups that were dead and teach something now.
        silenced: Groups that taught something and are dead now.
        flipped: Groups in which a rollout that was made likelier is made less likely, or the other way round.
    """

    scores: Scores
    cosine: float
    revived: list[int]
    silenced: list[int]
    flipped: list[int]


def judge(lab: Lab, rewards: RewardSettings) -> RescoredBatch:
    """Re-score the lab's batch."""
    return verdict(lab, rescore(lab.batch, rewards))


def verdict(lab: Lab, scores: Scores) -> RescoredBatch:
    """Compare scores with the stored ones."""
    old, new = lab.stored, scores
    least_R = np.minimum(np.abs(old.advantage_R), np.abs(new.advantage_R))
    crossed_R = (old.advantage_R * new.advantage_R < 0) & (least_R > NO_SIGNAL)
    return RescoredBatch(
        scores=new,
        cosine=lab.gradients.cosine(old.advantage_R, new.advantage_R),
        revived=np.flatnonzero(new.live_P & ~old.live_P).tolist(),
        silenced=np.flatnonzero(old.live_P & ~new.live_P).tolist(),
        flipped=np.unique(old.group_R[crossed_R]).tolist(),
    )


def graded_again(attempts: Sequence[Attempt], sandboxes: Sandboxes) -> list[Grade]:
    """Return the grades of what attempts left, each in a fresh sandbox. Raises SandboxUnavailable."""
    return [
        grade(a.task, a.rollout.files, sandboxes.functions if a.task.grader == "functions" else sandboxes.backend)
        for a in attempts
    ]


def visible_share(attempts: Sequence[Attempt], sandboxes: Sandboxes) -> list[float | None]:
    """Return the share of the visible tests, as they were at the start, that what an attempt left passes; None where a task has
    none of the grader `functions`. Raises SandboxFailure."""
    shares: list[float | None] = []
    for attempt in attempts:
        visible = attempt.task.visible_tests if attempt.task.grader == "functions" else {}
        tests = parse_test_files(visible) if visible else ()
        [outcomes] = sandboxes.run([request_tests(attempt.rollout.files, tests)]) if tests else [()]
        shares.append(sum(map(passes, tests, outcomes)) / len(tests) if tests else None)
    return shares
