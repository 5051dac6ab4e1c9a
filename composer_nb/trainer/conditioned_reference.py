"""The decoder of `conditioned` once more, to be read and to be tested against: Python's integers, NumPy for sums. Slow.

It trusts its input. Names are those of docs/weight_codec.md.
"""

from __future__ import annotations

import struct
from itertools import accumulate
from itertools import count as count_from

import numpy as np

from composer_nb.trainer.conditioned import BLOCK, LAYOUTS, Bits, Layout

NAT, PATIENCE, NORMAL = 2**20, 6 * 2**20, 32 * 2**20
KNOTS = [2**30 - left for left in accumulate([2**30, *[260218914] * 96], lambda left, c: left - (left * c >> 32))]


def decode(base: Bits, payload: bytes, dtype: str) -> Bits:
    """The target's bits."""
    layout = LAYOUTS[dtype]
    packed = layout.width < 8
    elements = np.stack([base.view(np.uint8) & 15, base.view(np.uint8) >> 4], 1).reshape(-1) if packed else base.copy()
    blocks = [elements[i : i + BLOCK] for i in range(0, len(elements), BLOCK)]  # views
    lengths = struct.unpack_from(f"<{len(blocks[1:])}I", payload)
    places = [*accumulate(lengths, initial=4 * len(lengths)), len(payload)]
    for block, begin, end in zip(blocks, places, places[1:], strict=False):
        if begin < end:
            decode_block(block, payload[begin:end], layout)
    return (elements[0::2] | elements[1::2] << 4).view(base.dtype) if packed else elements


class Rans:
    """Reads symbols, each some share of 2^30."""

    def __init__(self, state: int, words: list[int]) -> None:
        self.state, self.words = state, words[::-1]

    @property
    def slot(self) -> int:
        return self.state % 2**30

    @property
    def over(self) -> bool:
        return self.state == 1 and not self.words

    def take(self, start: int, frequency: int) -> None:
        """Moves on, past the symbol within whose share `slot` lies."""
        self.state = frequency * (self.state >> 30) + self.slot - start
        if self.state < 2**32 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def digits(self, count: int) -> int:
        """So many bits that are as likely as not."""
        value = self.slot >> (30 - count)
        self.take(value << (30 - count), 1 << (30 - count))
        return value


class Adaptive:
    """A bit's probability by what it was so far."""

    def __init__(self, p: float, seen: int) -> None:
        self.p, self.seen = int(2**24 * p), seen

    def read(self, rans: Rans) -> bool:
        one = min(max(self.p >> 8, 1), 65535) << 14
        bit = rans.slot < one
        rans.take(*((0, one) if bit else (one, 2**30 - one)))
        self.learn(bit)
        return bit

    @property
    def share(self) -> int:
        return min(max(self.p >> 8, 64), 65536 - 64)

    def learn(self, bit: bool) -> None:
        self.p += (2**24 - self.p) // (self.seen + 2) if bit else -(self.p // (self.seen + 2))
        self.seen = min(self.seen + 1, 254)


class Models(dict[tuple[int, str, int], Adaptive]):
    """By class, what is asked, and where in a number; each as it begins where it was not asked before."""

    def __missing__(self, key: tuple[int, str, int]) -> Adaptive:
        start = {("away", 0): (0.5, 14), ("longer", 0): (0.15, 2)}
        self[key] = Adaptive(*start.get(key[1:], (0.5, 0)))
        return self[key]


def read_two(rans: Rans, a: Adaptive, b: Adaptive) -> tuple[bool, bool]:
    """Two decisions in one symbol."""
    split = a.share << 14
    first = rans.slot < split
    begin, whole = (0, split) if first else (split, 2**30 - split)
    part = whole * b.share >> 16
    second = rans.slot < begin + part
    rans.take(*((begin, part) if second else (begin + part, whole - part)))
    a.learn(first)
    b.learn(second)
    return first, second


