"""The experts and the router against its definition, against a loop in float64, and at the edges."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.moe.experts import grouped_experts
from composer_nb.kernels.moe.routing import Replay, RoutingRule, load_balance, route


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
