"""Programs for the inside of a sandbox, as one text that a bare interpreter runs.

Modules of ours that use the standard library alone go in under their own names, so that the same files are imported by the
tests and type-checked. No file has to be written into the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import WORKSPACE, SandboxSpec
from composer_nb.harness.sandbox.guest import calls, commands, files, program, values, warm
from composer_nb.harness.sandbox.system import linux

_START = """\
import sys, types
sys.path[:] = [entry for entry in sys.path if entry]  # `-c` puts the current directory first
for name, text in {sources!r}:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main({settings!r})
"""

BOOT = """\
import os
b = bytes()
while len(b) < 4 or len(b) < 4 + int.from_bytes(b[:4], "big"):
    c = os.read(0, 1 << 20)
    if not c:
        raise SystemExit
    b += c
exec(b[4:].decode())
"""
"""A program that reads another one from its input: what runs then does not stand in the list of processes."""


LIMITS_INSIDE = {"RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0}
"""Limits of every process in a sandbox that isolates. To lock a page of a common file, and let it go, would move it to another of
the kernel's lists, which /proc/self/numa_maps tells."""
USUAL = {
    "role": "resident", "workspace": WORKSPACE, "environment": {}, "copies": False, "warm": [], "basic": False,
    "devices": "/dev",
}  # fmt: skip
"""Settings of a resident program: variables that an image sets, whether commands may run in copies of it (`warm.py`), what
`warm.load` is called with, if it is, whether there are the basic programs alone, and the folder of its devices. Besides these,
`filter` and `nice`: by how much commands stand back behind the resident program; 0 where they have no CPU group of their own, in
which it counts."""


def resident_settings(spec: SandboxSpec, *, limits: Mapping[str, int] | None = None, **settings: Any) -> str:
    """Return a resident program's settings as JSON: the argument of `program.main`, and what a zygote is sent.

    `limits` come on top of those that every backend sets. With a limit of 1 on core dumps the kernel writes none and starts no
    program for them; with 0 it starts that of a piped core_pattern. `settings`: replace those of USUAL.
    """
    common = {"RLIMIT_NOFILE": spec.open_files, "RLIMIT_CORE": 1, "RLIMIT_FSIZE": spec.disk_bytes}
    sizes = {"disk_bytes": spec.disk_bytes, "inodes": spec.inodes, "calls": spec.calls and asdict(spec.calls)}
    return json.dumps({**USUAL, **sizes, "rlimits": common | dict(limits or {}), **settings})


def resident_program(settings: str) -> bytes:
    """Return what BOOT reads to become a resident program, or a zygote. Nothing may follow before that has answered."""
    modules = (linux, files, warm, commands, values, calls, program)
    sources = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    data = _START.format(sources=sources, settings=settings).encode()
    return len(data).to_bytes(4, "big") + data
