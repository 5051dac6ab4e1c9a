"""The experts and the router against its definition, against a loop in float64, and at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.moe.experts import grouped_experts
from composer_nb.kernels.moe.routing import Replay, Routing, RoutingRule, load_balance, route


def layer(seed: int, n: int, d: int, e: int, h: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x [N, D], router [E, D], w_in [E, D, 2H], w_out [E, H, D]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, router = normal(n, d), normal(e, d)
    w_in, w_out = normal(e, d, 2 * h) / d**0.5, normal(e, h, d) / h**0.5
    return tuple(tensor.to(dtype).requires_grad_() for tensor in (x, router, w_in, w_out))


def by_hand(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor, experts: Tensor) -> Tensor:
    """One token and one expert at a time, in the dtype of the inputs."""
    rows = []
    for token, chosen in zip(x, experts.tolist(), strict=True):
        scores = torch.exp(router @ token)
        total = sum(scores[e] for e in chosen)
        row = torch.zeros_like(token)
        for e in chosen:
            half = w_out.shape[1]
            gate, up = token @ w_in[e][:, :half], token @ w_in[e][:, half:]
            row = row + scores[e] / total * ((gate * torch.sigmoid(gate) * up) @ w_out[e])
        rows.append(row)
    return torch.stack(rows)


sizes = st.tuples(st.integers(1, 20), st.sampled_from([4, 8, 12]), st.integers(1, 7), st.sampled_from([4, 8]))


@settings(max_examples=25, deadline=None)
@given(sizes, st.data())
def test_the_grouped_layer_equals_the_definition_and_so_do_its_gradients(size: tuple[int, ...], data: st.DataObject):
    n, d, e, h = size
    k = data.draw(st.integers(1, e))
    seed = data.draw(st.integers(0, 1 << 20))
    inputs = layer(seed, n, d, e, h)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    routing = route(inputs[0], inputs[1], RoutingRule(chosen=k))
    wanted = by_hand(*exact, routing.experts_NK)
    pull = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slopes = torch.autograd.grad((wanted * pull).sum(), exact)
    got = grouped_experts(inputs[0], routing.experts_NK, routing.gates_NK, *inputs[2:])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-4)
    found = torch.autograd.grad((got * pull).sum(), inputs)
    for name, ours, exactly in zip(("x", "router", "w_in", "w_out"), found, slopes, strict=True):
        torch.testing.assert_close(ours.double(), exactly, atol=1e-4, rtol=2e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_its_gradients_are_those_that_finite_differences_find():
    inputs = layer(3, 5, 3, 4, 2, torch.float64)
    experts = route(inputs[0], inputs[1], RoutingRule(chosen=2)).experts_NK

    def whole(x: Tensor, router: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        chosen = (x @ router.T).softmax(-1).gather(1, experts)
        gates = chosen / chosen.sum(-1, keepdim=True)
        return grouped_experts(x, experts, gates, w_in, w_out)

    assert torch.autograd.gradcheck(whole, inputs)


def test_routing_is_softmax_then_top_k_with_gates_that_sum_to_one():
    x, router, *_ = layer(1, 50, 8, 5, 4)
    routing = route(x, router, RoutingRule(chosen=2))
    logits = (x.double() @ router.double().T).detach()
    order = logits.argsort(-1, descending=True)
    assert torch.equal(routing.experts_NK, order[:, :2])
    probs = logits.softmax(-1)
    torch.testing.assert_close(routing.probs_NE.double(), probs, atol=1e-6, rtol=1e-5)
    top = probs.sort(-1, descending=True).values
    torch.testing.assert_close(routing.gates_NK.double(), top[:, :2] / top[:, :2].sum(-1, keepdim=True))
    torch.testing.assert_close(routing.margin_N.double(), top[:, 1] - top[:, 2], atol=1e-6, rtol=1e-4)
    assert routing.gates_NK.dtype == torch.float32 and not routing.margin_N.requires_grad
    every = route(x, router, RoutingRule(chosen=5))
    torch.testing.assert_close(every.margin_N, every.probs_NE.min(-1).values), "with all experts, the last one's"


def test_replay_takes_the_given_experts_in_their_order_and_the_router_still_learns():
    x, router, w_in, w_out = layer(2, 12, 8, 6, 4)
    own = route(x, router, RoutingRule(chosen=2))
    given = torch.stack([(own.experts_NK[:, 1] + 1) % 6, own.experts_NK[:, 1]], 1)
    routing = route(x, router, RoutingRule(chosen=2), replay=Replay(experts=given))
    assert torch.equal(routing.experts_NK, given)
    live = routing.probs_NE.gather(1, given)
    torch.testing.assert_close(routing.gates_NK, live / live.sum(-1, keepdim=True))
    torch.testing.assert_close(routing.margin_N, own.margin_N)
    out = grouped_experts(x, routing.experts_NK, routing.gates_NK, w_in, w_out)
    wanted = by_hand(*(tensor.double() for tensor in (x, router, w_in, w_out)), given)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-4)
    (slope,) = torch.autograd.grad(out.square().sum(), router)
    touched = slope.abs().sum(-1) > 0
    assert touched[given.unique()].all() and slope.isfinite().all()


def test_replaying_a_model_s_own_routes_changes_nothing():
    x, router, w_in, w_out = layer(4, 30, 8, 6, 4)
    own = route(x, router, RoutingRule(chosen=3))
    again = route(x, router, RoutingRule(chosen=3), replay=Replay(experts=own.experts_NK))
    assert torch.equal(
        grouped_experts(x, own.experts_NK, own.gates_NK, w_in, w_out),
        grouped_experts(x, again.experts_NK, again.gates_NK, w_in, w_out),
    )


@pytest.mark.parametrize("shape", [(11, 2), (12, 3), (12, 1), (2, 12)])
def test_routes_that_do_not_fit_the_tokens_are_refused(shape: tuple[int, int]):
    x, router, *_ = layer(2, 12, 8, 6, 4)
    with pytest.raises(ValueError, match=r"replayed routes are .* the tokens need \(12, 2\)"):
        route(x, router, RoutingRule(chosen=2), replay=Replay(experts=torch.zeros(shape, dtype=torch.int64)))


def test_experts_without_a_token_do_nothing_and_get_no_gradient():
    x, router, w_in, w_out = layer(5, 9, 8, 6, 4)
    routing = route(x, router, RoutingRule(chosen=2), replay=Replay(experts=torch.tensor([[4, 1]] * 9)))
    slope_in, slope_out = torch.autograd.grad(
        grouped_experts(x, routing.experts_NK, routing.gates_NK, w_in, w_out).sum(), (w_in, w_out)
    )
    for expert in range(6):
        for slope in (slope_in, slope_out):
            assert bool(slope[expert].abs().sum() > 0) == (expert in (1, 4))


def test_bf16_stays_bf16_and_near_the_truth():
    inputs = layer(6, 40, 16, 4, 8, torch.bfloat16)
    routing = route(inputs[0], inputs[1], RoutingRule(chosen=2))
    out = grouped_experts(inputs[0], routing.experts_NK, routing.gates_NK, *inputs[2:]).detach()
    assert out.dtype == torch.bfloat16 and routing.gates_NK.dtype == torch.float32
    truth = by_hand(*(tensor.detach().double() for tensor in inputs), routing.experts_NK)
    assert float((out - truth).abs().max()) < 0.05 * float(truth.abs().max())


@pytest.mark.parametrize(("experts", "k"), [(4, 1), (4, 2), (8, 2), (6, 6)])
def test_load_balance_is_k_at_balance(experts: int, k: int):
    tokens = torch.arange(24 * experts)
    chosen = torch.stack([(tokens + i) % experts for i in range(k)], 1)
    even = torch.full((len(tokens), experts), 1 / experts)
    routing = Routing(chosen, torch.full(chosen.shape, 1 / k), even[:, 0], even, chosen)
    assert float(load_balance(routing)) == pytest.approx(k)
    if k < experts:
        sharp = torch.nn.functional.one_hot(chosen[:1].expand(len(tokens), k), experts).sum(1).float() / k
        worst = Routing(chosen[:1].expand(len(tokens), k), routing.gates_NK, even[:, 0], sharp, chosen)
        assert float(load_balance(worst)) == pytest.approx(experts), "all tokens at k experts"


def test_load_balance_is_that_of_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    x, router, *_ = layer(7, 64, 8, 6, 4)
    logits = x @ router.T
    theirs = load_balancing_loss_func((logits,), num_experts=6, top_k=2)
    ours = load_balance(route(x, router, RoutingRule(chosen=2)))
    torch.testing.assert_close(ours, theirs)
    slopes = [torch.autograd.grad(loss, router, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes)


def test_gates_stay_finite_when_replayed_experts_have_lost_all_probability():
    x, router = torch.ones(1, 4), torch.zeros(3, 4)
    router[0] = 100.0
    router.requires_grad_()
    routing = route(x, router, RoutingRule(chosen=2), replay=Replay(experts=torch.tensor([[1, 2]])))
    assert math.isclose(routing.gates_NK.sum().item(), 1.0, abs_tol=1e-6)
    (slope,) = torch.autograd.grad(routing.gates_NK[0, 0], router)
    assert slope.isfinite().all()
