"""Show what an agent changed as a patch that `git apply` takes, binary files and permissions included.

Git compares two commits that are made for this in an empty repository of its own: no work tree, hook, attribute or setting of the
user's repository takes part.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

from composer_nb.harness.carry import Blob

_DIFF = ("diff", "--full-index", "--no-renames", "--no-color", "--no-ext-diff", "--no-textconv")


# Relative POSIX path -> the new file, or None for a deleted one.
Changes = Mapping[str, Blob | None]


def require_git() -> None:
    """Raise FileNotFoundError if this machine has no git."""
    if shutil.which("git") is None:
        raise FileNotFoundError("git: not found on this machine; install it to see the changes of an agent")


def patch(before: Mapping[str, Blob], changes: Changes, whole: bool = True) -> bytes:
    """Return a patch from `before` to the result of `changes`, which can be applied and reversed.

    `whole`: with the contents of binary files. Otherwise the patch is for reading alone: a binary file is described, and one that
    is mostly text is shown line by line, whatever NULs it has. Raises FileNotFoundError without git, and OSError if git fails.
    """
    if not changes:
        return b""
    require_git()
    with tempfile.TemporaryDirectory(prefix="composer_nb-diff-") as folder:
        alone = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "LC_ALL": "C"}
        alone |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_DIR": folder}

        def git(*words: str, stdin: bytes = b"") -> bytes:
            command = ["git", "-c", "core.quotePath=false", "-c", "core.protectNTFS=false", *words]
            process = subprocess.run(command, input=stdin, capture_output=True, env=alone, cwd=folder, check=False)
            if process.returncode:
                raise OSError(f"git {words[0]}: {process.stderr.decode('utf-8', 'replace').strip()[:500]}")
            return process.stdout

        git("init", "--quiet", "--bare", "--template=")
        old_files = {path: before[path] for path in changes if path in before}
        commits = [*_commit("old", old_files, whole), *_commit("new", changes, whole)]
        git("fast-import", "--quiet", stdin=b"".join(commits))
        return git(*_DIFF, "--binary" if whole else "--text", "old", "new", "--")


def _commit(name: str, files: Changes, whole: bool) -> Iterator[bytes]:
    """Yield a commit without parents as `git fast-import` reads it."""
    yield b"commit refs/heads/%b\ncommitter x <x> 0 +0000\ndata 0\n" % name.encode()
    for path, blob in files.items():
        if blob is not None:
            quoted = "".join(f"\\{byte:03o}" for byte in path.encode("utf-8", "surrogateescape")).encode()
            data = blob.data if whole or not blob.unreadable else _description(blob.data)
            yield b'M %b inline "%b"\ndata %d\n%b\n' % (blob.mode.encode(), quoted, len(data), data)


def _description(data: bytes) -> bytes:
    digest = hashlib.sha256(data).hexdigest()[:16].encode()
    return b"Binary file: %d bytes, SHA-256 %b..., which begin %a\n" % (len(data), digest, data[:64])
