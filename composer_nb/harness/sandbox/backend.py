"""The common part of the backends: which of their sandboxes live, their resources in a journal, and how all of it ends."""

from __future__ import annotations

import atexit
import threading
import uuid
from abc import abstractmethod
from pathlib import Path

from composer_nb.harness.sandbox.contract import Backend, Machine, Sandbox, SandboxSpec, Snapshot
from composer_nb.harness.sandbox.errors import SandboxFailure, SandboxUnavailable
from composer_nb.harness.sandbox.reap import Kind, Resource, ResourceJournal


class ResidentBackend(Backend):
    """A backend whose sandboxes hold our resident program. A context manager; may be used from several threads."""

    def __init__(self, run_id: str | None, journal: Path | None) -> None:
        """`journal`: a folder in which resources are noted while they exist (`reap.py`)."""
        self.run_id = run_id or uuid.uuid4().hex
        self._journal = None if journal is None else ResourceJournal(journal, self.run_id)
        self._lock = threading.RLock()
        self._live: dict[str, Sandbox] = {}
        self._resources: dict[str, list[Resource]] = {}  # by the id of the sandbox, or of what else holds them
        self._closed = False
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

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailure("this backend is closed")
