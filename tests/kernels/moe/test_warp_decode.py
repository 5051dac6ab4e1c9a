"""Warp decode: equal to the experts' layer, closer to exact arithmetic, fewer bytes; in Triton's interpreter the same numbers."""

import pytest
import torch

from composer_nb.kernels.moe.layer import experts
from composer_nb.kernels.moe.warp_decode import decode_costs, decode_errors, warp_decode
from composer_nb.kernels.triton_runtime import interpreting, triton_version


def case(tokens: int, k: int, count: int, width: int, inner: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=random).to(dtype)
    up = (torch.randn(count, 2 * inner, width, generator=random) / width**0.5).to(dtype)
    down = (torch.randn(count, width, inner, generator=random) / inner**0.5).to(dtype)
    chosen = torch.rand(tokens, count, generator=random).topk(k).indices
    return x, chosen, torch.rand(tokens, k, generator=random).to(dtype), up, down


@pytest.mark.parametrize("sizes", [(1, 1, 2, 16, 8), (5, 3, 6, 48, 24), (0, 2, 4, 16, 8)])
def test_the_reference_is_the_layer_of_experts(sizes: tuple[int, ...]) -> None:
    arguments = case(*sizes, torch.float64)  # type: ignore[arg-type]
    torch.testing.assert_close(warp_decode(*arguments, "torch"), experts(*arguments, backend="torch"))


@pytest.mark.skipif(
    triton_version() is None or (not interpreting() and not torch.cuda.is_available()), reason="needs Triton"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_reference(dtype: torch.dtype) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for sizes in ((3, 2, 4, 24, 8), (1, 1, 2, 16, 16)):
        arguments = [tensor.to(device) for tensor in case(*sizes, dtype)]
        actual, expected = (warp_decode(*arguments, backend) for backend in ("triton", "torch"))
        torch.testing.assert_close(actual, expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-5)


def test_it_is_closer_to_exact_arithmetic() -> None:
    """Warp decode rounds only its result to bf16; the expert-centric organisation rounds three times on the way."""
    for seed in range(3):
        errors = decode_errors(8, seed)
        warp, expert_centric = errors["warp decode"], errors["expert-centric"]
        assert warp["relative"] < expert_centric["relative"] / 2.5 and warp["largest"] < expert_centric["largest"]
        assert warp["cosine"] > 0.99999


def test_the_cost_model() -> None:
    """Expected costs are computed by hand for one token: K experts of 3·I·D weights, and the 8 · 2,048 · 2 bytes of outputs in
    Cursor's post."""
    costs = decode_costs(1, 8, 128, 2048, 768)
    warp, expert_centric = costs["warp decode"], costs["expert-centric"]
    assert warp.weights == expert_centric.weights == pytest.approx(8 * 3 * 768 * 2048 * 2)
    assert warp.buffers == 2 * 4 * 8 * 768 and expert_centric.stages - warp.stages == 5
    padded, scattered = 8 * 16, 16 * 8
    outputs = decode_costs(1, 8, 128, 2048, 0)["expert-centric"].buffers - scattered - 2 * 2 * padded * 2048
    assert outputs == 2 * 8 * 2048 * 2  # written and read
    assert expert_centric.seconds(6.8e12) > warp.seconds(6.8e12) > 0
    assert decode_costs(4096, 8, 128, 2048, 768)["warp decode"].weights == pytest.approx(
        128 * 3 * 768 * 2048 * 2, rel=1e-6
    )
