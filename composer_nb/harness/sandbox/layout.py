"""The view that a sandbox of the backend `bwrap` has of this machine: arguments for bubblewrap and the guest's plan of a root.

Programs and libraries are this machine's own, read-only. Hidden are installed Python packages, copies of packages that come with
Python or with programs (a task may be made of the same library), and what /proc says of the whole machine.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import PLACES, WORKSPACE
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.guest.warm import TRIAL
from composer_nb.harness.sandbox.kit import MEMORY, kit_plan, top_level
from composer_nb.harness.sandbox.reap import mounts
from composer_nb.harness.sandbox.toolchain import (
    PLACE,
    TESTING,
    Interpreter,
    host_programs,
    install_hint,
    made_programs,
    open_to_all,
)

PROGRAMS = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.conf.d")
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf")
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
STREAMS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
KIT = "/kit"
"""Folder of the zygote with the parts of roots. No sandbox sees it."""
ROOT, COPY, HOST = f"{KIT}/root", f"{KIT}/copy", f"{KIT}/host"
"""Files of each root, the copies of programs (`kit.py`), and this machine's folders of programs."""
TRIAL_TEXT = b"""
import pytest, unittest
@pytest.fixture
def one():
    yield 1
@pytest.mark.parametrize("value", [1, 2, 3, 4])
def test_values(one, value):
    assert value == pytest.approx(one)
def test_raises():
    with pytest.raises(ValueError, match="x"):
        int("x")
class Test(unittest.TestCase):
    def test_equal(self):
        self.assertEqual([1], [2])
"""
"""Tests that do what tests commonly do; three of them fail."""
NOTHING = "/mnt"
"""An empty folder, shown in place of what is hidden."""
PACKAGES = ("site-packages", "dist-packages", "_vendor", "_bundled", "python*wheels")
"""Names of folders that hold Python packages or wheels."""
RECORDS = ("*.dist-info", "*.egg-info")
"""Names of what lies beside a package: what is beside it is hidden with it, unless that is a standard library."""
BARREN = ("doc", "man", "locale", "icons", "zoneinfo", "terminfo", "fonts", "__pycache__")
"""Names of large folders that hold none: they are not searched."""
DEPTH = 7
SHOWN = """
    cpuinfo filesystems uptime version cmdline config.gz consoles crypto devices dma execdomains iomem ioports misc mtrr
""".split()
"""Files of /proc that are shown: programs need the first four, and no sandbox can change any of them for another."""


Content = tuple[bytes, str]
"""Content of a file, and its permissions."""


