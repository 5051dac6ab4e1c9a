"""Sandboxes in which agents work and grades are made; `contract.py` defines them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer_nb.harness.sandbox.egress import destinations

if TYPE_CHECKING:
    from composer_nb.harness.sandbox.backend import ResidentBackend

BACKENDS = ("bwrap", "docker")


def open_backend(
    name: str, run_id: str | None = None, journal: Path | None = None, egress: str = ""
) -> ResidentBackend:
    """Return a backend by name. `egress`: allow-list of hosts for tasks that need a network (`egress.destinations`). Raises
    ValueError for an unknown name or a wrong list, SandboxUnavailable where it does not work here."""
    allowed = destinations(egress)
    backend: ResidentBackend
    if name == "bwrap":
        from composer_nb.harness.sandbox.bwrap import BwrapBackend

        backend = BwrapBackend(run_id, journal)
    elif name == "docker":
        from composer_nb.harness.sandbox.docker import DockerBackend

        backend = DockerBackend(run_id, journal)
    else:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    backend.egress = allowed
    return backend
