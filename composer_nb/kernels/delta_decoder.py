"""The decoder of `delta`: from the base of a block and its bytes to the target. Compiled.

What is read is compared with a bound before it is an index.
"""

from __future__ import annotations

import numpy as np

from composer_nb.kernels.compiled import coder, inlined
from composer_nb.kernels.delta import (
    GIVEN_UP,
    KNOTS,
    LONGEST,
    LOWEST,
    MASK,
    NONE,
    NORMAL,
    RATES,
    SCALE,
    WHOLE,
    U,
    after_change,
    by_bits,
    cumulative,
    learn,
    models_of,
    negated,
    new_models,
    ordinal,
    pace,
    patience,
    probability,
    share,
    slower,
)
from composer_nb.kernels.vectors import CLASSES, WINDOW, copied, eights, planes_of, reaching, trailing_zeros

FAULTS = {
    1: "has a change beyond its end",
    2: "makes a number that does not exist",
    3: "ends within its header or a word",
    4: "has rates of classes that there are not",
    5: "names a rate that there is not",
}

_CELL = 20
PIECE = U(1 << 12)
"""Elements, a multiple of eight, of which hazards are added up at once: they are still in the processor's caches when changes
among them are looked for."""
FAR = U(1 << 30)
"""Hazard that is looked for at once, which is less than half of what `hazards` counts modulo."""


