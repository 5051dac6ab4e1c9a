"""The common part of the backends: which of their sandboxes live, their resources in a journal, how all of it ends, and the
program for the inside of a sandbox, as one text that a bare interpreter runs.

Modules of ours that use the standard library alone go in under their own names, so that the same files are imported by the
tests and type-checked. No file has to be written into the sandbox.
"""

import atexit
import base64
import json
import threading
import uuid
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_nb.harness.sandbox.contract import WORKSPACE, Backend, Machine, Sandbox, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.egress import Destination
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.guest import calls, commands, files, program, values, warm
from composer_nb.harness.sandbox.reap import Kind, Resource, ResourceJournal
from composer_nb.harness.sandbox.system import linux
from composer_nb.harness.sandbox.system.seccomp import system_call_filter

_START = """\
import sys, types
sys.path[:] = [entry for entry in sys.path if entry]  # `-c` puts the current directory first
for name, text in {sources!r}:
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main({settings!r})
"""

# A program that reads another one from its input: what runs then does not stand in the list of processes.
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
# Limits of every process in a sandbox. With a limit of 1 on core dumps the kernel writes none and starts no program for them;
# with 0 it starts that of a piped core_pattern. To lock a page of a common file, and let it go, would move it to another of the
# kernel's lists, which /proc/self/numa_maps tells.
LIMITS_INSIDE = {"RLIMIT_CORE": 1, "RLIMIT_MSGQUEUE": 0, "RLIMIT_MEMLOCK": 0}
# Settings of a resident program: variables that an image sets, by how much commands stand back behind it (0 where they have no
# CPU group of their own, in which it counts), whether they may run in copies of it (`warm.py`), what `warm.load` is called with,
# if it is, whether there are the basic programs alone, the folder of its devices, and the hosts, ports and local addresses of
# egress.
USUAL = {
    "role": "resident", "workspace": WORKSPACE, "environment": {}, "nice": 10, "copies": False, "warm": [], "basic": False,
    "devices": "/dev", "egress": [],
}  # fmt: skip


class ResidentBackend(Backend):
    """A backend whose sandboxes hold our resident program. A context manager; may be used from several threads."""

    def __init__(self, run_id: str | None, journal: Path | None, table: Mapping[str, int]) -> None:
        """`journal`: a folder in which resources are noted while they exist (`reap.py`). `table`: of system calls
        (`linux.MACHINES`)."""
        self.egress: tuple[Destination, ...] = ()
        self.run_id = run_id or uuid.uuid4().hex
        self._journal = None if journal is None else ResourceJournal(journal, self.run_id)
        self._lock = threading.RLock()
        self._live: dict[str, Sandbox] = {}
        self._resources: dict[str, list[Resource]] = {}  # by the id of the sandbox, or of what else holds them
        self._closed = False
        self._filters = {
            "commands": system_call_filter(table),
            "basic": system_call_filter(table, locks=False),
            "calls": system_call_filter(table, calls=True),
        }
        atexit.register(self.close)

    @abstractmethod
    def _start(self, spec: SandboxSpec) -> Machine:
        """Start the machine of a sandbox."""

    def _begin(self, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that is ready, with all of its limits."""
        return Sandbox(self, spec, self._start(spec))

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> Sandbox:
        """See `contract.Backend`. Raises SandboxUnavailable for a spec that this backend cannot serve."""
        spec = spec or SandboxSpec()
        if spec.image and self.name != "docker":
            why = f"SandboxSpec.image={spec.image!r}: the backend {self.name} has no images; use docker"
            raise SandboxUnavailable(why)
        if spec.calls and self.name != "bwrap":
            raise SandboxUnavailable(f"SandboxSpec.calls: the backend {self.name} serves no function calls; use bwrap")
        with self._lock:
            self._check_open()
        try:
            sandbox = self._begin(spec)
        except OSError as error:  # of this machine: nothing of an agent's is there yet
            raise SandboxFailure(f"no sandbox could be made: {error}") from error
        try:
            if snapshot is not None:
                sandbox.restore(snapshot)
            with self._lock:
                self._check_open()  # it may have been closed meanwhile, without this one
                self._live[sandbox.id] = sandbox
        except BaseException:
            sandbox.destroy()
            raise
        return sandbox

    @property
    def alive(self) -> int:
        """The number of its sandboxes."""
        return len(self._live)

    def close(self) -> None:
        """Destroy the remaining sandboxes. May be called again; the end of the interpreter calls it too."""
        with self._lock:
            self._closed = True
        for sandbox in list(self._live.values()):
            sandbox.destroy()
        atexit.unregister(self.close)

    def note(self, holder: str, kind: Kind, name: str | int | Path, mark: str | None = None) -> None:
        """Note a resource of a sandbox, or of another holder, in the journal, if there is one."""
        if self._journal is not None:
            with self._lock:
                if (resource := self._journal.made(kind, name, mark)) is not None:
                    self._resources.setdefault(holder, []).append(resource)

    def forget(self, holder: str, *, strike: bool = True) -> None:
        """Forget a sandbox, or another holder, of which nothing is left, and strike its resources from the journal."""
        with self._lock:
            self._live.pop(holder, None)
            for resource in self._resources.pop(holder, ()) if strike else ():
                assert self._journal is not None
                self._journal.gone(resource)

    def settings(self, spec: SandboxSpec, *, limits: Mapping[str, int] | None = None, **settings: Any) -> str:
        """Return a resident program's settings as JSON: the argument of `program.main`, and what a zygote is sent.

        `limits` come on top of those of every sandbox. `settings`: replace those of USUAL.
        """
        kind = "calls" if spec.calls else "basic" if spec.basic else "commands"
        rlimits = {"RLIMIT_NOFILE": spec.open_files, "RLIMIT_FSIZE": spec.disk_bytes, **LIMITS_INSIDE, **(limits or {})}
        sizes: dict[str, Any] = {"disk_bytes": spec.disk_bytes, "inodes": spec.inodes, "calls": None}
        if (call := spec.calls) is not None:
            worker = {"RLIMIT_AS": call.memory_bytes, "RLIMIT_FSIZE": call.disk_bytes, "RLIMIT_NOFILE": call.files}
            worker |= {"RLIMIT_NPROC": call.threads, "RLIMIT_CPU": int(call.cpu_s) + 2, **LIMITS_INSIDE}
            sizes |= {"calls": asdict(call), "call_rlimits": worker}
        filter = base64.b64encode(self._filters[kind]).decode()
        return json.dumps({**USUAL, **sizes, "filter": filter, "rlimits": rlimits, **settings})

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailure("this backend is closed")


def resident_program(settings: str) -> bytes:
    """Return what BOOT reads to become a resident program, or a zygote. Nothing may follow before that has answered."""
    modules = (linux, files, warm, commands, values, calls, program)
    sources = [(module.__name__, Path(str(module.__file__)).read_text(encoding="utf-8")) for module in modules]
    data = _START.format(sources=sources, settings=settings).encode()
    return len(data).to_bytes(4, "big") + data
