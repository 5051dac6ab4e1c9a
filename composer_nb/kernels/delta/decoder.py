"""The decoder of `conditioned`: from the base of a block and its body to the target. Compiled.

What is read from a body is compared with a bound before it is an index.
"""

from __future__ import annotations

import numpy as np

from composer_nb.kernels.compiled import coder
from composer_nb.kernels.delta.block import (
    GAPS,
    GIVEN_UP,
    KNOTS,
    LONGEST,
    LOWEST,
    MASK,
    NONE,
    NORMAL,
    QUARTERS,
    RATES,
    RUN,
    SCALE,
    TOGETHER,
    WHOLE,
    U,
    after_change,
    by_bits,
    cumulative,
    learn,
    models_of,
    new_models,
    ordinal,
    pace,
    patience,
    probability,
    share,
    slower,
)
from composer_nb.kernels.delta.header import read_codes, read_states

FAULTS = {
    1: "has a change beyond its end",
    2: "makes a number that does not exist",
    3: "ends within its header or a word",
    4: "has rates of classes that there are not",
    5: "names a rate that there is not",
    6: "has more changes than elements, or a quarter beyond its end",
    7: "goes on behind its last change",
}

STATE, WORD, LAST_WORD, SLOW, ELEMENT, LAST_ELEMENT = (U(k) for k in range(6))
"""Columns of `quarters` uint64[4, 6]: the coder's state, its next word and the end of its words; the clock; the next element and
the end of the elements."""

_CELL = 20
KNOT_BEFORE = np.searchsorted(KNOTS, np.arange(0, int(WHOLE), 1 << _CELL), side="right").astype(np.uint64) - U(1)
"""uint64[1024]: the last knot that is not beyond the first slot of a cell; a cell is a slot's upper ten bits."""


