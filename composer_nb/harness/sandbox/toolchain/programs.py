"""Programs that an agent's tools run in a sandbox and that few systems bring: found on this machine, shown there read-only.

`bwrap` binds them, the host image of `docker` holds them, `process` puts a folder of links on the path. An image of somebody
else's has what its makers put in.

So that an agent can run tests, there are also `python` and `pytest`, and pytest's modules in one file (TESTING), which Python
imports from where PYTHONPATH names it: the terminal does (`cursor/toolset.py`), a grade does not.
"""

from __future__ import annotations

import functools
import io
import os
import shutil
import stat
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

from composer_nb.harness.sandbox.contract import SandboxUnavailable
from composer_nb.harness.sandbox.toolchain.testing import pytest_modules

PACKAGES = {"rg": "ripgrep", "ruff": "ruff"}
"""Program -> what it is called by package managers."""
TESTING = "pytest.zip"
TOLD = ("pytest", "pluggy")
"""Packages whose versions pytest looks up when it says what it is."""
LONG_AGO = (1980, 1, 1, 0, 0, 0)
PLACE = "/usr/local/bin"
"""Where a sandbox has them."""


def host_programs() -> dict[str, str]:
    """Name -> real file: of this Python's environment, else of the PATH. What is not there, or a mere script, is left out."""
    found = {name: shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name) for name in PACKAGES}
    real = {name: os.path.realpath(path) for name, path in found.items() if path}
    return {name: path for name, path in real.items() if is_elf(path)}


@functools.cache
def made_programs() -> dict[str, bytes]:
    """Name -> content of the programs that are made here. Without pytest where it is not installed."""
    made = {"python": b'#!/bin/sh\nexec python3 "$@"\n'}
    try:
        modules = pytest_modules()
    except SandboxUnavailable:
        return made
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as held:
        for name, (_, package, text) in sorted(modules.items()):
            path = name.replace(".", "/") + ("/__init__.py" if package else ".py")
            held.writestr(zipfile.ZipInfo(path, LONG_AGO), text)
        for name in TOLD:
            told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}\n"
            held.writestr(zipfile.ZipInfo(f"{name}-{version(name)}.dist-info/METADATA", LONG_AGO), told)
    return made | {"pytest": b'#!/bin/sh\nexec python3 -m pytest "$@"\n', TESTING: archive.getvalue()}


def is_elf(path: str) -> bool:
    if not os.access(path, os.R_OK):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def open_to_all(path: str) -> bool:
    """Whether any user may run a file: it and all folders above it allow that."""
    needed = stat.S_IROTH | stat.S_IXOTH
    above = all(os.stat(folder).st_mode & stat.S_IXOTH for folder in Path(path).parents)
    return above and os.stat(path).st_mode & needed == needed
