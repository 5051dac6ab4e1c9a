"""The policy-gradient loss against a plain loop in float64, and the estimators against enumeration."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.trainer.learning import loss as losses

RATIOS = ("ppo", "none", "gspo", "cispo", "tis", "icepop", "dppo", "flash", "mis")


def binary_kl(p: float, q: float) -> float:
    """KL(Bernoulli(p) ‖ Bernoulli(q)), off the ends as FlashREINFORCE's code is."""
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(x, low, high)


def by_hand(case: dict[str, Tensor], s: losses.LossSettings, denominator: float) -> tuple[Tensor, int]:
    """Return the sum of the terms over `denominator`, computed token by token, and the number of masked tokens."""
    total, masked = 0 * case["logprob"].sum(), 0
    rollouts = case["rollout"].tolist()
    for i, rollout in enumerate(rollouts):
        logprob, sampled, a = case["logprob"][i], case["sampled"][i], case["advantage"][i]
        members = [j for j, candidate in enumerate(rollouts) if candidate == rollout]
        r = torch.exp(logprob - sampled)
        if s.ratio == "gspo":
            r = torch.exp(sum(case["logprob"][j] - case["sampled"][j] for j in members) / len(members))
        trained = True
        if s.ratio in ("ppo", "gspo"):
            trained = not ((a > 0 and r > 1 + s.clip_high) or (a < 0 and r < 1 - s.clip_low))
            term = -r * a if trained else -clamp(r, 1 - s.clip_low, 1 + s.clip_high).detach() * a
        elif s.ratio == "none":
            term = -a * logprob
        elif s.ratio == "cispo":
            term = -clamp(r, 1 - s.clip_low, 1 + s.clip_high).detach() * a * logprob
        elif s.ratio == "tis":
            term = -clamp(r, 0, s.tis_cap).detach() * a * logprob
        elif s.ratio == "icepop":
            trained = s.icepop_low <= r.item() <= s.icepop
            term = -r.detach() * a * logprob if trained else 0 * logprob
        elif s.ratio == "flash":
            trained = mean_kl(case, rollout) <= s.flash
            term = -r.detach() * a * logprob if trained else 0 * logprob
        elif s.ratio == "mis":
            sequence_ratio = math.exp(sum((case["logprob"][j] - case["sampled"][j]).item() for j in members))
            trained = sequence_ratio <= s.mis
            term = -sequence_ratio * a * logprob if trained else 0 * logprob
        else:
            moved = (torch.exp(logprob) - torch.exp(sampled)).item()
            trained = not ((a > 0 and moved > s.dppo) or (a < 0 and -moved > s.dppo))
            term = -r * a if trained else 0 * logprob
        masked += not trained
        total = total + term / (len(members) if s.length_norm else 1)
    return total / denominator, masked


