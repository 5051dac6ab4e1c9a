"""A task: an instruction, a workspace and a grader.

On disk, a task is a Harbor task directory (`harbor.py`); fields that Harbor lacks are in `[metadata.composer_nb]`. Many small
tasks are stored as one JSON Lines file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from composer_nb.harness.files import write_atomic
from composer_nb.harness.sandbox.requests import CallLimits
from composer_nb.harness.tasks import harbor
from composer_nb.harness.tasks.functions import is_test, parse_module, parse_test_files, parse_tests
from composer_nb.harness.tasks.scope import in_scope, is_test_module
from composer_nb.harness.untrusted import UnsafeName, checked, json_of

ENTRY, SOLVE = "test.sh", "solve.sh"  # Files of the grader `script` that run the tests and write a solution.


RULES, COMMITS = "structure.rules", "git.commits"  # Metadata keys.
LOWERED = {"turns": "max_turns", "tokens": "max_tokens"}  # Limits that a task may lower, and their keys in `metadata`.


class Task(BaseModel):
    """One task, frozen because a group's rollouts share it. Raises ValueError (pydantic's) for invalid fields.

    Attributes:
        files: Initial workspace: text by relative POSIX path. It includes the tests that the agent may see and run.
        tests: Hidden tests, never in a workspace; for the grader `pytest`, also their helpers, conftests and data.
        solution: Changed files of a correct answer; for the grader `script`, `solve.sh` and its files.
        source_scope: Paths whose changes are graded; changes elsewhere are dropped. The grader `pytest` also accepts
            globs (`src/**`).
        grader: functions: tests of one plain form (`functions.py`). pytest: any pytest modules
            (`grading/pytest_grader.py`), with the findings of `grading.validate` in `metadata`. script: `tests/test.sh`
            of a foreign task (`grading/script_grader.py`), which is weak and for evaluation only.
        tools: Names of the run's tools that an agent gets; empty: all.
        strictness: Requirements of a correct answer; each level includes all before it. tests: it passes the hidden
            tests. twins: it passes none of their twins, and its recorded calls agree (grader `pytest`). scope: its
            grade has no flag. lints: its source files have no lint.
        metadata: Facts by name. `max_turns` and `max_tokens` lower the limits of an attempt. `mutants`: the answer is
            tests, which must also pass on `equivalents`. `answers` and `max_answers`: of a simulated user.
        kept: The rest of a foreign task's directory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    instruction: str
    files: dict[str, str]
    tests: dict[str, str]
    solution: dict[str, str] = {}
    source_scope: tuple[str, ...]
    grader: harbor.Grader = "functions"
    tools: tuple[str, ...] = ()
    strictness: harbor.Strictness = "twins"
    metadata: dict[str, str] = {}
    kept: harbor.ForeignFiles | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Task:
        """Raise ValueError for text that is not Unicode, unsafe or clashing paths, and tests that its grader cannot use."""
        for texts in (self.files, self.tests, self.solution, self.metadata, {self.id: self.instruction}):
            try:
                "".join([*texts, *texts.values()]).encode()
            except UnicodeEncodeError:
                raise ValueError(f"task {self.id!a}: holds text that is not Unicode (half a surrogate pair)") from None
        for name in (*LOWERED.values(), "max_answers"):
            if not re.fullmatch("[1-9][0-9]{0,8}", text := self.metadata.get(name, "1")):
                raise ValueError(f"task {self.id}: metadata.{name} must be a whole number above 0, not {text[:40]!r}")
        paths = {*self.files, *self.tests, *self.solution, *self.source_scope}
        for path in sorted(paths):
            try:
                parents = PurePosixPath(checked(path)).parents
            except UnsafeName as error:
                raise ValueError(f"task {self.id}: {error}") from None
            if folders := [str(parent) for parent in parents if str(parent) in paths]:
                raise ValueError(f"task {self.id}: {folders[0]!r} is a file, so {path!r} cannot lie in it")
        if not self.source_scope:
            raise ValueError(f"task {self.id}: source_scope is empty, so no change could be graded")
        if hidden := set(self.tests) & set(self.files) if self.grader == "functions" else set():
            raise ValueError(f"task {self.id}: hidden tests {sorted(hidden)} also lie in the workspace")
        is_inside = (lambda path, scope: path in scope) if self.grader == "functions" else in_scope
        solution = () if self.grader == "script" else self.solution
        if outside := {path for path in solution if not is_inside(path, self.source_scope)}:
            raise ValueError(f"task {self.id}: the solution changes {sorted(outside)}, outside source_scope")
        try:
            _ = self.answers, self.rules, self.commits
            if self.grader == "script":
                if ENTRY not in self.tests:
                    raise ValueError(f"tests/{ENTRY} is missing: a task without tests cannot be graded")
            elif self.grader == "pytest":
                if not any(map(is_test_module, self.tests)):
                    raise ValueError("no test module (test_….py or …_test.py): a task without tests cannot be graded")
                for path, text in self.tests.items():
                    _ = path.endswith(".py") and parse_module(path, text)
                if self.mutants and not (len(self.source_scope) == 1 and is_test_module(self.source_scope[0])):
                    raise ValueError("a task with metadata.mutants has one test module as source_scope")
            else:
                parse_test_files(self.tests)
                test_path = self.source_scope[0]  # the test file that an agent extends
                one_path = len(self.source_scope) == 1
                if self.mutants and not (one_path and parse_tests(test_path, self.files.get(test_path, ""))):
                    raise ValueError("a task with metadata.mutants has one file with a test as source_scope")
                if self.visible_tests:
                    parse_test_files(self.visible_tests)
        except ValueError as error:
            raise ValueError(f"task {self.id}: {error}") from None
        return self

    @property
    def visible_tests(self) -> dict[str, str]:
        """Test files of the initial workspace. An agent's edits of them have no effect outside source_scope."""
        return {path: text for path, text in self.files.items() if is_test(path)}

    @property
    def mutants(self) -> tuple[dict[str, str], ...]:
        """Wrong versions of source files, each of which must fail the agent's tests. Raises ValueError if metadata.mutants is not
        a JSON list of such versions."""
        return self._fact("mutants", _VERSIONS)

    @property
    def equivalents(self) -> tuple[dict[str, str], ...]:
        """Versions of source files that do the same in other words, which the agent's tests must pass (grader `pytest`). Tests
        that read the code's text take them for wrong. Raises ValueError like `mutants`."""
        return self._fact("equivalents", _VERSIONS)

    @property
    def rules(self) -> tuple[tuple[str, str, str], ...]:
        """What the structure of an answer's sources must be (`grading/structure.py`): rule, path and name. Raises ValueError like
        `mutants`."""
        return self._fact(RULES, _RULES)

    @property
    def commits(self) -> tuple[tuple[str, str, dict[str, str]], ...]:
        """The history that its workspace begins with (`history.py`): branch, message and changed files of each commit. Raises
        ValueError like `mutants`."""
        return self._fact(COMMITS, _COMMITS)

    def _fact(self, name: str, adapter: TypeAdapter[Any], default: str = "[]") -> Any:
        try:
            return adapter.validate_json(self.metadata.get(name, default))
        except ValidationError as error:
            raise ValueError(f"metadata.{name}: {harbor.first_problem(error)}") from None

    @property
    def answers(self) -> dict[str, str]:
        """Facts that the request leaves out and a user knows, by the words of questions that they answer. Raises ValueError if
        metadata.answers is not a JSON object of texts."""
        return self._fact("answers", _ANSWERS, default="{}")

    @property
    def image(self) -> bool:
        """Whether the task needs an image, by name or from its Dockerfile."""
        if self.kept is None or self.grader != "script":
            return False
        table = harbor.settings(self.kept.toml)
        if table.metadata.composer_nb and table.metadata.composer_nb.runtime:
            return False
        files = {f"environment/{name}" for name in harbor.IMAGE_FILES}
        return table.environment.docker_image is not None or not files.isdisjoint(self.kept.rest)

    @property
    def settings(self) -> harbor.TaskFile:
        """The settings of its task.toml."""
        return harbor.settings(harbor.layout(self).files["task.toml"].decode(), f"task {self.id}: its task.toml")

    @property
    def call_limits(self) -> CallLimits | None:
        """The limits of calls (grader `functions`), if its task.toml states more than the usual ones."""
        if self.kept is None:
            return None
        usual, environment, seconds = CallLimits(), self.settings.environment, self.settings.verifier.timeout_sec
        if seconds in (harbor.WRITTEN_S, harbor.Verifier().timeout_sec):
            seconds = 0.0  # not stated
        limits = CallLimits(
            cpu_s=max(usual.cpu_s, seconds),
            wall_s=max(usual.wall_s, seconds),
            memory_bytes=max(usual.memory_bytes, (environment.memory_mb or 0) << 20),
            disk_bytes=max(usual.disk_bytes, (environment.storage_mb or 0) << 20),
        )
        return None if limits == usual else limits

    def to_harbor(self, path: Path) -> Path:
        """Write the task as a Harbor directory `path`, which must not exist, byte for byte equal to the one that was read."""
        return harbor.write(harbor.layout(self), path)

    @classmethod
    def from_harbor(cls, path: Path) -> Task:
        """Read a Harbor directory. Raises ValueError, which names the missing or unfit part."""
        directory = harbor.read(path)
        task = _validated(str(path), harbor.values(directory, path))
        plain = task.model_copy(update={"kept": None})
        return plain if harbor.layout(plain) == directory else task

    @classmethod
    def from_swebench(cls, row: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Task:
        """See `swe.from_swebench`."""
        from composer_nb.harness.tasks.swe import from_swebench

        return from_swebench(row, files)

    @classmethod
    def from_swesmith(cls, row: Mapping[str, Any], files: Mapping[str, str] | None = None) -> Task:
        """See `swe.from_swesmith`."""
        from composer_nb.harness.tasks.swe import from_swesmith

        return from_swesmith(row, files)


Rule = Literal["absent", "defined", "undefined", "reduced"]
_RULES: TypeAdapter[tuple[tuple[Rule, str, str], ...]] = TypeAdapter(tuple[tuple[Rule, str, str], ...])
_VERSIONS: TypeAdapter[tuple[dict[harbor.Name, str], ...]] = TypeAdapter(tuple[dict[harbor.Name, str], ...])
Branch = Literal["main", "topic"]
_COMMITS: TypeAdapter[tuple[tuple[Branch, str, dict[harbor.Name, str]], ...]] = TypeAdapter(
    tuple[tuple[Branch, str, dict[harbor.Name, str]], ...]
)
_ANSWERS: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def _validated(where: str, values: Mapping[str, Any]) -> Task:
    try:
        return Task.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {harbor.first_problem(error)}") from None


def save_tasks(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks as JSON Lines, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(task.model_dump_json() + "\n" for task in tasks))


def load_tasks(path: Path) -> list[Task]:
    """Load tasks from a JSON Lines file, a folder with `tasks.jsonl`, a Harbor directory, or a folder of such directories.

    Raises ValueError, which names the place, if there is no task, one is unfit or two share an id, and FileNotFoundError.
    """
    tasks: list[Task] = []
    for _, entry in read_tasks(path):
        if isinstance(entry, ValueError):
            raise entry
        tasks.append(entry)
    if not tasks:
        raise ValueError(f"{path}: holds no task")
    ids = Counter(task.id for task in tasks)
    if twice := sorted(name for name, count in ids.items() if count > 1):
        raise ValueError(f"{path}: several tasks are named {twice[0]!r}; figures are kept by id")
    return tasks


def read_tasks(path: Path) -> Iterator[tuple[str, Task | ValueError]]:
    """Yield the name of each place with a task, and the task or its error. Raises FileNotFoundError, and ValueError for a file
    that cannot be read."""
    readers: Iterable[tuple[str, Callable[[], Task]]]
    if (path / "tasks.jsonl").is_file():  # output of `tasks make`
        path = path / "tasks.jsonl"
    if path.is_file():
        try:
            jsonl = path.read_bytes().decode().removesuffix("\n")  # bytes: line ends stay as they are
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
        lines = jsonl.split("\n") if jsonl else []  # JSON may hold what splitlines takes for a line's end
        places = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1))
        readers = ((source, partial(_json_task, source, line)) for source, line in places)
    elif (path / "task.toml").is_file():
        readers = [(str(path), partial(Task.from_harbor, path))]
    elif path.is_dir():
        folders = [entry for entry in sorted(path.iterdir()) if (entry / "task.toml").is_file()]
        readers = [(folder.name, partial(Task.from_harbor, folder)) for folder in folders]
    else:
        raise FileNotFoundError(f"{path}: no task file or folder here")
    for source, read_one in readers:
        try:
            yield source, read_one()
        except ValueError as error:
            yield source, error


def _json_task(where: str, line: str) -> Task:
    try:
        values = json_of(line)
    except ValueError as error:  # also a number of 5,000 digits, a list in a list in a list
        raise ValueError(f"{where}: not JSON: {getattr(error, 'msg', error)}") from None
    return _validated(where, values)
