"""What a weight update costs: the size of a lossless delta between two published versions.

Leaves out, for now: the delta format itself, the version store, and receivers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def delta_sizes(before: Path, after: Path) -> dict[str, Any]:
    """Bytes of `after` in full, and of XOR + zstd (level 1, tensor by tensor) against `before`; the share of weights whose
    bits changed. Raises ValueError when the two do not hold the same tensors."""
    old, new = (load_file(path / "model.safetensors") for path in (before, after))
    forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} for tensors in (old, new)]
    if forms[0] != forms[1]:
        raise ValueError(f"{before} and {after} are not versions of one model")
    compressor = zstandard.ZstdCompressor(level=1)
    full = delta = changed = count = 0
    for name, tensor in new.items():
        integer = _INTEGERS[tensor.element_size()]
        a, b = (x.contiguous().view(integer).numpy() for x in (old[name], tensor))
        difference = np.bitwise_xor(a, b)
        full += difference.nbytes
        # Bytes of equal significance together: the high bytes of a small change are all zero.
        planes = difference.reshape(-1).view(np.uint8).reshape(-1, difference.itemsize).T
        delta += len(compressor.compress(np.ascontiguousarray(planes).tobytes()))
        changed += int(np.count_nonzero(difference))
        count += difference.size
    return {"full_bytes": full, "delta_bytes": delta, "changed_fraction": changed / count}
