"""The decoder of `conditioned` once more, to be read and to be tested against: Python's integers, NumPy for sums. Slow.

It trusts its input. Names are those of docs/weight_codec.md.
"""

import struct
from itertools import accumulate

import numpy as np

from composer_nb.kernels.delta.codec import BLOCK, LAYOUTS, Bits, ElementLayout

NAT, PATIENCE, NORMAL = 2**20, 6 * 2**20, 32 * 2**20
KNOTS = [
    2**30 - remaining
    for remaining in accumulate([2**30, *[260218914] * 96], lambda remaining, c: remaining - (remaining * c >> 32))
]


def decode(base: Bits, payload: bytes, dtype: str) -> Bits:
    """Return the target's bits."""
    layout = LAYOUTS[dtype]
    packed = layout.width < 8
    elements = np.stack([base.view(np.uint8) & 15, base.view(np.uint8) >> 4], 1).reshape(-1) if packed else base.copy()
    blocks = [elements[i : i + BLOCK] for i in range(0, len(elements), BLOCK)]  # views
    lengths = struct.unpack_from(f"<{len(blocks[1:])}I", payload)
    bounds = [*accumulate(lengths, initial=4 * len(lengths)), len(payload)]
    for block, begin, end in zip(blocks, bounds, bounds[1:], strict=False):
        if begin < end:
            decode_block(block, payload[begin:end], layout)
    return (elements[0::2] | elements[1::2] << 4).view(base.dtype) if packed else elements


class Rans:
    """Decodes symbols, each of which owns a share of 2^30."""

    def __init__(self, state: int, words: list[int]) -> None:
        self.state, self.words = state, words[::-1]

    @property
    def slot(self) -> int:
        return self.state % 2**30

    def take(self, start: int, frequency: int) -> None:
        """Move on past the symbol whose share holds `slot`."""
        self.state = frequency * (self.state >> 30) + self.slot - start
        if self.state < 2**32 and self.words:
            self.state = self.state << 32 | self.words.pop()

    def digits(self, count: int) -> int:
        """Read `count` bits, each with probability 1/2 of being set."""
        value = self.slot >> (30 - count)
        self.take(value << (30 - count), 1 << (30 - count))
        return value


