"""Commands as plain processes of this machine, in a temporary folder: no isolation at all.

For code that is known to be harmless, where neither bubblewrap nor Docker can be had: a spec that does not say `trusted=True` is
refused. What runs can read, change and reach whatever this user can.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
import threading
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from composer_nb.harness.bundle import BOOT
from composer_nb.harness.interpreter import Interpreter
from composer_nb.harness.journal import Journal, Resource
from composer_nb.harness.sandboxes.contract import (
    Capabilities,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
    Snapshot,
)
from composer_nb.harness.sandboxes.resident import (
    ResidentSandbox,
    SocketChannel,
    resident_program,
    resident_settings,
    socket_pair,
)

END_S = 5.0


@dataclass(slots=True)
class _Machine:
    id: str
    channel: SocketChannel
    process: subprocess.Popen[bytes]
    folder: Path
    backend: ProcessBackend
    noted: list[Resource | None] = field(default_factory=list)

    def end(self) -> None:
        self.channel.close()  # at which the resident program kills all that it has started, and ends
        try:
            self.process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.backend.forget(self)

    def usage(self) -> tuple[int | None, float | None]:
        return None, None

    def kills(self) -> int:
        return 0


class ProcessBackend:
    """Runs commands without isolation. A context manager; may be used from several threads."""

    name = "process"

    def __init__(self, run_id: str | None = None, journal: Path | None = None) -> None:
        self.run_id = run_id or uuid.uuid4().hex
        self._journal = None if journal is None else Journal(journal, self.run_id)
        self._interpreter = Interpreter.find()
        self._lock = threading.Lock()
        self._live: dict[str, ResidentSandbox] = {}
        self._closed = False
        atexit.register(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def capabilities(self) -> Capabilities:
        enforced = dict.fromkeys(
            ("memory_bytes", "disk_bytes", "inodes", "processes", "cpus", "network", "system_calls"), False
        ) | {"open_files": True}
        why = dict.fromkeys([name for name, held in enforced.items() if not held], "this backend isolates nothing")
        return Capabilities(
            backend=self.name, mode="process", uid=os.getuid(), isolated=False, enforced=enforced, why_not=why
        )

    def create(self, spec: SandboxSpec | None = None, snapshot: Snapshot | None = None) -> ResidentSandbox:
        """Raises SandboxUnavailable for a spec that is not trusted."""
        spec = spec or SandboxSpec()
        if not spec.trusted:
            raise SandboxUnavailable(
                "the backend process isolates nothing, and this is not trusted: use bwrap or docker, or say "
                "SandboxSpec(trusted=True) where what runs is known to be harmless"
            )
        sandbox = ResidentSandbox(self, spec, made := self._start(spec))
        try:
            if snapshot is not None:
                sandbox.restore(snapshot)
        except BaseException:
            sandbox.destroy()
            raise
        with self._lock:
            self._live[made.id] = sandbox
            closed = self._closed
        if closed:
            sandbox.destroy()
            raise SandboxFailure("this backend is closed")
        return sandbox

    def close(self) -> None:
        """Destroys what is left. May be called again; the end of the interpreter calls it too."""
        with self._lock:
            self._closed = True
        for sandbox in list(self._live.values()):
            sandbox.destroy()
        atexit.unregister(self.close)

    def forget(self, made: _Machine) -> None:
        with self._lock:
            self._live.pop(made.id, None)
            for noted in made.noted:
                if self._journal is not None:
                    self._journal.gone(noted)

    def _start(self, spec: SandboxSpec) -> _Machine:
        outer = Path(tempfile.mkdtemp(prefix="composer_nb-"))
        (outer / "workspace").mkdir()
        channel, there = socket_pair()
        told = resident_settings(spec, workspace=str(outer / "workspace"), drop=False, filter="", limits={}, nice=0)
        command = [self._interpreter.path, "-I", "-S", "-c", BOOT]
        try:
            with there:
                process = subprocess.Popen(
                    command,
                    stdin=there.fileno(),
                    stdout=there.fileno(),
                    stderr=subprocess.DEVNULL,
                    cwd=outer,
                    env={},
                    start_new_session=True,
                )
            channel.send(resident_program(told), END_S)
        except OSError as error:
            shutil.rmtree(outer, ignore_errors=True)
            raise SandboxFailure(f"cannot start {self._interpreter.path}: {error}") from error
        made = _Machine(uuid.uuid4().hex[:12], channel, process, outer, self)
        if self._journal is not None:
            with self._lock:
                made.noted = [self._journal.made("process", process.pid), self._journal.made("directory", outer)]
        return made
