"""Sums against float64. That nothing depends on where arrays lie is what `test_decode` finds, on many models."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from composer_nb.kernels.compiled import dot, dot3, exp2, largest, total, zeros


@given(st.integers(1, 70), st.integers(0, 1000))
def test_the_largest_and_whether_all_are_finite(count: int, seed: int):
    x = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    assert largest(x) == x.max() and zeros(x) == 0
    x[seed % count] = [np.nan, np.inf, -np.inf][seed % 3]
    assert np.isnan(zeros(x))


def test_powers_of_two():
    x = -np.concatenate([np.linspace(0, 126, 20_001), [0.5, 1.5, 125.5, 1e-30]]).astype(np.float32)
    found = np.array([exp2(each) for each in x], np.float64)
    np.testing.assert_allclose(found, 2.0 ** x.astype(np.float64), rtol=2.5e-7)
    assert exp2(np.float32(-1e30)) == exp2(np.float32(-126)) == np.float32(2.0**-126)


@given(st.integers(0, 70), st.integers(0, 1000))
def test_sums_are_those_of_float64(count: int, seed: int):
    x, y, z = np.random.default_rng(seed).standard_normal((3, count)).astype(np.float32)
    for got, terms in ((total(x), (x,)), (dot(x, y), (x, y)), (dot3(x, y, z), (x, y, z))):
        wanted = np.prod([each.astype(np.float64) for each in terms], axis=0)
        np.testing.assert_allclose(got, wanted.sum(), atol=1e-6 * (1 + np.abs(wanted).sum()))
