"""The view that a sandbox of the backend `bwrap` has of this machine: arguments for bubblewrap, the guest's plan of a root, and
copies of programs in memory.

Programs and libraries are this machine's own, read-only. Hidden are installed Python packages, copies of packages that come with
Python or with programs (a task may be made of the same library), and what /proc says of the whole machine.

The programs that every sandbox needs (Python, a shell, the usual small tools, git) are copies in memory. Sandboxes share the page
cache of the files that they see. One that evicts pages of a file of this machine, or is the first to read others, could tell a
later one something: major faults are counted. Pages of a tmpfs stay in memory whatever a sandbox does. A first program (STAGE)
makes a namespace of its own, fills a tmpfs there, and becomes bubblewrap. Nothing outside sees the copies, and they go with the
last process of that namespace. Later zygotes of the same process enter it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import PLACES, WORKSPACE
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.guest.warm import TRIAL
from composer_nb.harness.sandbox.image import host_files
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

MEMORY = "/sys"  # where the copies are for bubblewrap: a folder that every machine has and no sandbox needs
ZONES = "/usr/share/zoneinfo"
BESIDE = ("/usr/share/terminfo", "/lib/terminfo")
PROGRAMS = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.conf.d")
LOADER = ("/etc/ld.so.cache", "/etc/ld.so.conf")
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
STREAMS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
KIT = "/kit"  # Folder of the zygote with the parts of roots. No sandbox sees it.
# Files of each root, the copies of programs (`layout.py`), and this machine's folders of programs.
ROOT, COPY, HOST = f"{KIT}/root", f"{KIT}/copy", f"{KIT}/host"
# Tests that do what tests commonly do; three of them fail.
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
NOTHING = "/mnt"  # An empty folder, shown in place of what is hidden
# Names of folders that hold Python packages or wheels.
PACKAGES = ("site-packages", "dist-packages", "_vendor", "_bundled", "python*wheels")
# Names of what lies beside a package: what is beside it is hidden with it, unless that is a standard library.
RECORDS = ("*.dist-info", "*.egg-info")
# Names of large folders that hold none: they are not searched.
BARREN = ("doc", "man", "locale", "icons", "zoneinfo", "terminfo", "fonts", "__pycache__")
DEPTH = 7
# Files of /proc that are shown: programs need the first four, and no sandbox can change any of them for another.
SHOWN = """
    cpuinfo filesystems uptime version cmdline config.gz consoles crypto devices dma execdomains iomem ioports misc mtrr
""".split()
# Its arguments: the descriptor of a plan; descriptors of a user and a mount namespace to enter instead, or -; a
# command.
STAGE = """
import ctypes, json, os, shutil, sys
plan = json.load(open(int(sys.argv[1])))
libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
def check(result, what):
    if result:
        raise SystemExit(what + ": " + os.strerror(ctypes.get_errno()))
if len(sys.argv[2]) > 1:  # of another such process, which has made the copies
    for fd in sys.argv[2].split(","):
        check(libc.setns(int(fd), 0), "the copies of programs")
        os.close(int(fd))
    os.execv(sys.argv[3], sys.argv[3:])
check(libc.unshare(0x10020000), "a user namespace for copies of programs")  # and a mount namespace
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
options = (b"mode=0755,huge=within_size", b"mode=0755")  # large pages, where the kernel has them: a fork takes less time
mounts = (libc.mount(b"kit", plan["at"].encode(), b"tmpfs", ctypes.c_ulong(6), option) for option in options)
check(all(mounts), "memory for copies of programs")
os.umask(0o022)
for folder in plan["folders"]:
    os.makedirs(plan["at"] + folder, exist_ok=True)
for place, target in plan["links"].items():
    os.symlink(target, plan["at"] + place)
copied = {}
for place, source in plan["files"].items():
    status = os.stat(source)
    first = copied.setdefault((status.st_dev, status.st_ino), place)
    if first != place:
        os.link(plan["at"] + first, plan["at"] + place)
        continue
    shutil.copyfile(source, plan["at"] + place)
    os.chmod(plan["at"] + place, 0o555 if status.st_mode & 0o111 else 0o444)
    os.utime(plan["at"] + place, ns=(0, status.st_mtime_ns))  # Python checks its bytecode by it
