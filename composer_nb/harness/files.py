"""Atomic files: a reader sees the old content or the new, never a part."""

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer_nb.harness.plain import to_json

# Maximum bytes of a Unix socket's path.
SOCKET_PATH = 107


def socket_folder(below: int) -> str:
    """Return a folder for temporary files in which sockets can have paths of `below` more bytes: the usual one, or /tmp where
    TMPDIR is too long for that."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + below <= SOCKET_PATH else "/tmp"


@contextmanager
def replacing(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` to write to. At the end, it replaces `path`; after an error, it is removed.

    With `sync`, the content reaches the disk first, so that the file survives a power failure.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        yield part
        if sync:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, data: bytes | str, *, sync: bool = False) -> None:
    """Replace the content of `path`. Text is written as UTF-8; lone surrogates become escapes."""
    with replacing(path, sync=sync) as part:
        part.write_bytes(data.encode(errors="backslashreplace") if isinstance(data, str) else data)


def write_json(path: Path, value: Any, *, sync: bool = False) -> None:
    """Replace the content of `path` with `value` as indented JSON. Numbers that are not finite become null."""
    write_atomic(path, to_json(value, indent=2) + "\n", sync=sync)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return a record; None where there is none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def file_digest(path: Path, algorithm: Any = "sha256") -> str:
    """Return the hash of a file. `algorithm`: a name or a constructor of hashlib."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def point(link: Path, folder: Path) -> None:
    """Make `link` a symbolic link to its neighbour `folder`. Raises ValueError if `link` exists and is not a link."""
    if link.exists() and not link.is_symlink():
        raise ValueError(f"{link} is a folder of its own; choose another name, or move it away")
    part = link.with_name(f".{link.name}.{folder.name}")
    part.symlink_to(folder.name)
    os.replace(part, link)
