"""Task: what is asked, where, and how it is graded.

On disk a task is a Harbor task directory (schema 1.4): `instruction.md`, `task.toml`, `environment/`, `tests/`,
`solution/`; what Harbor has no word for sits in `[metadata.composer_nb]`. Many small tasks travel as one JSON Lines file.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from composer_nb.harness.functions import parse_test_files

WORKSPACE = "environment/workspace"


class Task(BaseModel):
    """One task. Frozen, so that a group's rollouts can share it. Raises ValueError (pydantic's) on anything unfit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    instruction: str
    files: dict[str, str]
    """The workspace at the start: relative POSIX path -> text. Tests that the agent may run and see are among them."""
    tests: dict[str, str]
    """Hidden tests: never in a workspace."""
    solution: dict[str, str] = {}
    """Files that a right answer changes, as they should be."""
    source_scope: tuple[str, ...]
    """Paths whose changes are graded; changes elsewhere are dropped."""
    grader: Literal["functions"] = "functions"
    metadata: dict[str, str] = {}

    @model_validator(mode="after")
    def _fits_together(self) -> Task:
        for path in (*self.files, *self.tests, *self.solution):
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
                raise ValueError(f"task {self.id}: {path!r} is not a plain relative path")
        if hidden := set(self.tests) & set(self.files):
            raise ValueError(f"task {self.id}: hidden tests {sorted(hidden)} also lie in the workspace")
        if outside := set(self.solution) - set(self.source_scope):
            raise ValueError(f"task {self.id}: the solution changes {sorted(outside)}, outside source_scope")
        try:
            parse_test_files(self.tests)
            if self.visible_tests:
                parse_test_files(self.visible_tests)
        except ValueError as error:
            raise ValueError(f"task {self.id}: {error}") from None
        return self

    @property
    def visible_tests(self) -> dict[str, str]:
        """Test files in the workspace, as they were at the start: an agent's edits of them change nothing."""
        return {path: text for path, text in self.files.items() if PurePosixPath(path).name.startswith("test_")}

    def to_harbor(self, path: Path) -> Path:
        """Writes the task as a Harbor directory `path`, which must not exist yet."""
        path.mkdir(parents=True)
        (path / "instruction.md").write_text(self.instruction + "\n", encoding="utf-8")
        for folder, files in ((WORKSPACE, self.files), ("tests", self.tests), ("solution", self.solution)):
            for name, text in files.items():
                target = path / folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
        (path / "task.toml").write_text(_toml(self), encoding="utf-8")
        return path

    @classmethod
    def from_harbor(cls, path: Path) -> Task:
        """Reads a Harbor directory. Raises ValueError that names what is missing or unfit."""
        try:
            settings = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
            instruction = (path / "instruction.md").read_text(encoding="utf-8").removesuffix("\n")
        except FileNotFoundError as error:
            raise ValueError(f"{path}: not a task directory: {Path(error.filename).name} is missing") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path / 'task.toml'}: {error}") from None
        own = settings.get("metadata", {}).get("composer_nb")
        if own is None or "source_scope" not in own:
            raise ValueError(f"{path / 'task.toml'}: [metadata.composer_nb] must name source_scope and grader")
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


def _toml(task: Task) -> str:
    quote = json.dumps  # a JSON string is a TOML basic string
    facts = "".join(f"{quote(key)} = {quote(value)}\n" for key, value in sorted(task.metadata.items()))
    return (
        'schema_version = "1.4"\n\n[agent]\ntimeout_sec = 120.0\n\n[verifier]\ntimeout_sec = 60.0\n'
        'environment_mode = "separate"\n\n[environment]\nnetwork_mode = "no-network"\n\n'
        f"[metadata.composer_nb]\nid = {quote(task.id)}\ngrader = {quote(task.grader)}\n"
        f'runtime = "host-python"\nsource_scope = {quote(list(task.source_scope))}\n'
        f"\n[metadata.composer_nb.facts]\n{facts}"
    )


def _read_tree(root: Path) -> dict[str, str]:
    files = {}
    for path in sorted(root.rglob("*")) if root.is_dir() else []:
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path}: links and devices have no place in a task")
        if path.is_file():
            files[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    return files


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

    Raises ValueError that names the place when there is none or one is unfit, FileNotFoundError when nothing is there.
    """
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        tasks = [_validated(f"{path}:{number}", _json(path, number, line)) for number, line in enumerate(lines, 1)]
    elif (path / "task.toml").is_file():
        tasks = [Task.from_harbor(path)]
    elif path.is_dir():
        tasks = [Task.from_harbor(entry) for entry in sorted(path.iterdir()) if (entry / "task.toml").is_file()]
    else:
        raise FileNotFoundError(f"{path}: no task file or folder here")
    if not tasks:
        raise ValueError(f"{path}: holds no task")
    return tasks


def _json(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{number}: not JSON: {error.msg}") from None
