"""Changed elements of an array, coded given what the receiver knows of each: the class of its old bits. Compiled.

An element of class c (a weight's exponent, say) changes with some probability p_c. Its *hazard* is −ln(1 − p_c), and hazards add
up: after unchanged elements of T together the next change is yet to come with probability exp(−T). So where it comes is one
symbol with the distribution 1 − exp(−T), whatever classes lie on the way, and to find it takes a sum and a comparison an element.
A clock that runs faster where changes have lately come sooner than expected (rows, experts) scales T. A change is then a sign and
a number of steps between adjacent numbers, in binary decisions whose probabilities adapt to the class. All symbols go through one
rANS coder (Duda, arXiv 1311.2540) of 64 bits. docs/weight_codec.md has the format.

Integers only: every machine computes the same. Everything is uint64, since numba makes float64 of a signed and an unsigned one.
Nothing is checked by numba: what is read from a payload is compared with a bound before it is an index.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

U = np.uint64
SCALE = 30
"""log2 of what the frequencies of all symbols add up to."""
WHOLE, MASK = U(1 << SCALE), U((1 << SCALE) - 1)
LOWEST = U(1 << 32)
"""The coder's state lies in [2^32, 2^64) from its first word on."""
NONE = U(1)
"""Its state before the first symbol, which a decoder ends with. No symbol makes less of it and every change makes more, so it
says by itself that the block has no more changes."""
NAT = 1 << 20
"""A hazard of 1; a unit of the clock at its normal pace is as long."""
PATIENCE = U(6 * NAT)
"""How long the next change is waited for; then a symbol says that it has not come, and time begins anew."""
WINDOW = 5
"""log2 of the changes over which the clock's pace is taken."""
NORMAL = U(NAT << WINDOW)
"""Hazard that so many changes take on average, if all is as the classes say."""
LONGEST = 34
MODELS = 2 + 2 * LONGEST
"""Adaptive bits of a class: the sign, 34 of the magnitude's length, 34 of its second digit; two to spare."""

coder: Any = partial(numba.njit, cache=True, nogil=True, error_model="numpy")


def _distribution() -> npt.NDArray[np.uint64]:
    """2^30·(1 − exp(−T)) at T = 0, 1/16, 2/16, … 6, by a recurrence in integers."""
    left, knots = 1 << SCALE, [0]
    for _ in range(int(PATIENCE) >> 16):
        left -= (left * 260218914) >> 32  # 2^32·(1 − exp(−1/16))
        knots.append((1 << SCALE) - left)
    return np.array(knots, np.uint64)


KNOTS = _distribution()
GIVEN_UP = KNOTS[-1]
_CELL = U(20)
NEAREST = (np.searchsorted(KNOTS, np.arange(1 << 10, dtype=np.uint64) << _CELL, side="right") - 1).astype(np.uint64)
"""For every 2^20th of the 2^30, the last knot up to it: where to look for the others."""


