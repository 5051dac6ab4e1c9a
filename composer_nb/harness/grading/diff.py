"""Find what an agent changed, restricted to the task's source scope.

Only contents of regular files come in here; links, devices, modes and times never leave the sandbox (`Sandbox.download`).
Everything outside the scope stays as the task has it. Caches, history and files that set tests up are dropped too, even if a glob
of the scope covers them. A path that the scope names in full passes: the task's author decided so.

Reference for what is dropped: leftover type-check caches and decompiled bytecode (Composer 2.5), answers in the history
(SWE-bench #465), `conftest.py` hooks (SWE-bench #631).
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from composer_nb.harness.tasks.scope import in_scope
from composer_nb.harness.tasks.task import Task
from composer_nb.harness.untrusted import UnsafeName, checked

Drop = Literal["outside_scope", "cache", "test_setup", "too_large", "unsafe_path", "conflict"]

MAX_FILE_BYTES = 1 << 20
MAX_CHANGED_BYTES = 8 << 20
# Names that no sandbox could write would look like a fault of the sandbox, which an agent must not be able to cause.
MAX_CHANGED_FILES = 2000  # Files and the folders that they need.
CACHE_FOLDERS = {
    "__pycache__", ".composer_nb", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox",
}  # fmt: skip
CACHE_ENDINGS = (".pyc", ".pyo")
SETUP_NAMES = {
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
    "sitecustomize.py", "usercustomize.py", "entry_points.txt",
}  # fmt: skip
SETUP_ENDINGS = (".pth", ".egg-link")
SETUP_FOLDERS = {".git", ".hg", ".svn", "site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The task's files with the changes applied, and the changes that are dropped."""

    files: Mapping[str, bytes]
    dropped: Mapping[str, Drop] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        """Reasons for drops, except caches: running any test leaves some."""
        return tuple(sorted(set(self.dropped.values()) - {"cache"}))


def changes(task: Task, files: Mapping[str, bytes], pristine: Mapping[str, bytes] | None = None) -> Changes:
    """Return the changes of `files`, a whole workspace. Deterministic, in order of paths.

    `pristine` is the workspace at the start, if an image adds to the task's own files.
    """
    if pristine is None:
        pristine = {path: text.encode() for path, text in task.files.items()}
    graded = dict(pristine)
    dropped: dict[str, Drop] = {}
    for path in sorted(set(pristine) - set(files)):
        if reason := _unwanted(task, path):
            dropped[path] = reason
        else:
            del graded[path]
    size, places = 0, set[str]()
    for path in sorted(path for path, data in files.items() if pristine.get(path) != data):
        reason = _unwanted(task, path) or ("conflict" if _misfits({*graded, *task.tests} - {path}, path) else None)
        new, needed = size + len(files[path]), places | {path, *map(str, PurePosixPath(path).parents)}
        large = len(files[path]) > MAX_FILE_BYTES or new > MAX_CHANGED_BYTES or len(needed) > MAX_CHANGED_FILES
        if large and not reason:
            reason = "too_large"
        if reason:
            dropped[path] = reason
        else:
            graded[path], size, places = files[path], new, needed
    return Changes(files=graded, dropped=dropped)


def _unwanted(task: Task, path: str) -> Drop | None:
    try:
        pure = PurePosixPath(checked(path))
    except UnsafeName:
        return "unsafe_path"
    if path in task.source_scope:
        return None
    folders = set(pure.parts[:-1])
    cache = folders & CACHE_FOLDERS or pure.parts[0] == "build" or any(f.endswith(".egg-info") for f in pure.parts)
    if path not in task.files and (cache or pure.name.endswith(CACHE_ENDINGS)):
        return "cache"
    if not in_scope(path, task.source_scope):
        return "outside_scope"
    if task.grader == "script":  # its tests are set up by what is beside them
        return None
    setup = pure.name in SETUP_NAMES or pure.name.endswith(SETUP_ENDINGS) or folders & SETUP_FOLDERS
    return "test_setup" if setup or _makes_package(task, path) else None


def _makes_package(task: Task, path: str) -> bool:
    """Return whether a new file makes a package of a folder of hidden tests.

    Their modules then have other names, and a file of the agent's can stand in for one that they import by its old name.
    """
    folder, _, name = path.rpartition("/")
    new = path not in task.files and path not in task.solution and path not in task.tests
    return name == "__init__.py" and bool(folder) and new and any(test.startswith(folder + "/") for test in task.tests)


def _misfits(graded: Set[str], path: str) -> bool:
    """Return whether a file would replace a folder, lie below a file, or take the place of what a hidden test needs."""
    parents = map(str, PurePosixPath(path).parents)
    return not graded.isdisjoint(parents) or any(other.startswith(path + "/") for other in graded)