def mean_kl(case: dict[str, Tensor], rollout: int) -> float:
    pairs = zip(case["sampled"].exp().tolist(), case["logprob"].exp().tolist(), case["rollout"].tolist(), strict=True)
    return float(np.mean([binary_kl(p, q) for p, q, owner in pairs if owner == rollout]))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Tensor]:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    n = sum(lengths)
    # Steps of 0.01 keep log-ratios off the borders of clips and masks, where float32 and float64 may disagree.
    sampled = [-draw(st.integers(1, 400)) / 100 for _ in range(n)]
    change = [draw(st.integers(-250, 250)) / 100 for _ in range(n)]
    rollout = [i for i, length in enumerate(lengths) for _ in range(length)]
    by_rollout = draw(st.lists(st.sampled_from([-1.0, -0.3, 0.0, 0.25, 2.0]), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    return {
        "sampled": torch.tensor(sampled, dtype=torch.float64),
        "logprob": torch.tensor([min(s + c, -1e-3) for s, c in zip(sampled, change, strict=True)], dtype=torch.float64),
        "advantage": torch.tensor(by_rollout, dtype=torch.float64),
        "rollout": torch.tensor([rollout[i] for i in order]),
    }


def near_a_border(case: dict[str, Tensor], s: losses.LossSettings) -> bool:
    ratio = case["logprob"] - case["sampled"]
    means = torch.stack([ratio[case["rollout"] == rollout].mean() for rollout in case["rollout"]])
    moved = (case["logprob"].exp() - case["sampled"].exp()).abs()
    borders = [math.log(x) for x in (1 - s.clip_low, 1 + s.clip_high, s.tis_cap, s.icepop, s.icepop_low, 0.8, 1.2)]
    sums = torch.stack([ratio[case["rollout"] == rollout].sum() for rollout in case["rollout"]])
    gaps = [(x - border).abs().min() for x in (ratio, means) for border in borders]
    gaps.append((sums - math.log(s.mis)).abs().min())
    gaps += [torch.tensor(abs(mean_kl(case, rollout) - s.flash)) for rollout in set(case["rollout"].tolist())]
    return min(float(gap) for gap in [*gaps, (moved - s.dppo).abs().min()]) < 1e-5


def ours(
    case: dict[str, Tensor], s: losses.LossSettings, denominator: float
) -> tuple[Tensor, Tensor, dict[str, float]]:
    logprob = case["logprob"].float().requires_grad_()
    inputs = [case["sampled"].float(), case["advantage"].float(), case["rollout"].clone()]
    before = [x.detach().clone() for x in (logprob, *inputs)]
    loss, metrics = losses.policy_loss(logprob, *inputs, s, denominator)
    (slope,) = torch.autograd.grad(loss, logprob)
    assert all(torch.equal(x.detach(), y) for x, y in zip((logprob, *inputs), before, strict=True))
    return loss.detach(), slope, metrics


@pytest.mark.parametrize("ratio", RATIOS)
@settings(max_examples=15, deadline=None)
@given(case=cases(), length_norm=st.booleans(), denominator=st.sampled_from([1.0, 64.0]))
def test_every_ratio_equals_its_formula_and_so_does_its_gradient(
    ratio: Any, case: dict[str, Tensor], length_norm: bool, denominator: float
):
    s = losses.LossSettings(ratio=ratio, length_norm=length_norm, tis_cap=3.0, icepop_low=0.4, icepop=3.5, flash=0.3)
    assume(not near_a_border(case, s))
    exact = {**case, "logprob": case["logprob"].clone().requires_grad_()}
    expected, masked = by_hand(exact, s, denominator)
    (slope,) = torch.autograd.grad(expected, exact["logprob"])
    loss, gradient, metrics = ours(case, s, denominator)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(gradient.double(), slope, atol=2e-5, rtol=2e-5)
    ratio_N = (case["logprob"] - case["sampled"]).exp()
    assert metrics["tokens"] == len(ratio_N)
    assert metrics["masked"] == masked
    assert metrics["ratio_off_20"] == int(((ratio_N - 1).abs() > 0.2).sum())
    assert metrics["k3"] == pytest.approx(float((ratio_N - 1 - ratio_N.log()).sum()), rel=1e-4, abs=1e-5)


def test_a_probability_that_has_all_but_vanished_gives_finite_numbers():
    for ratio in RATIOS:
        logprob = torch.tensor([-200.0, -0.1], requires_grad=True)
        sampled, advantage = torch.tensor([-0.1, -200.0]), torch.tensor([1.0, -1.0])
        loss, metrics = losses.policy_loss(
            logprob, sampled, advantage, torch.tensor([0, 1]), losses.LossSettings(ratio=ratio), 1.0
        )
        (slope,) = torch.autograd.grad(loss, logprob)
        assert loss.isfinite() and slope.isfinite().all() and metrics["ratio_cut"] == 2, "cut off, and said so"


# Advantages

rewards = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=16)


@settings(deadline=None)
@given(rewards, st.booleans())
def test_advantages_are_distances_from_the_mean_in_deviations_and_0_where_all_are_equal(values: list[float], std: bool):
    advantages = losses.advantages(torch.tensor(values), std)
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) + 1e-6 if std else 1.0
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx([(value - mean) / spread for value in values], abs=1e-4, rel=1e-4)
    assert losses.advantages(torch.full((len(values),), values[0]), std).tolist() == [0.0] * len(values)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -0.2, 0.8, 0.81]), min_size=2, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_best_of_all_subsets_with_a_rollout_less_the_best_of_all(values: list[float], k: int):
    size = min(k, len(values) - 1)
    subsets = [*itertools.combinations(range(len(values)), size)]
    best = {subset: max(values[i] for i in subset) for subset in subsets}
    overall = math.fsum(best.values()) / len(subsets)
    expected = [np.mean([value for subset, value in best.items() if i in subset]) - overall for i in range(len(values))]
    advantages = losses.pass_at_k_advantages(torch.tensor(values, dtype=torch.float64), k)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)
    if size == 1:
        torch.testing.assert_close(advantages, losses.advantages(torch.tensor(values, dtype=torch.float64)))


