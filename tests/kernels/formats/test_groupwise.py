"""Group-wise integers against a loop in float64, and at the edges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.kernels.formats.groupwise import dequantize, quantize, unpack


def by_hand(weight: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and values of rows [R, I], computed one group at a time in float64."""
    top = 2 ** (bits - 1) - 1
    codes, values = np.zeros(weight.shape, np.int64), np.zeros(weight.shape)
    scales = np.zeros((weight.shape[0], weight.shape[1] // group))
    for row in range(weight.shape[0]):
        for column in range(scales.shape[1]):
            part = slice(column * group, (column + 1) * group)
            largest = max(abs(float(w)) for w in weight[row, part])
            scale = float(torch.tensor(largest / top, dtype=torch.float64).to(torch.bfloat16))
            scales[row, column] = scale
            if scale > 0:
                codes[row, part] = [min(max(round(float(w) / scale), -top - 1), top) for w in weight[row, part]]
            values[row, part] = codes[row, part] * scale
    return codes, scales, values


@given(
    st.integers(0, 1 << 20),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 4, 32]),
    st.integers(1, 3),
    st.sampled_from([1e-42, 1e-30, 1e-3, 1.0, 1e30]),
)
def test_codes_scales_and_values_are_those_of_the_definition(seed, bits, group, groups, size: float):
    random = np.random.default_rng(seed)
    weight = (random.normal(size=(5, group * groups)) * size).astype(np.float32)
    weight[0] = 0
    weight[1, :group] = np.round(weight[1, :group] / np.float32(size)) * np.float32(size)  # ties
    codes, scales, values = by_hand(weight, bits, group)
    code, scale = quantize(torch.from_numpy(weight), bits=bits, group=group)
    assert code.dtype == torch.int8 and scale.dtype == torch.bfloat16
    assert np.array_equal(code.numpy(), codes) and np.array_equal(scale.double().numpy(), scales)
    assert np.array_equal(dequantize(code, scale).double().numpy(), values.astype(np.float32)), "exact in float32"


def test_what_can_not_be_is_refused():
    for width, group in ((48, 32), (0, 0)):
        with pytest.raises(ValueError, match=f"an input width of {width} is no multiple of the group, {group}"):
            quantize(torch.ones(2, width))
    for bits in (1, 9):
        with pytest.raises(ValueError, match=rf"bits={bits} must lie in 2\.\.8"):
            quantize(torch.ones(2, 32), bits=bits)


def packed(code: list[list[int]], bits: int) -> torch.Tensor:
    """Return words as compressed-tensors writes them, by a plain loop."""
    per = 32 // bits
    rows = []
    for row in code:
        words = []
        for begin in range(0, len(row), per):
            word = sum(
                (value + 2 ** (bits - 1)) << (bits * lane) for lane, value in enumerate(row[begin : begin + per])
            )
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


@given(st.data(), st.sampled_from([4, 8]), st.integers(1, 5), st.integers(1, 40))
def test_codes_come_out_of_words_as_they_went_in(data: st.DataObject, bits: int, height: int, width: int):
    value = st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    row = st.lists(value, min_size=width, max_size=width)
    code = data.draw(st.lists(row, min_size=height, max_size=height))
    codes = unpack(packed(code, bits), width, bits=bits)
    assert codes.dtype == torch.int8 and codes.tolist() == code
