"""Ranks for tests: processes forked from this one, which has imported everything, that meet over gloo and run checks."""

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it when it first cuts a model: seconds, here once instead of once a rank
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.multiprocessing

DEADLOCK_S = 60.0
"""A rank that waits longer for another one in one communication fails."""


def on_ranks(world: int, checks: Mapping[str, Callable[..., None]], folder: Path, *values: Any) -> None:
    """Run the checks one after the other on `world` ranks, each as check(*values). Raises the first error of a rank, with its
    traceback, and ends the others."""
    folder.mkdir(exist_ok=True)
    arguments = world, checks, folder / f"meet-{world}", values
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=world, start_method="fork")


def _rank(
    rank: int, world: int, checks: Mapping[str, Callable[..., None]], meet: Path, values: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that gathers twice: in tests it may
    store = dist.FileStore(str(meet), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=DEADLOCK_S))
    for name, check in checks.items():
        try:
            check(*values)
        except Exception as error:
            raise AssertionError(f"{name}, on rank {rank}") from error
    dist.destroy_process_group()
