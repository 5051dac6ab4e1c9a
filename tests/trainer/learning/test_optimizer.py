"""The flat optimiser: AdamW to the letter, masters under published weights, and resumption bit for bit."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from composer_nb.trainer.learning.optimizer import QUINTIC, FlatOptimizer, OptimizerSettings, look_ahead, orthogonal
from composer_nb.trainer.models.transformer import Model
from tests.tiny_models import LATENT


def gradients(model: Model, seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) * scale for p in model.parameters()]


def give(model: Model, slopes: list[Tensor]) -> None:
    """As `backward` does: added to what is there."""
    for parameter, slope in zip(model.parameters(), slopes, strict=True):
        (parameter * slope).sum().backward()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [1e9, 0.7], ids=["unclipped", "clipped"])
def test_it_is_adamw_tensor_by_tensor(make_model, weight_decay: float, clip: float):
    model = make_model(1)
    twin = copy.deepcopy(model)
    ours = FlatOptimizer(model, weight_decay=weight_decay)
    theirs = torch.optim.AdamW(twin.parameters(), betas=(0.9, 0.95), weight_decay=weight_decay, fused=False)
    for step in range(6):
        lr = 1e-2 / (step + 1)
        slopes = gradients(model, step)
        ours.zero_()
        give(model, slopes)
        norm = ours.step(lr, clip)
        for parameter, slope in zip(twin.parameters(), slopes, strict=True):
            parameter.grad = slope.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_published_weights_are_the_masters_rounded(make_model):
    model = make_model(1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = FlatOptimizer(model, published=torch.bfloat16)
    for parameter, original in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, original.bfloat16().float()), "already at the start"
    for step in range(5):
        optimizer.zero_()
        give(model, gradients(model, step))
        optimizer.step(1e-3, 1.0)
        assert torch.equal(optimizer.weights, optimizer.master.bfloat16().float())
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.equal(flat, optimizer.weights)
    assert not torch.equal(optimizer.weights, optimizer.master), "the masters know more"


def test_steps_too_small_for_bf16_add_up_in_the_masters(make_model):
    model = make_model(1)
    optimizer = FlatOptimizer(model, published=torch.bfloat16)
    start, first = optimizer.weights.clone(), None
    for step in range(400):
        optimizer.gradients.fill_(1.0)
        optimizer.step(1e-6, 1e9)
        first = first if step else float((optimizer.weights != start).float().mean())
    moved = float((optimizer.weights != start).float().mean())
    assert first < 0.02 < 0.1 < moved
    torch.testing.assert_close(optimizer.master.detach(), start - 400e-6, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("published", [None, torch.bfloat16])
@pytest.mark.parametrize(("name", "steps_done"), [("adamw", 0), ("adamw", 3), ("muon", 0), ("muon", 2)])
def test_a_run_that_resumes_from_disk_goes_on_bit_for_bit(
    make_model, tmp_path: Path, published, name: Any, steps_done: int
):
    def steps(model: Model, optimizer: FlatOptimizer, numbers: range) -> None:
        for step in numbers:
            optimizer.zero_()
            give(model, gradients(model, step))
            optimizer.step(1e-2, 1.0)

    model, chosen = make_model(1), OptimizerSettings(name=name)
    optimizer = FlatOptimizer(model, chosen, weight_decay=0.1, published=published)
    steps(model, optimizer, range(steps_done))
    save_file(optimizer.state(), tmp_path / "state.safetensors")
    steps(model, optimizer, range(steps_done, 5))

    fresh_model = make_model(2)
    resumed = FlatOptimizer(fresh_model, chosen, weight_decay=0.1, published=published)
    steps(fresh_model, resumed, range(90, 92))  # what it did before must not matter
    resumed.load(load_file(tmp_path / "state.safetensors"))
    steps(fresh_model, resumed, range(steps_done, 5))
    for a, b in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert torch.equal(a, b)
    state, resumed_state = optimizer.state(), resumed.state()
    assert state.keys() == resumed_state.keys() >= {"master", "step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(state[name], resumed_state[name]) for name in state)
    third = FlatOptimizer(make_model(1), OptimizerSettings(name="muon" if name == "adamw" else "adamw"))
    with pytest.raises(ValueError, match=r"optimizer\.name='(adamw|muon)': .* another optimiser"):
        third.load(state)


def test_a_state_of_another_model_is_refused(make_model):
    state = FlatOptimizer(make_model(1)).state()
    optimizer = FlatOptimizer(make_model(1, vocab_size=60))
    before = optimizer.weights.clone()
    with pytest.raises(ValueError, match=r"holds \d+ weights, the model \d+: the model's settings changed"):
        optimizer.load(state)
    assert torch.equal(optimizer.weights, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_stops_the_run_before_it_reaches_the_weights(make_model, bad: float):
    optimizer = FlatOptimizer(make_model(1))
    before = optimizer.weights.clone()
    optimizer.gradients[7] = bad
    with pytest.raises(FloatingPointError, match="lr"):
        optimizer.step(1e-3, 1.0)
    assert torch.equal(optimizer.weights, before)


# Muon


MUON = OptimizerSettings(name="muon")


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_one_matrix_is_updated_as_torch_s_muon_does():
    """torch computes the polynomial in bfloat16."""
    ours, momentum = randn(24, 40, dtype=torch.float32), torch.zeros(1, 24, 40)
    theirs = torch.nn.Parameter(ours.clone())
    muon = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        gradient = randn(24, 40, seed=step, dtype=torch.float32)
        theirs.grad = gradient.clone()
        muon.step()
        update = orthogonal(look_ahead(momentum, gradient[None], MUON), MUON)[0]
        ours = ours * (1 - 0.02 * 0.1) - 0.02 * update
    moved = theirs.detach() - randn(24, 40, dtype=torch.float32)
    assert float((ours - theirs.detach()).norm() / moved.norm()) < 0.02


def muon_steps(model: Model, muon: FlatOptimizer, numbers: range) -> None:
    for step in numbers:
        muon.zero_()
        for index, parameter in enumerate(model.parameters()):
            (parameter * randn(*parameter.shape, seed=100 * step + index, dtype=torch.float32)).sum().backward()
        muon.step(1e-2, 1.0)


@pytest.mark.parametrize(
    "sizes", [{}, LATENT | {"n_shared_experts": 2, "num_nextn_predict_layers": 1}], ids=["grouped", "latent"]
)
def test_a_step_is_that_of_a_loop_over_heads_and_experts(make_model, sizes: dict[str, Any]):
    model: Model = make_model(1, **sizes)
    c, start = model.config, copy.deepcopy(dict(model.named_parameters()))
    adam = copy.deepcopy(model)
    muon = FlatOptimizer(model, MUON, weight_decay=0.1)
    muon_steps(model, muon, range(1))
    muon_steps(adam, FlatOptimizer(adam, weight_decay=0.1), range(1))
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    for (name, parameter), twin in zip(model.named_parameters(), adam.parameters(), strict=True):
        last = name.rpartition(".")[2]
        gradient = gradients[name]
        if last == "qkv" or last == "q_b":
            parts = [polar_of_five(part) for part in gradient.split(c.head_dim)]
            update = torch.cat(parts)
        elif last == "o":
            update = torch.cat([polar_of_five(part) for part in gradient.split(c.value_width, dim=1)], dim=1)
        elif last == "w_out":
            update = torch.stack([polar_of_five(part) for part in gradient])
        elif last in ("dense_in", "shared_in"):
            update = torch.cat([polar_of_five(half) for half in gradient.chunk(2, dim=1)], dim=1)
        elif last == "embed" or "norm" in last or last in ("router", "head"):
            assert torch.equal(parameter, twin), name
            continue
        else:
            continue
        expected = start[name].double() * (1 - 1e-2 * 0.1) - 1e-2 * update
        torch.testing.assert_close(parameter.double(), expected, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def polar_of_five(x: Tensor) -> Tensor:
    """The update of one matrix from rest, by its singular value decomposition."""
    u, value, vh = torch.linalg.svd(x, full_matrices=False)
    value = value / value.norm()
    a, b, c = QUINTIC
    for _ in range(5):
        value = a * value + b * value**3 + c * value**5
    return 0.2 * math.sqrt(max(x.shape)) * (u * value) @ vh
