"""Policy-gradient losses side by side on a frozen batch: masks, weights, directions and variance of each.

    found = bench(model, groups)                # groups of streams, their log-probabilities those of the sampler
    found.rows                                  # one row per loss
    found.cosines                               # of the angles between all of them

A loss sees the model only through the log-probabilities of the S sampled tokens. So there is one forward pass a group; a loss
is its slope ∂L/∂ℓ [S]; and its gradient is one backward pass of that slope.

Beside the losses stands the exact on-policy gradient: REINFORCE with the whole rollout's probability over that of the sampler,
Σ_i w_i A_i ∇ log π(rollout i), w_i = π(i) / π_sampler(i). Its expectation is the policy gradient at these weights; what the
losses do per token trades that for less variance.

Dimensions: S sampled tokens of a group, L losses (the exact gradient among them), W weights.
"""

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
from composer_nb.trainer.learning.learner import without_gradient
from composer_nb.trainer.learning.loss import LossSettings, centring, group_advantages, kl_penalty, policy_loss
from composer_nb.trainer.learning.packing import (
    NO_REPLAY,
    FlatBatch,
    ReplaySettings,
    Stream,
    distributions,
    flatten,
    score,
)
from composer_nb.trainer.learning.routes import require_routes
from composer_nb.trainer.models.transformer import Model
from composer_nb.views import style
from composer_nb.views.rollout import StoredRollout
from composer_nb.views.style import Picture, key, title

Array = NDArray[np.float64]
# β of the KL rows, GRPO's.
BETA = 0.04
OURS, EXACT = "ours", "exact"
# The published losses, each with its paper's bounds, and nothing else changed from ours: of the norms only those of GRPO's rows
# and, because its loss is one term a rollout, GSPO's length norm. The first is what the others are compared with.
LOSSES: dict[str, LossSettings] = {
    OURS: LossSettings(),
    "reinforce": LossSettings(ratio="none"),
    "grpo": LossSettings(clip_high=0.2, std_norm=True, length_norm=True),
    "std norm": LossSettings(std_norm=True),
    "length norm": LossSettings(length_norm=True),
    "gspo": LossSettings(ratio="gspo", clip_low=3e-4, clip_high=4e-4, length_norm=True),
    "cispo": LossSettings(ratio="cispo", clip_low=1.0, clip_high=0.28),
    "tis": LossSettings(ratio="tis", tis_cap=2.0),
    "mis": LossSettings(ratio="mis"),
    "icepop": LossSettings(ratio="icepop", icepop_low=0.5, icepop=5.0),
    "dppo": LossSettings(ratio="dppo", dppo=0.2),
    "k1": LossSettings(beta=BETA, kl="k1"),
    "k2": LossSettings(beta=BETA, kl="k2"),
    "k3": LossSettings(beta=BETA, kl="k3"),
}
# Remedies for a policy that RL narrows. The bench's groups are centred, so FlashREINFORCE's baseline is the group's mean here.
REMEDIES: dict[str, LossSettings] = {
    "mixed groups": LossSettings(gate="mixed"),
    "outcome first": LossSettings(gate="ties"),
    "pass@4": LossSettings(baseline="pass_at_k"),
    "successes × 0.1": LossSettings(positive_weight=0.1),
    "clip-cov": LossSettings(clip_cov=0.02),
    "flashreinforce": LossSettings(ratio="flash", length_norm=True),
    "centred": LossSettings(ratio="none", centre_scores=True),
}

# Outcome of a token: it trains; trains with a weight that was cut (or raised) to a bound; has no gradient because it became too
# likely, or too unlikely; has no advantage, so that no loss would train on it.
REASONS = ("trains", "capped", "above", "below", "no advantage")
# Sampler's probability of the tokens of `weight_curve`.
CURVE_P = 0.15
# Advantages up to this size are not trained on (`rl.trains`).
NO_SIGNAL = 1e-6


class SampledTokens(NamedTuple):
    """The S sampled tokens of a group as losses see them.

    Attributes:
        sampled_S: The sampler's log-probability.
        advantage_S: R − mean(R); for `slope`, the learner's under its loss.
        std_S: An advantage of 1 after division by the group's standard deviation.
    """

    logprob_S: Tensor
    sampled_S: Tensor
    advantage_S: Tensor
    std_S: Tensor
    rollout_S: Tensor
    reference_S: Tensor | None


