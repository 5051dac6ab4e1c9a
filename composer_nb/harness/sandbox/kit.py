"""Copies in memory of the programs that sandboxes of the backend `bwrap` use: Python, a shell, the usual small tools, git.

Sandboxes share the page cache of the files that they see. One that evicts pages of a file of this machine, or is the first to
read others, could tell a later one something: major faults are counted. Pages of a tmpfs stay in memory whatever a sandbox does.

A first program (STAGE) makes a namespace of its own, fills a tmpfs there, and becomes bubblewrap. Nothing outside sees the
copies, and they go with the last process of that namespace. Later zygotes of the same process enter it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.image import ImageFiles, host_files
from composer_nb.harness.sandbox.toolchain import PLACE, open_to_all

MEMORY = "/sys"
"""Where the copies are for bubblewrap: a folder that every machine has and no sandbox needs."""
ZONES = "/usr/share/zoneinfo"
BESIDE = ("/usr/share/terminfo", "/lib/terminfo")
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
"""Its arguments: the descriptor of a plan; descriptors of a user and a mount namespace to enter instead, or -; a command."""


_OWNERS: dict[bytes, list[subprocess.Popen[bytes]]] = {}
"""Plan -> processes whose namespace holds its copies."""


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
def kit_files(by_another: bool) -> ImageFiles:
    """Return the files to copy. `by_another`: leave out programs that only this user can read. Raises SandboxUnavailable."""
    files = host_files()
    for name, path in list(files.regular.items()):
        if by_another and name.startswith(PLACE) and not open_to_all(path):
            del files.regular[name]
    files.add_libraries()
    for folder in BESIDE:
        files.add_tree(os.path.realpath(folder))
    if os.path.isdir(ZONES):
        files.add(ZONES)
        for zone in Path(ZONES).glob("*"):
            if zone.name not in ("posix", "right"):
                files.add_tree(str(zone)) if zone.is_dir() else files.add(str(zone))
    return files


def kit_plan(folders: list[str], links: dict[str, str], by_another: bool) -> bytes:
    """Return the plan that STAGE reads: the files, with further folders and links."""
    files = kit_files(by_another)
    needed = {*folders, *files.folders, *map(os.path.dirname, [*links, *files.links, *files.regular])}
    plan: dict[str, Any] = {"at": MEMORY, "links": files.links | links, "files": files.regular}
    inside = {folder for folder in needed if not any(f"{folder}/".startswith(f"{link}/") for link in plan["links"])}
    return json.dumps(plan | {"folders": sorted(inside)}).encode()


def top_level(text: bytes) -> tuple[list[str], dict[str, str]]:
    """Return the folders and the links of a plan that lie in `/`."""
    plan = json.loads(text)
    tops = {"/" + path.split("/")[1] for path in (*plan["folders"], *plan["files"])} - {"/"}
    links: dict[str, str] = plan["links"]
    return sorted(tops - {*links}), {link: target for link, target in links.items() if link.count("/") == 1}
