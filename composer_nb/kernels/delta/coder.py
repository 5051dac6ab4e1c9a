"""Changed elements of an array, coded given what the receiver knows of each: the class of its old bits. Compiled.

An element of class c (a weight's exponent, say) changes with some probability p_c. Its *hazard* is −ln(1 − p_c), and hazards add
up: after unchanged elements of T together the next change is yet to come with probability exp(−T). So where it comes is one
symbol with the distribution 1 − exp(−T), whatever classes lie on the way, and to find it takes a sum and a comparison an element.
A clock that runs faster where changes have lately come sooner than expected (rows, experts) scales T. A change is then a sign and
a number of steps between adjacent numbers, in binary decisions whose probabilities adapt to the class. All goes through a rANS
coder (Duda, arXiv 1311.2540) of 64 bits. To decode a change is one long chain, each instruction waiting for the one before; so a
block with many has four quarters with coders of their own, which a processor can work on at once (Giesen, arXiv 1402.3392).
docs/weight_codec.md has the format. Here is a block's body, in both directions; its header is in `codec`.

Integers only, but where an encoder picks rates: every machine decodes the same. They are uint64 where they are not said to be
something else, since numba makes float64 of a signed and an unsigned one.
Nothing is checked by numba: what is read from a body is compared with a bound before it is an index. Helpers take and return
numbers alone: numba counts references to arrays in each call, with atomic instructions.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from composer_nb.kernels.compiled import coder, inlined

U = np.uint64
# log2 of what the frequencies of all symbols add up to.
SCALE = 30
WHOLE, MASK = U(1 << SCALE), U((1 << SCALE) - 1)
# The coder's state lies in [2^32, 2^64) from its first word on.
LOWEST = U(1 << 32)
# Its state before the first symbol, which a decoder ends with.
NONE = U(1)
# A hazard of 1; a unit of the clock at its normal pace is as long.
NAT = 1 << 20
# Longest wait for the next change. After it a symbol says that none has come, and time begins anew.
PATIENCE = U(6 * NAT)
# log2 of the changes over which the clock's pace is taken.
RECENT = 5
# Hazard that so many changes take on average, if all is as the classes say.
NORMAL = U(NAT << RECENT)
# Parts of a large block, and the changes from which a block is large. Each part has a coder of its own, and a decoder works on
# all of them at once. Fewer changes are not worth a longer header.
QUARTERS, TOGETHER = U(4), U(1024)
LONGEST = 34
# Adaptive bits of a class: whether away from zero; whether longer than one step, and as many more for the length; the second
# digit for each length. Some to spare.
MODELS = 2 + 2 * LONGEST
# Adaptive bits begin as if so many decisions had been seen: whether away from zero is mostly as likely as not.
ANY, AWAY, LONGER = U(0), U(14), U(2)
# Classes that can have rates of their own, from the first on. Those below have the first one's, those above none.
CLASSES = 16
# Elements whose hazards are added up before they are compared with a goal.
RUN = U(16)
# Number of classes with the first one's rate that have adaptive bits of their own; those below share them.
APART = U(16)


def _distribution() -> npt.NDArray[np.uint64]:
    """2^30·(1 − exp(−T)) at T = 0, 1/16, 2/16, … 6, by a recurrence in integers."""
    left, knots = 1 << SCALE, [0]
    for _ in range(int(PATIENCE) >> 16):
        left -= (left * 260218914) >> 32  # 2^32·(1 − exp(−1/16))
        knots.append((1 << SCALE) - left)
    return np.array(knots, np.uint64)


KNOTS = _distribution()
GIVEN_UP = KNOTS[-1]
GAPS = np.diff(KNOTS, append=GIVEN_UP)
# 2^40 / n, rounded up.
RECIPROCALS = np.array([0, *(-(-(1 << 40) // n) for n in range(1, 257))], np.int64)


def rate_of(code: int) -> int:
    """Hazard that a byte of a block's header stands for: none, or 3 bits of mantissa after a leading one."""
    return (8 + (code & 7)) << (code >> 3) if code else 0


