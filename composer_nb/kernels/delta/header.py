"""The header of a `delta` block, written and read: rates, number of changes, where quarters begin, the coders' states.
Compiled."""

from __future__ import annotations

import numpy as np

from composer_nb.kernels.compiled import coder
from composer_nb.kernels.delta.block import CLASSES, NONE, QUARTERS, RATES, TOGETHER, U

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
