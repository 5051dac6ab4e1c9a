"""What formats do to numbers, and figures that draw what was computed."""

from __future__ import annotations

import pytest
import torch

from composer_nb.kernels.formats.microscaling import mx_quantize_reference, nvfp4_quantize_reference
from composer_nb.labs import formats
from composer_nb.labs.formats import FORMATS, changed_alone, changed_past


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


def test_bits_spell_the_numbers():
    x = torch.tensor([-2.0, 1.0, *[0.0] * 30])
    stored = formats.bits_of(x, mx_quantize_reference(x), nvfp4_quantize_reference(x))
    assert stored["bf16"] == [0xC000, 0x3F80, 0, 0] and stored["E8M0"] == [127 - 7]
    assert stored["e2m1"][:2] == [0b1111, 0b0101], "-6 and 3 sixths of 2"
    [ax] = formats.bits(stored).axes
    spelled = "".join(text.get_text() for text in ax.texts)
    assert spelled.startswith(f"{0xC000:016b}{0x3F80:016b}") and len(spelled) == 4 * (16 + 8 + 4) + 8 + 8
    assert len(ax.patches) == len(spelled)
