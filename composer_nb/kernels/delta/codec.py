"""Codecs: lossless ways to write the bits of a tensor, given those of the same tensor a version before."""

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from composer_nb.kernels.delta import coder

# A tensor's bits, flat: one unsigned integer an element.
Bits = npt.NDArray[np.unsignedinteger[Any]]

# Elements that are coded together, and can be coded beside others.
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class ElementLayout:
    """An element's bits, and where in them its class lies: (bits >> shift) & mask."""

    width: int
    shift: int
    mask: int

    @property
    def numbers(self) -> tuple[np.uint64, np.uint64, np.uint64]:
        """Shift, mask and width in the form that compiled code takes."""
        return np.uint64(self.shift), np.uint64(self.mask), np.uint64(self.width)


_NIBBLE = ElementLayout(4, 0, 15)
# Layouts by torch's names. The class is the exponent. Packed numbers of four bits come as integers; their class is all bits.
LAYOUTS = {
    "bfloat16": ElementLayout(16, 7, 255), "float16": ElementLayout(16, 10, 31), "float32": ElementLayout(32, 23, 255),
    "float8_e4m3fn": ElementLayout(8, 3, 15), "float8_e5m2": ElementLayout(8, 2, 31), "uint8": _NIBBLE, "int8": _NIBBLE,
    "int32": _NIBBLE, "float4_e2m1fn_x2": _NIBBLE,
}  # fmt: skip
# Elements that are compared at first, and then at a time: most tensors that changed did so in the first of them.
_FIRST, _PIECE = 1 << 10, 1 << 16


class Codec(Protocol):
    """One way to write the bits of a tensor, given the base's. Lossless; stateless, so that threads may share it."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        """Return the payload, or None where this codec does not apply. `dtype` is torch's name of it ("bfloat16")."""

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        """Return the target's bits, in the form of `base`. Raises ValueError for a payload that cannot belong to this base."""


