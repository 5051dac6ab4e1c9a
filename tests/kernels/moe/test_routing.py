"""Routers of both kinds against loops, and what each level of replay takes over."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.moe.routing import Replay, RoutingRule, _best, load_balance, route

E = 8


def tokens(seed: int, n: int = 20, experts: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, D], router [E, D], bias [E]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randn(experts, 6, generator=g), torch.randn(experts, generator=g) * 0.3


def chosen_by_hand(score: list[float], bias: list[float], rule: RoutingRule) -> list[int]:
    """Return the experts that DeepSeek-V3 chooses for one token, in plain Python."""
    choice = [s + b for s, b in zip(score, bias, strict=True)]
    size = len(choice) // rule.groups
    groups = [range(g * size, (g + 1) * size) for g in range(rule.groups)]
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[:2]) for group in groups]
    best_groups = sorted(range(rule.groups), key=lambda g: -worth[g])[: rule.kept_groups]
    allowed = [e for g in best_groups for e in groups[g]]
    return sorted(allowed, key=lambda e: -choice[e])[: rule.chosen]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 9999), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4), (2, 2)]), st.integers(1, 4))
def test_the_sigmoid_router_is_deepseek_s(seed: int, groups: tuple[int, int], k: int):
    rule = RoutingRule(chosen=k, sigmoid=True, groups=groups[0], kept_groups=groups[1], scale=2.5)
    x, router, bias = tokens(seed)
    routing = route(x, router, rule, bias)
    score = (x.double() @ router.double().T).sigmoid()
    for n in range(len(x)):
        chosen = chosen_by_hand(score[n].tolist(), bias.tolist(), rule)
        assert routing.experts_NK[n].tolist() == chosen
        gates = score[n, chosen] / score[n, chosen].sum() * 2.5
        torch.testing.assert_close(routing.gates_NK[n].double(), gates, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(routing.probs_NE.sum(-1), torch.ones(len(x)))
    assert (routing.margin_N >= 0).all() and (routing.margin_N <= 1).all()


RULES = [RoutingRule(chosen=3), RoutingRule(chosen=3, sigmoid=True, scale=2.0)]


def recorded(seed: int, n: int = 20, k: int = 3) -> tuple[Tensor, Tensor]:
    """Experts of another router, and gates of its own."""
    g = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(n)])
    gates = torch.rand(n, k, generator=g)
    return experts, gates / gates.sum(-1, keepdim=True)


@pytest.mark.parametrize("rule", RULES, ids=["softmax", "sigmoid"])
def test_each_level_takes_over_more(rule: RoutingRule):
    x, router, bias = tokens(2)
    experts, gates = recorded(3)
    routings = {
        level: route(x, router, rule, bias, Replay(experts=experts, gates=gates, level=level))
        for level in ("ids", "ids+order", "weights")
    }
    for routing in routings.values():
        assert torch.equal(routing.experts_NK.sort(-1).values, experts.sort(-1).values), "the set, always"
    choice = (x @ router.T).sigmoid() + bias if rule.sigmoid else x @ router.T
    live = choice.gather(1, routings["ids"].experts_NK)
    assert (live.diff(dim=-1) <= 0).all(), "ids: in the order of the live scores"
    assert torch.equal(routings["ids+order"].experts_NK, experts) and torch.equal(
        routings["weights"].experts_NK, experts
    )
    assert torch.equal(routings["weights"].gates_NK, gates), "weights: the gates on record"
    back = routings["ids"].experts_NK.argsort(-1).argsort(-1)
    assert back.shape == experts.shape
    for level in ("ids", "ids+order"):  # live gates, whatever their order
        with_order, replayed = (routings[name] for name in ("ids+order", level))
        sets = [r.gates_NK.gather(1, r.experts_NK.argsort(-1)) for r in (with_order, replayed)]
        torch.testing.assert_close(*sets)


@pytest.mark.parametrize("level", ["ids", "ids+order", "weights"])
def test_tokens_without_routes_take_their_own(level: Any):
    x, router, _ = tokens(6)
    experts, gates = recorded(7)
    valid = torch.arange(20) % 3 > 0
    live = route(x, router, RULES[0])
    routing = route(x, router, RULES[0], None, Replay(experts=experts, gates=gates, level=level, valid_N=valid))
    assert torch.equal(routing.experts_NK[~valid], live.experts_NK[~valid])
    torch.testing.assert_close(routing.gates_NK[~valid], live.gates_NK[~valid])
    assert torch.equal(routing.experts_NK[valid].sort(-1).values, experts[valid].sort(-1).values)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 9999), st.sampled_from([0.0, 0.2, 0.6, 0.95, 1.0]), st.sampled_from(RULES))
def test_implausible_experts_are_replaced_by_the_best_of_the_router_s_own(seed: int, alpha: float, rule: RoutingRule):
    x, router, bias = tokens(seed)
    experts, _ = recorded(seed + 1)
    routing = route(x, router, rule, bias, Replay(experts=experts, level="ids+order", plausible=alpha))
    live = route(x, router, rule, bias)
    score = (x @ router.T).sigmoid() if rule.sigmoid else (x @ router.T).softmax(-1)
    for n in range(len(x)):
        live_experts, recorded_experts = live.experts_NK[n].tolist(), experts[n].tolist()
        least = alpha * min(float(score[n, e]) for e in live_experts)
        plausible = [e for e in recorded_experts if alpha == 0 or float(score[n, e]) >= least]
        spare = [e for e in live_experts if e not in plausible]
        expected = [e if e in plausible else spare.pop(0) for e in recorded_experts]
        assert routing.experts_NK[n].tolist() == expected and len(set(expected)) == rule.chosen
    if alpha == 0:
        assert routing.implausible_NK is None and torch.equal(routing.experts_NK, experts)


@given(st.integers(0, 9999), st.sampled_from([(1, 1), (4, 2), (64, 5), (130, 9)]), st.booleans())
def test_the_best_come_first_and_of_equal_ones_the_lower_number(seed: int, shape: tuple[int, int], spoilt: bool):
    experts, count = shape
    score = torch.randn(12, experts, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    if spoilt:
        score[3, seed % experts], score[4, seed % experts] = float("nan"), -float("inf")
    best = _best(score, count)
    keys = score.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
    assert torch.equal(best, keys.argsort(dim=-1, descending=True, stable=True)[:, :count])


def test_load_balance_is_that_of_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    x, router, _ = tokens(7, 64, 6)
    logits = x @ router.requires_grad_().T
    theirs = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
    ours = load_balance(route(x, router, RoutingRule(chosen=2)))
    torch.testing.assert_close(ours, theirs)
    slopes = [torch.autograd.grad(loss, router, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes)
