"""The codec conditioned on the base: what changed, given the exponent that each weight had (docs/weight_codec.md has the format).

A step of Δ changes the published bits of a weight with probability about Δ/ulp(w), and ulp(w) is set by the exponent of the base,
which the receiver has. So most of what a list of positions says is known before it is sent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from composer_nb.kernels import delta

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""A tensor's bits, flat: one unsigned integer an element."""

BLOCK = 1 << 20
"""Elements that are coded together, and can be coded beside others."""
_STATE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Layout:
    """An element's bits, and where in them its class lies: (bits >> shift) & mask."""

    width: int
    shift: int
    mask: int

    def by_sign(self, rates: Bits) -> Bits:
        """Of classes, made to be indexed by bits >> shift."""
        return np.tile(rates, (1 << (self.width - self.shift)) // len(rates))


_NIBBLE = Layout(4, 0, 15)
LAYOUTS = {
    "bfloat16": Layout(16, 7, 255),
    "float16": Layout(16, 10, 31),
    "float32": Layout(32, 23, 255),
    "float8_e4m3fn": Layout(8, 3, 15),
    "float8_e5m2": Layout(8, 2, 31),
    "uint8": _NIBBLE,
    "int8": _NIBBLE,
    "int32": _NIBBLE,
    "float4_e2m1fn_x2": _NIBBLE,
}
"""By torch's names. The class is the exponent. Integers are what packed numbers of four bits come as; their class is all bits."""


class Conditioned:
    """Positions, signs and sizes of what changed, each given the base's exponents. Blocks of 2^20 elements, in any order, on any
    thread: the compiled parts hold no lock."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        if dtype not in LAYOUTS:
            return None
        layout = LAYOUTS[dtype]
        a, b = (_elements(bits, layout) for bits in (base, target))
        blocks = [encode_block(a[i : i + BLOCK], b[i : i + BLOCK], layout) for i in range(0, len(a), BLOCK)]
        return b"".join([struct.pack(f"<{len(blocks[1:])}I", *map(len, blocks[:-1])), *blocks])

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        if dtype not in LAYOUTS:
            raise ValueError(f"{dtype} has no exponents to be conditioned on")
        layout = LAYOUTS[dtype]
        made = _elements(base, layout)
        made = made.copy() if made is base else made
        count = max(-(-len(made) // BLOCK), 1)
        if len(payload) < 4 * (count - 1):
            raise ValueError("the payload ends within the lengths of its blocks")
        *ends, last = accumulate(struct.unpack_from(f"<{count - 1}I", payload), initial=4 * (count - 1))
        if last > len(payload):
            raise ValueError("the payload ends within its blocks")
        for number, (begin, end) in enumerate(pairwise([*ends, last, len(payload)])):
            if begin < end:
                block = made[number * BLOCK : (number + 1) * BLOCK]
                decode_block(block, payload[begin:end], layout)
        return made if layout.width >= 8 else (made[0::2] | made[1::2] << 4).view(base.dtype)


def _elements(bits: Bits, layout: Layout) -> Bits:
    """One unsigned integer an element. Shares memory where elements are not packed."""
    if layout.width >= 8:
        if bits.itemsize * 8 != layout.width:
            raise ValueError(f"elements of {8 * bits.itemsize} bits are not the dtype's, which has {layout.width} bits")
        return np.require(bits, requirements=["C", "A", "W"])  # one form for the compiler
    packed = bits.view(np.uint8)
    made = np.empty(2 * len(packed), np.uint8)
    made[0::2], made[1::2] = packed & 15, packed >> 4
    return made


def encode_block(base: Bits, target: Bits, layout: Layout) -> bytes:
    """Nothing where nothing changed."""
    shift, mask = np.uint64(layout.shift), np.uint64(layout.mask)
    found = np.empty(len(base) + 1, np.uint32)
    at = found[: int(delta.differences(base, target, _words(base), _words(target), found))]
    if not len(at):
        return b""
    old, new = base[at].astype(np.uint64), target[at].astype(np.uint64)
    classes = old >> shift & mask
    changed = np.bincount(classes.astype(np.int64), minlength=layout.mask + 1)
    seen, one_in = delta.histogram(base, shift, mask)
    there = int(one_in) * (seen + ((one_in > 1) & (changed > 0)))  # half of those that a sample misses, or so
    first, codes = delta.rate_codes(there, changed, delta.BETWEEN)
    rates, before = delta.RATES[codes], np.empty(len(at), np.uint64)
    delta.hazards(base, at, layout.by_sign(rates), shift, before)
    symbols = delta.model_block(before, classes, old, new, rates, np.uint64(layout.width))
    state, words = delta.rans(symbols)
    last = int(np.flatnonzero(codes)[-1])
    return bytes([first, last - first]) + pack_codes(codes[first : last + 1]) + _STATE.pack(state) + words.tobytes()


def _words(bits: Bits) -> Bits:
    """The same memory in words of 64 bits, but for what is less than one at its end."""
    return bits[: len(bits) - len(bits) % (8 // bits.itemsize)].view("<u8")


def pack_codes(codes: Bits) -> bytes:
    """In digits of 16, the last byte filled up: two for the first; of another how far it is below the one before it, from -2 to
    12, and 2 more (it is 8 where a weight twice as large changes half as often), or else 15 and itself, two."""
    digits = [*divmod(int(codes[0]), 16)]
    for before, code in pairwise(codes.tolist()):
        less = before - code + 2
        digits += [less] if 0 <= less < 15 else [15, *divmod(code, 16)]
    digits.append(0)
    return bytes(high << 4 | low for high, low in zip(digits[::2], digits[1::2], strict=False))


def unpack_codes(body: bytes, begin: int, count: int) -> tuple[list[int], int]:
    """So many codes, which may be any numbers, and where they end; that may be beyond the body."""
    digits = [digit for byte in body[begin : begin + 2 * count] for digit in (byte >> 4, byte & 15)] + [0] * 3 * count
    codes, at = [16 * digits[0] + digits[1]], 2
    while len(codes) < count:
        plain = digits[at] < 15
        codes.append(codes[-1] + 2 - digits[at] if plain else 16 * digits[at + 1] + digits[at + 2])
        at += 1 if plain else 3
    return codes, begin + -(-at // 2)


def decode_block(block: Bits, body: bytes, layout: Layout) -> None:
    """Makes the target of the base, in place. Raises ValueError."""
    if len(body) < 2:
        raise ValueError("a block ends within its header")
    first, more = body[:2]
    if first + more > layout.mask:
        raise ValueError("a block has rates of classes that there are not")
    found, begin = unpack_codes(body, 2, more + 1)
    if min(found) < 0 or max(found) >= len(delta.RATES):
        raise ValueError("a block names a rate that there is not")
    words = begin + _STATE.size
    if len(body) < words or (len(body) - words) % 4:
        raise ValueError("a block ends within its header or a word")
    codes = np.zeros(layout.mask + 1, np.uint8)
    codes[:first] = found[0]
    codes[first : first + more + 1] = found
    fault = delta.decode_block(
        block,
        layout.by_sign(delta.RATES[codes]),
        np.uint64(_STATE.unpack_from(body, words - _STATE.size)[0]),
        np.append(np.frombuffer(body, "<u4", offset=words), np.uint32(0)),
        np.uint64(layout.shift),
        np.uint64(layout.mask),
        np.uint64(layout.width),
    )
    if fault:
        raise ValueError(f"a block {FAULTS[fault]}")


FAULTS = {1: "has a change beyond its end", 2: "makes a number that does not exist"}
