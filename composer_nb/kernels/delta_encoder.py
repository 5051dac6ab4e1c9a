"""The encoder of `delta`: what changed between two arrays, to the bytes of a block. Compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from composer_nb.kernels.compiled import coder, inlined
from composer_nb.kernels.delta import (
    GIVEN_UP,
    LONGEST,
    NAT,
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
from composer_nb.kernels.vectors import (
    CLASSES,
    GROUP,
    below,
    differing,
    one_by_one,
    part,
    planes_of,
    total,
    trailing_zeros,
)

BETWEEN = (RATES[1:-1].astype(np.float64) + RATES[2:]) / 2
"""Where one rate is as near as the next."""
SAMPLE, MOST = U(13), U(127)
"""To know how many elements of each class there are some 2^13 are counted, and one of so many in a large block."""


@coder
def encode(base, target, shift, mask, width):  # type: ignore[no-untyped-def]
    """The body of a block, empty where nothing changed."""
    found = np.empty(len(base) + 1, np.uint32)
    at = found[: differences(base, target, found)]
    if len(at) == 0:
        return np.empty(0, np.uint8)
    changed = np.zeros(mask + U(1), np.int64)
    for i in at:
        changed[(U(base[i]) >> shift) & mask] += 1
    first, last, codes = rate_codes(histogram(base, changed, shift, mask), changed)
    rates = RATES[codes]
    table, planes = by_bits(rates, width, shift), planes_of(rates, first)
    places = rans(place_symbols(base, at, table, planes, shift, mask, first))
    steps = rans(step_symbols(base, target, at, shift, mask, width, first, last))
    header = np.empty(2 + 2 * len(codes) + 24, np.uint8)
    header[0], header[1] = first, last - first
    end = write_codes(codes, first, last, header, U(2))
    end = write_states(places[0], steps[0], U(len(places[1])), header, end)
    return np.concatenate((header[:end], places[1].view(np.uint8), steps[1].view(np.uint8)))


@coder
def differences(a, b, at):  # type: ignore[no-untyped-def]
    """Into `at`: where `a` and `b` differ, ascending; how many."""
    count, i, n = U(0), U(0), U(len(a))
    while i + GROUP <= n:
        here = differing(a, b, i)
        while here:
            at[count] = i + trailing_zeros(here)
            here &= here - U(1)
            count += U(1)
        i += GROUP
    while i < n:
        at[count] = i
        count += U(a[i] != b[i])
        i += U(1)
    return count


@coder
def histogram(base, changed, shift, mask):  # type: ignore[no-untyped-def]
    """About how many elements of each class there are: a sample says it of classes that have many, of which few changed; those of
    small numbers, of which much changed and a rate has to be exact, are counted. They are as many in all as changed."""
    counts = np.zeros((4, mask + U(1)), np.int64)  # four counters each: one just written is slow to read
    n = U(len(base))
    one_in = min(n >> SAMPLE, MOST) | U(1)  # odd, so that rows of a matrix are not looked at in the same columns
    for begin in range(U(0), n - n % U(64), U(64) * one_in):
        for i in range(begin, begin + U(64), U(4)):
            for j in range(4):
                counts[j, (U(base[i + U(j)]) >> shift) & mask] += 1
    for i in range(n - n % U(64), n):
        counts[0, (U(base[i]) >> shift) & mask] += 1
    there = counts[0] + counts[1] + counts[2] + counts[3]
    if one_in > U(1):
        there *= np.int64(one_in)
        few, limit = changed.sum(), U(0)
        while limit < mask and there[limit] <= few:
            few -= there[limit]
            limit += U(1)
        there[: np.int64(limit)] = 0
        count_below(base, there, shift, mask, limit)
    return np.maximum(there, changed)


@coder
def count_below(base, there, shift, mask, limit):  # type: ignore[no-untyped-def]
    """Adds elements of classes below the limit, the last few of the array aside."""
    i = U(0)
    while i + GROUP <= U(len(base)):
        here = below(base, i, shift, mask, limit)
        while here:
            there[(U(base[i + trailing_zeros(here)]) >> shift) & mask] += 1
            here &= here - U(1)
        i += GROUP


@coder
def entropy(there, changed):  # type: ignore[no-untyped-def]
    """Bits that it takes to say which of so many changed, N · H(c / N)."""
    bits = 0.0
    if 0 < changed < there:
        bits = changed * math.log2(there / changed) + (there - changed) * math.log2(there / (there - changed))
    return bits


@coder
def bits_at(code, there, changed):  # type: ignore[no-untyped-def]
    """What they take at the rate that a byte stands for."""
    hazard = RATES[code] / NAT
    return ((there - changed) * hazard - changed * math.log(-math.expm1(-hazard))) / math.log(2.0)


@coder
def rate_codes(there, changed):  # type: ignore[no-untyped-def]
    """For each class the byte whose hazard is nearest to −ln(1 − changed/there), 0 where nothing changed; the class up to which
    all are taken together, and the last of which something changed. Those of small numbers have few elements each: a rate
    for each says less than it costs. Something has to have changed, and of no class more than are there."""
    codes, last = np.zeros(len(there), np.uint8), len(changed) - 1
    while not changed[last]:
        last -= 1
    together, moved, apart, most, first = 0, 0, 0.0, -math.inf, 0
    pool = (0, 0)
    for c in range(last + 1):
        together, moved, apart = together + there[c], moved + changed[c], apart + entropy(there[c], changed[c])
        saved = 4.0 * c + apart - entropy(together, moved)
        if saved > most and c > last - CLASSES:
            most, first, pool = saved, c, (together, moved)
    for c in range(last + 1):
        n, k = pool if c <= first else (there[c], changed[c])
        if k:
            best: Any = 1 + np.searchsorted(BETWEEN, -math.log(max(1 - k / n, 2.0**-7)) * NAT)
            before = np.int64(codes[c - 1])
            near = min(max(best, before - 12, 1), before + 2) if c > first else best
            gain = bits_at(near, n, k) - bits_at(best, n, k) if 0 < near != best else 8.0
            codes[c] = near if gain < 8 else best
    return U(first), U(last), codes


@coder
def write_codes(codes, first, last, header, at):  # type: ignore[no-untyped-def]
    """In digits of 16 from the byte `at` on, the last byte filled up: two for the first; of another how far it is below the one
    before it, from -2 to 12, and 2 more (it is 8 where a weight twice as large changes half as often), or else 15 and itself,
    two. Where they end."""
    digits, count = np.zeros(3 * len(codes) + 1, np.uint8), U(2)
    before = U(codes[first])
    digits[0], digits[1] = before >> U(4), before & U(15)
    for c in range(first + U(1), last + U(1)):
        code = U(codes[c])
        if code <= before + U(2) and before + U(2) - code < U(15):
            digits[count] = before + U(2) - code
            count += U(1)
        else:
            digits[count], digits[count + U(1)], digits[count + U(2)] = U(15), code >> U(4), code & U(15)
            count += U(3)
        before = code
    for k in range(U(0), count, U(2)):
        header[at] = digits[k] << U(4) | digits[k + U(1)]
        at += U(1)
    return at


@coder
def write_states(places, steps, count, header, at):  # type: ignore[no-untyped-def]
    """Both coders' final states from the byte `at` on: how many bytes each has, in half a byte; how many words the first has,
    seven bits a byte, all but the last with the eighth set; the states. Where they end."""
    sizes, at = at, at + U(1)
    while count >= U(128):
        header[at] = count & U(127) | U(128)
        count >>= U(7)
        at += U(1)
    header[at], header[sizes] = count, U(0)
    at += U(1)
    for state in (places, steps):
        header[sizes] <<= U(4)
        while state:
            header[at] = state & U(255)
            header[sizes] += U(1)
            state >>= U(8)
            at += U(1)
    return at


@inlined
def put(symbols, count, start, frequency):  # type: ignore[no-untyped-def]
    symbols[count] = (start << U(32)) | frequency
    return count + U(1)


@inlined
def put_bit(symbols, count, models, which, bit):  # type: ignore[no-untyped-def]
    """Appends a decision and learns from it; the new number of symbols."""
    model = U(models[which])
    p = probability(model)
    models[which] = learn(model, bit)
    return put(symbols, count, U(0) if bit else p, p if bit else WHOLE - p)


@inlined
def put_step(symbols, count, models, which, away, m):  # type: ignore[no-untyped-def]
    """Appends, in one symbol, whether an element of which the models begin at `which` changed by more than one step (m beyond
    one) and whether away from zero."""
    sign, longer, one = U(models[which]), U(models[which + U(1)]), U(m > U(0)) - U(1)
    models[which], models[which + U(1)] = learn(sign, away), learn(longer, m > U(0))
    split = share(longer) << U(SCALE - 16)
    begin, whole = split & one, negated(split, one) + (WHOLE & one)
    inner, towards = (whole * share(sign)) >> U(16), U(away) - U(1)
    return put(symbols, count, begin + (inner & towards), negated(inner, towards) + (whole & towards))


@coder
def put_more(symbols, count, models, which, m, width):  # type: ignore[no-untyped-def]
    """Appends the rest of a number m above 0: its length in bits (a one for each after the first, then a zero), its second digit,
    and the others as they are."""
    length, more = U(1), True
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
def place_symbols(base, at, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """The symbols that say where changes are, in order: the frequency of each, and what lies below it in the 32 bits above."""
    symbols = np.empty(2 * len(at) + 64, np.uint64)
    count, slow, group, so_far, done, n = U(0), NORMAL, U(0), U(0), U(0), U(len(base))
    for k in range(len(at)):
        i = U(at[k])
        while group + GROUP <= i:
            so_far += total(base, group, table, planes, shift, mask, first)
            group += GROUP
        if group + GROUP <= n:
            before = so_far + part(base, group, i - group, table, planes, shift, mask, first)
        else:
            before = so_far + one_by_one(base, group, i - group, table, shift)
        gone, own, speed = before - done, U(table[U(base[i]) >> shift]), pace(slow)
        done = before + own
        while True:
            if count + U(2) > U(len(symbols)):
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
        slow = after_change(slow, gone, own)
    return symbols[:count]


@coder
def step_symbols(base, target, at, shift, mask, width, first, last):  # type: ignore[no-untyped-def]
    """Those that say what the changes are."""
    models, symbols, count = new_models(first, last - first), np.empty(4 * len(at) + 64, np.uint64), U(0)
    for k in range(len(at)):
        if count + U(64) > U(len(symbols)):
            symbols = np.concatenate((symbols, symbols))
        old, new = U(base[at[k]]), U(target[at[k]])
        which, place = models_of(old, shift, mask, first), ordinal(old, width)
        step = ordinal(new, width) - place
        m = U(abs(step) - 1)
        count = put_step(symbols, count, models, which, (step > 0) == (place >= 0), m)
        if m:
            count = put_more(symbols, count, models, which, m, width)
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