class Slope(NamedTuple):
    """A loss on a group's tokens.

    Attributes:
        slope_S: ∂L/∂ℓ.
        weight_S: Weight of a token's A ∇ℓ, A as R − mean(R) less the KL's part: r for PPO within its clip. NaN where A
            is 0.
        reason_S: Indices into REASONS.
    """

    slope_S: Tensor
    weight_S: Tensor
    reason_S: Tensor


def slope(tokens: SampledTokens, settings: LossSettings, denominator: float) -> Slope:
    """Return the slope of a loss. Raises ValueError for a KL weight without a reference."""
    advantage_S = torch.where(tokens.advantage_S.abs() > NO_SIGNAL, tokens.advantage_S, 0.0)
    scale_S = tokens.std_S if settings.std_norm else torch.ones_like(tokens.std_S)
    leaf_S = tokens.logprob_S.detach().clone().requires_grad_()
    with torch.enable_grad():
        penalty = leaf_S.new_zeros(())
        if settings.beta:
            if tokens.reference_S is None:
                raise ValueError("loss.beta is above 0: the KL weight needs a reference model")
            penalty_S, penalty = kl_penalty(leaf_S, tokens.reference_S, tokens.rollout_S, settings, denominator)
            advantage_S = advantage_S - penalty_S
        loss, _ = policy_loss(leaf_S, tokens.sampled_S, advantage_S, tokens.rollout_S, settings, denominator)
        [policy_S] = torch.autograd.grad(loss, leaf_S)
        kl_S = torch.autograd.grad(penalty, leaf_S)[0] if penalty.requires_grad else torch.zeros_like(leaf_S)
    weight_S = torch.where(advantage_S != 0, -policy_S * denominator * scale_S / advantage_S, math.nan)
    return Slope(policy_S + kl_S, weight_S, _reasons(tokens, settings, advantage_S, policy_S, weight_S / scale_S))


def remedied(
    groups: Sequence[Sequence[Stream]], loss: LossSettings, solved: Sequence[Sequence[bool]]
) -> list[list[Stream]]:
    """Return the groups with the advantages that the learner would use under `loss`. Those of `groups` are R − mean(R).
    Raises ValueError for a gate without outcomes."""
    if loss.gate != "none" and not solved:
        raise ValueError(f"loss.gate={loss.gate}: the bench needs `solved`, the outcome of each rollout of each group")
    results = [[*group] for group in groups]
    if (loss.gate, loss.baseline, loss.positive_weight, loss.std_norm) != ("none", "group", 1.0, False):
        for number, group in enumerate(results):
            by_rollout = {id(s.whole or s): float(a) for s in group for a in s.advantage[1:][s.acted[1:]][:1]}
            outcomes = torch.tensor(solved[number] if solved else [False] * len(by_rollout))
            values = group_advantages(torch.tensor([*by_rollout.values()]), outcomes, loss).tolist()
            new = dict(zip(by_rollout, values, strict=True))
            results[number] = [
                replace(s, advantage=np.where(s.acted, new.get(id(s.whole or s), 0.0), 0.0).astype(np.float32))
                for s in group
            ]
    if loss.clip_cov:
        streams = iter(without_gradient([stream for group in results for stream in group], loss.clip_cov))
        results = [[next(streams) for _ in group] for group in results]
    return results


def with_reasons(stored: StoredRollout, loss: LossSettings) -> StoredRollout:
    """Return the rollout with the reason (of REASONS) for which `loss`, without its KL, trains on a written token or not, at the
    values of `rollout.with_trainer`. Raises ValueError without these, and without an advantage."""
    if stored.advantage is None or not stored.recomputed:
        raise ValueError("reasons need an advantage and a trainer's values: `rollout.sampled`, `rollout.with_trainer`")
    pairs = [*zip(stored.attempt.rollout.segments, stored.recomputed, strict=True)]
    logprob_S = torch.from_numpy(np.concatenate([trainer.logprob[segment.acted] for segment, trainer in pairs]))
    tokens = SampledTokens(
        logprob_S=logprob_S,
        sampled_S=torch.from_numpy(np.concatenate([segment.logprob[segment.acted] for segment, _ in pairs])),
        advantage_S=torch.full_like(logprob_S, stored.advantage),
        std_S=torch.ones_like(logprob_S),
        rollout_S=torch.zeros(len(logprob_S), dtype=torch.long),
        reference_S=None,
    )
    reasons = iter(slope(tokens, replace(loss, beta=0.0), 1.0).reason_S.tolist())
    by_segment = (tuple(REASONS[next(reasons)] if acted else "" for acted in segment.acted) for segment, _ in pairs)
    return replace(stored, reasons=tuple(by_segment))


