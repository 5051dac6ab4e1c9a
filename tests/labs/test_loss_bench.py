"""The loss bench: each loss's gradient against its formula written out in float64, and the exact one against enumeration."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from composer_nb.labs import losses as module
from composer_nb.labs.losses import EXACT, LOSSES, OURS, REMEDIES, SampledTokens, bench, effective_share, exact, slope
from composer_nb.trainer.learning.loss import LossSettings, group_advantages
from composer_nb.trainer.learning.packing import FlatBatch, Stream, Whole

VOCABULARY = 7


class Bigram(nn.Module):
    """A language model of one table, in float64: small enough to know everything about."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter(scale * table)


def score_bigram(model: Bigram, batch: FlatBatch, *_: Any) -> tuple[Tensor, Tensor]:
    before_S = batch.inputs_N[batch.place_U][batch.from_S]
    return model.table[before_S].log_softmax(-1)[torch.arange(len(before_S)), batch.token_S], torch.zeros(0)


def distributions(model: Bigram, batch: FlatBatch, *_: Any) -> tuple[Tensor, list[Any]]:
    return model.table[batch.inputs_N[batch.place_U][batch.from_S]].log_softmax(-1), []


@pytest.fixture
def bigrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "score", score_bigram)
    monkeypatch.setattr(module, "distributions", distributions)


def random_groups(seed: int, groups: int = 4, size: int = 4) -> list[list[Stream]]:
    """Return groups of streams with random tokens, random log-probabilities of the sampler and centred advantages."""
    random = np.random.default_rng(seed)

    def stream(advantage: float) -> Stream:
        tokens = int(random.integers(4, 14))
        acted = random.random(tokens) < 0.7
        acted[0], acted[-1] = False, True
        return Stream(
            token_ids=random.integers(0, VOCABULARY, tokens).astype(np.int32),
            acted=acted,
            logprob=np.where(acted, -random.uniform(0.2, 4.0, tokens), 0).astype(np.float32),
            advantage=np.where(acted, advantage, 0.0).astype(np.float32),
            routes=np.zeros((tokens, 1, 1), np.uint8),
        )

    batch = []
    for _ in range(groups):
        values = random.normal(size=size)
        batch.append([stream(float(value)) for value in values - values.mean()])
    return batch


def on_policy(model: nn.Module, groups: Sequence[Sequence[Stream]]) -> list[list[Stream]]:
    """Return the streams as if `model` had sampled them: with the very log-probabilities at which its gradients are taken."""
    streams = []
    for group in groups:
        logprobs = module.group_tokens(model, group, None).logprob_S.detach().float().numpy()
        parts = np.split(logprobs, np.cumsum([int(stream.acted[1:].sum()) for stream in group])[:-1])
        for stream, part in zip(group, parts, strict=True):
            logprob = np.zeros_like(stream.logprob)
            logprob[np.flatnonzero(stream.acted[1:]) + 1] = part
            streams.append(replace(stream, logprob=logprob))
    remaining = iter(streams)
    return [[next(remaining) for _ in group] for group in groups]


# Each loss by its paper's formula


def bounded(x: Tensor, low: float, high: float) -> Tensor:
    return x.detach().clamp(low, high)


