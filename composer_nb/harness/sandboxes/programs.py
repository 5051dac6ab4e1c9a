"""Programs that an agent's tools run in a sandbox and that few systems bring: found on this machine, shown there read-only.

`bwrap` binds them, the host image of `docker` holds them, `process` puts a folder of links on the path. An image of somebody
else's has what its makers put in.
"""

from __future__ import annotations

import os
import shutil
import stat
import sysconfig
from pathlib import Path

PACKAGES = {"rg": "ripgrep", "ruff": "ruff"}
"""Program -> what it is called by package managers."""
PLACE = "/usr/local/bin"
"""Where a sandbox has them."""


def host_programs() -> dict[str, str]:
    """Name -> real file: of this Python's environment, else of the PATH. What is not there, or a mere script, is left out."""
    found = {name: shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name) for name in PACKAGES}
    real = {name: os.path.realpath(path) for name, path in found.items() if path}
    return {name: path for name, path in real.items() if is_elf(path)}


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
