"""The decoder of `delta`: from the base of a block and its bytes to the target. Compiled.

What is read is compared with a bound before it is an index.
"""

from __future__ import annotations

import numpy as np

from composer_nb.kernels.compiled import coder, either, inlined
from composer_nb.kernels.delta.block import (
    GIVEN_UP,
    KNOTS,
    LONGEST,
    LOWEST,
    MASK,
    NONE,
    NORMAL,
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
from composer_nb.kernels.delta.header import read_codes, read_states
from composer_nb.kernels.delta.vectors import GROUP, WINDOW, below_goal, copied, eights, fetched, planes_of, step_to

FAULTS = {
    1: "has a change beyond its end",
    2: "makes a number that does not exist",
    3: "ends within its header or a word",
    4: "has rates of classes that there are not",
    5: "names a rate that there is not",
    6: "has more changes than elements, or a quarter beyond its end",
    7: "goes on behind its last change",
}

_CELL = 20
PIECE = U(1 << 13)
"""Elements, no more, of which hazards are added up at once: they are still in the processor's caches when changes among them are
looked for."""
AHEAD = U(1 << 11)
"""Elements between a prefetch and the copy. The processor's own prediction ends with a piece."""
FAR, NEVER = U(1 << 30), U((1 << 31) - 1)
"""Hazard after which a piece ends, so that sums have 31 bits; and more than a piece has."""
SPARE = WINDOW + 8
SUMS = int(PIECE) // 8 + SPARE
"""Sums of a piece, and what a search may look at behind them."""

STATE, USED, LAST, SLOW, NEXT, PASSED, SINCE, END, LONG = (U(4 * k) for k in range(9))
BEGIN, STOP, BEFORE, WITHIN = (U(4 * k) for k in range(9, 13))
SLOT, PACE, TARGET, GOAL, PLACE, START, STRIDE, BEYOND, WHICH, BITS = (U(4 * k) for k in range(13, 23))
"""Places in an array that has four numbers, one per quarter, at each of them.

Of the quarter: the coder's state, the next word and the end of its words; the clock; the next element, the hazard before that and
where time began; the end of its elements; how many changes are listed as long.
Of the piece: the first element, that behind the last, the hazard before it and within.
Of the change: the slot; the clock's pace; the hazard at which it has come, from the quarter's beginning and from the piece's; the
element, the hazard before it and its own; what of the distribution lies below its end; where its models are, and its step:
2 away from zero, 1 longer than one."""


def _bounds() -> tuple[list[int], list[int]]:
    """Return for each 2^20 slots a time at which the distribution is not beyond the first, and 2^32 times the least growth of
    time per slot (time as a function of the slot is convex). From GIVEN_UP on it means nothing."""
    knots, times, slopes = KNOTS.tolist(), [], []
    for slot in range(0, int(WHOLE), 1 << _CELL):
        k = min(int(np.searchsorted(KNOTS, slot, side="right")), len(KNOTS) - 1) - 1
        width = knots[k + 1] - knots[k]
        times.append((k << 16) + ((slot - knots[k]) << 16) // width)
        slopes.append((1 << 48) // width)
    return times, slopes


TIMES, SLOPES = (np.array(each, np.uint64) for each in _bounds())


@coder
def decode(base, made, body, shift, mask, width):  # type: ignore[no-untyped-def]
    """Make the target from the base. Return 0, or one of FAULTS, after which the target is useless."""
    codes = np.zeros(mask + U(1), np.uint8)
    fault, first, more, begin = read_codes(body, codes, mask)
    if fault:
        return fault
    ends, last, states = np.full(QUARTERS, U(len(base))), np.zeros(QUARTERS, np.uint64), np.zeros(QUARTERS, np.uint64)
    fault, count, begin = read_states(body, begin, ends, last, states)
    if fault:
        return fault
    rates = RATES[codes]
    table, planes, models = by_bits(rates, width, shift), planes_of(rates, first), new_models(rates, first, more)
    words = np.zeros((len(body) - np.int64(begin)) // 4 + 1, np.uint32)  # the last is read, and not used
    words[:-1].view(np.uint8)[:] = body[np.int64(begin) :]
    parts = np.zeros(4 * 23, np.uint64)
    for q in range(QUARTERS):
        parts[STATE + q], parts[LAST + q], parts[END + q], parts[SLOW + q] = states[q], last[q], ends[q], NORMAL
        if q:
            parts[USED + q], parts[NEXT + q] = last[q - U(1)], ends[q - U(1)]
        parts[STOP + q] = parts[NEXT + q]
    sums = np.empty(QUARTERS * U(SUMS), np.int32)
    long = np.empty(count + QUARTERS, np.uint64)
    return change(base, made, parts, count, words, sums, long, models, table, planes, shift, mask, width, first)


@inlined
def refill(state, words, used, last):  # type: ignore[no-untyped-def]
    """Take a word where the state is low and one is left."""
    low = (state < LOWEST) & (used < last)
    return either(low, (state << U(32)) | U(words[used]), state), used + U(low)


@inlined
def refilled(parts, q, state, words):  # type: ignore[no-untyped-def]
    """Store the coder's state, with a word where it needs one."""
    parts[STATE + q], parts[USED + q] = refill(state, words, parts[USED + q], parts[LAST + q])


@inlined
def refill_surely(state, words, used):  # type: ignore[no-untyped-def]
    """Do the same where one is surely left."""
    low = state < LOWEST
    return either(low, (state << U(32)) | U(words[used]), state), used + U(low)


@inlined
def get_bit(state, words, used, last, models, which):  # type: ignore[no-untyped-def]
    model = U(models[which])
    p, slot = probability(model), state & MASK
    bit = slot < p
    state = either(bit, p, WHOLE - p) * (state >> U(SCALE)) + slot - either(bit, U(0), p)
    models[which] = learn(model, bit)
    state, used = refill(state, words, used, last)
    return bit, state, used


@inlined
def get_step(parts, q, base, models, shift, mask, first):  # type: ignore[no-untyped-def]
    """Decode whether a change is longer than one step and away from zero; return the coder's state."""
    which, state = models_of(U(base[parts[PLACE + q]]), shift, mask, first), parts[STATE + q]
    slot, split = state & MASK, share(U(models[which + U(1)])) << U(SCALE - 16)
    longer = slot < split
    begin, whole = either(longer, U(0), split), either(longer, split, WHOLE - split)
    inner = (whole * share(U(models[which]))) >> U(16)
    away = slot - begin < inner
    begin, whole = either(away, begin, begin + inner), either(away, inner, whole - inner)
    parts[WHICH + q], parts[BITS + q] = which, U(away) << U(1) | U(longer)
    return whole * (state >> U(SCALE)) + slot - begin


@coder
def get_more(state, words, used, last, models, which, width):  # type: ignore[no-untyped-def]
    """The rest of a number above 0, as `put_more` wrote it."""
    length, more = U(1), True
    while more and length < width:
        more, state, used = get_bit(state, words, used, last, models, which + U(1) + length)
        length += U(more)
    m = U(1)
    if length > U(1):
        low = length - U(2)
        digit, state, used = get_bit(state, words, used, last, models, which + U(1 + LONGEST) + low)
        m = U(2) + U(digit)
        while low:
            digits = min(low, U(16))
            low -= digits
            m = (m << digits) | ((state & MASK) >> (U(SCALE) - digits))
            state = ((state >> U(SCALE)) << (U(SCALE) - digits)) + (state & (MASK >> digits))
            state, used = refill(state, words, used, last)
    return m, state, used


@inlined
def earliest(slot):  # type: ignore[no-untyped-def]
    """A time at which the distribution is not beyond `slot`, which is below GIVEN_UP, and little less than the last such."""
    cell = slot >> U(_CELL)
    return TIMES[cell] + (((slot & U((1 << _CELL) - 1)) * SLOPES[cell]) >> U(32))


@inlined
def aim(parts, q):  # type: ignore[no-untyped-def]
    """Slot, pace and target. As hazard a time t is t · 2^16 / pace, which is no less than t · slow / NORMAL, for the pace is
    2^16 · NORMAL / slow, rounded down."""
    slow, slot = parts[SLOW + q], parts[STATE + q] & MASK
    parts[SLOT + q], parts[PACE + q] = slot, pace(slow)
    parts[TARGET + q] = parts[SINCE + q] + max(earliest(slot) * slow // NORMAL, U(1))


@inlined
def come(parts, q):  # type: ignore[no-untyped-def]
    """The clock, and the coder's state behind the change."""
    gone = max(parts[START + q], parts[SINCE + q]) - parts[SINCE + q]
    start = cumulative(gone, parts[PACE + q])
    end = parts[START + q] + parts[STRIDE + q]
    parts[SLOW + q] = after_change(parts[SLOW + q], gone, parts[STRIDE + q])
    parts[NEXT + q], parts[PASSED + q], parts[SINCE + q] = parts[PLACE + q] + U(1), end, end
    return (parts[BEYOND + q] - start) * (parts[STATE + q] >> U(SCALE)) + parts[SLOT + q] - start


@inlined
def put_change(base, made, parts, q, models, long, room, width):  # type: ignore[no-untyped-def]
    """Changes an element by one step, which to sign and magnitude is adding or taking one; lists it where that is not all: more
    steps, or beyond zero or the largest. And learns from it."""
    i, bits, which = parts[PLACE + q], parts[BITS + q], parts[WHICH + q]
    old = U(base[i])
    new = old + (bits & U(2)) - U(1)
    made[i] = new
    long[room * q + parts[LONG + q]] = (old << U(32)) | (i << U(2)) | bits
    parts[LONG + q] += (bits & U(1)) | (((new ^ old) >> (width - U(1))) & U(1))
    learn_step(models, which, bits)


@coder
def next_piece(base, made, parts, q, sums, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """Copy the next piece: whole groups of 32, and the rest of a quarter that has no more of them. Fill `sums` with the hazard
    before each eight and behind the last, then with sums that no goal reaches."""
    i, n, k, so_far = parts[STOP + q], parts[END + q], q * U(SUMS), U(0)
    parts[BEGIN + q], parts[BEFORE + q] = i, parts[BEFORE + q] + parts[WITHIN + q]
    end = min(n, i + PIECE)
    sums[k] = 0
    while i + GROUP <= end and so_far < FAR:
        copied(base, made, i, GROUP)
        fetched(base, i + AHEAD)
        fetched(made, i + AHEAD)
        a, b, c, d = eights(base, i, table, planes, shift, mask, first)
        sums[k + U(1)], sums[k + U(2)] = so_far + a, so_far + a + b
        so_far += a + b + c + d
        sums[k + U(3)], sums[k + U(4)] = so_far - d, so_far
        i, k = i + GROUP, k + U(4)
    for j in range(U(1), U(SPARE)):
        sums[k + j] = NEVER
    if i + GROUP > n:
        copied(base, made, i, n - i)
    parts[STOP + q], parts[WITHIN + q] = i, so_far


@coder
def waited(parts, q, words):  # type: ignore[no-untyped-def]
    """Take the symbols that say that no change has come."""
    state, slow, used = parts[STATE + q], parts[SLOW + q], parts[USED + q]
    while state & MASK >= GIVEN_UP:
        wait = patience(pace(slow))
        parts[SINCE + q] += wait
        state = (WHOLE - GIVEN_UP) * (state >> U(SCALE)) + (state & MASK) - GIVEN_UP
        state, used = refill(state, words, used, parts[LAST + q])
        slow = slower(slow, wait)
    parts[STATE + q], parts[SLOW + q], parts[USED + q] = state, slow, used


@coder
def long_changes(made, parts, q, words, long, room, models, shift, mask, width, first):  # type: ignore[no-untyped-def]
    """The changes that are listed, with what the coder says of them behind all others; 0 or 2 of FAULTS."""
    state, used, sign = parts[STATE + q], parts[USED + q], U(1) << (width - U(1))
    biggest = np.int64(sign - U(1))
    for k in range(parts[LONG + q]):
        listed = long[room * q + U(k)]
        old, i, away, m = listed >> U(32), (listed & U(0xFFFFFFFF)) >> U(2), listed & U(2) != U(0), U(0)
        if listed & U(1):
            which = models_of(old, shift, mask, first)
            m, state, used = get_more(state, words, used, parts[LAST + q], models, which, width)
        place = ordinal(old, width)
        turned = -np.int64(away != (place >= 0))
        new = place + (((np.int64(m) + 1) ^ turned) - turned)  # it may be one that no element has
        if new > biggest or new < -biggest - 1:
            return 2
        made[i] = U(new ^ (new >> 63)) | (sign & U(new >> 63))
    parts[STATE + q], parts[USED + q] = state, used
    return 0


@coder
def glance(parts, q, sums):  # type: ignore[no-untyped-def]
    """The eight elements of the piece among which the target is, behind the piece if it is not there, and hazard before them."""
    goal, room = min(parts[TARGET + q] - parts[BEFORE + q], NEVER), q * U(SUMS)
    j = room + ((parts[NEXT + q] - parts[BEGIN + q]) >> U(3)) + U(1)
    less = below_goal(sums, j, goal)
    while less == U(WINDOW):
        j += less
        less = below_goal(sums, j, goal)
    j += less - U(1)
    parts[PLACE + q], parts[START + q] = parts[BEGIN + q] + ((j - room) << U(3)), U(sums[j])
    parts[GOAL + q] = goal


@coder
def look(base, parts, q, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """Find which of the eight elements it is, the hazard before it and its own."""
    here, before = parts[PLACE + q], parts[BEFORE + q]
    which, at, end = step_to(base, here, parts[START + q], parts[GOAL + q], table, planes, shift, mask, first)
    parts[PLACE + q], parts[START + q], parts[STRIDE + q] = here + which, before + at, end - at


@inlined
def ends_beyond(parts, q):  # type: ignore[no-untyped-def]
    """Store the part of the distribution below the element's end; return whether that is beyond the slot."""
    end = parts[START + q] + parts[STRIDE + q]
    parts[BEYOND + q] = cumulative(max(end, parts[SINCE + q]) - parts[SINCE + q], parts[PACE + q])
    return parts[BEYOND + q] > parts[SLOT + q]


@coder
def search(base, made, parts, q, sums, table, planes, shift, mask, first):  # type: ignore[no-untyped-def]
    """The change at which the slot is, however many pieces behind the next element; whether there is one."""
    while True:
        glance(parts, q, sums)
        if parts[PLACE + q] < parts[STOP + q]:
            look(base, parts, q, table, planes, shift, mask, first)
            break
        if parts[NEXT + q] < parts[STOP + q]:
            parts[NEXT + q], parts[PASSED + q] = parts[STOP + q], parts[BEFORE + q] + parts[WITHIN + q]
        parts[PLACE + q], parts[START + q] = parts[NEXT + q], parts[PASSED + q]
        if parts[STOP + q] + GROUP > parts[END + q]:
            break
        next_piece(base, made, parts, q, sums, table, planes, shift, mask, first)
    while parts[PLACE + q] < parts[END + q]:
        parts[STRIDE + q] = table[U(base[parts[PLACE + q]]) >> shift]
        if ends_beyond(parts, q):
            break
        parts[PLACE + q], parts[START + q] = parts[PLACE + q] + U(1), parts[START + q] + parts[STRIDE + q]
    while parts[PLACE + q] >= parts[STOP + q] and parts[STOP + q] + GROUP <= parts[END + q]:
        # A piece is copied before anything is changed in it.
        next_piece(base, made, parts, q, sums, table, planes, shift, mask, first)
    return parts[PLACE + q] < parts[END + q]


@coder
def change(base, made, parts, count, words, sums, long, models, table, planes, shift, mask, width, first):  # type: ignore[no-untyped-def]
    """Copy the base piece by piece, each before anything in it changes, and apply the changes. Return 0 or one of FAULTS."""
    quarters = QUARTERS if count >= TOGETHER else U(1)
    room = U(len(long)) // quarters
    for q in range(QUARTERS):
        next_piece(base, made, parts, q, sums, table, planes, shift, mask, first)
    for k in range(U(0), count, quarters):
        there, plain = min(quarters, count - k), True
        for q in range(there):
            aim(parts, q)
            plain &= (parts[SLOT + q] < GIVEN_UP) & (parts[USED + q] + U(2) <= parts[LAST + q])
        if plain:
            # What one quarter waits for, the others compute: each step is taken for all of them before the next.
            for q in range(there):
                glance(parts, q, sums)
            for q in range(there):
                if parts[PLACE + q] < parts[STOP + q]:
                    look(base, parts, q, table, planes, shift, mask, first)
                else:  # which ends nowhere
                    parts[START + q], parts[STRIDE + q] = U(0), U(0)
            for q in range(there):
                if not (ends_beyond(parts, q) or search(base, made, parts, q, sums, table, planes, shift, mask, first)):
                    return 1
            for q in range(there):
                parts[STATE + q], parts[USED + q] = refill_surely(come(parts, q), words, parts[USED + q])
            for q in range(there):
                state = get_step(parts, q, base, models, shift, mask, first)
                parts[STATE + q], parts[USED + q] = refill_surely(state, words, parts[USED + q])
        else:
            for q in range(there):
                waited(parts, q, words)
                aim(parts, q)
                if not search(base, made, parts, q, sums, table, planes, shift, mask, first):
                    return 1
                refilled(parts, q, come(parts, q), words)
                refilled(parts, q, get_step(parts, q, base, models, shift, mask, first), words)
        for q in range(there):
            put_change(base, made, parts, q, models, long, room, width)
    over = True
    for q in range(QUARTERS):
        if long_changes(made, parts, q, words, long, room, models, shift, mask, width, first):
            return 2
        if parts[STOP + q] + GROUP <= parts[END + q]:
            copied(base, made, parts[STOP + q], parts[END + q] - parts[STOP + q])
        over &= (parts[STATE + q] == NONE) & (parts[USED + q] == parts[LAST + q])
    return 0 if over else 7
