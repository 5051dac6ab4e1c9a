"""The code that a result came from: a digest of this package, and its commit."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def package_digest() -> str:
    """Return the SHA-256 of this package's source, and of the texts and data beside it."""
    digest = hashlib.sha256()
    for file in sorted(path for path in ROOT.rglob("*.*") if "__pycache__" not in path.parts):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """Return the commit of the package's checkout; None outside of a git repository."""
    return _git("rev-parse", "HEAD")


def changed() -> bool | None:
    """Return whether the package differs from its commit; None outside of a git repository."""
    status = _git("status", "--porcelain", "--", str(ROOT))
    return None if status is None else bool(status)


def _git(*words: str) -> str | None:
    try:
        process = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() if process.returncode == 0 else None
