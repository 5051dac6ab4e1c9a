"""Compilation of CPU kernels whose results never depend on where in memory their arrays lie.

LLVM compiles a loop that writes to an array twice, with vectors and one number at a time, and picks when it runs, by how close
the arrays are. Given leave to reorder arithmetic it would round the two differently. So only sums have that leave, which vectors
need, in functions of their own that write nothing (`dot`, `dot3`, `total`); all else computes in the order that is written.
"""

import math
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as _intrinsic

# The texts of all modules with compiled functions. Machine code holds the functions and constants of other modules that it uses,
# while Numba's cache compares the text of its own module alone, and would go on with what others were before.
_TEXTS = (path.read_bytes() for path in sorted(Path(__file__).parent.rglob("[a-z_]*.py")))
_STAMP = sha256(b"".join(text for text in _TEXTS if b"kernels.compiled import" in text)).digest()


def _cached(function: Any, signature: str = "", **options: Any) -> Any:
    """Compile a function, for a signature at once; return a decorator that does it, if the signature alone is given."""
    if isinstance(function, str):
        return partial(_cached, signature=function, **options)
    dispatcher: Any = numba.njit(function, cache=True, error_model="numpy", **options)
    dispatcher._cache._cache_file._source_stamp = _STAMP
    if signature:
        dispatcher.compile(signature)
        dispatcher.disable_compile()
    return dispatcher


LOG2E = math.log2(math.e)
compiled: Any = partial(_cached, fastmath={"contract"})
# Decorator for integer code, which has nothing to round; it releases the interpreter's lock.
coder: Any = partial(_cached, nogil=True)
# Decorator for functions that take arrays and are called for each change. Numba counts references to arrays in every call, with
# atomic instructions; where it inlines a function without branches and loops, it sees that it need not.
inlined: Any = partial(coder, inline="always")
intrinsic: Any = _intrinsic
_sum: Any = partial(_cached, fastmath={"reassoc", "contract", "nsz"})


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


@partial(_cached, fastmath={"reassoc", "nnan", "nsz"})
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


@partial(_cached, fastmath={"reassoc", "nsz"})
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
