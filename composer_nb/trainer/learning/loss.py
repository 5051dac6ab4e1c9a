"""The policy-gradient loss on token streams with advantages, with published alternatives as switches.

The trainer has no notion of rewards or groups: it sees tokens with one advantage each. Notation for one sampled token t of
rollout i: A the advantage, ℓ the trainer's log-probability, ℓ_s that of the sampler, r = exp(ℓ − ℓ_s).

The default is the objective of Composer 2 (technical report §4.1): group mean as the baseline, no division by the standard
deviation, no length normalisation (Dr. GRPO, arXiv 2503.20783), a constant denominator, k1 KL as a weight inside the
advantage. PPO's clip guards the later minibatches of a batch.

There are two policies, not three: r is the trainer over the *sampler*, without recomputed log-probabilities (π_old) in between.
The papers below mostly write π_old. Where they also correct for the sampler, this ratio makes both corrections. `docs/losses.md`
shows each formula beside its paper's, and its effect on a stored batch.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from composer_nb.harness.plain import NotNegative, Positive, Share, Some, function_named, require_ranges

Ratio = Literal["ppo", "none", "gspo", "cispo", "tis", "icepop", "dppo", "flash", "mis"]
Kl = Literal["k1", "k2", "k3"]
# Baselines that compare the rollouts of a group, and the others.
GROUPED, UNGROUPED = ("group", "pass_at_k"), ("none", "batch")
Gate = Literal["none", "mixed", "ties"]
# Ratios whose terms are a detached weight per token times A ℓ.
WEIGHTED = ("none", "cispo", "tis", "icepop")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of the loss; the defaults are this project's objective."""

    ratio: Ratio = "ppo"
    """Use of the importance ratio; see `policy_loss`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Positive = 0.28
    """PPO and CISPO keep ratios within 1 − low .. 1 + high. For GSPO, these bound the rollout's mean ratio, which moves far less:
    its paper uses 3e-4 and 4e-4. CISPO's paper has no lower bound, as with clip_low=1."""
    tis_cap: Positive = 5.0
    icepop_low: Annotated[float, Field(gt=0, lt=1)] = 0.5
    icepop: Annotated[float, Field(gt=1)] = 2.0
    """IcePop drops tokens whose ratio is outside icepop_low .. icepop. Its authors use 0.5 .. 5."""
    dppo: Positive = 0.2
    """DPPO drops tokens whose probability has moved by more than this in the advantage's direction."""
    flash: Positive = 3e-3
    """FlashREINFORCE drops rollouts whose mean binary KL from the sampler is above this."""
    mis: Positive = 2.0
    """MIS drops rollouts whose ratio, the product over all their tokens, is above this."""
    baseline: str = "group"
    """group: the mean reward of the group. none: the reward is the advantage; if it is 1 for solved and else 0, this imitates
    solved rollouts (expert iteration). batch: the mean reward of the batch, which allows one rollout per task (rl.group=1).
    pass_at_k: see `pass_at_k_advantages`. MODULE:FUNCTION: a function of yours; see `own_advantages`."""
    pass_k: Some = 4
    """k of the baseline pass_at_k, below `rl.group`. 1 is the baseline `group`."""
    gate: Gate = "none"
    """Role of the reward's terms beside the outcome; see `gated`."""
    positive_weight: NotNegative = 1.0
    """Factor of positive advantages, λ of Weighted-REINFORCE (arXiv 2506.01347), which takes 0.1. 0: failures alone teach."""
    clip_cov: Share = 0.0
    """Share of a batch's tokens that lose their gradient because they lower the entropy most; see `clip_covariance`."""
    centre_scores: bool = False
    """Subtract the sampler's expectation from each token's weighted score; see `centring`. Needs services.on=false."""
    mask_overlong: bool = False
    """Give rollouts that end at a limit no gradient (DAPO's overlong filtering, arXiv 2503.14476 §3.4); their rewards count in
    the baseline. Composer's report found no benefit."""
    std_norm: bool = False
    """GRPO's division of advantages by the group's standard deviation."""
    length_norm: bool = False
    """GRPO's division by the rollout's length. The denominator must then count rollouts instead of tokens."""
    beta: NotNegative = 0.0
    """Weight of the KL penalty to the frozen reference."""
    feedback: NotNegative = 0.0
    """Weight of the KL to the initial policy with a hint, over the hinted turns (`learner.py`); 0: no hints."""
    kl: Kl = "k1"
    """Estimator of the KL penalty, which also determines where it enters; see `kl_penalty`."""

    @property
    def together(self) -> bool:
        """Whether the loss of a token depends on all segments of its rollout, which must then share a micro-batch."""
        return self.ratio in ("gspo", "flash", "mis")

    def __post_init__(self) -> None:
        require_ranges(self, "loss")
        if ":" in self.baseline:
            own_advantages(
                torch.tensor([0.0, 1.0, 0.5]), torch.tensor([0.0, 1.0, 0.0]), self.baseline
            )  # now, not in RL
        elif self.baseline not in (*GROUPED, *UNGROUPED):
            names = ", ".join((*GROUPED, *UNGROUPED))
            raise ValueError(f"loss.baseline={self.baseline!r}: must be {names}, or MODULE:FUNCTION of yours")
        if self.std_norm and self.baseline != "group":
            raise ValueError("loss.std_norm needs loss.baseline=group, whose deviation it divides by")
        if self.gate != "none" and self.baseline in UNGROUPED:
            raise ValueError(f"loss.gate={self.gate} needs loss.baseline={' or '.join(GROUPED)}, which compare a group")
        if self.centre_scores and self.ratio not in WEIGHTED:
            raise ValueError(f"loss.centre_scores needs loss.ratio={', '.join(WEIGHTED[:-1])} or {WEIGHTED[-1]}")


