"""Changed elements of an array, coded given what the receiver knows of each: the class of its old bits. Compiled.

An element of class c (a weight's exponent, say) changes with some probability p_c. Its *hazard* is −ln(1 − p_c), and hazards add
up: after unchanged elements of T together the next change is yet to come with probability exp(−T). So where it comes is one
symbol with the distribution 1 − exp(−T), whatever classes lie on the way, and to find it takes a sum and a comparison an element.
A clock that runs faster where changes have lately come sooner than expected (rows, experts) scales T. A change is then a sign and
a number of steps between adjacent numbers, in binary decisions whose probabilities adapt to the class. All goes through a rANS
coder (Duda, arXiv 1311.2540) of 64 bits. To decode a change is one long chain, each instruction waiting for the one before; so a
block with many has four quarters with coders of their own, which a processor can work on at once (Giesen, arXiv 1402.3392).
docs/weight_codec.md has the format. Here is what both directions share, and the header of a block: rates, number of changes,
where quarters begin, the coders' states. `coder` has the rest.

Integers only, but where an encoder picks rates: every machine decodes the same. They are uint64 where they are not said to be
something else, since numba makes float64 of a signed and an unsigned one.
Nothing is checked by numba: what is read from a payload is compared with a bound before it is an index.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from composer_nb.kernels.compiled import coder, inlined

U = np.uint64
SCALE = 30
"""log2 of what the frequencies of all symbols add up to."""
WHOLE, MASK = U(1 << SCALE), U((1 << SCALE) - 1)
LOWEST = U(1 << 32)
"""The coder's state lies in [2^32, 2^64) from its first word on."""
NONE = U(1)
"""Its state before the first symbol, which a decoder ends with."""
NAT = 1 << 20
"""A hazard of 1; a unit of the clock at its normal pace is as long."""
PATIENCE = U(6 * NAT)
"""Longest wait for the next change. After it a symbol says that none has come, and time begins anew."""
RECENT = 5
"""log2 of the changes over which the clock's pace is taken."""
NORMAL = U(NAT << RECENT)
"""Hazard that so many changes take on average, if all is as the classes say."""
QUARTERS, TOGETHER = U(4), U(1024)
"""Parts of a large block, and the changes from which a block is large. Each part has a coder of its own, and a decoder works
on all of them at once. Fewer changes are not worth a longer header."""
LONGEST = 34
MODELS = 2 + 2 * LONGEST
"""Adaptive bits of a class: whether away from zero; whether longer than one step, and as many more for the length; the second
digit for each length. Some to spare."""
ANY, AWAY, LONGER = U(0), U(14), U(2)
"""Adaptive bits begin as if so many decisions had been seen: whether away from zero is mostly as likely as not."""
CLASSES = 16
"""Classes that can have rates of their own, from the first on. Those below have the first one's, those above none."""
RUN = U(16)
"""Elements whose hazards are added up before they are compared with a goal."""
APART = U(16)
"""Number of classes with the first one's rate that have adaptive bits of their own; those below share them."""


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
RECIPROCALS = np.array([0, *(-(-(1 << 40) // n) for n in range(1, 257))], np.int64)
"""2^40 / n, rounded up."""


def rate_of(code: int) -> int:
    """Hazard that a byte of a block's header stands for: none, or 3 bits of mantissa after a leading one."""
    return (8 + (code & 7)) << (code >> 3) if code else 0


RATES = np.array([rate_of(code) for code in range(160)], np.uint32)
"""Up to 7.5: even a class of which everything changed may have one element that does not."""


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


# The header

LARGEST = 2 + 24 + 35 + 34
"""Bytes that a header has at most: classes, rates, numbers (of five each), states and their sizes."""


@coder
def write_codes(codes, first, last, header, at):  # type: ignore[no-untyped-def]
    """Write the codes in digits of 16 from the byte `at` on, the last byte filled up: two for the first; of another how far it
    is below the one before it, from -2 to 12, and 2 more (it is 8 where a weight twice as large changes half as often), or
    else 15 and itself, two. Return where they end."""
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
def read_codes(body, codes, mask):  # type: ignore[no-untyped-def]
    """Fill `codes`; return (fault or 0, the class up to which all share the first, the number beyond it, where they end)."""
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


@coder
def write_number(number, header, at):  # type: ignore[no-untyped-def]
    """Seven bits a byte from the lowest on, all bytes but the last with the eighth bit set. Return where it ends."""
    while number >= U(128):
        header[at] = number & U(127) | U(128)
        number >>= U(7)
        at += U(1)
    header[at] = number
    return at + U(1)


@coder
def read_number(body, at):  # type: ignore[no-untyped-def]
    """(number, where it ends: behind the body if it does not end in five bytes)."""
    number, more, k = U(0), True, U(0)
    while more and at < U(len(body)) and k < U(5):
        number |= (U(body[at]) & U(127)) << (U(7) * k)
        more = body[at] >= 128
        at, k = at + U(1), k + U(1)
    return number, U(len(body)) + U(1) if more else at


@coder
def zigzag(difference):  # type: ignore[no-untyped-def]
    """A difference modulo 2^64 as a number that is small where it is small, whatever its sign: 0, −1, 1, −2 …"""
    return (difference << U(1)) ^ (U(0) - (difference >> U(63)))


@coder
def unzigzag(number):  # type: ignore[no-untyped-def]
    return (number >> U(1)) ^ (U(0) - (number & U(1)))


@coder
def write_states(count, ends, words, states, header, at):  # type: ignore[no-untyped-def]
    """Write from the byte `at` on: the number of changes; if they are in quarters, of the first three the elements and the
    coder's words, as differences from those of the one before (from a quarter of all elements, and none); how many bytes each
    coder's state has, in half a byte; the states. Return where they end."""
    at, quarters = write_number(count, header, at), U(1)
    if count >= TOGETHER:
        quarters, begin = QUARTERS, U(0)
        elements, of_words = ends[QUARTERS - U(1)] // QUARTERS, U(0)
        for q in range(QUARTERS - U(1)):
            at = write_number(zigzag(ends[q] - begin - elements), header, at)
            at = write_number(zigzag(words[q] - of_words), header, at)
            elements, of_words, begin = ends[q] - begin, words[q], ends[q]
    sizes = at
    at += (quarters + U(1)) >> U(1)
    header[np.int64(sizes) : np.int64(at)] = 0
    for q in range(quarters):
        state, size = states[q], U(0)
        while state:
            header[at] = state & U(255)
            state >>= U(8)
            at, size = at + U(1), size + U(1)
        header[sizes + (U(q) >> U(1))] |= size << (U(4) * (U(q) & U(1)))
    return at


@coder
def read_states(body, at, ends, words, states):  # type: ignore[no-untyped-def]
    """Fill in where the elements of each quarter end (`ends` holds the block's number), where its words end, counted from
    where they begin, and its state. Return (fault or 0, the number of changes, where words begin). Fewer changes than are put
    in quarters are all in the first."""
    size, n, quarters, before, used = U(len(body)), ends[0], U(1), U(0), U(0)
    count, at = read_number(body, at)
    states[:] = NONE
    if count >= TOGETHER:
        quarters, elements, of_words = QUARTERS, n // QUARTERS, U(0)
        for q in range(QUARTERS - U(1)):
            more_elements, at = read_number(body, at)
            more_words, at = read_number(body, at)
            elements, of_words = elements + unzigzag(more_elements), of_words + unzigzag(more_words)
            before, used = before + elements, used + of_words
            ends[q], words[q] = before, used
            if at > size or of_words > size:
                return 3, count, at
            if elements > n or before > n:
                return 6, count, at
    sizes = at
    at += (quarters + U(1)) >> U(1)
    if at > size:
        return 3, count, at
    if count > n:
        return 6, count, at
    for q in range(quarters):
        wide = (U(body[sizes + (U(q) >> U(1))]) >> (U(4) * (U(q) & U(1)))) & U(15)
        if wide > U(8) or at + wide > size:
            return 3, count, at
        states[q] = U(0)
        for j in range(wide):
            states[q] |= U(body[at + U(j)]) << (U(8) * U(j))
        at += wide
    if (size - at) & U(3) or used > (size - at) >> U(2):
        return 3, count, at
    words[np.int64(quarters) - 1 :] = (size - at) >> U(2)
    return 0, count, at
