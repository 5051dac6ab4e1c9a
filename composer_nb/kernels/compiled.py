"""How kernels for the CPU are compiled so that what they compute never depends on where in memory their arrays lie.

LLVM compiles a loop that writes to an array twice, with vectors and one number at a time, and picks when it runs, by how close
the arrays are. Given leave to reorder arithmetic it would round the two differently. So only sums have that leave, which vectors
need, in functions of their own that write nothing (`dot`, `dot3`, `total`); all else computes in the order that is written.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba
import numpy as np

compiled: Any = partial(numba.njit, cache=True, error_model="numpy", fastmath={"contract"})
_sum: Any = partial(numba.njit, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@_sum
def total(x):  # type: ignore[no-untyped-def]
    """Σ x[i]."""
    s = np.float32(0.0)
    for i in range(len(x)):
        s += x[i]
    return s


@_sum
def dot(x, y):  # type: ignore[no-untyped-def]
    """Σ x[i]·y[i]."""
    s = np.float32(0.0)
    for i in range(len(x)):
        s += x[i] * y[i]
    return s


@_sum
def dot3(x, y, z):  # type: ignore[no-untyped-def]
    """Σ x[i]·y[i]·z[i]."""
    s = np.float32(0.0)
    for i in range(len(x)):
        s += x[i] * y[i] * z[i]
    return s
