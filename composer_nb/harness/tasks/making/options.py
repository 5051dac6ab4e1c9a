"""Read how a project's suite runs, from its pytest configuration and the caller, as far as a grade can follow.

The configuration is read as text, never by pytest, from the file that pytest would choose. Selection (`-m`, `-k`, `--deselect`,
`--ignore`, `--ignore-glob`, `testpaths`) decides once which tests there are. Other settings go into the ini file of every run.

Does not cover: `filterwarnings`, `pythonpath` and `python_files`, nor options of the command line other than these; they are
named in `dropped`.
"""

import argparse
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from composer_nb.harness.tasks.runtime import read_packages
from composer_nb.harness.untrusted import toml_of, visible

INI = "pytest.ini"  # Metadata key of the settings of every run.
SELECTS = "-m, -k, --deselect, --ignore, --ignore-glob, -p PLUGIN, and paths"
NOT_KEPT = (
    "addopts", "testpaths", "minversion", "required_plugins", "cache_dir", "norecursedirs", "collect_imported_tests",
)  # fmt: skip
DROPPED = ("filterwarnings", "pythonpath", "python_files", "confcutdir")
_KEY = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)  # A key whose line cannot be taken for another one.
_MODULE = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")  # An entry point's value (`importlib.metadata`).
OUTPUT = ("junit_", "log_", "console_", "tmp_path_", "faulthandler_", "doctest_", "cov", "verbosity_", "truncation_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The caller's settings.

    Attributes:
        pytest_args: More pytest options; `-m` and `-k` replace the project's own.
        suite_s: Time limit of one run of the whole suite, in seconds.
        test_s: Time limit of a test that counts, in seconds, while calls are traced. A grade runs it three times.
        packages: Folder of installed packages that the suite needs, from `pip install --target`.
        image: A Docker image in which the suite runs.
    """

    pytest_args: str = ""
    suite_s: float = 400.0
    test_s: float = 1.0
    packages: Path | None = None
    image: str = ""

    def __post_init__(self) -> None:
        for name, value in (("--suite-seconds", self.suite_s), ("--test-seconds", self.test_s)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} {value}: must be above 0")
        if self.image and self.packages:
            raise ValueError("--image and --packages: install the packages into the image instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The pytest options of a suite.

    Attributes:
        ini: Lines of the section `[pytest]` of every run.
        select: Arguments that choose tests, for the first run only.
        paths: Folders or files with tests; empty means everywhere.
        ignored: Globs of files without tests.
        dropped: Settings of the project that these runs do not follow.
    """

    ini: str = ""
    select: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    def chosen(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Return the test modules that run."""
        return tuple(m for m in modules if _any_below(m, self.paths or [""]) and not _any_below(m, self.ignored))


def read_options(files: Mapping[str, str], pytest_args: str = "", plugins: Sequence[str] = ()) -> Options:
    """Return the options for a repository of these files. `plugins` are modules of the pytest plugins installed for it.

    Raises ValueError for a configuration that cannot be read, and for an option in `pytest_args` that cannot be followed.
    """
    where, config = _configuration(files)
    project, unread = _parsed(_words(config.get("addopts", ""), f"{where}: addopts"))
    installed = {plugin.partition(".")[0] for plugin in plugins}
    project.p = [*plugins, *(name for name in project.p if name.partition(".")[0] in installed)]
    options, words = _parsed(_words(pytest_args, "--pytest-args"), project)
    paths = [word for word in words if not word.startswith("-")]
    if refused := [word for word in words if word.startswith("-")]:
        raise ValueError(f"--pytest-args: {refused[0]} cannot be followed; these can: {SELECTS}")
    if missing := [path for path in paths if not any(_any_below(file, [path]) for file in files)]:
        raise ValueError(f"--pytest-args: {missing[0]!r} is no file or folder of the repository")
    # A project may name folders in `testpaths` that its source distribution does not ship: pytest looks everywhere then.
    tested = [path for path in _words(config.get("testpaths", ""), where) if any(_any_below(f, [path]) for f in files)]
    keys = sorted(key for key in config if key not in {*NOT_KEPT, *DROPPED} and not key.startswith(OUTPUT))
    ini_lines = []
    for key in keys:
        if _KEY.fullmatch(key):
            items = config[key] if isinstance(config[key], list) else [config[key]]
            values = [line.strip() for item in items for line in str(item).splitlines() if line.strip()]
            ini_lines.append("\n    ".join([f"{key} =", *values]) + "\n")
    if loaded := dict.fromkeys(name for name in options.p if not name.startswith("no:")):
        ini_lines.append(f"addopts = {shlex.join(word for name in loaded for word in ('-p', name))}\n")
    select = [word for option, text in (("-m", options.m), ("-k", options.k)) if text for word in (option, text)]
    odd = [visible(key[:60]) for key in keys if not _KEY.fullmatch(key)]
    return Options(
        ini="".join(ini_lines),
        select=(*select, *(f"--deselect={test}" for test in options.deselect)),
        paths=tuple(paths or tested),
        ignored=tuple(options.ignore),
        dropped=(*(word for word in unread if word.startswith("-")), *(key for key in DROPPED if key in config), *odd),
    )


def given_packages(folder: Path | None) -> Mapping[str, bytes]:
    """Return the packages in a folder that a user named; none for None. Raises ValueError for a folder without any."""
    packages = {} if folder is None else read_packages(folder.resolve())
    if folder is not None and not packages:
        raise ValueError(f"--packages {folder}: holds no file; fill it by pip install --target")
    return packages


def plugins_in(folder: Path) -> list[str]:
    """Return the modules of the pytest plugins among installed packages. Raises ValueError for what is no module."""
    try:
        entries = [entry for distribution in distributions(path=[str(folder)]) for entry in distribution.entry_points]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder}: entry points that cannot be read: {visible(str(error)[:200])}") from None
    modules = sorted(entry.value for entry in entries if entry.group == "pytest11")
    if odd := [value for value in modules if not _MODULE.fullmatch(value)]:
        raise ValueError(f"{folder}: announces {visible(odd[0][:60])!r} as a pytest plugin, which is no module")
    return modules


def _configuration(files: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the file that pytest would choose, and its settings. Raises ValueError."""
    for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"):
        if name not in files:
            continue
        try:
            settings = _settings(name, files[name].removeprefix("\ufeff"))
        except ValueError as error:
            raise ValueError(f"{name} cannot be read for pytest's options: {error}") from None
        if settings is not None:
            return name, settings
    return "", {}


def _settings(name: str, text: str) -> dict[str, Any] | None:
    """Return pytest's settings in a configuration file; None if it has none. Raises ValueError."""
    from iniconfig import IniConfig, ParseError

    dedicated = name.lstrip(".").startswith("pytest.")  # counts even without settings
    if not name.endswith(".toml"):
        try:
            sections = IniConfig(name, data=text)
        except ParseError as error:
            raise ValueError(str(error)) from None
        section = "tool:pytest" if name == "setup.cfg" else "pytest"
        return dict(sections[section].items()) if section in sections else {} if dedicated else None
    document = toml_of(text)
    if dedicated:
        settings = document.get("pytest", {})
        stray = "pytest" not in document and not all(isinstance(value, dict) for value in document.values())
    else:
        tool = document.get("tool", {})
        table = tool.get("pytest") if isinstance(tool, dict) else None
        if not isinstance(table, dict):
            return None
        plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
        settings, stray = table.get("ini_options", plain), False
    if stray or not isinstance(settings, dict):
        raise ValueError("pytest's settings must stand in a table [pytest] or [tool.pytest.ini_options]")
    return settings


def _words(value: object, where: str) -> list[str]:
    if isinstance(value, list):
        return [str(word) for word in value]
    try:
        return shlex.split(str(value))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _parsed(words: Sequence[str], project: argparse.Namespace | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options that choose tests, over those of a project, and all other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("-m", "-k"):
        parser.add_argument(name, default="")
    for names in (("--deselect",), ("--ignore", "--ignore-glob"), ("-p",)):
        parser.add_argument(*names, action="append", default=[])
    try:
        return parser.parse_known_args(words, project)
    except argparse.ArgumentError as error:
        raise ValueError(f"pytest options {shlex.join(words)!r}: {error}") from None


def _any_below(file: str, paths: Iterable[str]) -> bool:
    """Return whether a file is one of these paths, or below one of them, which may be globs."""
    places = [path.strip("/").removeprefix("./") for path in paths]
    return any(at in ("", ".", file) or file.startswith(f"{at}/") or fnmatch(file, f"{at}/*") for at in places)
