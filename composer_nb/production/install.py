"""Make the commands of a repository work: goals, tries, and a check from the start.

Of the commands that should work in a checkout, `goals` lists at most GOALS: imports of its packages, the collection of its tests,
and its test modules one by one. An installer sees TARGETS of those that fail and changes what it likes: it writes files that are
missing, imitates a service, or brings packages. Then a new sandbox gets the result, and the targets run again. After TRIES
without success the repository is discarded. The installer never sees the other goals, which tell how much else works.

Source: "Bootstrapping Composer with autoinstall" (cursor.com/blog, 6 May 2026). There, an agent proposes the goals, too.

OUT/repository/    the checkout with what was written, without .gitignore, which would hide what builds write
OUT/packages/      what was brought, for `--packages` of other commands
OUT/try-N/         the work of an agent
OUT/install.json   goals, tries with outputs, and the verdict, which is empty until there is one
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import Distribution, distributions
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox.contract import WORKSPACE, Backend, Sandbox
from composer_nb.harness.sandbox.errors import SandboxDied
from composer_nb.harness.sandbox.toolchain import MODULES, PLACE, TESTING
from composer_nb.harness.tasks.making.repository import Repository, read_repository
from composer_nb.harness.tasks.runtime import MAX_PACKAGES_BYTES, PACKAGES_AT, read_packages
from composer_nb.harness.tools.terminal import tested
from composer_nb.harness.untrusted import beneath, is_plain
from composer_nb.production.agents import run_agent
from composer_nb.production.checkout import Checkout, read_checkout
from composer_nb.production.policies import equipment

GOALS, TARGETS, TRIES = 10, 3, 5
GOAL_S = 120.0  # CPU time limit of a goal.
OUTPUT_BYTES = 16_000  # What is kept of a goal's output.
SHOWN_CHARACTERS = 2000  # Of an output that an agent sees.
REQUEST = """These commands should succeed in this repository, and they fail. Make them succeed. There is no network. Write files
that a build would write, and stand-ins for packages and services that are missing. Changes to test modules are undone.

