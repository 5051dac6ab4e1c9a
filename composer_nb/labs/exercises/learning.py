"""Exercises about advantages, losses, packing, replayed routes, and how far a policy is from another."""

import math
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from composer_nb.kernels.attention.causal import causal_attention
from composer_nb.kernels.moe.routing import Replay, RoutingRule, route
from composer_nb.labs.exercises.exercise import Exercise, Function, normal, with_gradient
from composer_nb.labs.microscope.routes import outside
from composer_nb.trainer.learning import loss
from composer_nb.trainer.learning.learner import divergence
from composer_nb.trainer.learning.loss import LossSettings, detached_weight, kl_estimate

# Advantages


def with_zeros(function: Function, rewards_G: Tensor) -> dict[str, Tensor]:
    """Return advantages, and which are exactly 0: rounding must not become a signal."""
    advantage_G = function(rewards_G)
    return {"advantages": advantage_G, "exactly 0": advantage_G == 0}


def divided(rewards_G: Tensor, correction: int, floor: float) -> Tensor:
    """Here a deviation divides. GRPO does that; it gives a rare success at a hopeless task the largest weight. Only subtract the
    mean."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(correction=correction) + floor)


DIVISIONS = [
    update_wrapper(partial(divided, correction=correction, floor=floor), divided)
    for correction in (0, 1)
    for floor in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
]


def negative(rewards_G: Tensor) -> Tensor:
    """The sign is wrong: a rollout that is better than its group needs a positive advantage."""
    return -loss.advantages(rewards_G)


def bare(rewards_G: Tensor) -> Tensor:
    """These are the rewards themselves. Without a baseline, every rollout of an easy task is pushed up."""
    return rewards_G


def rounded(rewards_G: Tensor) -> Tensor:
    """Nearly: the float32 mean of equal rewards is rounded, so their difference is not exactly 0 and the group would train.
    Compute in float64, with `rewards_G.double()`."""
    return rewards_G - rewards_G.mean()


def without_itself(rewards_G: Tensor) -> Tensor:
    """Each reward is compared with the mean of the *others* here. This project subtracts the mean of the whole group."""
    return loss.advantages(rewards_G) * len(rewards_G) / (len(rewards_G) - 1)


ADVANTAGES = Exercise(
    loss.advantages,
    *((torch.tensor(rewards),) for rewards in ([1.0, 0.0, 0.0, 0.5], [1.0] + [0.0] * 15, [0.1] * 7)),
    observe=with_zeros,
    mistakes=(*DIVISIONS, negative, bare, rounded, without_itself),
)


# The clipped loss


def ppo(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    rollout_N = torch.zeros(len(logprob_N), dtype=torch.long)
    settings = LossSettings(clip_low=low, clip_high=high)
    return loss.policy_loss(logprob_N, sampled_N, advantage_N, rollout_N, settings, denominator)[0]


def products(ratio_N: Tensor, advantage_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return ratio_N * advantage_N, ratio_N.clamp(1 - low, 1 + high) * advantage_N


LOGPROB, SAMPLED, ADVANTAGE = (normal(12, seed=seed) / 2 - 1 for seed in range(3))


def grows(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sign is wrong: an optimizer lowers the loss, so the loss is minus what should grow."""
    return -ppo(logprob_N, sampled_N, advantage_N, low, high, denominator)


