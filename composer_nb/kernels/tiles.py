"""Small products on a CPU that keep their sums in registers, each sum in one order wherever its row stands.

LLVM would not keep the sums of a loop over a matrix in registers, so tiles are spelt in its own terms. Their vectors of 16 become
those of any processor. Weights lie in panels of 64 columns, [P, D, 64], so that a product reads them once, from front to back.

    a sum over d:  += x[d]·w[d], rounded once, for d = 0, 1, 2, …

Panels may be narrower than float32 where the weights allow it without a change of any sum: bfloat16, or int8 with a power of two
as the scale of each column. A large model is then read from memory in a half or a quarter of the bytes.

Dimensions: N rows, D input width, F output width, P panels, C head width, T positions.
"""

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from composer_nb.kernels.compiled import compiled, intrinsic

Floats = NDArray[np.float32]


class Matrix(NamedTuple):
    """Weights as a product reads them. Both may have a leading dimension of experts.

    Attributes:
        panels: [P, D, 64] in float32, as the bits of bfloat16, or as integers.
        scale: [64 P] what a column's sums are multiplied by; [0]: by nothing.
    """

    panels: NDArray[np.float32] | NDArray[np.uint16] | NDArray[np.int8]
    scale: Floats


WIDTH, LANES = 64, 16
# Rows that take turns on a panel while it is in the cache.
BLOCK = 64
_INT = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


