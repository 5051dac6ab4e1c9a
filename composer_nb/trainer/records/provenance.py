"""What a result came from: a digest of this package, its commit, and the capsule of a run."""

import hashlib
import json
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from composer_nb.harness.environment import EnvSettings
from composer_nb.harness.plain import import_for_user
from composer_nb.harness.sandbox.toolchain import Interpreter, made_programs

CAPSULE = "capsule.json"
ROOT = Path(__file__).parents[2]
# What runs and scores evaluations, of policies and of agents.
EVALUATION = (
    "harness",
    "trainer/recipe/evaluate.py",
    "production/bench.py",
    "production/planner.py",
    "production/policies.py",
)


def package_digest(*parts: str) -> str:
    """Return the SHA-256 of this package's source, or of these folders and files of it, and of the texts and data beside it."""
    return _sources_digest(ROOT, (ROOT / part for part in parts or ("",)))


def _sources_digest(root: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        files = (
            sorted(file for file in path.rglob("*.*") if "__pycache__" not in file.parts) if path.is_dir() else [path]
        )
        for file in files:
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


@cache
def harness_digest() -> str:
    """Return the SHA-256 of what a score depends on besides policy, tasks and settings: the code of the harness and of
    what evaluates with it (EVALUATION), and the interpreter and programs of its sandboxes. Images that tasks name are in the
    tasks."""
    image = Path(Interpreter.find().path).read_bytes() + b"".join(made_programs().values())
    return hashlib.sha256(package_digest(*EVALUATION).encode() + image).hexdigest()


def require_harness(pinned: str) -> None:
    """Raise ValueError if the digest of the harness does not begin with `pinned`."""
    if not harness_digest().startswith(pinned):
        raise ValueError(
            f"eval.harness={pinned}: this harness is {harness_digest()}: use the version of the package, and the interpreter, "
            "ruff and ripgrep, that the pinned scores were made with, or pin this one"
        )


def capsule(run: Path, env: EnvSettings, user_code: Iterable[str] = ()) -> dict[str, str]:
    """Return digests of what a run's RL works with: the code (this package), the user's code (of the modules, or of the packages
    that they are in, of the names `MODULE:NAME` in `user_code`), the data (files of `data/`), the image (backend,
    interpreter and programs of sandboxes; images that tasks name are in the data), and the tools (as a model sees them, and the
    pages of `env.web`)."""
    data, image = hashlib.sha256(), hashlib.sha256(env.backend.encode())
    for file in sorted(path for path in (run / "data").rglob("*") if path.is_file()):
        data.update(f"{file.relative_to(run)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    image.update(Path(Interpreter.find().path).read_bytes() + b"".join(made_programs().values()))
    tools = hashlib.sha256(json.dumps(env.toolset.schemas, sort_keys=True).encode())
    tools.update(Path(env.web).expanduser().read_bytes() if env.web else b"")
    digests = {"data": data.hexdigest(), "image": image.hexdigest(), "tools": tools.hexdigest()}
    return {"code": package_digest(), "user_code": _user_code_digest(user_code)} | digests


def _user_code_digest(names: Iterable[str]) -> str:
    paths = []
    for module in sorted({name.partition(":")[0].partition(".")[0] for name in names}):
        if file := getattr(import_for_user(module), "__file__", None):
            paths.append(Path(file).parent if Path(file).name == "__init__.py" else Path(file))
    return hashlib.sha256("".join(_sources_digest(path.parent, [path]) for path in paths).encode()).hexdigest()


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
