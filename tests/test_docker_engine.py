"""scripts/docker_engine: starts nothing where an engine answers, and says in one line what to do where it can not."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "docker_engine"


def engine(folder: Path, uid: int, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script where only `sh` and the given programs exist, as the given user."""
    folder.mkdir()
    (folder / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    for name, text in {"id": f"echo {uid}", **programs}.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return subprocess.run(
        [str(folder / "sh"), str(SCRIPT), str(folder / "pid")],
        env={"PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def test_it_does_nothing_where_an_engine_answers(tmp_path: Path) -> None:
    process = engine(tmp_path / "bin", 0, docker="exit 0", apt_get="echo called", dockerd="echo called")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert not (tmp_path / "bin" / "pid").exists()


ROOTS = "apt-get update && apt-get install -y --no-install-recommends docker.io"


@pytest.mark.parametrize(
    ("programs", "last"),
    [
        (
            {"apt_get": "echo no network; exit 100"},
            f"no Docker Engine answers: it could not be installed; run: {ROOTS}",
        ),
        ({}, "no Docker Engine answers: there is none here, and no apt-get"),
    ],
)
def test_what_could_not_be_installed_is_told(tmp_path: Path, programs: dict[str, str], last: str) -> None:
    process = engine(tmp_path / "bin", 0, docker="exit 1", **programs)
    assert process.returncode == 1 and process.stderr.splitlines()[-1].startswith(last)


def test_an_ordinary_user_is_told_the_line(tmp_path: Path) -> None:
    process = engine(tmp_path / "bin", 1000, docker="exit 1", apt_get="echo called", dockerd="echo called")
    assert process.returncode == 1 and process.stdout == ""
    assert process.stderr.splitlines() == [
        f"no Docker Engine answers: it has to be installed and started by root; run: sudo {SCRIPT}"
    ]
