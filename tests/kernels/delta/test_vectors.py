"""Look-ups and searches by vectors against the same by NumPy, with AVX2 and without."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from composer_nb.kernels.delta import vectors
from composer_nb.kernels.delta.block import by_bits
from composer_nb.kernels.delta.conditioned import LAYOUTS, Layout
from tests.kernels.delta import any_processor

U = np.uint64
N = 160
SHAPES = [
    ("bfloat16", np.uint16),
    ("float16", np.uint16),
    ("float32", np.uint32),
    ("float8_e5m2", np.uint8),
    ("uint8", np.uint8),
]


@numba.njit
def sums(array, count, table, planes, shift, mask, first):
    made = np.zeros((len(array) // 32, 6), np.uint64)
    for k in range(len(array) // 32):
        made[k, 0] = vectors.total(array, U(32 * k), table, planes, shift, mask, first)
        made[k, 1] = vectors.part(array, U(32 * k), U(count), table, planes, shift, mask, first)
        a, b, c, d = vectors.eights(array, U(32 * k), table, planes, shift, mask, first)
        made[k, 2], made[k, 3], made[k, 4], made[k, 5] = a, b, c, d
    return made


@numba.njit
def masks(a, b, shift, mask, limit):
    made = np.zeros((len(a) // 32, 2), np.uint64)
    for k in range(len(a) // 32):
        made[k, 0], made[k, 1] = vectors.differing(a, b, U(32 * k)), vectors.below(a, U(32 * k), shift, mask, limit)
    return made


@numba.njit
def fetch(a, i):
    return vectors.fetched(a, i)


@numba.njit
def copy(a, b, i, count):
    return vectors.copied(a, b, i, count)


def classes(array: np.ndarray, layout: Layout) -> np.ndarray:
    return (array >> array.dtype.type(layout.shift)) & array.dtype.type(layout.mask)


def bits_of(flags: np.ndarray) -> list[int]:
    return [sum(int(flag) << j for j, flag in enumerate(row)) for row in flags.reshape(-1, 32)]


@pytest.mark.parametrize(("dtype", "kind"), SHAPES)
def test_sums_are_those_of_a_table(dtype: str, kind: type[np.unsignedinteger]) -> None:
    layout, random = LAYOUTS[dtype], np.random.default_rng(3)
    array = random.integers(0, 1 << min(layout.width, 8 * kind().itemsize), N).astype(kind)
    for first in {0, 3, max(layout.mask - 5, 0)}:
        rates = np.zeros(layout.mask + 1, np.uint32)
        rates[first : first + 16] = random.integers(0, 1 << 24, len(rates[first : first + 16]))
        rates[:first] = rates[first]
        table, planes = by_bits(rates, *(layout.numbers[k] for k in (2, 0))), vectors.planes_of(rates, U(first))
        entries = rates[classes(array, layout)].reshape(-1, 32).astype(np.int64)
        for count in (0, 1, 17, 31):
            made = sums(array, count, table, planes, *layout.numbers[:2], U(first)).astype(np.int64)
            assert np.array_equal(made[:, 0], entries.sum(1)) and np.array_equal(made[:, 1], entries[:, :count].sum(1))
            assert np.array_equal(made[:, 2:], entries.reshape(-1, 4, 8).sum(2))


@pytest.mark.parametrize(("dtype", "kind"), SHAPES)
def test_masks_have_a_bit_an_element(dtype: str, kind: type[np.unsignedinteger]) -> None:
    layout, random = LAYOUTS[dtype], np.random.default_rng(4)
    a = random.integers(0, 1 << min(layout.width, 8 * kind().itemsize), N).astype(kind)
    b = np.where(random.random(N) < 0.1, a ^ kind(1), a)
    limit = layout.mask // 3
    made = masks(a, b, *layout.numbers[:2], U(limit)).tolist()
    assert made == [list(pair) for pair in zip(bits_of(a != b), bits_of(classes(a, layout) < limit), strict=True)]


def test_what_is_copied_and_what_is_not() -> None:
    a, b = np.arange(50, dtype=np.uint16), np.zeros(50, np.uint16)
    copy(a, b, U(7), U(11))
    assert np.array_equal(b, np.where((a >= 7) & (a < 18), a, 0))


def test_memory_can_be_asked_for_that_there_is_not() -> None:
    a = np.arange(50, dtype=np.uint16)
    for i in (0, 49, 50, 1 << 40):
        fetch(a, U(i))
    assert np.array_equal(a, np.arange(50))


def test_without_avx2_it_is_the_same() -> None:
    any_processor.assert_they_pass("sums_are", __file__)