def advantages(rewards_G: Tensor, std_norm: bool = False, baseline: str = "group") -> Tensor:
    """Return A_i = R_i − mean(R) over one group, or R_i without a baseline; with `std_norm`, divided by the population standard
    deviation (GRPO, arXiv 2402.03300). Some implementations use n − 1, a constant factor for groups of one size.

    The computation is in float64, in which the mean of equal float32 rewards is exact: rounding must not become a signal.
    """
    if baseline == "none":
        return rewards_G
    exact_G = rewards_G.double()
    centred_G = exact_G - exact_G.mean()
    if std_norm:
        centred_G = centred_G / (exact_G.std(correction=0) + 1e-6)
    return centred_G.to(rewards_G.dtype)


def gated(rewards_G: Tensor, solved_G: Tensor, gate: Gate) -> Tensor:
    """Return the rewards of a group to compare, given the outcomes (0 or 1) of its rollouts.

    none    the rewards
    mixed   the rewards if outcomes differ, else 0: where all fail, shaping is no reason to prefer one failure to another
            (outcome gate, verl-recipe pull request 125: .75 held out with it, .10 without)
    ties    the outcomes if they differ, else the rewards: shaping decides only between rollouts of equal outcome
    """
    is_mixed = bool((solved_G != solved_G[:1]).any())
    if gate == "mixed" and not is_mixed:
        return torch.zeros_like(rewards_G)
    return solved_G.to(rewards_G.dtype) if gate == "ties" and is_mixed else rewards_G


def pass_at_k_advantages(rewards_G: Tensor, k: int) -> Tensor:
    """Return A_i = E[max_I R | i ∈ I] − E[max_I R] over all subsets I of k rollouts of a group, in closed form.

    For rewards of 0 and 1 this is the analytical advantage of pass@k training (arXiv 2508.10751, eq. 14 and 15) before the
    division by a deviation. A_i is n/k − 1 times the leave-one-out form of PKPO (arXiv 2505.15201), and so an unbiased direction
    of the gradient of pass@k. k = 1 is R − mean(R). In a group of k or fewer, k is one less than the group.
    """
    n = len(rewards_G)
    k = min(k, n - 1)
    if k < 1:
        return torch.zeros_like(rewards_G)
    sorted_G, order_G = rewards_G.double().sort(stable=True)
    # Subsets whose maximum has each rank, and those of them that contain a rollout of a given lower rank.
    top = [math.comb(rank, k - 1) for rank in range(n)]
    above = [math.comb(rank - 1, k - 2) if rank and k > 1 else 0 for rank in range(n)]
    top_G, above_G = (torch.tensor(counts, dtype=torch.float64) * sorted_G for counts in (top, above))
    higher_G = above_G.sum() - above_G.cumsum(0)
    with_G = (top_G + higher_G) / math.comb(n - 1, k - 1)
    advantage_G = with_G - top_G.sum() / math.comb(n, k)
    return torch.empty_like(advantage_G).index_copy(0, order_G, advantage_G).to(rewards_G.dtype)


