"""What a newcomer's first commands rest on: dependencies, constraints, conda's file, make, CI, scripts."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SET_UP = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["lab"])]
DIRECT = [*SET_UP, *map(Requirement, EXTRAS["browser"])]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


def pinned(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", pin
    return Version(specifier.version)


def run(*command: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    # This test may itself run under make, whose settings would reach the make that is tested.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        command, cwd=cwd, env=inherited | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


# -- the one list of dependencies ----------------------------------------------------------------------------


def test_what_is_installed_is_what_pyproject_allows():
    for requirement in SET_UP:
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} but {version} is here"
    assert Version(".".join(map(str, sys.version_info[:3]))) in SpecifierSet(PROJECT["requires-python"])


def test_constraints_pin_every_direct_dependency_once_to_a_version_that_pyproject_allows():
    names = [canonicalize_name(pin.name) for pin in PINS]
    assert sorted(names) == sorted({*(canonicalize_name(requirement.name) for requirement in DIRECT), "triton"})
    allowed = {canonicalize_name(requirement.name): requirement.specifier for requirement in DIRECT}
    for pin in PINS:
        assert pinned(pin) in allowed.get(canonicalize_name(pin.name), SpecifierSet()), pin


def test_environment_yml_brings_python_and_leaves_the_rest_to_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert conda == [f"python={lowest}", "pip"]
    assert pip == {"pip": ["-e .[dev,lab]"]}
    needed = {name: EXTRAS[name] for name in EXTRAS if name not in ("browser", "bugs", "dev", "lab")}
    assert set().union(*needed.values()) <= set(EXTRAS["dev"]), "the tests need them"


# -- make ----------------------------------------------------------------------------------------------------


def test_make_alone_lists_the_targets_and_each_can_be_planned():
    targets = set(re.findall(r"^make (\S+)", run("make").stdout, re.M))
    assert targets == TARGETS
    plan = run("make", "-n", "-B", *sorted(targets))
    assert plan.returncode == 0 and "composer-nb tour" in plan.stdout, plan.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a copy of the files that the setup reads, with an environment that holds a stand-in for Python."""
    copy = tmp_path / "a clone"
    (copy / "scripts").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/system_packages"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_old_python_is_refused_in_one_line(clone: Path):
    script(clone / "old/python", '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1')
    process = run("make", "demo", "PYTHON=./old/python", cwd=clone)
    assert process.returncode != 0
    assert "is Python 3.9.2; composer_nb needs Python 3.11 or newer: make demo PYTHON=" in process.stderr
    assert not (clone / ".venv").exists()


def test_the_environment_is_made_once_and_again_after_a_change_or_a_move(clone: Path, tmp_path: Path):
    script(clone / ".venv/bin/python", 'echo "$@" >>log')
    log = clone / "log"

    def installs(folder: Path) -> int:
        (folder / "log").write_text("")
        process = run("make", "setup", cwd=folder)
        assert process.returncode == 0, process.stderr
        return (folder / "log").read_text().count("-m pip install")

    assert installs(clone) == 1
    assert "--no-compile -c constraints.txt -e .[dev,lab]" in log.read_text()
    assert installs(clone) == 0
    timestamp = (clone / ".venv/.ready").stat().st_mtime + 5
    os.utime(clone / "constraints.txt", (timestamp, timestamp))
    os.utime(clone / ".venv/.ready", (timestamp - 1, timestamp - 1))
    assert installs(clone) == 1
    moved = tmp_path / "moved"
    shutil.copytree(clone, moved)
    os.utime(moved / ".venv/.ready", (timestamp + 9, timestamp + 9))
    assert installs(moved) == 1
    os.utime(moved / ".venv/.ready", (timestamp + 9, timestamp + 9))
    assert installs(moved) == 0
    script(clone / ".venv/bin/python", '[ "$1" = -c ]')
    (clone / ".venv/.ready").unlink()
    assert run("make", "setup", cwd=clone).returncode != 0 and not (clone / ".venv/.ready").exists()


# -- system programs -----------------------------------------------------------------------------------------

TOOLS = ("sh", "id", "env")


def packages(folder: Path, uid: int, *options: str, **managers: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/system_packages where only the given package managers exist, as the given user."""
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "id").unlink()
    script(folder / "id", f"echo {uid}")
    for name, text in managers.items():
        script(folder / name.replace("_", "-"), text)
    return run("/bin/sh", str(ROOT / "scripts/system_packages"), *options, PATH=str(folder))


@pytest.mark.parametrize(
    "manager, line",
    [("apt_get", "apt-get install -y --no-install-recommends bubblewrap"), ("apk", "apk add bubblewrap")],
)
def test_the_one_line_is_printed_where_installing_is_not_possible(manager: str, line: str, tmp_path: Path):
    failing = packages(tmp_path / "root", 0, **{manager: "echo no network; exit 100"})
    assert failing.returncode == 0
    assert "no network" in failing.stderr
    assert failing.stderr.splitlines()[-1].endswith(f"run: {line}")

    for folder, asking in (("user", {}), ("sudo", {"sudo": "exit 1"})):
        ordinary = packages(tmp_path / folder, 1000, **{manager: "echo called; exit 1"}, **asking)
        assert ordinary.stderr == f"missing: bwrap - to install, run: sudo {line}\n"


@pytest.mark.parametrize("uid, extra", [(0, {}), (1000, {"sudo": '[ "$1" = -n ] && shift; "$@"'})])
def test_it_installs_as_root_or_with_a_sudo_that_asks_nothing(uid: int, extra: dict[str, str], tmp_path: Path):
    log, bwrap = tmp_path / "log", tmp_path / "bin/bwrap"
    apt = f'echo "$@" >>{log}\n[ "$1" = update ] && exit 1\n: >{bwrap}; /bin/chmod +x {bwrap}'
    process = packages(tmp_path / "bin", uid, apt_get=apt, **extra)
    assert (process.returncode, process.stderr) == (0, "")
    assert log.read_text().splitlines() == ["update", "install -y --no-install-recommends bubblewrap"]


# -- the checkout --------------------------------------------------------------------------------------------


def test_the_workflow_runs_what_make_has():
    """The jobs are lines that anybody can run, and each checks out the code first."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow["jobs"]) == {"test", "browser", "nightly", "pretrained"}
    for name, job in workflow["jobs"].items():
        assert job["steps"][0]["uses"].startswith("actions/checkout@"), name
        assert all(step.get("uses", "actions/").startswith("actions/") for step in job["steps"]), name
        assert job["timeout-minutes"] <= {"pretrained": 330, "nightly": 180}.get(name, 90)
        commands = re.findall(r"make ([a-z- ]+)", "\n".join(step.get("run", "") for step in job["steps"]))
        targets = {target for line in commands for target in line.split()}
        assert targets and targets <= TARGETS, name


def test_no_file_names_one_machine_or_a_package_index():
    files = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if files.returncode:
        pytest.skip("not a git checkout; clone the project to run this")
    machine = re.compile(r"(?<![\w./:-])/(?:root|home/\w+|Users/\w+)/")
    index = re.compile(r"--(?:extra-)?index-url|https?://[\w.-]*(?:pypi|npm)[\w.-]*\.\w+")
    matches = []
    for name in filter(None, files.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or path.suffix in {".png", ".parquet", ".safetensors", ".gz", ".zst"}:
            continue
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1):
            if machine.search(line) or index.search(line):
                matches.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not matches, "\n".join(matches)