def _bounds() -> tuple[list[int], list[int]]:
    """Of each 2^20th of the 2^30 up to GIVEN_UP: a time at which the distribution is not yet beyond its first slot, and 2^32
    times the least that time grows by with each slot in it. (Time as a function of the slot is convex.)"""
    knots, times, slopes = KNOTS.tolist(), [], []
    for slot in range(0, int(GIVEN_UP), 1 << _CELL):
        k = int(np.searchsorted(KNOTS, slot, side="right")) - 1
        width = knots[k + 1] - knots[k]
        times.append((k << 16) + ((slot - knots[k]) << 16) // width)
        slopes.append((1 << 48) // width)
    return times, slopes


TIMES, SLOPES = (np.array(each, np.uint64) for each in _bounds())


@coder
def decode(base, made, body, shift, mask, width):  # type: ignore[no-untyped-def]
    """Makes the target of the base; 0, or one of FAULTS, which leaves something of no use."""
    codes = np.zeros(mask + U(1), np.uint8)
    fault, first, more, begin = read_codes(body, codes, mask)
    if not fault:
        fault, states, counts, begin = read_states(body, begin)
    if fault:
        return fault
    middle = begin + (counts[0] << U(2))
    places, steps = words_of(body[np.int64(begin) : np.int64(middle)]), words_of(body[np.int64(middle) :])
    rates = RATES[codes]
    table, planes = by_bits(rates, width, shift), planes_of(rates, first)
    return change(base, made, states, places, steps, table, planes, shift, mask, width, first, more)


@coder
def words_of(body):  # type: ignore[no-untyped-def]
    """And one more than there are, which is none of the coder's."""
    words = np.zeros(len(body) // 4 + 1, np.uint32)
    words[:-1].view(np.uint8)[:] = body
    return words


@coder
def read_states(body, at):  # type: ignore[no-untyped-def]
    """(fault or 0, the states of both coders, how many words each has, where words begin)."""
    size, states, count, k = U(len(body)), (U(0), U(0)), U(0), U(0)
    if at >= size:
        return 3, states, states, at
    sizes, at = U(body[at]), at + U(1)
    more = True
    while more and at < size and k < U(5):
        count |= (U(body[at]) & U(127)) << (U(7) * k)
        more = body[at] >= 128
        at, k = at + U(1), k + U(1)
    first, second = sizes >> U(4), sizes & U(15)
    begin = at + first + second
    if more or max(first, second) > U(8) or begin > size or (size - begin) & U(3) or begin + (count << U(2)) > size:
        return 3, states, states, at
    a, b = U(0), U(0)
    for j in range(first):
        a |= U(body[at + U(j)]) << (U(8) * U(j))
    for j in range(second):
        b |= U(body[at + first + U(j)]) << (U(8) * U(j))
    return 0, (a, b), (count, ((size - begin) >> U(2)) - count), begin


@coder
def read_codes(body, codes, mask):  # type: ignore[no-untyped-def]
    """Fills `codes`; (fault or 0, the class up to which all share the first, how many there are beyond it, where they end)."""
    size = U(len(body))
    if size < U(3):
        return 3, U(0), U(0), U(0)
    first, more = U(body[0]), U(body[1])
    if first + more > mask or more >= U(CLASSES):
        return 4, first, more, U(0)
    digits = np.zeros(6 * CLASSES, np.int64)  # more than can be read: two, and up to three for each of the others
    for k in range(min(size - U(2), U(3 * CLASSES))):
        digits[2 * k], digits[2 * k + 1] = body[U(k) + U(2)] >> 4, body[U(k) + U(2)] & 15
    code, at = 16 * digits[0] + digits[1], 2
    for c in range(more + U(1)):
        if c > 0:
            plain = digits[at] < 15
            code = code + 2 - digits[at] if plain else 16 * digits[at + 1] + digits[at + 2]
            at += 1 if plain else 3
        if not 0 <= code < len(RATES):
            return 5, first, more, U(0)
        codes[first + U(c)] = code
    codes[: np.int64(first)] = codes[first]
    return 0, first, more, U(2 + (at + 1) // 2)


@inlined
def refill(state, words, used):  # type: ignore[no-untyped-def]
    """Takes a word where the state is low and there is one left."""
    low = U(state < LOWEST) & U(used < U(len(words)) - U(1))
    word = U(words[used])
    return (state << (low << U(5))) | (word & (U(0) - low)), used + low


@inlined
def get_bit(state, words, used, models, which):  # type: ignore[no-untyped-def]
    model = U(models[which])
    p, slot = probability(model), state & MASK
    bit = slot < p
    zero = U(bit) - U(1)
    state = (negated(p, zero) + (WHOLE & zero)) * (state >> U(SCALE)) + slot - (p & zero)
    models[which] = learn(model, bit)
    state, used = refill(state, words, used)
    return bit, state, used


@inlined
def get_step(state, words, used, models, which):  # type: ignore[no-untyped-def]
    """Whether by more than one step, and whether away from zero."""
    sign, longer, slot = U(models[which]), U(models[which + U(1)]), state & MASK
    split = share(longer) << U(SCALE - 16)
    more = slot < split
    one = U(more) - U(1)  # all ones if it is but one step
    begin, whole = split & one, negated(split, one) + (WHOLE & one)
    inner = (whole * share(sign)) >> U(16)
    away = slot < begin + inner
    towards = U(away) - U(1)
    state = (negated(inner, towards) + (whole & towards)) * (state >> U(SCALE)) + slot - begin - (inner & towards)
    models[which], models[which + U(1)] = learn(sign, away), learn(longer, more)
    state, used = refill(state, words, used)
    return more, away, state, used


@coder
def get_more(state, words, used, models, which, width):  # type: ignore[no-untyped-def]
    """The rest of a number above 0, as `put_more` wrote it."""
    length, more = U(1), True
    while more and length < width:
        more, state, used = get_bit(state, words, used, models, which + U(1) + length)
        length += U(more)
    m = U(1)
    if length > U(1):
        low = length - U(2)
        digit, state, used = get_bit(state, words, used, models, which + U(1 + LONGEST) + low)
        m = U(2) + U(digit)
        while low:
            digits = min(low, U(16))
            low -= digits
            m = (m << digits) | ((state & MASK) >> (U(SCALE) - digits))
            state = ((state >> U(SCALE)) << (U(SCALE) - digits)) + (state & (MASK >> digits))
            state, used = refill(state, words, used)
    return m, state, used


@coder
def earliest(slot):  # type: ignore[no-untyped-def]
    """A time at which the distribution is not beyond `slot`, which is below GIVEN_UP, and little less than the last such."""
    cell = slot >> U(_CELL)
    return TIMES[cell] + (((slot & U((1 << _CELL) - 1)) * SLOPES[cell]) >> U(32))


@coder
def hazards(base, made, begin, so_far, sums, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """Copies the piece that begins there. Into `sums` for it, modulo 2^32: the hazard before it, up to its first eight elements,
    up to the first sixteen and so on; behind them the last one again, so that `reaching` can be asked from any of them on. How
    many eights there are, and the hazard up to their end."""
    end = min(U(len(base)), begin + PIECE)
    eights_there, j = (end - begin) >> U(3), U(0)
    copied(base, made, begin, end - begin)
    sums[0] = so_far
    while j + U(4) <= eights_there:
        a, b, c, d = eights(base, begin + (j << U(3)), table, planes, shift, mask, first)
        sums[j + U(1)], sums[j + U(2)] = so_far + a, so_far + a + b
        so_far += a + b + c + d
        sums[j + U(3)], sums[j + U(4)] = so_far - d, so_far
        j += U(4)
    while j < eights_there:
        for i in range(begin + (j << U(3)), begin + ((j + U(1)) << U(3))):
            so_far += U(table[U(base[i]) >> shift])
        j += U(1)
        sums[j] = so_far
    sums[np.int64(eights_there) + 1 : np.int64(eights_there) + 1 + WINDOW] = so_far
    return eights_there, so_far


@inlined
def within(base, i, left, table, shift):  # type: ignore[no-untyped-def]
    """Of eight elements with no less hazard than `left`, the one at which it has added up to that; and what is left before it.
    All at once: a processor can not foresee where to stop, and to halve them thrice takes three look-ups in a row."""
    r0 = U(table[U(base[i + U(0)]) >> shift])
    r1 = U(table[U(base[i + U(1)]) >> shift])
    r2 = U(table[U(base[i + U(2)]) >> shift])
    r3 = U(table[U(base[i + U(3)]) >> shift])
    r4 = U(table[U(base[i + U(4)]) >> shift])
    r5 = U(table[U(base[i + U(5)]) >> shift])
    r6 = U(table[U(base[i + U(6)]) >> shift])
    s1, q23, q45 = r0 + r1, r2 + r3, r4 + r5
    s3 = s1 + q23
    s2, s4, s5 = s1 + r2, s3 + r4, s3 + q45
    m0, m1, m2, m3 = U(r0 < left), U(s1 < left), U(s2 < left), U(s3 < left)
    m4, m5, m6, none = U(s4 < left), U(s5 < left), U(s5 + r6 < left), U(0)
    passed = (((r0 & (none - m0)) + (r1 & (none - m1))) + ((r2 & (none - m2)) + (r3 & (none - m3)))) + (
        ((r4 & (none - m4)) + (r5 & (none - m5))) + (r6 & (none - m6))
    )
    return i + (((m0 + m1) + (m2 + m3)) + ((m4 + m5) + m6)), left - passed


@coder
def at_the_end(base, i, left, table, shift):  # type: ignore[no-untyped-def]
    """The same in what is left of the block, or behind its end."""
    while i < U(len(base)):
        own = U(table[U(base[i]) >> shift])
        if own >= left:
            break
        left -= own
        i += U(1)
    return i, left


@coder
def change(base, made, states, places, steps, table, planes, shift, mask, width, first, more):  # type: ignore[no-untyped-def]
    """Copies the base piece by piece, each before anything is changed in it, and changes what changed; 0, 1 or 2 of FAULTS.
    Hazards are counted from the block's first element: `at` is that before the i-th, `begin` that where time began."""
    models, sums = new_models(first, more), np.empty((PIECE >> U(3)) + U(1 + WINDOW), np.uint32)
    piece, ahead = U(0), U(0)
    count, ahead = hazards(base, made, piece, ahead, sums, table, planes, shift, mask, first)
    n, slow, sign = U(len(base)), NORMAL, U(1) << (width - U(1))
    (state, steps_state), used, steps_used = states, U(0), U(0)
    last, steps_last = U(len(places)) - U(1), U(len(steps)) - U(1)
    i, at, begin, biggest = U(0), U(0), U(0), np.int64(sign - U(1))
    while state != NONE or steps_state != NONE or used < last or steps_used < steps_last:
        speed = pace(slow)
        while state & MASK >= GIVEN_UP:
            wait = patience(speed)
            begin += wait
            state = (WHOLE - GIVEN_UP) * (state >> U(SCALE)) + (state & MASK) - GIVEN_UP
            state, used = refill(state, places, used)
            slow = slower(slow, wait)
            speed = pace(slow)
        slot = state & MASK
        # As hazard a time t is t · 2^16 / speed, which is no less than this, for speed is 2^16 · NORMAL / slow, rounded down.
        target = begin + max(earliest(slot) * slow // NORMAL, U(1))
        while at < target and i < n:
            while i >= piece + PIECE:
                piece += PIECE
                count, ahead = hazards(base, made, piece, ahead, sums, table, planes, shift, mask, first)
            step, j = min(target - at, FAR), ((i - piece) >> U(3)) + U(1)
            whole = i < piece + (count << U(3))  # behind the last eight of a block there are no sums
            found = reaching(sums, j, at, step) if whole else U(0)
            while not found and j + U(WINDOW) <= count:
                j += U(WINDOW)
                found = reaching(sums, j, at, step)
            if found:
                j += trailing_zeros(found) - U(1)
                before = at + U(np.int64(np.int32(np.uint32(U(sums[j]) - at))))
                i, left = within(base, piece + (j << U(3)), at + step - before, table, shift)
                at += step - left
                if step < FAR:
                    break
            elif piece + PIECE <= n:
                i, at = piece + PIECE, ahead
            else:
                if i < piece + (count << U(3)):
                    i, at = piece + (count << U(3)), ahead
                i, left = at_the_end(base, i, target - at, table, shift)
                at = target - left
                break
        while i < n:
            own = U(table[U(base[i]) >> shift])
            end = cumulative(max(at + own, begin) - begin, speed)
            if end > slot:
                break
            at += own
            i += U(1)
        if i >= n:
            return 1
        while i >= piece + PIECE:  # a piece is copied before anything is changed in it
            piece += PIECE
            count, ahead = hazards(base, made, piece, ahead, sums, table, planes, shift, mask, first)
        gone = max(at, begin) - begin
        start = cumulative(gone, speed)
        state = (end - start) * (state >> U(SCALE)) + slot - start
        state, used = refill(state, places, used)
        old = U(base[i])
        which, place, m = models_of(old, shift, mask, first), ordinal(old, width), U(0)
        longer, away, steps_state, steps_used = get_step(steps_state, steps, steps_used, models, which)
        if longer:
            m, steps_state, steps_used = get_more(steps_state, steps, steps_used, models, which, width)
        turned = -np.int64(away != (place >= 0))
        new = place + (((np.int64(m) + 1) ^ turned) - turned)  # it may be one that no element has
        if new > biggest or new < -biggest - 1:
            return 2
        negative = new >> 63
        made[i] = U(new ^ negative) | (sign & U(negative))
        slow = after_change(slow, gone, own)
        at += own
        begin = at
        i += U(1)
    done = min(piece + PIECE, n)
    copied(base, made, done, n - done)
    return 0
