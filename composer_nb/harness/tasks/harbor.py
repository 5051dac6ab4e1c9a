"""Read and write Harbor task directories (schema 1.4).

    instruction.md  task.toml  environment/  tests/test.sh …  solution/solve.sh …

The fields of a Task represent part of a directory. The rest of a foreign directory is `ForeignFiles` unchanged: unknown keys,
comments, a Dockerfile, binary files, executable bits. Directories written here depend only on the Task, and contain an image
and two scripts with which Harbor itself can run them. As in git, empty folders are not kept.

References: the models of the package `harbor` 0.25.0 (which needs Python 3.12; a test compares this module with them if it is
installed), and its `Verifier`, for the locations of files when a script runs.
"""

from __future__ import annotations

import base64
import errno
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tomlkit
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from composer_nb.harness.tasks.scope import is_test_module
from composer_nb.harness.untrusted import beneath, checked, toml_of, visible

if TYPE_CHECKING:
    from composer_nb.harness.tasks.task import Task

WORKSPACE = "environment/workspace"
PRISTINE = "/composer_nb/workspace"  # Folder of a derived image with the files of its working directory.
RUNTIME = "host-python"
WRITTEN_S = 60.0  # `verifier.timeout_sec` of the directories that this package writes.
NEW_TOML = """\
schema_version = "1.4"
artifacts = ["/workspace"]

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"

[environment]
network_mode = "no-network"

"""
IMAGE_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
FIELDS = {"files": WORKSPACE, "tests": "tests", "solution": "solution"}  # Folder of each field of a Task.


def _stays(path: str) -> str:
    if ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} leads out: '..' has no place in it")
    if "\n" in path or "\0" in path:
        raise ValueError(f"{path!r} is no path: it has a line break")
    return path


