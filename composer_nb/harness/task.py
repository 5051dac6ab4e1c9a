"""Task: what is asked, where, and how it is graded.

On disk a task is a Harbor task directory (schema 1.4): `instruction.md`, `task.toml`, `environment/`, `tests/`,
`solution/`; what Harbor has no word for sits in `[metadata.composer_nb]`. Many small tasks travel as one JSON Lines file.
"""

from __future__ import annotations

import ast
import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from composer_nb.harness.functions import is_test, parse_test_files
from composer_nb.harness.grading.scope import in_scope, is_test_module

WORKSPACE = "environment/workspace"
RUNTIME = "host-python"
_OWN_KEYS = {"id", "grader", "runtime", "source_scope", "facts"}


class Task(BaseModel):
    """One task. Frozen, so that a group's rollouts can share it. Raises ValueError (pydantic's) on anything unfit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    instruction: str
    files: dict[str, str]
    """The workspace at the start: relative POSIX path -> text. Tests that the agent may run and see are among them."""
    tests: dict[str, str]
    """Hidden tests: never in a workspace. For the grader `pytest` also what they need besides: helpers, conftests, data."""
    solution: dict[str, str] = {}
    """Files that a right answer changes, as they should be."""
    source_scope: tuple[str, ...]
    """Paths whose changes are graded; changes elsewhere are dropped. For the grader `pytest` also globs (`src/**`)."""
    grader: Literal["functions", "pytest"] = "functions"
    """functions: `functions.py`, whose tests have one plain form. pytest: any pytest modules, `grading/pytest_grader.py`; which
    of their tests count, and how they are made to tell, is found out by `grading.validate` and kept in `metadata`."""
    metadata: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Task:
        for texts in (self.files, self.tests, self.solution, self.metadata, {self.id: self.instruction}):
            try:
                "".join([*texts, *texts.values()]).encode()
            except UnicodeEncodeError:
                raise ValueError(f"task {self.id!a}: holds text that is not Unicode (half a surrogate pair)") from None
        paths = {*self.files, *self.tests, *self.solution, *self.source_scope}
        for path in sorted(paths):
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == "." or "\0" in path:
                raise ValueError(f"task {self.id}: {path!r} is not a plain relative path")
            if folders := [str(parent) for parent in pure.parents if str(parent) in paths]:
                raise ValueError(f"task {self.id}: {folders[0]!r} is a file, so {path!r} can not lie in it")
        if not self.source_scope:
            raise ValueError(f"task {self.id}: source_scope is empty, so no change could be graded")
        if hidden := set(self.tests) & set(self.files) if self.grader == "functions" else set():
            raise ValueError(f"task {self.id}: hidden tests {sorted(hidden)} also lie in the workspace")
        scope = self.source_scope
        inside = in_scope if self.grader == "pytest" else lambda path, scope: path in scope
        if outside := {path for path in self.solution if not inside(path, scope)}:
            raise ValueError(f"task {self.id}: the solution changes {sorted(outside)}, outside source_scope")
        try:
            if self.grader == "pytest":
                _check_modules(self.tests)
            else:
                parse_test_files(self.tests)
                if self.visible_tests:
                    parse_test_files(self.visible_tests)
        except ValueError as error:
            raise ValueError(f"task {self.id}: {error}") from None
        return self

    @property
    def visible_tests(self) -> dict[str, str]:
        """Test files in the workspace, as they were at the start: an agent's edits of them change nothing."""
        return {path: text for path, text in self.files.items() if is_test(path)}

    def to_harbor(self, path: Path) -> Path:
        """Writes the task as a Harbor directory `path`, which must not exist yet."""
        path.mkdir(parents=True)
        for folder, files in ((WORKSPACE, self.files), ("tests", self.tests), ("solution", self.solution)):
            for name, text in files.items():
                target = path / folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(text.encode())  # bytes: line ends stay as they are
        (path / "instruction.md").write_bytes(f"{self.instruction}\n".encode())
        (path / "task.toml").write_bytes(_toml(self).encode())
        return path

    @classmethod
    def from_harbor(cls, path: Path) -> Task:
        """Reads a Harbor directory. Raises ValueError that names what is missing or unfit."""
        for entry in sorted(path.rglob("*")):
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                raise ValueError(f"{entry}: links and devices have no place in a task")
        try:
            settings = tomllib.loads(_read_text(path / "task.toml"))
            instruction = _read_text(path / "instruction.md").removesuffix("\n")
        except FileNotFoundError as error:
            raise ValueError(f"{path}: not a task directory: {Path(error.filename).name} is missing") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path / 'task.toml'}: {error}") from None
        own = _own_table(path / "task.toml", settings)
        return _validated(
            str(path),
            {
                "id": own.get("id", path.name),
                "instruction": instruction,
                "files": _read_tree(path / WORKSPACE),
                "tests": _read_tree(path / "tests"),
                "solution": _read_tree(path / "solution"),
                "source_scope": own["source_scope"],
                "grader": own.get("grader", "functions"),
                "metadata": own.get("facts", {}),
            },
        )


