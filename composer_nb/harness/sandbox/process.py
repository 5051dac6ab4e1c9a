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
from dataclasses import dataclass
from pathlib import Path

from composer_nb.harness.sandbox.backend import ResidentBackend
from composer_nb.harness.sandbox.contract import LIMITS, Capabilities, Machine, SandboxSpec
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.guest.bundle import BOOT, resident_program, resident_settings
from composer_nb.harness.sandbox.host import launch, socket_pair
from composer_nb.harness.sandbox.system.linux import patience
from composer_nb.harness.sandbox.toolchain import Interpreter, host_programs, made_programs

END_S = 5.0


@dataclass(slots=True, kw_only=True)
class _ProcessMachine(Machine):
    process: subprocess.Popen[bytes]
    folder: Path
    backend: ProcessBackend

    def end(self) -> None:
        self.channel.close()  # at which the resident program kills all that it has started, and ends
        try:
            self.process.wait(timeout=patience(END_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.backend.forget(self.id, self.noted)


class ProcessBackend(ResidentBackend):
    """Runs commands without isolation. A context manager; may be used from several threads."""

    name = "process"

    def __init__(self, run_id: str | None = None, journal: Path | None = None) -> None:
        self._interpreter = Interpreter.find()
        super().__init__(run_id, journal)

    def capabilities(self) -> Capabilities:
        enforced = dict.fromkeys(LIMITS, False) | {"open_files": True}
        why = {name: "this backend isolates nothing" for name, held in enforced.items() if not held}
        return Capabilities(
            backend=self.name, mode="process", uid=os.getuid(), isolated=False, enforced=enforced, why_not=why
        )

    def _start(self, spec: SandboxSpec) -> _ProcessMachine:
        if not spec.trusted:
            raise SandboxUnavailable(
                "the backend process isolates nothing, and this is not trusted: use bwrap or docker, or say "
                "SandboxSpec(trusted=True) where what runs is known to be harmless"
            )
        outer = Path(tempfile.mkdtemp(prefix="composer_nb-"))
        for name in ("workspace", "programs"):
            (outer / name).mkdir()
        for name, path in host_programs().items():
            (outer / "programs" / name).symlink_to(path)
        for name, content in made_programs().items():
            (outer / "programs" / name).write_bytes(content)
            (outer / "programs" / name).chmod(0o555)
        workspace, programs = str(outer / "workspace"), str(outer / "programs")
        settings = resident_settings(spec, drop=False, filter="", nice=0, workspace=workspace, programs=programs)
        channel, there = socket_pair()
        try:
            with there:
                command = [self._interpreter.path, "-I", "-S", "-c", BOOT]
                process = launch(command, there, stderr=subprocess.DEVNULL, cwd=outer)
            channel.send(resident_program(settings), patience(END_S))
        except OSError as error:
            shutil.rmtree(outer, ignore_errors=True)
            raise SandboxFailure(f"cannot start {self._interpreter.path}: {error}") from error
        made = _ProcessMachine(id=uuid.uuid4().hex[:12], channel=channel, process=process, folder=outer, backend=self)
        with self._lock:
            made.noted = [self._note("process", process.pid), self._note("directory", outer)]
        return made
