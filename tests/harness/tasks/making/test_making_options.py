"""How a suite is run: the project's own pytest options, the caller's, and the packages that tests need."""

from dataclasses import replace
from pathlib import Path

import pytest

from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.tasks import runtime
from composer_nb.harness.tasks.making.baseline import measure
from composer_nb.harness.tasks.making.make import make
from composer_nb.harness.tasks.making.options import Options, RunOptions, plugins_in, read_options
from composer_nb.harness.tasks.making.repository import Repository
from composer_nb.harness.tasks.task import Task
from tests.folders import write

PYPROJECT = """\
[tool.pytest.ini_options]
addopts = "-ra --strict-markers -m 'not stress' --deselect=tests/test_a.py::test_b --cov=x -p no:cacheprovider"
testpaths = ["tests", "docs"]
markers = ["stress: many"]
python_functions = ["test_*", "check_*"]
filterwarnings = ["error"]
"""
PYTEST = '[pytest]\naddopts = ["-m", "not network"]\ntestpaths = ["tests"]\npython_functions = ["check_*"]\nxfail_strict = true\n'
NEWEST = Options(
    ini="python_functions =\n    check_*\nxfail_strict =\n    True\n", select=("-m", "not network"), paths=("tests",)
)
OLDER = {"pytest.ini": "[pytest]\naddopts = -k none\n"}
SUITE = {"a.py": "", "tests/test_a.py": "", "tests/slow/test_b.py": ""}


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        ({}, "", Options()),
        (
            {"pyproject.toml": PYPROJECT},
            "",
            Options(
                ini="markers =\n    stress: many\npython_functions =\n    test_*\n    check_*\n",
                select=("-m", "not stress", "--deselect=tests/test_a.py::test_b"),
                paths=("tests",),
                dropped=("-ra", "--strict-markers", "--cov=x", "filterwarnings"),
            ),
        ),
        (
            {"pytest.ini": "[pytest]\naddopts = -k 'a and b'\nxfail_strict = true\n", "pyproject.toml": PYPROJECT},
            "-k c --ignore=tests/slow",
            Options(ini="xfail_strict =\n    true\n", select=("-k", "c"), ignored=("tests/slow",)),
        ),
        ({"pytest.ini": "", "setup.cfg": "[tool:pytest]\naddopts = -m x\n"}, "", Options()),
        ({"tox.ini": "[pytest]\naddopts = -m x\n"}, "-m y tests/slow", Options(select=("-m", "y"), paths=("tests/slow",))),
        ({"pyproject.toml": "[tool.pytest]\naddopts = ['-m', 'x y']\n"}, "", Options(select=("-m", "x y"))),
        (OLDER | {"pytest.toml": f"\ufeff{PYTEST}", ".pytest.toml": "["}, "", NEWEST),
        (OLDER | {".pytest.toml": PYTEST}, "", NEWEST),
        (OLDER | {"pytest.toml": ""}, "", Options()),  # an empty one counts too, as pytest has it
        ({"setup.cfg": "[tool:pytest]\ntestpaths = gone\n"}, "-p some.plugin", Options(ini="addopts = -p some.plugin\n")),
    ],
)  # fmt: skip
def test_options_are_read_where_pytest_would_read_them(files: dict[str, str], options: str, expected: Options) -> None:
    assert read_options(SUITE | files, options) == expected


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ({}, "--maxfail=1", "--pytest-args: --maxfail=1 cannot be followed; these can: -m"),
        ({}, "gone", "--pytest-args: 'gone' is no file or folder"),
        ({"pyproject.toml": "["}, "", r"pyproject\.toml cannot be read"),
        ({"pytest.toml": "addopts = '-x'\n"}, "", r"pytest.toml cannot be read for pytest's options: .*table"),
    ],
)
def test_options_that_cannot_be_followed_are_named(files: dict[str, str], options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(SUITE | files, options)


HELPER = {
    "helper/__init__.py": "LIMIT = 3\n",
    "helper/plugin.py": "import pytest\n\n\n@pytest.fixture\ndef limit():\n    return 3\n",
    "helper-1.dist-info/entry_points.txt": "[pytest11]\nhelper = helper.plugin\n",
}
SOURCE = "def clamp(value, high=10):\n    if value > high:\n        return high\n    return value\n"
NEEDS = """\
import time

import pytest
from helper import LIMIT
from shapes import clamp


def test_clamp(limit):
    assert clamp(12, limit) == LIMIT


@pytest.mark.stress
@pytest.mark.parametrize("number", range(3))
def test_stress(number):
    time.sleep(60)
"""
REPOSITORY = {
    "shapes.py": SOURCE,
    "tests/test_shapes.py": NEEDS,
    "pytest.ini": "[pytest]\naddopts = -m 'not stress'\nmarkers = stress\n",
}


def prepared(tmp_path: Path) -> Repository:
    folder = write(tmp_path / "packages", HELPER)
    runtime.allow_packages(folder)
    digest = runtime.packages_digest(runtime.read_packages(folder))
    settings = {runtime.PACKAGES: str(folder), runtime.PACKAGES_DIGEST: digest}
    settings["pytest.ini"] = read_options(REPOSITORY, "", plugins_in(folder)).ini
    return Repository(name="shapes", files=REPOSITORY, settings=settings)


def test_a_suite_that_needs_packages_and_leaves_tests_out(tmp_path: Path, backend: Backend) -> None:
    """Its own options leave out what would take minutes; a plugin of a package gives a fixture."""
    repository = prepared(tmp_path)
    assert plugins_in(tmp_path / "packages") == ["helper.plugin"]
    running = RunOptions(suite_s=40.0)
    options = read_options(REPOSITORY, "", plugins_in(tmp_path / "packages"))
    measurement = measure(repository, backend, SandboxSpec(), lambda doing: None, running, options)
    assert list(measurement.plan.tests.values()) == ["tests/test_shapes.py::test_clamp"] and not measurement.left_out
    bare = Repository(name="shapes", files=REPOSITORY, settings={})
    at_once = replace(bare, files=REPOSITORY | {"tests/conftest.py": "import helper\n"})
    usual, slowly = read_options(REPOSITORY), Options(ini=repository.settings["pytest.ini"])
    for unfit, limits, suite_options, message in (
        (bare, running, usual, r"only 0 of .*Bring helper by --packages FOLDER"),
        (at_once, running, usual, r"early, before its first test: ModuleNotFoundError.*Bring helper"),
        (repository, RunOptions(suite_s=3.0), slowly, r"takes longer than 3 s, .*--pytest-args .*--suite-seconds"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(unfit, backend, SandboxSpec(), lambda doing: None, limits, suite_options)


def test_a_copy_among_the_packages_is_an_answer(tmp_path: Path, backend: Backend) -> None:
    source = write(tmp_path / "source", {"shapes.py": SOURCE, "test_shapes.py": "def test_f(): pass\n"})
    folder = write(tmp_path / "packages", {"shapes.py": SOURCE})
    with pytest.raises(ValueError, match="a copy of it is among the packages: shapes"):
        make(source, tmp_path / "out", backend, running=RunOptions(packages=folder))
    with pytest.raises(ValueError, match="holds no file; fill it by pip install --target"):
        make(source, tmp_path / "out", backend, running=RunOptions(packages=tmp_path / "nothing"))


def test_packages_are_in_an_agents_sandbox_and_those_that_are_gone_are_named(tmp_path: Path, backend: Backend) -> None:
    fields = {"id": "t", "instruction": "-", "files": REPOSITORY, "tests": {"tests/test_shapes.py": NEEDS}}
    task = Task(**fields, source_scope=("shapes.py",), grader="pytest", metadata=prepared(tmp_path).settings)
    with runtime.start_sandbox(task, backend) as box:
        result = box.exec(["python3", "-c", "import helper; print(helper.LIMIT)"], env={"PYTHONPATH": "/tmp/packages"})
    assert result.stdout == b"3\n"
    moved = task.metadata | {runtime.PACKAGES: str(tmp_path / "gone")}
    with pytest.raises(ValueError, match="missing or not those that it was made with"):
        runtime.packages_of(task.model_copy(update={"metadata": moved}))