def exact(tokens: SampledTokens, denominator: float) -> Slope:
    """Return the on-policy policy gradient, estimated without bias from what another policy drew."""
    gap_S = (tokens.logprob_S.detach() - tokens.sampled_S).to(tokens.logprob_S.dtype)
    rollout_count = int(tokens.rollout_S.max()) + 1
    log_ratio = gap_S.new_zeros(rollout_count).index_add(0, tokens.rollout_S, gap_S)
    rollout_ratio_S = log_ratio.clamp(-20, 20).exp()[tokens.rollout_S]
    has_advantage_S = tokens.advantage_S.abs() > NO_SIGNAL
    # As autograd rounds it: on policy it is ours to the last bit.
    per_token = rollout_ratio_S.new_ones(()) / denominator
    slope_S = torch.where(has_advantage_S, -rollout_ratio_S * tokens.advantage_S * per_token, 0.0)
    reason_S = torch.where(has_advantage_S, REASONS.index("trains"), REASONS.index("no advantage"))
    return Slope(slope_S, torch.where(has_advantage_S, rollout_ratio_S, math.nan), reason_S)


def _reasons(
    tokens: SampledTokens, settings: LossSettings, advantage_S: Tensor, policy_S: Tensor, weight_S: Tensor
) -> Tensor:
    """Return [S] indices into REASONS. A clip, and DPPO, stop a token on the side to which its advantage has already moved it;
    IcePop on either, MIS where the rollout has become too likely."""
    log_ratio_S = (tokens.logprob_S - tokens.sampled_S).detach().clamp(-20, 20)
    upward_S = log_ratio_S > 0 if settings.ratio == "icepop" else (advantage_S > 0) | (settings.ratio == "mis")
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


