"""Policy-gradient losses side by side on a frozen batch: masks, weights, directions and noise of each.

    found = bench(model, groups)                # groups of streams, their log-probabilities those of the sampler
    found.rows                                  # one row per loss
    found.cosines                               # of the angles between all of them

A loss sees the model only through the log-probabilities of the S sampled tokens. So there is one forward pass a group; a loss
is its slope ∂L/∂ℓ [S]; and its gradient is one backward pass of that slope. All else is made of inner products between the
gradients of groups: the batch's is their sum, a bootstrap over groups a sum with other multiplicities (`noise`).

Beside the losses stands the exact on-policy gradient: REINFORCE with the whole rollout's probability over that of the policy
that drew it, Σ_i w_i A_i ∇ log π(rollout i), w_i = π(i) / π_drawn(i). Its expectation is the policy gradient at these weights,
whatever policy drew the batch; what the losses do per token trades that for less variance.

Dimensions: S sampled tokens of a group, K groups, L losses (the exact gradient among them), U different gradients, W weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from composer_nb.labs.gradient import flat_gradient, inner_products
from composer_nb.labs.losses.noise import (
    Array,
    bootstrap_variance,
    interval,
    noise_and_signal,
    noise_ratio,
    noise_share,
    resamples,
)
from composer_nb.trainer.learning.loss import LossSettings, kl_penalty, policy_loss
from composer_nb.trainer.learning.packing import Stream, flatten, score
from composer_nb.trainer.learning.replay_settings import NO_REPLAY, ReplaySettings
from composer_nb.trainer.models.transformer import Model
from composer_nb.trainer.recipe.mismatch import gap_figures

BETA = 0.04
"""β of the KL rows, GRPO's."""
OURS, EXACT = "ours", "exact"
LOSSES: dict[str, LossSettings] = {
    OURS: LossSettings(),
    "reinforce": LossSettings(ratio="none"),
    "grpo": LossSettings(clip_high=0.2, std_norm=True, length_norm=True),
    "std norm": LossSettings(std_norm=True),
    "length norm": LossSettings(length_norm=True),
    "gspo": LossSettings(ratio="gspo", clip_low=3e-4, clip_high=4e-4, length_norm=True),
    "cispo": LossSettings(ratio="cispo", clip_low=1.0, clip_high=0.28),
    "tis": LossSettings(ratio="tis", tis_cap=2.0),
    "icepop": LossSettings(ratio="icepop", icepop_low=0.5, icepop=5.0),
    "dppo": LossSettings(ratio="dppo", dppo=0.2),
    "k1": LossSettings(beta=BETA, kl="k1"),
    "k2": LossSettings(beta=BETA, kl="k2"),
    "k3": LossSettings(beta=BETA, kl="k3"),
}
"""The published losses, each with its paper's bounds, and nothing else changed from ours: of the norms only those of GRPO's rows
and, because its loss is one term a rollout, GSPO's length norm. The first is what the others are compared with."""

REASONS = ("trains", "capped", "above", "below", "no advantage")
"""Outcome of a token: it trains; trains with a weight that was cut (or raised) to a bound; has no gradient because it became
too likely, or too unlikely; has no advantage, so that no loss would train on it."""
NO_SIGNAL = 1e-6
"""Advantages up to this size are not trained on (`rl.trains`)."""


class Tokens(NamedTuple):
    """The S sampled tokens of a group as losses see them."""

    logprob_S: Tensor
    sampled_S: Tensor
    """The sampler's log-probability for the losses."""
    drawn_S: Tensor
    """Log-probability under the policy that really drew the tokens."""
    advantage_S: Tensor
    """R − mean(R)."""
    std_S: Tensor
    """An advantage of 1 after division by the group's standard deviation."""
    rollout_S: Tensor
    reference_S: Tensor | None