Place = Annotated[str, AfterValidator(_stays)]
Name = Annotated[str, AfterValidator(checked)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Grader = Literal["functions", "pytest", "script"]
Strictness = Literal["tests", "twins", "scope", "lints"]
Network = Literal["no-network", "public", "allowlist"] | None
Blob = Annotated[
    bytes,
    BeforeValidator(lambda value: base64.b64decode(value, validate=True) if isinstance(value, str) else value),
    PlainSerializer(lambda value: base64.b64encode(value).decode(), when_used="json"),
]


class _HarborTable(BaseModel):
    """A table of task.toml. Known keys are checked, unknown ones are allowed."""

    model_config = ConfigDict(frozen=True, extra="allow")


class HarborAgent(_HarborTable):
    timeout_sec: Above0 | None = None
    user: str | int | None = None
    network_mode: Network = None


class Verifier(_HarborTable):
    timeout_sec: Above0 = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: Network = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = []


class HarborEnvironment(_HarborTable):
    docker_image: str | None = Field(default=None, pattern=r"^\S+$")
    os: str = "linux"
    cpus: Above0 | None = None
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = Field(default=None, gt=0)
    gpus: int | None = Field(default=None, ge=0)
    build_timeout_sec: Above0 = 600.0
    mcp_servers: list[dict[str, Any]] = []
    healthcheck: dict[str, Any] | None = None
    env: dict[str, str] = {}
    workdir: Place | None = None
    network_mode: Network = None
    allow_internet: bool | None = None


class HarborExtras(BaseModel):
    """[metadata.composer_nb]: fields that Harbor lacks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str | None = None
    grader: Grader | None = None
    runtime: Literal["host-python"] | None = None
    source_scope: list[str] | None = None
    tools: list[str] = []
    strictness: Strictness = "twins"
    facts: dict[str, str] = {}


class Metadata(_HarborTable):
    composer_nb: HarborExtras | None = None


class Package(_HarborTable):
    name: str


class Solution(_HarborTable):
    env: dict[str, str] = {}


class Artifact(_HarborTable):
    source: Place
    exclude: list[str] = []
    service: str | None = None


class TaskFile(_HarborTable):
    """A task.toml."""

    schema_version: str = "1.4"
    task: Package | None = None
    metadata: Metadata = Metadata()
    agent: HarborAgent = HarborAgent()
    verifier: Verifier = Verifier()
    environment: HarborEnvironment = HarborEnvironment()
    solution: Solution = Solution()
    steps: list[dict[str, Any]] = []
    artifacts: list[Artifact | Place] = []

    @property
    def carried(self) -> list[Artifact]:
        """What an agent leaves for its grade outside a workspace: the folder of Harbor's convention, then `artifacts`."""
        named: list[Artifact | str] = ["/logs/artifacts", *self.artifacts]
        return [Artifact(source=entry) if isinstance(entry, str) else entry for entry in named]


class ForeignFiles(BaseModel):
    """The rest of a foreign directory.

    Attributes:
        name: Name of the directory, which is the task's id if its task.toml has none.
        rest: Files outside the fields, by path, and `instruction.md` if it does not end with exactly one newline.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    toml: str
    rest: dict[Name, Blob] = {}
    executable: tuple[Name, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A task directory in memory."""

    files: Mapping[str, bytes]
    executable: frozenset[str]


def read(path: Path) -> Directory:
    """Read a directory. Raises ValueError for links and devices, and if it is not a task directory."""
    files: dict[str, bytes] = {}
    executable = set()
    for entry in sorted(path.rglob("*")):
        if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
            raise ValueError(f"{entry}: links and devices have no place in a task")
        if entry.is_file():
            name = entry.relative_to(path).as_posix()
            files[name] = entry.read_bytes()
            if entry.stat().st_mode & 0o100:
                executable.add(name)
    for name in ("task.toml", "instruction.md"):
        if name not in files:
            raise ValueError(f"{path}: not a task directory: {name} is missing")
    return Directory(files=files, executable=frozenset(executable))


def write(directory: Directory, path: Path) -> Path:
    """Write the directory `path`, whole or not at all. Raises FileExistsError, and UnsafeName, before writing, for a name that
    leads out of it."""
    for name in directory.files:
        checked(name)
    if path.exists():
        raise FileExistsError(errno.EEXIST, "there is something already", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=path.parent) as folder:
        part = Path(folder, path.name)
        part.mkdir()
        for name, data in directory.files.items():
            target = beneath(part, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if name in directory.executable else 0o644)
        return part.rename(path)


@lru_cache(maxsize=1024)
def settings(toml: str, where: str = "task.toml") -> TaskFile:
    """Parse a task.toml. Raises ValueError, which names the line or the key, if it is invalid."""
    try:
        return TaskFile.model_validate(toml_of(toml))
    except ValueError as error:  # also a number of 5,000 digits, a list in a list in a list
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{where}: {why}") from None


def first_problem(error: ValidationError) -> str:
    """Return the first problem of a validation and its place."""
    first = error.errors()[0]
    where = visible(".".join(str(part) for part in first["loc"]))
    message = "must have named fields" if first["type"] == "model_type" else first["msg"].removeprefix("Value error, ")
    return f"{where + ': ' if where else ''}{message}"


def values(directory: Directory, path: Path) -> dict[str, Any]:
    """Return the fields of the Task in `directory`, read from `path`. Raises ValueError, which names the file or key."""
    toml = _text(directory, "task.toml", path)
    table = settings(toml, str(path / "task.toml"))
    extras = table.metadata.composer_nb or HarborExtras()
    grader, scope = _graded(extras)
    if table.steps:
        raise ValueError(f"{path / 'task.toml'}: steps: tasks of several steps are not supported")
    if grader != "script" and not extras.source_scope:
        raise ValueError(f"{path / 'task.toml'}: [metadata.composer_nb] must name source_scope")
    instruction = _text(directory, "instruction.md", path).removesuffix("\n")
    fields: dict[str, dict[str, str]] = {name: {} for name in FIELDS}
    rest: dict[str, bytes] = {}
    if directory.files["instruction.md"] != f"{instruction}\n".encode():
        rest["instruction.md"] = directory.files["instruction.md"]
    for name, data in directory.files.items():
        field = next((field for field, folder in FIELDS.items() if name.startswith(folder + "/")), None)
        if field is not None and not (grader == "script" and field != "files" and decoded(data) is None):
            fields[field][name.removeprefix(FIELDS[field] + "/")] = _text(directory, name, path)
        elif name not in ("task.toml", "instruction.md"):
            rest[name] = data
    if grader != "script":
        _drop_doors(grader, fields, rest)
    foreign = {"name": path.resolve().name, "toml": toml, "rest": rest, "executable": sorted(directory.executable)}
    return fields | {
        "id": _id(table, path.resolve().name),
        "instruction": instruction,
        "source_scope": scope,
        "grader": grader,
        "tools": tuple(extras.tools),
        "strictness": extras.strictness,
        "metadata": dict(extras.facts),
        "kept": foreign,
    }


def layout(task: Task) -> Directory:
    """Return the directory of a task: the one that was read, with later changes, or a new one."""
    fields: list[tuple[str, dict[str, str]]] = [(folder, getattr(task, field)) for field, folder in FIELDS.items()]
    files = {f"{folder}/{name}": text.encode() for folder, texts in fields for name, text in texts.items()}
    files["instruction.md"] = f"{task.instruction}\n".encode()
    if task.kept is not None:
        rest = dict(task.kept.rest)
        if rest.get("instruction.md", b"").decode().removesuffix("\n") != task.instruction:
            rest.pop("instruction.md", None)
        table, toml = settings(task.kept.toml), task.kept.toml
        extras = table.metadata.composer_nb or HarborExtras()
        facts = (_id(table, task.kept.name), *_graded(extras), tuple(extras.tools), extras.strictness, extras.facts)
        if (task.id, task.grader, task.source_scope, task.tools, task.strictness, task.metadata) != facts:
            toml = _with_own(toml, task, extras.runtime)
        files |= rest | {"task.toml": toml.encode()}
        return Directory(files=files, executable=frozenset(task.kept.executable) & set(files))
    files["task.toml"] = _with_own(NEW_TOML, task, RUNTIME).encode()
    executable: set[str] = {"tests/test.sh", "solution/solve.sh"} & set(files)
    for name, text in _doors(task.grader, task.tests, task.solution).items():
        if name not in files and (task.grader != "script" or name.startswith("environment")):
            files[name] = text.encode()
            executable |= {name} - {"environment/Dockerfile"}
    return Directory(files=files, executable=frozenset(executable))


def _doors(grader: str, tests: Mapping[str, str], solution: Mapping[str, str]) -> dict[str, str]:
    """Return the files with which Harbor runs a task of this package's graders: an image, and scripts that run tests and copy the
    solution. The graders themselves do not use them.
    """
    modules = " ".join(shlex.quote(path) for path in sorted(tests) if grader == "functions" or is_test_module(path))
    changed = " ".join(shlex.quote(path) for path in sorted(solution))
    doors = {
        "environment/Dockerfile": "FROM python:3.12-slim\nRUN pip install --no-cache-dir pytest\n"
        "WORKDIR /workspace\nCOPY workspace/ ./\n",
        "tests/test.sh": f"#!/bin/bash\ncp -r /tests/. .\nif python3 -m pytest -q {modules}; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\n",
    }
    if changed:
        doors["solution/solve.sh"] = f'#!/bin/bash\ntarget="$PWD"\ncd /solution && cp --parents {changed} "$target"\n'
    return doors


def _drop_doors(grader: str, fields: dict[str, dict[str, str]], rest: dict[str, bytes]) -> None:
    """Move files equal to those of `_doors` from the fields to the rest."""
    tests, solution = fields["tests"], fields["solution"]
    without = {name: text for name, text in tests.items() if name != "test.sh"}
    changed = {name: text for name, text in solution.items() if name != "solve.sh"}
    for name, text in _doors(grader, without, changed).items():
        folder, _, file = name.partition("/")
        if folder in fields and fields[folder].get(file) == text:
            rest[name] = fields[folder].pop(file).encode()


def _id(table: TaskFile, name: str) -> str:
    extras = table.metadata.composer_nb or HarborExtras()
    return extras.id if extras.id is not None else table.task.name if table.task else name


def _graded(extras: HarborExtras) -> tuple[str, tuple[str, ...]]:
    """Return the grader and the source scope."""
    return extras.grader or ("functions" if extras.source_scope else "script"), tuple(extras.source_scope or ("**",))


def _with_own(toml: str, task: Task, runtime: str | None) -> str:
    """Return a task.toml with this package's table, the rest as it is."""
    extras = {"id": task.id, "grader": task.grader, "runtime": runtime, "source_scope": [*task.source_scope]}
    extras |= {"tools": [*task.tools] or None, "strictness": task.strictness if task.strictness != "twins" else None}
    document = tomlkit.parse(toml)
    metadata = document.setdefault("metadata", tomlkit.table(is_super_table=True))
    metadata["composer_nb"] = {key: value for key, value in extras.items() if value is not None}
    metadata["composer_nb"]["facts"] = dict(sorted(task.metadata.items()))
    return tomlkit.dumps(document)


def decoded(data: bytes) -> str | None:
    """Return data as text; None if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _text(directory: Directory, name: str, path: Path) -> str:
    try:
        return directory.files[name].decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}/{name}: not UTF-8 at byte {error.start}") from None
