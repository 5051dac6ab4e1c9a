"""What formats carry from one token to another."""

import pytest
import torch

from composer_nb.kernels.formats.microscaling import mx_quantize_reference, nvfp4_quantize_reference
from composer_nb.labs.formats import FORMATS, beside, bits_of, changed_alone, changed_past, decimal


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


def test_stored_bits_times_their_scales_are_what_the_format_restores():
    x = tokens(0)
    mx, four = mx_quantize_reference(x), nvfp4_quantize_reference(x)
    values = {name: [decimal(name, n) for n in numbers] for name, numbers in bits_of(x[0], mx, four).items()}
    assert values["bf16"] == x[0, :4].tolist()
    assert [code * values["E8M0"][0] for code in values["e4m3"]] == mx.dequantize()[0, :4].tolist()
    scale = values["e4m3 scale"][0] * values["float32 scale"][0]
    assert [code * scale for code in values["e2m1"]] == pytest.approx(four.dequantize()[0, :4].tolist())


def test_four_bits_keep_little_of_a_number_beside_a_larger_one():
    sizes = torch.tensor([1.0, 0.7, 0.3, 0.1, 0.03])
    expected = [1, 4 / 6, 2 / 6, 0.5 / 6, 0]
    assert beside("NVFP4, a scale per token", sizes).tolist() == pytest.approx(expected)
    assert beside("MXFP8", sizes).tolist() == pytest.approx([1, 176 / 256, 80 / 256, 26 / 256, 7.5 / 256])
    assert beside("MXFP8, floor", torch.tensor([1.9]), 1.9).tolist() == [1.75]
