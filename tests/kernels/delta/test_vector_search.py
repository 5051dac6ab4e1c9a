"""Places of a goal among sums against NumPy, with AVX2 and without."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from composer_nb.kernels.delta import vectors
from composer_nb.kernels.delta.block import by_bits
from composer_nb.kernels.delta.conditioned import LAYOUTS
from tests.kernels.delta import any_processor

U = np.uint64
SHAPES = [("bfloat16", np.uint16), ("float32", np.uint32), ("float8_e4m3fn", np.uint8), ("uint8", np.uint8)]


@numba.njit
def below_goal(numbers, i, goal):
    return vectors.below_goal(numbers, i, goal)


@numba.njit
def step_to(array, i, so_far, goal, table, planes, shift, mask, first):
    return vectors.step_to(array, i, so_far, goal, table, planes, shift, mask, first)


def test_how_many_numbers_are_below_a_goal() -> None:
    random = np.random.default_rng(5)
    for i, limit in ((0, 1 << 25), (3, 1 << 4), (17, 1 << 31)):
        numbers = np.sort(random.integers(-limit, limit, 100)).astype(np.int32)
        window = numbers[i : i + vectors.WINDOW].astype(np.int64)
        for goal in {0, 1, *(int(x) + d for x in window[::7] for d in (0, 1)), (1 << 31) - 1}:
            if 0 <= goal < 1 << 31:
                assert below_goal(numbers, U(i), U(goal)) == (window < goal).sum()
    assert below_goal(random.permutation(np.arange(64, dtype=np.int32)), U(0), U(10)) == 10


@pytest.mark.parametrize(("dtype", "kind"), SHAPES)
def test_the_element_with_which_entries_reach_a_goal(dtype: str, kind: type[np.unsignedinteger]) -> None:
    layout, random = LAYOUTS[dtype], np.random.default_rng(6)
    shift, mask, width = layout.numbers
    array = random.integers(0, 1 << min(layout.width, 8 * kind().itemsize), 40).astype(kind)
    classes = (array >> kind(layout.shift)) & kind(layout.mask)
    for first, largest in ((0, 1 << 24), (2, 3), (max(layout.mask - 20, 0), 1 << 24)):
        rates = np.zeros(layout.mask + 1, np.uint32)
        rates[first : first + 16] = random.integers(0, largest, len(rates[first : first + 16]))
        rates[:first] = rates[first]
        table, planes = by_bits(rates, width, shift), vectors.planes_of(rates, U(first))
        for i in (0, 1, 32):
            sums = 1000 + np.cumsum(rates[classes[i : i + 8]].astype(np.int64))
            for goal in {1001, *(int(x) + d for x in sums for d in (-1, 0, 1))}:
                if not 1000 < goal <= sums[-1]:
                    continue
                which = int(np.searchsorted(sums, goal))
                expected = which, ([1000, *sums])[which], sums[which]
                assert step_to(array, U(i), U(1000), U(goal), table, planes, shift, mask, U(first)) == expected


def test_without_avx2_it_is_the_same() -> None:
    any_processor.assert_they_pass("goal", __file__)