@coder
def decode(block, body, shift, mask, width):  # type: ignore[no-untyped-def]
    """Apply a body to a block of the base, in place. Return 0 or a key of FAULTS, after which the block is useless."""
    codes = np.zeros(mask + U(1), np.uint8)
    fault, first, more, begin = read_codes(body, codes, mask)
    if fault:
        return fault
    ends, word_ends, states = (
        np.full(QUARTERS, U(len(block))),
        np.zeros(QUARTERS, np.uint64),
        np.zeros(QUARTERS, np.uint64),
    )
    fault, count, begin = read_states(body, begin, ends, word_ends, states)
    if fault:
        return fault
    rates = RATES[codes]
    table, models = by_bits(rates, width, shift), new_models(rates, first, more)
    words = np.zeros((len(body) - np.int64(begin)) // 4 + 1, np.uint32)  # `take` is shown the one behind the last, too
    words[:-1].view(np.uint8)[:] = body[np.int64(begin) :]
    quarters = np.zeros((QUARTERS, U(6)), np.uint64)
    for q in range(QUARTERS):
        quarters[q, STATE], quarters[q, LAST_WORD], quarters[q, LAST_ELEMENT] = states[q], word_ends[q], ends[q]
        quarters[q, SLOW] = NORMAL
        if q:
            quarters[q, WORD], quarters[q, ELEMENT] = word_ends[q - U(1)], ends[q - U(1)]
    elements, steps = np.empty(count, np.uint32), np.empty(count, np.uint8)
    if not read_changes(block, words, quarters, models, table, shift, mask, first, elements, steps):
        return 1
    if not apply_changes(block, words, quarters, models, shift, mask, width, first, elements, steps):
        return 2
    for q in range(QUARTERS):
        if quarters[q, STATE] != NONE or quarters[q, WORD] != quarters[q, LAST_WORD]:
            return 7
    return 0


# Helpers take and return numbers alone: numba counts references to arrays in each call, with atomic instructions.


@coder
def take(state, next_word, word, last_word, start, frequency):  # type: ignore[no-untyped-def]
    """Return the coder's state behind the symbol [start, start + frequency) within which its slot lies, and its next word."""
    state = frequency * (state >> U(SCALE)) + (state & MASK) - start
    if state < LOWEST and word < last_word:
        return (state << U(32)) | next_word, word + U(1)
    return state, word


@coder
def goal_of(slot, speed):  # type: ignore[no-untyped-def]
    """Return the least hazard at which the distribution is beyond a slot below GIVEN_UP. The time t has come at the hazard
    ⌈t · 2^16 / speed⌉."""
    k = KNOT_BEFORE[slot >> U(_CELL)]
    while KNOTS[k + U(1)] <= slot:
        k += U(1)
    time = (k << U(16)) + (((slot - KNOTS[k] + U(1)) << U(16)) + GAPS[k] - U(1)) // GAPS[k]
    return ((time << U(16)) + speed - U(1)) // speed


@coder
def read_changes(block, words, quarters, models, table, shift, mask, first, elements, steps):  # type: ignore[no-untyped-def]
    """Fill in the element of each change, the quarters taking turns, and its step: 2 if it leads away from zero, plus 1 if
    there are more. Return whether all lie within their quarters. Hazard is counted from the change before."""
    count = U(len(elements))
    parts = QUARTERS if count >= TOGETHER else U(1)
    for k in range(U(0), count, parts):
        turn = min(parts, count - k)
        for q in range(turn):
            state, word, last_word = quarters[q, STATE], quarters[q, WORD], quarters[q, LAST_WORD]
            slow, since = quarters[q, SLOW], U(0)
            while state & MASK >= GIVEN_UP:
                wait = patience(pace(slow))
                since, slow = since + wait, slower(slow, wait)
                state, word = take(state, U(words[word]), word, last_word, GIVEN_UP, WHOLE - GIVEN_UP)
            speed = pace(slow)
            goal = since + goal_of(state & MASK, speed)
            i, end, hazard, element_hazard = quarters[q, ELEMENT], quarters[q, LAST_ELEMENT], U(0), U(0)
            while i + RUN <= end:
                ahead = hazard
                for j in range(RUN):
                    ahead += U(table[U(block[i + j]) >> shift])
                if ahead >= goal:
                    break
                hazard, i = ahead, i + RUN
            while i < end:
                element_hazard = U(table[U(block[i]) >> shift])
                if hazard + element_hazard >= goal:
                    break
                hazard, i = hazard + element_hazard, i + U(1)
            if i == end:
                return False
            before = max(hazard, since) - since
            start = cumulative(before, speed)
            frequency = cumulative(hazard + element_hazard - since, speed) - start
            state, word = take(state, U(words[word]), word, last_word, start, frequency)
            which = models_of(U(block[i]), shift, mask, first)
            step, start, frequency = step_at(state & MASK, U(models[which]), U(models[which + U(1)]))
            state, word = take(state, U(words[word]), word, last_word, start, frequency)
            elements[k + q], steps[k + q] = i, step
            quarters[q, STATE], quarters[q, WORD] = state, word
            quarters[q, SLOW], quarters[q, ELEMENT] = after_change(slow, before, element_hazard), i + U(1)
        for j in range(k, k + turn):
            which = models_of(U(block[elements[j]]), shift, mask, first)
            models[which] = learn(U(models[which]), steps[j] >> U(1))
            models[which + U(1)] = learn(U(models[which + U(1)]), steps[j] & U(1))
    return True


@coder
def step_at(slot, away_model, longer_model):  # type: ignore[no-untyped-def]
    """Return the step of which the symbol has a slot, where that symbol starts, and its frequency."""
    split = share(longer_model) << U(SCALE - 16)
    longer = slot < split
    start, width = (U(0), split) if longer else (split, WHOLE - split)
    part = (width * share(away_model)) >> U(16)
    if slot - start < part:
        return U(2) | U(longer), start, part
    return U(longer), start + part, width - part


@coder
def apply_changes(block, words, quarters, models, shift, mask, width, first, elements, steps):  # type: ignore[no-untyped-def]
    """Change the elements, quarter by quarter; the steps beyond the first are read as `encoder.put_rest` wrote them. Return
    whether each leads to a number."""
    count, half = len(elements), np.int64(1) << np.int64(width - U(1))
    parts = QUARTERS if count >= TOGETHER else U(1)
    for q in range(parts):
        state, word, last_word = quarters[q, STATE], quarters[q, WORD], quarters[q, LAST_WORD]
        for k in range(np.int64(q), count, np.int64(parts)):
            i, rest = elements[k], U(0)
            if steps[k] & 1:
                which, length, more = models_of(U(block[i]), shift, mask, first), U(1), True
                while more and length < width:
                    model = U(models[which + U(1) + length])
                    one_share = probability(model)
                    more = state & MASK < one_share
                    models[which + U(1) + length] = learn(model, more)
                    start, frequency = (U(0), one_share) if more else (one_share, WHOLE - one_share)
                    state, word = take(state, U(words[word]), word, last_word, start, frequency)
                    length += U(more)
                rest = U(1)
                if length > U(1):
                    left = length - U(2)
                    model = U(models[which + U(1 + LONGEST) + left])
                    one_share = probability(model)
                    digit = state & MASK < one_share
                    models[which + U(1 + LONGEST) + left] = learn(model, digit)
                    start, frequency = (U(0), one_share) if digit else (one_share, WHOLE - one_share)
                    state, word = take(state, U(words[word]), word, last_word, start, frequency)
                    rest = U(2) + U(digit)
                    while left:
                        digits = min(left, U(16))
                        left -= digits
                        value = (state & MASK) >> (U(SCALE) - digits)
                        rest = (rest << digits) | value
                        start, frequency = value << (U(SCALE) - digits), U(1) << (U(SCALE) - digits)
                        state, word = take(state, U(words[word]), word, last_word, start, frequency)
            number = ordinal(U(block[i]), width)
            distance = np.int64(rest) + 1
            number += distance if (steps[k] & 2 != 0) == (number >= 0) else -distance
            if not -half <= number < half:
                return False
            block[i] = U(number ^ (number >> 63)) | (U(number >> 63) & U(half))
        quarters[q, STATE], quarters[q, WORD] = state, word
    return True