@pytest.mark.parametrize(("n", "k"), [(5, 2), (6, 4), (4, 1)])
def test_its_expectation_is_the_gradient_of_pass_at_k(n: int, k: int):
    """Sums over every group of a policy that solves with probability p = σ(z)."""
    p, expected = 0.3, 0.0
    for outcomes in itertools.product((0.0, 1.0), repeat=n):
        chance = math.prod(p if solved else 1 - p for solved in outcomes)
        advantages = losses.pass_at_k_advantages(torch.tensor(outcomes, dtype=torch.float64), k).tolist()
        # d log π / dz is 1 − p for a solved task, and −p otherwise.
        expected += chance * sum(a * (solved - p) for a, solved in zip(advantages, outcomes, strict=True))
    assert expected == pytest.approx((n / k - 1) * k * (1 - p) ** (k - 1) * p * (1 - p))  # d (1 − (1 − p)^k) / dz


FAILED, MIXED = (0.0, 0.0, 0.0), (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "outcomes", "expected"),
    [
        ({}, FAILED, (0.0, -0.1, 0.1)),
        ({"gate": "mixed"}, FAILED, (0.0, 0.0, 0.0)),
        ({"gate": "mixed"}, MIXED, (0.667, -0.433, -0.233)),
        ({"gate": "ties"}, FAILED, (0.0, -0.1, 0.1)),
        ({"gate": "ties"}, MIXED, (0.667, -0.333, -0.333)),
        ({"gate": "ties", "baseline": "pass_at_k", "pass_k": 2}, MIXED, (0.333, -0.167, -0.167)),
        ({"positive_weight": 0.0}, MIXED, (0.0, -0.433, -0.233)),
        ({"positive_weight": 0.5}, FAILED, (0.0, -0.1, 0.05)),
        ({"baseline": "batch"}, MIXED, (0.8, -0.3, -0.1)),
    ],
)
def test_gates_and_weights_of_a_shaped_reward(changes: dict[str, Any], outcomes: tuple[float, ...], expected: Any):
    shaping = torch.tensor([-0.1, -0.2, 0.0])
    rewards = torch.tensor(outcomes) + shaping
    advantages = losses.group_advantages(
        rewards, torch.tensor(outcomes), losses.LossSettings(**changes), batch_mean=0.1
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-3)


# The vocabulary, and the batch


OWN = """
import torch

def median(rewards_G, solved_G):
    return rewards_G - rewards_G.median()

def first(rewards_G, solved_G):
    return rewards_G[:1]

def endless(rewards_G, solved_G):
    return rewards_G / 0

def strange(rewards_G, solved_G):
    return rewards_g
"""


def test_an_advantage_of_the_user_s_own_is_a_function_named_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_advantages.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = losses.LossSettings(baseline="own_advantages:median", positive_weight=2.0, gate="mixed")
    rewards, solved = torch.tensor([0.0, 0.25, 1.0, 0.5, 0.25]), torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    assert losses.group_advantages(rewards, solved, own).tolist() == [-0.25, 0.0, 1.5, 0.5, 0.0]
    assert not losses.group_advantages(rewards, solved * 0, own).any(), "the gate comes first"
    for name, problem in {
        "own_advantages:first": "one finite number each",
        "own_advantages:endless": "one finite number each",
        "own_advantages:strange": "ended in NameError",
        "own_advantages:absent": "cannot be imported",
        "absent_module:median": "PYTHONPATH",
        "median": "must be group, pass_at_k, none, batch, or MODULE:FUNCTION",
    }.items():
        with pytest.raises(ValueError, match=rf"loss\.baseline.*{name}.*{problem}"):
            losses.LossSettings(baseline=name)


