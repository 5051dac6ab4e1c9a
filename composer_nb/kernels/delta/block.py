"""Changed elements of an array, coded given what the receiver knows of each: the class of its old bits. Compiled.

An element of class c (a weight's exponent, say) changes with some probability p_c. Its *hazard* is −ln(1 − p_c), and hazards add
up: after unchanged elements of T together the next change is yet to come with probability exp(−T). So where it comes is one
symbol with the distribution 1 − exp(−T), whatever classes lie on the way, and to find it takes a sum and a comparison an element.
A clock that runs faster where changes have lately come sooner than expected (rows, experts) scales T. A change is then a sign and
a number of steps between adjacent numbers, in binary decisions whose probabilities adapt to the class. All goes through a rANS
coder (Duda, arXiv 1311.2540) of 64 bits. To decode a change is one long chain, each instruction waiting for the one before; so a
block with many has four quarters with coders of their own, which a processor can work on at once (Giesen, arXiv 1402.3392).
docs/weight_codec.md has the format. Here is what both directions share; `coder` has the rest but the header, which is in
`codec`.

Integers only, but where an encoder picks rates: every machine decodes the same. They are uint64 where they are not said to be
something else, since numba makes float64 of a signed and an unsigned one.
Nothing is checked by numba: what is read from a payload is compared with a bound before it is an index.
"""

from __future__ import annotations

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