class Same:
    """No payload for a tensor that did not change, such as an expert that no token was routed to."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        ends = [_FIRST, *range(_PIECE, max(len(base), len(target)) + _PIECE, _PIECE)]
        pieces = (slice(begin, end) for begin, end in pairwise([0, *ends]))
        return b"" if all(base[piece].tobytes() == target[piece].tobytes() for piece in pieces) else None

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        if payload:
            raise ValueError("an unchanged tensor has a payload")
        return base


class Conditioned:
    """The codec conditioned on the base (docs/weight_codec.md has the format).

    A step of Δ changes the published bits of a weight with probability about Δ/ulp(w), and ulp(w) is set by the exponent of the
    base, which the receiver has. So most of what a list of positions says is known before it is sent.

    Positions, signs and sizes of what changed, each given the base's exponents. Blocks of 2^20 elements, in any order, on any
    thread: the compiled parts hold no lock."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        if dtype not in LAYOUTS:
            return None
        layout = LAYOUTS[dtype]
        if len(base) != len(target):
            raise ValueError(f"a base of {len(base)} numbers and a target of {len(target)}")
        old, new = (_elements(bits, layout) for bits in (base, target))
        pieces = (slice(begin, begin + BLOCK) for begin in range(0, len(old), BLOCK))
        blocks = [_encode_block(old[piece], new[piece], layout) for piece in pieces]
        return b"".join([struct.pack(f"<{len(blocks[1:])}I", *map(len, blocks[:-1])), *blocks])

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        if dtype not in LAYOUTS:
            raise ValueError(f"{dtype} has no exponents to be conditioned on")
        layout = LAYOUTS[dtype]
        target = _elements(base, layout).copy()
        count = max(-(-len(target) // BLOCK), 1)
        if len(payload) < 4 * (count - 1):
            raise ValueError("the payload ends within the lengths of its blocks")
        *ends, last = accumulate(struct.unpack_from(f"<{count - 1}I", payload), initial=4 * (count - 1))
        if last > len(payload):
            raise ValueError("the payload ends within its blocks")
        for number, (begin, end) in enumerate(pairwise([*ends, last, len(payload)])):
            if begin < end:
                block = target[number * BLOCK : (number + 1) * BLOCK]
                try:
                    _decode_block(block, payload[begin:end], layout)
                except ValueError as error:
                    raise ValueError(f"a block {error}") from None
        return target if layout.width >= 8 else (target[0::2] | target[1::2] << 4).view(base.dtype)


def _elements(bits: Bits, layout: ElementLayout) -> Bits:
    """Return one unsigned integer an element, in shared memory where elements are not packed."""
    if layout.width >= 8:
        if bits.itemsize * 8 != layout.width:
            raise ValueError(f"elements of {8 * bits.itemsize} bits are not the dtype's, which has {layout.width} bits")
        fit = bits.flags.c_contiguous and bits.flags.aligned and bits.flags.writeable  # one form for the compiler
        return bits if fit else np.array(bits)
    packed = bits.view(np.uint8)
    elements = np.empty(2 * len(packed), np.uint8)
    elements[0::2], elements[1::2] = packed & 15, packed >> 4
    return elements


def _encode_block(base: Bits, target: Bits, layout: ElementLayout) -> bytes:
    """Return the body of a block, empty where nothing changed."""
    elements = np.flatnonzero(base != target).astype(np.uint32)
    if not len(elements):
        return b""
    first, last, codes, *quarters, words = coder.encode(base, target, elements, *layout.numbers)
    parts = (part.tolist() for part in (codes[int(first) : int(last) + 1], *quarters))
    return _write_header(int(first), len(elements), *parts) + words.tobytes()


def _decode_block(block: Bits, body: bytes, layout: ElementLayout) -> None:
    """Apply a body to a block of the base, in place. Raises ValueError, after which the block is useless."""
    first, count, codes, ends, word_ends, states, words_start = _read_header(body, len(block), layout.mask)
    rates = np.zeros(layout.mask + 1, np.uint8)
    rates[first : first + len(codes)], rates[:first] = codes, codes[0]
    slow = [int(coder.NORMAL)] * len(states)
    quarters = np.array([states, [0, *word_ends[:-1]], word_ends, slow, [0, *ends[:-1]], ends], np.uint64).T.copy()
    words = np.frombuffer(body[words_start:] + bytes(4), np.uint32)
    numbers = (np.uint64(number) for number in (first, len(codes) - 1, count))
    if fault := coder.decode(block, words, quarters, rates, *numbers, *layout.numbers):
        raise ValueError(coder.FAULTS[fault])


QUARTERS, TOGETHER = int(coder.QUARTERS), int(coder.TOGETHER)


def _write_header(
    first: int, count: int, codes: list[int], ends: list[int], words: list[int], states: list[int]
) -> bytes:
    """Return a block's header: the first class with a rate and how many follow; their codes; the number of changes; if they are
    in quarters, of the first three the elements and the coder's words, as differences from those of the one before (from a
    quarter of all elements, and none); how many bytes each coder's state has, in half a byte; the states.

    Codes are in digits of 16, the last byte filled up: two for the first; of another how far it is below the one before it, from
    -2 to 12, and 2 more (it is 8 where a weight twice as large changes half as often), or else 15 and itself, two. Numbers have
    seven bits a byte from the lowest on, all bytes but the last with the eighth bit set; of differences the sign is the lowest
    bit."""

    def number(value: int) -> bytes:
        return bytes([value & 127 | 128]) + number(value >> 7) if value >= 128 else bytes([value])

    digits = list(divmod(codes[0], 16))
    for previous, code in pairwise(codes):
        step = previous + 2 - code
        digits += [step] if 0 <= step < 15 else [15, *divmod(code, 16)]
    digits += [0] * (len(digits) % 2)
    header = bytes([first, len(codes) - 1, *(16 * a + b for a, b in zip(digits[::2], digits[1::2], strict=True))])
    header += number(count)
    quarters = QUARTERS if count >= TOGETHER else 1
    before_elements, before_words = ends[-1] // QUARTERS, 0
    for begin, end, of_words in zip([0, *ends], ends[: quarters - 1], words, strict=False):
        for more in (end - begin - before_elements, of_words - before_words):
            header += number(2 * more if more >= 0 else -2 * more - 1)
        before_elements, before_words = end - begin, of_words
    state_bytes = [state.to_bytes((state.bit_length() + 7) // 8, "little") for state in states[:quarters]]
    sizes = sum(len(state) << 4 * q for q, state in enumerate(state_bytes))
    return header + sizes.to_bytes((quarters + 1) // 2, "little") + b"".join(state_bytes)


def _read_header(
    body: bytes, elements: int, mask: int
) -> tuple[int, int, list[int], list[int], list[int], list[int], int]:
    """Return the first class with a rate, the number of changes, the codes, of each quarter where its elements and its words end
    and its coder's state, and where the words begin. Raises ValueError, whose text follows "a block"."""
    at, cut = 0, "ends within its header or a word"

    def take(size: int) -> int:
        nonlocal at
        at += size
        if at > len(body):
            raise ValueError(cut)
        return int.from_bytes(body[at - size : at], "little")

    def number() -> int:
        value, shift, byte = 0, 0, 128
        while byte >= 128:
            if shift > 28:
                raise ValueError(cut)
            byte = take(1)
            value, shift = value | (byte & 127) << shift, shift + 7
        return value

    def difference() -> int:
        value = number()
        return (value >> 1) ^ -(value & 1)

    first, more = take(1), take(1)
    if first + more > mask or more >= coder.CLASSES:
        raise ValueError("has rates of classes that there are not")
    digits = (digit for _ in repeat(None) for digit in divmod(take(1), 16))
    codes = [16 * next(digits) + next(digits)]
    for _ in range(more):
        step = next(digits)
        codes.append(codes[-1] + 2 - step if step < 15 else 16 * next(digits) + next(digits))
    if not all(0 <= code < len(coder.RATES) for code in codes):
        raise ValueError("names a rate that there is not")
    count, of_elements, of_words = number(), elements // QUARTERS, 0
    quarters, ends, word_ends = QUARTERS if count >= TOGETHER else 1, [0], [0]
    for _ in range(quarters - 1):
        of_elements, of_words = of_elements + difference(), of_words + difference()
        ends.append(ends[-1] + of_elements)
        word_ends.append(word_ends[-1] + of_words)
    sizes = take((quarters + 1) // 2)
    if count > elements or ends != sorted(ends) or ends[-1] > elements:
        raise ValueError("has more changes than elements, or a quarter beyond its end")
    widths = [sizes >> 4 * q & 15 for q in range(quarters)]
    states = [take(min(width, 9)) for width in widths] + [int(coder.NONE)] * (QUARTERS - quarters)
    words, remainder = divmod(len(body) - at, 4)
    if remainder or max(widths) > 8 or word_ends != sorted(word_ends) or word_ends[-1] > words:
        raise ValueError(cut)
    empty = QUARTERS - quarters + 1
    return first, count, codes, ends[1:] + [elements] * empty, word_ends[1:] + [words] * empty, states, at


class XorPlanes:
    """XOR with the base, bytes of equal significance together (the high ones of a small change are all zero), zstd-1."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        difference = np.bitwise_xor(base, target)
        planes = difference.view(np.uint8).reshape(-1, difference.itemsize).T
        return zstandard.ZstdCompressor(level=1).compress(np.ascontiguousarray(planes).data)

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        try:  # a frame says how much it expands to: nothing is allocated for one that claims more
            if zstandard.get_frame_parameters(payload).content_size != base.nbytes:
                raise ValueError("the payload is of another size than the tensor")
            raw = zstandard.ZstdDecompressor().decompress(payload)
        except zstandard.ZstdError as error:
            raise ValueError(f"the payload is no zstd frame ({error})") from None
        planes = np.frombuffer(raw, np.uint8).reshape(base.itemsize, -1)
        return np.bitwise_xor(base, np.ascontiguousarray(planes.T).view(base.dtype).reshape(-1))


class Raw:
    """The target as it is."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        return target.tobytes()

    def decode(self, base: Bits, payload: bytes, dtype: str) -> Bits:
        if len(payload) != base.nbytes:
            raise ValueError("the payload is of another size than the tensor")
        return np.frombuffer(bytearray(payload), base.dtype)


# Codecs by the names that manifests record. A tensor gets the first of the smallest payloads, of those that were tried.
CODECS: dict[str, Codec] = {
    "same": Same(),
    "conditioned-rans-4": Conditioned(),
    "xor-planes-zstd1": XorPlanes(),
    "raw": Raw(),
}

# No further codec is tried after a payload of up to so much of the tensor: trying would cost more time than the coding did, and
# nothing has been seen to come out smaller.
ENOUGH = 1 / 4


def encode(base: Bits, target: Bits, dtype: str) -> tuple[str, bytes]:
    """(name of the codec, payload)."""
    best: tuple[str, bytes] | None = None
    for name, codec in CODECS.items():
        payload = codec.encode(base, target, dtype)
        if payload is not None and (best is None or len(payload) < len(best[1])):
            best = (name, payload)
            if len(payload) <= ENOUGH * target.nbytes:
                break
    assert best is not None, "raw always applies"
    return best


def bits(tensor: Tensor) -> Bits:
    """Return a CPU tensor's bits, in its own memory where that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    integers: Bits = flat.view(torch.uint8).numpy().view(f"u{flat.element_size()}")
    return integers
