"""What formats carry from one token to another."""

import pytest
import torch

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
