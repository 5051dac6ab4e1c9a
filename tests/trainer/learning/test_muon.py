"""Muon: polar factors by singular value decomposition, every matrix by itself, AdamW for the rest, and resumption bit for bit."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.learning import optimizer
from composer_nb.trainer.learning.optimizer import (
    QUINTIC,
    FlatOptimizer,
    OptimizerSettings,
    look_ahead,
    matrices,
    newton_schulz,
    orthogonal,
)
from composer_nb.trainer.models.transformer import Model

MUON = OptimizerSettings(name="muon")
EXACT = (15 / 8, -10 / 8, 3 / 8)
"""The quintic of Newton and Schulz, which converges to the polar factor."""
LATENT: dict[str, Any] = {
    "family": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 24,
    "v_head_dim": 12,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_nextn_predict_layers": 1,
    "num_hidden_layers": 2,
}


def muon_update(momentum: Tensor, gradient: Tensor) -> Tensor:
    return orthogonal(look_ahead(momentum, gradient, MUON), MUON)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 17), (2, 17, 5), (1, 1, 6)])
def test_enough_steps_of_the_exact_polynomial_give_the_polar_factor(shape: tuple[int, ...]):
    x = randn(*shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "QUINTIC", EXACT)
        torch.testing.assert_close(newton_schulz(x, 40), polar(x), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", [(4, 16, 16), (3, 8, 32), (3, 32, 8)])
def test_five_steps_keep_the_singular_vectors_and_bring_the_values_near_one(shape: tuple[int, ...]):
    x = randn(*shape, seed=1)
    u, value, vh = torch.linalg.svd(x, full_matrices=False)
    found = u.mT @ newton_schulz(x) @ vh.mT
    # By the definition: the polynomial of each singular value on its own.
    wanted = value / value.square().sum(-1, keepdim=True).sqrt()
    a, b, c = QUINTIC
    small = wanted < 0.01
    for _ in range(5):
        wanted = a * wanted + b * wanted**3 + c * wanted**5
    torch.testing.assert_close(found, torch.diag_embed(wanted), atol=1e-6, rtol=0)
    assert ((wanted > 0.65) & (wanted < 1.25) | small).all() and small.float().mean() < 0.1


def test_each_matrix_of_a_stack_is_updated_by_itself_and_scale_does_not_matter():
    gradient, momentum = randn(5, 6, 9), randn(5, 6, 9, seed=1)
    alone = [muon_update(m.clone(), g) for m, g in zip(momentum.split(1), gradient.split(1), strict=True)]
    kept = momentum.clone()
    together = muon_update(kept, gradient)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-12, rtol=0)
    torch.testing.assert_close(kept, 0.95 * momentum + 0.05 * gradient)
    torch.testing.assert_close(muon_update(momentum * 1e3, gradient * 1e3), together, atol=1e-6, rtol=0)


def test_a_matrix_without_gradient_or_momentum_stays_where_it_is():
    gradient = randn(2, 4, 4)
    gradient[1] = 0
    assert not muon_update(torch.zeros(2, 4, 4, dtype=torch.float64), gradient)[1].any()


def test_one_matrix_is_updated_as_torch_s_muon_does():
    """torch computes the polynomial in bfloat16."""
    ours, momentum = randn(24, 40, dtype=torch.float32), torch.zeros(1, 24, 40)
    theirs = torch.nn.Parameter(ours.clone())
    muon = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        gradient = randn(24, 40, seed=step, dtype=torch.float32)
        theirs.grad = gradient.clone()
        muon.step()
        ours = ours * (1 - 0.02 * 0.1) - 0.02 * muon_update(momentum, gradient[None])[0]
    moved = theirs.detach() - randn(24, 40, dtype=torch.float32)
    assert float((ours - theirs.detach()).norm() / moved.norm()) < 0.02


@pytest.mark.parametrize("sizes", [{}, LATENT], ids=["grouped", "latent"])
def test_every_weight_is_in_one_matrix_or_is_adamw_s(make_model, sizes: dict[str, Any]):
    model: Model = make_model(0, **sizes)
    for name, weight in model.named_parameters():
        marks = torch.zeros_like(weight)
        stacks = matrices(name, marks, model.config)
        for stack in stacks:
            stack.add_(1)
        left_out = any(word in name for word in ("norm", "embed", "router")) or name == "head"
        assert (marks == (0 if left_out else 1)).all(), name
    shapes = {name: [tuple(s.shape) for s in matrices(name, w, model.config)] for name, w in model.named_parameters()}
    if sizes:
        assert shapes["_layers.1.kv_b"] == [(4, 16, 24), (4, 12, 24)] and shapes["_layers.1.q_b"] == [(4, 24, 16)]
        assert shapes["_layers.0.dense_in"] == [(1, 32, 48)] * 2 and shapes["_layers.0.o"] == [(4, 32, 12)]
    else:
        assert shapes["_layers.0.qkv"] == [(8, 16, 32)] and shapes["_layers.0.o"] == [(4, 32, 16)]
        assert shapes["_layers.0.w_in"] == [(6, 32, 16)] * 2 and shapes["_layers.0.w_out"] == [(6, 16, 32)]


def steps(model: Model, muon: FlatOptimizer, numbers: range) -> None:
    for step in numbers:
        muon.zero_()
        for place, parameter in enumerate(model.parameters()):
            (parameter * randn(*parameter.shape, seed=100 * step + place, dtype=torch.float32)).sum().backward()
        muon.step(1e-2, 1.0)


@pytest.mark.parametrize("sizes", [{}, LATENT], ids=["grouped", "latent"])
def test_a_step_is_that_of_a_loop_over_heads_and_experts(make_model, sizes: dict[str, Any]):
    model: Model = make_model(1, **sizes)
    c, start = model.config, copy.deepcopy(dict(model.named_parameters()))
    adam = copy.deepcopy(model)
    muon = FlatOptimizer(model, MUON, weight_decay=0.1)
    steps(model, muon, range(1))
    steps(adam, FlatOptimizer(adam, weight_decay=0.1), range(1))
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    for (name, found), twin in zip(model.named_parameters(), adam.parameters(), strict=True):
        last = name.rpartition(".")[2]
        gradient = gradients[name]
        if last == "qkv" or last == "q_b":
            parts = [polar_of_five(part) for part in gradient.split(c.head_dim)]
            wanted = torch.cat(parts)
        elif last == "o":
            wanted = torch.cat([polar_of_five(part) for part in gradient.split(c.value_width, dim=1)], dim=1)
        elif last == "w_out":
            wanted = torch.stack([polar_of_five(part) for part in gradient])
        elif last in ("dense_in", "shared_in"):
            wanted = torch.cat([polar_of_five(half) for half in gradient.chunk(2, dim=1)], dim=1)
        elif last == "embed" or "norm" in last or last in ("router", "head"):
            assert torch.equal(found, twin), name
            continue
        else:
            continue
        expected = start[name].double() * (1 - 1e-2 * 0.1) - 1e-2 * wanted
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def polar_of_five(x: Tensor) -> Tensor:
    """The update of one matrix from rest, by its singular value decomposition."""
    u, value, vh = torch.linalg.svd(x, full_matrices=False)
    value = value / value.norm()
    a, b, c = QUINTIC
    for _ in range(5):
        value = a * value + b * value**3 + c * value**5
    return 0.2 * math.sqrt(max(x.shape)) * (u * value) @ vh


@pytest.mark.parametrize("published", [None, torch.bfloat16])
@pytest.mark.parametrize("done", [0, 2])
def test_a_run_with_muon_resumes_bit_for_bit(make_model, tmp_path: Path, published: torch.dtype | None, done: int):
    model = make_model(1)
    first = FlatOptimizer(model, MUON, weight_decay=0.1, published=published)
    steps(model, first, range(done))
    save_file(first.state(), tmp_path / "state.safetensors")
    steps(model, first, range(done, 4))
    other = make_model(2)
    resumed = FlatOptimizer(other, MUON, weight_decay=0.1, published=published)
    steps(other, resumed, range(90, 92))  # what it did before must not matter
    resumed.load(load_file(tmp_path / "state.safetensors"))
    steps(other, resumed, range(done, 4))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    kept, again = first.state(), resumed.state()
    assert kept.keys() == again.keys() and all(torch.equal(kept[name], again[name]) for name in kept)


def test_a_checkpoint_of_the_other_optimiser_is_refused(make_model):
    model, other = make_model(1), make_model(1)
    adam, muon = FlatOptimizer(model, OptimizerSettings()), FlatOptimizer(other, MUON)
    steps(model, adam, range(1))
    steps(other, muon, range(1))
    before = muon.weights.clone()
    with pytest.raises(ValueError, match=r"optimizer\.name='muon': .* another optimiser"):
        muon.load(adam.state())
    with pytest.raises(ValueError, match=r"optimizer\.name='adamw': .* another optimiser"):
        adam.load(muon.state())
    assert torch.equal(muon.weights, before)
