"""Copies of programs in memory: what sandboxes see of them, and that grades see nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from composer_nb.harness.sandbox.bwrap import BwrapBackend
from composer_nb.harness.sandbox.contract import SandboxSpec

WHERE = """
import os, sys
mapped = {line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if "/" in line}
print(sorted({os.stat(path).st_dev for path in mapped}), sys.prefix, sorted(os.listdir("/usr/share")))
"""


@pytest.fixture(scope="module")
def backend() -> Iterator[BwrapBackend]:
    with BwrapBackend() as made:
        yield made


@pytest.mark.parametrize("warm", [False, True])
def test_a_basic_sandbox_runs_from_memory(backend: BwrapBackend, warm: bool) -> None:
    with backend.create(SandboxSpec(basic=True, warm=warm)) as box:
        done = box.exec(["python3", "-s", "-S", "-c", WHERE], env={"PYTHONHASHSEED": "0"}, warm=warm)
        devices, prefix, shared = done.stdout.decode().split(None, 2)
        assert done.exit_code == 0 and "," not in devices, "all of the interpreter is on one file system"
        assert prefix == "/usr" and "doc" not in shared
        kind = box.exec(["grep", "-c", "lowerdir=.*host", "/proc/self/mounts"])
        assert kind.stdout == b"0\n", "nothing of this machine's folders is there"
        assert box.exec(["git", "--version"]).exit_code == 0


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
def test_copies_cannot_be_changed_by_their_owner(backend: BwrapBackend, warm: bool) -> None:
    with backend.create(SandboxSpec(basic=True, warm=warm)) as box:
        done = box.exec(["python3", "-s", "-S", "-c", CHANGE], env={"PYTHONHASHSEED": "0"}, warm=warm)
    assert (done.exit_code, done.stdout, done.stderr) == (0, b"", b"")


def test_other_sandboxes_see_the_copies_first(backend: BwrapBackend) -> None:
    with backend.create() as box:
        mounts = box.exec(["grep", "lowerdir=", "/proc/self/mounts"]).stdout.decode()
    lower = [line.split("lowerdir=")[1].split(",")[0] for line in mounts.splitlines() if " /usr/" in line]
    trees = [folders for folders in lower if "/kit/host/" in folders]  # others are empty: they hide installed packages
    assert trees and all(folders.startswith("/kit/copy/usr/") for folders in trees)


def test_one_sandbox_does_not_use_up_what_their_user_may_have(backend: BwrapBackend) -> None:
    take = "import ctypes\nlibc = ctypes.CDLL(None)\nprint(sum(libc.inotify_init1(0) >= 0 for _ in range(200)), flush=True)"
    with backend.create() as box, backend.create() as other:
        box.exec_background(["python3", "-c", f"{take}\nimport time\ntime.sleep(60)"], log="log")
        while not (taken := box.read("log")).endswith(b"\n"):
            time.sleep(0.01)
        assert int(taken) == int(other.exec(["python3", "-c", take]).stdout) == 8
