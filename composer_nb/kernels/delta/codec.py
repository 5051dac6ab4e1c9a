"""Codecs: lossless ways to write the bits of a tensor, given those of the same tensor a version before."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
import zstandard
from torch import Tensor

from composer_nb.kernels.delta.conditioned import Bits, Conditioned

_FIRST, _PIECE = 1 << 10, 1 << 16
"""Elements that are compared at first, and then at a time: most tensors that changed did so in the first of them."""


class Codec(Protocol):
    """One way to write the bits of a tensor, given the base's. Lossless; stateless, so that threads may share it."""

    def encode(self, base: Bits, target: Bits, dtype: str) -> bytes | None:
        """The payload, or None where this codec does not apply. `dtype` is torch's name of it ("bfloat16")."""

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


CODECS: dict[str, Codec] = {
    "same": Same(),
    "conditioned-rans-4": Conditioned(),
    "xor-planes-zstd1": XorPlanes(),
    "raw": Raw(),
}
"""Codecs by the names that manifests record. A tensor gets the first of the smallest payloads, of those that were tried."""

ENOUGH = 1 / 4
"""No further codec is tried after a payload of up to so much of the tensor: trying would cost more time than the coding did, and
nothing has been seen to come out smaller."""


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
    """A CPU tensor's bits; shares its memory where that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    integers: Bits = flat.view(torch.uint8).numpy().view(f"u{flat.element_size()}")
    return integers
