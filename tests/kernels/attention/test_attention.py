"""Cached attention: the compiled form against the definition, the definition against a loop, and what neither may read."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_nb.kernels.attention import cached_triton
from composer_nb.kernels.attention.cached import cached_attention, cached_attention_reference
from composer_nb.kernels.attention.cached_triton import attend


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, ...]:
    groups, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    slots, longest, width = draw(st.integers(1, 4)), draw(st.integers(1, 24)), draw(st.sampled_from([1, 2, 5, 16]))
    tokens = draw(st.integers(1, 8))
    slot_ids = st.lists(st.integers(0, slots - 1), min_size=tokens, max_size=tokens)
    positions = st.lists(st.integers(0, longest - 1), min_size=tokens, max_size=tokens)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    scale = draw(st.sampled_from([1e-3, 1.0, 30.0]))
    q = torch.randn(tokens, groups * heads, width, generator=generator) * scale
    k, v = (torch.randn(slots, heads, longest, width, generator=generator) for _ in "kv")
    return q, k, v, torch.tensor(draw(slot_ids)), torch.tensor(draw(positions))


def by_hand(q: Tensor, k: Tensor, v: Tensor, slot: Tensor, position: Tensor) -> np.ndarray:
    q, k, v = (x.double().numpy() for x in (q, k, v))
    out = np.zeros_like(q)
    per_key = q.shape[1] // k.shape[1]
    for n in range(len(q)):
        for h in range(q.shape[1]):
            visible = slice(0, int(position[n]) + 1)
            keys, values = k[int(slot[n]), h // per_key, visible], v[int(slot[n]), h // per_key, visible]
            score = keys @ q[n, h] / math.sqrt(q.shape[2])
            weight = np.exp(score - score.max())
            out[n, h] = weight @ values / weight.sum()
    return out


@settings(max_examples=60, deadline=None)
@given(cases())
def test_all_forms_equal_a_loop_in_float64(case: tuple[Tensor, ...]):
    exact = torch.from_numpy(by_hand(*case))
    for form in (cached_attention, cached_attention_reference, attend):
        output = form(*case)
        assert output.dtype == torch.float32 and output.shape == case[0].shape
        torch.testing.assert_close(output.double(), exact, atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_nothing_beyond_a_token_s_position_is_read(case: tuple[Tensor, ...]):
    q, k, v, slot, position = case
    visible = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    for s, p in zip(slot.tolist(), position.tolist(), strict=True):
        visible[s, : p + 1] = True
    spoilt = [x.masked_fill(~visible[:, None, :, None], math.nan) for x in (k, v)]
    together = cached_attention(q, k, v, slot, position)
    assert torch.equal(cached_attention(q, *spoilt, slot, position), together)
    token_major = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert torch.equal(cached_attention(q, *token_major, slot, position), together)
    with pytest.raises(ValueError, match=f"the cache has {k.shape[2]} positions"):
        cached_attention(q, k, v, slot, position + k.shape[2])
    for n in range(len(q)):  # then each token alone, with all that is hidden from it spoilt
        visible_to_token = torch.zeros_like(visible)
        visible_to_token[slot[n], : position[n] + 1] = True
        spoilt = [x.masked_fill(~visible_to_token[:, None, :, None], math.nan) for x in (k, v)]
        alone = cached_attention(q[n : n + 1], *spoilt, slot[n : n + 1], position[n : n + 1])
        assert torch.equal(alone[0], together[n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [cached_triton.BLOCK, cached_triton.PART])
def test_the_gpu_kernel_gives_a_token_the_same_bits_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, device: str, part: int, dtype: torch.dtype
):
    """Covers one part and several. Rounding of the weights to bf16 alone would be off by 2e-3."""
    monkeypatch.setattr(cached_triton, "PART", part)
    generator, block = torch.Generator().manual_seed(0), cached_triton.BLOCK
    q = torch.randn(6, 4, 16, generator=generator).to(device, dtype)
    k, v = (torch.randn(3, 2, 4 * block, 16, generator=generator).to(device, dtype) for _ in "kv")
    slot = torch.tensor([0, 1, 2, 0, 1, 2], device=device)
    position = torch.tensor([block - 1, block, 3 * block + 5, 0, 17, 4 * block - 1], device=device)
    slot, position = torch.stack([slot, position], 1).unbind(1)  # views with gaps
    together = attend(q, k, v, slot, position)
    exact = torch.from_numpy(by_hand(*(x.cpu() for x in (q, k, v, slot, position))))
    limit = {torch.float32: 2e-6, torch.bfloat16: 2**-9}[dtype]
    assert together.dtype == dtype and float((together.double().cpu() - exact).norm() / exact.norm()) < limit
    for n in range(6):
        row, length = slot[n : n + 1], int(position[n]) + 1
        alone = attend(q[n : n + 1], k[row, :, :length], v[row, :, :length], torch.zeros_like(row), position[n : n + 1])
        assert torch.equal(alone[0], together[n])


@pytest.mark.parametrize(
    ("heads", "groups", "width", "values", "dtype"),
    [(12, 1, 24, 7, torch.float32), (3, 3, 192, 128, torch.bfloat16), (17, 1, 256, 256, torch.bfloat16)],
)
def test_the_gpu_kernel_has_heads_of_any_number_and_width_and_reads_only_its_own_positions(
    device: str, heads: int, groups: int, width: int, values: int, dtype: torch.dtype
):
    generator, part = torch.Generator().manual_seed(0), cached_triton.PART
    q = torch.randn(4, heads, width, generator=generator).to(device, dtype)
    k, v = (torch.randn(1, groups, part + 9, size, generator=generator).to(device, dtype) for size in (width, values))
    position = torch.tensor([0, part - 1, part, 3], device=device)
    slot = torch.zeros_like(position)
    exact = cached_attention_reference(q.double(), k.double(), v.double(), slot, position)
    k[:, :, part + 1 :], v[:, :, part + 1 :] = math.nan, math.inf
    output = attend(q, k, v, slot, position).double()
    assert float((output - exact).norm() / exact.norm()) < {torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
