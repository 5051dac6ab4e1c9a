"""The layer's kernels in Triton against their oracles in torch: in the interpreter, and on a GPU where there is one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_nb.kernels import moe
from composer_nb.kernels.formats.microscaling import MXTensor
from composer_nb.kernels.logprob import logprob_entropy as plain_logprob_entropy
from composer_nb.kernels.moe.layer import experts
from composer_nb.kernels.moe.plain import DispatchPlan, PlainSteps
from composer_nb.kernels.moe.recipes import as_numbers, quantise_rows, quantise_weights
from composer_nb.kernels.moe.routing import choose_experts
from composer_nb.kernels.triton_runtime import triton_version

pytestmark = [
    pytest.mark.skipif(triton_version() is None, reason="no Triton here; it has wheels for Linux"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
PLAIN = PlainSteps()


@pytest.fixture
def steps(device: str) -> PlainSteps:
    from composer_nb.kernels.moe.recipes import architecture
    from composer_nb.kernels.moe.steps_triton import TritonSteps

    return TritonSteps(architecture(torch.device(device)))


def normal(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def chosen(n: int, e: int, k: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """Experts that some tokens crowd to, and some that nobody takes."""
    pull = torch.linspace(2, -2, e)
    return choose_experts(normal(n, e, seed=seed) + pull, k).to(device)


def close(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    gap = (actual.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm()
    assert float(gap) <= limit


# -- routes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, e, k", [(1, 1, 1), (37, 6, 2), (20, 130, 8), (5, 8, 8)])
def test_the_router_chooses_as_its_oracle_ties_and_not_a_number_included(steps: PlainSteps, device, n, e, k):
    logits = normal(n, e).round(decimals=1)  # many ties
    logits[n // 2] = 0
    logits[-1, ::3] = float("nan")
    logits[0, 0] = -0.0
    assert torch.equal(steps.choose(logits.to(device), k).cpu(), choose_experts(logits, k))


def test_the_plan_of_one_layer_s_routes_among_those_of_several(steps: PlainSteps, device: str):
    """As a replay holds them, [N, L, K]."""
    for k in (1, 2):
        routes = torch.stack([chosen(300, 7, k, seed, device) for seed in (0, 1)], 1)[:, 1]
        actual, expected = steps.plan(routes, 7), PLAIN.plan(routes, 7)
        for part in ("ends_E", "token_M", "slot_M", "row_NK"):
            assert torch.equal(getattr(actual, part), getattr(expected, part)), part


# -- products ------------------------------------------------------------------------------------------------


def planned(device: str, n: int = 40, e: int = 5, k: int = 2) -> DispatchPlan:
    return PLAIN.plan(chosen(n, e, k, device=device), e)


@pytest.mark.parametrize("gather, transposed", [(True, False), (False, True)])
@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_the_product(device: str, steps: PlainSteps, gather: bool, transposed: bool, dtype: torch.dtype, limit: float):
    """No tile divides the first widths; tiles of width 128 are loaded by descriptors."""
    plan = planned(device)
    for a, b in ((40, 72), (128, 64)):
        x = normal(40 if gather else 80, a, device=device, dtype=dtype)
        w = normal(5, *((a, b) if transposed else (b, a)), seed=1, device=device, dtype=dtype)
        w = w.mT if transposed else w
        product = steps.product(x, w, plan, gather=gather, dtype=dtype)
        exact = PLAIN.product(x.double(), w.double(), plan, gather=gather, dtype=torch.float64)
        close(product, exact.to(dtype), limit)


@pytest.mark.parametrize("gather_g, gather_x", [(True, False), (False, True), (False, False)])
def test_gradients_of_weights_in_the_layout_of_the_weights(device, steps: PlainSteps, gather_g: bool, gather_x: bool):
    plan = planned(device)
    g = normal(40 if gather_g else 80, 40, device=device)
    x = normal(40 if gather_x else 80, 72, seed=1, device=device)
    for like in (g.new_empty(5, 40, 72), g.new_empty(5, 72, 40).mT):
        gradient = steps.outer(g, x, plan, gather_g=gather_g, gather_x=gather_x, like=like)
        exact = PLAIN.outer(g.double(), x.double(), plan, gather_g=gather_g, gather_x=gather_x, like=like.double())
        assert gradient.stride() == like.stride()
        close(gradient, exact.float(), 1e-6)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers at an address that no descriptor may have: a view of a flat buffer."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)


def one_row(tensor: Tensor) -> Tensor:
    """The same row with a stride between rows that no descriptor may have."""
    return tensor.as_strided(tensor.shape, (1, 1))


@pytest.mark.parametrize("relayout", [shifted, one_row])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_need_no_alignment(device: str, steps: PlainSteps, dtype: torch.dtype, relayout: Any):
    from composer_nb.kernels import logprob_triton

    limit, zero = {torch.float32: 1e-6, torch.bfloat16: 3e-3}[dtype], torch.zeros(1, dtype=torch.int64, device=device)
    plan = PLAIN.plan(zero[:, None], 1)
    a, g, w = (normal(*size, seed=sum(size), device=device, dtype=dtype) for size in ((1, 64), (1, 128), (1, 128, 64)))
    for weight in (w, w.mT.contiguous().mT):
        expected = PLAIN.product(a, weight, plan, gather=False, dtype=dtype)
        close(steps.product(relayout(a), weight, plan, gather=False, dtype=dtype), expected, limit)
        close(steps.product(a, shifted(w), plan, gather=False, dtype=dtype), expected, limit)
    expected = PLAIN.outer(g, a, plan, gather_g=False, gather_x=False, like=w)
    close(steps.outer(g, relayout(a), plan, gather_g=False, gather_x=False, like=w), expected, limit)
    actual, expected = (torch.stack(logprob_triton.logprob_entropy(x, w[0], zero, zero)) for x in (relayout(a), a))
    close(actual, expected, 1e-6)


@pytest.mark.parametrize("format", ["mxfp8", "fp8_block128", "nvfp4", "nvfp4_tensor"])
def test_scaled_products_multiply_the_numbers_that_the_formats_have(device: str, steps: PlainSteps, format):
    """A depth of 160 cuts the last step of a loop over blocks; blocks of 128 need whole squares."""
    depth, width = (128, 128) if format == "fp8_block128" else (160, 96)
    plan = planned(device, n=20, e=3)
    x, w = normal(20, depth, device=device), normal(3, width, depth, seed=1, device=device)
    x[3], w[1, :40] = x[3] * 1e4, w[1, :40] * 1e-4
    qx, qw = quantise_rows(x, format), quantise_weights(w, format)
    expected = PLAIN.product(
        as_numbers(qx, torch.float64), as_numbers(qw, torch.float64), plan, gather=True, dtype=torch.float64
    )
    # Hopper keeps sums of float8 products in fewer bits than float32, even over 128 of them.
    limit = 1e-6 if device == "cpu" else 5e-4
    close(steps.product(qx, qw, plan, gather=True, dtype=torch.float32), expected.float(), limit)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "nvfp4_tensor"])
def test_products_of_widened_operands_are_the_same(device: str, format):
    """A GPU without block-scaled products widens its operands: gathered rows, and rows and weights that the TMA could load."""
    from composer_nb.kernels.moe.steps_triton import TritonSteps

    plan, steps = planned(device, n=20, e=3), TritonSteps(90)
    for rows, gather in ((20, True), (len(plan.token_M), False)):
        x, w = normal(rows, 128, device=device), normal(3, 96, 128, seed=1, device=device)
        qx, qw = quantise_rows(x, format), quantise_weights(w, format)
        expected = PLAIN.product(qx, qw, plan, gather=gather, dtype=torch.float32)
        close(steps.product(qx, qw, plan, gather=gather, dtype=torch.float32), expected, 1e-6)


# -- between the products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [None, "mxfp8", "fp8_block128", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_with_its_backward_pass_and_quantisation(device: str, steps: PlainSteps, format, dtype: torch.dtype):
    half = 384 if format == "fp8_block128" else 96
    h, d = normal(11, 2 * half, device=device, dtype=dtype), normal(11, half, seed=1, device=device, dtype=dtype)
    gate = normal(11, seed=2, device=device).abs()
    limit = 1e-6 if dtype == torch.float32 else 3e-3
    if format is not None:  # an exponential's last bit may move a number over a format's edge
        limit = 5e-3
    close(as_numbers(steps.swiglu(h, gate, format), dtype), as_numbers(PLAIN.swiglu(h, gate, format), dtype), limit)
    actual, expected = steps.swiglu_backward(d, h, gate, format), PLAIN.swiglu_backward(d, h, gate, format)
    for tensor, expected_tensor in zip(actual, expected, strict=True):
        close(as_numbers(tensor, dtype), as_numbers(expected_tensor, dtype), limit)
    if isinstance(actual[1], MXTensor):  # the quantised rows are the stored ones
        again = quantise_rows(actual[0], format)
        assert isinstance(again, MXTensor) and torch.equal(again.scale, actual[1].scale)
        assert torch.equal(again.qdata.view(torch.uint8), actual[1].qdata.view(torch.uint8))


# -- the layer -----------------------------------------------------------------------------------------------


def layer(n: int, d: int, i: int, e: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    tensors = normal(n, d), normal(n, e, seed=1), normal(e, 2 * i, d, seed=2) / d**0.5, normal(e, d, i, seed=3) / i**0.5
    return tuple(tensor.to(device, dtype).requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("recipe, limit", [("bf16", 2e-6), ("mxfp8", 4e-3), ("fp8_block128", 4e-3), ("nvfp4", 2e-2)])
def test_the_layer_and_its_gradients_are_those_of_torch(device: str, recipe: str, limit: float):
    operands = layer(8, 128, 128, 2, device) if recipe == "fp8_block128" else layer(12, 64, 32, 2, device)
    if device == "cuda" and recipe == "fp8_block128":
        limit = 2e-2  # sums of float8 products in about 14 bits round some operands of later products the other way
    pull = normal(*operands[0].shape, seed=4, device=device)
    ours, theirs = (moe(*operands, 2, recipe=recipe, backend=backend) for backend in ("triton", "torch"))
    close(ours, theirs, limit)
    for slope, expected_slope in zip(
        *(torch.autograd.grad((out * pull).sum(), operands) for out in (ours, theirs)), strict=True
    ):
        close(slope, expected_slope, limit)


# -- log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("width", [40, 128])
def test_log_probabilities_and_entropies_without_logits(
    device: str, scale: float, width: int, monkeypatch: pytest.MonkeyPatch
):
    """The reference is float64. Rows predict several tokens, one token twice, or none, and do not fill their pieces; tiles divide
    one of the widths."""
    from composer_nb.kernels import logprob_triton

    monkeypatch.setattr(logprob_triton, "PIECE", 16)
    hidden = (normal(37, width, device=device) * scale**0.5).requires_grad_()
    weight = (normal(150, width, seed=1, device=device) * scale**0.5).requires_grad_()
    rows = torch.tensor([*range(36), 5, 5, 5], device=device)
    tokens = torch.cat([torch.arange(36) * 4, torch.tensor([7, 7, 20])]).to(device)
    rows, tokens = torch.stack([rows, tokens], 1).unbind(1)  # views with gaps
    pull = normal(39, seed=2, device=device)
    logprob, entropy = logprob_triton.logprob_entropy(hidden, weight, rows, tokens)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact_logprob, exact_entropy = plain_logprob_entropy(*exact, rows, tokens)
    close(logprob, exact_logprob.float(), 2e-6)
    torch.testing.assert_close(entropy, exact_entropy.float(), atol=2e-5, rtol=1e-4)
    # A logit is rounded to float32 whatever the processor, and a rounded logit of size m changes its probability by m·2^-24.
    largest_logit = float((exact[0] @ exact[1].T).abs().max().detach())
    slopes = torch.autograd.grad((logprob * pull).sum(), (hidden, weight))
    for slope, exact_slope in zip(slopes, torch.autograd.grad((exact_logprob * pull).sum(), exact), strict=True):
        close(slope, exact_slope.float(), 2e-6 + largest_logit * 2**-23)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_block128", "nvfp4"])
def test_a_rank_without_tokens_has_gradients_to_sum(device: str, recipe: str):
    from composer_nb.kernels import logprob_triton

    x, weight = normal(0, 128, device=device), normal(30, 128, device=device)
    ups, downs = normal(2, 256, 128, device=device), normal(2, 128, 128, device=device)
    leaves = [tensor.requires_grad_() for tensor in (x, ups, downs, weight)]
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    out = experts(x, empty.view(0, 2), x[:, :2], ups, downs, recipe=recipe, backend="triton")
    logprob, _ = logprob_triton.logprob_entropy(out, weight, empty, empty)
    slopes = torch.autograd.grad(logprob.sum(), leaves)
    assert out.shape == x.shape and all(not slope.any() for slope in slopes)