def own_advantages(rewards_G: Tensor, solved_G: Tensor, name: str) -> Tensor:
    """Return what the function `name` (MODULE:FUNCTION) makes of a group: of its gated rewards, and of its outcomes (0 or 1), one
    advantage for each rollout, float32 [G]. Raises ValueError if the function fails or returns something else."""
    try:
        advantage_G = torch.as_tensor(function_named(name, "loss.baseline")(rewards_G, solved_G), dtype=rewards_G.dtype)
    except Exception as error:  # whatever the function raises
        raise ValueError(f"loss.baseline={name} ended in {type(error).__name__}: {error}") from error
    if advantage_G.shape != rewards_G.shape or not advantage_G.isfinite().all():
        raise ValueError(
            f"loss.baseline={name}: returned {advantage_G} for {len(rewards_G)} rewards; one finite number each"
        )
    return advantage_G


def group_advantages(rewards_G: Tensor, solved_G: Tensor, settings: LossSettings, batch_mean: float = 0.0) -> Tensor:
    """Return the advantages of a group: of its gated rewards less the baseline, the positive ones times `positive_weight`.
    `batch_mean`: the mean reward of the batch, for the baseline `batch`."""
    gated_G = gated(rewards_G, solved_G, settings.gate)
    if settings.baseline == "pass_at_k":
        advantage_G = pass_at_k_advantages(gated_G, settings.pass_k)
    elif ":" in settings.baseline:
        advantage_G = own_advantages(gated_G, solved_G, settings.baseline)
    elif settings.baseline == "batch":
        advantage_G = (gated_G.double() - batch_mean).to(rewards_G.dtype)
    else:
        advantage_G = advantages(gated_G, settings.std_norm, settings.baseline)
    return torch.where(advantage_G > 0, settings.positive_weight * advantage_G, advantage_G)


def clip_covariance(logprob_N: Tensor, advantage_N: Tensor, share: float) -> Tensor:
    """Return the advantages of a batch's tokens, with 0 for the `share` of them with the largest (A − mean A)(ℓ − mean ℓ).

    To first order, a step changes the entropy by minus the mean of this covariance, and few tokens make up most of it. Clip-Cov
    (arXiv 2505.22617) takes their gradient away. It draws them at random from an interval of covariances; here they are the
    highest, which KL-Cov of the same paper takes, so that a run has the same numbers again. (KL-Cov's penalty, a divergence from
    the sampler, has no gradient in the first step on a batch.) ℓ is the sampler's, which is the policy's in that step.
    """
    covariance_N = (advantage_N - advantage_N.mean()) * (logprob_N - logprob_N.mean())
    top_N = covariance_N.argsort(descending=True, stable=True)[: int(share * len(covariance_N))]
    return advantage_N.index_fill(0, top_N, 0.0)


def centring(
    logprob_SV: Tensor,
    sampler_SV: Tensor,
    advantage_S: Tensor,
    settings: LossSettings,
    denominator: float,
    length_S: Tensor,
) -> Tensor:
    """Return what score centring (arXiv 2609.20807) adds to the loss: Σ_t A_t Σ_v sg(q_v w_v) log p_v / denominator, with p the
    policy, q the sampler and w the weight of a sampled token under `ratio` at r = p_v / q_v.

    A token's weighted score w ∇log p then has the mean 0 under the sampler. Uncentred, that mean, times A, drives the policy away
    from the sampler or towards it at every step. The sums are over the whole vocabulary; others know only the sampler's most
    probable tokens. Where policy and sampler agree, or w = r without bounds, the term has no gradient.
    """
    ratio_SV = (logprob_SV.detach() - sampler_SV).clamp(-MOST, MOST).exp()
    mass_SV = sampler_SV.exp() * detached_weight(ratio_SV, settings)
    term_S = advantage_S * (mass_SV * logprob_SV).sum(-1)
    return (term_S / length_S if settings.length_norm else term_S).sum() / denominator


