"""Sandboxes in which agents work and grades are made; `contract.py` defines them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer_nb.harness.sandbox.backend import ResidentBackend

BACKENDS = ("bwrap", "docker")


def open_backend(name: str, run_id: str | None = None, journal: Path | None = None) -> ResidentBackend:
    """Return a backend by name. Raises ValueError for an unknown name, SandboxUnavailable where it does not work here."""
    if name == "bwrap":
        from composer_nb.harness.sandbox.bwrap import BwrapBackend

        return BwrapBackend(run_id, journal)
    if name == "docker":
        from composer_nb.harness.sandbox.docker import DockerBackend

        return DockerBackend(run_id, journal)
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
