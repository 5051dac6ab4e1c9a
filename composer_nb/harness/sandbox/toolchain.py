"""Programs of this machine that a sandbox is shown read-only: a Python interpreter, search tools, pytest.

`bwrap` binds them, the host image of `docker` holds them. A foreign image contains whatever its authors installed.

So that an agent can run tests, there are also `python` and `pytest`, and pytest's modules in one file (TESTING), which Python
imports from where PYTHONPATH names it: the terminal does (`tools/toolset.py`), a grade does not. They are compiled for the Python
that runs this; another version reads their source.
"""

from __future__ import annotations

import functools
import io
import json
import marshal
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

from composer_nb.harness.sandbox.errors import SandboxUnavailable

MIN_PYTHON = (3, 9)
MANAGERS = {"apt-get": "install -y", "dnf": "install -y", "pacman": "-S", "apk": "add", "zypper": "install"}
PACKAGES = {"rg": "ripgrep", "ruff": "ruff"}  # Program -> its name in package managers
TESTING = "pytest.zip"
PLACE = "/usr/local/bin"  # Folder of these programs in a sandbox
MODULES = ("pytest", "pluggy", "iniconfig", "packaging")
# Packages that pytest needs on Python 3.10 and older: taken along if they are installed here.
OLD_MODULES = ("exceptiongroup", "tomli")
WITH_VERSION = ("pytest", "pluggy")  # Packages whose versions pytest looks up to print its own
LONG_AGO = (1980, 1, 1, 0, 0, 0)
# Stand-ins for the modules of pygments, which pytest imports to colour what it prints.
STAND_INS = {
    "pygments": "from pygments import util\ndef highlight(code, lexer, formatter):\n    return code\n",
    "pygments.util": "class ClassNotFound(ValueError):\n    pass\nclass OptionError(Exception):\n    pass\n",
    "pygments.formatters": "",
    "pygments.formatters.terminal": "class TerminalFormatter:\n    pass\n",
    "pygments.lexer": "class Lexer:\n    pass\n",
    "pygments.lexers": "",
    "pygments.lexers.diff": "class DiffLexer:\n    pass\n",
    "pygments.lexers.python": "class PythonLexer:\n    pass\n",
}


def install_hint(program: str = "bubblewrap") -> str:
    """Return the line that installs `program` with the package manager found here."""
    manager = next(filter(shutil.which, MANAGERS), None)
    return f"{manager} {MANAGERS[manager]} {program}" if manager else f"install {program} with your package manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of the host, by its real file, and what it needs to run elsewhere: standard library and shared libraries."""

    path: str
    directories: tuple[str, ...]

    @classmethod
    def find(cls) -> Interpreter:
        """Return the system's python3, else the base of the running one. Raises SandboxUnavailable."""
        base = [f"{sys.base_prefix}/bin/{name}" for name in (f"python3.{sys.version_info.minor}", "python3")]
        for path in map(os.path.realpath, filter(os.path.exists, ("/usr/bin/python3", *base))):
            command = [path, "-I", "-S", "-c", _INSPECT]
            result = subprocess.run(command, capture_output=True, text=True, cwd="/", env={}, check=False)
            facts = {"version": (0, 0)} if result.returncode else json.loads(result.stdout)
            if tuple(facts["version"]) >= MIN_PYTHON:
                directories: list[str] = []
                for directory in sorted(facts["directories"], key=len):
                    if not any(f"{directory}/".startswith(f"{above}/") for above in directories):
                        directories.append(directory)
                return cls(path=path, directories=tuple(directories))
        raise SandboxUnavailable(f"no Python >= 3.9 for the sandbox: {install_hint('python3')}")


_INSPECT = """
import sys, os, json, sysconfig, ctypes, zlib, hashlib
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
directories = {os.path.dirname(name) for name in mapped if ".so" in name}
directories |= {os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")}
print(json.dumps({"version": sys.version_info[:2], "directories": sorted(directories)}))
"""


def host_programs() -> dict[str, str]:
    """Return name -> real file of the programs in this Python's environment, else on the PATH. Scripts are left out."""
    paths = {name: shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name) for name in PACKAGES}
    real = {name: os.path.realpath(path) for name, path in paths.items() if path}
    return {name: path for name, path in real.items() if is_elf(path)}


@functools.cache
def made_programs() -> dict[str, bytes]:
    """Return name -> content of the programs that are made here. Without pytest where it is not installed."""
    programs = {"python": b'#!/bin/sh\nexec python3 "$@"\n'}
    try:
        modules = pytest_modules()
    except SandboxUnavailable:
        return programs
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (_, package, text) in sorted(modules.items()):
            path = name.replace(".", "/") + ("/__init__.py" if package else ".py")
            archive.writestr(zipfile.ZipInfo(path, LONG_AGO), text)
            # Compiled as Python keeps it (PEP 552), not to be compared with its source. 2: the same bytes each time.
            code = marshal.dumps(compile(text, f"{PLACE}/{TESTING}/{path}", "exec", dont_inherit=True), 2)
            head = MAGIC_NUMBER + b"\1\0\0\0" + source_hash(text.encode())
            archive.writestr(zipfile.ZipInfo(f"{path}c", LONG_AGO), head + code)
        for name in WITH_VERSION:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}\n"
            archive.writestr(zipfile.ZipInfo(f"{name}-{version(name)}.dist-info/METADATA", LONG_AGO), text)
    return programs | {"pytest": b'#!/bin/sh\nexec python3 -m pytest "$@"\n', TESTING: packed.getvalue()}


def pytest_modules() -> dict[str, tuple[str, bool, str]]:
    """Return module name -> (path to show, whether it is a package, text) of pytest. Raises SandboxUnavailable without pytest."""
    modules: dict[str, tuple[str, bool, str]] = {}
    for name, text in STAND_INS.items():
        package = any(other.startswith(name + ".") for other in STAND_INS)
        modules[name] = (f"/kit/{name.replace('.', '/')}{'/__init__' if package else ''}.py", package, text)
    for needed in (*MODULES, *OLD_MODULES):
        try:
            listed = distribution(needed)
        except PackageNotFoundError:
            if needed in OLD_MODULES:
                continue
            raise SandboxUnavailable(f"{needed} is not installed on this side: pip install pytest") from None
        for file in listed.files or ():
            if file.suffix == ".py" and ".." not in file.parts:
                *above, last = file.with_suffix("").parts
                name = ".".join(above if last == "__init__" else [*above, last])
                text = Path(str(listed.locate_file(file))).read_text(encoding="utf-8")
                modules[name] = (f"/kit/{file.as_posix()}", last == "__init__", text)
    return modules


def is_elf(path: str) -> bool:
    if not os.access(path, os.R_OK):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def open_to_all(path: str) -> bool:
    """Return whether any user may run a file: it and all folders above it allow that."""
    needed = stat.S_IROTH | stat.S_IXOTH
    above = all(os.stat(folder).st_mode & stat.S_IXOTH for folder in Path(path).parents)
    return above and os.stat(path).st_mode & needed == needed