for _ in range(3):  # so that all pages are among those in use, whatever a sandbox reads: /proc/self/numa_maps tells
    for place in copied.values():
        with open(plan["at"] + place, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
os.execv(sys.argv[3], sys.argv[3:])
"""

Content = tuple[bytes, str]  # of a file, and its permissions
_OWNERS: dict[bytes, list[subprocess.Popen[bytes]]] = {}  # plan -> processes whose namespace holds its copies


def own_copies(plan: bytes, process: subprocess.Popen[bytes]) -> None:
    """Register a bubblewrap process whose mount namespace holds the copies of a plan."""
    _OWNERS.setdefault(plan, []).append(process)


@contextlib.contextmanager
def namespaces(plan: bytes) -> Iterator[list[int]]:
    """Open the user and the mount namespace that hold the copies of a plan; yield no descriptors if none can be opened."""
    owners = _OWNERS[plan] = [process for process in _OWNERS.get(plan, ()) if process.poll() is None]
    with contextlib.ExitStack() as stack:
        fds: list[int] = []
        for process in owners[:1]:
            try:
                for name in ("user", "mnt"):
                    fds.append(os.open(f"/proc/{process.pid}/ns/{name}", os.O_RDONLY))
                    stack.callback(os.close, fds[-1])
            except OSError:  # it ended, or this user may not
                fds = []
        yield fds


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
    output = subprocess.run(
        command, capture_output=True, check=False
    ).stdout  # unreadable folders are no sandbox's either
    paths = {Path(os.fsdecode(path)) for path in output.split(b"\0") if path}
    paths = {path.parent if any(path.match(name) for name in RECORDS) else path for path in paths}
    return tuple(sorted(str(path) for path in paths if not (path / "os.py").is_file() and str(path) not in where))


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


@functools.cache
def _copied_files(by_another: bool) -> tuple[set[str], dict[str, str], dict[str, str]]:
    """Return the folders, links and files to copy. `by_another`: without programs that only this user can read. Raises
    SandboxUnavailable."""
    files = host_files()
    for name, path in list(files.regular.items()):
        if by_another and name.startswith(PLACE) and not open_to_all(path):
            del files.regular[name]
    files.add_libraries()
    zones = [zone for zone in Path(ZONES).glob("*") if zone.name not in ("posix", "right")]
    for folder in (*map(os.path.realpath, BESIDE), *(str(zone) for zone in zones if zone.is_dir())):
        files.add_tree(folder)
    for path in (*[ZONES] * os.path.isdir(ZONES), *(str(zone) for zone in zones if not zone.is_dir())):
        files.add(path)
    return files.folders, files.links, files.regular


@dataclass(frozen=True, slots=True)
class Layout:
    """The view of this machine that sandboxes get.

    Attributes:
        programs: place in a sandbox -> file of this machine that is there.
        uid: the user that they run as, where that is not this user.
        points: paths at which something is mounted on this machine.
    """

    interpreter: Interpreter
    programs: Mapping[str, str]
    uid: int | None
    points: frozenset[str]

    @classmethod
    def of(cls, interpreter: Interpreter, uid: int | None) -> Layout:
        binaries = host_programs()
        programs = {f"{PLACE}/{name}": path for name, path in binaries.items() if not path.startswith(PROGRAMS)}
        if not interpreter.path.startswith(PROGRAMS):
            programs[interpreter.path] = interpreter.path
        return cls(interpreter, programs, uid, mounts())

    def crowded(self) -> list[str]:
        """Return the trees that something is mounted in: the kernel makes no overlay of them, so sandboxes share their files."""
        return [tree for tree in self.trees() if any(point.startswith(f"{tree}/") for point in self.points)]

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
        if self.uid is not None:
            hidden = {target: path for target, path in self.programs.items() if not open_to_all(path)}
            copies |= {target: (Path(path).read_bytes(), "0555") for target, path in hidden.items()}
        copies |= {path: (Path(path).read_bytes(), "0444") for path in LOADER if os.path.isfile(path)}
        copies |= dict.fromkeys(DEVICES, (b"", "0444"))
        kit = {f"counters/{name}": text.encode() for name, text in counters().items()}
        kit |= {"counters/empty": b"", f"{TRIAL}.py": TRIAL_TEXT}
        return {f"{ROOT}{target}": content for target, content in copies.items()} | {
            f"{KIT}/{name}": (content, "0444") for name, content in kit.items()
        }

    def warm(self) -> list[str]:
        """Return what the zygote imports pytest from, and its trial (`guest.warm.load`); nothing without pytest."""
        return [f"{PLACE}/{TESTING}", f"{KIT}/{TRIAL}.py"] if TESTING in made_programs() else []

    def zygote(self, data: Mapping[str, tuple[int, str]]) -> list[str]:
        """Return the arguments for a bubblewrap whose program builds the roots."""
        command = ["--ro-bind", MEMORY, COPY, "--dev", "/dev", "--bind", "/proc", "/proc"]
        plan = json.loads(self.copies())
        links: dict[str, str] = {path: target for path, target in plan["links"].items() if path.count("/") == 1}
        tops = {"/" + path.split("/")[1] for path in (*plan["folders"], *plan["files"])} - {"/", *links}
        command += [word for folder in sorted(tops) for word in ("--ro-bind", MEMORY + folder, folder)]
        command += [word for path, target in links.items() for word in ("--symlink", target, path)]
        command += [word for tree in self.trees() for word in ("--ro-bind", tree, HOST + tree)]
        folders = [*self.trees(), WORKSPACE, "/tmp", "/proc", "/dev/pts", "/dev/shm", "/etc", PLACE, NOTHING]
        folders = [f"{ROOT}{folder}" for folder in sorted(folders, key=len) if not folder.startswith("/tmp/")]
        for folder in (*(f"{KIT}/{name}" for name in ("root", "new", "scratch", "empty", "counters")), *folders):
            command += ["--dir", folder]
        symlinks = {path: target for path, target in self._links().items() if not path.startswith(PLACE)} | PLACES
        symlinks |= {f"/dev/{name}": target for name, target in (STREAMS | {"ptmx": "pts/ptmx"}).items()}
        command += [word for path, target in symlinks.items() for word in ("--symlink", target, ROOT + path)]
        for path, (fd, permissions) in data.items():
            command += ["--perms", permissions, "--file", str(fd), path]
        return command

    def copies(self) -> bytes:
        """Return the plan of the copies of programs, which STAGE reads: the files, with further folders and links."""
        folders, links, regular = _copied_files(self.uid is not None)
        links = links | self._links()
        needed = {*self.trees(), *folders, *map(os.path.dirname, [*links, *regular])}
        inside = {folder for folder in needed if not any(f"{folder}/".startswith(f"{link}/") for link in links)}
        return json.dumps({"at": MEMORY, "links": links, "files": regular, "folders": sorted(inside)}).encode()

    def _links(self) -> dict[str, str]:
        """Return the links among the copies of programs besides their own."""
        usual = {path: os.readlink(path) for path in LINKS if os.path.islink(path)}
        return usual | {f"{PLACE}/{TESTING}": f"{ROOT}{PLACE}/{TESTING}"}  # where sandboxes have it
