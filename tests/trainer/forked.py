"""Ranks for tests: processes forked from this one, which has imported everything, that meet over gloo and run checks."""

from __future__ import annotations

import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it when it first cuts a model: seconds, here once instead of once a rank
import torch.distributed as dist
import torch.distributed.checkpoint

from composer_nb.harness.sandbox.system.linux import patience

DEADLOCK_S = 60.0
"""A rank that waits longer for another one in one communication fails."""


def on_ranks(
    world: int, checks: Mapping[str, Callable[..., None]], folder: Path, *values: Any, patience_s: float = 300.0
) -> dict[str, list[str]]:
    """Runs the checks one after the other on `world` ranks, each as check(*values). Returns what failed, by name: the tracebacks
    of ranks. After a failure the group is made anew."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, world, checks, folder, values, answers), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    failures: dict[str, list[str]] = {}
    waiting, until = world, time.monotonic() + patience(patience_s)
    while waiting:
        try:
            rank, name, error = answers.get(timeout=0.5)
        except Empty:
            dead = [str(p.exitcode) for p in ranks if not p.is_alive() and p.exitcode]
            if dead or time.monotonic() > until:
                failures.setdefault("the ranks", []).append(f"ended with {dead}" if dead else "did not come to an end")
                break
            continue
        if name is None:
            waiting -= 1
        else:
            failures.setdefault(name, []).append(f"rank {rank}: {error}")
    for process in ranks:
        process.join(0.2 if failures else 10)
        process.kill()
    return failures


def _rank(
    rank: int,
    world: int,
    checks: Mapping[str, Callable[..., None]],
    folder: Path,
    values: tuple[Any, ...],
    answers: Any,
) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # that gathers twice: in tests it may
    for number, (name, check) in enumerate(checks.items()):
        if not dist.is_initialized():
            store = dist.FileStore(str(folder / f"meet-{number}"), world)
            limit = timedelta(seconds=DEADLOCK_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        try:
            check(*values)
        except Exception:
            answers.put((rank, name, traceback.format_exc()))
            break
    answers.put((rank, None, ""))
