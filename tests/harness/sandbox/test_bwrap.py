"""What is particular to the backend `bwrap`: its modes, its users, its groups, its death, its copies of programs."""

import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from composer_nb.harness.grading.box import Boxes, TestJob
from composer_nb.harness.sandbox import layout
from composer_nb.harness.sandbox.bwrap import NICE, BwrapBackend
from composer_nb.harness.sandbox.contract import WORKSPACE, Backend, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxDied, SandboxFailure
from composer_nb.harness.sandbox.system.cgroups import Cgroup, Cgroups
from composer_nb.harness.sandbox.toolchain import host_programs
from tests.harness.sandbox.conftest import SMALL

AS_A_USER = """
import json
from composer_nb.harness.sandbox.bwrap import NICE, BwrapBackend
from composer_nb.harness.sandbox.contract import SandboxSpec
with BwrapBackend() as backend:
    facts = backend.capabilities()
    with backend.create(SandboxSpec(processes=20)) as box:
        bomb = box.exec(["bash", "-c", "b() { b | b & }; b; sleep 60"], timeout_s=1)
        memory = box.exec(["python3", "-c", "x = bytearray(700 << 20)"])
        who = box.exec(["id", "-u"]).stdout.decode().strip()
    print(json.dumps([facts.mode, dict(facts.enforced), dict(facts.why_not), bomb.timed_out, memory.exit_code, who]))
"""


