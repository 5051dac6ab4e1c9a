"""The Python that runs inside a box: found on the host, bound in read-only with what it needs and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from composer_nb.harness.sandbox.contract import SandboxUnavailable

MIN_PYTHON = (3, 9)


def install_hint(program: str = "bubblewrap") -> str:
    """The line that installs `program` with the package manager found here."""
    managers = {
        "apt-get": "install -y",
        "dnf": "install -y",
        "pacman": "-S",
        "apk": "add",
        "zypper": "install",
    }
    found = next((name for name in managers if shutil.which(name)), None)
    return f"{found} {managers[found]} {program}" if found else f"install {program} with your package manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of the host and what it needs to run elsewhere."""

    path: str  # the real file
    directories: tuple[str, ...]  # standard library and shared libraries

    @classmethod
    def find(cls) -> Interpreter:
        """The system's python3, else the base of the running one. Raises SandboxUnavailable."""
        for candidate in ("/usr/bin/python3", *_base_interpreters()):
            if os.path.exists(candidate):
                found = cls._inspect(os.path.realpath(candidate))
                if found is not None:
                    return found
        raise SandboxUnavailable(f"no Python >= 3.9 for the box: {install_hint('python3')}")

    @classmethod
    def _inspect(cls, path: str) -> Interpreter | None:
        command = [path, "-I", "-S", "-c", _INSPECT]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env={}, check=False)
        if done.returncode:
            return None
        facts = json.loads(done.stdout)
        if tuple(facts["version"]) < MIN_PYTHON:
            return None
        kept: list[str] = []
        for directory in sorted({*facts["stdlib"], *facts["libraries"]}, key=len):
            if not any(directory == k or directory.startswith(k + "/") for k in kept):
                kept.append(directory)
        return cls(path=path, directories=tuple(kept))


_INSPECT = """
import sys, os, json, sysconfig, ctypes, zlib, hashlib
mapped = {line.split()[-1] for line in open("/proc/self/maps")}
libraries = {os.path.dirname(name) for name in mapped if ".so" in name}
stdlib = {os.path.realpath(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib")}
print(json.dumps({"version": sys.version_info[:2], "stdlib": sorted(stdlib), "libraries": sorted(libraries)}))
"""


def _base_interpreters() -> tuple[str, ...]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return tuple(os.path.join(sys.base_prefix, "bin", name) for name in (version, "python3"))
