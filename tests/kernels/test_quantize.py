"""The kernels of quantisation, in Triton's interpreter, against their references: not one byte may differ."""

import mmap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.formats.microscaling import (
    MXTensor,
    NVFP4Tensor,
    mx_quantize,
    mx_quantize_reference,
    nvfp4_quantize,
    nvfp4_quantize_reference,
)

pytest.importorskip("triton", reason="no Triton here; it has wheels for Linux")

import triton
import triton.language as tl

from composer_nb.kernels.formats.quantize_triton import mx_codes, store_mx
from composer_nb.kernels.triton_runtime import interpreting

# Infinity times zero is part of what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same(actual: MXTensor | NVFP4Tensor, expected: MXTensor | NVFP4Tensor) -> None:
    parts = ("qdata", "scale") if isinstance(actual, MXTensor) else ("qdata", "scale", "global_scale")
    for part in parts:
        a, b = getattr(actual, part), getattr(expected, part).to(getattr(actual, part).device)
        assert a.shape == b.shape and a.dtype == b.dtype
        if part == "global_scale":  # all NaNs count as equal
            assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1))
        else:
            assert int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) == 0, part


def numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype, bad: float) -> Tensor:
    """Sizes over the whole range of exponents, zeros, subnormal numbers, and `bad` of them not finite."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random) * 2.0 ** torch.randint(-140, 120, (*shape[:-1], 1), generator=random)
    x = x * 2.0 ** torch.randint(-12, 6, shape, generator=random)
    x[torch.rand(shape, generator=random) < 0.1] = 0
    kind = torch.rand(shape, generator=random)
    for index, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[(kind > index * bad) & (kind < (index + 1) * bad)] = value
    return x.to(dtype)


def test_mx_of_every_bf16_value(device: str):
    """In blocks of neighbours, and beside 1: so both as the largest of a block and as what is divided by another's scale."""
    together = ALL_BF16.view(64, 1024)
    beside = together.clamp(-1, 1)
    beside[:, ::32] = 1
    for x in (together, beside):
        same(mx_quantize(x.to(device), backend="triton"), mx_quantize_reference(x))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.mT,  # a weight, transposed for the backward pass
        lambda x: x[:, 3:70, 5:101],
        lambda x: x[:, :, ::2],
        lambda x: x.transpose(0, 1),
        lambda x: x[0, 0],
        lambda x: x[:, :0],
    ],
)
def test_views_are_read_as_they_lie(device: str, view: Callable[[Tensor], Tensor]):
    x = numbers((3, 80, 160), 7, torch.bfloat16, 0.0)
    squares = [{}, {"block": 128, "rows": 128}] if view(x).dim() > 1 and view(x).numel() else [{}]
    for options in squares:
        same(mx_quantize(view(x.to(device)), backend="triton", **options), mx_quantize_reference(view(x), **options))


@settings(max_examples=16)
@given(
    data=st.data(),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bad=st.sampled_from([0.0, 0.003]),
)
def test_numbers_of_any_shape(data: st.DataObject, seed: int, dtype: torch.dtype, bad: float) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (*tuple(data.draw(st.lists(st.integers(1, 9), max_size=2))), 16 * data.draw(st.integers(1, 40)))
    x = numbers(shape, seed, dtype, bad).to(device)
    kernels = [(mx_quantize, mx_quantize_reference, {"block": block}) for block in (32, 128)]
    kernels += [(nvfp4_quantize, nvfp4_quantize_reference, {"share": share}) for share in ("token", "tensor")]
    kernels += [] if device == "cuda" else [(nvfp4_quantize, nvfp4_quantize_reference, {"division": "fast"})]
    ours, reference, options = data.draw(st.sampled_from(kernels))
    same(ours(x, backend="triton", **options), reference(x, **options))


@triton.jit
def tile_kernel(x, q, scale, row, R, K: tl.constexpr, H: tl.constexpr):
    """Quantise rows of which none before `row` is in memory."""
    code, byte = mx_codes(tl.load(x + tl.arange(0, H)[:, None] * K + tl.arange(0, K)[None, :]), 1, 32)
    store_mx(q, scale, code, byte, 0, row, 0, R, K, 1, 32, False)


@pytest.mark.skipif(not interpreting(), reason="needs memory that is there when it is written to, as a CPU has it")
def test_rows_behind_two_billion_numbers_are_written_to_their_place():
    x, row = numbers((4, 64), 3, torch.float32, 0.0), 1 << 25  # 2^31 numbers before it
    room = mmap.mmap(-1, (1 << 32) + 256, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    q, codes = (torch.frombuffer(room, dtype=torch.uint8, count=256, offset=1 << bit) for bit in (31, 32))
    scale = torch.zeros(2 * (row + 4), dtype=torch.uint8)
    tile_kernel[(1,)](x, q, scale, row, row + 4, K=64, H=4)
    expected = mx_quantize_reference(x)
    assert torch.equal(codes, expected.qdata.view(torch.uint8).flatten())
    assert torch.equal(scale[-8:], expected.scale.flatten())


@pytest.mark.parametrize("share", ["token", "tensor"])
def test_nvfp4_of_every_bf16_value(device: str, share: str):
    finite = ALL_BF16.masked_fill(~ALL_BF16.isfinite(), 0)
    for x in (finite.view(16, 4096), finite.view(4096, 16).T, ALL_BF16.view(16, 4096)):
        same(nvfp4_quantize(x.to(device), share=share, backend="triton"), nvfp4_quantize_reference(x, share=share))


@pytest.mark.parametrize("shape", [(2, 5, 96), (1, 4128)])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_widening_to_bf16_is_exact(device: str, format: str, shape: tuple[int, ...]):
    from composer_nb.kernels.formats.quantize_triton import widened

    x = numbers(shape, 5, torch.float32, 0.0).clamp(-(2.0**100), 2.0**100).to(device)
    quantised = mx_quantize_reference(x) if format == "mxfp8" else nvfp4_quantize_reference(x)
    wide = widened(quantised)
    if isinstance(quantised, NVFP4Tensor):
        wide = wide.float() * quantised.global_scale
    assert wide.shape == x.shape
    assert torch.equal(wide.float(), quantised.dequantize(torch.float32).where(wide != 0, wide.float()))
    small = quantised.dequantize(torch.float32)[wide == 0].abs()
    assert float(small.max() if small.numel() else 0) < 2.0**-125, "below bf16's smallest normal number"
