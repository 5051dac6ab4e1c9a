"""Sums against float64. That nothing depends on where arrays lie is what `test_decode` finds, on many models."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.kernels.compiled import dot, dot3, total


@given(st.integers(0, 70), st.integers(0, 1000))
def test_sums_are_those_of_float64(count: int, seed: int):
    x, y, z = np.random.default_rng(seed).standard_normal((3, count)).astype(np.float32)
    for got, terms in ((total(x), (x,)), (dot(x, y), (x, y)), (dot3(x, y, z), (x, y, z))):
        wanted = np.prod([each.astype(np.float64) for each in terms], axis=0)
        np.testing.assert_allclose(got, wanted.sum(), atol=1e-6 * (1 + np.abs(wanted).sum()))