def kl_estimate(logprob: Tensor, reference: Tensor, kind: str) -> Tensor:
    """Return an estimate per token, for samples of the policy: k1 = −log ρ, k2 = (log ρ)²/2, k3 = ρ − 1 − log ρ with ρ = π_ref/π
    (Schulman, "Approximating KL divergence")."""
    log_rho = reference - logprob
    if kind == "k1":
        return -log_rho
    return log_rho**2 / 2 if kind == "k2" else torch.expm1(log_rho.clamp(max=20)) - log_rho


def kl_penalty(
    logprob_N: Tensor,
    reference_N: Tensor,
    rollout_N: Tensor,
    settings: LossSettings,
    denominator: float,
    length_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the KL penalty to subtract from each token's advantage [N], and the KL penalty to add to the loss.

    k1   β k1 off the advantage, without a gradient of its own (as a loss its expected gradient is 0: E[∇ℓ] = 0)
    k2   Σ β k2 on the loss: gradient β (ℓ − ℓ_ref) ∇ℓ, on policy that of k1 (arXiv 2510.01555)
    k3   Σ β k3 on the loss, as in GRPO (arXiv 2402.03300): gradient β (1 − ρ) ∇ℓ, to first order that of k2

    Off the advantage, k2 and k3 would push down every token that differs from the reference, in either direction. The penalty on
    the loss has no ratio and no mask, but the same length norm. k1 is local to each token: a token's effect on the divergence of
    later ones is left out.
    """
    estimate_N = kl_estimate(logprob_N, reference_N, settings.kl)
    if settings.kl == "k1":
        return settings.beta * estimate_N.detach(), logprob_N.new_zeros(())
    if settings.length_norm:
        estimate_N = estimate_N / (torch.bincount(rollout_N)[rollout_N] if length_N is None else length_N)
    return torch.zeros_like(logprob_N).detach(), settings.beta * estimate_N.sum() / denominator


# Maximum magnitude of log-ratios; `ratio_cut` counts the tokens that reach it.
MOST = 20.0


def policy_loss(
    logprob_N: Tensor,
    sampled_N: Tensor,
    advantage_N: Tensor,
    rollout_N: Tensor,
    settings: LossSettings,
    denominator: float,
    length_N: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of N sampled tokens, their sum divided by `denominator` (a constant of the batch), and metrics.

    `logprob_N` carries gradients. `sampled_N` (float32) is the sampler's log-probability. `advantage_N` already includes the KL
    penalty. `rollout_N` (int64, from 0) is the index of each token's rollout, and `length_N` the number of its tokens, where some
    segments of it are in other calls (None: all are here; `gspo` needs all). The choices of `ratio`:

    ppo     −min(r A, clip(r) A)                         arXiv 1707.06347, asymmetric as in DAPO, arXiv 2503.14476
    none    −A ℓ                                         plain REINFORCE
    gspo    ppo on the rollout's geometric mean ratio    arXiv 2507.18071
    flash   −r detached · A ℓ, dropped by rollout        FlashREINFORCE (Hu et al. 2026), mean binary KL over `flash`
    cispo   −clip(r) detached · A ℓ                      arXiv 2506.13585
    tis     −min(r, cap) detached · A ℓ                  truncated importance sampling, Yao et al. 2025
    mis     −Π r detached · A ℓ, dropped by rollout      masked importance sampling of sequences, Liu, Li et al. 2025
    icepop  −r detached · A ℓ, dropped out of a window   arXiv 2510.18855
    dppo    −r A, dropped by probability difference      arXiv 2602.04879, binary total variation

    The papers differ from the defaults here as follows:
    ppo     DAPO divides by the batch's tokens. GRPO has both norms, a symmetric clip, and k3 on the loss.
    gspo    One term s A per rollout; here `length_norm` turns the sum over tokens into it. Bounds 3e-4 and 4e-4.
    cispo   No lower bound (clip_low=1), and the group's tokens as denominator. This is tis with the cap 1 + clip_high.
    tis     The weight π_old / sampler multiplies a separate PPO term, whose ratio is 1 on a batch's first step.
    icepop  Window 0.5 .. 5, and also a PPO clip. Tokens are dropped, not clamped: a clamp to both bounds is cispo.
    dppo    No difference: only movement along the advantage drops a token: p − p_s > δ for A > 0, p_s − p > δ for A < 0.
    GRPO, GSPO, CISPO and IcePop divide A by the group's standard deviation; this is `std_norm`, independent of the ratio.
    """
    log_ratio_N = (logprob_N - sampled_N).clamp(-MOST, MOST)
    ratio_N = log_ratio_N.exp()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    keep_N = torch.ones_like(ratio_N)
    if settings.ratio in ("ppo", "gspo"):
        if settings.ratio == "gspo":
            ratio_N = _mean_by_rollout(log_ratio_N, rollout_N).exp()
        clipped_N = ratio_N.clamp(low, high)
        keep_N = (ratio_N * advantage_N <= clipped_N * advantage_N).float()
        term_N = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)
    elif settings.ratio == "flash":
        kl_N = _binary_kl(sampled_N, logprob_N.detach())
        keep_N = (_mean_by_rollout(kl_N, rollout_N) <= settings.flash).float()
        term_N = -keep_N * ratio_N.detach() * advantage_N * logprob_N
    elif settings.ratio == "dppo":
        moved_N = (logprob_N.exp() - sampled_N.exp()).detach() * advantage_N.sign()
        keep_N = (moved_N <= settings.dppo).float()
        term_N = -keep_N * ratio_N * advantage_N
    else:
        weight_N = _weight(log_ratio_N.detach(), rollout_N, settings)
        keep_N = (weight_N > 0).float()
        term_N = -weight_N * advantage_N * logprob_N
    if settings.length_norm:
        term_N = term_N / (torch.bincount(rollout_N)[rollout_N] if length_N is None else length_N)
    raw_N = log_ratio_N.detach()
    metrics = {
        "masked": float((1 - keep_N).sum()),
        "ratio_off_20": float((raw_N.expm1().abs() > 0.2).sum()),
        "k3": float((raw_N.expm1() - raw_N).sum()),
        "ratio_cut": float((raw_N.abs() >= MOST).sum()),
        "tokens": float(len(logprob_N)),
    }
    return term_N.sum() / denominator, metrics