def cumulative(time: int) -> int:
    """Of 2^30, how often the next change has come by `time`."""
    k, part = divmod(min(time, PATIENCE), 2**16)
    return KNOTS[k] + (part * (KNOTS[k + 1] - KNOTS[k]) >> 16 if part else 0)


def decode_block(block: Bits, body: bytes, layout: Layout) -> None:
    """Makes the target of the base, in place."""
    first, more = body[:2]
    digits = [int(digit, 16) for digit in body[2:].hex()]
    codes, at = [16 * digits[0] + digits[1]], 2
    for _ in range(more):
        itself = digits[at] == 15
        codes.append(16 * digits[at + 1] + digits[at + 2] if itself else codes[-1] + 2 - digits[at])
        at += 3 if itself else 1
    rates = np.zeros(layout.mask + 1, np.int64)
    for c, code in enumerate([codes[0]] * first + codes):
        rates[c] = (8 + code % 8) << (code // 8) if code else 0
    at = 2 + (at + 1) // 2
    sizes, count, at = divmod(body[at], 16), 0, at + 1
    for k in count_from(0):
        count, at = count | (body[at] & 127) << 7 * k, at + 1
        if body[at - 1] < 128:
            break
    begin = at + sum(sizes)
    words = np.frombuffer(body, "<u4", offset=begin).tolist()
    places = Rans(int.from_bytes(body[at : at + sizes[0]], "little"), words[:count])
    steps = Rans(int.from_bytes(body[at + sizes[0] : begin], "little"), words[count:])
    classes = (block >> block.dtype.type(layout.shift)) & block.dtype.type(layout.mask)
    hazard = np.cumsum(rates[classes])  # up to and with each element
    models = Models()
    slow, begin = NORMAL, 0
    while not (places.over and steps.over):
        speed = (NORMAL << 16) // slow
        if places.slot >= KNOTS[-1]:
            places.take(KNOTS[-1], 2**30 - KNOTS[-1])
            wait = -(-(PATIENCE << 16) // speed)
            begin, slow = begin + wait, clamp(slow + wait)
            continue
        i = int(np.searchsorted(hazard, begin - (-(next_time(places.slot) << 16) // speed)))
        c, after = int(classes[i]), int(hazard[i])
        gone = after - int(rates[c]) - begin
        start = cumulative(gone * speed >> 16)
        places.take(start, cumulative((after - begin) * speed >> 16) - start)
        block[i] = step(int(block[i]), max(c, first - 16), steps, models, layout.width)
        slow = clamp(slow - slow // 32 + gone + min(int(rates[c]) // 2, 3 * NAT // 4))
        begin = after


def clamp(slow: int) -> int:
    return min(max(slow, NORMAL // 8), NORMAL * 8)


def next_time(slot: int) -> int:
    """The earliest time at which `cumulative` is beyond `slot`."""
    k = int(np.searchsorted(KNOTS, slot, side="right")) - 1
    return (k << 16) - (-(slot - KNOTS[k] + 1 << 16) // (KNOTS[k + 1] - KNOTS[k]))


def step(old: int, c: int, rans: Rans, models: Models, width: int) -> int:
    """The new bits of an element of class c."""
    sign = 2 ** (width - 1)
    ordinal = old if old < sign else sign - 1 - old
    longer, away = read_two(rans, models[c, "longer", 0], models[c, "away", 0])
    length = int(longer)
    while longer and length < width:
        longer = models[c, "longer", length].read(rans)
        length += longer
    m = min(length, 1)
    if length > 1:
        m = 2 + models[c, "second digit", length].read(rans)
        left = length - 2
        while left:
            digits = min(left, 16)
            m, left = m << digits | rans.digits(digits), left - digits
    ordinal += (m + 1) if away == (ordinal >= 0) else -(m + 1)
    return ordinal if ordinal >= 0 else sign - 1 - ordinal
