"""The size of the tree of beginnings that streams share, for tests."""

from collections.abc import Sequence
from itertools import pairwise

from composer_nb.trainer.learning import packing
from composer_nb.trainer.learning.packing import Stream


def tree_tokens(streams: Sequence[Stream]) -> int:
    """Return the number of tokens of `streams` that are distinct as paths from the start: the cost of their forward pass."""
    ordered = sorted((packing._signature(stream) for stream in streams), key=lambda signature: signature.tobytes())
    return sum(len(s) for s in ordered) - sum(packing._shared(a, b) for a, b in pairwise(ordered))
