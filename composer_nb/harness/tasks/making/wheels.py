"""Unpack the wheels that a repository's tests need, once, for the sandboxes' Python.

Wheels are unpacked as they are: no network, no dependency resolution, and no code of theirs runs. A sandbox compiles them.
"""

from __future__ import annotations

import configparser
import re
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from composer_nb.harness.sandbox.contract import Backend, SandboxSpec
from composer_nb.harness.tasks.runtime import MAX_PACKAGES_BYTES
from composer_nb.harness.untrusted import beneath, is_plain, visible

BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Ways of packing that `zipfile` unpacks no further than it is asked to."""
_VERSION = "import sys; print(*sys.version_info[:2])"
_COMPILE = ["python3", "-m", "compileall", "-q", "-j", "1", "--invalidation-mode", "unchecked-hash", "."]
_MODULE = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w, .-]*\])?")
"""An entry point's value (`importlib.metadata`)."""
ADVICE = "pip download --only-binary :all: --python-version {} -d FOLDER -r requirements.txt"


def unpack(folder: Path, into: Path, backend: Backend, spec: SandboxSpec | None = None) -> None:
    """Write the content of all wheels in `folder` to `into`, with bytecode. Raises ValueError for wheels that do not fit."""
    wheels = sorted(folder.glob("*.whl"))
    with backend.create(spec) as box:
        asked = box.exec(["python3", "-I", "-S", "-c", _VERSION]).stdout.decode().split()
        version = ".".join(asked)
        if not wheels:
            raise ValueError(f"--wheels {folder}: holds no .whl file; fetch some by {ADVICE.format(version)}")
        held: dict[str, bytes] = {}
        for wheel in wheels:
            held |= _content(wheel, (int(asked[0]), int(asked[1])))
        if sum(map(len, held.values())) > MAX_PACKAGES_BYTES:
            raise ValueError(
                f"--wheels {folder}: more than {MAX_PACKAGES_BYTES >> 20} MiB unpacked; use --image with docker instead"
            )
        box.upload(held)
        box.exec(_COMPILE, timeout_s=300.0)  # what is no Python of this version stays as it is
        held = box.download()
    part = into.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was interrupted
    for path, data in held.items():
        place = beneath(part, path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    part.rename(into)


def plugins(packages: Mapping[str, bytes]) -> list[str]:
    """Return the modules of the pytest plugins that these packages announce."""
    found = []
    for path, data in sorted(packages.items()):
        if path.endswith(".dist-info/entry_points.txt"):
            entries = configparser.ConfigParser(delimiters=("=",), interpolation=None)
            try:
                entries.read_string(data.decode())
            except (configparser.Error, ValueError) as error:
                raise ValueError(f"{path}: cannot be read: {visible(str(error))}") from None
            found += [value for _, value in entries.items("pytest11")] if entries.has_section("pytest11") else []
    if odd := [value for value in found if not _MODULE.fullmatch(value)]:
        raise ValueError(f"a wheel announces {visible(odd[0][:60])!r} as a pytest plugin, which is no module")
    return found


def _content(wheel: Path, version: tuple[int, int]) -> dict[str, bytes]:
    """Return what a wheel puts into site-packages."""
    from packaging import tags, utils

    try:
        *_, own = utils.parse_wheel_filename(wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            inside = [info for info in archive.infolist() if not info.is_dir()]
            if sum(info.file_size for info in inside) > MAX_PACKAGES_BYTES:
                raise ValueError(f"more than {MAX_PACKAGES_BYTES >> 20} MiB unpacked")
            if any(info.compress_type not in BOUNDED for info in inside):
                raise ValueError("packed in a way that is not known here")
            held = {info.filename: archive.read(info) for info in inside}
    except (ValueError, zipfile.BadZipFile, EOFError, OSError, RuntimeError, zlib.error) as error:
        raise ValueError(f"{wheel}: not a wheel that can be read: {error}") from None
    platforms = list(tags.platform_tags())
    fit = {
        *tags.cpython_tags(version, platforms=platforms),
        *tags.compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    }
    if fit.isdisjoint(own):
        raise ValueError(
            f"{wheel}: not for the sandboxes' Python {version[0]}.{version[1]} on this machine; "
            f"fetch another by {ADVICE.format(f'{version[0]}.{version[1]}')}"
        )
    found = {}
    for path, data in held.items():
        top, _, rest = path.partition("/")
        if top.endswith(".data"):
            scheme, _, path = rest.partition("/")
            if scheme not in ("purelib", "platlib"):
                continue
        if not is_plain(path):
            raise ValueError(f"{wheel}: {visible(path[:200])!r} leads out of it")
        found[path] = data
    return found
