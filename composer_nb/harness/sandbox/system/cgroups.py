"""Control groups, version 1 and 2: limits on memory, processes and CPU time of all that a sandbox runs.

Covers hosts on which this process may make groups below its own: as root, or as a user to whom a group was delegated. Elsewhere
`Cgroups.find` says what is missing, and nothing is enforced here.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
REMOVE_S = 2.0
SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")  # Limits that kernels without swap accounting do not have


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The group of one sandbox: a folder for each hierarchy (version 1), or one (version 2)."""

    folders: tuple[Path, ...]

    def attach(self, pid: int) -> None:
        """Move a process in; what it starts from now on is in it too. Raises OSError."""
        if not pid:
            raise OSError(3, "its first process is not seen from here")  # 0 would mean this process
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def memory_bytes(self) -> int:
        return int(self.file("memory.current", "memory.usage_in_bytes").read_text())

    def cpu_s(self) -> float:
        used = self._fields("cpu.stat").get("usage_usec")
        return int(self.file("cpuacct.usage").read_text()) / 1e9 if used is None else used / 1e6

    def throttled_s(self) -> float:
        """Return the seconds for which its CPU quota stopped it, summed over CPUs."""
        fields = self._fields("cpu.stat")
        return fields.get("throttled_time", 0) / 1e9 + fields.get("throttled_usec", 0) / 1e6

    def threads(self) -> list[str]:
        """Return the ids of its threads, as this machine sees them."""
        return self.file("cgroup.threads", "tasks").read_text().split()

    def kills(self) -> int:
        """Return the number of processes that were killed for memory."""
        return self._fields("memory.events", "memory.oom_control").get("oom_kill", 0)

    def limit_sockets(self, memory_bytes: int) -> None:
        """Limit socket buffers to an eighth of the memory, on top of it: version 1 counts them apart, and only under a limit."""
        with contextlib.suppress(OSError):  # not this user's group, or a kernel that does not count them
            self.file("memory.kmem.tcp.limit_in_bytes").write_text(str(memory_bytes // 8))

    def remove(self) -> None:
        """Remove the empty group. Raises OSError when something is still in it after REMOVE_S."""
        deadline = time.monotonic() + REMOVE_S
        for folder in self.folders:
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.002)

    def file(self, *names: str) -> Path:
        """Return a control file of the group, by its names in both versions. Raises FileNotFoundError where there is none."""
        for path in (folder / name for folder in self.folders for name in names):
            if path.exists():
                return path
        raise FileNotFoundError(2, f"no {' or '.join(names)} in {', '.join(map(str, self.folders))}")

    def _fields(self, *names: str) -> dict[str, int]:
        lines = [line.split() for line in self.file(*names).read_text().splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) == 2}


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Places for groups: a folder a controller (version 1), or one for all (version 2)."""

    places: dict[str, Path]
    version: int

    @classmethod
    def find(cls, proc: Path = Path("/proc/self")) -> Cgroups | str:
        """Return the places, or why there are none."""
        mounts: dict[str, tuple[str, Path]] = {}  # controller -> root of what is mounted, mount point; "" for version 2
        for line in (proc / "mountinfo").read_text().splitlines():
            mount_part, _, type_part = line.partition(" - ")
            fields, (file_system, *type_fields) = mount_part.split(), type_part.split()
            for controller in {"cgroup2": [""], "cgroup": type_fields[-1].split(",")}.get(file_system, []):
                mounts.setdefault(controller, (fields[3], Path(fields[4])))
        lines = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        groups = {"": "/"} | {controller: path for _, names, path in lines for controller in names.split(",")}
        folders = {name: _folder(mounts[name], groups[name]) for name in mounts if name in groups}
        places = {name: folders[name] for name in (*CONTROLLERS, "cpuacct") if name in folders}
        if len(places) == 4:
            unwritable = [str(folder) for folder in places.values() if not os.access(folder, os.W_OK)]
            return f"this user may not make groups in {unwritable[0]}" if unwritable else cls(places, 1)
        return cls._unified(folders[""]) if "" in folders else "no cgroup hierarchy is mounted here"

    @classmethod
    def _unified(cls, folder: Path) -> Cgroups | str:
        try:
            available = (folder / "cgroup.controllers").read_text().split()
            if missing := [name for name in CONTROLLERS if name not in available]:
                return f"this process's cgroup {folder} has no controller {', '.join(missing)}"
            if set(CONTROLLERS) - set((folder / "cgroup.subtree_control").read_text().split()):
                # No group may have both processes and groups with limits: this process moves one down, if it is alone.
                pids = (folder / "cgroup.procs").read_text().split()
                if pids and folder.parent != folder and (folder / "cgroup.type").exists():
                    if pids != [str(os.getpid())]:
                        raise OSError(16, "other processes are in it")
                    leaf = folder / "composer_nb-self"
                    leaf.mkdir(exist_ok=True)
                    (leaf / "cgroup.procs").write_text(pids[0])
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        except OSError as error:
            return (
                f"no groups can be made below {folder} ({error.strerror}); start the program in a group of its own, as by "
                "`systemd-run --user --scope -p Delegate=yes …`"
            )
        return cls({"": folder}, 2)

    def folders(self, name: str) -> tuple[Path, ...]:
        """Return the folders of a group of this name."""
        return tuple(folder / name for folder in dict.fromkeys(self.places.values()))

    def make(self, folders: tuple[Path, ...], memory_bytes: int, processes: int, cpus: float) -> Cgroup:
        """Make a group with these limits. Raises OSError."""
        group = Cgroup(folders)
        try:
            for folder in folders:
                folder.mkdir()
            for name, value in self._limits(memory_bytes, processes, cpus).items():
                try:
                    group.file(name).write_text(value)
                except FileNotFoundError:
                    if name not in SWAP:
                        raise
            group.limit_sockets(memory_bytes)
        except OSError:
            group.remove()
            raise
        return group

    def _limits(self, memory_bytes: int, processes: int, cpus: float) -> dict[str, str]:
        memory, most = str(memory_bytes), str(processes + 1)  # the resident program is one
        share = int(cpus * PERIOD_US)
        if self.version == 2:
            limits = {"memory.max": memory, "memory.swap.max": "0", "pids.max": most}
            return limits | {"cpu.max": f"{share} {PERIOD_US}"}
        limits = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory, "pids.max": most}
        return limits | {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(share)}


def _folder(mount: tuple[str, Path], group: str) -> Path:
    """Return the folder of a group in what is mounted; in a container the root of that is the container's own group."""
    root, point = mount
    with contextlib.suppress(ValueError):
        group = "/" + str(Path(group).relative_to(root))
    folder = point / group.lstrip("/")
    return folder if folder.is_dir() else point
