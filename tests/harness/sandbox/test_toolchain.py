from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from composer_nb.harness.sandbox.toolchain import TESTING, made_programs

WRONG = b"raise SystemExit('this was read')"


@pytest.mark.parametrize(("spoiled", "passes"), [(".py", True), (".pyc", True), ("", False)])
def test_pytest_runs_from_modules_that_are_compiled_and_else_from_their_sources(
    spoiled: str, passes: bool, tmp_path: Path
) -> None:
    """Sources are not read; what another version compiled is passed over."""
    with (
        zipfile.ZipFile(io.BytesIO(made_programs()[TESTING])) as given,
        zipfile.ZipFile(tmp_path / "p.zip", "w") as made,
    ):
        for name in given.namelist():
            wrong = Path(name).suffix in (".py", ".pyc") and name.endswith(spoiled)
            made.writestr(name, WRONG if wrong else given.read(name))
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert True\n")
    command = [sys.executable, "-sSm", "pytest", "-q", "-p", "no:cacheprovider", "test_one.py"]
    environment = {"PYTHONPATH": str(tmp_path / "p.zip"), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == passes == ("1 passed" in done.stdout), done.stdout + done.stderr
