"""The encoder of `delta`: what changed between two arrays, to the bytes of a block. Compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from composer_nb.kernels.compiled import coder, either, inlined
from composer_nb.kernels.delta.block import (
    GIVEN_UP,
    LONGEST,
    NAT,
    NONE,
    NORMAL,
    PATIENCE,
    QUARTERS,
    RATES,
    SCALE,
    TOGETHER,
    WHOLE,
    U,
    after_change,
    by_bits,
    cumulative,
    learn,
    learn_step,
    models_of,
    new_models,
    ordinal,
    pace,
    patience,
    probability,
    share,
    slower,
)
from composer_nb.kernels.delta.header import LARGEST, write_codes, write_states
from composer_nb.kernels.delta.vectors import (
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
"""Hazards that are as near to one rate as to the next."""
SAMPLE, MOST = U(13), U(127)
"""log2 of the sample that estimates the size of each class, and the largest step between samples."""


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
    count, parts = U(len(at)), QUARTERS if len(at) >= TOGETHER else U(1)
    cuts, ends = np.full(QUARTERS + U(1), U(len(at))), np.full(QUARTERS, U(len(base)))
    cuts[0] = U(0)
    for q in range(U(1), parts):
        cuts[q] = cuts[q - U(1)] + (count + QUARTERS - U(q)) // QUARTERS
        ends[q - U(1)] = U(at[cuts[q]])
    places, offsets = place_symbols(base, at, cuts, table, planes, shift, mask, first)
    steps, rests, rest_offsets = step_symbols(base, target, at, cuts, rates, shift, mask, width, first, last)
    states, words, counts = rans(places, offsets, steps, cuts, rests, rest_offsets)
    header = np.empty(LARGEST, np.uint8)
    header[0], header[1] = first, last - first
    end = write_codes(codes, first, last, header, U(2))
    end = write_states(count, ends, counts, states, header, end)
    return np.concatenate((header[: np.int64(end)], words.view(np.uint8)))


@coder
def differences(a, b, at):  # type: ignore[no-untyped-def]
    """Write the places where `a` and `b` differ into `at`, ascending, and return their number. `at` has room for one more."""
    count, i, n = U(0), U(0), U(len(a))
    while i + GROUP <= n:
        here = differing(a, b, i)
        at[count] = i + trailing_zeros(here)  # whether there is one nobody can foresee; two are rare
        count += U(here != U(0))
        here &= here - U(1)
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
        # A class that the sample has nothing of may still have many, in one row say.
        there[np.int64(limit) :] = np.maximum(there[np.int64(limit) :], np.int64(one_in))
    return np.maximum(there, changed)


@coder
def count_below(base, there, shift, mask, limit):  # type: ignore[no-untyped-def]
    """Count elements of classes below the limit, except the last few of the array."""
    i = U(0)
    while i + GROUP <= U(len(base)):
        here = below(base, i, shift, mask, limit)
        one = i + (trailing_zeros(here) & U(31))
        there[(U(base[one]) >> shift) & mask] += np.int64(here != U(0))
        here &= here - U(1)
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
    """Return the bits that they take at the rate of a byte."""
    hazard = RATES[code] / NAT
    return ((there - changed) * hazard - changed * math.log(-math.expm1(-hazard))) / math.log(2.0)


@coder
def rate_codes(there, changed):  # type: ignore[no-untyped-def]
    """Return the class up to which all share one rate, the last class with a change, and for each class the byte whose hazard is
    nearest to −ln(1 − changed/there), 0 where nothing changed. Classes of small numbers have few elements each, so a rate for
    each saves less than it costs. Something must have changed, and in no class more than there is."""
    codes, last = np.zeros(len(there), np.uint8), len(changed) - 1
    while not changed[last]:
        last -= 1
    together, moved, apart, most, first = 0, 0, 0.0, -math.inf, 0
    n, k = 0, 0
    for c in range(last + 1):
        together, moved, apart = together + there[c], moved + changed[c], apart + entropy(there[c], changed[c])
        if c > last - CLASSES:
            saved = 4.0 * c + apart - entropy(together, moved)
            if saved > most:
                most, first, n, k = saved, c, together, moved
    for c in range(first, last + 1):
        if c > first:
            n, k = there[c], changed[c]
        if k:
            best: Any = 1 + np.searchsorted(BETWEEN, -math.log(max(1 - k / n, 2.0**-7)) * NAT)
            before = np.int64(codes[c - 1])
            near = min(max(best, before - 12, 1), before + 2) if c > first else best
            gain = bits_at(near, n, k) - bits_at(best, n, k) if 0 < near != best else 8.0
            codes[c] = near if gain < 8 else best
    codes[:first] = codes[first]
    return U(first), U(last), codes


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
def step_symbol(models, which, away, longer):  # type: ignore[no-untyped-def]
    """Return the symbol of a change: away from zero or not, longer than one step or not. Its models begin at `which`."""
    sign, model = U(models[which]), U(models[which + U(1)])
    split = share(model) << U(SCALE - 16)
    begin, whole = either(longer, U(0), split), either(longer, split, WHOLE - split)
    inner = (whole * share(sign)) >> U(16)
    return (either(away, begin, begin + inner) << U(32)) | either(away, inner, whole - inner)


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
def group_sums(base, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """The hazard before each group of 32 elements."""
    sums, i, k, so_far = np.empty(len(base) // 32 + 1, np.uint64), U(0), U(0), U(0)
    while i + GROUP <= U(len(base)):
        sums[k] = so_far
        so_far += total(base, i, table, planes, shift, mask, first)
        i, k = i + GROUP, k + U(1)
    sums[k] = so_far
    return sums


@coder
def place_symbols(base, at, cuts, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """The symbols that say where changes are, quarter by quarter: the frequency of each, and what lies below it in the 32 bits
    above; and where those of a quarter end."""
    sums = group_sums(base, table, planes, shift, mask, first)
    symbols, offsets, count = np.empty(2 * len(at) + 64, np.uint64), np.zeros(QUARTERS + U(1), np.uint64), U(0)
    whole = U(len(base)) & ~U(31)
    for q in range(QUARTERS):
        slow, done = NORMAL, U(0)
        for k in range(cuts[q], cuts[q + 1]):
            if count + U(2) > U(len(symbols)):
                symbols = np.concatenate((symbols, symbols))
            i = U(at[k])
            group, own = i >> U(5), U(table[U(base[i]) >> shift])
            if i < whole:
                before = sums[group] + part(base, group << U(5), i & U(31), table, planes, shift, mask, first)
            else:
                before = sums[group] + one_by_one(base, whole, i - whole, table, shift)
            if q and U(k) == cuts[q]:  # where the quarter begins
                done = before
            gone, speed, done = before - done, pace(slow), before + own
            while gone * speed >> U(16) >= PATIENCE:
                count = put(symbols, count, GIVEN_UP, WHOLE - GIVEN_UP)
                wait = patience(speed)
                gone -= wait
                slow = slower(slow, wait)
                speed = pace(slow)
                if count + U(2) > U(len(symbols)):
                    symbols = np.concatenate((symbols, symbols))
            start = cumulative(gone, speed)
            count = put(symbols, count, start, cumulative(gone + own, speed) - start)
            slow = after_change(slow, gone, own)
        offsets[q + 1] = count
    return symbols[: np.int64(count)], offsets


@coder
def step_symbols(base, target, at, cuts, rates, shift, mask, width, first, last):  # type: ignore[no-untyped-def]
    """Return for each change its symbol; quarter by quarter the symbols of the lengths of longer ones; and where those of a
    quarter end. The models learn after one change of each quarter."""
    models, symbols = new_models(rates, first, last - first), np.empty(len(at), np.uint64)
    long, longs, learnt = np.empty(len(at) + 1, np.uint32), cuts.copy(), np.empty(QUARTERS, np.uint64)
    for j in range(cuts[1]):
        there = U(0)
        while there < QUARTERS and cuts[there] + U(j) < cuts[there + U(1)]:
            k = cuts[there] + U(j)
            old, new = U(base[at[k]]), U(target[at[k]])
            place = ordinal(old, width)
            step = ordinal(new, width) - place
            which, away, longer = models_of(old, shift, mask, first), (step > 0) == (place >= 0), abs(step) > 1
            symbols[k] = step_symbol(models, which, away, longer)
            learnt[there] = which << U(2) | U(away) << U(1) | U(longer)
            long[longs[there]] = k
            longs[there] += U(longer)
            there += U(1)
        for q in range(there):
            learn_step(models, learnt[q] >> U(2), learnt[q] & U(3))
    rests, count, offsets = np.empty(64, np.uint64), U(0), np.zeros(QUARTERS + U(1), np.uint64)
    for q in range(QUARTERS):
        for n in range(cuts[q], longs[q]):
            if count + U(64) > U(len(rests)):
                rests = np.concatenate((rests, rests))
            i = at[long[n]]
            old, new = U(base[i]), U(target[i])
            m = U(abs(ordinal(new, width) - ordinal(old, width)) - 1)
            count = put_more(rests, count, models, models_of(old, shift, mask, first), m, width)
        offsets[q + 1] = count
    return symbols, rests, offsets


@coder
def rans(places, offsets, steps, cuts, rests, rest_offsets):  # type: ignore[no-untyped-def]
    """The coders' final states; their words in the order in which a decoder reads them (of each change the place and the step,
    and behind all of them the rests), quarter by quarter; and how many words each has."""
    words, states = np.empty(len(places) + len(steps) + len(rests) + 4, np.uint32), np.full(QUARTERS, NONE)
    first, up = np.empty(QUARTERS, np.uint64), offsets.copy()
    ends = offsets + cuts + rest_offsets + np.arange(len(offsets)).astype(np.uint64)
    for q in range(QUARTERS):
        first[q] = ends[q + 1]
        for k in range(rest_offsets[q + 1] - rest_offsets[q]):
            states[q], first[q] = coded(states[q], words, first[q], rests[rest_offsets[q + 1] - U(1) - U(k)])
    for j in range(np.int64(cuts[1]) - 1, -1, -1):  # the four in turns: each waits for a division
        for q in range(QUARTERS):
            k = cuts[q] + U(j)
            if k < cuts[q + 1]:
                states[q], first[q] = coded(states[q], words, first[q], steps[k])
                k = up[q + 1] - U(1)
                states[q], first[q] = coded(states[q], words, first[q], places[k])
                while k > offsets[q] and places[k - U(1)] >> U(32) == GIVEN_UP:
                    k -= U(1)
                    states[q], first[q] = coded(states[q], words, first[q], places[k])
                up[q + 1] = k
    count = U(0)
    for q in range(QUARTERS):
        for k in range(first[q], ends[q + 1]):
            words[count] = words[k]
            count += U(1)
    return states, words[: np.int64(count)], ends[1:] - first


@inlined
def coded(state, words, first, symbol):  # type: ignore[no-untyped-def]
    """The coder's state with a symbol more, and where its words begin."""
    frequency, start = symbol & U(0xFFFFFFFF), symbol >> U(32)
    full = state >= frequency << U(64 - SCALE)
    words[first - U(1)] = np.uint32(state & U(0xFFFFFFFF))
    state, first = either(full, state >> U(32), state), first - U(full)
    quotient = state // frequency
    return (quotient << U(SCALE)) + (state - quotient * frequency) + start, first