def published(name: str, t: SampledTokens, rollouts: int, tokens: int) -> Tensor:
    """Return the loss as its paper writes it, rollout by rollout; A is R − mean(R) unless the row changes it."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(int(t.rollout_S.max()) + 1):
        members = t.rollout_S == i
        logprob, ratio, a = t.logprob_S[members], (t.logprob_S - t.sampled_S)[members].exp(), t.advantage_S[members]
        z = a * t.std_S[0]  # A over the standard deviation
        if name in ("ours", "k2", "k3", *REMEDIES.keys() - {"flashreinforce", "centred"}):
            loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a).sum() / tokens
        elif name in ("reinforce", "centred"):
            loss = -(a * logprob).sum() / tokens
        elif name == "grpo":
            loss = -torch.min(ratio * z, ratio.clamp(0.8, 1.2) * z).mean() / rollouts
        elif name == "std norm":
            loss = -torch.min(ratio * z, ratio.clamp(0.8, 1.28) * z).sum() / tokens
        elif name == "length norm":
            loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a).mean() / rollouts
        elif name == "gspo":
            whole = ratio.log().mean().exp()  # (π(y) / π_old(y)) to the power 1 / |y|
            loss = -torch.min(whole * a, whole.clamp(1 - 3e-4, 1 + 4e-4) * a).mean() / rollouts
        elif name == "cispo":
            loss = -(bounded(ratio, 0.0, 1.28) * a * logprob).sum() / tokens
        elif name == "tis":
            loss = -(bounded(ratio, 0.0, 2.0) * a * logprob).sum() / tokens
        elif name == "mis":
            whole = ratio.detach().prod()
            loss = -(whole * a * logprob).sum() / tokens if whole <= 2 else 0 * logprob.sum()
        elif name == "icepop":
            inside = (ratio.detach() >= 0.5) & (ratio.detach() <= 5.0)
            loss = -(torch.where(inside, ratio, torch.zeros_like(ratio)) * a).sum() / tokens
        elif name == "flashreinforce":
            p, q = (x.detach().exp().clamp(1e-6, 1 - 1e-6) for x in (t.sampled_S[members], logprob))
            apart = torch.distributions.kl_divergence(*map(torch.distributions.Bernoulli, (p, q))).mean()
            loss = -(ratio.detach() * a * logprob).mean() / rollouts if apart <= 3e-3 else 0 * logprob.sum()
        elif name == "dppo":
            probability, sampled_probability = logprob.detach().exp(), t.sampled_S[members].exp()
            far = (probability - sampled_probability).abs() > 0.2
            stopped = far & torch.where(a > 0, probability > sampled_probability, probability < sampled_probability)
            loss = -(torch.where(stopped, torch.zeros_like(ratio), ratio) * a).sum() / tokens
        else:
            assert name == "k1" and t.reference_S is not None
            less = a - 0.04 * (logprob.detach() - t.reference_S[members])
            loss = -torch.min(ratio * less, ratio.clamp(0.8, 1.28) * less).sum() / tokens
        if name in ("k2", "k3"):
            assert t.reference_S is not None
            gap = t.reference_S[members] - logprob
            loss = loss + 0.04 * (gap**2 / 2 if name == "k2" else gap.exp() - gap - 1).sum() / tokens
        total = total + loss
    return total


def test_the_exact_gradient_is_that_of_the_expected_reward():
    """Sums over every group of two rollouts of two tokens, weighted by its probability. The expectation of the estimate is
    (1 − 1/G) G times the gradient of the expected reward, since a rollout is part of its own baseline. No loss that works token
    by token has this property."""
    size, group = 3, 2
    random = torch.Generator().manual_seed(4)
    first, second = (torch.randn(n, size, generator=random, dtype=torch.float64) for n in (1, size))
    sampler_tables = [x + 0.8 * torch.randn(x.shape, generator=random, dtype=torch.float64) for x in (first, second)]
    first.requires_grad_(), second.requires_grad_()
    sequences = list(itertools.product(range(size), repeat=2))
    rewards = torch.randn(len(sequences), generator=random, dtype=torch.float64)

    def logprobs(tables: Sequence[Tensor], sequence: tuple[int, ...]) -> Tensor:
        a, b = sequence
        return torch.stack([tables[0].log_softmax(-1)[0, a], tables[1].log_softmax(-1)[a, b]])

    policy = [logprobs((first, second), sequence) for sequence in sequences]
    sampled = [logprobs(sampler_tables, sequence) for sequence in sequences]
    expected = sum(reward * p.sum().exp() for reward, p in zip(rewards, policy, strict=True))
    gradients = torch.autograd.grad(expected, (first, second), retain_graph=True)
    expected_gradient = torch.cat([g.flatten() for g in gradients])
    total, per_token = torch.zeros_like(expected_gradient), torch.zeros_like(expected_gradient)
    for members in itertools.product(range(len(sequences)), repeat=group):
        reward = rewards[list(members)]
        tokens = SampledTokens(
            logprob_S=torch.cat([policy[i] for i in members]),
            sampled_S=torch.cat([sampled[i] for i in members]),
            advantage_S=(reward - reward.mean()).repeat_interleave(2),
            std_S=torch.ones(4, dtype=torch.float64),
            rollout_S=torch.tensor([0, 0, 1, 1]),
            reference_S=None,
        )
        probability = torch.cat([sampled[i] for i in members]).sum().exp()
        for estimate, sums in ((exact(tokens, 1.0), total), (slope(tokens, LossSettings(ratio="tis"), 1.0), per_token)):
            grads = torch.autograd.grad(tokens.logprob_S, (first, second), -estimate.slope_S, retain_graph=True)
            sums += probability * torch.cat([g.flatten() for g in grads])
    torch.testing.assert_close(total, expected_gradient * (1 - 1 / group) * group)
    assert float((per_token - total).norm()) > 0.05 * float(total.norm())


# Gradients


def remedied(name: str, values: list[float], solved: list[bool]) -> list[float]:
    """A group's advantages, from its rewards."""
    mean, mixed = float(np.mean(values)), len({*solved}) > 1
    if name == "mixed groups" and not mixed:
        return [0.0] * len(values)
    if name == "outcome first" and mixed:
        return [float(outcome) - float(np.mean(solved)) for outcome in solved]
    if name == "pass@4":
        best = {subset: max(values[i] for i in subset) for subset in itertools.combinations(range(len(values)), 4)}
        shares = [np.mean([value for subset, value in best.items() if i in subset]) for i in range(len(values))]
        return [float(share - np.mean([*best.values()])) for share in shares]
    factor = 0.1 if name == "successes × 0.1" else 1.0
    return [(value - mean) * (factor if value > mean else 1.0) for value in values]