class Slope(NamedTuple):
    """A loss on a group's tokens."""

    slope_S: Tensor
    """∂L/∂ℓ."""
    weight_S: Tensor
    """Weight of a token's A ∇ℓ, A as R − mean(R) less the KL's part: r for PPO within its clip. NaN where A is 0."""
    reason_S: Tensor
    """Indices into REASONS."""


def slope(tokens: Tokens, settings: LossSettings, denominator: float) -> Slope:
    """Return the slope of a loss. Raises ValueError for a KL weight without a reference."""
    advantage_S = torch.where(tokens.advantage_S.abs() > NO_SIGNAL, tokens.advantage_S, 0.0)
    scale_S = tokens.std_S if settings.std_norm else torch.ones_like(tokens.std_S)
    advantage_S = advantage_S * scale_S
    leaf_S = tokens.logprob_S.detach().clone().requires_grad_()
    with torch.enable_grad():
        penalty = leaf_S.new_zeros(())
        if settings.beta:
            if tokens.reference_S is None:
                raise ValueError("loss.beta is above 0: the KL weight needs a reference model")
            taken_S, penalty = kl_penalty(leaf_S, tokens.reference_S, tokens.rollout_S, settings, denominator)
            advantage_S = advantage_S - taken_S
        loss, _ = policy_loss(leaf_S, tokens.sampled_S, advantage_S, tokens.rollout_S, settings, denominator)
        [policy_S] = torch.autograd.grad(loss, leaf_S)
        kl_S = torch.autograd.grad(penalty, leaf_S)[0] if penalty.requires_grad else torch.zeros_like(leaf_S)
    weight_S = torch.where(advantage_S != 0, -policy_S * denominator * scale_S / advantage_S, math.nan)
    return Slope(policy_S + kl_S, weight_S, _reasons(tokens, settings, advantage_S, policy_S, weight_S / scale_S))


def exact(tokens: Tokens, denominator: float) -> Slope:
    """Return the on-policy policy gradient, estimated without bias from what another policy drew."""
    gap_S = (tokens.logprob_S.detach() - tokens.drawn_S).to(tokens.logprob_S.dtype)
    count = int(tokens.rollout_S.max()) + 1
    whole_S = gap_S.new_zeros(count).index_add(0, tokens.rollout_S, gap_S).clamp(-20, 20).exp()[tokens.rollout_S]
    live_S = tokens.advantage_S.abs() > NO_SIGNAL
    per_token = whole_S.new_ones(()) / denominator  # as autograd rounds it: on policy it is ours to the last bit
    slope_S = torch.where(live_S, -whole_S * tokens.advantage_S * per_token, 0.0)
    reason_S = torch.where(live_S, REASONS.index("trains"), REASONS.index("no advantage"))
    return Slope(slope_S, torch.where(live_S, whole_S, math.nan), reason_S)


def _reasons(tokens: Tokens, settings: LossSettings, advantage_S: Tensor, policy_S: Tensor, weight_S: Tensor) -> Tensor:
    """Return [S] indices into REASONS. A clip, and DPPO, stop a token on the side to which its advantage has already moved it;
    IcePop on either."""
    log_ratio_S = (tokens.logprob_S - tokens.sampled_S).detach().clamp(-20, 20)
    upward_S = log_ratio_S > 0 if settings.ratio == "icepop" else advantage_S > 0
    stopped_S = torch.where(upward_S, REASONS.index("above"), REASONS.index("below"))
    reason_S = torch.where(policy_S != 0, REASONS.index("trains"), stopped_S)
    if settings.ratio in ("cispo", "tis") and not settings.length_norm:
        cut_S = (weight_S - log_ratio_S.exp()).abs() > 1e-4 * log_ratio_S.exp()
        reason_S = torch.where(cut_S, REASONS.index("capped"), reason_S)
    return torch.where(advantage_S == 0, REASONS.index("no advantage"), reason_S)


