"""Cores and memory that this process may use, with the limits of control groups."""

import os
import sys
from pathlib import Path

import psutil

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_limits(name: str) -> list[str]:
    """Return the values of a cgroup-v2 control file (`cpu.max`) for this process's group and every group above it."""
    try:
        relative = next(line[3:] for line in MEMBERSHIP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = CGROUPS / relative.strip().lstrip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(CGROUPS)]
    return [file.read_text().strip() for file in files if file.is_file()]


def available_cores() -> float:
    """Return the CPU cores this process may use: its affinity, or the cgroup quota if that is less."""
    cores = float(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1)
    for limit in cgroup_limits("cpu.max"):
        quota, _, period = limit.partition(" ")
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def available_memory() -> int:
    """Return the bytes this process may use: the machine's available memory, or the cgroup limit if that is less."""
    limits = (int(limit) for limit in cgroup_limits("memory.max") if limit != "max")
    return min([psutil.virtual_memory().available, *limits])