def panels(w_DF: Floats) -> Floats:
    """Return weights as [P, D, 64], the last panel filled up with zeros."""
    depth, width = w_DF.shape
    count = -(-width // WIDTH)
    full = np.zeros((depth, count * WIDTH), np.float32)
    full[:, :width] = w_DF
    return np.ascontiguousarray(full.reshape(depth, count, WIDTH).swapaxes(0, 1))


def matrix(w: Floats, bits: int = 32) -> Matrix:
    """Return panels [..., P, D, 64] as a matrix of numbers of 8, 16 or 32 bits. Raises ValueError if these do not hold them
    exactly."""
    if bits == 32:
        return Matrix(w, np.empty((*w.shape[:-3], 0), np.float32))
    if bits == 16:
        words = w.view(np.uint32)
        if (words & 0xFFFF).any():
            raise ValueError("a number needs more than the 8 bits of bfloat16's significand")
        return Matrix((words >> 16).astype(np.uint16), np.empty((*w.shape[:-3], 0), np.float32))
    scale = column_scale(np.abs(w).max(-2))
    codes = w / scale[..., None, :]
    if (codes != codes.round()).any():
        raise ValueError("a column is no integers times a power of two")
    return Matrix(codes.astype(np.int8), np.ascontiguousarray(scale.reshape(*w.shape[:-3], -1)))


def column_scale(largest: Any) -> Any:
    """Return the smallest power of two by which columns with these largest magnitudes become integers of at most 127."""
    steps = np.ceil(np.log2(np.maximum(largest, 2.0**-100) / 127))
    return np.exp2(steps).astype(np.float32)


class _Code:
    """Writes LLVM code on vectors."""

    def __init__(self, builder: Any) -> None:
        self.b = builder
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")

    def at(self, pointer: Any, *offsets: Any) -> Any:
        for offset in offsets:
            pointer = self.b.gep(pointer, [_INT(offset) if isinstance(offset, int) else offset])
        return pointer

    def load(self, pointer: Any) -> Any:
        """Return 16 numbers as float32, of float32, of integers, or of the bits of bfloat16, its upper half."""
        kind, whole = pointer.type.pointee, ir.VectorType(ir.IntType(32), LANES)
        vector = _VECTOR if kind == ir.FloatType() else ir.VectorType(kind, LANES)
        numbers = self.b.load(self.b.bitcast(pointer, vector.as_pointer()), align=1 if kind == ir.IntType(8) else 2)
        if vector is _VECTOR:
            return numbers
        if kind == ir.IntType(8):
            return self.b.sitofp(self.b.sext(numbers, whole), _VECTOR)
        return self.b.bitcast(self.b.shl(self.b.zext(numbers, whole), whole([16] * LANES)), _VECTOR)

    def store(self, value: Any, pointer: Any) -> None:
        self.b.store(value, self.b.bitcast(pointer, _VECTOR.as_pointer()), align=4)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.call(self._fma, [a, b, c])

    def pick(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.b.shuffle_vector(a, b, ir.VectorType(ir.IntType(32), LANES)(lanes))

    def spread(self, pointer: Any) -> Any:
        """Return one number in all lanes."""
        none = _VECTOR(ir.Undefined)
        return self.pick(self.b.insert_element(none, self.b.load(pointer), ir.IntType(32)(0)), none, [0] * LANES)

    def loop(self, start: Any, end: Any, step: int, sums: list[Any], terms: Any) -> list[Any]:
        """Return what `sums` become by `terms(d, sums)` for d = start, start + step, … while below `end`."""
        b, before = self.b, self.b.block
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        d, totals = b.phi(_INT), [b.phi(_VECTOR) for _ in sums]
        b.cbranch(b.icmp_signed("<", d, end), body, after)
        b.position_at_end(body)
        following = [b.add(d, _INT(step)), *terms(d, totals)]
        for phi, first, then in zip([d, *totals], [start, *sums], following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, body)
        b.branch(head)
        b.position_at_end(after)
        return totals


def _written(write: Any) -> Any:
    """Return what makes an intrinsic of `write`, which gets arrays and numbers as LLVM has them."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pairs = zip(signature.args, arguments, strict=True)
        arrays = (context.make_array(t)(context, builder, x) if isinstance(t, types.Array) else x for t, x in pairs)
        write(_Code(builder), *arrays)
        return context.get_dummy_value()

    return generate


def _tile(rows: int, turns: int) -> Any:
    """out[row + r, column + c] = Σ_d x[row + r, d] · w[start + d · stride + c] for r below `rows`, c below 16 · `turns`."""

    def write(
        code: _Code, x: Any, row: Any, w: Any, start: Any, stride: Any, depth: Any, out: Any, column: Any
    ) -> None:
        b = code.b
        wide, far = b.extract_value(x.shape, 1), b.extract_value(out.shape, 1)
        number = [b.add(row, _INT(r)) for r in range(rows)]
        x_at = [code.at(x.data, b.mul(r, wide)) for r in number]
        w_at = code.at(w.data, start)

        def terms(d: Any, sums: list[Any]) -> list[Any]:
            w_row = code.at(w_at, b.mul(d, stride))
            loaded = [code.load(code.at(w_row, turn * LANES)) for turn in range(turns)]
            pairs = [(code.spread(code.at(address, d)), part) for part in loaded for address in x_at]
            return [code.fma(*pair, total) for pair, total in zip(pairs, sums, strict=True)]

        sums = code.loop(_INT(0), depth, 1, [_VECTOR([0.0] * LANES)] * (rows * turns), terms)
        for index, total in enumerate(sums):
            turn, r = divmod(index, rows)
            code.store(total, code.at(out.data, b.mul(number[r], far), column, turn * LANES))

    @intrinsic
    def tile(typing, x, row, w, start, stride, depth, out, column):  # type: ignore[no-untyped-def]
        whole = types.int64
        return types.void(x, whole, w, whole, whole, whole, out, whole), _written(write)

    return tile


def _dots(code: _Code, query: Any, keys: Any, first: Any, out: Any) -> None:
    """Write the code of `dots`."""
    b = code.b
    width = b.extract_value(keys.shape, 1)
    rows = [code.at(keys.data, b.mul(b.add(first, _INT(t)), width)) for t in range(LANES)]

    def terms(c: Any, sums: list[Any]) -> list[Any]:
        loaded = code.load(code.at(query.data, c))
        return [code.fma(loaded, code.load(code.at(row, c)), total) for row, total in zip(rows, sums, strict=True)]

    sums = code.loop(_INT(0), width, LANES, [_VECTOR([0.0] * LANES)] * LANES, terms)
    while len(sums) > 1:  # the sums of neighbouring lanes, of two vectors in one; at last one lane a vector
        pairs = list(zip(sums[::2], sums[1::2], strict=True))
        halves = [list(range(first, 2 * LANES, 2)) for first in (0, 1)]
        sums = [b.fadd(*(code.pick(*pair, half) for half in halves)) for pair in pairs]
    code.store(sums[0], code.at(out.data, first))


@intrinsic
def dots(typing, query, keys, first, out):  # type: ignore[no-untyped-def]
    """out[t] = Σ_c query[c] · keys[t, c] for t from `first` on, 16 of them; c is a multiple of 16."""
    return types.void(query, keys, types.int64, out), _written(_dots)


_four, _two, _one = _tile(4, 4), _tile(2, 4), _tile(1, 4)
_four_heads, _two_heads, _one_head = _tile(4, 1), _tile(2, 1), _tile(1, 1)


@compiled
def products(x, w, scale, out):  # type: ignore[no-untyped-def]
    """out[n, f] = Σ_d x[n, d] · w[d, f] for panels `w` [P, D, 64] with their `scale`, and contiguous rows; `out` is [N, 64 P]."""
    depth = x.shape[1]
    for first in range(0, len(x), BLOCK):
        end = min(first + BLOCK, len(x))
        for panel in range(len(w)):
            row, start, column = first, panel * depth * WIDTH, panel * WIDTH
            while row + 4 <= end:
                _four(x, row, w, start, WIDTH, depth, out, column)
                row += 4
            if row + 2 <= end:
                _two(x, row, w, start, WIDTH, depth, out, column)
                row += 2
            if row < end:
                _one(x, row, w, start, WIDTH, depth, out, column)
            if len(scale):
                for row in range(first, end):
                    for f in range(column, column + WIDTH):
                        out[row, f] *= scale[f]


@compiled
def mixed(weight, values, length, out):  # type: ignore[no-untyped-def]
    """out[h] = Σ_t weight[h, t] · values[t] over the first `length` positions, for values [T, C] with C a multiple of 16."""
    width = values.shape[1]
    for column in range(0, width, LANES):
        head = 0
        while head + 4 <= len(weight):
            _four_heads(weight, head, values, column, width, length, out, column)
            head += 4
        if head + 2 <= len(weight):
            _two_heads(weight, head, values, column, width, length, out, column)
            head += 2
        if head < len(weight):
            _one_head(weight, head, values, column, width, length, out, column)