def group_tokens(
    model: Model, group: Sequence[Stream], reference: Model | None, replay: ReplaySettings = NO_REPLAY
) -> SampledTokens:
    """Run the one forward pass of a group; its log-probabilities carry gradients.

    Raises ValueError where a stream's advantage differs from token to token, or is missing."""
    batch = flatten(group, replay)
    logprob_S, _ = score(model, batch, batch.recorded)
    reference_S = None
    if reference is not None:
        with torch.no_grad():
            reference_S, _ = score(reference, batch, batch.recorded)
    # Advantages are centred: their root mean square is the rewards' standard deviation, and this is `advantages`' division by it.
    stream_advantages = [np.unique(stream.advantage[1:][stream.acted[1:]]) for stream in group]
    if wrong_counts := [len(advantages) for advantages in stream_advantages if len(advantages) != 1]:
        raise ValueError(f"the bench needs one advantage a stream, not {wrong_counts[0]}")
    by_rollout = {id(s.whole or s): float(a[0]) for s, a in zip(group, stream_advantages, strict=True)}
    std = math.sqrt(np.mean(np.square([*by_rollout.values()])))
    per_std = 1 / (std + 1e-6) if std > NO_SIGNAL else 0.0
    return SampledTokens(
        logprob_S=logprob_S,
        sampled_S=batch.sampled_S,
        advantage_S=batch.advantage_S,
        std_S=torch.full_like(batch.advantage_S, per_std),
        rollout_S=batch.rollout_S,
        reference_S=reference_S,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow:
    """A loss on a batch.

    Attributes:
        masked: Share of *all* sampled tokens that have an advantage and no gradient: what is rejected stays in the
            denominator, so that rejecting more cannot make it look better.
        reasons: Shares of tokens by REASONS; they add up to 1.
        ess: Effective sample size of the weights, as a share of the tokens that have an advantage (`effective_share`).
        norm: Length of the gradient; the denominator is the batch's tokens, or rollouts with a length norm.
        variance: Of the gradient when as many groups are drawn again from the batch's, with replacement, relative to its squared
            length: 0 if all groups have one gradient, 1 − 1 / groups if these are orthogonal, more if they cancel.
    """

    loss: str
    masked: float
    reasons: dict[str, float]
    ess: float
    norm: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The losses on a batch.

    Attributes:
        cosines: [L, L], in the order of `rows`; NaN for a loss without a gradient.
    """

    rows: tuple[LossRow, ...]
    gradients_LW: Tensor
    cosines: Array

    def row(self, name: str) -> LossRow:
        return next(row for row in self.rows if row.loss == name)

    def gradient(self, name: str) -> Tensor:
        """Return the batch's gradient [W] under a loss."""
        return self.gradients_LW[[row.loss for row in self.rows].index(name)]


def bench(
    model: Model,
    groups: Sequence[Sequence[Stream]],
    losses: Mapping[str, LossSettings] = LOSSES,
    *,
    reference: Model | None = None,
    replay: ReplaySettings = NO_REPLAY,
    solved: Sequence[Sequence[bool]] = (),
    sampler: Model | None = None,
) -> Bench:
    """Compare the gradients of `losses` on a batch with respect to all W weights of `model`, which stays unchanged; the exact
    gradient is the last row.

    Of losses with a length norm the denominator counts the batch's rollouts, of the others its sampled tokens. `solved`: outcomes
    of the rollouts, group by group, for losses with a gate. `sampler`: the model that sampled, for losses with centred scores.

    Raises ValueError for a loss named 'exact', for a KL weight without a reference, a gate without outcomes, centred scores
    without a sampler, for routes that cannot be replayed, and for streams whose advantage is missing or differs between tokens.
    """
    if EXACT in losses:
        raise ValueError(f"{EXACT!r} is the name of what losses are compared with: give the loss another")
    if replay.recorded:
        require_routes([stream for group in groups for stream in group], model.config, replay)
    policy = copy.deepcopy(model).requires_grad_()
    parameters = list(policy.parameters())
    rollout_count = float(len({id(stream.whole or stream) for group in groups for stream in group}))
    sampled_count = float(sum(int(stream.acted[1:].sum()) for group in groups for stream in group))
    loss_names = (*losses, EXACT)
    gradients_LW = torch.zeros(len(loss_names), sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    squares_L = np.zeros(len(loss_names))
    slopes_by_loss: list[list[Slope]] = [[] for _ in loss_names]
    remedied_groups = {name: remedied(groups, loss, solved) for name, loss in losses.items()}
    for number, group in enumerate(groups):
        tokens = group_tokens(policy, group, reference, replay)
        gradient_by_slope: dict[bytes, Tensor] = {}
        for loss_index, loss_name in enumerate(loss_names):
            gradient_W = torch.zeros_like(gradients_LW[0])
            if loss_name == EXACT:
                group_slope = exact(tokens, sampled_count)
            else:
                loss = losses[loss_name]
                denominator = rollout_count if loss.length_norm else sampled_count
                batch = flatten(remedied_groups[loss_name][number], replay)
                group_slope = slope(tokens._replace(advantage_S=batch.advantage_S), loss, denominator)
                if loss.centre_scores:
                    term = _centring(policy, sampler, batch, loss, denominator)
                    gradient_W += flat_gradient(term, parameters)
            slopes_by_loss[loss_index].append(group_slope)
            if group_slope.slope_S.any():
                slope_bytes = group_slope.slope_S.numpy().tobytes()  # on policy many losses are one
                if slope_bytes not in gradient_by_slope:
                    gradient_by_slope[slope_bytes] = flat_gradient(tokens.logprob_S, parameters, group_slope.slope_S)
                gradient_W += gradient_by_slope[slope_bytes]
            gradients_LW[loss_index] += gradient_W
            squares_L[loss_index] += float(gradient_W.double().square().sum())
    inner_LL = inner_products(gradients_LW)
    norm_L = np.sqrt(np.maximum(np.diag(inner_LL), 0.0))
    with np.errstate(invalid="ignore"):
        cosines_LL = (inner_LL / np.outer(norm_L, norm_L)).clip(-1, 1)
        variance_L = squares_L / norm_L**2 - 1 / len(groups)
    rows = tuple(map(_row, loss_names, slopes_by_loss, norm_L.tolist(), variance_L.tolist()))
    return Bench(rows=rows, gradients_LW=gradients_LW, cosines=cosines_LL)


def _centring(policy: Model, sampler: Model | None, batch: FlatBatch, loss: LossSettings, denominator: float) -> Tensor:
    if sampler is None:
        raise ValueError("loss.centre_scores is on: it needs the model that sampled the batch")
    with torch.no_grad():
        sampler_SV, _ = distributions(sampler, batch, batch.recorded)
    logprob_SV, _ = distributions(policy, batch, batch.recorded)
    return centring(logprob_SV, sampler_SV, batch.advantage_S, loss, denominator, batch.length_S)


def _row(loss_name: str, slopes: Sequence[Slope], norm: float, variance: float) -> LossRow:
    reason_S = torch.cat([group_slope.reason_S for group_slope in slopes]).numpy()
    weight_S = torch.cat([group_slope.weight_S for group_slope in slopes]).double().numpy()
    reason_shares = np.bincount(reason_S, minlength=len(REASONS)) / len(reason_S)
    shares = dict(zip(REASONS, reason_shares.tolist(), strict=True))
    finite_weight_S = weight_S[~np.isnan(weight_S)]
    return LossRow(
        loss=loss_name,
        masked=shares["above"] + shares["below"],
        reasons=shares,
        ess=effective_share(finite_weight_S) if len(finite_weight_S) else math.nan,
        norm=norm,
        variance=variance,
    )


def weight_curve(loss: LossSettings, ratio_S: Tensor, advantage: float) -> Tensor:
    """Return the weight [S] of A ∇ℓ at each ratio, for rollouts of one token with the probability CURVE_P under the sampler,
    which is the reference of a KL too. Losses that look at the whole rollout see its one ratio."""
    sampled_S = torch.full_like(ratio_S, math.log(CURVE_P))
    tokens = SampledTokens(
        logprob_S=sampled_S + ratio_S.log(),
        sampled_S=sampled_S,
        advantage_S=torch.full_like(ratio_S, advantage),
        std_S=torch.ones_like(ratio_S),
        rollout_S=torch.arange(len(ratio_S)),
        reference_S=sampled_S,
    )
    return slope(tokens, loss, 1.0).weight_S


def weights(losses: Mapping[str, LossSettings]) -> Picture:
    """Draw the weight that each loss gives a token, by its ratio, for tokens to make likelier (A > 0) and less likely (A < 0)."""
    rows = math.ceil(len(losses) / 4)
    picture = Picture(10.0, 0.6 + 1.7 * rows)
    panels = picture.panels(rows, min(4, len(losses)), sharex=True, sharey=True)
    ratio_S = torch.logspace(-1, 1, 801, base=6.0, dtype=torch.float64)
    for number, (ax, (name, loss)) in enumerate(zip(panels, losses.items(), strict=False)):
        ax.plot(ratio_S, ratio_S, ":", color=style.GREY, linewidth=1, label="the ratio itself")
        for sign, advantage, color, width in ((">", 1.0, style.SKY, 4), ("<", -1.0, style.VERMILION, 1.4)):
            ax.plot(ratio_S, weight_curve(loss, ratio_S, advantage), color=color, linewidth=width, label=f"A {sign} 0")
        ax.set_xscale("log")
        style.log_axis(ax.xaxis)
        title(ax, name, "ratio trainer / sampler" if number >= len(losses) - 4 else "")
    for ax in panels[len(losses) :]:
        ax.remove()
    picture.supylabel("weight of a token", fontsize=9)
    key(panels[0])
    return picture


def cosines(comparison: Bench, heading: str = "cosine between gradients") -> Picture:
    """Draw the cosines between the gradients of all losses and the exact on-policy one; “–” where one of them is 0."""
    names = [row.loss for row in comparison.rows]
    picture, ax = style.one_panel(1.8 + 0.58 * len(names), 1.0 + 0.44 * len(names))
    low = float(np.nanmin(comparison.cosines, initial=0.0))
    ax.imshow(np.ma.masked_invalid(comparison.cosines), cmap="cividis", vmin=low, vmax=1.0, aspect="auto")
    ax.grid(visible=False)
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks(range(len(names)), names, fontsize=8, rotation=45)
    for (row, column), value in np.ndenumerate(comparison.cosines):
        ink = style.DARK if value > (low + 1) / 2 else "white"  # cividis ends in a light yellow
        text, color = ("–", style.INK) if math.isnan(value) else (f"{value:.2f}", ink)
        style.note(ax, column, row, text, ha="center", fontsize=7.5, color=color)
    title(ax, heading)
    return picture
