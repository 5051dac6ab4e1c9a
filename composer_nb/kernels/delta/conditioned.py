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

from composer_nb.kernels.delta import decoder as delta_decoder
from composer_nb.kernels.delta import encoder as delta_encoder

Bits = npt.NDArray[np.unsignedinteger[Any]]
"""A tensor's bits, flat: one unsigned integer an element."""

BLOCK = 1 << 20
"""Elements that are coded together, and can be coded beside others."""


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
LAYOUTS = {
    "bfloat16": ElementLayout(16, 7, 255), "float16": ElementLayout(16, 10, 31), "float32": ElementLayout(32, 23, 255),
    "float8_e4m3fn": ElementLayout(8, 3, 15), "float8_e5m2": ElementLayout(8, 2, 31), "uint8": _NIBBLE, "int8": _NIBBLE,
    "int32": _NIBBLE, "float4_e2m1fn_x2": _NIBBLE,
}  # fmt: skip
"""Layouts by torch's names. The class is the exponent. Packed numbers of four bits come as integers; their class is all bits."""


class Conditioned:
    """Positions, signs and sizes of what changed, each given the base's exponents. Blocks of 2^20 elements, in any order, on any
    thread: the compiled parts hold no lock."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        if dtype not in LAYOUTS:
            return None
        layout = LAYOUTS[dtype]
        if len(base) != len(target):
            raise ValueError(f"a base of {len(base)} numbers and a target of {len(target)}")
        a, b = (_elements(bits, layout) for bits in (base, target))
        blocks = [encode_block(a[i : i + BLOCK], b[i : i + BLOCK], layout) for i in range(0, len(a), BLOCK)]
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
                decode_block(block, np.frombuffer(payload, np.uint8, end - begin, begin), layout)
        return target if layout.width >= 8 else (target[0::2] | target[1::2] << 4).view(base.dtype)


def _elements(bits: Bits, layout: ElementLayout) -> Bits:
    """One unsigned integer an element. Shares memory where elements are not packed."""
    if layout.width >= 8:
        if bits.itemsize * 8 != layout.width:
            raise ValueError(f"elements of {8 * bits.itemsize} bits are not the dtype's, which has {layout.width} bits")
        fit = bits.flags.c_contiguous and bits.flags.aligned and bits.flags.writeable  # one form for the compiler
        return bits if fit else np.array(bits)
    packed = bits.view(np.uint8)
    elements = np.empty(2 * len(packed), np.uint8)
    elements[0::2], elements[1::2] = packed & 15, packed >> 4
    return elements


def encode_block(base: Bits, target: Bits, layout: ElementLayout) -> bytes:
    """Return the body of a block, empty where nothing changed."""
    elements = np.flatnonzero(base != target).astype(np.uint32)
    if not len(elements):
        return b""
    body: Bits = delta_encoder.encode(base, target, elements, *layout.numbers)
    return body.tobytes()


def decode_block(block: Bits, body: Bits, layout: ElementLayout) -> None:
    """Apply a body to a block of the base, in place. Raises ValueError, after which the block is useless."""
    if fault := delta_decoder.decode(block, body, *layout.numbers):
        raise ValueError(f"a block {delta_decoder.FAULTS[fault]}")