class Adaptive:
    """A bit's probability, learnt from its values so far."""

    def __init__(self, p: int, count: int) -> None:
        self.p, self.count = p, count

    def read(self, rans: Rans) -> bool:
        threshold = min(max(self.p >> 8, 1), 65535) << 14
        bit = rans.slot < threshold
        rans.take(*((0, threshold) if bit else (threshold, 2**30 - threshold)))
        self.learn(bit)
        return bit

    @property
    def share(self) -> int:
        return (self.p >> 8) // 128 * 128 + 64

    def learn(self, bit: bool) -> None:
        self.p += (2**24 * bit - self.p) * -(-(2**40) // (self.count + 2)) >> 40
        self.count = min(self.count + 1, 254)


class Models(dict[tuple[int, str, int], Adaptive]):
    """Models by class, decision and position in a number. One that is missing starts from the decision's first probability."""

    def __init__(self, rates: list[int]) -> None:
        self.rates = rates

    def __missing__(self, key: tuple[int, str, int]) -> Adaptive:
        c, decision, _ = key
        changes = cumulative(self.rates[c]) >> 14  # of 2^16
        start = {"away": (2**23, 14), "longer": ((changes * changes >> 16) * changes >> 8, 2)}
        self[key] = Adaptive(*start.get(decision, (2**23, 0)))
        return self[key]


def read_two(rans: Rans, longer: Adaptive, away: Adaptive) -> tuple[bool, bool]:
    """Read two decisions from one symbol."""
    split = longer.share << 14
    first = rans.slot < split
    begin, whole = (0, split) if first else (split, 2**30 - split)
    part = whole * away.share >> 16
    second = rans.slot < begin + part
    rans.take(*((begin, part) if second else (begin + part, whole - part)))
    return first, second


def cumulative(time: int) -> int:
    """Return the probability, of 2^30, that the next change has come by `time`."""
    k, part = divmod(min(time, PATIENCE), 2**16)
    return KNOTS[k] + (part * (KNOTS[k + 1] - KNOTS[k]) >> 16 if part else 0)


class Header:
    """Reads the header of a block."""

    def __init__(self, body: bytes) -> None:
        self.body, self.at = body, 0

    def byte(self) -> int:
        self.at += 1
        return self.body[self.at - 1]

    def number(self) -> int:
        low = self.byte()
        return low if low < 128 else low - 128 + 128 * self.number()

    def difference(self) -> int:
        number = self.number()
        return -(number // 2) - 1 if number % 2 else number // 2

    def next(self, count: int) -> bytes:
        self.at += count
        return self.body[self.at - count : self.at]


def read_rates(header: Header, classes: int) -> list[int]:
    """Return the hazard of each class."""
    first, further = header.byte(), header.byte()
    digits = [int(digit, 16) for digit in header.body[2:].hex()]
    codes, at = [16 * digits[0] + digits[1]], 2
    for _ in range(further):
        itself = digits[at] == 15
        codes.append(16 * digits[at + 1] + digits[at + 2] if itself else codes[-1] + 2 - digits[at])
        at += 3 if itself else 1
    header.at += (at + 1) // 2
    rates = [(8 + code % 8) << (code // 8) if code else 0 for code in [codes[0]] * first + codes]
    return rates + [0] * (classes - len(rates))


class Quarter:
    """A run of a block's elements, and the state that says which of them change."""

    def __init__(self, block: Bits, classes: Bits, rates: list[int], rans: Rans) -> None:
        self.block, self.classes, self.rates, self.rans = block, classes, rates, rans
        self.hazard = np.cumsum(np.array(rates)[classes])  # up to and with each element
        self.slow, self.begin = NORMAL, 0
        self.long: list[tuple[int, bool, bool]] = []

    def next_change(self) -> int:
        """Return the index of the next element that changes."""
        while self.rans.slot >= KNOTS[-1]:
            self.rans.take(KNOTS[-1], 2**30 - KNOTS[-1])
            wait = -(-(PATIENCE << 16) // ((NORMAL << 16) // self.slow))
            self.begin, self.slow = self.begin + wait, clamp(self.slow + wait)
        speed = (NORMAL << 16) // self.slow
        i = int(np.searchsorted(self.hazard, self.begin - (-(next_time(self.rans.slot) << 16) // speed)))
        rate, after = self.rates[self.classes[i]], int(self.hazard[i])
        elapsed = max(after - rate - self.begin, 0)
        start = cumulative(elapsed * speed >> 16)
        self.rans.take(start, cumulative((after - self.begin) * speed >> 16) - start)
        self.slow = clamp(self.slow - self.slow // 32 + elapsed + min(rate // 2, 3 * NAT // 4))
        self.begin = after
        return i


def decode_block(block: Bits, body: bytes, layout: ElementLayout) -> None:
    """Turn the base into the target, in place."""
    header = Header(body)
    rates = read_rates(header, layout.mask + 1)
    count = header.number()
    ends, lengths = [len(block)], [0]
    if count >= 1024:
        elements, words, ends, lengths = len(block) // 4, 0, [], []
        for _ in range(3):
            elements, words = elements + header.difference(), words + header.difference()
            ends, lengths = [*ends, sum(ends[-1:]) + elements], [*lengths, words]
        ends.append(len(block))
    sizes = [digit for byte in header.next((len(ends) + 1) // 2) for digit in (byte % 16, byte // 16)]
    states = [int.from_bytes(header.next(size), "little") for size in sizes[: len(ends)]]
    words_there = np.frombuffer(body, "<u4", offset=header.at).tolist()
    cuts = [0, *accumulate(lengths[: len(ends) - 1]), len(words_there)]
    classes = (block >> block.dtype.type(layout.shift)) & block.dtype.type(layout.mask)
    quarters = [
        Quarter(block[begin:end], classes[begin:end], rates, Rans(state, words_there[a:b]))
        for begin, end, state, a, b in zip([0, *ends], ends, states, cuts, cuts[1:], strict=False)
    ]
    lowest, models = max(body[0] - 16, 0), Models(rates)
    for k in range(0, count, len(quarters)):
        decided = []
        for quarter in quarters[: count - k]:
            i = quarter.next_change()
            c = max(int(quarter.classes[i]), lowest)
            longer, away = read_two(quarter.rans, models[c, "longer", 0], models[c, "away", 0])
            decided.append((c, longer, away))
            quarter.long.append((i, longer, away))
        for c, longer, away in decided:
            models[c, "longer", 0].learn(longer)
            models[c, "away", 0].learn(away)
    for quarter in quarters:
        for i, longer, away in quarter.long:
            c = max(int(quarter.classes[i]), lowest)
            m = read_length(c, quarter.rans, models, layout.width) if longer else 0
            quarter.block[i] = moved(int(quarter.block[i]), m + 1, away, layout.width)
        assert quarter.rans.state == 1 and not quarter.rans.words


def clamp(slow: int) -> int:
    return min(max(slow, NORMAL // 8), NORMAL * 8)


def next_time(slot: int) -> int:
    """Return the earliest time at which `cumulative` is beyond `slot`."""
    k = int(np.searchsorted(KNOTS, slot, side="right")) - 1
    return (k << 16) - (-(slot - KNOTS[k] + 1 << 16) // (KNOTS[k + 1] - KNOTS[k]))


def read_length(c: int, rans: Rans, models: Models, width: int) -> int:
    """Return by how many steps beyond the first an element of class c changed, at least one."""
    length, more = 1, True
    while more and length < width:
        more = models[c, "length", length].read(rans)
        length += more
    if length == 1:
        return 1
    m, remaining = 2 + models[c, "second digit", length].read(rans), length - 2
    while remaining:
        digits = min(remaining, 16)
        m, remaining = m << digits | rans.digits(digits), remaining - digits
    return m


def moved(old: int, steps: int, away: bool, width: int) -> int:
    """Return the bits of the number that is `steps` steps from an old one."""
    sign = 2 ** (width - 1)
    ordinal = old if old < sign else sign - 1 - old
    ordinal += steps if away == (ordinal >= 0) else -steps
    return ordinal if ordinal >= 0 else sign - 1 - ordinal