@pytest.mark.parametrize("name", [*LOSSES, *REMEDIES])
def test_every_loss_has_the_gradient_of_its_formula(bigrams: None, name: str):
    """Gradients are over a batch of groups; a remedy computes its advantages within a group or over the batch."""
    model, reference, sampler, groups = Bigram(1), Bigram(2), Bigram(1, 0.7), random_groups(3, size=6)
    groups = [*on_policy(model, groups[:2]), *groups[2:]]  # within every bound, and mostly beyond
    solved = [[index < count for index in range(6)] for count in (0, 2, 6, 5)]
    loss = {**LOSSES, **REMEDIES}[name]
    table = bench(model, groups, {name: loss}, reference=reference, solved=solved, sampler=sampler)
    parts = [module.group_tokens(model, group, reference) for group in groups]
    count = sum(len(part.rollout_S) for part in parts)
    for number, part in enumerate(parts):
        values = [float(part.advantage_S[part.rollout_S == rollout][0]) for rollout in range(6)]
        advantages = torch.tensor(remedied(name, values, solved[number]), dtype=torch.float64)
        parts[number] = part._replace(advantage_S=advantages[part.rollout_S])
    if name == "clip-cov":
        a, x = (torch.cat([getattr(part, n) for part in parts]) for n in ("advantage_S", "sampled_S"))
        worst = ((a - a.mean()) * (x - x.mean())).topk(int(0.02 * count)).indices
        a[worst] = 0.0
        split = a.split([len(part.rollout_S) for part in parts])
        parts = [part._replace(advantage_S=values) for part, values in zip(parts, split, strict=True)]
    terms = [published(name, part, 24, count) for part in parts]
    if name == "centred":
        for group, part in zip(groups, parts, strict=True):
            batch = module.flatten(group)
            (q, _), (logprob, _) = distributions(sampler, batch), distributions(model, batch)
            drift = (q.exp().detach() * logprob).sum(-1)
            terms.append((part.advantage_S * drift).sum() / count)
    expected = torch.autograd.grad(sum(terms), model.table)[0]
    assert table.gradient(name).dtype == torch.float64
    torch.testing.assert_close(table.gradient(name), expected.flatten(), atol=1e-7, rtol=1e-5)  # streams hold float32
    assert table.row(name).norm == pytest.approx(float(table.gradient(name).norm()))


def test_the_variance_is_that_of_every_resample_of_the_groups(bigrams: None):
    model, groups = Bigram(1), random_groups(3)
    table = bench(model, groups, chosen := {name: LOSSES[name] for name in ("ours", "grpo", "mis")})
    share = sum(int(s.acted[1:].sum()) for group in groups for s in group)
    for name in (*chosen, EXACT):
        counts = [4 if name == "grpo" else sum(int(s.acted[1:].sum()) for s in group) for group in groups]
        parts = [bench(model, [group], chosen).gradient(name) for group in groups]
        parts = [part * count / (16 if name == "grpo" else share) for part, count in zip(parts, counts, strict=True)]
        whole = torch.stack(parts).sum(0)
        draws = [torch.stack(draw).sum(0) for draw in itertools.product(parts, repeat=4)]
        spread = torch.stack([(draw - whole).square().sum() for draw in draws]).mean()
        assert table.row(name).variance == pytest.approx(float(spread / whole.square().sum()), rel=1e-5)


