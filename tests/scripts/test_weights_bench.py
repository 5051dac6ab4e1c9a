"""The bench of weight updates: its codecs give back every bit, and its sizes are those of the compressors."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts.bench.weights_bench import CODEC_FORMS, Pair, measure, size


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Two versions of up to three tensors, of which any share of the bits differs."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    share, pair = draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])), []
    for count in draw(st.lists(st.integers(1, 3000), min_size=1, max_size=3)):
        old = torch.randn(count, generator=generator).to(draw(st.sampled_from([torch.bfloat16, torch.float32])))
        changed = torch.rand(count, generator=generator) < share
        pair.append((old, torch.where(changed, -2 * old, old)))
    return pair


@pytest.mark.parametrize("name", [name for name, (_, unpack) in CODEC_FORMS.items() if unpack])
@settings(max_examples=20, deadline=None)
@given(pair=pairs())
def test_what_was_packed_comes_back(name: str, pair: Pair) -> None:
    pack, unpack = CODEC_FORMS[name]
    assert unpack is not None
    for decoded, (_, target) in zip(unpack(pair, pack(pair)), pair, strict=True):
        assert np.asarray(decoded).tobytes() == target.view(torch.uint8).numpy().tobytes()


def test_xor_and_zlib_has_the_size_of_zlib() -> None:
    old = torch.arange(4096, dtype=torch.bfloat16)
    new = old.clone()
    new[::100] += 1
    difference = bytes(a ^ b for a, b in zip(*(t.view(torch.uint8).numpy().tobytes() for t in (old, new)), strict=True))
    measured, _, _ = measure([(old, new)], 1, {"arc_v1": CODEC_FORMS["arc_v1"]})["arc_v1"]
    assert (
        measured
        == len(zlib.compress(difference))
        == size(CODEC_FORMS["arc_v1"][0]([(old, new)]))
        < len(difference) / 10
    )
