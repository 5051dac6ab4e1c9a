"""The formats against ml_dtypes and torchao, where these are installed (`make test-older-triton` brings both)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from composer_nb.kernels.formats.microscaling import (
    e2m1_codes,
    e8m0_to_float,
    mx_quantize_reference,
    nvfp4_quantize_reference,
    unpack_e2m1,
)

ALL_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
REASON = "not installed here; make test-older-triton brings it"


def test_numbers_are_those_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason=REASON)
    byte = np.arange(255, dtype=np.uint8)
    assert (
        e8m0_to_float(torch.from_numpy(byte)).numpy() == byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ).all()
    x = ALL_BF16.float()[ALL_BF16.isfinite()].clamp(-6, 6)
    assert (e2m1_codes(x).numpy() == x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)).all()
    q = mx_quantize_reference(x[: len(x) // 32 * 32].view(-1, 32))
    left = x[: q.qdata.numel()].view(-1, 32) / e8m0_to_float(q.scale)
    assert (left.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8) == q.qdata.view(torch.uint8).numpy()).all()


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
    q = mx_quantize_reference(x, rule=rule)
    assert torch.equal(scale.view(torch.uint8).view(-1), q.scale.view(-1))
    assert torch.equal(data.view(torch.uint8).view(-1, 32), q.qdata.view(torch.uint8))


def test_nvfp4_is_that_of_torchao_but_for_its_division():
    """torchao (0.18) multiplies with an inverse: the same scales, and other codes in ties."""
    torchao = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason=REASON)
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    q = nvfp4_quantize_reference(x, share="tensor")
    scale, data = torchao.nvfp4_quantize(x, 16, q.global_scale)
    assert torch.equal(scale.view(torch.uint8).view(512, -1), q.scale.view(torch.uint8))
    other = (unpack_e2m1(data.view(512, -1)) != unpack_e2m1(q.qdata)).float().mean()
    assert other < 2e-3