def effective_share(weight_S: Array) -> float:
    """Return (Σ w)² / (S Σ w²), the effective sample size as a share of the S tokens; NaN where all weigh nothing. 1 for equal
    weights, the share that is kept when a mask drops the others."""
    squares = float((weight_S**2).sum())
    return float(weight_S.sum()) ** 2 / (len(weight_S) * squares) if squares else math.nan


# Gradients by group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGradients:
    """The gradients of L losses on K groups; those of a batch are sums over its groups."""

    names: tuple[str, ...]
    """L; the last is EXACT."""
    vectors_UW: Tensor
    place_LK: NDArray[np.int64]
    """Index of the gradient among the U; −1 for a gradient of 0."""
    slopes: tuple[tuple[Slope, ...], ...]
    """[L][K]"""
    gap_S: Array
    """log-probability of the model less that of the sampler, of all tokens."""

    def of(self, name: str, counts_K: Sequence[float] | None = None) -> Tensor:
        """Return [W] the batch's gradient under a loss, or that of a batch in which each group occurs so many times."""
        row = self.place_LK[self.names.index(name)]
        total = torch.zeros(self.vectors_UW.shape[1], dtype=self.vectors_UW.dtype)
        for place, count in zip(row.tolist(), counts_K if counts_K is not None else [1.0] * len(row), strict=True):
            if place >= 0 and count:
                total += count * self.vectors_UW[place]
        return total

    def products(self) -> Array:
        """Return the inner products [L, K, L, K]."""
        used = len(self.vectors_UW)
        gram = np.zeros((used + 1, used + 1))  # the last row is the gradient that is 0
        gram[:used, :used] = inner_products(self.vectors_UW)
        at = self.place_LK.ravel()
        return gram[np.ix_(at, at)].reshape(*self.place_LK.shape, *self.place_LK.shape)


def group_gradients(
    model: Model,
    groups: Sequence[Sequence[Stream]],
    losses: Mapping[str, LossSettings],
    *,
    drawn: Sequence[Sequence[Stream]] | None = None,
    reference: Model | None = None,
    replay: ReplaySettings = NO_REPLAY,
) -> GroupGradients:
    """Return the gradient of each loss on each group with respect to all W weights of `model`, which stays unchanged.

    `drawn` are the same streams with the log-probabilities of the policy that drew them; those of `groups` where it is not
    given. Of losses with a length norm the denominator counts the batch's rollouts, of the others its sampled tokens. Holds a
    copy of the weights for each gradient that is not 0 and not that of another loss. Raises ValueError for groups that do not
    fit each other, and for a KL weight without a reference.
    """
    if EXACT in losses:
        raise ValueError(f"{EXACT!r} is the name of what losses are compared with: give the loss another")
    if drawn is not None and [len(group) for group in drawn] != [len(group) for group in groups]:
        raise ValueError("`drawn` must hold the same streams as `groups`")
    made = copy.deepcopy(model).requires_grad_()
    weights = list(made.parameters())
    rollouts = float(sum(map(len, groups)))
    sampled = float(sum(int(stream.acted[1:].sum()) for group in groups for stream in group))
    names = (*losses, EXACT)
    vectors = torch.empty(len(names) * len(groups), sum(w.numel() for w in weights), dtype=weights[0].dtype)
    place_LK = np.full((len(names), len(groups)), -1)
    slopes: list[list[Slope]] = [[] for _ in names]
    gaps, used = [], 0
    for k, group in enumerate(groups):
        tokens = group_tokens(made, group, drawn[k] if drawn is not None else group, reference, replay=replay)
        gaps.append((tokens.logprob_S.detach() - tokens.sampled_S).double().numpy())
        known: dict[bytes, int] = {}
        for number, name in enumerate(names):
            if name == EXACT:
                found = exact(tokens, sampled)
            else:
                found = slope(tokens, losses[name], rollouts if losses[name].length_norm else sampled)
            slopes[number].append(found)
            if not found.slope_S.any():
                continue
            same = found.slope_S.numpy().tobytes()
            if same not in known:
                vectors[used] = flat_gradient(tokens.logprob_S, weights, found.slope_S)
                known[same], used = used, used + 1
            place_LK[number, k] = known[same]
    return GroupGradients(
        names=names,
        vectors_UW=vectors[:used],
        place_LK=place_LK,
        slopes=tuple(map(tuple, slopes)),
        gap_S=np.concatenate(gaps),
    )


