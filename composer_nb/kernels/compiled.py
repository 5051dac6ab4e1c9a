"""Compilation of CPU kernels whose results never depend on where in memory their arrays lie.

LLVM compiles a loop that writes to an array twice, with vectors and one number at a time, and picks when it runs, by how close
the arrays are. Given leave to reorder arithmetic it would round the two differently. So only sums have that leave, which vectors
need, in functions of their own that write nothing (`dot`, `dot3`, `total`); all else computes in the order that is written.
"""

from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

compiled: Any = partial(numba.njit, cache=True, error_model="numpy", fastmath={"contract"})
# Decorator for integer code, which has nothing to round; it releases the interpreter's lock.
coder: Any = partial(numba.njit, cache=True, nogil=True, error_model="numpy")
# Decorator for functions that take arrays and are called for each change. Numba counts references to arrays in every call, with
# atomic instructions; where it inlines a function without branches and loops, it sees that it need not.
inlined: Any = partial(coder, inline="always")
intrinsic: Any = _intrinsic
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


@partial(numba.njit, cache=True, error_model="numpy", fastmath={"reassoc", "nnan", "nsz"})
def largest(x):  # type: ignore[no-untyped-def]
    """Return the largest of finite numbers. It is the same in whatever order they are compared, which permits vectors. Four at a
    time, so that no comparison waits for the one before."""
    a = b = c = d = x[0]
    whole = len(x) // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = max(a, x[i]), max(b, x[i + 1]), max(c, x[i + 2]), max(d, x[i + 3])
    for i in range(whole, len(x)):
        a = max(a, x[i])
    return max(max(a, b), max(c, d))


@partial(numba.njit, cache=True, error_model="numpy", fastmath={"reassoc", "nsz"})
def zeros(x):  # type: ignore[no-untyped-def]
    """0, if every number is finite; not a number otherwise."""
    s = np.float32(0.0)
    for i in range(len(x)):
        s += x[i] * np.float32(0.0)
    return s


@intrinsic
def float_of(typing, bits):  # type: ignore[no-untyped-def]
    """The float32 that has these bits (int32)."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@compiled
def exp2(x):  # type: ignore[no-untyped-def]
    """2^x for x ≤ 0, as if it were no less than -126; the error is below 2e-7 of the value. Put together from the bits of its
    exponent and, of what is left, f with |f| ≤ 0.5, the series Σ (f ln 2)^i / i! to i = 6: a call to exp would keep the compiler
    from using vector instructions."""
    x = max(x, np.float32(-126.0))
    whole = np.int32(x - np.float32(0.5))  # the nearest integer
    f = x - np.float32(whole)
    p = np.float32(1.5403530e-4)
    p = p * f + np.float32(1.3333558e-3)
    p = p * f + np.float32(9.6181291e-3)
    p = p * f + np.float32(5.5504109e-2)
    p = p * f + np.float32(2.4022651e-1)
    p = p * f + np.float32(6.9314718e-1)
    p = p * f + np.float32(1.0)
    return p * float_of((whole + np.int32(127)) << np.int32(23))