def detached_weight(ratio: Tensor, settings: LossSettings) -> Tensor:
    """Return the factor of A ∇ℓ at a ratio, for one of the `WEIGHTED` choices of `ratio`; 0 drops a token."""
    if settings.ratio == "none":
        return torch.ones_like(ratio)
    if settings.ratio == "cispo":
        return ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    if settings.ratio == "tis":
        return ratio.clamp(max=settings.tis_cap)
    return torch.where((ratio >= settings.icepop_low) & (ratio <= settings.icepop), ratio, 0.0)


def _binary_kl(logprob_N: Tensor, other_N: Tensor) -> Tensor:
    """Return KL(Bernoulli(p) ‖ Bernoulli(q)) of tokens' probabilities."""
    p_N, q_N = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (logprob_N, other_N))
    return p_N * (p_N / q_N).log() + (1 - p_N) * ((1 - p_N) / (1 - q_N)).log()


def _weight(log_ratio_N: Tensor, rollout_N: Tensor, settings: LossSettings) -> Tensor:
    """Return `detached_weight`, or for mis the product of each rollout's ratios, for each of its tokens; 0 above the cap."""
    if settings.ratio != "mis":
        return detached_weight(log_ratio_N.exp(), settings)
    log_weight_N = _mean_by_rollout(log_ratio_N, rollout_N) * torch.bincount(rollout_N)[rollout_N]
    return torch.where(log_weight_N <= math.log(settings.mis), log_weight_N.clamp(-MOST, MOST).exp(), 0.0)


def _mean_by_rollout(values_N: Tensor, rollout_N: Tensor) -> Tensor:
    """Return, for each token, the mean of its rollout's values."""
    count = int(rollout_N.max()) + 1 if len(rollout_N) else 0
    total = values_N.new_zeros(count).index_add(0, rollout_N, values_N)
    lengths = torch.bincount(rollout_N, minlength=count).clamp_min(1)
    return (total / lengths)[rollout_N]
