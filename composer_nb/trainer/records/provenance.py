"""What a result came from: a digest of this package, its commit, and the capsule of a run."""

import hashlib
import json
import subprocess
from functools import cache
from pathlib import Path

from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.sandbox.toolchain import Interpreter, made_programs

CAPSULE = "capsule.json"
ROOT = Path(__file__).parents[2]


def package_digest(folder: str = "") -> str:
    """Return the SHA-256 of this package's source, or of a folder of it, and of the texts and data beside it."""
    digest = hashlib.sha256()
    for file in sorted(path for path in (ROOT / folder).rglob("*.*") if "__pycache__" not in path.parts):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def harness_digest() -> str:
    """Return the SHA-256 of what a score depends on besides policy, tasks and settings: the code of the harness, and the
    interpreter and programs of its sandboxes. Images that tasks name are in the tasks."""
    image = Path(Interpreter.find().path).read_bytes() + b"".join(made_programs().values())
    return hashlib.sha256(package_digest("harness").encode() + image).hexdigest()


def require_harness(pinned: str) -> None:
    """Raise ValueError if the digest of the harness does not begin with `pinned`."""
    if not harness_digest().startswith(pinned):
        raise ValueError(
            f"eval.harness={pinned}: this harness is {harness_digest()}: use the version of the package, and the interpreter, "
            "ruff and ripgrep, that the pinned scores were made with, or pin this one"
        )


def capsule(run: Path, env: EnvSettings) -> dict[str, str]:
    """Return digests of what a run's RL works with: the code (this package), the data (files of `data/`), the image (backend,
    interpreter and programs of sandboxes; images that tasks name are in the data), and the tools (as a model sees them, and the
    pages of `env.web`)."""
    data, image = hashlib.sha256(), hashlib.sha256(env.backend.encode())
    for file in sorted(path for path in (run / "data").rglob("*") if path.is_file()):
        data.update(f"{file.relative_to(run)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    image.update(Path(Interpreter.find().path).read_bytes() + b"".join(made_programs().values()))
    tools = hashlib.sha256(json.dumps(env.toolset.schemas, sort_keys=True).encode())
    tools.update(Path(env.web).expanduser().read_bytes() if env.web else b"")
    digests = {"data": data.hexdigest(), "image": image.hexdigest(), "tools": tools.hexdigest()}
    return {"code": package_digest()} | digests


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