AS_NOBODY: dict[str, Any] = {"capture_output": True, "user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}


def _system_python() -> str | None:
    """Return a Python that an ordinary user may run, of the version that the package needs."""
    for path in ("/usr/bin/python3", sys.executable):
        with contextlib.suppress(OSError):
            ask = [path, "-c", "import sys; print(sys.version_info >= (3, 11))"]
            if subprocess.run(ask, **AS_NOBODY).stdout == b"True\n":
                return path
    return None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_is_told_what_is_not_enforced() -> None:
    if (python := _system_python()) is None:
        pytest.skip("no Python >= 3.11 here that an ordinary user may run")
    root = Path(__file__).parents[3]
    if not os.access("/", os.X_OK) or any(not parent.stat().st_mode & 0o005 for parent in (root, *root.parents)):
        pytest.skip("an ordinary user may not read the package where it lies")
    places = os.pathsep.join([str(root), sysconfig.get_paths()["purelib"]])
    environment = {"PYTHONPATH": places, "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    process = subprocess.run([python, "-c", AS_A_USER], env=environment, **AS_NOBODY)
    assert process.returncode == 0, process.stderr
    mode, enforced, why_not, bomb_ended, memory_code, user_id = json.loads(process.stdout)
    assert mode == "forked" and user_id == "65534" and bomb_ended and memory_code == 1
    assert enforced["processes"] and enforced["inodes"] and enforced["disk_bytes"] and enforced["network"]
    assert set(why_not) == {name for name, holds in enforced.items() if not holds} <= {"memory_bytes", "cpus", "locks"}


@pytest.mark.parametrize("location", ["in a private folder for temporary files", "on another mount"])
def test_programs_are_there_wherever_they_are_installed(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with contextlib.ExitStack() as stack:
        parent = "/dev/shm" if location == "on another mount" else tmp_path
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        folder.chmod(0o755 if location == "on another mount" else 0o700)
        shutil.copy(host_programs()["rg"], folder / "rg")
        monkeypatch.setattr("composer_nb.harness.sandbox.image.host_programs", lambda: {"rg": str(folder / "rg")})
        monkeypatch.setattr(layout, "_basic_files", functools.cache(layout._basic_files.__wrapped__))
        backend = stack.enter_context(BwrapBackend())
        box = stack.enter_context(backend.create())
        box.write("a.py", b"")
        result = box.exec(["sh", "-c", "command -v rg && rg --files --sortr=modified"])
        assert result.stdout == b"/usr/local/bin/rg\na.py\n", result.stderr


def test_a_start_that_fails_harms_no_other_and_the_death_of_the_zygote_is_a_fault_of_the_machinery_and_mended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with BwrapBackend() as backend:
        box = backend.create(SMALL)
        with monkeypatch.context() as patch, pytest.raises(SandboxFailure, match="did not start"):
            patch.setattr(backend, "settings", lambda *_, **__: "{")
            backend.create(SMALL)
        assert box.exec(["true"]).exit_code == 0
        psutil.Process(box._machine.channel.peer).parent().kill()  # type: ignore[attr-defined]
        with pytest.raises(SandboxFailure, match="ended unexpectedly"):
            box.exec(["sleep", "1"])
        box.destroy()
        with backend.create(SMALL) as reopened:
            assert reopened.exec(["true"]).exit_code == 0


@pytest.mark.skipif(isinstance(Cgroups.find(), str), reason=f"no groups can be made here: {Cgroups.find()}")
class TestGroups:
    def test_memory_that_is_used_up_is_noticed(self) -> None:
        with BwrapBackend() as backend, backend.create(SMALL) as box:
            result = box.exec(["python3", "-c", "x = []\nwhile True: x.append(bytearray(1 << 20))"])
            assert result.oom and result.exit_code == 137
            stats = box.stats()
            assert stats.memory_bytes is not None and stats.memory_bytes < SMALL.memory_bytes
            assert stats.cpu_s is not None and stats.cpu_s > 0

    def test_a_sandbox_that_dies_of_memory_died_of_its_own_doing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with BwrapBackend() as backend:
            box = backend.create(SMALL)
            os.kill(box._machine.channel.peer, signal.SIGKILL)  # type: ignore[attr-defined]  as the kernel would
            kills = itertools.count(1)
            monkeypatch.setattr(Cgroup, "kills", lambda self: next(kills))
            with pytest.raises(SandboxDied, match="memory of 167772160 bytes was used up"):
                box.read("x")
            box.destroy()


class TestFindingGroups:
    """On trees of files that look like a kernel's: version 2 with controllers can not be had beside version 1."""

    def proc(self, tmp_path: Path, mounts: str, membership: str) -> Path:
        proc = tmp_path / "proc"
        proc.mkdir()
        (proc / "mountinfo").write_text(mounts.replace("@", str(tmp_path)))
        (proc / "cgroup").write_text(membership)
        return proc

    def test_version_2(self, tmp_path: Path) -> None:
        proc = self.proc(tmp_path, "30 22 0:26 / @/cg rw shared:4 - cgroup2 cgroup2 rw\n", "0::/user/scope\n")
        group = tmp_path / "cg" / "user" / "scope"
        group.mkdir(parents=True)
        for name, text in {"controllers": "hugetlb pids", "subtree_control": "", "procs": ""}.items():
            (group / f"cgroup.{name}").write_text(text)
        assert "has no controller memory, cpu" in str(Cgroups.find(proc))
        (group / "cgroup.controllers").write_text("cpu memory pids io")
        groups = Cgroups.find(proc)
        assert isinstance(groups, Cgroups) and groups.version == 2 and groups.places == {"": group}
        assert (group / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
        assert groups.folders("composer_nb-1") == (group / "composer_nb-1",)
        memory, processes = str(SMALL.memory_bytes), str(SMALL.processes + 1)
        limits = {"memory.max": memory, "memory.swap.max": "0", "pids.max": processes, "cpu.max": "100000 100000"}
        assert groups._limits(SMALL.memory_bytes, SMALL.processes, SMALL.cpus) == limits

    def test_version_1_in_a_container(self, tmp_path: Path) -> None:
        """The root of what is mounted is the container's own group, so that own paths are relative to it."""
        names = ("memory", "pids", "cpu", "cpuacct")
        mounts = "".join(
            f"{n} 22 0:26 /docker/c1 @/{name} rw - cgroup cgroup rw,{name}\n" for n, name in enumerate(names)
        )
        membership = "".join(f"{n}:{name}:/docker/c1/inner\n" for n, name in enumerate(names))
        for name in names:
            (tmp_path / name / "inner").mkdir(parents=True)
        groups = Cgroups.find(self.proc(tmp_path, mounts, membership))
        assert isinstance(groups, Cgroups) and groups.version == 1
        assert groups.places == {name: tmp_path / name / "inner" for name in names}


def test_commands_stand_back_and_can_be_interrupted() -> None:
    """They inherit neither the priority nor the ignored SIGINT of the process that starts them, nor its threads' folder."""
    with BwrapBackend() as backend, backend.create() as box:
        backs = 0 if isinstance(backend._cgroups, str) else NICE
        source = "import os, signal; print(os.nice(0), signal.getsignal(signal.SIGINT).__name__, os.getcwd())"
        box.write("inner/file", b"")
        for _ in range(2):
            result = box.exec(["python3", "-c", source], cwd="inner")
            priority = min(19, os.nice(0) + backs)
            assert result.stdout.decode() == f"{priority} default_int_handler {WORKSPACE}/inner\n"
        assert box.exec(["sh", "-c", "kill -INT $$"]).exit_code == 130
        assert box.exec(["pwd"]).stdout.decode().strip() == WORKSPACE
        box.exec(["python3", "-c", "import os, signal; os.kill(1, signal.SIGINT)"])
        assert box.exec(["echo", "on"]).stdout == b"on\n"


# Copies of programs in memory: what sandboxes see of them, and that grades see nothing else.

WHERE = """
import os, sys
mapped = {line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if "/" in line}
print(sorted({os.stat(path).st_dev for path in mapped}), sys.prefix, sorted(os.listdir("/usr/share")))
"""

CHANGE = """
import os
fd = os.open("/proc/self/exe", os.O_RDONLY)
ways = {
    "chmod": lambda: os.fchmod(fd, 0o777),
    "times": lambda: os.utime("/proc/self/exe"),
    "attribute": lambda: os.setxattr("/proc/self/exe", "user.x", b"x"),
    "write": lambda: os.open("/proc/self/exe", os.O_RDWR),
    "times of a library": lambda: os.utime(os.__file__),
    "write of a library": lambda: os.open(os.__file__, os.O_RDWR),
}
for name, way in ways.items():
    try:
        way()
        print(name)
    except OSError:
        pass
"""


@pytest.mark.parametrize("warm", [False, True])
def test_a_basic_sandbox_runs_from_copies_in_memory(bwrap: BwrapBackend, warm: bool) -> None:
    with bwrap.create(SandboxSpec(basic=True, warm=warm)) as box:
        python, seed = ["python3", "-s", "-S", "-c"], {"PYTHONHASHSEED": "0"}
        result, writing = (box.exec([*python, text], env=seed, warm=warm) for text in (WHERE, CHANGE))
        assert (writing.exit_code, writing.stdout, writing.stderr) == (0, b"", b""), "their owner cannot change them"
        devices, prefix, shared = result.stdout.decode().split(None, 2)
        assert result.exit_code == 0 and "," not in devices, "all of the interpreter is on one file system"
        assert prefix == "/usr" and "doc" not in shared
        kind = box.exec(["grep", "-c", "lowerdir=.*host", "/proc/self/mounts"])
        assert kind.stdout == b"0\n", "nothing of this machine's folders is there"
        assert box.exec(["git", "--version"]).exit_code == 0


def test_one_sandbox_does_not_use_up_what_their_user_may_have(bwrap: BwrapBackend) -> None:
    take = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(sum(libc.inotify_init1(0) >= 0 for _ in range(200)), flush=True)"
    with bwrap.create() as box, bwrap.create() as neighbour:
        box.exec_background(["python3", "-c", f"{take}\nimport time\ntime.sleep(60)"], log="log")
        while not (count := box.read("log")).endswith(b"\n"):
            time.sleep(0.01)
        assert int(count) == int(neighbour.exec(["python3", "-c", take]).stdout) == 8


# Runs of one grade, which must not tell one another what they see, by locks on files that their sandboxes have in common.

SIGNALS = """\
import fcntl, os, struct, time
PATHS = ["/proc/self/exe"] + ["/proc/self/ns/" + name for name in ("time", "user", "cgroup")]
def f(turn):
    held = []
    for path in PATHS:
        fd = os.open(path, os.O_RDONLY)
        held.append(fd)
        fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, turn, 1, 0))
    for _ in range(40):
        for path in PATHS:
            fd = os.open(path, os.O_RDONLY)
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 - turn, 1, 0)
            if struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK:
                return path
        time.sleep(0.05)
    return "silent"
"""
"""Each run locks a byte of files that sandboxes share, and looks whether the other one's byte is locked."""


def test_runs_of_one_grade_hear_no_locks(bwrap: Backend) -> None:
    """Runs with all constants could tell a test that runs alone what they conclude."""
    job = TestJob(files={"signals.py": SIGNALS.encode()}, hidden={}, tests=("test_signals.py",))
    test = "from signals import f\ndef test_f():\n    assert f({}) == 'silent'\n"
    jobs = [replace(job, hidden={"test_signals.py": test.format(turn)}) for turn in (0, 1)]
    assert all(result.result("test_signals.py::test_f#0").passed for result in Boxes(backend=bwrap).run(jobs))
