"""Commands as plain processes of this machine, in a temporary folder: no isolation at all.

For code that is known to be harmless, where neither bubblewrap nor Docker can be had: a spec that does not say `trusted=True` is
refused. What runs can read, change and reach whatever this user can.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from composer_nb.harness.bundle import BOOT
from composer_nb.harness.interpreter import Interpreter
from composer_nb.harness.journal import Resource
from composer_nb.harness.sandboxes.backend import ResidentBackend
from composer_nb.harness.sandboxes.contract import (
    Capabilities,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from composer_nb.harness.sandboxes.programs import host_programs, made_programs
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
        self.backend.forget(self.id, self.noted)

    def usage(self) -> tuple[int | None, float | None]:
        return None, None

    def kills(self) -> int:
        return 0


class ProcessBackend(ResidentBackend):
    """Runs commands without isolation. A context manager; may be used from several threads."""

    name = "process"

    def __init__(self, run_id: str | None = None, journal: Path | None = None) -> None:
        self._interpreter = Interpreter.find()
        super().__init__(run_id, journal)

    def capabilities(self) -> Capabilities:
        enforced = dict.fromkeys(
            ("memory_bytes", "disk_bytes", "inodes", "processes", "cpus", "network", "system_calls"), False
        ) | {"open_files": True}
        why = dict.fromkeys([name for name, held in enforced.items() if not held], "this backend isolates nothing")
        return Capabilities(
            backend=self.name, mode="process", uid=os.getuid(), isolated=False, enforced=enforced, why_not=why
        )

    def _begin(self, spec: SandboxSpec) -> ResidentSandbox:
        if not spec.trusted:
            raise SandboxUnavailable(
                "the backend process isolates nothing, and this is not trusted: use bwrap or docker, or say "
                "SandboxSpec(trusted=True) where what runs is known to be harmless"
            )
        return ResidentSandbox(self, spec, self._start(spec))

    def _start(self, spec: SandboxSpec) -> _Machine:
        outer = Path(tempfile.mkdtemp(prefix="composer_nb-"))
        for name in ("workspace", "programs"):
            (outer / name).mkdir()
        for name, path in host_programs().items():
            (outer / "programs" / name).symlink_to(path)
        for name, content in made_programs().items():
            (outer / "programs" / name).write_bytes(content)
            (outer / "programs" / name).chmod(0o555)
        channel, there = socket_pair()
        told = resident_settings(
            spec,
            workspace=str(outer / "workspace"),
            drop=False,
            filter="",
            limits={},
            nice=0,
            programs=str(outer / "programs"),
        )
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
        with self._lock:
            made.noted = [self._note("process", process.pid), self._note("directory", outer)]
        return made