@pytest.mark.parametrize("more", [{"gate": "mixed"}, {"gate": "ties"}, {"positive_weight": 0.1}])
def test_a_remedy_beside_the_standard_deviation_has_the_learner_s_advantages(bigrams: None, more: dict[str, Any]):
    model, groups, loss = Bigram(1), random_groups(3), LossSettings(std_norm=True, **more)
    solved = [[index < count for index in range(4)] for count in (0, 2, 4, 1)]
    learnt = []
    for group, outcomes in zip(groups, solved, strict=True):
        rewards = torch.tensor([float(stream.advantage[stream.acted][0]) for stream in group])
        values = group_advantages(rewards, torch.tensor(outcomes), loss).tolist()
        pairs = zip(group, values, strict=True)
        learnt.append([replace(s, advantage=np.where(s.acted, a, 0.0).astype(np.float32)) for s, a in pairs])
    expected = bench(model, learnt, {OURS: LossSettings()}).gradient(OURS)
    gradient = bench(model, groups, {"both": loss}, solved=solved).gradient("both")
    torch.testing.assert_close(gradient, expected, atol=1e-7, rtol=1e-5)


def test_a_rollout_of_several_segments_counts_once_in_the_deviation(bigrams: None):
    [group] = random_groups(5, groups=1, size=4)
    pairs = zip(group, (2.0, 2.0, 0.0, -2.0), strict=True)
    group = [replace(stream, advantage=np.where(stream.acted, a, 0.0).astype(np.float32)) for stream, a in pairs]
    whole = Whole(sum(int(stream.acted[1:].sum()) for stream in group[:2]))
    group[:2] = [replace(stream, whole=whole) for stream in group[:2]]
    tokens = module.group_tokens(Bigram(1), group, None)
    assert float(tokens.std_S[0]) == pytest.approx(1 / float(np.std([2.0, 0.0, -2.0])), rel=1e-5)


# The table


@given(st.integers(1, 500), st.integers(0, 500), st.floats(1e-3, 1e3))
def test_effective_share_of_a_mask_is_what_it_leaves(remaining: int, dropped: int, scale: float):
    share = effective_share(np.repeat([scale, 0.0], [remaining, dropped]))
    assert share == pytest.approx(remaining / (remaining + dropped))
    assert math.isnan(effective_share(np.zeros(remaining)))


def test_rows_say_how_much_a_batch_teaches(bigrams: None):
    """A group without a signal counts in the rows; a batch of such groups has NaN rather than wrong numbers."""
    model, groups = Bigram(1), random_groups(7)
    dead = [[replace(stream, advantage=0 * stream.advantage) for stream in group] for group in groups]
    table = bench(model, [groups[0], dead[1], *groups[2:]], reference=Bigram(2))
    assert [row.loss for row in table.rows] == [*LOSSES, EXACT]
    lengths = np.array([[int(stream.acted[1:].sum()) for stream in group] for group in groups])
    assert all(sum(row.reasons.values()) == pytest.approx(1) for row in table.rows)
    assert table.row("reinforce").masked == table.row(EXACT).masked == 0 < table.row("ours").masked
    assert table.row("ours").reasons["no advantage"] == pytest.approx(lengths[1].sum() / lengths.sum())
    on_policy_table = bench(model, on_policy(model, groups), {"length norm": LOSSES["length norm"], OURS: LOSSES[OURS]})
    by_closed_form = lengths.size**2 / (lengths.sum() * (1 / lengths).sum())
    assert [row.ess for row in on_policy_table.rows[:2]] == pytest.approx([by_closed_form, 1], rel=1e-4)

    dead_table = bench(model, dead, {OURS: LossSettings(), "k1": LOSSES["k1"]}, reference=Bigram(2))
    assert dead_table.row("k1").norm > 0 == dead_table.row(OURS).norm, "the reference pulls, with nothing to compare to"
    assert math.isnan(dead_table.cosines[0, 1]) and math.isnan(dead_table.row(OURS).ess)