"""
VERSION_FILES = ("_version", "version", "__version__", "_version_info", "__about__")  # That builds write.


@dataclass(frozen=True, slots=True, kw_only=True)
class GoalResult:
    """The result of a command that should work. `output` has both streams, cut in the middle."""

    command: str
    passed: bool
    output: str


# Changes the checkout and the packages in a folder, having seen the results of targets that fail. Returns what it did, in words;
# nothing if it knows no more.
Installer = Callable[[Path, Sequence[GoalResult]], list[str]]


def goals(repository: Repository) -> list[str]:
    """Return commands that should succeed in a checkout, at most GOALS: test modules are taken evenly from all."""
    importable = [name for name in sorted(own_packages(repository)) if name.isidentifier()]
    imports = [f"python3 -c 'import {name}'" for name in importable[:2]]
    room = GOALS - len(imports) - 1
    step = max(1, -(-len(repository.tests) // room))
    pytest = "python3 -m pytest -q -p no:cacheprovider -o addopts="  # `tasks make` reads a project's own from its files
    modules = [f"{pytest} {shlex.quote(path)}" for path in repository.tests[::step]]
    return [*imports, f"{pytest} --collect-only", *modules]


def own_packages(repository: Repository) -> dict[str, str]:
    """Return the folder that each top-level package of a repository lies in."""
    folders = {path.rpartition("/")[0] for path in repository.sources if path.endswith("/__init__.py")}
    tops = {folder for folder in folders if folder.rpartition("/")[0] not in folders}
    return {top.rpartition("/")[2]: top.rpartition("/")[0] for top in tops}


def run_goals(out: Path, backend: Backend, commands: Sequence[str]) -> list[GoalResult]:
    """Run commands in a new sandbox with the checkout and packages in `out`. Raises SandboxFailure."""
    packages = read_packages.__wrapped__(out / "packages")  # a folder that changes is not to be cached
    roots = sorted({f"{WORKSPACE}/{folder}" for folder in own_packages(read_repository(out / "repository")).values()})
    variables = {"PYTHONPATH": ":".join([*roots, PACKAGES_AT, f"{PLACE}/{TESTING}"])}
    checkout, results = read_checkout(out / "repository"), list[GoalResult]()
    while len(results) < len(commands):
        with checkout.start(backend, packages=packages) as box:
            try:
                for command in commands[len(results) :]:
                    results.append(_result(box, command, variables))
            except SandboxDied as error:
                results.append(GoalResult(command=commands[len(results)], passed=False, output=str(error)))
    return results


def _result(box: Sandbox, command: str, variables: dict[str, str]) -> GoalResult:
    words = ["sh", "-c", command]
    result = box.exec(words, env=variables, timeout_s=GOAL_S, granted=True, output_bytes=OUTPUT_BYTES)
    stdout, stderr = (stream.decode("utf-8", "replace") for stream in (result.stdout, result.stderr))
    # A module whose tests are all skipped does not work.
    has_tests = not shlex.split(command)[-1].endswith(".py") or tested(stdout).get("tests_passed")
    return GoalResult(command=command, passed=bool(result.exit_code == 0 and has_tests), output=stdout + stderr)


def install(
    path: Path, out: Path, backend: Backend, installer: Installer, report: Callable[[str, str], None]
) -> dict[str, Any]:
    """Make the commands of the checkout at `path` work, and keep the result in the new folder `out`, or in that of an interrupted
    call, whose tries count. Return what is in install.json.

    Raises FileNotFoundError and ValueError for an unfit repository, FileExistsError for another folder that exists,
    SandboxFailure.
    """
    source, repository, record = read_checkout(path), read_repository(path), out / "install.json"
    summary: dict[str, Any] = json.loads(record.read_text("utf-8")) if record.is_file() else {}
    if out.exists() and summary.get("verdict") != "":
        raise FileExistsError(f"{out}: exists already; give --out a new folder")
    is_resumed = bool(summary)
    if not is_resumed:
        report("running the goals", "")
        before = _begin(source, out, backend)
        summary = {"repository": path.resolve().name, "verdict": "", "before": [*map(asdict, before)], "tries": []}
        write_json(record, summary)
    before, tries = [GoalResult(**row) for row in summary["before"]], summary["tries"]
    targets = [result.command for result in before if not result.passed][:TARGETS]
    # A try that was cut off may have left changes.
    latest = _try(source, repository, out, backend, targets) if is_resumed else before
    while (failed := [result for result in latest if not result.passed][:TARGETS]) and len(tries) < TRIES:
        report(f"try {len(tries) + 1} of {TRIES}", f"{len(failed)} of {len(targets)} targets fail")
        if not (changes := installer(out, failed)):
            break
        latest = _try(source, repository, out, backend, targets)
        tries.append({"changes": changes, "results": [*map(asdict, latest)]})
        write_json(record, summary)
    after = run_goals(out, backend, [result.command for result in before]) if tries or is_resumed else before
    summary |= {
        "verdict": "discarded" if failed else "kept",
        "goals": len(before),
        "passed_before": sum(result.passed for result in before),
        "passed_after": sum(result.passed for result in after),
        "targets": targets,
        "after": [*map(asdict, after)],
    }
    write_json(record, summary)
    return summary


def _begin(source: Checkout, out: Path, backend: Backend) -> list[GoalResult]:
    """Copy a checkout into the new folder `out`, and return the results of its goals. An error leaves no folder."""
    try:
        (out / "packages").mkdir(parents=True)
        (out / "repository" / ".git").mkdir(parents=True)  # ends the search for ignore files of a repository around it
        for name in source.files:
            if PurePosixPath(name).name != ".gitignore":
                _copy(source, name, out)
        return run_goals(out, backend, goals(read_repository(out / "repository")))
    except BaseException:
        shutil.rmtree(out)
        raise


def _try(
    source: Checkout, repository: Repository, out: Path, backend: Backend, targets: Sequence[str]
) -> list[GoalResult]:
    """Return the results of the targets, with the test modules as they were: an installer may not make tests easier."""
    for test in {*repository.tests} & {*source.files}:
        _copy(source, test, out)
    return run_goals(out, backend, targets)


def _copy(source: Checkout, name: str, out: Path) -> None:
    """Write a file of a checkout, in place of whatever an installer has put there."""
    root = out / "repository"
    path = beneath(root, name)
    for entry in (path, *takewhile(lambda folder: folder != root, path.parents)):
        if entry.is_symlink() or entry.is_file():
            entry.unlink()
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source.files[name])
    path.chmod(0o755 if name in source.executable else 0o644)


def agent_installer(policy: str, backend: str, seconds: float) -> Installer:
    """Return an installer that has an agent work on the checkout. `seconds` limits each try."""

    def run(out: Path, failed: Sequence[GoalResult]) -> list[str]:
        number = len([*out.glob("try-*")]) + 1
        parts = [f"$ {result.command}\n{result.output[-SHOWN_CHARACTERS:]}" for result in failed]
        limits = replace(equipment(policy)[1], seconds=seconds)
        options: dict[str, Any] = {"backend": backend, "limits": limits}
        request, work_folder = REQUEST + "\n\n".join(parts), beneath(out, f"try-{number}")
        work = run_agent(out / "repository", request, policy, work_folder, **options)
        if work.changes:
            work.accept()
        return [f"{'removed' if blob is None else 'wrote'} {name}" for name, blob in work.changes.items()]

    return run


class ScriptedInstaller:
    """Knows the usual reasons: packages and pytest plugins that are not there, a version that a build writes, and metadata of a
    project that is not installed.

    `folder` holds installed packages that may be brought; None: those of this Python.
    """

    def __init__(self, folder: Path | None = None) -> None:
        search = [str(folder)] if folder else sys.path
        # A library that is imported by then may have replaced the classes behind `distributions`: theirs raise for `dist.name`.
        named = [dist for dist in distributions(path=search) if "Name" in dist.metadata]
        self._available = {_plain(dist.name): dist for dist in named}

    def __call__(self, out: Path, failed: Sequence[GoalResult]) -> list[str]:
        folders = own_packages(read_repository(out / "repository"))
        output = "\n".join(result.output for result in failed)
        changes = list[str]()
        for module in dict.fromkeys(re.findall(r"No module named '(\w{1,99}(?:\.\w{1,99}){0,9})'", output)):
            top, _, rest = module.partition(".")
            if top not in folders:
                changes += self._bring(out, (dist for dist in self._available.values() if top in _modules(dist)))
            elif rest.rpartition(".")[2] in VERSION_FILES:
                path = Path(out / "repository", folders[top], *module.split(".")).with_suffix(".py")
                version = self._fact(out, "version") or "0.0"
                parts = tuple(int(part) for part in re.findall(r"\d+", version))
                if path.parent.is_dir() and not path.exists():
                    text = f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = {parts}\n"
                    path.write_text(text)
                    changes.append(f"wrote {path.relative_to(out / 'repository')}")
        names = {*map(_plain, folders), _plain(self._fact(out, "name"))}
        for project in dict.fromkeys(re.findall(r"No package metadata was found for ([\w.-]{0,100}\w)", output)):
            if _plain(project) not in names:
                changes += self._bring(out, filter(None, [self._available.get(_plain(project))]))
                continue
            version, shipped = self._fact(out, "version") or "0.0", out / "repository" / "PKG-INFO"
            folder = beneath(out / "packages", f"{_plain(project).replace('-', '_')}-{version}.dist-info")
            folder.mkdir(exist_ok=True)
            text = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
            (folder / "METADATA").write_text(shipped.read_text("utf-8", "replace") if shipped.is_file() else text)
            changes.append(f"wrote {folder.name}")
        for name in dict.fromkeys(re.findall(r"fixture '(\w+)' not found", output)):
            plugins = (dist for dist in self._available.values() if _is_plugin_with(dist, rf"^(def )?{name}\s*[(=]"))
            changes += self._bring(out, plugins)
        return changes

    def _fact(self, out: Path, key: str) -> str:
        """Return the project's `name` or `version` as its own files state it; empty if they do not."""
        pattern = re.compile(rf"^{key}\s*[:=]\s*[\"']?(\w[\w.+-]{{0,99}})", re.MULTILINE | re.IGNORECASE)
        for name in ("PKG-INFO", "pyproject.toml", "setup.cfg"):
            path = out / "repository" / name
            if path.is_file() and (match := pattern.search(path.read_text("utf-8", "replace"))):
                return match[1]
        return ""

    def _bring(self, out: Path, dists: Iterable[Distribution]) -> list[str]:
        """Copy the first of these packages, with what it requires, as far as there is room for it in sandboxes. Return what was
        not there before."""
        target, changes, queue = out / "packages", list[str](), [*dists][:1]
        for dist in queue:  # grows
            sources = {str(file): Path(str(dist.locate_file(file))) for file in dist.files or [] if is_plain(str(file))}
            regular = {name for name, path in sources.items() if path.is_file() and not path.is_symlink()}
            names = [name for name in regular if not name.endswith(".pyc")]
            fresh = {name: sources[name] for name in names if not beneath(target, name).exists()}
            present = sum(path.lstat().st_size for path in target.rglob("*"))
            is_small = present + sum(path.stat().st_size for path in fresh.values()) <= MAX_PACKAGES_BYTES
            if not fresh or not is_small or _plain(dist.name) in MODULES:
                continue
            for name, path in fresh.items():
                copy = beneath(target, name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
            changes.append(f"brought {dist.name} {dist.version}")
            queue += [self._available[name] for name in _required(dist) if name in self._available]
        return changes


def _required(dist: Distribution) -> list[str]:
    """Return the names of what a distribution requires here, without extras. Old forms of requirements are left out."""
    names = []
    for text in dist.requires or []:
        with suppress(InvalidRequirement):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(_plain(requirement.name))
    return names


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _modules(dist: Distribution) -> set[str]:
    """Return the top-level modules and packages of a distribution."""
    return {file.parts[0].removesuffix(".py") for file in dist.files or [] if file.suffix == ".py"}


def _is_plugin_with(dist: Distribution, pattern: str) -> bool:
    """Return whether a distribution is a plugin of pytest with a line of this pattern in its source."""
    if not any(entry.group == "pytest11" for entry in dist.entry_points):
        return False
    sources = [Path(str(dist.locate_file(file))) for file in dist.files or [] if file.suffix == ".py"]
    texts = (path.read_text("utf-8", "replace") for path in sources if path.is_file())
    return any(re.search(pattern, text, re.MULTILINE) for text in texts)