def _check_modules(tests: Mapping[str, str]) -> None:
    """Raises ValueError when there is no test module, or a module is not Python. Nothing is executed."""
    if not any(is_test_module(path) for path in tests):
        raise ValueError("no test module found (test_….py or …_test.py): a task without tests can not be graded")
    for path, text in tests.items():
        if path.endswith(".py"):
            try:
                ast.parse(text)
            except SyntaxError as error:
                raise ValueError(f"{path}:{error.lineno}: not Python: {error.msg}") from None
            except (ValueError, RecursionError, MemoryError) as error:  # null bytes, too deep
                raise ValueError(f"{path}: not Python: {error or type(error).__name__}") from None


def _own_table(where: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    metadata = settings.get("metadata")
    own = metadata.get("composer_nb") if isinstance(metadata, dict) else None
    if not isinstance(own, dict) or "source_scope" not in own:
        raise ValueError(f"{where}: [metadata.composer_nb] must name source_scope and grader")
    if unknown := set(own) - _OWN_KEYS:
        raise ValueError(f"{where}: [metadata.composer_nb] has unknown keys {sorted(unknown)}")
    if own.get("runtime", RUNTIME) != RUNTIME:
        raise ValueError(f"{where}: runtime {own['runtime']!r} is not {RUNTIME!r}, the only one that can be built here")
    return own


def _toml(task: Task) -> str:
    facts = "".join(f"{_quote(key)} = {_quote(value)}\n" for key, value in sorted(task.metadata.items()))
    return (
        'schema_version = "1.4"\n\n[agent]\ntimeout_sec = 120.0\n\n[verifier]\ntimeout_sec = 60.0\n'
        'environment_mode = "separate"\n\n[environment]\nnetwork_mode = "no-network"\n\n'
        f"[metadata.composer_nb]\nid = {_quote(task.id)}\ngrader = {_quote(task.grader)}\n"
        f'runtime = "{RUNTIME}"\nsource_scope = [{", ".join(map(_quote, task.source_scope))}]\n'
        f"\n[metadata.composer_nb.facts]\n{facts}"
    )


def _quote(text: str) -> str:
    """A TOML basic string: a JSON string, but for surrogate pairs and DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # bytes: line ends stay as they are
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None


def _read_tree(root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): _read_text(path) for path in sorted(root.rglob("*")) if path.is_file()}


def _validated(where: str, values: Mapping[str, Any]) -> Task:
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from None


def save_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Writes tasks as JSON Lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text("".join(task.model_dump_json() + "\n" for task in tasks), encoding="utf-8")
    os.replace(temporary, path)


def load_tasks(path: Path) -> list[Task]:
    """Tasks of a JSON Lines file, a Harbor directory, or a folder of Harbor directories.

    Raises ValueError that names the place when there is none, one is unfit or two share an id, FileNotFoundError when
    nothing is there.
    """
    if path.is_file():
        lines = _read_text(path).removesuffix("\n").split("\n")  # JSON may hold what splitlines takes for a line's end
        tasks = [_validated(f"{path}:{number}", _json(path, number, line)) for number, line in enumerate(lines, 1)]
    elif (path / "task.toml").is_file():
        tasks = [Task.from_harbor(path)]
    elif path.is_dir():
        tasks = [Task.from_harbor(entry) for entry in sorted(path.iterdir()) if (entry / "task.toml").is_file()]
    else:
        raise FileNotFoundError(f"{path}: no task file or folder here")
    if not tasks:
        raise ValueError(f"{path}: holds no task")
    ids = Counter(task.id for task in tasks)
    if twice := sorted(name for name, count in ids.items() if count > 1):
        raise ValueError(f"{path}: several tasks are named {twice[0]!r}; figures are kept by id")
    return tasks


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from None
