"""Search for the place where sums pass a goal, by vector instructions without unpredictable branches. For compiled code only.

Sums grow, so the place is how many are below the goal: masks of comparisons are counted, whatever the order of their bits.
Where a processor has no AVX2 the same is counted one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from composer_nb.kernels.compiled import inlined, intrinsic
from composer_nb.kernels.delta.vectors import CLASSES, I32, I64, PLANES, U, Writer, has_avx2

WINDOW = 64
"""Numbers that `below_goal` looks at."""
_BYTE, _EIGHT, _FOUR = ir.IntType(8), ir.VectorType(I32, 8), ir.VectorType(I32, 4)
_SHORTS, _BYTES, _HALF = (ir.VectorType(ir.IntType(n), k) for n, k in ((16, 16), (8, 32), (8, 16)))


class _Eight(Writer):
    """Writer of code for eight elements of an array."""

    def entries(self, array: Any, values: Any, i: Any, planes: Any, table: Any, classes: Any) -> list[Any]:
        """Two vectors of four: the elements' entries in the table of which the planes are; shift, mask, first: `classes`."""
        numbers = ir.VectorType(ir.IntType(array.dtype.bitwidth), 8)
        shift, mask, first = classes
        found = self.builder.lshr(self.load(array, values, i, numbers), self.spread(shift, numbers))
        found = self.builder.and_(found, self.spread(mask, numbers))
        found = found if array.dtype.bitwidth == 8 else self.builder.trunc(found, ir.VectorType(_BYTE, 8))
        found = self.shuffle(found, found, [*range(8)] * 2)
        found = self.call("llvm.usub.sat.v16i8", _HALF, found, self.spread(first, _HALF))
        # A byte with its highest bit set is looked up as zero: so is what is beyond the table.
        found = self.call("llvm.uadd.sat.v16i8", _HALF, found, ir.Constant(_HALF, [0x80 - CLASSES] * 16))
        low, middle, high = (
            self.call("llvm.x86.ssse3.pshuf.b.128", _HALF, self.load(planes, table, I64(k * CLASSES), _HALF), found)
            for k in range(PLANES)
        )
        turns, shorts = [n for k in range(8) for n in (k, 16 + k)], ir.VectorType(ir.IntType(16), 8)
        low = self.builder.bitcast(self.shuffle(low, middle, turns), shorts)
        high = self.builder.bitcast(self.shuffle(high, ir.Constant(_HALF, [0] * 16), turns), shorts)
        halves = ([n for k in range(begin, begin + 4) for n in (k, 8 + k)] for begin in (0, 4))
        return [self.builder.bitcast(self.shuffle(low, high, places), _FOUR) for places in halves]

    def running(self, pair: list[Any]) -> Any:
        """Return the running sums of two vectors of four as one of eight."""
        nothing, sums = ir.Constant(_FOUR, [0] * 4), []
        for four in pair:
            for shifted in ([4, 0, 1, 2], [4, 4, 0, 1]):
                four = self.builder.add(four, self.shuffle(four, nothing, shifted))
            sums.append(four)
        sums[1] = self.builder.add(sums[1], self.shuffle(sums[0], sums[0], [3] * 4))
        return self.shuffle(sums[0], sums[1], [*range(8)])


if has_avx2():

    @intrinsic
    def below_goal(typing, numbers, i, goal):  # type: ignore[no-untyped-def]
        """Return how many of 64 signed numbers of 32 bits from the i-th on are less than a goal."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            v, less = Writer(context, builder), []
            goals = v.spread(arguments[2], _EIGHT)
            for k in range(0, WINDOW, 8):
                each = v.load(numbers, arguments[0], builder.add(arguments[1], I64(k)), _EIGHT)
                less.append(builder.sext(builder.icmp_signed("<", each, goals), _EIGHT))
            pairs = [v.call("llvm.x86.avx2.packssdw", _SHORTS, *less[k : k + 2]) for k in range(0, 8, 2)]
            fours = [v.call("llvm.x86.avx2.packsswb", _BYTES, *pairs[k : k + 2]) for k in range(0, 4, 2)]
            masks = [builder.zext(v.call("llvm.x86.avx2.pmovmskb", I32, four), I64) for four in fours]
            return builder.add(builder.ctpop(masks[0]), builder.ctpop(masks[1]))

        return types.uint64(numbers, types.uint64, types.uint64), generate

    @intrinsic
    def step_to(typing, array, i, so_far, goal, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        """Find the element, of eight from the i-th on, with which entries reach a goal below 2^31; before the eight they add
        up to `so_far`. Return which, and the sums before it and with it. One of them must reach it. The last five: as in
        `vectors.total`."""
        result = types.UniTuple(types.uint64, 3)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            v, (so_far, goal) = _Eight(context, builder), (builder.trunc(n, I32) for n in arguments[2:4])
            values, i, table_planes = arguments[0], arguments[1], arguments[5]
            sums = v.running(v.entries(array, values, i, planes, table_planes, arguments[6:]))
            sums = builder.add(sums, v.spread(so_far, _EIGHT))
            # A number is chosen from a vector by way of memory.
            kept = cgutils.alloca_once(builder, ir.ArrayType(_EIGHT, 2))
            kept.align = 32
            kept = builder.bitcast(kept, I32.as_pointer())
            builder.store(so_far, builder.gep(kept, [I64(7)]))
            builder.store(sums, builder.bitcast(builder.gep(kept, [I64(8)]), _EIGHT.as_pointer()), align=32)
            less = builder.bitcast(builder.icmp_signed("<", sums, v.spread(goal, _EIGHT)), _BYTE)
            which = builder.zext(builder.ctpop(less), I64)
            places = [builder.gep(kept, [builder.add(which, I64(k))]) for k in (7, 8)]
            found = [builder.zext(builder.load(place), I64) for place in places]
            return context.make_tuple(builder, result, (which, *found))

        return result(array, *[types.uint64] * 3, table, planes, *[types.uint64] * 3), generate

else:

    @inlined
    def below_goal(numbers, i, goal):  # type: ignore[no-untyped-def]
        count = U(0)
        for j in range(WINDOW):
            count += U(numbers[i + U(j)] < np.int64(goal))
        return count

    @inlined
    def step_to(array, i, so_far, goal, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        which, before, with_it = U(0), so_far, so_far + U(table[U(array[i]) >> shift])
        while with_it < goal:
            which, before = which + U(1), with_it
            with_it += U(table[U(array[i + which]) >> shift])
        return which, before, with_it
