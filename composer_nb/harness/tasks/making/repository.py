"""Reading a repository: the files that its tasks are made of, as text, without what would give answers away.

A repository is a folder, such as a git checkout or an unpacked source distribution. Nothing of it is executed or shown to git,
whose settings in a hostile checkout can name programs to start. Left out are links, history, caches, bytecode, build folders,
metadata of installed copies, and what is no UTF-8 text or is too large; `left_out` says why.

References: answers in `git log --all` (SWE-bench #465), in type-check caches and bytecode (Composer 2.5).
"""

import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

from composer_nb.harness.grading.diff import CACHE_ENDINGS, CACHE_FOLDERS
from composer_nb.harness.tasks.harbor import decoded
from composer_nb.harness.tasks.scope import in_scope, is_conftest, is_test_module
from composer_nb.harness.untrusted import HISTORY, read_file, walk

MAX_FILE_BYTES = 1 << 20
MAX_BYTES = 16 << 20
MAX_FILES = 4000
BUILT = {
    "dist", "wheelhouse", "htmlcov", "node_modules", "site-packages", "dist-packages", "venv", ".venv", "env", ".eggs",
}  # fmt: skip
EDITORS = {".idea", ".vscode", ".github", ".gitlab", ".circleci"}
LEFTOVERS = (".so", ".pyd", ".orig", ".rej", ".bak", ".patch", ".diff", ".whl", ".egg", "~")
TEST_FOLDERS = {"test", "tests", "testing"}
NO_SOURCE = {"setup.py", "noxfile.py", "tasks.py", "fabfile.py"}
NO_SOURCE_FOLDERS = {"doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts", "tools"}


class RepositoryTooLarge(ValueError):
    """A repository has more files or text than its tasks may hold."""


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository's text files, without history, caches and copies.

    Attributes:
        files: Relative POSIX path -> text, tests included.
        settings: Metadata that each of its tasks has: how its tests run.
        left_out: Files and folders that are no part of its tasks -> why.
    """

    name: str
    files: dict[str, str]
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    @cached_property
    def tests(self) -> tuple[str, ...]:
        """Test modules."""
        return tuple(path for path in self.files if is_test_module(path))

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Python files that are neither tests nor there to support them, nor to build, document or show the package."""
        return tuple(path for path in self.files if path.endswith(".py") and _is_source(path))

    @cached_property
    def scope(self) -> tuple[str, ...]:
        """The paths that an answer may change: top-level folders with sources, and top-level modules."""
        tops = {path.split("/")[0] for path in self.sources}
        return tuple(sorted(top if top.endswith(".py") else f"{top}/**" for top in tops))

    @cached_property
    def hidden(self) -> dict[str, str]:
        """Hidden files of a grade: test modules, and their support if an answer could change it."""
        support = {path for path in self.files if supports_tests(path) and in_scope(path, self.scope)}
        paths = support | set(self.tests)
        return {path: text for path, text in self.files.items() if path in paths}


def _is_source(path: str) -> bool:
    pure = PurePosixPath(path)
    folders = set(pure.parts[:-1])
    no_source = is_test_module(path) or is_conftest(path) or (len(pure.parts) == 1 and pure.name in NO_SOURCE)
    return not (no_source or folders & TEST_FOLDERS or set(pure.parts[:1]) & NO_SOURCE_FOLDERS)


def supports_tests(path: str) -> bool:
    """Return whether a file lies in a folder of tests."""
    return bool(set(PurePosixPath(path).parts[:-1]) & TEST_FOLDERS)


def unwanted(path: str) -> str:
    """Return why a file or folder of this path is no part of a task: history, built or cached files, metadata of an installed
    copy, and what belongs to an editor, a service or a patch. Empty if it is one."""
    name, folders = PurePosixPath(path).name, set(PurePosixPath(path).parts)
    if folders & HISTORY:
        return "history"
    if folders & CACHE_FOLDERS or name.endswith(CACHE_ENDINGS):
        return "a cache"
    if folders & BUILT or f"{path}/".startswith("build/"):
        return "built"
    if any(part.endswith((".egg-info", ".dist-info")) for part in folders) or name == "PKG-INFO":
        return "metadata of an installed copy"
    if folders & EDITORS:
        return "of an editor or a service"
    return "a leftover" if name.endswith(LEFTOVERS) else ""


def unreadable(data: bytes) -> str:
    """Return why the content of a file cannot be part of a task. Empty if it can."""
    if len(data) > MAX_FILE_BYTES:
        return f"more than {MAX_FILE_BYTES >> 20} MiB"
    if b"\0" in data:
        return "no text"
    if decoded(data) is None:
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        except SyntaxError:  # declares none, or one that does not exist
            encoding = "another encoding"
        return f"in {encoding}, not in UTF-8"
    return ""


def read_repository(path: Path) -> Repository:
    """Read a folder. Raises FileNotFoundError, and ValueError if it has no tests or is too large."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no repository here; give a folder or a git checkout")
    if not path.is_dir():
        raise ValueError(f"{path}: not a folder; unpack an archive first")
    return of_files(path.resolve().name, _of_folder(path), path)


def of_files(name: str, entries: Iterable[tuple[str, bytes | str]], path: Path) -> Repository:
    """Return the repository of these files, as far as they are text. An entry of text is no file: it says why it is left out.
    `path` names the repository in errors.

    Raises RepositoryTooLarge above MAX_FILES or MAX_BYTES, and ValueError without tests or without source."""
    files: dict[str, str] = {}
    left_out: dict[str, str] = {}
    total = 0
    for file, data in entries:
        if reason := data if isinstance(data, str) else unreadable(data):
            left_out[file] = reason
            continue
        assert isinstance(data, bytes)
        files[file] = data.decode()
        total += len(data)
        if total > MAX_BYTES or len(files) > MAX_FILES:
            most = f"{MAX_FILES} files or {MAX_BYTES >> 20} MiB"
            raise RepositoryTooLarge(f"{path}: more than {most}; name the package's folder")
    repository = Repository(name=name, files=dict(sorted(files.items())), left_out=dict(sorted(left_out.items())))
    code = [f"{file}: {reason}" for file, reason in repository.left_out.items() if file.endswith(".py")]
    hint = f"; left out: {', '.join(code[:3])}{', …' * (len(code) > 3)}" if code else ""
    if not repository.tests:
        raise ValueError(f"{path}: no test module (test_….py or …_test.py); some source distributions ship none{hint}")
    if not repository.sources:
        raise ValueError(f"{path}: no Python source besides tests{hint}")
    return repository


def _of_folder(root: Path) -> Iterator[tuple[str, bytes | str]]:
    """Yield the path and content of each regular file that is wanted, and the path of everything else with why it is not."""
    for path, reason in walk(root, unwanted):
        yield path, reason or read_file(root / path, MAX_FILE_BYTES + 1)
