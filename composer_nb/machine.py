"""What this process may use of the machine it runs on: cores and memory, limits of control groups counted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil


def cgroup_limits(name: str, root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[str]:
    """What a cgroup-v2 control file (`cpu.max`) says for this process's group and every group above it."""
    try:
        relative = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = root / relative.strip().lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [file.read_text().strip() for file in files if file.is_file()]


def available_cores() -> float:
    """CPU cores this process may use: its affinity, or the cgroup's quota where that is less."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for limit in cgroup_limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory() -> int:
    """Bytes this process may come to use: the machine's available memory, or the cgroup's limit if less."""
    limits = (int(limit) for limit in cgroup_limits("memory.max") if limit != "max")
    return min([psutil.virtual_memory().available, *limits])