@pytest.mark.parametrize("ratio", losses.WEIGHTED)
def test_centred_scores_have_no_mean_under_the_sampler(ratio: Any):
    """Sums over every token, weighted by the sampler's probability. With one advantage for all tokens, the mean gradient of the
    centred loss is 0; for each token its negative gradient is A (w (e − p) − (m − p Σ m)), m = q w."""
    logits, sampler_logits = (pair(seed, 12)[0] for seed in (1, 2))
    logits.requires_grad_()
    logprob, sampler = logits.log_softmax(-1), sampler_logits.log_softmax(-1)
    s = losses.LossSettings(ratio=ratio, tis_cap=1.5, icepop_low=0.6, icepop=1.8, centre_scores=True)
    r = (logprob.detach() - sampler).exp()
    bound = {"none": torch.ones_like(r), "cispo": r.clamp(0.8, 1.28), "tis": r.clamp(max=1.5)}
    w = bound.get(ratio, torch.where((r >= 0.6) & (r <= 1.8), r, 0.0))
    m, p, total = sampler.exp() * w, logprob.detach().exp(), torch.zeros(12, dtype=torch.float64)
    for token in range(12):
        a, ones = torch.tensor([0.7], dtype=torch.float64), torch.ones(1, dtype=torch.int64)
        token_logprob, behaviour = logprob[token : token + 1], sampler[token : token + 1]
        loss, _ = losses.policy_loss(token_logprob, behaviour, a, ones - 1, s, 1.0)
        loss = loss + losses.centring(logprob[None], sampler[None], a, s, 1.0, ones)
        (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
        hot = torch.nn.functional.one_hot(torch.tensor(token), 12)
        torch.testing.assert_close(-slope, 0.7 * (w[token] * (hot - p) - (m - p * m.sum())))
        total += sampler[token].exp() * slope
    torch.testing.assert_close(total, torch.zeros_like(total))


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_clip_cov_drops_the_tokens_that_lower_the_entropy_most(seed: int, share: float):
    random = np.random.default_rng(seed)
    logprob, advantage = -random.exponential(size=40), random.normal(size=40)
    covariance = [(a - advantage.mean()) * (x - logprob.mean()) for a, x in zip(advantage, logprob, strict=True)]
    highest = sorted(range(40), key=lambda i: -covariance[i])[: int(share * 40)]
    clipped = losses.clip_covariance(torch.from_numpy(logprob), torch.from_numpy(advantage), share)
    assert clipped.tolist() == [0.0 if i in highest else a for i, a in enumerate(advantage.tolist())]


# Kullback-Leibler estimators, by enumeration


def pair(seed: int, size: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))


@pytest.mark.parametrize("seed", range(4))
def test_k1_and_k3_are_unbiased_and_k2_and_k3_never_negative(seed: int):
    policy, reference = (logits.log_softmax(-1) for logits in pair(seed))
    divergence = float((policy.exp() * (policy - reference)).sum())
    k1, k2, k3 = (losses.kl_estimate(policy, reference, kind) for kind in ("k1", "k2", "k3"))
    for unbiased in (k1, k3):
        assert float((policy.exp() * unbiased).sum()) == pytest.approx(divergence)
    torch.testing.assert_close(k1, policy - reference)
    torch.testing.assert_close(k2, (policy - reference) ** 2 / 2)
    torch.testing.assert_close(k3, (reference - policy).exp() - 1 - (reference - policy))
    assert bool((k2 >= 0).all()) and bool((k3 >= 0).all()) and bool((k1 < 0).any())
    for kind in ("k1", "k2", "k3"):
        assert not losses.kl_estimate(policy, policy, kind).any()


def penalised(case: dict[str, Tensor], reference: Tensor, s: losses.LossSettings, denominator: float) -> Tensor:
    """Return the gradient of the whole loss, as a learner adds it up."""
    logprob = case["logprob"].clone().requires_grad_()
    deduction, penalty = losses.kl_penalty(logprob, reference, case["rollout"], s, denominator)
    assert not deduction.requires_grad
    loss, _ = losses.policy_loss(
        logprob, case["sampled"], case["advantage"] - deduction, case["rollout"], s, denominator
    )
    (slope,) = torch.autograd.grad(loss + penalty, logprob)
    return slope


@pytest.mark.parametrize("length_norm", [False, True])
@settings(max_examples=25, deadline=None)
@given(case=cases(), gap=st.floats(-2, 2))
def test_the_penalty_is_where_its_papers_have_it(case: dict[str, Tensor], gap: float, length_norm: bool):
    """k1 is part of the advantage, so it is clipped; k2 and k3 are added to the loss, whatever the clip does. All is float64."""
    reference = case["logprob"] + gap * torch.linspace(-1, 1, len(case["logprob"]), dtype=torch.float64)
    plain = losses.LossSettings(length_norm=length_norm)
    assume(not near_a_border(case, plain))
    length = torch.bincount(case["rollout"])[case["rollout"]] if length_norm else 1.0
    free = penalised(case, case["logprob"], plain, 7.0)
    apart = case["logprob"] - reference
    expected = {
        "k1": penalised({**case, "advantage": case["advantage"] - 0.3 * apart}, case["logprob"], plain, 7.0),
        "k2": free + 0.3 * apart / length / 7.0,
        "k3": free + 0.3 * (1 - (-apart).exp()) / length / 7.0,
    }
    for kind, slope in expected.items():
        s = losses.LossSettings(length_norm=length_norm, beta=0.3, kl=kind)  # type: ignore[arg-type]
        torch.testing.assert_close(penalised(case, reference, s, 7.0), slope, atol=1e-9, rtol=1e-9)
