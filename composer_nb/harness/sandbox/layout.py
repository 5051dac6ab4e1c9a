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

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import WORKSPACE, WRITABLE
from composer_nb.harness.sandbox.errors import SandboxUnavailable
from composer_nb.harness.sandbox.guest.warm import TRIAL
from composer_nb.harness.sandbox.image import ImageFiles, accounts, host_files
from composer_nb.harness.sandbox.reap import mounts
from composer_nb.harness.sandbox.toolchain import PLACE, TESTING, Interpreter, install_hint, made_programs, open_to_all

MEMORY = "/sys"  # where the copies are for bubblewrap: a folder that every machine has and no sandbox needs
ZONES = "/usr/share/zoneinfo"
BESIDE = ("/usr/share/terminfo", "/lib/terminfo")
PROGRAMS = ("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share")
LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.conf.d")
LOADER = "/etc/ld.so.conf"
DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
STREAMS = {
    "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}  # fmt: skip
KIT = "/kit"  # Folder of the zygote with the parts of roots. No sandbox sees it.
COPY, HOST = f"{KIT}/copy", f"{KIT}/host"  # The root of every sandbox, and this machine's folders of programs
# Tests that do what tests commonly do; three of them fail.
TRIAL_TEXT = """
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
# Its arguments: the descriptor of a plan (`Layout.plan`); descriptors of a user and a mount namespace to enter instead, or -; a
# command.
STAGE = """
import ctypes, json, os, shutil, sys
libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
def check(result, what):
    if result:
        raise SystemExit(what + ": " + os.strerror(ctypes.get_errno()))
source = open(int(sys.argv[1]), "rb")
if len(sys.argv[2]) > 1:  # of another such process, which has made the copies
    for fd in sys.argv[2].split(","):
        check(libc.setns(int(fd), 0), "the copies of programs")
        os.close(int(fd))
    source.close()
    os.execv(sys.argv[3], sys.argv[3:])
plan = json.loads(source.readline())
check(libc.unshare(0x10020000), "a user namespace for copies of programs")  # and a mount namespace
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
options = (b"mode=0755,huge=within_size", b"mode=0755")  # large pages, where the kernel has them: a fork takes less time
mounts = (libc.mount(b"kit", plan["at"].encode(), b"tmpfs", ctypes.c_ulong(6), option) for option in options)
check(all(mounts), "memory for copies of programs")
os.umask(0o022)
os.chdir(plan["at"])
for folder in plan["folders"]:
    os.makedirs(folder, exist_ok=True)
for place, target in plan["links"].items():
    os.symlink(target, place)
copied = {}
for place, path in plan["files"].items():
    status = os.stat(path)
    first = copied.setdefault((status.st_dev, status.st_ino), place)
    if first != place:
        os.link(first, place)
        continue
    shutil.copyfile(path, place)
    os.chmod(place, 0o555 if status.st_mode & 0o111 else 0o444)
    os.utime(place, ns=(0, status.st_mtime_ns))  # Python checks its bytecode by it
for place, (size, permissions) in plan["written"].items():
    with open(place, "wb") as file:
        file.write(source.read(size))
    os.chmod(place, permissions)
source.close()
for _ in range(3):  # so that all pages are among those in use, whatever a sandbox reads: /proc/self/numa_maps tells
    for place in (*copied.values(), *plan["written"]):
        with open(place, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
os.chdir("/")
os.execv(sys.argv[3], sys.argv[3:])
"""

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
    # Unreadable folders are no sandbox's either.
    output = subprocess.run(command, capture_output=True, check=False).stdout
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
def _basic_files() -> ImageFiles:
    """Return the files that every sandbox has: those of the host image, time zones and terminals. Raises SandboxUnavailable."""
    files = host_files()
    files.add_libraries()
    zones = [zone for zone in Path(ZONES).glob("*") if zone.name not in ("posix", "right")]
    for folder in (*map(os.path.realpath, BESIDE), *(str(zone) for zone in zones if zone.is_dir())):
        files.add_tree(folder)
    for path in (ZONES, LOADER, *(str(zone) for zone in zones if not zone.is_dir())):
        if os.path.exists(path):
            files.add(path)
    return files


class Layout:
    """The view of this machine that sandboxes get.

    Attributes:
        plan: what STAGE reads: a line of JSON with the folders, links and files to copy, and with the sizes and permissions of
            written files, whose contents follow it.
        trees: the folders of this machine that are shown whole.
        crowded: those of them that something is mounted in: the kernel makes no overlay of them, so sandboxes share their files.
    """

    def __init__(self, interpreter: Interpreter, uid: int | None) -> None:
        """`uid`: the user that sandboxes run as, where that is not this user. Raises SandboxUnavailable."""
        links = [path for path in LINKS if os.path.islink(path)]
        real = [path for path in (*LINKS, *PROGRAMS, *SETTINGS) if os.path.isdir(path) and path not in links]
        self.interpreter = interpreter
        self.trees = [*real, *(path for path in interpreter.directories if not path.startswith((*PROGRAMS, *real)))]
        points = mounts()
        self.crowded = [tree for tree in self.trees if any(point.startswith(f"{tree}/") for point in points)]
        self._links = {path: os.readlink(path) for path in links} | _basic_files().links
        self.plan = self._plan(_basic_files(), uid)

    def _plan(self, files: ImageFiles, uid: int | None) -> bytes:
        written = files.written | accounts(os.getuid() if uid is None else uid)
        for target, path in files.regular.items() if uid is not None else ():
            if (target.startswith(PLACE) or path == self.interpreter.path) and not open_to_all(path):
                written[target] = Path(path).read_bytes(), 0o555  # the other user could not, as below a private folder
        written |= dict.fromkeys(DEVICES, (b"", 0o444)) | {"/etc/hosts": (b"127.0.0.1 localhost\n", 0o444)}
        links = self._links | {f"/dev/{name}": to for name, to in STREAMS.items()}
        copied = {target: path for target, path in files.regular.items() if target not in written}
        folders = {*self.trees, WORKSPACE, "/tmp", "/proc", "/dev/pts", "/dev/shm", NOTHING, *files.folders}
        folders |= set(map(os.path.dirname, [*links, *copied, *written]))
        inside = {folder for folder in folders if not any(f"{folder}/".startswith(f"{link}/") for link in links)}
        kit = {f"counters/{name}": text for name, text in counters().items()}
        texts = {"counters/empty": "", f"{TRIAL}.py": TRIAL_TEXT} | kit
        contents = {f"copy{target}": content for target, content in written.items()}
        contents |= {name: (text.encode(), 0o444) for name, text in texts.items()}
        parts = ["new", "scratch", "empty", "counters", "devices", *(f"host{tree}" for tree in self.trees)]
        head = {
            "at": MEMORY,
            "folders": parts + [f"copy{folder}" for folder in sorted(inside)],
            "links": {f"copy{path}": to for path, to in links.items()},
            "files": {f"copy{target}": path for target, path in copied.items()},
            "written": {target: (len(data), permissions) for target, (data, permissions) in contents.items()},
        }
        return json.dumps(head).encode() + b"\n" + b"".join(data for data, _ in contents.values())

    def roots(self) -> dict[str, dict[str, Any]]:
        """Return the layouts by which the guest builds roots (`program.furnish`): with this machine's programs, with the basic
        ones alone, which are copies, and for calls."""
        places = {name: f"{KIT}/{name}" for name in ("new", "scratch", "empty", "counters", "copy")}
        host = places | {
            "nothing": NOTHING,
            "shown": SHOWN,
            "stands_in": list(counters()),
            "trees": {
                tree: [HOST + tree] if tree in self.crowded else [COPY + tree, HOST + tree] for tree in self.trees
            },
            "crowded": self.crowded,
            "masks": packages((*PROGRAMS, *self.interpreter.directories)),
            "devices": DEVICES,
            "writable": WRITABLE,
        }
        basic = host | {"trees": {}, "crowded": [], "masks": []}
        return {"host": host, "basic": basic, "calls": basic | {"devices": DEVICES[:1], "writable": {}}}

    def warm(self) -> list[str]:
        """Return what the zygote imports pytest from, and its trial (`guest.warm.load`); nothing without pytest."""
        return [f"{PLACE}/{TESTING}", f"{KIT}/{TRIAL}.py"] if TESTING in made_programs() else []

    def zygote(self, devices: Path | None) -> list[str]:
        """Return the arguments for a bubblewrap whose program builds the roots. It has a view of the copies itself."""
        binds = {MEMORY: KIT} | {tree: HOST + tree for tree in self.trees}
        tops = {"/" + path.split("/")[1] for path in _basic_files().folders} - {"/", "/proc", "/dev", *self._links}
        binds |= {f"{MEMORY}/copy{folder}": folder for folder in sorted(tops)}
        links = [(target, path) for path, target in self._links.items() if path.count("/") == 1]
        command = ["--dev", "/dev", "--bind", "/proc", "/proc"]
        command += [word for pair in binds.items() for word in ("--ro-bind", *pair)]
        command += [word for pair in links for word in ("--symlink", *pair)]
        return command + (["--dev-bind", str(devices), f"{KIT}/devices"] if devices else [])
