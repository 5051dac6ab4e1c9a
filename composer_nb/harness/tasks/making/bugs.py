"""Tasks from real bugs: fixes that the package tests4py holds, reversed in releases of their projects.

tests4py (1.0.0, MIT) describes 507 fixes of 21 Python projects, most of them from BugsInPy (Widyasari et al., FSE 2020): each is
a patch with ten tests that fail without it and ten that pass. tests4py takes a project's code from git; here it is the wheel of a
release that has the fix. With the fix reversed it is the workspace; the reversed part is the solution. The request is the first
failing test, without comments. Wheels are unpacked, and run in sandboxes only.

A recipe (`real_bugs.json`) names for each bug the release and its digest, or why there is no task, and for each project the
packages that its code imports. `scripts/data/find_bugs.py` writes it.
"""

import ast
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.harbor import first_problem
from composer_nb.harness.tasks.making.make import TASKS, Report
from composer_nb.harness.tasks.making.mine import MAX_REQUEST, Candidate, try_candidates
from composer_nb.harness.tasks.making.options import RunOptions
from composer_nb.harness.tasks.making.repository import of_files, unwanted
from composer_nb.harness.tasks.patch import apply_patch
from composer_nb.harness.tasks.task import Task, load_tasks, save_tasks

RECIPE = Path(__file__).with_name("real_bugs.json")
VERSION = "1.0.0"
FIX, TESTS = "fix.patch", "unittests.py"  # What is read of a bug of tests4py.
SHA256 = "7246aede02a5c0f1ec3ba5acb20b64c39fd387e749fc614cb71cb0b6ff940b77"  # Of these of all bugs, in order of paths.
TEST = "test_bug.py"
SUITE_S = 60.0
MAX_LINES = 400


class Bug(BaseModel):
    """A bug of a recipe: the release in which its fix is reversed and the SHA-256 of the wheel, or why it makes no task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    release: str = ""
    sha256: str = ""
    refused: str = ""


class Project(BaseModel):
    """A project of a recipe: its name in the package index, the packages that its code imports (`NAME==VERSION`), and its bugs by
    their number in tests4py."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    distribution: str
    packages: tuple[str, ...] = ()
    bugs: Mapping[int, Bug] = {}


def read_recipe() -> dict[str, Project]:
    """Return the projects of the recipe by their name in tests4py. Raises ValueError for an unfit one."""
    rows = json.loads(RECIPE.read_text(encoding="utf-8"))
    try:
        return {name: Project.model_validate(row) for name, row in rows.items()}
    except ValidationError as error:
        raise ValueError(f"{RECIPE}: {first_problem(error)}") from None


def make_bugs(out: Path, backend: Backend, recipe: Mapping[str, Project], report: Report) -> dict[str, Any]:
    """Write the tasks of a recipe into `out`. The same call continues where it was interrupted.

    Everything is downloaded before the first bug is tried. Returns `tasks`, the number of all in `out` (those of other projects
    that were made there before stay), and by project its summary as `mine` gives it.

    Raises ValueError without tests4py, and for a wheel that is missing or changed, OSError for a folder that cannot be written,
    and SandboxFailure.
    """
    bugs_folder, wheels, tasks = resources(), out / "wheels", list[Task]()
    out.mkdir(parents=True, exist_ok=True)
    packages: dict[str, Path | None] = {}
    for name, project in recipe.items():
        report("downloading", name)
        packages[name] = install(project.packages, out / "packages")
        for bug in project.bugs.values():
            if bug.release:
                report("downloading", f"{name} {bug.release}")
                fetch(project.distribution, bug, wheels)
    projects: dict[str, Any] = {}
    for name, project in recipe.items():
        running, limit = RunOptions(suite_s=SUITE_S, packages=packages[name]), len(project.bugs)
        candidates, origin = draft_bugs(name, project, bugs_folder, wheels), f"{VERSION} {project.model_dump_json()}"
        projects[name] = try_candidates(
            name, candidates, origin, out / name, backend, running, limit, MAX_LINES, report
        )
        tasks = [task for file in sorted(out.glob(f"*/{TASKS}")) for task in load_tasks(file.parent)]
        if tasks:
            save_tasks(tasks, out / TASKS)
    return {"tasks": len(tasks), "projects": projects}


