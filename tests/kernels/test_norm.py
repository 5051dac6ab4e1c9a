"""The norms' kernels against torch's composition in float64, values and gradients; other dtypes go another way."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.norm import norm_rope, rms_norm

seeds = st.integers(0, 1 << 20)


def draw(seed: int, *shapes: tuple[int, ...], scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in shapes]


def compare(
    ours: Tensor, ours_in: list[Tensor], exact: Tensor, exact_in: list[Tensor], pull: Tensor, scale: float = 1.0
) -> None:
    """Assert that values and gradients agree to float32's rounding of their summands, which are about 1 / `scale` for the first
    input and 1 for the second. The sums themselves may nearly vanish."""
    torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=2e-5)
    ours.backward(pull)
    exact.backward(pull.double())
    for leaf, exact_leaf, summand in zip(ours_in, exact_in, (1 / scale, 1.0), strict=True):
        assert leaf.grad is not None and exact_leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double() / summand, exact_leaf.grad / summand, atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 3), st.integers(1, 40), st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm_is_the_definition(seed: int, rows: int, heads: int, width: int, scale: float):
    x, pull = draw(seed, (rows, heads, width), (rows, heads, width), scale=scale)
    [weight] = draw(seed + 1, (width,))
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact_inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    exact = exact_inputs[0] / (exact_inputs[0].square().mean(-1, keepdim=True) + 1e-6).sqrt() * exact_inputs[1]
    compare(rms_norm(inputs[0], inputs[1], 1e-6), inputs, exact, exact_inputs, pull / scale, scale)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 4), st.sampled_from([2, 6, 32]))
def test_norm_rope_is_a_norm_and_then_a_rotation(seed: int, tokens: int, heads: int, width: int):
    x, pull, angle = draw(seed, (tokens, heads, width), (tokens, heads, width), (tokens, width // 2))
    [weight] = draw(seed + 1, (heads, width))
    rope = torch.stack([angle.cos(), angle.sin()], 1)
    inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact_inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    normed = exact_inputs[0] / (exact_inputs[0].square().mean(-1, keepdim=True) + 1e-6).sqrt() * exact_inputs[1]
    half = torch.complex(normed[..., : width // 2], normed[..., width // 2 :])
    turned = half * torch.polar(torch.ones_like(angle).double(), angle.double())[:, None]
    exact = torch.cat([turned.real, turned.imag], -1)
    compare(norm_rope(inputs[0], inputs[1], rope, 1e-6), inputs, exact, exact_inputs, pull)
