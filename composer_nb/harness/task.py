"""Task: what is asked, where, and how it is graded.

On disk a task is a Harbor task directory (`harbor.py`); what Harbor has no word for sits in `[metadata.composer_nb]`. Many small
tasks travel as one JSON Lines file.
"""

from __future__ import annotations

import ast
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from composer_nb.harness import harbor
from composer_nb.harness.functions import is_test, parse_test_files
from composer_nb.harness.grading.scope import in_scope, is_test_module

ENTRY, SOLVE = "test.sh", "solve.sh"
"""Of the grader `script`: what runs the tests, and what writes a solution."""


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
    """Files that a right answer changes, as they should be. For the grader `script`: `solve.sh` and its files."""
    source_scope: tuple[str, ...]
    """Paths whose changes are graded; changes elsewhere are dropped. For the grader `pytest` also globs (`src/**`)."""
    grader: Literal["functions", "pytest", "script"] = "functions"
    """functions: `functions.py`, whose tests have one plain form. pytest: any pytest modules, `grading/pytest_grader.py`; which
    of their tests count, and how they are made to tell, is found out by `grading.validate` and kept in `metadata`. script:
    `tests/test.sh` says what it likes, `grading/script_grader.py`: weak, for evaluation."""
    metadata: dict[str, str] = {}
    kept: harbor.Kept | None = None
    """What else its directory held, where somebody else wrote that."""

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
        inside = (lambda path, scope: path in scope) if self.grader == "functions" else in_scope
        solution = () if self.grader == "script" else self.solution
        if outside := {path for path in solution if not inside(path, self.source_scope)}:
            raise ValueError(f"task {self.id}: the solution changes {sorted(outside)}, outside source_scope")
        try:
            if self.grader == "script":
                if ENTRY not in self.tests:
                    raise ValueError(f"tests/{ENTRY} is missing: a task without tests can not be graded")
            elif self.grader == "pytest":
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

    @property
    def image(self) -> bool:
        """Whether it needs an image, of a name or of its Dockerfile; else the sandboxes' own Python does."""
        if self.kept is None or self.grader != "script":
            return False
        told = harbor.settings(self.kept.toml)
        if told.metadata.composer_nb is not None and told.metadata.composer_nb.runtime:
            return False
        files = {f"environment/{name}" for name in harbor.IMAGE_FILES}
        return told.environment.docker_image is not None or not files.isdisjoint(self.kept.rest)

    @property
    def settings(self) -> harbor.Settings:
        """What its task.toml says, of limits and the like."""
        return harbor.settings(harbor.layout(self).files["task.toml"].decode())

    def to_harbor(self, path: Path) -> Path:
        """Writes the task as a Harbor directory `path`, which must not exist yet: byte for byte what it was read from."""
        return harbor.write(harbor.layout(self), path)

    @classmethod
    def from_harbor(cls, path: Path) -> Task:
        """Reads a Harbor directory. Raises ValueError that names what is missing or unfit."""
        held = harbor.read(path)
        task = _validated(str(path), harbor.values(held, path))
        plain = task.model_copy(update={"kept": None})
        return plain if harbor.layout(plain) == held else task

    @classmethod
    def from_swebench(cls, row: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Task:
        """See `swe.from_swebench`."""
        from composer_nb.harness.swe import from_swebench

        return from_swebench(row, files)

    @classmethod
    def from_swesmith(cls, row: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Task:
        """See `swe.from_swesmith`."""
        from composer_nb.harness.swe import from_swesmith

        return from_swesmith(row, files)


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


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # bytes: line ends stay as they are
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None


def _validated(where: str, values: Mapping[str, Any]) -> Task:
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {harbor.first_problem(error)}") from None


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
        text = _read_text(path).removesuffix("\n")
        lines = text.split("\n") if text else []  # JSON may hold what splitlines takes for a line's end
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
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, a list in a list in a list
        raise ValueError(f"{path}:{number}: not JSON that can be read: {error}") from None
