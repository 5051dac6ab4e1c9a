"""Recipes for schedulers and the image: what can be checked without a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from composer_nb.cli import parser

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
    "requeue": "",
    "signal": r"([BR]+:)?[A-Z]+@\d+",
}


def check_command(words: list[str]) -> None:
    """The program takes these words, and the job file is there."""
    given = parser().parse_args(words)
    assert given.command == "jobs run" and (ROOT / given.file).is_file()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_takes_the_options_and_bash_the_script(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True).returncode == 0
    text = path.read_text()
    assert text.startswith("#!/bin/bash\n")
    options = re.findall(r"^#SBATCH (.*)$", text, re.M)
    for option in options:
        name, _, value = option.removeprefix("--").partition("=")
        assert option.startswith("--") and re.fullmatch(SBATCH[name], value), option
    assert options and text.rindex("#SBATCH") < text.index("set -euo pipefail"), "Slurm stops at the first command"
    [command] = re.findall(r"\.venv/bin/composer-nb (jobs run .*)$", text, re.M)
    check_command(shlex.split(command))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yml")), ids=lambda path: path.name)
def test_kubernetes_runs_a_job_file(path: Path) -> None:
    found = yaml.safe_load(path.read_text())
    assert (found["apiVersion"], found["kind"]) in {("batch/v1", "Job"), ("ray.io/v1", "RayJob")}
    spec = found["spec"]
    if found["kind"] == "RayJob":
        [pin] = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
        assert spec["rayClusterSpec"]["rayVersion"] == pin, "the cluster's Ray is the package's"
        words = shlex.split(spec["entrypoint"])
    else:
        [container] = spec["template"]["spec"]["containers"]
        words = container["command"]
    assert words[0] == "composer-nb"
    check_command(words[1:])


def test_the_image_has_what_it_needs() -> None:
    lines = (RECIPES / "Dockerfile").read_text().splitlines()
    [base] = [line for line in lines if line.startswith("FROM ")]
    lowest = PROJECT["requires-python"].removeprefix(">=")
    assert base.startswith(f"FROM python:{lowest}-")
    ignored = [each for each in (ROOT / ".dockerignore").read_text().splitlines() if each and each[0] != "#"]
    for line in lines:
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists() and not any(fnmatch(source, each) for each in ignored), source
    [install] = [line for line in lines if "pip install" in line]
    extras = re.findall(r"\.\[([\w,]+)\]", install)[0].split(",")
    assert set(extras) <= set(PROJECT["optional-dependencies"]) and "-c constraints.txt" in install
    assert not [line for line in lines if re.search(r"curl|wget|https?://", line)], "nothing is fetched but packages"
