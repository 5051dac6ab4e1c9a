"""MXFP8 and NVFP4 against definitions written down independently: tables of all values, exact powers, NumPy's float32."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.formats import microscaling

ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def e4m3_values() -> np.ndarray:
    """Magnitudes of codes 0 … 126 by the format's definition: 4 bits of exponent, 3 of mantissa, bias 7."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def nearest(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Code of the nearest value (float64 distances are exact here), of two the even one; beyond the last it is the last."""
    above = np.searchsorted(values, magnitude).clip(1, len(values) - 1)
    low, high = magnitude - values[above - 1], values[above] - magnitude
    return np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)


def codes_of(qdata: Tensor) -> np.ndarray:
    return qdata.view(torch.uint8).numpy()


def hard_numbers(rows: int, columns: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers of all sizes: rows, blocks and elements that differ by powers of two, zeros, blocks of zeros."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=random)
    x *= 2.0 ** torch.randint(-30, 30, (rows, 1), generator=random)
    x *= 2.0 ** torch.randint(-8, 8, (rows, columns), generator=random)
    x[torch.rand(rows, columns, generator=random) < 0.1] = 0
    x[:, : columns // 3] *= (torch.rand(rows, 1, generator=random) < 0.7).float()
    return x.to(dtype)


# -- MXFP8 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_the_scale_of_every_bf16_magnitude(rule: str):
    largest = ALL_BF16[ALL_BF16.isfinite() & (ALL_BF16 > 0)]
    x = torch.zeros(len(largest), 32, dtype=torch.bfloat16)
    x[:, 7] = -largest
    scales = microscaling.mx_quantize_reference(x, rule=rule).scale[:, 0].numpy().astype(int)
    mantissa, exponent = np.frexp(largest.double().numpy())  # mantissa in [.5, 1), and 448 is .875 · 2^9
    expected = np.where(mantissa <= 0.875, exponent - 9, exponent - 8) if rule == "rceil" else exponent - 1 - 8
    assert (scales == np.maximum(expected, -127) + 127).all()


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_the_nearest_to_what_the_scale_leaves(rule: str, dtype: torch.dtype):
    x = hard_numbers(64, 96, 3, torch.float32).clamp(-6e4, 6e4).to(dtype)
    q = microscaling.mx_quantize_reference(x, rule=rule)
    scaled = x.double().numpy() / np.exp2(q.scale.numpy().astype(float) - 127).repeat(32, 1)
    expected = nearest(np.abs(scaled), e4m3_values()) | np.where(np.signbit(scaled), 0x80, 0)
    assert (codes_of(q.qdata) == expected).all()
    scale = x.double().numpy() / np.where(scaled, scaled, 1)
    exact = e4m3_values()[expected & 0x7F] * np.where(expected & 0x80, -1, 1) * scale
    assert (q.dequantize().double().numpy()[scaled != 0] == exact[scaled != 0]).all()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_seen_in_its_block_and_nowhere_else(bad: float):
    x = torch.ones(2, 96)
    x[1, 40] = bad
    q = microscaling.mx_quantize_reference(x)
    assert q.scale.tolist() == [[119] * 3, [119, 255, 119]]
    assert (codes_of(q.qdata)[1, 32:64] == 0x7F).all()
    assert torch.equal(q.dequantize().isnan().nonzero()[:, 1], torch.arange(32, 64))


# -- NVFP4 ---------------------------------------------------------------------------------------------------


def nvfp4_by_numpy(x: np.ndarray, share: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales (float64) and float32 scales, step by step in NumPy's float32, which is IEEE 754's."""
    f = np.float32
    blocks = x.astype(f).reshape(len(x), -1, 16)
    a = np.abs(blocks).max(-1)
    largest = a.max(-1, keepdims=True) if share == "token" else a.max()
    g = np.maximum(largest / f(2688), f(2.0**-126))
    scale = e4m3_values()[nearest((a / f(6) / g).astype(np.float64), e4m3_values())]
    step = scale.astype(f) * g
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(step[..., None] > 0, blocks / step[..., None], f(0)).astype(np.float64)
    code = nearest(np.abs(scaled), np.array(microscaling.E2M1_VALUES)) + np.where(np.signbit(blocks), 8, 0)
    return code.reshape(x.shape), scale, g


@pytest.mark.parametrize("share", ["token", "tensor"])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 6), blocks=st.integers(1, 9))
def test_nvfp4_is_what_numpy_computes(share: str, seed: int, rows: int, blocks: int):
    x = hard_numbers(rows, 16 * blocks, seed, torch.float32)
    q = microscaling.nvfp4_quantize_reference(x, share=share)
    code, scale, g = nvfp4_by_numpy(x.numpy(), share)
    assert (microscaling.unpack_e2m1(q.qdata).numpy() == code).all()
    assert (q.scale.double().numpy() == scale).all() and (q.global_scale.numpy() == g).all()
    signed = np.array(microscaling.E2M1_VALUES)[code & 7] * np.where(code & 8, -1, 1)
    exact = signed.reshape(rows, -1, 16) * scale[..., None] * g.astype(np.float64).reshape(-1, 1, 1)
    assert np.abs(q.dequantize().double().numpy() - exact.reshape(rows, -1)).max() <= np.abs(exact).max() * 2.0**-24


def test_fast_division_changes_bits_in_ties_alone():
    """Quotients of bfloat16 numbers often lie between two scales: a scale, or a code under one scale, moves to its neighbour."""
    torch.manual_seed(1)
    x = (torch.randn(256, 512) * torch.logspace(-2, 2, 256)[:, None]).bfloat16()
    exact, fast = (microscaling.nvfp4_quantize_reference(x, division=division) for division in ("ieee", "fast"))
    moved = exact.scale.view(torch.uint8).int() - fast.scale.view(torch.uint8).int()
    assert 0 < int((moved != 0).sum()) < 0.01 * moved.numel() and int(moved.abs().max()) == 1
    codes = [microscaling.unpack_e2m1(q.qdata).unflatten(-1, (-1, 16)).int() for q in (exact, fast)]
    assert int(((codes[0] - codes[1]).abs() * (moved == 0)[..., None]).max()) <= 1
    with pytest.raises(ValueError, match="division='approx' must be ieee or fast"):
        microscaling.nvfp4_quantize_reference(x, division="approx")  # type: ignore[arg-type]


@pytest.mark.parametrize("share, hit", [("token", 32), ("tensor", 96)])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_spoils_all_that_share_its_scale(share: str, hit: int, bad: float):
    x = torch.ones(3, 32)
    x[1, 5] = bad
    q = microscaling.nvfp4_quantize_reference(x, share=share)
    assert int(q.dequantize().isnan().sum()) == hit
    assert (codes_of(q.scale)[1] == 0x7F).all() and (q.qdata[1] == 0).all()


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, dtype, named, message",
    [
        ((2, 32), torch.float64, {}, "float32, bfloat16 and float16"),
        ((2, 32), torch.float32, {"block": 16}, "block=16 must be 32 or 128"),
        ((2, 32), torch.float32, {"rows": 4}, "rows=4 must be 1, or 32"),
        ((2, 0), torch.float32, {}, "no columns"),
    ],
)
def test_mx_refuses(shape: tuple[int, ...], dtype: torch.dtype, named: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        microscaling.mx_quantize_reference(torch.ones(shape, dtype=dtype), **named)


# Against ml_dtypes and torchao, where these are installed (`make test-older-triton` brings both)


REASON = "not installed here; make test-older-triton brings it"


def test_numbers_are_those_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason=REASON)
    byte = np.arange(255, dtype=np.uint8)
    ours = microscaling.e8m0_to_float(torch.from_numpy(byte)).numpy()
    assert (ours == byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)).all()
    x = ALL_BF16.float()[ALL_BF16.isfinite()].clamp(-6, 6)
    assert (microscaling.e2m1_codes(x).numpy() == x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)).all()
    q = microscaling.mx_quantize_reference(x[: len(x) // 32 * 32].view(-1, 32))
    scaled = x[: q.qdata.numel()].view(-1, 32) / microscaling.e8m0_to_float(q.scale)
    assert (scaled.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8) == q.qdata.view(torch.uint8).numpy()).all()


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_mxfp8_is_that_of_torchao(rule: str):
    """From 2^-117 on; below, torchao's scale of byte 0 is not what it divides by."""
    config = pytest.importorskip("torchao.prototype.mx_formats.config", reason=REASON)
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    largest = ALL_BF16[ALL_BF16.isfinite() & (ALL_BF16 >= 2.0**-117)]
    random = torch.Generator().manual_seed(0)
    x = (torch.rand(len(largest), 32, generator=random) * 2 - 1).bfloat16() * largest[:, None]
    x[:, 3] = largest
    scale, data = to_mx(x, torch.float8_e4m3fn, 32, getattr(config.ScaleCalculationMode, rule.upper()))
    q = microscaling.mx_quantize_reference(x, rule=rule)
    assert torch.equal(scale.view(torch.uint8).view(-1), q.scale.view(-1))
    assert torch.equal(data.view(torch.uint8).view(-1, 32), q.qdata.view(torch.uint8))


def test_nvfp4_is_that_of_torchao_but_for_its_division():
    """torchao (0.18) multiplies by an inverse: scales are equal, and codes differ only in ties."""
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=REASON)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = microscaling.nvfp4_quantize_reference(x, share="tensor")
    scale, data = torchao.nvfp4_quantize(x, 16, q.global_scale)
    assert torch.equal(scale.view(torch.uint8).view(512, -1), q.scale.view(torch.uint8))
    mismatch_rate = (microscaling.unpack_e2m1(data.view(512, -1)) != microscaling.unpack_e2m1(q.qdata)).float().mean()
    assert mismatch_rate < 2e-3