# Up to 7.5: even a class of which everything changed may have one element that does not.
RATES = np.array([rate_of(code) for code in range(160)], np.uint32)

FAULTS = {
    1: "has a change beyond its end",
    2: "makes a number that does not exist",
    7: "goes on behind its last change",
}

# Columns of `quarters` uint64[4, 6]: the coder's state, its next word and the end of its words; the clock; the next element and
# the end of the elements.
STATE, WORD, LAST_WORD, SLOW, ELEMENT, LAST_ELEMENT = (U(k) for k in range(6))

_CELL = 20
# uint64[1024]: the last knot that is not beyond the first slot of a cell; a cell is a slot's upper ten bits.
KNOT_BEFORE = np.searchsorted(KNOTS, np.arange(0, int(WHOLE), 1 << _CELL), side="right").astype(np.uint64) - U(1)
# Hazards that are as near to one rate as to the next.
BETWEEN = (RATES[1:-1].astype(np.float64) + RATES[2:]) / 2
# log2 of the sample that estimates the size of each class, and the largest step between samples.
SAMPLE, MOST = U(13), U(127)


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
def after_change(slow, before, hazard):  # type: ignore[no-untyped-def]
    """Return the clock after a change of an element of this hazard. Half of it counts (it came somewhere within), up to 3/4."""
    return slower(slow - (slow >> U(RECENT)), before + min(hazard >> U(1), U(3 * NAT // 4)))


@coder
def patience(speed):  # type: ignore[no-untyped-def]
    """PATIENCE as hazard: the least that takes so long."""
    return ((PATIENCE << U(16)) + speed - U(1)) // speed


@coder
def cumulative(hazard, speed):  # type: ignore[no-untyped-def]
    """Return how often, of 2^30, the next change has come by then; linear between the knots."""
    time = min((hazard * speed) >> U(16), PATIENCE)
    k = time >> U(16)
    return KNOTS[k] + (((time & U(65535)) * GAPS[k]) >> U(16))


@coder
def probability(model):  # type: ignore[no-untyped-def]
    """Return the probability of a one, of 2^30. A model is 24 bits of probability and an 8-bit count of decisions."""
    return min(max(model >> U(16), U(1)), U(65535)) << U(SCALE - 16)


@coder
def learn(model, bit):  # type: ignore[no-untyped-def]
    """The estimator of Krichevsky and Trofimov, forgetting after 254 decisions."""
    p, decisions = np.int64(model >> U(8)), model & U(255)
    p += (((np.int64(bit) << 24) - p) * RECIPROCALS[decisions + U(2)]) >> 40
    return (U(p) << U(8)) | (decisions + U(decisions < U(254)))


@inlined
def learn_step(models, which, step):  # type: ignore[no-untyped-def]
    """Update a class's models with a change: `step` is 2 for away from zero, plus 1 for longer than one step."""
    models[which] = learn(U(models[which]), step >> U(1))
    models[which + U(1)] = learn(U(models[which + U(1)]), step & U(1))


@coder
def share(model):  # type: ignore[no-untyped-def]
    """Return the probability of a one, of 2^16, in the symbol of two decisions."""
    return ((model >> U(16)) & U(0xFF80)) | U(64)


@coder
def new_models(rates, first, more):  # type: ignore[no-untyped-def]
    """Return models of the first class, of `more` above it, and of up to APART below, as if some decisions had been seen. A
    change is of more than one step about as often as one in p is three times in a row (a step that is normally distributed)."""
    below = min(first, APART)
    models = np.full((below + more + U(1)) * U(MODELS), np.uint32(U(1 << 31) | ANY))
    for c in range(below + more + U(1)):
        p = cumulative(U(rates[first - below + c]), U(1 << 16)) >> U(SCALE - 16)
        at = U(c) * U(MODELS)
        models[at], models[at + U(1)] = U(1 << 31) | AWAY, ((p * p >> U(16)) * p >> U(8)) << U(8) | LONGER
    return models


@coder
def models_of(bits, shift, mask, first):  # type: ignore[no-untyped-def]
    """Return where the models of an element's class begin."""
    lowest = first - min(first, APART)
    return (max((bits >> shift) & mask, lowest) - lowest) * U(MODELS)


@coder
def by_bits(rates, width, shift):  # type: ignore[no-untyped-def]
    """Return a table by class as a table by bits >> shift, sign included, which saves a step per element."""
    table = np.empty(U(1) << (width - shift), np.uint32)
    for bits in range(len(table)):
        table[bits] = rates[bits % len(rates)]
    return table


@coder
def hazard_of(block, begin, end, table, shift):  # type: ignore[no-untyped-def]
    """Return the hazard of the elements from `begin` to `end`."""
    hazard = U(0)
    for i in range(begin, end):
        hazard += U(table[U(block[i]) >> shift])
    return hazard


@coder
def ordinal(bits, width):  # type: ignore[no-untyped-def]
    """Sign-and-magnitude bits as a number that grows with what they stand for: adjacent floats differ by 1, −0 is −1. One to
    one, so that every pattern, NaN and infinities too, has a number of its own."""
    sign = U(1) << (width - U(1))
    return np.int64(bits & (sign - U(1))) ^ -np.int64(bits >> (width - U(1)))


# Encoding


@coder
def encode(base, target, elements, shift, mask, width):  # type: ignore[no-untyped-def]
    """Return the first class with a rate of its own, the last one, and all classes' codes; where the elements of each quarter
    end, how many words it has, and its coder's state; the words. `elements` uint32[≥ 1]: those in which base and target differ,
    ascending."""
    changed = np.zeros(mask + U(1), np.int64)
    for i in elements:
        changed[(U(base[i]) >> shift) & mask] += 1
    first, last, codes = rate_codes(histogram(base, changed, shift, mask), changed)
    rates = RATES[codes]
    table, models = by_bits(rates, width, shift), new_models(rates, first, last - first)
    count, quarter_count = U(len(elements)), QUARTERS if len(elements) >= TOGETHER else U(1)
    change_ends, ends = np.full(QUARTERS + U(1), count), np.full(QUARTERS, U(len(base)))
    change_ends[0] = U(0)
    for q in range(U(1), quarter_count):
        change_ends[q] = change_ends[q - U(1)] + (count + QUARTERS - U(q)) // QUARTERS
        ends[q - U(1)] = U(elements[change_ends[q]])
    places, waits = np.empty(count, np.uint64), np.empty(count, np.uint32)
    for q in range(QUARTERS):
        place_symbols(base, elements, change_ends[q], change_ends[q + 1], table, shift, places, waits)
    steps = step_symbols(base, target, elements, change_ends, models, shift, mask, width, first)
    rests, rest_cuts = rest_symbols(base, target, elements, change_ends, models, shift, mask, width, first)
    words = np.empty(np.int64(waits.sum()) + 2 * len(elements) + len(rests), np.uint32)
    begin, states, word_counts = U(len(words)), np.full(QUARTERS, NONE), np.zeros(QUARTERS, np.uint64)
    for q in range(QUARTERS - U(1), U(0) - U(1), U(0) - U(1)):
        state, end = NONE, begin
        for k in range(rest_cuts[q + U(1)], rest_cuts[q], -1):
            state, begin = coded(state, words, begin, rests[k - 1])
        for k in range(change_ends[q + U(1)], change_ends[q], -1):
            state, begin = coded(state, words, begin, steps[k - 1])
            state, begin = coded(state, words, begin, places[k - 1])
            for _ in range(waits[k - 1]):
                state, begin = coded(state, words, begin, symbol(GIVEN_UP, WHOLE - GIVEN_UP))
        states[q], word_counts[q] = state, end - begin
    return first, last, codes, ends, word_counts, states, words[np.int64(begin) :]


@coder
def histogram(base, changed, shift, mask):  # type: ignore[no-untyped-def]
    """Return about how many elements of each class there are, and no fewer than changed: a sample says it of classes that have
    many, of which few changed; those of small numbers, of which much changed and a rate has to be exact, are counted."""
    n, sizes = U(len(base)), np.zeros(mask + U(1), np.int64)
    one_in = min(n >> SAMPLE, MOST) | U(1)  # odd, so that rows of a matrix are not looked at in the same columns
    for begin in range(U(0), n - n % U(64), U(64) * one_in):
        for i in range(begin, begin + U(64)):
            sizes[(U(base[i]) >> shift) & mask] += 1
    for i in range(n - n % U(64), n):
        sizes[(U(base[i]) >> shift) & mask] += 1
    if one_in > U(1):
        sizes *= np.int64(one_in)
        small_changes, limit = changed.sum(), U(0)
        while limit < mask and sizes[limit] <= small_changes:
            small_changes -= sizes[limit]
            limit += U(1)
        sizes[: np.int64(limit)] = 0
        for i in range(n - n % U(32)):
            c = (U(base[i]) >> shift) & mask
            if c < limit:
                sizes[c] += 1
        # A class that the sample has nothing of may still have many, in one row say.
        sizes[np.int64(limit) :] = np.maximum(sizes[np.int64(limit) :], np.int64(one_in))
    return np.maximum(sizes, changed)


@coder
def entropy(count, changed):  # type: ignore[no-untyped-def]
    """Bits that it takes to say which of so many changed, N · H(c / N)."""
    bits = 0.0
    if 0 < changed < count:
        bits = changed * math.log2(count / changed) + (count - changed) * math.log2(count / (count - changed))
    return bits


@coder
def bits_at(code, count, changed):  # type: ignore[no-untyped-def]
    """Return the bits that they take at the rate of a byte."""
    hazard = RATES[code] / NAT
    return ((count - changed) * hazard - changed * math.log(-math.expm1(-hazard))) / math.log(2.0)


@coder
def rate_codes(counts, changed):  # type: ignore[no-untyped-def]
    """Return the class up to which all share one rate, the last class with a change, and for each class the byte whose hazard is
    nearest to −ln(1 − changed/there), 0 where nothing changed. Classes of small numbers have few elements each, so a rate for
    each saves less than it costs. Something must have changed, and in no class more than there is."""
    codes, last = np.zeros(len(counts), np.uint8), len(changed) - 1
    while not changed[last]:
        last -= 1
    total, total_changed, bits, most_saved, first = 0, 0, 0.0, -math.inf, 0
    n, k = 0, 0
    for c in range(last + 1):
        total, total_changed = total + counts[c], total_changed + changed[c]
        bits += entropy(counts[c], changed[c])
        if c > last - CLASSES:
            saved = 4.0 * c + bits - entropy(total, total_changed)
            if saved > most_saved:
                most_saved, first, n, k = saved, c, total, total_changed
    for c in range(first, last + 1):
        if c > first:
            n, k = counts[c], changed[c]
        if k:
            best: Any = 1 + np.searchsorted(BETWEEN, -math.log(max(1 - k / n, 2.0**-7)) * NAT)
            previous = np.int64(codes[c - 1])
            near = min(max(best, previous - 12, 1), previous + 2) if c > first else best
            gain = bits_at(near, n, k) - bits_at(best, n, k) if 0 < near != best else 8.0
            codes[c] = near if gain < 8 else best
    codes[:first] = codes[first]
    return U(first), U(last), codes


@inlined
def symbol(start, frequency):  # type: ignore[no-untyped-def]
    """Pack a symbol's share of 2^30: where it starts in the upper 32 bits, its frequency in the lower."""
    return (start << U(32)) | frequency


@coder
def place_symbols(base, elements, begin, end, table, shift, places, waits):  # type: ignore[no-untyped-def]
    """Fill in the symbols of the places of a quarter's changes, from the begin-th to the end-th, and how often each was waited
    for in vain before. The hazard of the elements before a quarter's first change counts for the quarter before, except in the
    first quarter."""
    slow = NORMAL
    for k in range(begin, end):
        i = U(elements[k])
        since = i if k == begin else U(elements[k - U(1)]) + U(1)
        before = hazard_of(base, U(0) if k == U(0) else since, i, table, shift)
        element_hazard, speed = U(table[U(base[i]) >> shift]), pace(slow)
        waits[k] = 0
        while (before * speed) >> U(16) >= PATIENCE:
            wait = patience(speed)
            waits[k] += 1
            before, slow = before - wait, slower(slow, wait)
            speed = pace(slow)
        start = cumulative(before, speed)
        places[k] = symbol(start, cumulative(before + element_hazard, speed) - start)
        slow = after_change(slow, before, element_hazard)


@coder
def step_of(base, target, i, width):  # type: ignore[no-untyped-def]
    """Return whether a change leads away from zero, and its steps beyond the first."""
    number = ordinal(U(base[i]), width)
    step = ordinal(U(target[i]), width) - number
    return (step > 0) == (number >= 0), U(abs(step) - 1)


@coder
def step_symbols(base, target, elements, cuts, models, shift, mask, width, first):  # type: ignore[no-untyped-def]
    """Return the symbol of each change: away from zero or not, longer than one step or not. The models learn after one change
    of each quarter."""
    symbols = np.empty(len(elements), np.uint64)
    for j in range(cuts[1]):
        turn = U(0)
        while turn < QUARTERS and cuts[turn] + U(j) < cuts[turn + U(1)]:
            k = cuts[turn] + U(j)
            away, rest = step_of(base, target, elements[k], width)
            index = models_of(U(base[elements[k]]), shift, mask, first)
            split, longer = share(U(models[index + U(1)])) << U(SCALE - 16), rest > U(0)
            start, whole = (U(0), split) if longer else (split, WHOLE - split)
            part = (whole * share(U(models[index]))) >> U(16)
            symbols[k] = symbol(start, part) if away else symbol(start + part, whole - part)
            turn += U(1)
        for q in range(turn):
            k = cuts[q] + U(j)
            away, rest = step_of(base, target, elements[k], width)
            index = models_of(U(base[elements[k]]), shift, mask, first)
            learn_step(models, index, U(away) << U(1) | U(rest > U(0)))
    return symbols


@coder
def rest_symbols(base, target, elements, cuts, models, shift, mask, width, first):  # type: ignore[no-untyped-def]
    """Return the symbols of the steps beyond the first, quarter by quarter, and where those of a quarter end."""
    symbols, count, ends = np.empty(64, np.uint64), U(0), np.zeros(QUARTERS + U(1), np.uint64)
    for q in range(QUARTERS):
        for k in range(cuts[q], cuts[q + 1]):
            _, rest = step_of(base, target, elements[k], width)
            if rest:
                if count + U(64) > U(len(symbols)):
                    symbols = np.concatenate((symbols, symbols))
                index = models_of(U(base[elements[k]]), shift, mask, first)
                count = put_rest(symbols, count, models, index, rest, width)
        ends[q + 1] = count
    return symbols[: np.int64(count)], ends


@coder
def put_bit(symbols, count, models, index, bit):  # type: ignore[no-untyped-def]
    """Append a decision and let its model learn. Return the new number of symbols."""
    one_share = probability(U(models[index]))
    models[index] = learn(U(models[index]), bit)
    symbols[count] = symbol(U(0), one_share) if bit else symbol(one_share, WHOLE - one_share)
    return count + U(1)


@coder
def put_rest(symbols, count, models, index, rest, width):  # type: ignore[no-untyped-def]
    """Append a number above 0: its length in bits (a one for each after the first, then a zero), its second digit, and the
    others as they are."""
    length, has_more = U(1), True
    while has_more and length < width:
        has_more = rest >> length != U(0)
        count = put_bit(symbols, count, models, index + U(1) + length, has_more)
        length += U(has_more)
    if length > U(1):
        bits_left = length - U(2)
        count = put_bit(symbols, count, models, index + U(1 + LONGEST) + bits_left, (rest >> bits_left) & U(1) != U(0))
        while bits_left:
            digits = min(bits_left, U(16))
            bits_left -= digits
            value = (rest >> bits_left) & ((U(1) << digits) - U(1))
            symbols[count] = symbol(value << (U(SCALE) - digits), U(1) << (U(SCALE) - digits))
            count += U(1)
    return count


@inlined
def coded(state, words, begin, packed):  # type: ignore[no-untyped-def]
    """Return the coder's state with one symbol more, and where its words begin: they are written backwards."""
    frequency, start = packed & U(0xFFFFFFFF), packed >> U(32)
    if state >= frequency << U(64 - SCALE):
        begin -= U(1)
        words[begin] = np.uint32(state & U(0xFFFFFFFF))
        state >>= U(32)
    return ((state // frequency) << U(SCALE)) + state % frequency + start, begin


# Decoding


@coder
def decode(block, words, quarters, codes, first, more, count, shift, mask, width):  # type: ignore[no-untyped-def]
    """Apply changes to a block of the base, in place. Return 0 or a key of FAULTS, after which the block is useless. `words` has
    one more than there are: `take` is shown the one behind the last, too."""
    rates = RATES[codes]
    table, models = by_bits(rates, width, shift), new_models(rates, first, more)
    elements, steps = np.empty(count, np.uint32), np.empty(count, np.uint8)
    if not read_changes(block, words, quarters, models, table, shift, mask, first, elements, steps):
        return 1
    if not apply_changes(block, words, quarters, models, shift, mask, width, first, elements, steps):
        return 2
    for q in range(QUARTERS):
        if quarters[q, STATE] != NONE or quarters[q, WORD] != quarters[q, LAST_WORD]:
            return 7
    return 0


@coder
def take(state, next_word, word, last_word, start, frequency):  # type: ignore[no-untyped-def]
    """Return the coder's state behind the symbol [start, start + frequency) within which its slot lies, and its next word."""
    state = frequency * (state >> U(SCALE)) + (state & MASK) - start
    if state < LOWEST and word < last_word:
        return (state << U(32)) | next_word, word + U(1)
    return state, word


@coder
def take_bit(state, next_word, word, last_word, model):  # type: ignore[no-untyped-def]
    """Return the same behind a decision, the decision, and its model, which has learnt it."""
    one_share = probability(model)
    bit = state & MASK < one_share
    start, frequency = (U(0), one_share) if bit else (one_share, WHOLE - one_share)
    state, word = take(state, next_word, word, last_word, start, frequency)
    return state, word, bit, learn(model, bit)


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
    quarter_count = QUARTERS if count >= TOGETHER else U(1)
    for k in range(U(0), count, quarter_count):
        turn = min(quarter_count, count - k)
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
            index = models_of(U(block[i]), shift, mask, first)
            step, start, frequency = step_at(state & MASK, U(models[index]), U(models[index + U(1)]))
            state, word = take(state, U(words[word]), word, last_word, start, frequency)
            elements[k + q], steps[k + q] = i, step
            quarters[q, STATE], quarters[q, WORD] = state, word
            quarters[q, SLOW], quarters[q, ELEMENT] = after_change(slow, before, element_hazard), i + U(1)
        for j in range(k, k + turn):
            index = models_of(U(block[elements[j]]), shift, mask, first)
            learn_step(models, index, U(steps[j]))
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
    quarter_count = QUARTERS if count >= TOGETHER else U(1)
    for q in range(quarter_count):
        state, word, last_word = quarters[q, STATE], quarters[q, WORD], quarters[q, LAST_WORD]
        for k in range(np.int64(q), count, np.int64(quarter_count)):
            i, rest = elements[k], U(0)
            if steps[k] & 1:
                index, length, has_more = models_of(U(block[i]), shift, mask, first), U(1), True
                while has_more and length < width:
                    at = index + U(1) + length
                    state, word, has_more, models[at] = take_bit(state, U(words[word]), word, last_word, U(models[at]))
                    length += U(has_more)
                rest = U(1)
                if length > U(1):
                    bits_left = length - U(2)
                    at = index + U(1 + LONGEST) + bits_left
                    state, word, digit, models[at] = take_bit(state, U(words[word]), word, last_word, U(models[at]))
                    rest = U(2) + U(digit)
                    while bits_left:
                        digits = min(bits_left, U(16))
                        bits_left -= digits
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
