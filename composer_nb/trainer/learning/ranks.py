"""Ranks: a few processes of one thread each that run the same program on their share of the data.

`Ranks` has all communication: sums and gathers over torch.distributed (gloo). With one rank, nothing is started. Two ranks add
two numbers, and a + b = b + a bit for bit, so a run on two ranks is as reproducible as a run on one.
"""

import ctypes
import gc
import os
import random
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

# Time that ranks wait for work that one rank does alone. A dead rank is noticed by its closed connections.
ALONE = timedelta(days=1)


class Ranks:
    """This process's place among the ranks, which have joined one another (`parallel.team.join`) if there are several."""

    device = "cpu"
    # Whether ranks synchronize in every micro-batch and so need equally many: a rank without streams computes an empty one.
    lockstep = False

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def data_shard(self) -> tuple[int, int]:
        """Index of this rank's shard of a batch's streams, and the number of shards."""
        return self.rank, self.world

    def split(self, batch: Any) -> Any:
        """Return this rank's part of a batch that it shares with others."""
        return batch

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def sums(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the ranks, which all have the same keys."""
        total = self.sum_(torch.tensor(list(values.values()), dtype=torch.float64, device=self.device))
        return dict(zip(values, total.tolist(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def close(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


K = TypeVar("K", int, str)


def deal(sizes: Mapping[K, int], ranks: int) -> list[list[K]]:
    """Assign items to `ranks` evenly: the largest first, each to the rank with the smallest total. `sizes` are by name or number;
    their order does not matter. Raises ValueError for less than one rank."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    shares: list[list[K]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return shares


def release_memory() -> None:
    """Give back to the kernel what earlier stages have freed. Otherwise it lies in pieces beside what the next stage needs."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def set_up_process(seed: int, matmul: str = "float32") -> None:
    """Set one torch thread, the seed, the precision `matmul`, and a malloc that keeps freed memory instead of returning it to the
    kernel every step."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium" if matmul == "bfloat16" else "highest")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # not glibc: the default malloc remains, with more page faults
        return
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc.mallopt(m_mmap_threshold, 1 << 30)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)
