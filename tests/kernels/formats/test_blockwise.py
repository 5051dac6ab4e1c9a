"""Blocks of float8 against a plain loop in float64."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.kernels.formats.groupwise import dequantize_blocks


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16), st.integers(0, 99))
def test_every_weight_is_its_code_times_its_blocks_scale(height: int, width: int, rows: int, columns: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    code = torch.randn(height, width, generator=random).mul(50).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-height // rows), -(-width // columns), generator=random) * 1e-3
    found = dequantize_blocks(code, scale, rows=rows, columns=columns)
    assert found.dtype == torch.float32 and found.shape == code.shape
    values, wide, factor = found.tolist(), code.double().tolist(), scale.double().tolist()
    for r in range(height):
        for c in range(width):
            exact = wide[r][c] * factor[r // rows][c // columns]
            assert abs(values[r][c] - exact) <= 2**-24 * abs(exact), "rounded once"