def group_tokens(
    model: Model, group: Sequence[Stream], drawn: Sequence[Stream], reference: Model | None, *, replay: ReplaySettings
) -> Tokens:
    """Run the one forward pass of a group; its log-probabilities carry gradients."""
    batch = flatten(group, replay)
    logprob_S, _ = score(model, batch, batch.recorded)
    reference_S = None
    if reference is not None:
        with torch.no_grad():
            reference_S, _ = score(reference, batch, batch.recorded)
    # Advantages are centred: their root mean square is the rewards' standard deviation, and this is `advantages`' division by it.
    std = math.sqrt(np.mean([_advantage(stream) ** 2 for stream in group]))
    per_std = 1 / (std + 1e-6) if std > NO_SIGNAL else 0.0
    return Tokens(
        logprob_S=logprob_S,
        sampled_S=batch.sampled_S,
        drawn_S=torch.from_numpy(np.concatenate([stream.logprob[1:][stream.acted[1:]] for stream in drawn])),
        advantage_S=batch.advantage_S,
        std_S=torch.full_like(batch.advantage_S, per_std),
        rollout_S=batch.rollout_S,
        reference_S=reference_S,
    )


def with_logprobs(model: Model, groups: Sequence[Sequence[Stream]]) -> list[list[Stream]]:
    """Return the streams as if `model` had drawn them: with exactly the log-probabilities that its gradients are taken at."""
    made = []
    for group in groups:
        with torch.no_grad():
            found = group_tokens(model, group, group, None, replay=NO_REPLAY).logprob_S.numpy()
        parts = np.split(found, np.cumsum([int(stream.acted[1:].sum()) for stream in group])[:-1])
        made.append([_with_logprob(stream, part) for stream, part in zip(group, parts, strict=True)])
    return made


def _with_logprob(stream: Stream, sampled: NDArray[np.float32]) -> Stream:
    logprob = np.zeros_like(stream.logprob)
    logprob[np.flatnonzero(stream.acted[1:]) + 1] = sampled
    return replace(stream, logprob=logprob)


def _advantage(stream: Stream) -> float:
    """Return the rollout's advantage. Raises ValueError where it differs from token to token, or is missing."""
    values = np.unique(stream.advantage[1:][stream.acted[1:]])
    if len(values) != 1:
        raise ValueError(f"a stream of the bench needs one advantage at its sampled tokens; this one has {len(values)}")
    return float(values[0])


# The table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A loss on a batch."""

    loss: str
    masked: float
    """Share of *all* sampled tokens that have an advantage and no gradient: what is rejected stays in the denominator, so that
    rejecting more cannot make it look better."""
    reasons: dict[str, float]
    """Shares of tokens by REASONS; they add up to 1."""
    ess: float
    """Effective sample size of the weights, as a share of the tokens that have an advantage (`effective_share`)."""
    norm: float
    """Length of the gradient; the denominator is the batch's tokens, or rollouts with a length norm."""
    cosine: float
    """Cosine to the first loss's gradient."""
    cosine_exact: float
    """Cosine to the exact on-policy gradient, as this batch estimates it."""
    variance: float
    """`bootstrap_variance` over the squared length of the gradient."""
    noise: float
    """Trace of the gradient's covariance over groups, over the squared length of its expectation (`noise_and_signal`)."""
    noise_interval: tuple[float, float]
    noise_share: float
    """noise / (noise + signal), which is finite where there is no signal."""
    excess: float
    """Noise share less the first loss's."""
    excess_interval: tuple[float, float]
    """On the same resamples for both, so that what they have in common drops out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The losses on a batch."""

    rows: tuple[Row, ...]
    cosines: Array
    """[L, L], in the order of `rows`; NaN for a loss without a gradient."""
    groups: int
    live: int
    """Groups with an advantage."""
    tokens: int
    gap: dict[str, float]
    """Between model and sampler: p50 and p99 of |Δ log p| over tokens, and k3."""

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.loss == name)