@functools.cache
def packages(folders: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of Python packages and wheels below some folders."""
    if (find := shutil.which("find")) is None:
        hint = install_hint("findutils")
        raise SandboxUnavailable(f"`find`, which looks for installed Python packages, is missing: {hint}")

    def named(names: Sequence[str]) -> list[str]:
        return ["(", *[word for name in names for word in ("-name", name, "-o")][:-1], ")"]

    where = [folder for folder in folders if os.path.isdir(folder)]
    command = [find, *where, "-maxdepth", str(DEPTH), "-type", "d", *named(BARREN), "-prune", "-o"]
    command += ["(", "-type", "d", *named(PACKAGES), "-o", *named(RECORDS), ")", "-prune", "-print0"]
    done = subprocess.run(command, capture_output=True, check=False)  # unreadable folders are no sandbox's either
    found = {Path(os.fsdecode(path)) for path in done.stdout.split(b"\0") if path}
    held = {path.parent if any(path.match(name) for name in RECORDS) else path for path in found}
    return tuple(sorted(str(path) for path in held if not (path / "os.py").is_file() and str(path) not in where))


def counters() -> dict[str, str]:
    """Return the files of /proc that programs need, without what they count for the whole machine."""
    lines = Path("/proc/stat").read_text().splitlines()
    cores = "".join(f"{line.split()[0]} 0 0 0 0 0 0 0 0 0 0\n" for line in lines if line.startswith("cpu"))
    booted = next(line for line in lines if line.startswith("btime"))
    memory = Path("/proc/meminfo").read_text().splitlines()
    total = next(line for line in memory if line.startswith("MemTotal")).split()[1]
    free = dict.fromkeys(("MemTotal", "MemFree", "MemAvailable"), total)
    none = "Buffers Cached SwapCached Active Inactive SwapTotal SwapFree Shmem Slab SReclaimable".split()
    return {
        "loadavg": "0.00 0.00 0.00 1/1 1\n",
        "meminfo": "".join(f"{name}: {size} kB\n" for name, size in (free | dict.fromkeys(none, "0")).items()),
        "stat": f"{cores}intr 0\nctxt 0\n{booted}\nprocesses 1\nprocs_running 1\nprocs_blocked 0\nsoftirq 0\n",
    }


def make_devices(folder: Path) -> None:
    """Make a folder with devices like those of /dev. Raises OSError where this user may not."""
    folder.mkdir(mode=0o755)
    for device in DEVICES:
        os.mknod(folder / Path(device).name, 0o20666, os.stat(device).st_rdev)
        (folder / Path(device).name).chmod(0o666)


@dataclass(frozen=True, slots=True)
class Layout:
    """The view of this machine that sandboxes get. `uid`: the user that they run as, where that is not this user."""

    interpreter: Interpreter
    programs: Mapping[str, str]
    """Place in a sandbox -> file of this machine that is there."""
    uid: int | None
    points: frozenset[str]
    """Paths at which something is mounted on this machine."""

    @classmethod
    def of(cls, interpreter: Interpreter, uid: int | None) -> Layout:
        programs = {f"{PLACE}/{n}": path for n, path in host_programs().items() if not path.startswith(PROGRAMS)}
        if not interpreter.path.startswith(PROGRAMS):
            programs[interpreter.path] = interpreter.path
        return cls(interpreter, programs, uid, mounts())

    def crowded(self) -> list[str]:
        """Return the trees that something is mounted in: the kernel makes no overlay of them, so sandboxes share their files."""
        return [tree for tree in self.trees() if self._holds_mounts(tree)]

    def trees(self) -> list[str]:
        """Return the folders that are shown whole."""
        links = [path for path in LINKS if os.path.islink(path)]
        real = [path for path in (*LINKS, *PROGRAMS, *SETTINGS) if os.path.isdir(path) and path not in links]
        return [*real, *(path for path in self.interpreter.directories if not path.startswith((*PROGRAMS, *real)))]

    def plans(self) -> dict[str, dict[str, Any]]:
        """Return the plans by which the guest builds roots (`program.furnish`): with this machine's programs, with the basic
        ones alone, which are copies, and for calls."""
        places = {name: f"{KIT}/{name}" for name in ("new", "scratch", "empty", "counters")}
        shared = places | {"nothing": NOTHING, "shown": SHOWN, "stands_in": list(counters())}
        crowded = self.crowded()
        host = shared | {
            "root": [ROOT, COPY],
            "trees": {tree: [HOST + tree] if tree in crowded else [COPY + tree, HOST + tree] for tree in self.trees()},
            "crowded": crowded,
            "masks": [*packages((*PROGRAMS, *self.interpreter.directories))],
            "devices": DEVICES,
            "writable": {WORKSPACE: 1.0, "/tmp": 1.0, "/dev/shm": 0.25},
        }
        basic = host | {"trees": {}, "crowded": [], "masks": []}
        return {"host": host, "basic": basic, "calls": basic | {"devices": DEVICES[:1], "writable": {}}}

    def contents(self) -> dict[str, Content]:
        """Return the files that are copied into a sandbox: place -> content and permissions.

        A passwd and a group file that know two users, programs that are made here, and those that the user of the sandbox could
        not read where they lie, as in an environment below a private folder.
        """
        uid = os.getuid() if self.uid is None else self.uid
        passwd = f"root:x:0:0:root:/root:/bin/false\nagent:x:{uid}:{uid}::{WORKSPACE}:/bin/bash\n"
        copies: dict[str, Content] = {
            "/etc/passwd": (passwd.encode(), "0444"),
            "/etc/group": (f"root:x:0:\nagent:x:{uid}:\n".encode(), "0444"),
        }
        copies |= {f"{PLACE}/{name}": (content, "0555") for name, content in made_programs().items()}
        private = self.uid is not None
        hidden = {target: (path, "0555") for target, path in self.programs.items() if private and not open_to_all(path)}
        hidden |= {path: (path, "0444") for path in LOADER if os.path.isfile(path)}
        copies |= {target: (Path(path).read_bytes(), permissions) for target, (path, permissions) in hidden.items()}
        counted = f"{KIT}/counters"
        kit: dict[str, Content] = {f"{counted}/{name}": (text.encode(), "0444") for name, text in counters().items()}
        copies |= dict.fromkeys(DEVICES, (b"", "0444"))
        kit[f"{counted}/empty"] = b"", "0444"
        kit[f"{KIT}/{TRIAL}.py"] = TRIAL_TEXT, "0444"
        return {f"{ROOT}{target}": entry for target, entry in copies.items()} | kit

    def warm(self) -> list[str]:
        """Return what the zygote imports pytest from, and its trial (`guest.warm.load`); nothing without pytest."""
        return [f"{PLACE}/{TESTING}", f"{KIT}/{TRIAL}.py"] if TESTING in made_programs() else []

    def zygote(self, data: Mapping[str, tuple[int, str]]) -> list[str]:
        """Return the arguments for a bubblewrap whose program builds the roots."""
        command = ["--ro-bind", MEMORY, COPY, "--dev", "/dev", "--bind", "/proc", "/proc"]
        folders, links = top_level(self.copies())
        command += [word for folder in folders for word in ("--ro-bind", MEMORY + folder, folder)]
        command += [word for path, target in links.items() for word in ("--symlink", target, path)]
        command += [word for tree in self.trees() for word in ("--ro-bind", tree, HOST + tree)]
        for path in ("root", "new", "scratch", "empty", "counters"):
            command += ["--dir", f"{KIT}/{path}"]
        folders = [*self.trees(), WORKSPACE, "/tmp", "/proc", "/dev/pts", "/dev/shm", "/etc", PLACE, NOTHING]
        for folder in sorted(folders, key=len):
            if not folder.startswith("/tmp/"):
                command += ["--dir", f"{ROOT}{folder}"]
        for path, target in (self._places() | dict(PLACES)).items():
            if not path.startswith(PLACE):
                command += ["--symlink", target, ROOT + path]
        for name, target in (STREAMS | {"ptmx": "pts/ptmx"}).items():
            command += ["--symlink", target, f"{ROOT}/dev/{name}"]
        for path, (fd, permissions) in data.items():
            command += ["--perms", permissions, "--file", str(fd), path]
        return command

    def copies(self) -> bytes:
        """Return the plan of the copies of programs (`kit.STAGE`)."""
        return kit_plan(self.trees(), self._places(), self.uid is not None)

    def _places(self) -> dict[str, str]:
        """Return the links among the copies of programs besides their own."""
        usual = {path: os.readlink(path) for path in LINKS if os.path.islink(path)}
        return usual | {f"{PLACE}/{TESTING}": f"{ROOT}{PLACE}/{TESTING}"}  # where sandboxes have it

    def _holds_mounts(self, folder: str) -> bool:
        return any(point.startswith(folder + "/") for point in self.points)