def larger(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The clip lets through what it should stop: take the smaller of the two products, not the larger."""
    return -torch.maximum(*products((logprob_N - sampled_N).exp(), advantage_N, low, high)).sum() / denominator


def only_clipped(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """Only the clipped product is used, so a token that moved too far the *wrong* way gets no gradient back. Take the smaller of
    the clipped and the unclipped product."""
    return -products((logprob_N - sampled_N).exp(), advantage_N, low, high)[1].sum() / denominator


def unclipped(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """Nothing is clipped: a token that has already moved far enough keeps its gradient."""
    return -((logprob_N - sampled_N).exp() * advantage_N).sum() / denominator


def upside_down(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The ratio is upside down: it is the trainer's probability over the sampler's."""
    return -torch.minimum(*products((sampled_N - logprob_N).exp(), advantage_N, low, high)).sum() / denominator


def of_logarithms(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The ratio is that of probabilities, not of their logarithms: exp(ℓ − ℓ_s)."""
    return -torch.minimum(*products(logprob_N / sampled_N, advantage_N, low, high)).sum() / denominator


def of_bare_differences(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """ℓ − ℓ_s is the logarithm of the ratio. The ratio is exp(ℓ − ℓ_s)."""
    return -torch.minimum(*products(logprob_N - sampled_N, advantage_N, low, high)).sum() / denominator


def of_smaller_ratio(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The smaller *ratio* is taken here. Where the advantage is negative, that is the larger product: take the minimum after
    multiplying by the advantage."""
    ratio_N = (logprob_N - sampled_N).exp()
    return -(torch.minimum(ratio_N, ratio_N.clamp(1 - low, 1 + high)) * advantage_N).sum() / denominator


def without_gradient(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The number is right, but no gradient reaches `logprob_N`, so nothing would be learnt."""
    return ppo(logprob_N.detach(), sampled_N, advantage_N, low, high, denominator)


def bare_sum(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sum is not divided yet. Divide by `denominator`."""
    return ppo(logprob_N, sampled_N, advantage_N, low, high, 1.0)


def mean_of_tokens(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The sum is divided by the number of tokens, so the length of one rollout changes the weight of another. Divide by
    `denominator`."""
    return ppo(logprob_N, sampled_N, advantage_N, low, high, len(logprob_N))


def symmetric(logprob_N, sampled_N, advantage_N, low, high, denominator):  # type: ignore[no-untyped-def]
    """The window is symmetric. Its upper end is 1 + high, so that unlikely tokens can grow."""
    return ppo(logprob_N, sampled_N, advantage_N, low, low, denominator)


POLICY_LOSS = Exercise(
    ppo,
    (LOGPROB, SAMPLED, ADVANTAGE + 1, 0.2, 0.28, 20.0),
    (LOGPROB, LOGPROB.clone(), ADVANTAGE, 0.2, 0.28, 7.0),
    observe=with_gradient,
    mistakes=(
        grows,
        larger,
        only_clipped,
        unclipped,
        upside_down,
        of_logarithms,
        of_bare_differences,
        of_smaller_ratio,
        without_gradient,
        bare_sum,
        mean_of_tokens,
        symmetric,
    ),
)


# Packing


def visible(lengths: list[int]) -> Tensor:
    """Return bool [T, T]: whether the token of a row of the table reads the token of a column, in the package's attention."""
    total = sum(lengths)
    flat = torch.zeros(total, 1, 8)
    return causal_attention(flat, flat, torch.eye(total)[:, None], lengths, 1.0)[:, 0] > 0


def one_text(lengths: list[int]) -> Tensor:
    """A row sees the rows before it, as if all were one text. Tell the rows apart."""
    return torch.ones(sum(lengths), sum(lengths)).tril() > 0


def whole_rows(lengths: list[int]) -> Tensor:
    """Tokens see later tokens of their row, and could copy what they should predict."""
    return visible(lengths) | visible(lengths).T


def blind_to_itself(lengths: list[int]) -> Tensor:
    """A token does not see itself. It must: the state at a token predicts the *next* token."""
    return visible(lengths).tril(-1)


def transposed(lengths: list[int]) -> Tensor:
    """The table is transposed: row t says what token t reads."""
    return visible(lengths).T


def forbidden(lengths: list[int]) -> Tensor:
    """This is the opposite: an entry is True if the token may read, and False if it may not."""
    return ~visible(lengths)


def as_numbers(lengths: list[int]) -> Tensor:
    """The entries are right. Return them as a tensor of dtype torch.bool, so that `~` can turn them round."""
    return visible(lengths).float()


def of_table(function: Function, lengths: list[int]) -> dict[str, Any]:
    """Return a table, and whether its dtype is bool, which equal entries do not show."""
    table = function(lengths)
    return {"table": table, "dtype is torch.bool": getattr(table, "dtype", None) == torch.bool}


VISIBLE = Exercise(
    visible,
    ([3, 1, 2],),
    ([4],),
    ([2, 2],),
    mistakes=(one_text, whole_rows, blind_to_itself, transposed, forbidden, as_numbers),
    observe=of_table,
)


# Replayed routes


def gates(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    rule = RoutingRule(chosen=experts_NK.shape[1])
    return route(logits_NE, torch.eye(logits_NE.shape[1]), rule, replay=Replay(experts=experts_NK)).gates_NK


EXPERTS = torch.tensor([[0, 1], [1, 0], [3, 2], [2, 0], [0, 3], [1, 3]])


def of_its_own_choice(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """These are the gates of the router's own choice. Replay uses the recorded experts."""
    return logits_NE.topk(experts_NK.shape[1], -1).values.softmax(-1)


def of_all_experts(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The gates of a token do not sum to 1: divide the probabilities of the chosen experts by their sum."""
    return logits_NE.softmax(-1).gather(1, experts_NK)


def detached(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The numbers are right, but no gradient reaches the router, so it would stop learning."""
    return gates(logits_NE.detach(), experts_NK)


def in_order(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The gates are sorted, and no longer belong to the experts of their columns."""
    return gates(logits_NE, experts_NK).sort(-1, descending=True).values


def of_probabilities(logits_NE: Tensor, experts_NK: Tensor) -> Tensor:
    """The softmax is taken twice, which makes the gates nearly equal. Divide the probabilities of the chosen experts by their
    sum."""
    return of_all_experts(logits_NE, experts_NK).softmax(-1)


GATES = Exercise(
    gates,
    (normal(6, 4), EXPERTS),
    observe=with_gradient,
    mistakes=(of_its_own_choice, of_all_experts, detached, in_order, of_probabilities),
)


# k3, and a weight of the loss


def turned(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """ρ is upside down: the samples are the policy's, so ρ is the reference's probability over the policy's."""
    return kl_estimate(reference_N, logprob_N, "k3")


def k1(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """This is k1. It is unbiased as well, but single values may be negative."""
    return kl_estimate(logprob_N, reference_N, "k1")


def k2(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """This is k2, which is biased where the two policies are far apart."""
    return kl_estimate(logprob_N, reference_N, "k2")


def one_too_many(logprob_N: Tensor, reference_N: Tensor) -> Tensor:
    """Where both policies agree the estimate must be 0; yours is 1."""
    return kl_estimate(logprob_N, reference_N, "k3") + 1


K3 = Exercise(partial(kl_estimate, kind="k3"), (LOGPROB, SAMPLED), mistakes=(turned, k1, k2, one_too_many))


def from_the_teacher(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is KL(teacher ‖ student). The student's own probabilities weigh the differences: it learns where *it* would go."""
    return divergence(teacher_SV, student_SV)


def of_all_tokens(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is one number. Sum over the vocabulary, the last dimension, and keep the tokens of the turn apart."""
    return divergence(student_SV, teacher_SV).sum()


def without_probabilities(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The weights are missing: an average over what the student would say needs its probabilities, `student_SV.exp()`."""
    return (student_SV - teacher_SV).sum(-1)


def by_log_probabilities(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The weights are log-probabilities here. An average needs the probabilities themselves, `student_SV.exp()`."""
    return (student_SV * (student_SV - teacher_SV)).sum(-1)


def below_zero(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """The sign is wrong: a divergence is never negative. Subtract the teacher's log-probabilities from the student's."""
    return -divergence(student_SV, teacher_SV)


def mean_of_vocabulary(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is a mean over the vocabulary. The probabilities are the weights already: take the sum."""
    return divergence(student_SV, teacher_SV) / student_SV.shape[-1]


def cross_entropy(student_SV: Tensor, teacher_SV: Tensor) -> Tensor:
    """This is the cross-entropy, which is not 0 where both agree. Average the student's log-probability minus the teacher's."""
    return -(student_SV.exp() * teacher_SV).sum(-1)


DIVERGENCE = Exercise(
    divergence,
    (normal(5, 7).log_softmax(-1), normal(5, 7, seed=1).log_softmax(-1)),
    mistakes=(
        from_the_teacher,
        of_all_tokens,
        without_probabilities,
        by_log_probabilities,
        below_zero,
        mean_of_vocabulary,
        cross_entropy,
    ),
)


def icepop(ratio_N: Tensor, low: float, high: float) -> Tensor:
    return detached_weight(ratio_N, LossSettings(ratio="icepop", icepop_low=low, icepop=high))


def clamped(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Ratios outside the window are clamped to its ends, as CISPO does. IcePop drops these tokens: their weight is 0."""
    return ratio_N.clamp(low, high)


def mask_alone(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """Inside the window the weight is the ratio, not 1: it corrects for the sampler."""
    return (icepop(ratio_N, low, high) > 0).float()


def upper_end(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """The lower end of the window is missing. Tokens that the trainer finds too unlikely are dropped as well."""
    return torch.where(ratio_N <= high, ratio_N, 0.0)


def without_ends(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """A ratio at an end of the window is dropped. Both ends belong to it."""
    return torch.where((ratio_N > low) & (ratio_N < high), ratio_N, 0.0)


def distances_from_1(ratio_N: Tensor, low: float, high: float) -> Tensor:
    """`low` and `high` are the ends of the window here, not their distances from 1."""
    return icepop(ratio_N, 1 - low, 1 + high)


ICEPOP_WEIGHT = Exercise(
    icepop,
    (torch.tensor([0.1, 0.5, 0.6, 1.0, 1.4, 2.0, 3.0]), 0.5, 2.0),
    (torch.tensor([0.8, 1.1, 1.3]), 0.9, 1.2),
    mistakes=(clamped, mask_alone, upper_end, without_ends, distances_from_1),
)


# Ratios outside a window


def share_outside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    return outside((trainer_N - engine_N).double().numpy(), low, high) / len(trainer_N)


def of_differences(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """These are differences of log-probabilities, which are only near r − 1. The ratio is their exponential, and its window lies
    around 1."""
    gap_N = trainer_N - engine_N
    return float(((gap_N < -low) | (gap_N > high)).double().mean())


def of_quotients(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This divides logarithms. The ratio is that of the probabilities: exp of the difference."""
    return share_outside((trainer_N / engine_N).log(), torch.zeros_like(engine_N), low, high)


def engine_over_trainer(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The ratio is upside down: it is the trainer's probability over the engine's."""
    return share_outside(engine_N, trainer_N, low, high)


def above_alone(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """Only tokens that the trainer finds too likely are counted. Count those below 1 − low as well."""
    return share_outside(trainer_N, engine_N, math.inf, high)


def equal_ends(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The window is symmetric here. Its upper end is 1 + high."""
    return share_outside(trainer_N, engine_N, low, low)


def high_on_both_sides(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """The window is symmetric here. Its lower end is 1 − low."""
    return share_outside(trainer_N, engine_N, high, high)


def both_at_once(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """No ratio is below the window and above it as well: join the two conditions with `|`, not with `&`."""
    return 0.0


def count_outside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This is a number of tokens. Divide by all of them for a share."""
    return share_outside(trainer_N, engine_N, low, high) * len(trainer_N)


def share_inside(trainer_N: Tensor, engine_N: Tensor, low: float, high: float) -> float:
    """This is the share of ratios *inside* the window."""
    return 1 - share_outside(trainer_N, engine_N, low, high)


RATIOS = torch.tensor([0.1, 0.79, 0.81, 1.0, 1.0, 1.0, 1.24, 1.27, 1.3, 1.33, 3.0])
SHARE_OUTSIDE = Exercise(
    share_outside,
    (RATIOS.log() - 0.9, torch.full((11,), -0.9), 0.2, 0.28),
    (normal(100, seed=3) / 3 - 2, normal(100, seed=4) / 3 - 2, 0.3, 0.6),
    mistakes=(
        of_differences,
        of_quotients,
        engine_over_trainer,
        above_alone,
        equal_ends,
        high_on_both_sides,
        both_at_once,
        count_outside,
        share_inside,
    ),
)
