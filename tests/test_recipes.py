"""Recipes for schedulers and the image: what can be checked without a cluster, an engine or a network."""

import json
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from composer_nb.cli import parser
from composer_nb.doctor import IN_CONTAINER

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def words_of(path: Path) -> list[str]:
    """Return the command line of a recipe after the name of the program."""
    if path.suffix == ".sbatch":
        [command] = re.findall(r"\.venv/bin/composer-nb (jobs run .*)$", path.read_text(), re.M)
        return shlex.split(command)
    spec = yaml.safe_load(path.read_text())["spec"]
    words = (
        shlex.split(spec["entrypoint"])
        if "entrypoint" in spec
        else spec["template"]["spec"]["containers"][0]["command"]
    )
    assert words[0] == "composer-nb"
    return list(words[1:])


@pytest.mark.parametrize(
    "path", sorted([*RECIPES.glob("*.sbatch"), *RECIPES.glob("*.yml")]), ids=lambda path: path.name
)
def test_recipe_runs_a_job_file_that_is_there(path: Path) -> None:
    args = parser().parse_args(words_of(path))
    assert args.command == "jobs run" and (ROOT / args.file).is_file()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_reads_every_option_of_a_script(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail"), "Slurm stops at the first command"


def test_ray_of_the_cluster_is_that_of_the_package() -> None:
    [pin] = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert yaml.safe_load((RECIPES / "rayjob.yml").read_text())["spec"]["rayClusterSpec"]["rayVersion"] == pin


def test_image_has_what_it_needs() -> None:
    lines = (RECIPES / "Dockerfile").read_text().splitlines()
    [base] = [line for line in lines if line.startswith("FROM ")]
    assert base.startswith(f"FROM python:{PROJECT['requires-python'].removeprefix('>=')}-")
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for source in (source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]):
        assert (ROOT / source).exists() and not any(fnmatch(source, pattern) for pattern in ignored), source
    [install] = [line for line in lines if "pip install" in line]
    extras = re.findall(r"\.\[([\w,]+)\]", install)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"]) and "-c constraints.txt" in install
    assert not [line for line in lines if re.search(r"curl|wget|https?://", line)], "nothing is fetched but packages"
    assert IN_CONTAINER in "\n".join(line for line in lines if line.startswith("#"))


def test_a_development_container_is_the_image_from_this_checkout() -> None:
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text())
    dockerfile, context = (folder / container["build"][key] for key in ("dockerfile", "context"))
    assert dockerfile.resolve() == RECIPES / "Dockerfile" and context.resolve() == ROOT
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]
    instructions = [name for name, _ in steps]
    assert instructions[0] == "FROM" and {*instructions} <= {"FROM", "RUN", "WORKDIR", "COPY", "EXPOSE", "CMD"}
    assert json.loads(dict(steps)["CMD"])[:2] == ["jupyter", "lab"]
    assert container["forwardPorts"] == [int(dict(steps)["EXPOSE"])]
    assert " ".join(container["runArgs"]) == IN_CONTAINER
    [packages] = re.findall(r"apt-get install -y --no-install-recommends (.*?) &&", text)
    programs = {command.split()[0] for command in container["postCreateCommand"].split(" && ")}
    assert {"bubblewrap", "git", "make"} <= {*packages.split()} and programs <= {*packages.split(), "pip"}