RECIPROCALS = np.array([0, *(-(-(1 << 40) // n) for n in range(1, 257))], np.uint64)
"""2^40 / n, rounded up: x times it, of 2^40, is x // n for every x up to 2^24, n from 2 on."""


def rate_of(code: int) -> int:
    """Hazard that a byte of a block's header stands for: none, or 3 bits of mantissa after a leading one."""
    return (8 + (code & 7)) << (code >> 3) if code else 0


RATES = np.array([rate_of(code) for code in range(160)], np.uint32)
"""Up to 7.5: even a class of which everything changed may have one element that does not."""


BETWEEN = (RATES[1:-1].astype(np.float64) + RATES[2:]) / 2


# Both directions


@coder
def pace(slow):  # type: ignore[no-untyped-def]
    """Units of the clock for one of hazard, times 2^16: between 1/8 and 8."""
    return (NORMAL << U(16)) // slow


@coder
def slower(slow, hazard):  # type: ignore[no-untyped-def]
    """The hazard that the last changes took, with more of it."""
    return min(max(slow + hazard, NORMAL >> U(3)), NORMAL << U(3))


@coder
def after_change(slow, before, own):  # type: ignore[no-untyped-def]
    """The same, after a change of an element of hazard `own`: half of it counts (it came somewhere within), up to 3/4."""
    return slower(slow - (slow >> U(WINDOW)), before + min(own >> U(1), U(3 * NAT // 4)))


@coder
def patience(speed):  # type: ignore[no-untyped-def]
    """PATIENCE as hazard: the least that takes so long."""
    return ((PATIENCE << U(16)) + speed - U(1)) // speed


@coder
def cumulative(hazard, speed):  # type: ignore[no-untyped-def]
    """Of 2^30, how often the next change has come by then; straight between the knots."""
    time = min((hazard * speed) >> U(16), PATIENCE)
    k = time >> U(16)
    part = time & U(65535)
    if part == U(0):
        return KNOTS[k]
    return KNOTS[k] + ((part * (KNOTS[k + U(1)] - KNOTS[k])) >> U(16))


@coder
def probability(model):  # type: ignore[no-untyped-def]
    """Of a one, of 2^30. A model is 24 bits of probability and 8 that count what it has seen."""
    return min(max(model >> U(16), U(1)), U(65535)) << U(SCALE - 16)


@coder
def negated(x, where):  # type: ignore[no-untyped-def]
    """−x where all bits of `where` are ones, x where none is: a decision costs nothing here that nobody could foresee."""
    return (x ^ where) - where


@coder
def learn(model, bit):  # type: ignore[no-untyped-def]
    """The estimator of Krichevsky and Trofimov, forgetting after 254 decisions."""
    p, seen, zero = model >> U(8), model & U(255), U(bit) - U(1)
    away = negated(p, ~zero) + (U(1 << 24) & ~zero)
    p += negated((away * RECIPROCALS[seen + U(2)]) >> U(40), zero)
    return (p << U(8)) | min(seen + U(1), U(254))


@coder
def new_models(mask):  # type: ignore[no-untyped-def]
    """Nothing seen, either bit as likely."""
    return np.full((mask + U(1)) * U(MODELS), np.uint32(1 << 31))


@coder
def ordinal(bits, width):  # type: ignore[no-untyped-def]
    """Sign-and-magnitude bits as a number that grows with what they stand for: adjacent floats differ by 1, −0 is −1. One to
    one, so that every pattern, NaN and infinities too, has a number of its own."""
    sign = U(1) << (width - U(1))
    return np.int64(bits & (sign - U(1))) ^ -np.int64(bits >> (width - U(1)))


@coder
def together(block, i, count, rates, shift):  # type: ignore[no-untyped-def]
    """Hazard of `count` elements."""
    total = U(0)
    for j in range(count):
        total += U(rates[U(block[i + U(j)]) >> shift])
    return total


# Encoding


@coder
def differences(a, b, some, others, at):  # type: ignore[no-untyped-def]
    """Into `at`: where `a` and `b` differ, ascending; how many. `some`, `others`: the same memory in words of 64 bits, but for
    less than one at the end."""
    lanes, width = U(8 // a.itemsize), U(8 * a.itemsize)
    ones, count = (U(1) << width) - U(1), U(0)
    for k in range(len(some)):
        differs = some[k] ^ others[k]
        if differs:
            for j in range(lanes):
                at[count] = U(k) * lanes + U(j)
                count += U((differs >> (U(j) * width)) & ones != U(0))
    for i in range(U(len(some)) * lanes, len(a)):
        at[count] = i
        count += U(a[i] != b[i])
    return count


@coder
def histogram(base, shift, mask):  # type: ignore[no-untyped-def]
    """Elements of each class among some 2^17 of a large block, and of how many each stands for one. Four counters each: one
    just written is slow to read."""
    counts = np.zeros((4, mask + U(1)), np.int64)
    n = U(len(base))
    one_in = max(n >> U(17), U(1))
    for begin in range(U(0), n - n % U(64), U(64) * one_in):
        for i in range(begin, begin + U(64), U(4)):
            for j in range(4):
                counts[j, (U(base[i + U(j)]) >> shift) & mask] += 1
    for i in range(n - n % U(64), n):
        counts[0, (U(base[i]) >> shift) & mask] += 1
    return counts[0] + counts[1] + counts[2] + counts[3], one_in


@coder
def entropy(there, changed):  # type: ignore[no-untyped-def]
    """Bits that it takes to say which of so many changed, N · H(c / N)."""
    bits = 0.0
    if 0 < changed < there:
        bits = changed * math.log2(there / changed) + (there - changed) * math.log2(there / (there - changed))
    return bits


@coder
def rate_codes(there, changed, between):  # type: ignore[no-untyped-def]
    """For each class the byte whose hazard is nearest to −ln(1 − changed/there), 0 where nothing changed; and the class up to
    which all are taken together. Those of small numbers have few elements each: a byte for each says less than it costs.
    Something has to have changed. `between`: where one byte's hazard is as near as the next one's."""
    codes, last = np.zeros(len(there), np.uint8), np.flatnonzero(changed)[-1]
    together, moved, apart, most, first = 0, 0, 0.0, -1.0, 0
    pool = (0, 0)
    for c in range(last + 1):
        n = max(there[c], changed[c])
        together, moved, apart = together + n, moved + changed[c], apart + entropy(n, changed[c])
        saved = 8.0 * c + apart - entropy(together, moved)
        if saved > most:
            most, first, pool = saved, c, (together, moved)
    for c in range(last + 1):
        n, k = pool if c <= first else (max(there[c], changed[c]), changed[c])
        if k:
            hazard = -math.log(max(1 - k / n, 2.0**-7)) * NAT
            codes[c] = 1 + np.searchsorted(between, hazard)
    return first, codes


@coder
def hazards(base, at, rates, shift, before):  # type: ignore[no-untyped-def]
    """Into `before`: the hazard of the unchanged elements between each change and the one before it. `rates` by all of an
    element's bits from `shift` on, the sign too, as in `find`: a step less for each of them."""
    i = U(0)
    for k in range(len(at)):
        end, total = U(at[k]), U(0)
        while i + U(8) <= end:
            total += together(base, i, 8, rates, shift)
            i += U(8)
        while i < end:
            total += U(rates[U(base[i]) >> shift])
            i += U(1)
        before[k] = total
        i += U(1)


@coder
def put(symbols, count, start, frequency):  # type: ignore[no-untyped-def]
    symbols[count] = (start << U(32)) | frequency
    return count + U(1)


@coder
def put_bit(symbols, count, models, which, bit):  # type: ignore[no-untyped-def]
    """Appends a decision and learns from it; the new number of symbols."""
    model = U(models[which])
    p = probability(model)
    models[which] = learn(model, bit)
    return put(symbols, count, U(0) if bit else p, p if bit else WHOLE - p)


@coder
def put_step(symbols, count, models, which, old, new, width):  # type: ignore[no-untyped-def]
    """Appends how an element of the class whose models begin at `which` changed: whether away from zero, and the number m of
    steps beyond one as its length in bits (a one for each, then a zero), its second digit, and the others as they are."""
    a = ordinal(old, width)
    d = ordinal(new, width) - a
    count = put_bit(symbols, count, models, which, (d > 0) == (a >= 0))
    m, length, more = U(abs(d) - 1), U(0), True
    while more and length < width:
        more = m >> length != U(0)
        count = put_bit(symbols, count, models, which + U(1) + length, more)
        length += U(more)
    if length > U(1):
        low = length - U(2)
        count = put_bit(symbols, count, models, which + U(1 + LONGEST) + low, (m >> low) & U(1) != U(0))
        while low:
            digits = min(low, U(16))
            low -= digits
            value = (m >> low) & ((U(1) << digits) - U(1))
            count = put(symbols, count, value << (U(SCALE) - digits), U(1) << (U(SCALE) - digits))
    return count


@coder
def model_block(before, classes, old, new, rates, width):  # type: ignore[no-untyped-def]
    """The symbols of a block's changes, in order: the frequency of each, and what lies below it in the 32 bits above."""
    models = new_models(U(len(rates)) - U(1))
    symbols = np.empty(8 * len(before) + 256, np.uint64)
    count, slow = U(0), NORMAL
    for k in range(len(before)):
        gone, own, speed = before[k], U(rates[classes[k]]), pace(slow)
        while True:
            if count + U(64) > U(len(symbols)):
                symbols = np.concatenate((symbols, symbols))
            wait = patience(speed)
            if gone < wait:
                break
            count = put(symbols, count, GIVEN_UP, WHOLE - GIVEN_UP)
            gone -= wait
            slow = slower(slow, wait)
            speed = pace(slow)
        start = cumulative(gone, speed)
        count = put(symbols, count, start, cumulative(gone + own, speed) - start)
        count = put_step(symbols, count, models, classes[k] * U(MODELS), old[k], new[k], width)
        slow = after_change(slow, gone, own)
    return symbols[:count]


@coder
def rans(symbols):  # type: ignore[no-untyped-def]
    """Final state and words of the coder, in the order in which a decoder reads them."""
    words = np.empty(len(symbols) + 1, np.uint32)
    first = U(len(words))
    state = NONE
    for k in range(len(symbols)):
        symbol = symbols[U(len(symbols) - 1 - k)]
        frequency, start = symbol & U(0xFFFFFFFF), symbol >> U(32)
        if state >= frequency << U(64 - SCALE):
            first -= U(1)
            words[first] = np.uint32(state & U(0xFFFFFFFF))
            state >>= U(32)
        quotient = state // frequency
        state = (quotient << U(SCALE)) + (state - quotient * frequency) + start
    return state, words[first:]


# Decoding


@coder
def refill(state, words, used):  # type: ignore[no-untyped-def]
    """Takes a word where the state is low and there is one left. The last is a zero that is none of the coder's."""
    low = U(state < LOWEST) & U(used < U(len(words)) - U(1))
    word = U(words[used])
    return (state << (low << U(5))) | (word & (U(0) - low)), used + low


@coder
def get_bit(state, words, used, models, which):  # type: ignore[no-untyped-def]
    model = U(models[which])
    p, slot = probability(model), state & MASK
    bit = slot < p
    zero = U(bit) - U(1)
    state = (negated(p, zero) + (WHOLE & zero)) * (state >> U(SCALE)) + slot - (p & zero)
    models[which] = learn(model, bit)
    state, used = refill(state, words, used)
    return bit, state, used


@coder
def get_step(state, words, used, models, which, old, width):  # type: ignore[no-untyped-def]
    """The new ordinal, as `put_step` wrote it; it may be one that no element has."""
    a = ordinal(old, width)
    away, state, used = get_bit(state, words, used, models, which)
    length = U(0)
    while length < U(width):
        more, state, used = get_bit(state, words, used, models, which + U(1) + length)
        if not more:
            break
        length += U(1)
    m = min(length, U(1))
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
    d = np.int64(m) + 1
    turned = -np.int64(away != (a >= 0))
    return a + ((d ^ turned) - turned), state, used


@coder
def time_of(slot):  # type: ignore[no-untyped-def]
    """The earliest time at which the distribution is beyond `slot`, which is below GIVEN_UP."""
    k = NEAREST[slot >> _CELL]
    while KNOTS[k + U(1)] <= slot:
        k += U(1)
    width = KNOTS[k + U(1)] - KNOTS[k]
    return (k << U(16)) + ((((slot - KNOTS[k] + U(1)) << U(16)) + width - U(1)) // width)


@coder
def find(block, i, need, rates, shift):  # type: ignore[no-untyped-def]
    """The first element from `i` on at which hazard has added up to `need`, and what there was before it."""
    n, left = U(len(block)), need
    while i + U(16) <= n:
        group = together(block, i, 16, rates, shift)
        if group >= left:
            total, passed, before = U(0), U(0), U(0)
            for j in range(16):  # all of them: to leave a loop at a place that nobody can foresee takes longer
                total += U(rates[U(block[i + U(j)]) >> shift])
                less = U(total < left)
                passed += less
                before = max(before, total & (U(0) - less))
            return i + passed, need - left + before
        left -= group
        i += U(16)
    while i < n:
        own = U(rates[U(block[i]) >> shift])
        if own >= left:
            break
        left -= own
        i += U(1)
    return i, need - left


@coder
def decode_block(block, rates, state, words, shift, mask, width):  # type: ignore[no-untyped-def]
    """Makes the target of the base, in place; `words` end with a zero of nobody's. 0; 1 for a change beyond the block, 2 for a
    number that does not exist. What is not 0 leaves a block that is of no use."""
    models = new_models(mask)
    n, i, used, slow, last = U(len(block)), U(0), U(0), NORMAL, U(len(words)) - U(1)
    sign = U(1) << (width - U(1))
    biggest = np.int64(sign - U(1))
    while state != NONE or used < last:
        speed, waited = pace(slow), U(0)
        while state & MASK >= GIVEN_UP:
            wait = patience(speed)
            waited += wait
            state = (WHOLE - GIVEN_UP) * (state >> U(SCALE)) + (state & MASK) - GIVEN_UP
            state, used = refill(state, words, used)
            slow = slower(slow, wait)
            speed = pace(slow)
        slot = state & MASK
        i, gone = find(block, i, waited + ((time_of(slot) << U(16)) + speed - U(1)) // speed, rates, shift)
        if i >= n:
            return 1
        old = U(block[i])
        own = U(rates[old >> shift])
        gone = max(gone, waited) - waited
        start = cumulative(gone, speed)
        state = (cumulative(gone + own, speed) - start) * (state >> U(SCALE)) + slot - start
        state, used = refill(state, words, used)
        new, state, used = get_step(state, words, used, models, ((old >> shift) & mask) * U(MODELS), old, width)
        if new > biggest or new < -biggest - 1:
            return 2
        negative = new >> 63
        block[i] = U(new ^ negative) | (sign & U(negative))
        slow = after_change(slow, gone, own)
        i += U(1)
    return 0