def bench(
    model: Model,
    groups: Sequence[Sequence[Stream]],
    losses: Mapping[str, LossSettings] = LOSSES,
    *,
    drawn: Sequence[Sequence[Stream]] | None = None,
    reference: Model | None = None,
    replay: ReplaySettings = NO_REPLAY,
    count: int = 2000,
    seed: int = 0,
) -> Bench:
    """Return a table of `losses`, with the exact gradient as its last row; arguments as those of `group_gradients`, `count`
    resamples of the groups. Raises ValueError for fewer than two groups, which show no noise."""
    if len(groups) < 2:
        raise ValueError(f"{len(groups)} groups: the noise of a gradient needs two or more")
    found = group_gradients(model, groups, losses, drawn=drawn, reference=reference, replay=replay)
    products = found.products()
    inner_LL = products.sum((1, 3))
    norm_L = np.sqrt(np.maximum(np.diag(inner_LL), 0.0))
    lengths_LL = np.outer(norm_L, norm_L)
    cosines = np.where(lengths_LL > 0, inner_LL / np.where(lengths_LL > 0, lengths_LL, 1.0), np.nan).clip(-1, 1)
    counts_BK = np.concatenate([np.ones((1, len(groups))), resamples(len(groups), count, seed)])
    first_B = noise_share(*noise_and_signal(products[0, :, 0], counts_BK))
    rows = [
        _row(name, found.slopes[place], products[place, :, place], counts_BK, first_B, cosines[place])
        for place, name in enumerate(found.names)
    ]
    return Bench(
        rows=tuple(rows),
        cosines=cosines,
        groups=len(groups),
        live=sum(bool(one.slope_S.any()) for one in found.slopes[-1]),
        tokens=len(found.gap_S),
        gap=gap_figures(found.gap_S),
    )


def _row(
    name: str, slopes: Sequence[Slope], products_KK: Array, counts_BK: Array, first_B: Array, cosine_L: Array
) -> Row:
    """Return a loss's row; the first of the counts is the batch itself, `first_B` the first loss's share of noise."""
    reason = torch.cat([found.reason_S for found in slopes]).numpy()
    weight = torch.cat([found.weight_S for found in slopes]).double().numpy()
    counts = np.bincount(reason, minlength=len(REASONS)) / len(reason)
    reasons = dict(zip(REASONS, counts.tolist(), strict=True))
    live = weight[~np.isnan(weight)]
    squared = float(products_KK.sum())
    noise = noise_and_signal(products_KK, counts_BK)
    ratio_B, share_B = noise_ratio(*noise), noise_share(*noise)
    if not products_KK.any():  # no gradient is neither noise nor signal
        ratio_B = np.full_like(ratio_B, math.nan)
    return Row(
        loss=name,
        masked=reasons["above"] + reasons["below"],
        reasons=reasons,
        ess=effective_share(live) if len(live) else math.nan,
        norm=math.sqrt(max(0.0, squared)),
        cosine=float(cosine_L[0]),
        cosine_exact=float(cosine_L[-1]),
        variance=bootstrap_variance(products_KK) / squared if squared > 0 else math.nan,
        noise=float(ratio_B[0]),
        noise_interval=interval(ratio_B[1:]),
        noise_share=float(share_B[0]),
        excess=float(share_B[0] - first_B[0]),
        excess_interval=interval((share_B - first_B)[1:]),
    )
