"""What the findings say, on other numbers than those they are shown on."""

from __future__ import annotations

import pytest
import torch

from composer_nb.kernels.formats.microscaling import nvfp4_quantize_reference
from composer_nb.labs.formats.findings import (
    FORMATS,
    changed_alone,
    changed_past,
    differing,
    dividing,
    quotient,
)


def tokens(seed: int, count: int = 32, width: int = 128) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    sizes = torch.exp(torch.randn(count, 1, generator=random))
    return (torch.randn(count, width, generator=random) * sizes).bfloat16().float()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_only_a_scale_that_tokens_share_carries_anything_between_them(name: str, seed: int):
    x = tokens(seed)
    x[-1] = x.abs().max()
    past, alone = changed_past(FORMATS[name], x), changed_alone(FORMATS[name], x)
    assert past.shape == (31,) and alone.shape == (32,)
    if name.endswith("per tensor"):
        assert (past != 0).float().mean() > 0.5 and (alone != 0).float().mean() > 0.5
    else:
        assert not past.any() and not alone.any()


def test_a_power_of_two_moves_a_shared_scale_and_no_rounding():
    x = tokens(1)
    x[-1] = x.abs().max()
    assert not changed_past(FORMATS["NVFP4, a scale per tensor"], x, factor=4.0).any()


def test_small_tokens_pay_for_large_ones_when_they_share_a_scale():
    x = tokens(0)
    x[0] *= 2.0**-14
    quantised = (FORMATS[f"NVFP4, a scale per {who}"](x[:]).dequantize()[0] for who in ("token", "tensor"))
    own, shared = ((q - x[0]).norm() / x[0].norm() for q in quantised)
    assert own < 0.15 and shared > 1.5 * own


@pytest.mark.parametrize("how, within", [("ieee", 0.5), ("inverse", 1.5), ("approximate", 2.5)])
def test_divisions_are_as_far_off_as_they_claim(how: str, within: float):
    """In units of the quotient's last place: an inverse's may be two of them, and the product is rounded once more."""
    a, b = torch.rand(2, 20000, generator=torch.Generator().manual_seed(0)).add(0.5)
    exact = a.double() / b.double()
    found = quotient(a, b, how)
    unit = torch.exp2(torch.floor(torch.log2(exact)) - 23)
    distance = ((found.double() - exact).abs() / unit).max()
    assert distance <= within and (how == "ieee" or distance > 0.5)


def test_another_division_changes_bits_of_bfloat16_and_hardly_any_of_float32():
    random = torch.Generator().manual_seed(5)
    x = torch.randn(512, 512, generator=random) * torch.exp(torch.randn(512, 1, generator=random))
    for how in ("inverse", "approximate"):
        coarse, fine = differing(x.bfloat16(), how), differing(x, how)
        assert all(1e-4 < coarse[part] < 5e-3 for part in ("e4m3 scales", "codes")) and coarse["tokens with any"] > 0.2
        assert max(fine["e4m3 scales"], fine["codes"]) < 1e-4
    assert set(differing(x.bfloat16(), "ieee").values()) == {0}


def test_the_division_comes_back_also_after_an_error():
    x = tokens(2)
    before = nvfp4_quantize_reference(x)
    with pytest.raises(RuntimeError, match="stop"), dividing("approximate"):
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="must be one of ieee, inverse, approximate"), dividing("fast"):
        pass
    assert torch.equal(nvfp4_quantize_reference(x).global_scale, before.global_scale)
