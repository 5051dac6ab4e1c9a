"""Vector instructions that numba does not find by itself: over many elements of an array at once. For compiled code only.

Most are sums of table entries, by the classes that lie in the elements' bits: a look-up an element is what finding a change in a
tensor comes to (`delta`). A processor does one at a time, but for tables of 16 bytes: those one instruction looks up for 32
elements at once (AVX2, vpshufb), and another adds up eight bytes (vpsadbw). So a table of 24-bit numbers is kept as planes of
bytes, and the sums of planes are put together. Where a processor has no AVX2 the same is computed one by one; all arithmetic is
in integers, so nothing else differs.

Others find the place where sums pass a goal, without a branch that no processor could foresee. Sums grow, so the place is how
many are below the goal: masks of comparisons are counted, whatever the order of their bits.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from composer_nb.kernels.compiled import coder, inlined, intrinsic

U = np.uint64
I32, I64 = ir.IntType(32), ir.IntType(64)
CLASSES = 16
"""Number of classes with entries of their own, from the first on. Those below it have the first one's, those above none."""
GROUP = U(32)
"""Elements that are looked up together."""
PLANES = 3
"""An entry is of 24 bits."""
WINDOW = 64
"""Numbers that `below_goal` looks at."""
_BYTE, _EIGHT, _FOUR = ir.IntType(8), ir.VectorType(I32, 8), ir.VectorType(I32, 4)
_SHORTS, _BYTES, _HALF = (ir.VectorType(ir.IntType(n), k) for n, k in ((16, 16), (8, 32), (8, 16)))


def has_avx2() -> bool:
    """Return whether code that numba compiles here may use AVX2."""
    config: Any = numba.config
    other = config.CPU_NAME or config.CPU_FEATURES  # code for another processor than this one
    return not other and bool(llvmlite.binding.get_host_cpu_features().get("avx2"))


@coder
def planes_of(table, first):  # type: ignore[no-untyped-def]
    """Return a table by class in the form that `total` and `eights` take: bytes of the entries from `first` on, by
    significance."""
    planes = np.zeros(PLANES * CLASSES, np.uint8)
    for c in range(min(U(CLASSES), U(len(table)) - first)):
        for k in range(PLANES):
            planes[U(k) * U(CLASSES) + U(c)] = (table[first + U(c)] >> U(8 * k)) & U(255)
    return planes


class Writer:
    """Writes instructions."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def load(self, array: Any, values: Any, at: Any, kind: Any) -> Any:
        """A vector of an array's elements from the one at `at` on."""
        place = self.builder.gep(self.context.make_array(array)(self.context, self.builder, values).data, [at])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=array.dtype.bitwidth // 8)

    def call(self, name: str, kind: Any, *operands: Any) -> Any:
        function = ir.FunctionType(kind, [operand.type for operand in operands])
        known = self.builder.module.globals
        return self.builder.call(known.get(name) or ir.Function(self.builder.module, function, name), operands)

    def spread(self, number: Any, kind: Any) -> Any:
        """A number, or its low bits, in all places of a vector."""
        bits = kind.element.width
        number = number if bits == number.type.width else self.builder.trunc(number, kind.element)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), number, I32(0))
        return self.shuffle(one, one, [0] * kind.count)

    def shuffle(self, a: Any, b: Any, places: list[int]) -> Any:
        """Return the elements of both, one after the other, at some places."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(places)), places))


class _Vectors(Writer):
    """Writer of code for 32 elements of an array, from its i-th on."""

    def __init__(self, context: Any, builder: Any, array: Any, values: Any, i: Any) -> None:
        super().__init__(context, builder)
        self.width = array.dtype.bitwidth
        self.numbers, self.bytes, self.sums = (
            ir.VectorType(ir.IntType(n), k) for n, k in ((self.width, 32), (8, 32), (64, 4))
        )
        self.elements = self.load(array, values, i, self.numbers)

    def classes(self, shift: Any, mask: Any) -> Any:
        """(bits >> shift) & mask, in as many bits as an element has."""
        found = self.builder.lshr(self.elements, self.spread(shift, self.numbers))
        return self.builder.and_(found, self.spread(mask, self.numbers))

    def beyond(self, shift: Any, mask: Any, first: Any) -> Any:
        """Bytes: how far each element's class is beyond the first; 0 below it."""
        found = self.classes(shift, mask)
        found = found if self.width == 8 else self.builder.trunc(found, self.bytes)
        return self.call("llvm.usub.sat.v32i8", self.bytes, found, self.spread(first, self.bytes))

    def only(self, classes: Any, count: Any) -> Any:
        """Return the same with those from the count-th on beyond all tables."""
        each = ir.Constant(self.bytes, list(range(32)))
        beyond = self.builder.icmp_unsigned(">=", each, self.spread(count, self.bytes))
        return self.builder.or_(classes, self.builder.sext(beyond, self.bytes))

    def look_up(self, classes: Any, array: Any, planes: Any) -> Any:
        """Sums of eight entries each."""
        # A byte with its highest bit set is looked up as zero: so is what is beyond the table.
        classes = self.call("llvm.uadd.sat.v32i8", self.bytes, classes, ir.Constant(self.bytes, [0x80 - CLASSES] * 32))
        added: Any = ir.Constant(self.sums, [0] * 4)
        for k in range(PLANES):
            table = self.load(array, planes, I64(k * CLASSES), ir.VectorType(ir.IntType(8), CLASSES))
            table = self.shuffle(table, table, [*range(CLASSES)] * 2)  # one for each half of the register
            found = self.call("llvm.x86.avx2.pshuf.b", self.bytes, table, classes)
            sums = self.call("llvm.x86.avx2.psad.bw", self.sums, found, ir.Constant(self.bytes, [0] * 32))
            added = self.builder.add(added, self.builder.shl(sums, ir.Constant(self.sums, [8 * k] * 4)))
        return added

    def lanes(self, sums: Any) -> list[Any]:
        return [self.builder.extract_element(sums, I32(lane)) for lane in range(4)]

    def sum(self, sums: Any) -> Any:
        a, b, c, d = self.lanes(sums)
        return self.builder.add(self.builder.add(a, b), self.builder.add(c, d))


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