def resources() -> Path:
    """Return the folder with tests4py's bugs, whose code is never imported. Raises ValueError if it is missing or changed."""
    try:
        package = distribution("tests4py")
    except PackageNotFoundError:
        raise ValueError("tasks bugs needs the data of tests4py: pip install -e '.[bugs]'") from None
    folder = Path(str(package.locate_file("tests4py/projects/resources")))
    files = sorted(file for file in folder.glob("*/bug_*/*") if file.name in (FIX, TESTS))
    if hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() != SHA256:
        raise ValueError(f"{folder}: of tests4py {package.version}, or changed; reinstall tests4py=={VERSION}")
    return folder


def install(packages: Sequence[str], root: Path) -> Path | None:
    """Install packages from wheels into a folder of `root`, without running their code; None without packages. Raises
    ValueError."""
    folder = root / hashlib.sha256(" ".join(packages).encode()).hexdigest()[:16]
    if packages and not folder.is_dir():
        part = folder.with_name(f"{folder.name}.part")
        _pip("install", "--no-compile", "--no-deps", "--upgrade", "--target", str(part), *packages)
        part.rename(folder)
    return folder if packages else None


def fetch(project: str, bug: Bug, folder: Path) -> Path:
    """Return the wheel of a release, which is downloaded unless `folder` has it. Raises ValueError if there is none, or its
    digest is not that of the recipe."""
    release = folder / f"{project}-{bug.release}"
    if not any(release.glob("*.whl")):
        requirement = f"{project}=={bug.release}"
        _pip("download", "--no-deps", "--ignore-requires-python", "--dest", str(release), requirement)
    wheel = next(release.glob("*.whl"))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if bug.sha256 not in ("", digest):
        raise ValueError(f"{wheel}: its SHA-256 is {digest}, and the recipe's {bug.sha256}; to get it anew, remove it")
    return wheel


def _pip(command: str, *options: str) -> None:
    words = [sys.executable, "-m", "pip", command, "--quiet", "--only-binary", ":all:", *options]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise ValueError(f"pip {command} {options[-1]}: {errors[-1][:300]}")


def draft_bugs(name: str, project: Project, bugs_folder: Path, wheels: Path) -> Iterator[Candidate]:
    """Yield the bugs of a project as candidates. One without a task says why in `unfit`."""
    for number, bug in project.bugs.items():
        try:
            if bug.refused:
                raise ValueError(bug.refused)
            wheel = fetch(project.distribution, bug, wheels)
            yield draft_bug(name, number, wheel, bugs_folder)
        except ValueError as error:
            yield Candidate(id=f"{name}-{number}", unfit=f"refused: {error}")


def draft_bug(name: str, number: int, wheel: Path, bugs_folder: Path) -> Candidate:
    """Return the candidate of a bug: a release, and the release without the part of the fix that lies in it. Raises ValueError if
    the fix cannot be reversed there, or there is no request."""
    patch, tests = (
        (bugs_folder / name / f"bug_{number}" / file).read_text(encoding="utf-8", errors="replace")
        for file in (FIX, TESTS)
    )
    after = of_files(name, [*_files_of(wheel), (TEST, tests.encode())], wheel)
    sections = re.findall(r"(?ms)^(diff --git a/(\S+) .*?)(?=^diff --git |\Z)", patch)
    inside = "".join(text for text, path in sections if path in after.files)
    files = {path: text for path, text in after.files.items() if path != TEST}
    unfixed = files | apply_patch(files, inside, "--reverse", "-C1")
    before = replace(after, files={path: text for path, text in unfixed.items() if text is not None})
    return Candidate(id=f"{name}-{number}", before=before, after=after, request=request_for(tests))


def _files_of(wheel: Path) -> Iterator[tuple[str, bytes | str]]:
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                yield entry.filename, unwanted(entry.filename) or archive.read(entry)


def request_for(tests: str) -> str:
    """Return a request with the first failing test of a bug. Raises ValueError without one, or if it is long."""
    tree = ast.parse(tests)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    failing = classes["TestsFailing"].body if "TestsFailing" in classes else []
    methods = [node for node in failing if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    failing[:] = [node for node in failing if node not in methods[1:]]
    tree.body = [node for node in tree.body if node is not classes.get("TestsPassing")]
    request = f"This test fails, and it should pass:\n\n```python\n{ast.unparse(tree)}\n```"
    if not methods or len(request) > MAX_REQUEST:
        raise ValueError("no failing test that a request could show")
    return request