@intrinsic
def differing(typing, a, b, i):  # type: ignore[no-untyped-def]
    """A bit for each of 32 elements from the i-th on, the first lowest: whether two arrays differ there."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        pair = [_Vectors(context, builder, signature.args[k], arguments[k], arguments[2]).elements for k in range(2)]
        return builder.zext(builder.bitcast(builder.icmp_unsigned("!=", *pair), I32), I64)

    return types.uint64(a, b, types.uint64), generate


@intrinsic
def below(typing, array, i, shift, mask, limit):  # type: ignore[no-untyped-def]
    """A bit for each of 32 elements from the i-th on, the first lowest: whether its class is below a limit."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        v = _Vectors(context, builder, array, *arguments[:2])
        less = builder.icmp_unsigned("<", v.classes(*arguments[2:4]), v.spread(arguments[4], v.numbers))
        return builder.zext(builder.bitcast(less, I32), I64)

    return types.uint64(array, *[types.uint64] * 4), generate


@intrinsic
def copied(typing, source, target, i, count):  # type: ignore[no-untyped-def]
    """Copy `count` elements from the i-th on; the result means nothing."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        kinds = signature.args[:2]
        a, b = (
            builder.gep(context.make_array(kind)(context, builder, values).data, [arguments[2]])
            for kind, values in zip(kinds, arguments, strict=False)
        )
        cgutils.raw_memcpy(builder, b, a, arguments[3], kinds[0].dtype.bitwidth // 8)
        return arguments[3]

    return types.uint64(source, target, types.uint64, types.uint64), generate


@intrinsic
def fetched(typing, array, i):  # type: ignore[no-untyped-def]
    """Asks for the memory of an element before it is needed; it may be one that there is not. Returns nothing of use."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        v, byte = Writer(context, builder), ir.IntType(8).as_pointer()
        place = builder.gep(context.make_array(array)(context, builder, arguments[0]).data, [arguments[1]])
        v.call("llvm.prefetch.p0i8", ir.VoidType(), builder.bitcast(place, byte), I32(0), I32(2), I32(1))
        return arguments[1]

    return types.uint64(array, types.uint64), generate


@intrinsic
def trailing_zeros(typing, bits):  # type: ignore[no-untyped-def]
    """The place of the lowest bit that is set, 64 where none is."""

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.uint64(types.uint64), generate


if has_avx2():

    @intrinsic
    def part(typing, array, i, count, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        """Return the same as `total` of the first `count`; 32 must be there."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            v = _Vectors(context, builder, array, *arguments[:2])
            return v.sum(v.look_up(v.only(v.beyond(*arguments[5:]), arguments[2]), planes, arguments[4]))

        return types.uint64(array, types.uint64, types.uint64, table, planes, *[types.uint64] * 3), generate

    @intrinsic
    def eights(typing, array, i, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        """Sums of each eight of the 32."""
        result = types.UniTuple(types.uint64, 4)

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            v = _Vectors(context, builder, array, *arguments[:2])
            sums = v.look_up(v.beyond(*arguments[4:]), planes, arguments[3])
            return context.make_tuple(builder, result, v.lanes(sums))

        return result(array, types.uint64, table, planes, *[types.uint64] * 3), generate

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
    def part(array, i, count, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        return one_by_one(array, i, count, table, shift)

    @inlined
    def eights(array, i, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
        sums = (one_by_one(array, i, U(8), table, shift), one_by_one(array, i + U(8), U(8), table, shift))
        more = (one_by_one(array, i + U(16), U(8), table, shift), one_by_one(array, i + U(24), U(8), table, shift))
        return (*sums, *more)

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


@inlined
def one_by_one(array, i, count, table, shift):  # type: ignore[no-untyped-def]
    """Σ of `count` elements' entries, from the i-th on; `table` by bits >> shift."""
    sum_ = U(0)
    for j in range(count):
        sum_ += U(table[U(array[i + U(j)]) >> shift])
    return sum_


@inlined
def total(array, i, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """Σ of 32 elements' entries, from the i-th on: an element's class is (bits >> shift) & mask. `planes`, `first`: as in
    `planes_of`. `table`: by bits >> shift, the sign too, for those who look up one by one."""
    a, b, c, d = eights(array, i, table, planes, shift, mask, first)
    return a + b + c + d
